"""Wrong solutions of the exercises of chapter 8."""

MOVED = "shared + n * (each - shared)"
RANK = "-max(seq.num_computed_tokens for seq in request.live)"
COPIES = "copies_per_block * 10e-6 / block_size"
BYTES = "131072 / 50e9"

WRONG_1 = [
    ("only what is shared, and one block each", MOVED, "shared + n"),
    ("the end of the prompt is shared, too", "num_prompt // block_size", "-(-num_prompt // block_size)"),
    ("a block for the token that is not computed", "-(-num_computed", "-(-(num_computed + 1)"),
]
WRONG_2 = [
    ("one way", "2 * 1e6 * (copies", "1e6 * (copies"),
    ("the start of a copy for each token", COPIES, "copies_per_block * 10e-6"),
    ("the bytes of a block", BYTES, f"block_size * {BYTES}"),
]
WRONG_3 = [
    ("the latest is the victim", RANK, "request.arrival_time"),
    ("the victim has the shortest output", RANK, "-request.live[0].num_output_tokens"),
    ("the victim has the most left", RANK, "request.stop_rules.max_length - request.live[0].num_tokens"),
]
