"""Wrong solutions of the exercises of chapter 8."""

MOVED = "shared + n * (each - shared)"
COPIES = "copies_per_block * 10e-6 / block_size"
BYTES = "131072 / 50e9"

WRONG_1 = [
    ("a shared block once for each sample", MOVED, "n * each"),
    ("the blocks of one sample", MOVED, "each"),
    ("only what is shared, and one block each", MOVED, "shared + n"),
    ("the end of the prompt is shared, too", "num_prompt // block_size", "-(-num_prompt // block_size)"),
    ("only full blocks", "-(-num_computed // block_size)", "num_computed // block_size"),
    ("a block for the token that is not computed", "-(-num_computed", "-(-(num_computed + 1)"),
]
WRONG_2 = [
    ("one way", "2 * 1e6 * (copies", "1e6 * (copies"),
    ("the start of a copy for each token", COPIES, "copies_per_block * 10e-6"),
    ("one copy for a block", COPIES, "10e-6 / block_size"),
    ("the bytes of a block", BYTES, f"block_size * {BYTES}"),
    ("bits", BYTES, f"8 * {BYTES}"),
    ("the bytes of a layer", BYTES, "131072 / 32 / 50e9"),
]
