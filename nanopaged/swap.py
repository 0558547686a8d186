"""Swapping: the K/V of a preempted request moves to host memory and back (PagedAttention, §4.5).

A request is swapped out whole, and in again, to other device blocks. A block that several of its sequences
share is moved once.
"""

from __future__ import annotations

from nanopaged.block_manager import BlockManager, blocks_needed, blocks_to_grow
from nanopaged.sequence import Move, Request


class Swapper:
    """The pool of host blocks. The `host_table` of a swapped sequence has the host blocks of its K/V."""

    def __init__(self, block_manager: BlockManager, num_host_blocks: int) -> None:
        self.block_manager, self.num_host_blocks = block_manager, num_host_blocks
        self.reset()

    def reset(self) -> None:
        """Make all host blocks free."""
        self.free_ids = list(range(self.num_host_blocks))[
            ::-1
        ]  # a stack: block 0 is handed out first

    def swap_out(self, request: Request) -> list[Move] | None:
        """Exchange the request's device blocks for host blocks.

        Only blocks with computed tokens are moved. All device blocks are given back.

        Returns:
            the moves (device block, host block). None, and nothing is changed, if no token is computed yet or
            there are too few host blocks.
        """
        size = self.block_manager.block_size
        computed = [
            seq.block_table[: blocks_needed(seq.num_computed_tokens, size)] for seq in request.live
        ]
        device_blocks = list(dict.fromkeys(block_id for table in computed for block_id in table))
        if not 0 < len(device_blocks) <= len(self.free_ids):
            return None
        moves = {block_id: self.free_ids.pop() for block_id in device_blocks}
        for seq in request.live:
            seq.host_table = [moves[block_id] for block_id in seq.block_table if block_id in moves]
            self.block_manager.trim(seq, 0)  # and not `free`: its tokens stay computed, on the host
        return list(moves.items())

    def swap_in(self, request: Request, num_reserved: int = 0) -> list[Move] | None:
        """Exchange the request's host blocks for device blocks.

        The host blocks are free at once: the scheduler preempts before it admits, so no swap-out of this step
        overwrites them.

        Args:
            num_reserved: device blocks that must stay free, see `Scheduler._admit`.

        Returns:
            the moves (host block, device block). None, and nothing is changed, if the pool has too few blocks
            for these and for the newest tokens.
        """
        manager = self.block_manager
        tables = [seq.host_table for seq in request.live]
        host_blocks = list(dict.fromkeys(host_id for table in tables for host_id in table))
        num_needed = len(host_blocks) + blocks_to_grow(request.live, tables, manager.block_size)
        if num_needed > manager.num_free_blocks - num_reserved:
            return None
        moves = {host_id: manager.take() for host_id in host_blocks}
        shared = set()
        for seq in request.live:
            seq.block_table = [moves[host_id] for host_id in seq.host_table]
            for block_id in shared.intersection(
                seq.block_table
            ):  # `take` has added the first reference
                manager.share(block_id)
            shared.update(seq.block_table)
        self.release(request)
        return list(moves.items())

    def release(self, request: Request) -> None:
        """Free the request's host blocks, if it has any."""
        self.free_ids += {host_id for seq in request.live for host_id in seq.host_table}
        for seq in request.live:
            seq.host_table = []
