"""Which requests run in the next step, and with how many tokens.

One rule covers prefill, chunked prefill, prefix-cache hits, recomputation and decode. Each sequence
gets

    num_scheduled_tokens = min(num_tokens - num_computed_tokens, what is left of the token budget)

(without chunked prefill all of them or none). When no block is left, the last of the running
requests is preempted (PagedAttention, §4.5).
"""

import time
from bisect import insort_left, insort_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from nanopaged.beam_search import advance_beams, fork_samples
from nanopaged.block_manager import BlockManager
from nanopaged.outputs import Counters
from nanopaged.sequence import Request, ScheduledBatch, Sequence, StepResult
from nanopaged.swap import Swapper

BY_RANK = attrgetter("rank")


class Scheduler:
    """The waiting and the running requests, over one block manager.

    Both are lists in order of rank. Admission takes the first of `waiting`, preemption the last of
    `running`.

    Attributes:
        rank: request → its place in the order of service, smallest first; the time of arrival by
            default. `scheduler.rank = lambda request: request.num_prompt_tokens` serves short
            prompts first. It is called when a request is queued or preempted.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
        preemption: str = "recompute",
        num_host_blocks: int = 0,
        watermark: float = 0.0,
    ) -> None:
        self.block_manager = block_manager
        self.block_size = block_manager.block_size
        self.swapper = Swapper(block_manager, num_host_blocks)
        self.preemption = preemption  # "swap" or "recompute"
        self.num_watermark_blocks = int(watermark * block_manager.num_blocks)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.rank: Callable[[Request], Any] = attrgetter("arrival_time")
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counters = Counters()

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue."""
        request.rank = self.rank(request)
        insort_right(self.waiting, request, key=BY_RANK)  # behind those of equal rank

    def abort(self, request: Request) -> None:
        """Remove a request from its queue, and free its blocks."""
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self.swapper.release(request)
        for seq in request.live:
            self.block_manager.free(seq)
            seq.finish_reason = "abort"
        request.live = []
        request.finish_time = time.monotonic()

    @property
    def running_sequences(self) -> list[Sequence]:
        """All sequences with blocks on the device."""
        sequences = []
        for request in self.running:
            sequences += request.live
        return sequences

    # ── before the forward pass ───────────────────────────────────────────────────────────────────

    def schedule(self) -> ScheduledBatch:
        """Choose the batch of the next step: running requests first, then waiting ones that fit."""
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            copies = self.block_manager.append_slots(request.live)
            if copies is None:  # out of blocks: preempt the last request, which may be this one
                self._preempt(self.running.pop(), batch)
            else:
                batch.moves.copies += copies
                budget = self._schedule_tokens(request, budget, batch)
                i += 1

        # A request that was preempted above waits in this queue as well. If it fits now, it runs
        # again in this step: what it swapped out is copied to the host before any other move.
        num_seqs = sum(request.num_seqs for request in self.running)
        while self.waiting and budget > 0:
            request = self.waiting[0]
            num_seqs += request.num_seqs
            if num_seqs > self.max_num_seqs or not self._admit(request, budget, batch):
                break  # no request overtakes the first one, even if it needs fewer blocks
            self.waiting.pop(0)
            budget = self._schedule_tokens(request, budget, batch)
        assert batch.sequences or not (self.running or self.waiting), "no work was scheduled"
        return batch

    def _schedule_tokens(self, request: Request, budget: int, batch: ScheduledBatch) -> int:
        """Schedule the tokens that the request still has to compute. Returns the rest of the
        budget.

        6 of 10 tokens computed, budget 20: 4 tokens are scheduled, 16 of the budget are left
        """
        for seq in request.live:
            # 0 for a beam that has its candidates, while other beams of its request have none.
            num_tokens = seq.num_tokens - seq.num_computed_tokens
            if num_tokens > budget:
                if not self.enable_chunked_prefill:
                    break  # its siblings wait as well, because they may share what it computes
                num_tokens = budget
            seq.num_scheduled_tokens = num_tokens
            budget -= num_tokens
            if num_tokens == 1:  # decodes come first
                batch.sequences.insert(batch.num_decodes, seq)
                batch.num_decodes += 1
            elif num_tokens > 1:
                batch.sequences.append(seq)
            self.block_manager.publish(seq)  # the blocks that become full
        return budget

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        """Free the blocks of a running request, and put it back into the waiting queue.

        Its tokens stay. Its K/V goes to host memory, or is computed again later, except for blocks
        that the prefix cache still has then.
        """
        mode = self.preemption
        moves = self.swapper.swap_out(request) if mode == "swap" else None
        if moves is not None:
            batch.moves.swap_out += moves
            self.counters.num_preemptions_swap += 1
        else:
            mode = "recompute"
            self.counters.num_preemptions_recompute += 1
            for seq in request.live:
                self.block_manager.free(seq)
                seq.candidates = None  # a beam that is computed again proposes them again
        batch.preempted.append((request, mode))
        request.num_preemptions += 1
        request.rank = self.rank(request)
        insort_left(self.waiting, request, key=BY_RANK)  # before those of equal rank

    def _admit(self, request: Request, budget: int, batch: ScheduledBatch) -> bool:
        """Give a waiting request its blocks and add it to `running`; `schedule` takes it out of the
        queue. False if blocks or budget do not suffice.

        While other requests run, `num_watermark_blocks` stay free for them to grow. A request that
        took the last blocks would soon be preempted.
        """
        num_reserved = self.num_watermark_blocks if self.running else 0
        if request.is_swapped:
            moves = self.swapper.swap_in(request, num_reserved)
            if moves is None:
                return False
            batch.moves.swap_in += moves
            copies = self.block_manager.append_slots(request.live)
            assert copies is not None  # `swap_in` counted them
            batch.moves.copies += copies
        else:
            if not self.enable_chunked_prefill and not self._fits_whole(request, budget):
                return False
            if not self.block_manager.allocate(request.live, num_reserved):
                return False
            # Later admissions would find the blocks of the request itself.
            if request.num_preemptions == 0 and request.first_token_time is None:
                request.num_cached_tokens = request.live[0].num_computed_tokens
        insort_right(self.running, request, key=BY_RANK)
        batch.admitted.append(request)
        return True

    def _fits_whole(self, request: Request, budget: int) -> bool:
        """Whether the tokens of the first sequence that are not cached fit in the budget."""
        seq = request.live[0]
        prefix = self.block_manager.find_prefix(seq)
        return seq.num_tokens - len(prefix) * self.block_size <= budget

    # ── after the forward pass ────────────────────────────────────────────────────────────────────

    def update(self, batch: ScheduledBatch, result: StepResult) -> list[Request]:
        """Append the sampled tokens, fork, finish, free. Returns the requests that got a token."""
        for request, logprobs in result.prompt_logprobs.items():
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.extend(logprobs)
        counters = self.counters
        advanced: dict[Request, None] = {}  # used as an ordered set
        now = time.monotonic()
        for seq, samples in zip(batch.sequences, result.samples, strict=True):
            request = seq.request
            num_new_tokens = len(samples)
            seq.num_computed_tokens += seq.num_scheduled_tokens
            if not samples:  # a chunk of a prompt, or of what a preempted request computes again
                continue
            if request.first_token_time is None:  # its prompt has just been computed
                request.first_token_time = now
                counters.num_prompt_tokens += request.num_prompt_tokens
                # A prompt to be scored is not looked up.
                if self.block_manager.enable_prefix_caching and request.prompt_logprobs is None:
                    counters.prefix_cache_queries += request.num_prompt_tokens
                    counters.prefix_cache_hits += request.num_cached_tokens
            if request.is_beam_search:
                seq.candidates = samples
                if any(beam.candidates is None for beam in request.live):
                    continue  # it waits for its siblings
                advance_beams(request, self.block_manager)
                num_new_tokens = request.width
            elif request.awaits_fork:  # the prompt is computed
                fork_samples(request, samples, self.block_manager)
            elif seq.append(samples[0]):  # it has ended
                self.block_manager.free(seq)
                request.live.remove(seq)
            counters.num_generated_tokens += num_new_tokens
            advanced[request] = None
            if request.finished:
                request.finish_time = now
                self.running.remove(request)
        counters.num_blocks_copied += len(batch.moves.copies)
        counters.num_blocks_swapped_out += len(batch.moves.swap_out)
        counters.num_blocks_swapped_in += len(batch.moves.swap_in)
        return list(advanced)

    def start_over(self, requests: Iterable[Request]) -> None:
        """After a failed step, put all unfinished `requests` back into the waiting queue.

        They keep their generated tokens and lose their K/V, and the prefix cache is emptied. This
        is right wherever the step failed.

        Args:
            requests: all of the engine's, in order of arrival.
        """
        self.block_manager.reset()
        self.swapper.reset()
        self.running = []
        self.waiting = []
        for request in requests:
            request.start_over()
            if not request.finished:
                insort_right(self.waiting, request, key=BY_RANK)
            elif request.finish_time is None:  # it ended in the step that failed
                request.finish_time = time.monotonic()
