"""Wrong solutions of the exercises of chapter 11."""

SIZE = "math.ceil(4 * weights / bandwidth / (compute - read))"

WRONG_1 = [
    ("one sequence too many", SIZE, SIZE + " + 1"),
    ("without the FLOP of attention", " + context * kv_flop", ""),
    ("a number where there is none", "None if compute <= read else ", ""),
]
WRONG_2 = [
    ("a closed batch", " and time.monotonic() - start >= arrivals[added]:", ":"),
    ("one request a step", "while added < len(prompts) and", "if added < len(prompts) and"),
    ("from the start, not from the arrival", "_time - start - arrival", "_time - start"),
]
WRONG_3 = [
    ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
    ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ("shorter requests", '"--max-num-seqs", "64"', '"--tokens", "16", "64"'),
]
