"""Wrong solutions of the exercises of chapter 11."""

SIZE = "math.ceil(4 * weights / bandwidth / (compute - read))"

WRONG_1 = [
    ("one sequence too few", "math.ceil(", "math.floor("),
    ("one sequence too many", SIZE, SIZE + " + 1"),
    ("without the bytes of K/V", "context * kv_bytes / bandwidth", "0"),
    ("without the FLOP of attention", " + context * kv_flop", ""),
    ("two bytes a weight", "4 * weights / bandwidth", "2 * weights / bandwidth"),
    ("a number where there is none", "None if compute <= read else ", ""),
]
WRONG_2 = [
    ("a closed batch", " and time.monotonic() - start >= arrivals[added]:", ":"),
    ("one request after another", "len(prompts) and time", "len(prompts) and len(done) == added and time"),
    ("one request a step", "while added < len(prompts) and", "if added < len(prompts) and"),
    ("planned is seen", "first_token_time - start - arrival for", "first_token_time - m.arrival_time for"),
    ("from the start, not from the arrival", "_time - start - arrival", "_time - start"),
    ("to the last token", "m.first_token_time - m.arrival_time", "m.finish_time - m.arrival_time"),
]
WRONG_3 = [
    ("fewer sequences", '"64"', '"16"'),
    ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
    ("a limit of a good request", '"--max-num-seqs", "64"', '"--first", "100"'),
    ("a faster machine", '"--max-num-seqs", "64"', '"--token", "0.1"'),
    ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ("shorter requests", '"--max-num-seqs", "64"', '"--tokens", "16", "64"'),
]
