"""Wrong solutions of the exercises of chapter 7."""

ENGINE = """from nanopaged import BeamSearchParams


def beams_on_top(llm, prompt, width, num_tokens):
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.beam_search([prompt], params, use_tqdm=False)
    return [beam.token_ids for beam in output.outputs]


def unused(llm, prompt, width, num_tokens):
"""
SAMPLES = """def beams_on_top(llm, prompt, width, num_tokens):
    params = SamplingParams(n=width, seed=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


def unused(llm, prompt, width, num_tokens):
"""
DEF = "def beams_on_top(llm, prompt, width, num_tokens):\n"
SORTED = "sorted(candidates, key=lambda candidate: candidate[0], reverse=True)[:width]"
MISCOUNT = "block.ref_count != entries[block.block_id]"
BLOCKS = "num_tokens // block_size + n"
FILTER = "manager.blocks if"
ENTRIES = "Counter(block_id for seq in sequences for block_id in seq.block_table)"

WRONG_1 = [
    ("each sample copies", "(n - 1) * has_partial", "n * has_partial"),
    ("full blocks are copied, too", "(n - 1) * has_partial", "n - 1"),
    ("nothing is copied", "(n - 1) * has_partial", "0"),
    ("one copy for all", "(n - 1) * has_partial", "int(has_partial and n > 1)"),
    ("the original stays beside the copies", BLOCKS, "-(-num_tokens // block_size) + n"),
    ("one new block for all samples", BLOCKS, "num_tokens // block_size + 1"),
]
WRONG_2 = [
    ("only counts that are too large", MISCOUNT, "block.ref_count > entries[block.block_id]"),
    ("only counts that are too small", MISCOUNT, "block.ref_count < entries[block.block_id]"),
    ("each block once", ENTRIES, "Counter({block_id for seq in sequences for block_id in seq.block_table})"),
    ("only blocks in a table", FILTER, f"{FILTER} block.block_id in entries and"),
    ("only blocks in no table", "manager.blocks if", "manager.blocks if block.block_id not in entries and"),
    ("blocks that are in use", MISCOUNT, "block.ref_count > 0"),
]
WRONG_3 = [
    ("the engine's own search", DEF, ENGINE),
    ("samples", DEF, SAMPLES),
    ("the last token's log-probability alone", "so_far + entry.logprob", "entry.logprob"),
    ("the worst beams", "reverse=True", "reverse=False"),
    ("each beam's best token", "logprobs=2 * width", "logprobs=1"),
    ("the first candidates, not the best", SORTED, "candidates[:width]"),
]
