"""Exercise 12.3, what evictions cost: see docs/book/12-forks.md."""

from random import Random

from lib.no_model import NoModel, make_request

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Sequence


class CountingBlockManager(BlockManager):
    """Counts evictions since `reset`.

    Attributes:
        num_evicted: cached blocks that `take` evicted.
        num_computed_again: those of them whose keys were published again, each eviction once.
    """

    def reset(self) -> None:
        """Called by `__init__` and after a failed step: all blocks are free."""
        raise NotImplementedError

    def take(self) -> int:
        """`Block.key` of a cached block is its key."""
        raise NotImplementedError

    def publish(self, seq: Sequence) -> None:
        """`BlockManager.index` has the published keys."""
        raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def watched(num_blocks: int) -> CountingBlockManager:
    """A `CountingBlockManager` of blocks of 4 slots that also keeps notes of its own."""

    class Watched(CountingBlockManager):
        def reset(self) -> None:
            self.noted, self.noted_again, self.noted_keys = 0, 0, set()
            super().reset()

        def take(self) -> int:
            keys = {block_id: block.key for block_id, block in self.cached.items()}
            block_id = super().take()
            if block_id in keys:
                self.noted += 1
                self.noted_keys.add(keys[block_id])
            return block_id

        def publish(self, seq: Sequence) -> None:
            before = set(self.index)
            super().publish(seq)
            again = (self.index.keys() - before) & self.noted_keys
            self.noted_again += len(again)
            self.noted_keys -= again

    return Watched(num_blocks, 4)


def compare(manager: CountingBlockManager, when: str) -> None:
    found, noted = manager.num_evicted, manager.noted
    assert found == noted, f"{when} num_evicted is {found}, but {noted} cached blocks were evicted."
    found, noted = manager.num_computed_again, manager.noted_again
    assert found == noted, (
        f"{when} num_computed_again is {found}, but {noted} evicted keys were published again."
    )


def serve(manager: CountingBlockManager, prompts: list[list[int]]) -> None:
    """Prompts one after another, and a look at the counts after each."""
    scheduler, runner = Scheduler(manager, 100, 1000), NoModel()
    for i, prompt in enumerate(prompts):
        scheduler.add(make_request(str(i), prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
        while scheduler.waiting or scheduler.running:
            scheduler.update(batch := scheduler.schedule(), runner.execute(batch))
        compare(manager, f"After {i + 1} prompts")


def test_both_counts() -> None:
    random = Random(0)
    prompts = [[random.randrange(4)] * random.randint(1, 30) for _ in range(60)]
    manager = watched(12)
    compare(manager, "At the start")
    serve(manager, prompts)
    manager.reset_prefix_cache()  # frees the cached blocks, which is no eviction
    serve(manager, prompts[:20])


def test_reset() -> None:
    manager = watched(4)
    serve(manager, [[1] * 13, [2] * 13, [1] * 13])
    manager.reset()
    compare(manager, "After `reset`")
    serve(manager, [[2] * 13, [1] * 13, [1] * 13])
