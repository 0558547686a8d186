"""Wrong solutions of the exercises of chapter 11."""

SIZE = "math.ceil(4 * weights / bandwidth / (compute - read))"
STEP = "        for output in engine.step():"
SLEEP = "        time.sleep(max(0, start + arrivals[min(added, len(prompts) - 1)] - time.monotonic()))\n"

WRONG_1 = [
    ("one sequence too few", "math.ceil(", "math.floor("),
    ("one sequence too many", SIZE, SIZE + " + 1"),
    ("without the bytes of K/V", "context * kv_bytes / bandwidth", "0"),
    ("without the FLOP of attention", " + context * kv_flop", ""),
    ("two bytes a weight", "4 * weights / bandwidth", "2 * weights / bandwidth"),
    ("a number where there is none", "None if compute <= read else ", ""),
    ("the bytes of one sequence alone", "context * kv_bytes / bandwidth", "kv_bytes / bandwidth"),
    ("copied", "return None", "return {0: 16, 64: 19, 256: 36, 400: 109}.get(context)\n    return None"),
    ("K alone is read", "2 * 4 * 2 * 32 * 4,", "4 * 2 * 32 * 4,"),
]
WRONG_2 = [
    ("a closed batch", " and time.monotonic() - start >= arrivals[added]:", ":"),
    ("one request after another", "len(prompts) and time", "len(prompts) and len(done) == added and time"),
    ("one request a step", "while added < len(prompts) and", "if added < len(prompts) and"),
    ("planned is seen", "first_token_time - start - arrival for", "first_token_time - m.arrival_time for"),
    ("from the start, not from the arrival", "_time - start - arrival", "_time - start"),
    ("to the last token", "m.first_token_time - m.arrival_time", "m.finish_time - m.arrival_time"),
    ("both lists exchanged", "return seen, planned", "return planned, seen"),
    ("in the order of finishing, backwards", "in range(len(prompts))", "in reversed(range(len(prompts)))"),
    ("the start read too late", "    metrics = [", "    start = time.monotonic()\n    metrics = ["),
    ("sleeps until the next arrival while requests wait", STEP, SLEEP + STEP),
    ("ends when all are added", "while len(done) < len(prompts):", "while added < len(prompts):"),
    ("the first prompt again and again", "prompts[added], params", "prompts[0], params"),
]
WRONG_3 = [
    ("fewer sequences", '"64"', '"16"'),
    ("the token budget", '"--max-num-seqs", "64"', '"--budget", "512"'),
    ("a limit of a good request", '"--max-num-seqs", "64"', '"--first", "100"'),
    ("a faster machine", '"--max-num-seqs", "64"', '"--token", "0.1"'),
    ("fewer requests", '"--max-num-seqs", "64"', '"--requests", "50"'),
    ("shorter requests", '"--max-num-seqs", "64"', '"--tokens", "16", "64"'),
    ("two options", '"64"]', '"64", "--step", "10"]'),
    ("the default", '"64"', '"32"'),
    ("an option that does not exist", "--max-num-seqs", "--block-size"),
]
