"""Who runs in the next step, and how many tokens of each.

One rule covers prefill, chunked prefill, prefix hits, recompute and decode: a sequence is given
`min(num_tokens - num_computed_tokens, what is left of the step's budget)` tokens to catch up. Requests
are served first come, first served; when the blocks run out, the latest to arrive gives its own
back (PagedAttention, §4.5).

The scheduler moves requests between queues and asks the block manager for room. It has never seen a
tensor: what a `ScheduledBatch` says is carried out by the model runner.
"""

from __future__ import annotations

from collections import OrderedDict

from nanopaged.block_manager import BlockManager, OutOfBlocks
from nanopaged.branching import advance_beams, fork_samples
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult
from nanopaged.swap import SwapCosts, Swapper
from nanopaged.text.outputs import Sample


class Scheduler:
    """FCFS queues over one block manager.

    Invariant: everything in `running` arrived before everything in `waiting`, and both are in order of
    arrival. Admission takes the head of `waiting`, preemption the tail of `running`.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        preemption: str = "recompute",
        num_host_blocks: int = 0,
        swap_costs: SwapCosts | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.swapper = Swapper(block_manager, num_host_blocks)
        self.preemption = preemption
        self.swap_costs = swap_costs  # for preemption = "auto"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []

        self.num_preemptions_recompute = 0
        self.num_preemptions_swap = 0
        self.num_blocks_swapped_out = 0
        self.num_blocks_swapped_in = 0
        self.num_blocks_copied = 0
        self.prefix_cache_queries = 0  # tokens of admitted prompts …
        self.prefix_cache_hits = 0  # … and those of them found in the cache
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting[request.request_id] = request

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its blocks return at once."""
        if self.waiting.pop(request.request_id, None) is None:
            self.running.remove(request)
        self.swapper.forget(request)
        for seq in list(request.live):
            self.block_manager.free(seq)
            request.finish(seq, "abort", None)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def sequences(self) -> list[Sequence]:
        """All that hold blocks of the device."""
        return [seq for request in self.running for seq in request.live]

    # ── before the forward pass ───────────────────────────────────────────────────────────────────

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's work: those already running first, then new ones while there is room."""
        batch = ScheduledBatch()
        decodes: list[Sequence] = []
        chunks: list[Sequence] = []
        budget = self.max_num_batched_tokens

        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            if self._make_room(request, batch):
                budget = self._give_tokens(request, budget, decodes, chunks)
                i += 1

        # After a preemption the head of the queue is the victim. It cannot slip in again here: it gave back
        # n blocks, at least one of them went to somebody else, and it needs n again.
        num_seqs = sum(request.num_seqs for request in self.running) if self.waiting else 0
        while self.waiting and budget > 0:
            request = next(iter(self.waiting.values()))
            num_seqs += request.num_seqs
            if num_seqs > self.max_num_seqs or not self._admit(request, budget, batch):
                break  # first come, first served: nobody overtakes the head of the queue
            budget = self._give_tokens(request, budget, decodes, chunks)

        assert decodes or chunks or not self.has_unfinished, "there is work, but none was scheduled"
        batch.sequences, batch.num_decodes = decodes + chunks, len(decodes)
        return batch

    def _give_tokens(
        self, request: Request, budget: int, decodes: list[Sequence], chunks: list[Sequence]
    ) -> int:
        """Let the request's sequences catch up as far as the budget goes; return what is left of it."""
        for seq in request.live:
            gap = seq.num_tokens - seq.num_computed_tokens
            if gap > budget:
                if not self.enable_chunked_prefill or budget == 0:
                    break  # its siblings wait as well: they may count on what it computes
                gap = budget
            seq.num_scheduled_tokens = gap
            budget -= gap
            if gap == 1:
                decodes.append(seq)
            elif gap > 1:
                chunks.append(seq)
                self.block_manager.promise(seq, seq.num_closed_tokens, seq.num_computed_tokens + gap)
        return budget

    def _make_room(self, request: Request, batch: ScheduledBatch) -> bool:
        """Get the slots for the new tokens of a running request, preempting the latest as long as need be.

        False if the latest was `request` itself: then it no longer runs, and its copies are taken back. (A
        victim that is not `request` comes after it and has not had its turn in this step.)
        """
        may_share = len(request.live) > 1  # a block that is written is shared by siblings, if at all
        for seq in request.live:
            while seq.num_tokens > seq.num_slots or (
                may_share and self.block_manager.writes_into_shared_block(seq)
            ):
                try:
                    self._append_slots(seq, batch)
                except OutOfBlocks:
                    victim = self.running.pop()
                    if victim is request:
                        own = [copy for copy in batch.copies if copy.seq.request is request]
                        self.block_manager.undo_copies(own)
                        batch.copies = batch.copies[: len(batch.copies) - len(own)]  # they are the last
                    self._preempt(victim, batch)
                    if victim is request:
                        return False
        return True

    def _append_slots(self, seq: Sequence, batch: ScheduledBatch) -> None:
        copy = self.block_manager.append_slots(seq)
        if copy is not None:
            batch.copies.append(copy)

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        """Take a request's blocks away and put it back at the head of the queue.

        Nothing that was generated is lost. Either its K/V goes to host memory, or the tokens stay and their
        K/V is computed again when the request comes back (less what the prefix cache then still has).
        """
        moves = self.swapper.swap_out(request) if self._prefers_swap(request) else None
        if moves is not None:
            batch.swap_out += moves
            batch.swapped_out.append(request)
            self.num_preemptions_swap += 1
        else:
            self._drop(request)
            self.num_preemptions_recompute += 1
        self._wait_first(request)
        request.num_preemptions += 1

    def _prefers_swap(self, request: Request) -> bool:
        if self.preemption != "auto":
            return self.preemption == "swap"
        num_blocks = len(self.swapper.blocks_to_move(request))
        return self.swap_costs.prefers_swap(num_blocks, self.swapper.tokens_to_recompute(request))

    def _drop(self, request: Request) -> None:
        for seq in request.live:
            self.block_manager.free(seq)
            seq.candidates = None  # a beam that had made its proposals will make them again

    def _wait_first(self, request: Request) -> None:
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _admit(self, request: Request, budget: int, batch: ScheduledBatch) -> bool:
        """Move the head of the waiting queue to the running ones if its blocks can be had."""
        is_swapped = request in self.swapper.requests
        try:
            if is_swapped:
                batch.swap_in += self.swapper.swap_in(request)
            elif not self._allocate(request, budget):
                return False
        except OutOfBlocks:
            return False
        if is_swapped:
            for seq in request.live:  # there is room: `swap_in` has seen to that
                self._append_slots(seq, batch)
        del self.waiting[request.request_id]
        self.running.append(request)
        batch.admitted.append(request)
        return True

    def _allocate(self, request: Request, budget: int) -> bool:
        """Get the blocks of a request that has none. False if it must fit in the step whole and does not."""
        # A prompt token found in the cache has no logits, so it cannot be given a log-probability.
        look_up = not request.wants_prompt_logprobs
        prefixes = [self.block_manager.find_prefix(seq) if look_up else [] for seq in request.live]
        num_cached_tokens = len(prefixes[0]) * self.block_manager.block_size
        if not self.enable_chunked_prefill and request.live[0].num_tokens - num_cached_tokens > budget:
            return False
        self.block_manager.allocate(request.live, prefixes)
        return True

    # ── after it ──────────────────────────────────────────────────────────────────────────────────

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[Request]:
        """Book what the step computed; return the requests that have something new to show."""
        self.block_manager.keep_promises()
        self.swapper.settle()
        self.num_blocks_swapped_out += len(batch.swap_out)
        self.num_blocks_swapped_in += len(batch.swap_in)
        self.num_blocks_copied += len(batch.copies)
        self._count_admissions(batch.admitted)
        for request, logprobs in result.prompt_logprobs.items():
            request.prompt_logprobs.extend(logprobs)
        block_size = self.block_manager.block_size
        progressed: dict[Request, None] = {}  # a set that keeps the order
        some_ended, num_generated = False, 0
        try:
            for seq, samples in zip(batch.sequences, result.samples, strict=True):
                seq.num_computed_tokens += seq.num_scheduled_tokens
                if seq.num_computed_tokens - seq.num_closed_tokens >= block_size:
                    self.block_manager.close_blocks(seq)
                if len(samples) == 1:
                    progressed[seq.request] = None
                    num_generated += 1
                    if seq.append(samples[0]):
                        self.block_manager.free(seq)
                        some_ended = True
                elif samples and self._branch(seq, samples):
                    progressed[seq.request] = None
                    some_ended = True
        except BaseException:
            self._step_back(batch)
            raise
        finally:
            self.num_generated_tokens += num_generated
            if some_ended:
                self.running = [request for request in self.running if request.live]
        return list(progressed)

    def _step_back(self, batch: ScheduledBatch) -> None:
        """Something unforeseen, Ctrl-C perhaps, came between a sequence's K/V and its next token.

        Such a sequence has caught up and would never be served again: let it compute its last token anew.
        """
        size = self.block_manager.block_size
        for request in {seq.request: None for seq in batch.sequences}:
            for seq in request.live:
                if seq.num_computed_tokens == seq.num_tokens and seq.candidates is None:
                    seq.num_computed_tokens -= 1
                    seq.num_closed_tokens = seq.num_computed_tokens // size * size

    def _branch(self, seq: Sequence, samples: list[Sample]) -> bool:
        """Several tokens follow `seq`: one for each output asked for, or the proposals of a beam.

        False if nothing comes of it yet, because other beams have still to make their proposals.
        """
        request = seq.request
        if request.is_beam_search:
            seq.candidates = samples
            if any(beam.candidates is None for beam in request.live):
                return False
            advance_beams(request, self.block_manager)
            self.num_generated_tokens += len(request.sequences)
            return True
        self.num_generated_tokens += len(samples)
        siblings = fork_samples(seq, self.block_manager)
        ended = [sibling for sibling, sample in zip(siblings, samples, strict=True) if sibling.append(sample)]
        for sibling in ended:
            self.block_manager.free(sibling)
        return True

    def _count_admissions(self, admitted: list[Request]) -> None:
        for request in admitted:
            if request.num_cached_tokens is None:  # not when it only comes back from a preemption
                num_prompt_tokens = request.sequences[0].num_prompt_tokens
                request.num_cached_tokens = request.live[0].num_computed_tokens
                self.num_prompt_tokens += num_prompt_tokens
                if self.block_manager.enable_prefix_caching and not request.wants_prompt_logprobs:
                    self.prefix_cache_queries += num_prompt_tokens
                    self.prefix_cache_hits += request.num_cached_tokens

    def roll_back(self, batch: ScheduledBatch) -> None:
        """The step failed. Leave everything as if it had not been tried.

        Whoever was running before has made no progress and tries again. Whoever was admitted for this
        step may share blocks that were never filled, so it goes back to wait, without blocks or in host
        memory as before. Of what was to be swapped out we cannot know whether it got there: it is computed
        again.
        """
        self.block_manager.break_promises()
        self.block_manager.undo_copies(batch.copies)
        for request in reversed(batch.admitted):
            self.running.remove(request)
            if not self.swapper.undo_swap_in(request):
                self._drop(request)
            self._wait_first(request)
        for request in batch.swapped_out:
            self.swapper.forget(request)
            self._drop(request)
