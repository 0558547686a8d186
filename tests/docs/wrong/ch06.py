"""Wrong solutions of the exercises of chapter 6."""

ALLOCATE = """def pin(engine, prefix):
    holder = engine.prompts.make_request("pinned", [*prefix, 0], SamplingParams()).sequences[0]
    engine.block_manager.allocate([holder])
    return holder


def unused(engine, prefix):
"""
ASK_AGAIN = """def pin(engine, prefix):
    engine.add_request("pinned", [*prefix, 0], SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    return engine.prompts.make_request("unpin", [*prefix, 0], SamplingParams()).sequences[0]


def unused(engine, prefix):
"""

SHARE = "        engine.block_manager.share(block_id)\n"

WRONG_1 = [
    ("the block of the last token is looked up", "min(common, length - 1)", "min(common, length)"),
    ("tokens, not blocks", " // block_size * block_size", ""),
    ("a number of blocks", " // block_size * block_size", " // block_size"),
    ("rounded up", "min(common, length - 1) //", "-(-min(common, length - 1) // block_size) + 0 *"),
    ("one token too few", "min(common, length - 1)", "min(common - 1, length - 1)"),
    ("what is common is ignored", "min(common, length - 1)", "(length - 1)"),
]
WRONG_2 = [
    ("no reference", SHARE, ""),
    ("two references", SHARE, 2 * SHARE),
    ("nothing to unpin", "        holder.block_table.append(block_id)\n", ""),
    ("the last block is not looked up", "[*prefix, 0]", "prefix"),
    ("a block for the token that follows", "def pin(engine, prefix):\n", ALLOCATE),
    ("asks for it once more", "def pin(engine, prefix):\n", ASK_AGAIN),
]
