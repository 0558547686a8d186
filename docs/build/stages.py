"""The stages of docs/build/rebuild.py: what is to be written, what judges it, and hints."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = "nanopaged/attention"
BLOCKS = "nanopaged/block_manager.py"
SCHEDULER = "nanopaged/scheduler.py"
SWAP = "nanopaged/swap.py"
SAMPLER = "nanopaged/sampler.py"
KERNELS = "nanopaged/kernels/paged_attention.py"
MODEL = "nanopaged/model"
PARALLEL = "nanopaged/parallel.py"
RANDOM_RUNS = ("tests/engine/test_random_runs.py", "--random-runs", "10")


@dataclass(frozen=True)
class Stage:
    """A part of the engine to write.

    Fields:
        chapter: of the book, which explains it: a file of docs/book.
        functions: (file, dotted name) of each function that loses its body. One that the reader has written
            in an earlier stage is kept: this stage asks more of it.
        suite: arguments of pytest, from the root: the tests of the suite that judge it after judge_N.py.
        hints: in the order in which they are given.
    """

    title: str
    chapter: str
    functions: tuple[tuple[str, str], ...]
    suite: tuple[str, ...]
    hints: tuple[str, ...]


STAGES = {
    1: Stage(
        title="attention: gather, then attend; then block by block",
        chapter="05-attention.md",
        functions=(
            (f"{ATTENTION}/torch_backend.py", "gather_context"),
            (f"{ATTENTION}/torch_backend.py", "attend"),
            (f"{ATTENTION}/reference_backend.py", "reference_paged_attention"),
        ),
        suite=("tests/kernels/test_attention.py",),
        hints=(
            "Position p of a sequence lies in block `block_table[p // block_size]`, at offset p % "
            "`block_size`. `gather_context` is this rule for all positions at once: pick the blocks, then "
            "join them.",
            "The picked blocks are [..., blocks, num_kv_heads, block_size, head_dim]. Blocks and slots "
            "become one dimension when they lie side by side: `transpose`, `flatten`, and cut at `num_keys` "
            "last.",
            "`attend` is q kᵀ, `score_mod`, the mask, softmax, times v. The mask replaces scores by -inf "
            "(`masked_fill`) where `keys > queries`. Shapes broadcast over all dimensions before the last "
            "two.",
            "The loop over blocks keeps m, l and acc for each query head. For each block: its scores, the "
            "new maximum, exp(score - new maximum), and the factor exp(old maximum - new maximum) for l "
            "*and* acc.",
            "If a `score_mod` masks a whole block, the maximum stays -inf, and -inf - -inf is NaN. Begin "
            "with the lowest finite number (`torch.finfo`) instead of -inf. Sum in float32 also when q is "
            "float16.",
        ),
    ),
    2: Stage(
        title="blocks: take, share, release, allocate, grow",
        chapter="03-blocks.md",
        functions=(
            (BLOCKS, "BlockManager.take"),
            (BLOCKS, "BlockManager.share"),
            (BLOCKS, "BlockManager.release"),
            (BLOCKS, "BlockManager.allocate"),
            (BLOCKS, "BlockManager.append_slots"),
            (BLOCKS, "BlockManager.trim"),
        ),
        suite=(),  # it asks for one sequence and no cache: the judge serves what the suite does not
        hints=(
            "`free_ids` is a stack: `pop` and `append` work at its end. `blocks[block_id]` is the block "
            "itself.",
            "`release` has three cases: no reference (an error), one (the block becomes free or cached), "
            "more.",
            "A block without references goes to `free_ids` if its key is None, and into `cached` if it has "
            "one. `share` takes a cached block out of `cached` again.",
            "Count before you take. `allocate` and `append_slots` compare the blocks that they need with "
            "`num_free_blocks` first, so when they refuse, there is nothing to undo.",
            "`append_slots` needs as many new blocks as the tokens need and the table lacks: often none, "
            "mostly one, several if a request was swapped out in the middle of its prompt.",
            "In `trim` 0 tokens and None differ: `is None` tells them apart. Release from the end of the "
            "table.",
        ),
    ),
    3: Stage(
        title="the scheduler's one rule",
        chapter="04-scheduling.md",
        functions=(
            (SCHEDULER, "Scheduler._schedule_tokens"),
            (SCHEDULER, "Scheduler.schedule"),
        ),
        suite=("tests/engine/test_swap.py", *RANDOM_RUNS),
        hints=(
            "`_schedule_tokens` is a loop over `request.live`. What a sequence gets is the smaller of two "
            "numbers: the tokens that it has not computed, and what is left of the budget.",
            "A sequence that waits makes its siblings after it wait, too. So the loop ends at the first one "
            "that gets less than it wants because of the budget; without chunked prefill such a one gets "
            "nothing.",
            "A block becomes full in this step if the number of full blocks before it, computed // "
            "block_size, is smaller than after it, (computed + scheduled) // block_size. Then call "
            "`publish`.",
            "`schedule` has two loops, both while budget is left. The first goes over `self.running` with "
            "an index: the list can become shorter at its end while you are in it.",
            "In the first loop, try `append_slots`. On None, pop the last running request, preempt it, and "
            "try the same request again. The loop ends by itself if the popped request was that one.",
            "The second loop goes over `self.waiting`. Leave it if the limit of sequences would be passed "
            "or `_admit` returns False. Then take the admitted requests, the first of the list, out of "
            "`waiting`.",
        ),
    ),
    4: Stage(
        title="the prefix cache: keys, hits, eviction",
        chapter="06-prefix-cache.md",
        functions=(
            (BLOCKS, "BlockManager.keys_of"),
            (BLOCKS, "BlockManager.find_prefix"),
            (BLOCKS, "BlockManager.publish"),
            (BLOCKS, "BlockManager.allocate"),
            (BLOCKS, "BlockManager.take"),
        ),
        suite=(
            "tests/engine/test_block_manager.py",
            "tests/engine/test_scheduler.py",
            "tests/engine/test_swap.py",
        ),
        hints=(
            'Begin with `keys_of`. `array("q", token_ids).tobytes()` are the tokens of a block as bytes, '
            "and `sha256(key).digest()` is the hash of a key. Append to `seq.block_keys` what it lacks, and "
            "return its beginning.",
            "`find_prefix` never looks at the block of the last token: of n tokens it asks for (n - 1) // "
            "`block_size` keys. `publish` asks for the keys up to the end of what this step computes, and "
            "sets those of the blocks that it fills.",
            "Eviction in `take` undoes a publication: the block leaves `cached` and `index`, and loses its "
            "key. `popitem(last=False)` of an `OrderedDict` gives the oldest entry.",
            "`allocate` in three parts: count, share all that is found, take the rest. Taking may evict, so "
            "nothing that was found may be without a reference by then.",
            "How many of `num_free_blocks` does `allocate` need? One for each sequence (its last), one for "
            "each different key that is not found, and one for each found block that is cached: it counts "
            "as free until it is shared.",
            "For several sequences keep a dictionary from a key to the block that an earlier one of them "
            "took. A key that is in it is shared, and its tokens count as computed.",
        ),
    ),
    5: Stage(
        title="forks and copy-on-write",
        chapter="07-sharing.md",
        functions=(
            (BLOCKS, "BlockManager.fork"),
            (BLOCKS, "BlockManager.append_slots"),
            (BLOCKS, "blocks_to_grow"),
            ("nanopaged/beam_search.py", "fork_samples"),
        ),
        suite=("tests/engine/test_block_manager.py", "tests/engine/test_sharing.py", *RANDOM_RUNS),
        hints=(
            "`parent.copy_tokens(index)` makes a sequence with the same tokens and no blocks. The fork "
            "needs three things more: a reference to each block, a table of its own, and "
            "`num_computed_tokens`.",
            "The newest token is written into the logical block `(num_tokens - 1) // block_size`. If the "
            "table has it, the question is whether a sibling's table has the same block; if not, new ones "
            "are needed.",
            "In `blocks_to_grow` list the block of each sequence's newest token. Where a block stands n "
            "times in the list, n - 1 copies are made: the length of the list minus the number of different "
            "blocks.",
            "In `append_slots` go through the sequences in order. To copy is: take a block, put it into the "
            "table in the place of the shared one, release that one. The last writer then finds one "
            "reference.",
            "Two sequences of `append_slots` need nothing: one with a free slot in a block of its own, and "
            "a beam with all its tokens computed (`num_computed_tokens == num_tokens`): it waits for its "
            "siblings.",
            "`fork_samples` makes all forks and gives them their samples with `append`, then frees the "
            "parent. It changes the request last: `sequences` has all siblings, `live` those that have not "
            "finished.",
        ),
    ),
    6: Stage(
        title="preemption and swapping",
        chapter="08-preemption.md",
        functions=(
            (SCHEDULER, "Scheduler._preempt"),
            (SWAP, "Swapper.swap_out"),
            (SWAP, "Swapper.swap_in"),
            (SWAP, "Swapper.release"),
            ("nanopaged/kv_cache.py", "KVCache.move_blocks"),
        ),
        suite=("tests/engine/test_swap.py", "tests/engine/test_scheduler.py", *RANDOM_RUNS),
        hints=(
            "`move_blocks` is three loops of `copy_`, over `moves.swap_out`, `moves.swap_in` and "
            "`moves.copies`: `self.host[i]` and `self.data[i]` are whole blocks. (The source makes all "
            "copies on write together, by index.)",
            "`swap_out`: collect the device blocks of all sequences that have computed tokens, each once, "
            "and compare their number with `free_ids` before you change anything.",
            "A `host_table` has the host block of each block of the `block_table` that moved, also if only "
            "a sibling has computed tokens in it. Then `trim(seq, 0)` gives all blocks back: `free` would "
            "also forget that tokens are computed.",
            "`swap_in` needs a device block for each distinct host block, and those of `blocks_to_grow` for "
            "the newest tokens. `num_reserved` more must be free.",
            "`take` gives a block its first reference. Each further table that names it needs a `share`. "
            "The last line of `swap_in` is `self.release(request)`: the host blocks are free, each once.",
            'In `_preempt`, `swap_out` may return None even if the mode is "swap". Only a request that is '
            "computed again loses the `candidates` of its beams. `insort_left` inserts before equal ranks.",
        ),
    ),
    7: Stage(
        title="sampling: filters, a draw, the next token",
        chapter="02-one-request.md",
        functions=(
            (SAMPLER, "filtered_probs"),
            (SAMPLER, "draw_tokens"),
            (SAMPLER, "sample"),
        ),
        suite=("tests/engine/test_sampler.py",),
        hints=(
            "Each filter finds a threshold for each row, and drops what lies below it. So ties are kept or "
            "dropped together, and the order of a sort does not matter.",
            "Top-k: the k-th largest logit of a row is its threshold, if k is less than the vocabulary. "
            "Logits below it become -inf *before* the softmax, so top-p and min-p see the probabilities of "
            "the rest.",
            "Top-p: sort a row's probabilities in rising order and take cumulative sums. Those whose sum is "
            "at most 1 - top_p are dropped; the next one is the threshold. Rows with top_p = 1 stay as they "
            "are.",
            "A draw: the first token whose cumulative sum is *greater* than u · total. A token of "
            "probability 0 does not raise the sum, so it is never the first. In float32 the last sum and "
            "the total may differ: add in float64, and take the last cumulative sum as the total.",
            "`sample` keeps two tensors: the model's own log-probabilities, which are returned, and the "
            "allowed scores, after `penalize` and the bans, from which it chooses. `gather_logprobs` takes "
            "both.",
            "If `metadata.all_greedy` is true, the metadata has no filters: take the argmax. Otherwise draw "
            "for all rows, and put the argmax where `is_greedy` is set.",
        ),
    ),
    8: Stage(
        title="the Triton kernels of a decode, interpreted",
        chapter="09-gpu.md",
        functions=(
            (KERNELS, "decode_kernel"),
            (KERNELS, "reduce_kernel"),
        ),
        suite=(),  # the interpreter is slow, and the judge has the suite's cases in small
        hints=(
            "The two program ids are the split and the KV head. Row `split` of `splits_ptr` has three "
            "numbers: load the sequence, the first key and the end. In `reduce_kernel` the ids are the "
            "sequence and the query head. Begin with one split of each context, so that there is little to "
            "reduce.",
            "The pointer to a sequence's block table is tables_ptr + (its entry of `rows_ptr`) · table_row. "
            "A vector of positions gives a vector of blocks with one `tl.load`.",
            "A key begins at block · cache_block + offset · HEAD_DIM + kv_head · cache_head. Compute in "
            "int64. Add `[:, None]` and the dims to get the addresses of a tile of K, [TILE, DIM_PAD].",
            "Load with a mask and `other=0.0`: keys beyond `end`, dims beyond `HEAD_DIM`, heads beyond "
            "`GROUP`. Then set the scores of keys beyond `end` to -inf with `tl.where`. Store with a mask, "
            "too.",
            "The loop is that of stage 1, in base 2: `scale_log2` has the factor log2(e), so `tl.exp2` "
            "takes the place of exp. m and l have one entry for each query head, acc is [GROUP_PAD, "
            "DIM_PAD], all float32.",
            "In `reduce_kernel` the loop is the same, with splits in place of keys: an LSE is a score, an "
            "output is a value. Load -inf for an LSE beyond the sequence's last split and 0 for its output. "
            "Without splits l is 0: divide by 1.",
        ),
    ),
    9: Stage(
        title="tensor parallelism: a share of each layer",
        chapter="10-parallel.md",
        functions=(
            (f"{MODEL}/model_config.py", "ModelConfig.share"),
            (f"{MODEL}/checkpoint.py", "_share"),
            (PARALLEL, "Ranks.all_reduce"),
            (PARALLEL, "Ranks.gather"),
            (f"{MODEL}/decoder.py", "Linear.forward"),
            (f"{MODEL}/decoder.py", "Model._embed_share"),
            (f"{MODEL}/decoder.py", "Model.logits"),
        ),
        suite=(),  # the judge runs real processes, as test_parallel.py does; more would take long
        hints=(
            "`ModelConfig.share`: heads, columns and the vocabulary (rounded up) are divided by `size`. "
            "With more ranks than KV heads each rank has one of them. `replace` makes the new config.",
            "In `_share` compare each dimension of the whole weight with that of the slot: equal means all "
            "of it. Otherwise only the first index is to be found, and it depends on the rank.",
            "For the vocabulary the first row is rank · rows of the slot. Any other weight has num = total "
            "// mine different parts, and ranks side by side may have the same one: part rank · num // "
            "size.",
            "`Linear.forward` ends with the all-reduce, if the layer has `ranks`. Layers divided by rows "
            "have none: their outputs stay where they are.",
            "`_embed_share` must not look up a row that this rank does not have: look up row 0 in its "
            "place, and make these results 0 (`masked_fill_`).",
            "`gather`: on rank 0 `dist.gather` wants [t0, t1, …], `size` empty tensors, and elsewhere []. "
            "Or all-reduce zeros in which each rank has filled its own columns.",
        ),
    ),
}
