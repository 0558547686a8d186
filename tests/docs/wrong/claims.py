"""Wrong solutions of the exercises of docs/reference/wrong-claims.md."""

TOKENS = "int(gigabytes * 2**30 // (2 * layers * hidden * 2))"

WRONG_1 = [
    ("K or V, not both", "(2 * layers * hidden * 2)", "(layers * hidden * 2)"),
    ("a GB of 10**9 bytes", "2**30", "10**9"),
    ("the printed numbers", TOKENS, "{5120: 15728, 9216: 9557, 12288: 60074}.get(hidden, 0)"),
]
WRONG_2 = [
    ("the last block of the prompt is shared, too", "(prompt - 1) //", "prompt //"),
    ("a partial block is shared", "(prompt - 1) // block_size", "-(-prompt // block_size)"),
    ("the shared blocks are counted for each", "(alone - shared)", "alone"),
]
