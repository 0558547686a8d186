"""Moving a request's K/V to host memory and back (PagedAttention, §4.5).

A request is moved whole, with all its sequences, and every distinct block once, however many share it. On
the device its blocks are given back like those of a finished request: what was published stays in the
prefix cache until somebody needs the room. When the request returns, whatever of it is still there need
not be copied.

Like the block manager, this file knows ids only. The copies it asks for are made when a step begins: first
those to the host, then those from it, then copies on write, then the forward pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nanopaged.block_manager import BlockManager, blocks_to_grow
from nanopaged.sequence import Request


class OutOfBlocks(Exception):
    """The pool cannot give what was asked for now. Nothing has been changed."""


Move = tuple[int, int]
"""(source block, destination block): device and host, or host and device."""


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """What was measured at start-up, to tell which way to preempt is cheaper."""

    seconds_per_block: float  # to copy one block one way
    prefill_tokens_per_second: float

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and in again takes less time than computing `num_tokens` again.

        2 · num_blocks · seconds_per_block  <  num_tokens / prefill_tokens_per_second
        """
        return 2 * num_blocks * self.seconds_per_block < num_tokens / self.prefill_tokens_per_second


class Swapper:
    """The blocks of host memory, and who is in them."""

    def __init__(self, block_manager: BlockManager, num_host_blocks: int) -> None:
        self.block_manager = block_manager
        self.num_host_blocks = num_host_blocks
        self.reset()

    def reset(self) -> None:
        """Nothing is in host memory."""
        self.free_host_blocks = list(range(self.num_host_blocks))[::-1]  # a stack: 0 is handed out first
        self.requests: dict[Request, None] = {}  # those in host memory, in no particular order

    # ── out ───────────────────────────────────────────────────────────────────────────────────────

    def blocks_to_move(self, request: Request) -> list[int]:
        """The distinct device blocks into which at least one of the request's sequences has computed."""
        size = self.block_manager.block_size
        return list(
            dict.fromkeys(
                block_id
                for seq in request.live
                for i, block_id in enumerate(seq.block_table)
                if i * size < seq.num_computed_tokens
            )
        )

    def tokens_to_recompute(self, request: Request) -> int:
        """K/V that would have to be computed again, less what other requests keep in shared blocks."""
        size, pool = self.block_manager.block_size, self.block_manager
        own = Counter(block_id for seq in request.live for block_id in seq.block_table)
        tokens: dict[int, int] = {}
        for seq in request.live:
            for i, block_id in enumerate(seq.block_table):
                if pool.blocks[block_id].ref_count == own[block_id]:
                    here = min(size, seq.num_computed_tokens - i * size)
                    tokens[block_id] = max(here, tokens.get(block_id, 0))
        return sum(tokens.values())

    def swap_out(self, request: Request) -> list[Move] | None:
        """Give the request host blocks for its device blocks. None, and no change, if there are too few."""
        device_blocks = self.blocks_to_move(request)
        if len(device_blocks) > len(self.free_host_blocks):
            return None
        moves = {block_id: self.free_host_blocks.pop() for block_id in device_blocks}
        for seq in request.live:
            seq.host_table = [moves[block_id] for block_id in seq.block_table if block_id in moves]
            num_computed_tokens = seq.num_computed_tokens
            self.block_manager.free(seq)
            seq.num_computed_tokens = num_computed_tokens
        self.requests[request] = None
        return list(moves.items())

    def forget(self, request: Request) -> None:
        """Give up what the request has in host memory (it is aborted, or will compute it again)."""
        if request not in self.requests:
            return
        del self.requests[request]
        self._release({host_id for seq in request.live for host_id in seq.host_table})
        for seq in request.live:
            seq.host_table = []
            seq.num_computed_tokens = 0

    def _release(self, host_blocks: set[int]) -> None:
        self.free_host_blocks += sorted(host_blocks, reverse=True)

    # ── in ────────────────────────────────────────────────────────────────────────────────────────

    def swap_in(self, request: Request) -> list[Move]:
        """Give the request device blocks again, all of them, with the sharing it had.

        Raises OutOfBlocks, and changes nothing, if the pool cannot hold them and the request's next tokens
        now.
        """
        manager = self.block_manager
        tables = [seq.host_table for seq in request.live]
        host_blocks = list(dict.fromkeys(host_id for table in tables for host_id in table))
        num_needed = len(host_blocks) + blocks_to_grow(request.live, tables, manager.block_size)
        if num_needed > manager.num_free_blocks:
            raise OutOfBlocks
        moves = {host_id: manager.take() for host_id in host_blocks}
        for seq in request.live:
            for host_id in seq.host_table:
                manager.share(moves[host_id])
            seq.block_table = [moves[host_id] for host_id in seq.host_table]
            seq.host_table = []
        for block_id in moves.values():  # the reference that `take` gave
            manager.release(block_id)
        del self.requests[request]
        self._release(set(host_blocks))  # a step makes all of its swaps out before its swaps in
        return list(moves.items())

    def check_invariants(self) -> None:
        """Raise AssertionError unless every host block is free or in one swapped request's tables."""
        in_use = [
            {host_id for seq in request.live for host_id in seq.host_table} for request in self.requests
        ]
        everything = [*self.free_host_blocks, *(host_id for blocks in in_use for host_id in blocks)]
        assert sorted(everything) == list(range(self.num_host_blocks)), "a host block is lost or owned twice"
        for request in self.requests:
            for seq in request.live:
                assert not seq.block_table, "a swapped request has device blocks"
                assert seq.num_computed_tokens <= len(seq.host_table) * self.block_manager.block_size
