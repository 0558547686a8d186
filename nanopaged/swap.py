"""Swapping: the K/V of a preempted request moves to host memory and back (PagedAttention, §4.5).

A request is swapped out whole. It is swapped in whole as well, to other device blocks. A block that
several of its sequences share is moved once.
"""

from nanopaged.block_manager import BlockManager, blocks_needed, blocks_to_grow
from nanopaged.sequence import Move, Request


class Swapper:
    """The pool of host blocks. A swapped sequence's `host_table` lists those that hold its K/V."""

    def __init__(self, block_manager: BlockManager, num_host_blocks: int) -> None:
        self.block_manager = block_manager
        self.num_host_blocks = num_host_blocks
        self.reset()

    def reset(self) -> None:
        """Make all host blocks free."""
        self.free_ids = list(reversed(range(self.num_host_blocks)))  # a stack: 0 is taken first

    def swap_out(self, request: Request) -> list[Move] | None:
        """Exchange the request's device blocks for host blocks.

        Only blocks with computed tokens are moved. All device blocks are given back.

        Returns:
            the moves (device block, host block). None, and nothing is changed, if no token is
            computed yet or there are too few host blocks.
        """
        manager = self.block_manager
        device_blocks = {}  # used as an ordered set
        for seq in request.live:
            num_computed_blocks = blocks_needed(seq.num_computed_tokens, manager.block_size)
            device_blocks |= dict.fromkeys(seq.block_table[:num_computed_blocks])
        if not 0 < len(device_blocks) <= len(self.free_ids):
            return None
        host_block_of = {block_id: self.free_ids.pop() for block_id in device_blocks}
        for seq in request.live:
            seq.host_table = [
                host_block_of[block_id] for block_id in seq.block_table if block_id in host_block_of
            ]
            manager.trim(seq, 0)  # not `free`, because its tokens stay computed
        return list(host_block_of.items())

    def swap_in(self, request: Request, num_reserved: int = 0) -> list[Move] | None:
        """Exchange the request's host blocks for device blocks.

        The host blocks are free from now on. No swap-out of this step overwrites them, because the
        scheduler preempts before it admits.

        Args:
            num_reserved: device blocks that must stay free, see `Scheduler._admit`.

        Returns:
            the moves (host block, device block). None, and nothing is changed, if the pool has too
            few blocks for these and for the newest tokens.
        """
        manager = self.block_manager
        host_blocks = set()
        for seq in request.live:
            host_blocks.update(seq.host_table)
        num_grown = blocks_to_grow(request.live, manager.block_size)
        if len(host_blocks) + num_grown > manager.num_free_blocks - num_reserved:
            return None
        device_block_of = {}
        for seq in request.live:
            for host_id in seq.host_table:
                if host_id in device_block_of:
                    manager.share(device_block_of[host_id])
                else:
                    device_block_of[host_id] = manager.take()
                seq.block_table.append(device_block_of[host_id])
        self.release(request)
        return list(device_block_of.items())

    def release(self, request: Request) -> None:
        """Free the request's host blocks, if it has any."""
        host_blocks = set()
        for seq in request.sequences:
            host_blocks.update(seq.host_table)
            seq.host_table = []
        self.free_ids += host_blocks
