"""Writes what happens in each step into a page that a browser shows: `LLM(..., trace="run.html")`.

The file begins with `page.html`. A line of JSON follows for the engine, then one for each step.
The file is closed after every line, so the page is complete at any time.

The line of a step has two states, one from after scheduling and one from after the update. Each is
written as the changes to the state before it, so the length of a line depends on what has changed.
The page makes the states from the changes, and compares them.
"""

import json
import logging
from operator import attrgetter
from pathlib import Path
from typing import Any

from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request, ScheduledBatch
from nanopaged.snapshot import short_key

PAGE = Path(__file__).with_name("page.html")

State = dict[str, list[list[Any]]]

logger = logging.getLogger("nanopaged")


class Recorder:
    """The trace of one engine.

    These are the fields of a line. Requests are numbers, in order of arrival.
    Empty fields are left out.

        scheduled, updated       the changes of the state
        admitted, preempted      requests; [[request, "swap" or "recompute"], …]
        swap_out, swap_in,       moves of blocks: [[source, destination], …]
        copies
        batch                    [[request, sequence, tokens to compute], …]
        failed                   the error's type. The line of a failed step has no scheduled state.
                                 Its updated one is made from an empty one

    A state has lists under names:

        queue                    [[requests, in order of service]]
        running                  [[how many of them are running; the others wait]]
        cached                   [[cached blocks, in order of eviction]]
        keys                     [[[block, short key under which it is published], …]]
        request.index            a sequence: [[finish reason or null, number of computed tokens],
                                 [tokens], [block table], [host table]]

    A change of a list is [[places of the items that go], [items that are added at the end]]. A name
    without lists is forgotten. A finished sequence stays until its request has finished.

    What never changes is written once:

        requests                 [[number, id, prompt tokens, sequences, is it a beam search], …]
        texts                    token → its text

    `known` and `known_texts` are what the lines so far tell the page.

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
        self.numbers: dict[Request, int] = {}  # of requests that did not end before this step
        self.num_requests = 0
        self.known: State = {}
        self.known_texts: set[int] = set()
        self.scheduled: State = {}  # the next line will tell it, if it is written
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
        self.numbers = {
            request: number for request, number in self.numbers.items() if not request.finished
        }
        self.scheduled = self._state()

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Write the line of a step that has just ended."""
        numbers = self.numbers
        line = {
            "scheduled": _changes(self.known, self.scheduled),
            "admitted": [numbers[request] for request in batch.admitted],
            "preempted": [[numbers[request], mode] for request, mode in batch.preempted],
            **vars(batch.moves),
            "batch": [
                [numbers[seq.request], seq.index, seq.num_scheduled_tokens]
                for seq in batch.sequences
            ],
        }
        self._write(line)

    def step_failed(self, error: BaseException) -> None:
        """Write a line that says that a step has failed. All requests wait again."""
        self.scheduled = {}
        self._write({"failed": type(error).__name__})

    def _state(self) -> State:
        """The state now, with the requests that end in this step. New ones get a number."""
        queue = self.scheduler.running + self.scheduler.waiting
        for request in sorted(queue, key=attrgetter("arrival_time")):
            if request not in self.numbers:
                self.numbers[request] = self.num_requests
                self.num_requests += 1
        manager = self.scheduler.block_manager
        state = {
            "queue": [[self.numbers[request] for request in queue]],
            "running": [[len(self.scheduler.running)]],
            "cached": [list(manager.cached)],
            "keys": [[(block.block_id, key) for key, block in manager.prefix_index.items()]],
        }
        for request, number in self.numbers.items():
            for seq in request.sequences:
                state[f"{number}.{seq.index}"] = [
                    [seq.finish_reason, seq.num_computed_tokens],
                    list(seq.token_ids),
                    list(seq.block_table),
                    list(seq.host_table),
                ]
        return state

    def _write(self, line: dict[str, Any]) -> None:
        """Complete the line with the state now, and with all that the page does not know yet.

        If it cannot be written (the disk is full), the trace ends; the engine goes on.
        """
        if self.disk_is_full:
            return
        state = self._state()
        line["updated"] = _changes(self.scheduled, state)
        line["requests"] = [
            [
                number,
                request.request_id,
                request.num_prompt_tokens,
                request.width,
                request.is_beam_search,
            ]
            for request, number in self.numbers.items()
            if f"{number}.0" not in self.known
        ]
        tokens = set()
        for changes in (line.get("scheduled", {}), line["updated"]):
            for lists in changes.values():
                if len(lists) > 1:  # the changes of a sequence
                    _, added_tokens = lists[1]
                    tokens.update(added_tokens)
        if self.tokenizer is not None:
            new = sorted(tokens - self.known_texts)
            line["texts"] = {token_id: self.tokenizer.decode([token_id]) for token_id in new}
        fields = {name: value for name, value in line.items() if value}
        try:
            with self.path.open("ab") as file:
                file.write(_encode(fields))
        except OSError as error:
            self.disk_is_full = True
            logger.warning("the trace %s ends here: %s", self.path, error)
        self.known = state
        self.known_texts |= tokens


def _changes(old: State, new: State) -> State:
    """The changes that make the state `new` from `old`."""
    changes: State = {name: [] for name in old if name not in new}
    for name, lists in new.items():
        old_lists = old.get(name, [[]] * len(lists))
        if lists != old_lists:
            changes[name] = [_change(a, b) for a, b in zip(old_lists, lists, strict=True)]
    return changes


def _change(old: list[Any], new: list[Any]) -> list[list[Any]]:
    """The changes that make the list `new` from `old`: 5 6 7 8 becomes 5 7 9 by [[1, 3], [9]]."""
    if new[: len(old)] == old:
        return [[], new[len(old) :]]
    num_kept = 0
    removed = []
    for place, item in enumerate(old):
        if new[num_kept : num_kept + 1] == [item]:
            num_kept += 1
        else:
            removed.append(place)
    return [removed, new[num_kept:]]


def _encode(line: dict[str, Any]) -> bytes:
    """A line of the page. A "<" could end the script element that contains the lines."""
    text = json.dumps(line, separators=(",", ":"), default=short_key)  # the keys are bytes
    return text.replace("<", "\\u003c").encode() + b"\n"
