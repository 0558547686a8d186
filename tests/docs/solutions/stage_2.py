"""Solutions of stage 2 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: one sequence, no prefix cache, no bookkeeping ahead


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


# wrong: append_slots compares with the length of free_ids
replace("BlockManager.append_slots", "_needed > self.num_free_blocks", "_needed > len(self.free_ids)")
# wrong: allocate compares with the length of free_ids
replace("BlockManager.allocate", "self.num_free_blocks", "len(self.free_ids)")


# wrong: share empties cached
class BlockManager:
    def share(self, block_id):
        right(self, block_id)
        self.cached.clear()


# wrong: take copies the list
class BlockManager:
    def take(self):
        self.free_ids = self.free_ids[:]
        return right(self)


# wrong: the first block on the stack is taken
replace("BlockManager.take", "self.free_ids.pop()", "self.free_ids.pop(0)")


# wrong: append_slots pops its argument
class BlockManager:
    def append_slots(self, sequences):
        copies = right(self, sequences)
        sequences.pop()
        return copies


# wrong: release forgets the block
class BlockManager:
    def release(self, block_id):
        if self.blocks[block_id].ref_count == 0:
            raise RuntimeError("released too often")
        self.blocks[block_id].ref_count -= 1


# wrong: the blocks are given back from the beginning
replace("BlockManager.trim", "reversed(_blocks)", "_blocks")


# wrong: a loop without an end
class BlockManager:
    def trim(self, seq, num_tokens=None):
        while seq.block_table:
            pass
