"""Wrong solutions of the exercise of chapter 0."""

WRONG = {
    "00_1": [
        ("K/V of the last token", "num_prompt + max_tokens - 1", "num_prompt + max_tokens"),
        (
            "all tokens in one row",
            "sum(-(-(num_prompt + max_tokens - 1) // block_size) for num_prompt in lengths)",
            "-(-sum(n + max_tokens - 1 for n in lengths) // block_size)",
        ),
        ("the prompts alone", "num_prompt + max_tokens - 1", "num_prompt"),
        (
            "a block more for each request",
            "-(-(num_prompt + max_tokens - 1) // block_size)",
            "((num_prompt + max_tokens - 1) // block_size + 1)",
        ),
        ("the number of the example", "return sum", "return 13 if True else sum"),
    ]
}
