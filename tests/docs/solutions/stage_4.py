"""Solutions of stage 4 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: sets of keys, and a search in place of an order


class BlockManager:
    def keys_of(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        size = self.block_size
        while len(seq.block_keys) < num_blocks:
            i = len(seq.block_keys)
            key = array("q", seq.token_ids[i * size : i * size + size]).tobytes()
            if i > 0:
                key = sha256(seq.block_keys[i - 1]).digest() + key
            elif len(seq.request.cache_salt) > 0:
                key = sha256(NO_TOKEN + seq.request.cache_salt).digest() + key
            seq.block_keys.append(key)
        return list(seq.block_keys[:num_blocks])

    def find_prefix(self, seq: Sequence) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        num_blocks = 0
        while (num_blocks + 1) * self.block_size < len(seq.token_ids):
            if self.keys_of(seq, num_blocks + 1)[-1] not in self.index:
                break
            num_blocks += 1
        return [self.index[key].block_id for key in self.keys_of(seq, num_blocks)]

    def publish(self, seq: Sequence) -> None:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        for i, block_id in enumerate(seq.block_table):
            last_slot = (i + 1) * self.block_size - 1
            if self.enable_prefix_caching and seq.num_computed_tokens <= last_slot < end:
                key = self.keys_of(seq, i + 1)[i]
                if key not in self.index:
                    self.blocks[block_id].key = key
                    self.index[key] = self.blocks[block_id]

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        size = self.block_size
        found = {}  # key → block
        missing = set()
        for seq in sequences:
            num_found = len(self.find_prefix(seq)) if look_up else 0
            for i, key in enumerate(self.keys_of(seq, (len(seq.token_ids) - 1) // size)):
                if i < num_found:
                    found[key] = self.index[key].block_id
                else:
                    missing.add(key)
        num_idle = sum(self.blocks[block_id].ref_count == 0 for block_id in found.values())
        if self.num_free_blocks - num_idle - len(missing) - len(sequences) < num_reserved:
            return False
        for block_id in found.values():
            self.share(block_id)  # held while blocks are taken
        new = {key: self.take() for key in missing}
        known = set(found)
        for seq in sequences:
            keys = self.keys_of(seq, (len(seq.token_ids) - 1) // size)
            seq.num_computed_tokens = size * sum(key in known for key in keys)
            known.update(keys)
            seq.block_table = [found[key] if key in found else new[key] for key in keys]
            for block_id in seq.block_table:
                self.share(block_id)
            seq.block_table.append(self.take())
        for block_id in [*found.values(), *new.values()]:
            self.release(block_id)
        return True

    def take(self) -> int:
        if len(self.free_ids) == 0:
            oldest = list(self.cached)[0]
            for key in list(self.index):
                if self.index[key].block_id == oldest:
                    del self.index[key]
            del self.cached[oldest]
            self.blocks[oldest].key = None
            self.free_ids.append(oldest)
        block_id = self.free_ids.pop()
        self.blocks[block_id].ref_count = 1
        return block_id


# right: take evicts by iteration
replace(
    "BlockManager.take", "self.cached.popitem(last=False)", "(0, self.cached.pop(next(iter(self.cached))))"
)
# wrong: siblings share only with the first
replace("BlockManager.allocate", "_key in _taken", "_taken.get(_key) in sequences[0].block_table")


# wrong: keys are cut after 64 blocks
class BlockManager:
    def find_prefix(self, seq):
        return right(self, seq)[:64]


# wrong: allocate empties its argument
class BlockManager:
    def allocate(self, sequences, look_up=True, num_reserved=0):
        done = right(self, sequences, look_up, num_reserved)
        sequences.clear()
        return done


# wrong: the block of the last token is found as well
replace("BlockManager.find_prefix", "seq.num_tokens - 1", "seq.num_tokens")
# wrong: the most recently used block is evicted
replace("BlockManager.take", "self.cached.popitem(last=False)", "self.cached.popitem()")
# wrong: an evicted block keeps its key
replace("BlockManager.take", "_block.key = None", "pass")
# wrong: a key has the hash of the first key
replace("BlockManager.keys_of", "sha256(_keys[-1])", "sha256(_keys[0])")
# wrong: the salt is forgotten
replace("BlockManager.keys_of", "NO_TOKEN + seq.request.cache_salt", "NO_TOKEN")
# wrong: a second block takes the place of an equal one
replace("BlockManager.publish", "_key not in self.index", "True")
