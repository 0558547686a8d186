"""Solutions of stage 5 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: a block is copied if a later sibling has it, too


def blocks_to_grow(sequences: list[Sequence], tables: list[list[int]], block_size: int) -> int:
    total = 0
    writers = {}  # block → how many sequences have their newest token in it
    for i in range(len(sequences)):
        num_tokens, num_slots = len(sequences[i].token_ids), len(tables[i]) * block_size
        if num_tokens <= num_slots:
            block_id = tables[i][(num_tokens - 1) // block_size]
            writers[block_id] = writers.get(block_id, 0) + 1
        while num_slots < num_tokens:
            total += 1
            num_slots += block_size
    for block_id in writers:
        total += writers[block_id] - 1
    return total


class BlockManager:
    def append_slots(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        tables = [seq.block_table for seq in sequences]
        if self.num_free_blocks < blocks_to_grow(sequences, tables, self.block_size):
            return None
        copies = []
        for i, seq in enumerate(sequences):
            if seq.num_computed_tokens == len(seq.token_ids):
                continue  # it waits
            position = len(seq.token_ids) - 1
            logical = position // self.block_size
            if logical < len(seq.block_table):
                block_id = seq.block_table[logical]
                if any(
                    other.block_table[logical : logical + 1] == [block_id] for other in sequences[i + 1 :]
                ):
                    new = self.take()
                    copies.append((block_id, new))
                    seq.block_table = seq.block_table[:logical] + [new] + seq.block_table[logical + 1 :]
                    self.release(block_id)
            while position >= len(seq.block_table) * self.block_size:
                seq.block_table.append(self.take())
        return copies

    def fork(self, parent: Sequence, index: int) -> Sequence:
        child = parent.copy_tokens(index)
        child.num_computed_tokens = parent.num_computed_tokens
        while len(child.block_table) < len(parent.block_table):
            block_id = parent.block_table[len(child.block_table)]
            self.share(block_id)
            child.block_table.append(block_id)
        return child


def fork_samples(request: Request, samples: list[Sample], block_manager: BlockManager) -> None:
    parent = request.live[0]
    children = [block_manager.fork(parent, i) for i in range(len(samples))]
    for i in range(len(samples)):
        children[i].append(samples[i])
    block_manager.free(parent)
    for child in children:
        if child.finished:
            block_manager.free(child)
    request.live = [child for child in children if not child.finished]
    request.sequences = children


# wrong: append_slots empties its argument
class BlockManager:
    def append_slots(self, sequences):
        copies = right(self, sequences)
        sequences.clear()
        return copies


# wrong: the samples are popped
def fork_samples(request, samples, block_manager):
    right(request, samples, block_manager)
    samples.clear()


# wrong: at most eight writers are counted
def blocks_to_grow(sequences, tables, block_size):
    return right(sequences[:8], tables[:8], block_size)


# wrong: the fork has its parent's table
class BlockManager:
    def fork(self, parent, index):
        child = right(self, parent, index)
        child.block_table = parent.block_table
        return child


# wrong: a block without a sibling is copied, too
replace("BlockManager.append_slots", "self.blocks[_src].ref_count > 1", "self.blocks[_src].ref_count > 0")
# wrong: a beam that waits is copied
replace("BlockManager.append_slots", "_seq.num_computed_tokens < _seq.num_tokens", "True")


# wrong: the parent is not freed
def fork_samples(request, samples, block_manager):
    for block_id in request.live[0].block_table:
        block_manager.share(block_id)
    right(request, samples, block_manager)


# wrong: the request has one list for all and for the unfinished sequences
def fork_samples(request, samples, block_manager):
    right(request, samples, block_manager)
    request.live = request.sequences
