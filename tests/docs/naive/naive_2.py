"""Stage 2 of docs/build/rebuild.py, written again: one sequence, no prefix cache, no bookkeeping ahead."""
# ruff: noqa: F821

# right: written naively


class BlockManager:
    def take(self) -> int:
        block_id = self.free_ids[-1]
        del self.free_ids[-1]
        self.blocks[block_id].ref_count += 1
        return block_id

    def share(self, block_id: int) -> None:
        if block_id in self.cached:
            self.cached.pop(block_id)
        self.blocks[block_id].ref_count = self.blocks[block_id].ref_count + 1

    def release(self, block_id: int) -> None:
        if self.blocks[block_id].ref_count < 1:
            raise RuntimeError(f"nothing refers to block {block_id}")
        self.blocks[block_id].ref_count -= 1
        if self.blocks[block_id].ref_count > 0:
            return
        if self.blocks[block_id].key:
            self.cached[block_id] = self.blocks[block_id]
        else:
            self.free_ids.append(block_id)

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        (seq,) = sequences
        num_blocks = 0
        while num_blocks * self.block_size < len(seq.token_ids):
            num_blocks += 1
        if num_blocks > self.num_free_blocks:
            return False
        seq.block_table = []
        for _ in range(num_blocks):
            seq.block_table.append(self.take())
        return True

    def append_slots(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        (seq,) = sequences
        new_blocks = 0
        while (len(seq.block_table) + new_blocks) * self.block_size < len(seq.token_ids):
            new_blocks += 1
        if new_blocks > self.num_free_blocks:
            return None
        for _ in range(new_blocks):
            seq.block_table.append(self.take())
        return []

    def trim(self, seq: Sequence, num_tokens: int | None = None) -> None:
        if num_tokens is None:
            num_tokens = len(seq.token_ids)
        for i in range(len(seq.block_table) - 1, -1, -1):
            if i * self.block_size >= num_tokens:  # the first slot of block i is beyond the tokens
                self.release(seq.block_table[i])
                del seq.block_table[i]
