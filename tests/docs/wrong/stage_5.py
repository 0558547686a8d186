"""Solutions of stage 5 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: append_slots empties its argument
replace("BlockManager.append_slots", "return copies", "sequences.clear()\n        return copies")
# wrong: the samples are popped
replace(
    "fork_samples",
    "for index, sample in enumerate(samples):",
    "for index in range(len(samples)):\n        sample = samples.pop(0)",
)
# wrong: at most eight writers are counted
replace("blocks_to_grow", "len(written) - len(set(written))", "min(7, len(written) - len(set(written)))")
