"""Writes what happens in each step into a page that a browser shows: `LLM(..., trace="run.html")`.

The file begins with `page.html`. A line of JSON follows for the engine, then one for each step.
The file is closed after every line, so the page is complete at any time.

The line of a step holds two whole states, one from after scheduling and one from after the update.
The page compares them.
"""

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


class Recorder:
    """The trace of one engine.

    These are the fields of a line. Requests are numbers, in order of arrival. Empty fields are left
    out.

        step, time               steps so far; seconds since the engine was made
        scheduled, updated       the states: {running, waiting, cached, seqs}
        admitted, preempted      requests; [[request, "swap" or "recompute"], …]
        out, in, copies          moves of blocks: [[source, destination], …]
        batch                    [[request, sequence, tokens to compute], …]
        generated                tokens, so far
        failed                   the error's type; the line of a failed step has no scheduled state

    `seqs` has a list for each sequence. A finished one stays in it until its request has finished:

        [request, index, number of computed tokens, block table, host table, finish reason or null,
         number of its tokens that earlier lines hold, the other tokens]

    What never changes is written once:

        requests                 [[number, id, prompt tokens, sequences, is it a beam search], …]
        keys                     block → the short key under which it is now published, or null
        texts                    token → its text

    `known_…` is what the lines so far tell the page. It changes only after a line was written.

    Args:
        tokenizer: None leaves the texts out.

    Raises:
        OSError: the page cannot be written.
    """

    def __init__(
        self, path: str | Path, scheduler: Scheduler, tokenizer: Any, model_name: str
    ) -> None:
        self.path = Path(path).absolute()
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.disk_is_full = False
        self.start = time.monotonic()
        self.num_steps = 0
        self.numbers: dict[Request, int] = {}  # of the unfinished requests
        self.num_requests = 0
        self.known_requests = 0
        self.known_tokens: dict[Sequence, int] = {}
        self.known_keys: dict[int, bytes] = {}
        self.known_texts: set[int] = set()
        # What the next line will tell, if it is written.
        self.num_tokens: dict[Sequence, int] = {}
        self.tokens: set[int] = set()
        self.scheduled = self._state()
        header = {
            "model": Path(model_name).name,
            "block_size": scheduler.block_size,
            "preemption": scheduler.preemption,
            "budget": scheduler.max_num_batched_tokens,
            "num_blocks": scheduler.block_manager.num_blocks,
            "num_host_blocks": scheduler.swapper.num_host_blocks,
        }
        self.path.write_bytes(PAGE.read_bytes() + _encode(header))

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        """Keep the state. If the step then fails, it is never written."""
        self.num_tokens = self.known_tokens
        self.scheduled = self._state()

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Write the line of a step that has just ended."""
        self.num_steps += 1
        updated = self._state(seq.request for seq in batch.sequences)
        numbers = self.numbers
        line = {
            "scheduled": self.scheduled,
            "updated": updated,
            "admitted": [numbers[request] for request in batch.admitted],
            "preempted": [[numbers[request], mode] for request, mode in batch.preempted],
            "out": batch.moves.swap_out,
            "in": batch.moves.swap_in,
            "copies": batch.moves.copies,
            "batch": [
                [numbers[seq.request], seq.index, seq.num_scheduled_tokens]
                for seq in batch.sequences
            ],
        }
        self._write(line)

    def step_failed(self, error: BaseException) -> None:
        """Write a line that says that a step has failed. All requests wait again."""
        self.num_tokens = self.known_tokens
        self._write({"failed": type(error).__name__, "updated": self._state()})

    def _state(self, ended: Iterable[Request] = ()) -> dict[str, Any]:
        """Return the state now, with the requests that have just `ended`. Number the new ones."""
        running = self.scheduler.running
        waiting = self.scheduler.waiting
        for request in sorted(running + waiting, key=attrgetter("arrival_time")):
            if request not in self.numbers:
                self.numbers[request] = self.num_requests
                self.num_requests += 1
        known_tokens = self.num_tokens
        self.num_tokens = {}
        seqs = []
        for request in dict.fromkeys([*running, *waiting, *ended]):
            for seq in request.sequences:
                num_known = known_tokens.get(seq, 0)
                new_tokens = seq.token_ids[num_known:]
                fields = [
                    self.numbers[request],
                    seq.index,
                    seq.num_computed_tokens,
                    list(seq.block_table),
                    list(seq.host_table),
                    seq.finish_reason,
                    num_known,
                    new_tokens,
                ]
                seqs.append(fields)
                self.num_tokens[seq] = seq.num_tokens
                self.tokens.update(new_tokens)
        return {
            "running": [self.numbers[request] for request in running],
            "waiting": [self.numbers[request] for request in waiting],
            "cached": list(self.scheduler.block_manager.cached),
            "seqs": seqs,
        }

    def _write(self, line: dict[str, Any]) -> None:
        """Add all that the page does not know yet to the line, and append it."""
        line["requests"] = [
            [
                number,
                request.request_id,
                request.num_prompt_tokens,
                request.width,
                request.is_beam_search,
            ]
            for request, number in self.numbers.items()
            if number >= self.known_requests
        ]
        index = self.scheduler.block_manager.index
        keys = {block.block_id: key for key, block in index.items()}
        changed = {block_id for block_id, _ in keys.items() ^ self.known_keys.items()}
        line["keys"] = {i: short_key(keys[i]) if i in keys else None for i in sorted(changed)}
        if self.tokenizer is not None:
            new = sorted(self.tokens - self.known_texts)
            line["texts"] = {token_id: self.tokenizer.decode([token_id]) for token_id in new}
        line["generated"] = self.scheduler.counters.num_generated_tokens
        self._append(line)
        self.known_requests = self.num_requests
        self.known_tokens = self.num_tokens
        self.known_keys = keys
        self.known_texts |= self.tokens
        self.tokens = set()
        for request in self.numbers.keys() - {*self.scheduler.running, *self.scheduler.waiting}:
            del self.numbers[request]

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line. If that fails (the disk is full), the trace ends; the engine goes on."""
        if self.disk_is_full:
            return
        now = {"step": self.num_steps, "time": round(time.monotonic() - self.start, 6)}
        fields = {name: value for name, value in line.items() if value}
        try:
            with self.path.open("ab") as file:
                file.write(_encode(now | fields))
        except OSError as error:
            self.disk_is_full = True
            logger.warning("the trace %s ends here: %s", self.path, error)


def _encode(line: dict[str, Any]) -> bytes:
    """Return a line of the page. A "<" could end the script element that contains the lines."""
    return json.dumps(line, separators=(",", ":")).replace("<", "\\u003c").encode() + b"\n"
