"""Exercise 12.1, evict the least frequently used block: see docs/book/12-forks.md."""

from collections import Counter
from itertools import count
from random import Random

from lib.no_model import NoModel, make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.snapshot import check_blocks


class LfuBlockManager(BlockManager):
    """Evicts the cached block with the fewest calls of `share` since it was taken, of several the LRU one."""

    def reset(self) -> None:
        """Called by `__init__` and after a failed step: all blocks are free."""
        raise NotImplementedError

    def share(self, block_id: int) -> None:
        raise NotImplementedError

    def take(self) -> int:
        raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def watched(num_blocks: int) -> LfuBlockManager:
    """An `LfuBlockManager` of blocks of 4 slots, of which each eviction is compared with its own notes."""
    hits: Counter[int] = Counter()
    released: dict[int, int] = {}  # block → when a reference was last given back
    clock = count()

    class Watched(LfuBlockManager):
        def share(self, block_id: int) -> None:
            super().share(block_id)
            hits[block_id] += 1

        def release(self, block_id: int) -> None:
            super().release(block_id)
            released[block_id] = next(clock)

        def take(self) -> int:
            cached, has_free = list(self.cached), bool(self.free_ids)
            block_id = super().take()
            if has_free:
                assert block_id not in cached, f"Block {block_id} is evicted although another one is free."
            else:
                right = min(cached, key=lambda each: (hits[each], released[each]))
                assert block_id == right, (
                    f"Block {block_id} ({hits[block_id]} hits) is evicted instead of block {right} "
                    f"({hits[right]} hits{', released earlier' if hits[right] == hits[block_id] else ''})."
                )
            hits[block_id] = 0
            return block_id

    return Watched(num_blocks, 4)


def serve(manager: BlockManager, prompts: list[list[int]], num_output: int = 1, at_once: int = 1) -> int:
    """Prompts one after another, or so many at once. Returns the tokens that were found in the cache."""
    scheduler, runner, found = Scheduler(manager, 100, 1000), NoModel(), 0
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    for first in range(0, len(prompts), at_once):
        for i, prompt in list(enumerate(prompts))[first : first + at_once]:
            scheduler.add(make_request(str(i), prompt, params))
        while scheduler.waiting or scheduler.running:
            batch = scheduler.schedule()
            found += sum(
                request.num_cached_tokens for request in batch.admitted if not request.num_preemptions
            )
            scheduler.update(batch, runner.execute(batch))
            try:
                check_blocks(manager, scheduler.running_sequences)
            except AssertionError as error:
                raise AssertionError(f"After a step the pool is not consistent: {error}.") from None
    return found


def test_the_block_with_the_fewest_hits_is_evicted() -> None:
    random = Random(0)
    prompts = [[random.randrange(3)] * 9 + [i] * random.randint(1, 20) for i in range(150)]
    manager = watched(12)
    serve(manager, prompts, num_output=5)
    manager.reset()
    serve(manager, prompts[:40])
    prompts = [[random.randrange(9)] * 9 + [100 + i] * random.randint(1, 9) for i in range(150)]
    serve(watched(16), prompts, num_output=5, at_once=3)  # a block in use is shared, too


def test_a_popular_prefix_survives() -> None:
    """Two chats with a system prompt of 16 tokens, then three other prompts, eight times, in 12 blocks."""
    prompts = [
        [*range(16), 100 + i, 1, 2, 3] if i % 5 < 2 else list(range(1000 + 20 * i, 1020 + 20 * i))
        for i in range(40)
    ]
    found = serve(LfuBlockManager(12, 4), prompts)
    assert found == 240, f"{found} tokens of the prompts are found; LRU finds 128, and LFU 240."
