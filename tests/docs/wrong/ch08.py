"""Wrong solutions of the exercises of chapter 8."""

MOVED = "shared + n * (each - shared)"
RANK = "-max(seq.num_computed_tokens for seq in request.live)"
COPIES = "copies_per_block * 10e-6 / block_size"
BYTES = "131072 / 50e9"

WRONG_1 = [
    ("a shared block once for each sample", MOVED, "n * each"),
    ("the blocks of one sample", MOVED, "each"),
    ("only what is shared, and one block each", MOVED, "shared + n"),
    ("the end of the prompt is shared, too", "num_prompt // block_size", "-(-num_prompt // block_size)"),
    ("only full blocks", "-(-num_computed // block_size)", "num_computed // block_size"),
    ("a block for the token that is not computed", "-(-num_computed", "-(-(num_computed + 1)"),
    ("the host tables of distinct blocks", "n * each", "shared + n * (each - shared)"),
    ("the table of one sample", ", n * each", ", each"),
    ("the numbers of the example", f"{MOVED}, n * each", "8, 12"),
]
WRONG_2 = [
    ("one way", "2 * 1e6 * (copies", "1e6 * (copies"),
    ("the start of a copy for each token", COPIES, "copies_per_block * 10e-6"),
    ("one copy for a block", COPIES, "10e-6 / block_size"),
    ("the bytes of a block", BYTES, f"block_size * {BYTES}"),
    ("bits", BYTES, f"8 * {BYTES}"),
    ("the bytes of a layer", BYTES, "131072 / 32 / 50e9"),
    ("milliseconds", "2 * 1e6 * (copies", "2 * 1e3 * (copies"),
    ("one operation for each weight", "1e6 * 2 * 6.98e9", "1e6 * 6.98e9"),
    ("one layer's weights", "6.98e9", "6.98e9 / 32"),
    ("64 copies for both", "layer_major, block_major = 64, 1", "layer_major, block_major = 64, 64"),
    ("half of the block", "layer_major, block_major = 64, 1", "layer_major, block_major = 32, 1"),
    ("not the smallest", "layer_major, block_major = 64, 1", "layer_major, block_major = 128, 1"),
    ("the layouts exchanged", "layer_major, block_major = 64, 1", "layer_major, block_major = 1, 64"),
    ("no numbers", "layer_major, block_major = 64, 1", "layer_major, block_major = None, None"),
]
WRONG_3 = [
    ("the victim has computed most", RANK, RANK.removeprefix("-")),
    ("the latest is the victim", RANK, "request.arrival_time"),
    ("the victim has the shortest output", RANK, "-request.live[0].num_output_tokens"),
    ("the victim has the shortest prompt", RANK, "-request.num_prompt_tokens"),
    ("the victim has the longest prompt", RANK, "request.num_prompt_tokens"),
    ("the victim has the most left", RANK, "request.stop_rules.max_length - request.live[0].num_tokens"),
    ("the victim was preempted least", RANK, "-request.num_preemptions"),
    ("the victim has the fewest blocks", RANK, "-len(request.live[0].block_table)"),
    ("as with first come, first served", "preempted = 53", "preempted = 0"),
    ("all preemptions", "preempted = 53", "preempted = sum(replay(i, rank)[0] for i in range(100))"),
    ("wasted tokens", "preempted = 53", "preempted = 84"),
    ("no number", "preempted = 53", "preempted = None"),
]
