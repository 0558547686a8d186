"""Exercise 8.1, how many blocks are moved: see docs/book/08-preemption.md."""

from lib.no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.swap import Swapper


def swapped(num_prompt: int, num_computed: int, n: int, block_size: int) -> tuple[int, int]:
    """The blocks that are copied to the host, and the entries of the n host tables together.

    Args:
        num_prompt: tokens of the prompt.
        num_computed: computed tokens of each of the n samples, the prompt included, and more than it.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def swap_out(num_prompt: int, num_computed: int, n: int, block_size: int) -> tuple[int, int]:
    """The same by the scheduler and the swapper."""
    scheduler, runner = make_scheduler(64, block_size, enable_prefix_caching=False), NoModel()
    request = make_request("", list(range(num_prompt)), SamplingParams(n=n, max_tokens=64))
    scheduler.add(request)
    while request.live[0].num_computed_tokens < num_computed:
        batch = scheduler.schedule()
        scheduler.update(batch, runner.execute(batch))
    moves = Swapper(scheduler.block_manager, 64).swap_out(request)
    return len(moves), sum(len(seq.host_table) for seq in request.live)


def test_the_swapper_agrees() -> None:
    for block_size in (4, 1, 16):
        for num_prompt, num_computed in ((10, 14), (8, 9), (8, 12), (3, 4), (10, 16), (5, 17)):
            for n in (3, 1):
                got = swapped(num_prompt, num_computed, n, block_size)
                want = swap_out(num_prompt, num_computed, n, block_size)
                call = f"swapped({num_prompt}, {num_computed}, n={n}, block_size={block_size})"
                assert got[0] == want[0], f"{call} says {got[0]} copies, but {want[0]} blocks are copied."
                assert got[1] == want[1], f"{call} says {got[1]} entries, but the tables have {want[1]}."
