"""Solutions of the stages of docs/build: the source's functions with pieces of their text replaced.

A title → (function, piece, replacement), for each stage. A piece may stand in a function several times.
"""

Pieces = list[tuple[str, str, str]]

WRONG: dict[int, dict[str, Pieces]] = {
    1: {
        "the maximum begins at -1000": [
            ("reference_paged_attention", "torch.finfo(torch.float32).min", "-1000.0")
        ],
        "the block table is emptied": [
            ("reference_paged_attention", "block_table[start // block_size]", "block_table.pop(0)")
        ],
        "q is scaled in place": [("reference_paged_attention", "scale * queries", "queries.mul_(scale)")],
    },
    2: {
        "it compares with the length of free_ids": [
            ("BlockManager.append_slots", "> self.num_free_blocks", "> len(self.free_ids)")
        ],
        "share empties cached": [("BlockManager.share", "del self.cached[block_id]", "self.cached.clear()")],
        "take copies the list": [
            (
                "BlockManager.take",
                "if not self.free_ids:",
                "self.free_ids = self.free_ids[:]\n        if not self.free_ids:",
            )
        ],
        "the blocks are given back from the beginning": [
            ("BlockManager.trim", "seq.block_table.pop()", "seq.block_table.pop(num_kept)")
        ],
        "a loop without an end": [
            ("BlockManager.trim", "self.release(seq.block_table.pop())", "while True: pass")
        ],
    },
    3: {
        "at most two victims in a step": [
            ("Scheduler.schedule", "if copies is None:", "if copies is None and len(batch.preempted) < 2:"),
            ("Scheduler.schedule", "batch.moves.copies += copies", "batch.moves.copies += copies or []"),
        ],
        "chunked prefill is switched off for good": [
            (
                "Scheduler.schedule",
                "        return batch",
                "        self.enable_chunked_prefill &= len(self.waiting) < 5\n        return batch",
            )
        ],
        "a waiting request overtakes": [
            (
                "Scheduler.schedule",
                "request = self.waiting[0]",
                "request = min(self.waiting, key=lambda each: each.num_prompt_tokens)",
            ),
            ("Scheduler.schedule", "self.waiting.pop(0)", "self.waiting.remove(request)"),
        ],
        "the first running request is preempted": [
            ("Scheduler.schedule", "self.running.pop()", "self.running.pop(0)")
        ],
        "published before num_scheduled_tokens is set": [
            (
                "Scheduler._schedule_tokens",
                "seq.num_scheduled_tokens = num_tokens",
                "self.block_manager.publish(seq)\n            seq.num_scheduled_tokens = num_tokens",
            ),
            ("Scheduler._schedule_tokens", "publish(seq)  #", "keys_of(seq, 0)  #"),
        ],
    },
    4: {
        "siblings share only with the first": [
            (
                "BlockManager.allocate",
                "if key not in block_of:",
                "if block_of.get(key) not in sequences[0].block_table:",
            )
        ],
        "keys are cut after 64 blocks": [
            ("BlockManager.find_prefix", "        return prefix", "        return prefix[:64]")
        ],
        "the block of the last token is found as well": [
            ("BlockManager.find_prefix", "seq.num_tokens - 1", "seq.num_tokens")
        ],
        "a key has the hash of the first key": [
            ("BlockManager.keys_of", "sha256(keys[-1])", "sha256(keys[0])")
        ],
        "a second block takes the place of an equal one": [
            ("BlockManager.publish", "if keys[i] not in self.prefix_index:", "if True:")
        ],
    },
    5: {
        "at most eight writers are counted": [
            ("blocks_to_grow", "len(written) - len(set(written))", "min(7, len(written) - len(set(written)))")
        ],
        "the fork has its parent's table": [
            ("BlockManager.fork", "list(parent.block_table)", "parent.block_table")
        ],
        "a beam that waits is copied": [
            ("BlockManager.append_slots", "seq.num_computed_tokens < seq.num_tokens", "True")
        ],
        "the parent is not freed": [("fork_samples", "block_manager.free(parent)", "pass")],
        "one list for all and for the unfinished sequences": [
            ("fork_samples", "[seq for seq in siblings if not seq.finished]", "siblings")
        ],
    },
    6: {
        "data is replaced": [
            ("KVCache.move_blocks", "self.data.index_copy_(0", "self.data = self.data.index_copy(0")
        ],
        "after one full host pool it never swaps again": [
            (
                "Scheduler._preempt",
                "            for seq in request.live:",
                "            self.preemption = 'recompute'\n            for seq in request.live:",
            )
        ],
        "the newest token is not counted": [
            ("Swapper.swap_in", "len(host_blocks) + num_grown", "len(host_blocks)")
        ],
        "the host blocks stay in use": [("Swapper.swap_in", "self.release(request)", "pass")],
    },
    7: {
        "the logits are changed": [
            ("filtered_probs", "logits / metadata.temperature", "logits.div_(metadata.temperature)")
        ],
        "the sums are float32": [
            ("locate", "weights.double().nan_to_num(1.0)", "weights.nan_to_num(1.0)"),
        ],
    },
    8: {
        "block ids of 32 bits": [("decode_kernel", "block.to(tl.int64)", "block.to(tl.int32)")],
        "the strides are computed": [
            ("decode_kernel", "kv_head * cache_head", "kv_head * HEAD_DIM * BLOCK_SIZE")
        ],
        "at most 64 tiles": [
            ("decode_kernel", "range(start, end, TILE)", "range(start, min(end, start + 64 * TILE), TILE)")
        ],
    },
    9: {
        "the token ids are changed": [
            (
                "Model._embed_rows",
                "input_ids - self.ranks.rank * num_rows",
                "input_ids.sub_(self.ranks.rank * num_rows)",
            )
        ],
        "KV heads in turns": [
            ("_rank_slices", "ranks.rank * total // ranks.size // length", "ranks.rank % (total // length)")
        ],
    },
}

RIGHT: dict[int, Pieces] = {
    1: [
        ("reference_paged_attention", "torch.finfo(torch.float32).min", "float('-inf')"),
        ("reference_paged_attention", "torch.exp(m - m_new)", "torch.exp(m - m_new).nan_to_num(0.0)"),
        (
            "reference_paged_attention",
            "torch.exp(scores - m_new)",
            "torch.exp(scores - m_new).nan_to_num(0.0)",
        ),
    ],
    3: [  # a batch in another order
        ("Scheduler._schedule_tokens", "insert(batch.num_decodes, seq)", "insert(0, seq)"),
        ("Scheduler._schedule_tokens", ".append(seq)", ".insert(batch.num_decodes, seq)"),
    ],
    4: [
        (
            "BlockManager.evict",
            "block_id, block = self.cached.popitem(last=False)",
            "block_id = next(iter(self.cached)); block = self.cached.pop(block_id)",
        )
    ],
    6: [  # copies one after another, and host blocks from the other end
        (
            "KVCache.move_blocks",
            "self.data.index_copy_(0, dst, self.data.index_select(0, src))",
            "for source, target in moves.copies: self.data[target] = self.data[source]",
        ),
        ("Swapper.swap_out", "self.free_ids.pop()", "self.free_ids.pop(0)"),
    ],
    8: [  # masked before they are scaled
        ("decode_kernel", 'scores * scale_log2, float("-inf"))', 'scores, float("-inf")) * scale_log2')
    ],
    9: [("Ranks.gather", "torch.cat(parts, dim=-1)", "torch.stack(parts, dim=1).flatten(1)")],
}
