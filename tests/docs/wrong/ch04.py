"""Wrong solutions of the exercises of chapter 4."""

AGED = "request.num_prompt_tokens + arrived[request.request_id]"

WRONG_1 = [
    ("prompts only whole", "if rest == 0", "if running and waiting.get(name, [0])[0] > rest or rest == 0"),
    ("a budget for each request", "min(running[name][0], rest)", "min(running[name][0], budget)"),
    ("a token after each chunk", "num_tokens, to_generate\n", "num_tokens + 1, to_generate - 1\n"),
]
WRONG_2 = [
    ("shortest first", AGED, "request.num_prompt_tokens"),
    ("ages too slowly", "+ arrived[request.request_id]", "+ 0.2 * arrived[request.request_id]"),
    ("ages too fast", "+ arrived[request.request_id]", "+ 3 * arrived[request.request_id]"),
]
