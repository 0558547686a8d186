"""Wrong solutions of the exercises of chapter 7."""

ENGINE = """from nanopaged import BeamSearchParams


def beams_on_top(llm, prompt, width, num_tokens):
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.beam_search([prompt], params, use_tqdm=False)
    return [beam.token_ids for beam in output.outputs]


def unused(llm, prompt, width, num_tokens):
"""
DEF = "def beams_on_top(llm, prompt, width, num_tokens):\n"
SORTED = "sorted(candidates, key=lambda candidate: candidate[0], reverse=True)[:width]"
MISCOUNT = "block.ref_count != entries[block.block_id]"
BLOCKS = "num_tokens // block_size + n"
FILTER = "manager.blocks if"

WRONG_1 = [
    ("full blocks are copied, too", "(n - 1) * has_partial", "n - 1"),
    ("one copy for all", "(n - 1) * has_partial", "int(has_partial and n > 1)"),
    ("the original stays beside the copies", BLOCKS, "-(-num_tokens // block_size) + n"),
]
WRONG_2 = [
    ("only counts that are too large", MISCOUNT, "block.ref_count > entries[block.block_id]"),
    ("only blocks in a table", FILTER, f"{FILTER} block.block_id in entries and"),
    ("only blocks in no table", "manager.blocks if", "manager.blocks if block.block_id not in entries and"),
]
WRONG_3 = [
    ("the engine's own search", DEF, ENGINE),
    ("the last token's log-probability alone", "so_far + entry.logprob", "entry.logprob"),
    ("the first candidates, not the best", SORTED, "candidates[:width]"),
]
