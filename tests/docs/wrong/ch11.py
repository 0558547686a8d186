"""Wrong solutions of the exercise of chapter 11."""

WRONG_1 = [
    ("fewer sequences", '"64"', '"16"'),
    ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
    ("a limit of a good request", '"--max-num-seqs", "64"', '"--first", "100"'),
    ("a faster machine", '"--max-num-seqs", "64"', '"--token", "0.1"'),
    ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ("shorter requests", '"--max-num-seqs", "64"', '"--tokens", "16", "64"'),
]
