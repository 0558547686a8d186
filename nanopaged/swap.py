"""Moving a request's K/V to host memory and back (PagedAttention, §4.5).

A request is swapped whole, with all its sequences, and every distinct block once, however many of them share
it. It comes back whole as well, to other blocks, with the sharing that it had.

Like the block manager, this file knows ids only. The model runner makes the copies when a step begins: first
all those to the host, then all those from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanopaged.block_manager import BlockManager, blocks_needed, blocks_to_grow
from nanopaged.sequence import Request

Move = tuple[int, int]
"""(source block, destination block): device and host, or host and device."""


class Swapper:
    """The blocks of host memory; the `host_table`s of a swapped request name the ones that it uses."""

    def __init__(self, block_manager: BlockManager, num_host_blocks: int) -> None:
        self.block_manager = block_manager
        self.num_host_blocks = num_host_blocks
        self.reset()

    def reset(self) -> None:
        """All host blocks are free."""
        self.free_ids = list(range(self.num_host_blocks))[::-1]  # a stack: block 0 is handed out first

    def swap_out(self, request: Request) -> list[Move] | None:
        """Exchange the request's device blocks for host blocks.

        Blocks are moved that have computed tokens for at least one of its sequences; the device blocks are
        given back like those of a finished request. None, and nothing is changed, if there are too few host
        blocks.
        """
        size = self.block_manager.block_size
        computed = [seq.block_table[: blocks_needed(seq.num_computed_tokens, size)] for seq in request.live]
        device_blocks = list(dict.fromkeys(block_id for table in computed for block_id in table))
        if not 0 < len(device_blocks) <= len(self.free_ids):
            return None
        moves = {block_id: self.free_ids.pop() for block_id in device_blocks}
        for seq in request.live:
            seq.host_table = [moves[block_id] for block_id in seq.block_table if block_id in moves]
            num_computed_tokens = seq.num_computed_tokens
            self.block_manager.free(seq)
            seq.num_computed_tokens = num_computed_tokens  # they are computed, only elsewhere
        return list(moves.items())

    def swap_in(self, request: Request, num_reserved: int = 0) -> list[Move] | None:
        """Exchange the request's host blocks for device blocks.

        The host blocks are free at once: no later swap out of this step can overwrite them, because the
        scheduler preempts before it admits. None, and
        nothing is changed, unless the pool can hold them and the request's next tokens, and keep
        `num_reserved` blocks.
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
            for block_id in shared.intersection(seq.block_table):  # `take` gave the first reference
                manager.share(block_id)
            shared.update(seq.block_table)
        self.release(request)
        return list(moves.items())

    def release(self, request: Request) -> None:
        """Give the request's host blocks back, if it has any."""
        self.free_ids += {host_id for seq in request.live for host_id in seq.host_table}
        for seq in request.live:
            seq.host_table = []

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless every host block is free or in one request's tables."""
        in_use: list[int] = []
        for request in requests:
            in_use += {host_id for seq in request.live for host_id in seq.host_table}
            for seq in request.live:
                size = self.block_manager.block_size
                assert not (seq.host_table and seq.block_table), "a swapped sequence has device blocks"
                assert not seq.host_table or seq.num_computed_tokens <= len(seq.host_table) * size
        everything = sorted(self.free_ids + in_use)
        assert everything == list(range(self.num_host_blocks)), "a host block is lost or used twice"
