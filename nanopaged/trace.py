"""Writes what happens in each step into a page that a browser shows: `LLM(..., trace="run.html")`.

The file begins with `page.html`. A line of JSON follows for the engine, then one for each
step. The file is closed after every line, so the page is complete at any time.

A line has two whole states: when the batch was scheduled, and after the update. The page compares them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch, Sequence
from nanopaged.snapshot import short_key

PAGE = Path(__file__).with_name("page.html")

logger = logging.getLogger("nanopaged")


State = tuple[dict[str, list[int]], list[tuple[Sequence, int, list[Any]]]]
"""Queues and cached blocks; of each sequence, the number of its tokens, and the first six of its fields."""


class Recorder:
    """The open trace of one engine.

    The fields of a line; requests are numbers, in order of arrival, and empty fields are left out:

        step, time               steps so far; seconds since the engine was made
        scheduled, updated       the states: {running, waiting, cached, seqs}
        admitted, preempted      requests; [[request, "swap" or "recompute"], …]
        out, in, copies          moves of blocks: [[source, destination], …]
        batch                    [[request, sequence, tokens to compute], …]
        generated                tokens, so far
        failed                   the error's type; the line of a failed step has no scheduled state

    `seqs` has a list for each sequence, also for a finished one until its request is:

        [request, index, number of computed tokens, block table, host table, why it is finished or null,
         number of its tokens that the lines before have, the other tokens]

    What never changes is written once:

        requests                 [[number, id, prompt tokens, sequences, whether it is a beam search], …]
        keys                     block → the short key under which it is published from now on, or null
        texts                    token → its text

    `told_…` is what the page knows. It changes when a line was written.

    Args:
        tokenizer: None leaves the texts out.

    Raises:
        OSError: the page cannot be written.
    """

    def __init__(
        self, path: str | Path, scheduler: Scheduler, tokenizer: Any, model_name: str
    ) -> None:
        self.path, self.scheduler, self.tokenizer = Path(path).absolute(), scheduler, tokenizer
        self.full = False  # the disk
        self.start, self.num_steps = time.monotonic(), 0
        self.numbers: dict[Request, int] = {}  # of the unfinished ones
        self.num_requests = self.told_requests = 0
        self.scheduled = self._state()  # of the present step
        self.told_tokens: dict[Sequence, int] = {}
        self.told_keys: dict[int, bytes] = {}
        self.told_texts: set[int] = set()
        names, swapper = ("block_size", "preemption"), scheduler.swapper
        header: dict[str, Any] = {name: getattr(scheduler, name) for name in names}
        header |= {"model": Path(model_name).name, "budget": scheduler.max_num_batched_tokens}
        num_blocks, num_host_blocks = scheduler.block_manager.num_blocks, swapper.num_host_blocks
        header |= {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
        self.path.write_bytes(PAGE.read_bytes() + _as_json(header))

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        """Keep the state. If the step then fails, it is never written."""
        self.scheduled = self._state()

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Write the line of a step that has just ended."""
        self.num_steps += 1
        updated = self._state(seq.request for seq in batch.sequences)
        numbers, seqs = self.numbers, batch.sequences
        line: dict[str, Any] = {"admitted": [numbers[request] for request in batch.admitted]}
        line["preempted"] = [[numbers[request], way] for request, way in batch.preempted]
        line |= {
            "out": batch.moves.swap_out,
            "in": batch.moves.swap_in,
            "copies": batch.moves.copies,
        }
        line["batch"] = [
            [numbers[seq.request], seq.index, seq.num_scheduled_tokens] for seq in seqs
        ]
        self._write(line, scheduled=self.scheduled, updated=updated)

    def step_failed(self, error: BaseException) -> None:
        """Write a line that says that a step has failed, and that all requests wait again."""
        self._write({"failed": type(error).__name__}, updated=self._state())

    def _state(self, ended: Iterable[Request] = ()) -> State:
        """The present state, also of requests that have just `ended`. New ones get their numbers."""
        scheduler, numbers = self.scheduler, self.numbers
        running, waiting = scheduler.running, scheduler.waiting
        new = [request for request in (*running, *waiting) if request not in numbers]
        for request in sorted(new, key=attrgetter("arrival_time")):
            numbers[request] = self.num_requests
            self.num_requests += 1
        rows = []
        for request in dict.fromkeys((*running, *waiting, *ended)):
            for seq in request.sequences:
                place = [numbers[request], seq.index, seq.num_computed_tokens]
                tables = [list(seq.block_table), list(seq.host_table)]
                rows.append((seq, seq.num_tokens, [*place, *tables, seq.finish_reason]))
        queues = {"running": [numbers[request] for request in running]}
        queues |= {"waiting": [numbers[request] for request in waiting]}
        return queues | {"cached": list(scheduler.block_manager.cached)}, rows

    def _write(self, line: dict[str, Any], **states: State) -> None:
        """Append a line. If that fails (the disk is full), the trace ends, and the engine goes on."""
        tokens: dict[Sequence, int] = {}
        texts: set[int] = set()
        for name, (queues, rows) in states.items():
            seqs = []
            for seq, num_tokens, row in rows:
                first = tokens.get(seq, self.told_tokens.get(seq, 0))
                new = seq.token_ids[first:num_tokens]
                seqs.append([*row, first, new])
                tokens[seq] = num_tokens
                texts.update(new)
            line[name] = queues | {"seqs": seqs}
        keys = {block.block_id: key for key, block in self.scheduler.block_manager.index.items()}
        changed = {block_id for block_id, _ in keys.items() ^ self.told_keys.items()}
        new = [
            (number, each) for each, number in self.numbers.items() if number >= self.told_requests
        ]
        told = attrgetter("request_id", "num_prompt_tokens", "width", "is_beam_search")
        line["requests"] = [[number, *told(request)] for number, request in new]
        line["keys"] = {i: short_key(keys[i]) if i in keys else None for i in sorted(changed)}
        if self.tokenizer is not None:
            texts -= self.told_texts
            line["texts"] = {
                token_id: self.tokenizer.decode([token_id]) for token_id in sorted(texts)
            }
        line["generated"] = self.scheduler.counters.num_generated_tokens
        if not self.full:
            now = {"step": self.num_steps, "time": round(time.monotonic() - self.start, 6)}
            try:
                with self.path.open("ab") as file:
                    file.write(
                        _as_json(now | {name: value for name, value in line.items() if value})
                    )
            except OSError as error:
                self.full = True
                logger.warning("the trace %s ends here: %s", self.path, error)
        self.told_requests, self.told_tokens, self.told_keys = self.num_requests, tokens, keys
        self.told_texts |= texts
        left = {*self.scheduler.running, *self.scheduler.waiting}
        self.numbers = {
            request: number for request, number in self.numbers.items() if request in left
        }


def _as_json(line: dict[str, Any]) -> bytes:
    """A line of the page. In it, a "<" could end the script element that the lines are in."""
    return json.dumps(line, separators=(",", ":")).replace("<", "\\u003c").encode() + b"\n"
