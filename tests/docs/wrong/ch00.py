"""Wrong solutions of the exercise of chapter 0."""

BLOCKS = "-(-(num_prompt + max_tokens - 1) // block_size)"
ALL = f"sum({BLOCKS} for num_prompt in lengths)"

WRONG_1 = [
    ("K/V of the last token", "num_prompt + max_tokens - 1", "num_prompt + max_tokens"),
    ("all tokens in one row", ALL, "-(-sum(n + max_tokens - 1 for n in lengths) // block_size)"),
    ("the number of the example", "return sum", "return 13 if True else sum"),
]
