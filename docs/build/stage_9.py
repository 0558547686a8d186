"""Stage 9 of docs/build/rebuild.py."""

from stages import Stage

FOLDER = "nanopaged/model"

STAGE = Stage(
    title="tensor parallelism: a share of each layer",
    chapter="10-parallel.md",
    functions=(
        (f"{FOLDER}/model_config.py", "ModelConfig.share"),
        (f"{FOLDER}/checkpoint.py", "_share"),
        ("nanopaged/parallel.py", "Ranks.all_reduce"),
        ("nanopaged/parallel.py", "Ranks.gather"),
        (f"{FOLDER}/decoder.py", "Linear.forward"),
        (f"{FOLDER}/decoder.py", "Model._embed_share"),
        (f"{FOLDER}/decoder.py", "Model.logits"),
    ),
    suite=(),  # the judge runs real processes, as test_parallel.py does; more would take long
    hints=(
        "`ModelConfig.share`: heads, columns and the vocabulary (rounded up) are divided by `size`. With "
        "more ranks than KV heads each rank has one of them. `replace` makes the new config.",
        "In `_share` compare each dimension of the whole weight with that of the slot: equal means all of "
        "it. Otherwise only the first index is to be found, and it depends on the rank.",
        "For the vocabulary the first row is rank · rows of the slot. Any other weight has num = total // "
        "mine different parts, and ranks side by side may have the same one: part rank · num // size.",
        "`Linear.forward` ends with the all-reduce, if the layer has `ranks`. Layers divided by rows have "
        "none: their outputs stay where they are.",
        "`_embed_share` must not look up a row that this rank does not have: look up row 0 in its place, and "
        "make these results 0 (`masked_fill_`).",
        "`gather`: on rank 0 `dist.gather` wants [t0, t1, …], `size` empty tensors, and elsewhere []. Or "
        "all-reduce zeros in which each rank has filled its own columns.",
    ),
)
