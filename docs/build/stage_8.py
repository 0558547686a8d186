"""Stage 8 of docs/build/rebuild.py."""

from stages import Stage

FILE = "nanopaged/kernels/paged_attention.py"

STAGE = Stage(
    title="the Triton kernels of a decode, interpreted",
    chapter="09-gpu.md",
    functions=((FILE, "decode_kernel"), (FILE, "reduce_kernel")),
    suite=(),  # the interpreter is slow, and the judge has the suite's cases in small
    hints=(
        "The two program ids are the split and the KV head. Row `split` of `splits_ptr` has three numbers: "
        "load the sequence, the first key and the end. In `reduce_kernel` the ids are the sequence and the "
        "query head. Begin with one split of each context, so that there is little to reduce.",
        "The pointer to a sequence's block table is tables_ptr + (its entry of `rows_ptr`) · table_row. A "
        "vector of positions gives a vector of blocks with one `tl.load`.",
        "A key begins at block · cache_block + offset · HEAD_DIM + kv_head · cache_head. Compute in int64. "
        "Add `[:, None]` and the dims to get the addresses of a tile of K, [TILE, DIM_PAD].",
        "Load with a mask and `other=0.0`: keys beyond `end`, dims beyond `HEAD_DIM`, heads beyond `GROUP`. "
        "Then set the scores of keys beyond `end` to -inf with `tl.where`. Store with a mask, too.",
        "The loop is that of stage 1, in base 2: `scale_log2` has the factor log2(e), so `tl.exp2` takes the "
        "place of exp. m and l have one entry for each query head, acc is [GROUP_PAD, DIM_PAD], all float32.",
        "In `reduce_kernel` the loop is the same, with splits in place of keys: an LSE is a score, an output "
        "is a value. Load -inf for an LSE beyond the sequence's last split and 0 for its output. Without "
        "splits l is 0: divide by 1.",
    ),
)
