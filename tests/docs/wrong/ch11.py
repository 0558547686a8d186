"""Wrong solutions of the exercise of chapter 11."""

WRONG_1 = [
    ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
    ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ("shorter requests", '"--max-num-seqs", "64"', '"--tokens", "16", "64"'),
]
