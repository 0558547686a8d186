"""Wrong solutions of the exercises of docs/reference/wrong-claims.md."""

WRONG_1 = [
    ("the last block of the prompt is shared, too", "(prompt - 1) //", "prompt //"),
    ("a tenth", "return shared + num_requests * (alone - shared)", "return alone"),
    ("nothing is shared", "(prompt - 1) // block_size", "0"),
    ("a partial block is shared", "(prompt - 1) // block_size", "-(-prompt // block_size)"),
    ("the last token is stored", "output - 1", "output"),
    ("the shared blocks are counted for each", "(alone - shared)", "alone"),
]
