"""Wrong solutions of the exercises of chapter 6."""

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
    ("rounded up", "min(common, length - 1) //", "-(-min(common, length - 1) // block_size) + 0 *"),
]
WRONG_2 = [
    ("the last token is found, too", "min(found, len(prompt) - 1)", "found"),
    ("tokens at any place", "node = node.setdefault(token_id, {})", "node.setdefault(token_id, {})"),
    ("only whole prompts", "total += min(found, len(prompt) - 1)", "total += found == len(prompt)"),
]
WRONG_3 = [
    ("two references", SHARE, 2 * SHARE),
    ("nothing to unpin", "        holder.block_table.append(block_id)\n", ""),
    ("asks for it once more", "def pin(engine, prefix):\n", ASK_AGAIN),
]
