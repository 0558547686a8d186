"""Wrong solutions of the exercises of chapter 4."""

AGED = "request.num_prompt_tokens + arrived[request.request_id]"
NAMES = "for name in prompts or to_compute"
BEGIN = "    to_compute, decoding, steps = {}, set(), []\n"

WRONG_1 = [
    ("waiting ones first", "[*running, *waiting]", "[*waiting, *running]"),
    ("prompts only whole", "if rest == 0", "if running and waiting.get(name, [0])[0] > rest or rest == 0"),
    ("a budget for each request", "min(running[name][0], rest)", "min(running[name][0], budget)"),
    ("one sequence too many", "len(running) == max_num_seqs", "len(running) == max_num_seqs + 1"),
    ("no limit of sequences", "(name in waiting and len(running) == max_num_seqs)", "False"),
    ("a token after each chunk", "num_tokens, to_generate\n", "num_tokens + 1, to_generate - 1\n"),
]
WRONG_2 = [
    ("order of arrival", "request.num_prompt_tokens + arrived", "arrived"),
    ("shortest first", AGED, "request.num_prompt_tokens"),
    ("longest first", "request.num_prompt_tokens + arrived", "-request.num_prompt_tokens + arrived"),
    ("latest first", "+ arrived", "- arrived"),
    ("ages too slowly", "+ arrived[request.request_id]", "+ 0.2 * arrived[request.request_id]"),
    ("ages too fast", "+ arrived[request.request_id]", "+ 3 * arrived[request.request_id]"),
]
WRONG_3 = [
    ("empty steps", BEGIN, "    return [{} for _ in range(num_steps)]\n" + BEGIN),
    ("decodes first", "prompts or to_compute", "sorted(to_compute, key=lambda name: name not in decoding)"),
    ("both in a step", NAMES, "for name in [*prompts, *decoding]"),
    ("prompts whole, without a budget", "min(to_compute[name], rest)", "to_compute[name]"),
    ("one prompt a step", NAMES, "for name in prompts[:1] or to_compute"),
    ("the newest prompt first", NAMES, "for name in prompts[::-1] or to_compute"),
]
