"""Writes what happens in each step into a page that a browser shows: `LLM(..., trace="run.html")`.

The file begins with `page.html`, which is the whole viewer. A line of JSON follows for the engine, then one
for each step. Every line goes to the file at once, so the page is complete at any time, also while the engine
runs and after it was interrupted. A line says what has changed since the line before.

Most of it is found by comparing the engine's state after the step with the state before. The rest, such as
which block was evicted for whom, is in the notes of `recorded_pool.py`. The engine and all that is below it
know nothing of the trace: it is one of `LLMEngine.listeners`.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from array import array
from dataclasses import astuple, dataclass
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any

from nanopaged.engine import LLMEngine
from nanopaged.sequence import Request, ScheduledBatch, Sequence
from nanopaged.trace import sentences
from nanopaged.trace.recorded_pool import RecordedBlockManager
from nanopaged.views.snapshot import short_key

PAGE = Path(__file__).with_name("page.html")

logger = logging.getLogger("nanopaged")


@dataclass(slots=True)
class Seen:
    """A sequence as the last line left it."""

    seq: Sequence
    num_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    host_table: list[int]


@dataclass(slots=True)
class Known:
    """A request that the page knows: its number, and the name that the page shows."""

    number: int
    name: str


class Recorder:
    """The open trace of one engine.

    The fields of a line, where requests and sequences are numbers:

        step, time         steps so far; seconds since the engine was made
        said               what happened: [[kinds of event, sentence], …]
        batch              [[request, sequence, tokens to compute], …]
        copies, out, in    moves of blocks: [[source, destination], …]
        evicted, hits      blocks that were evicted; that were found in the prefix cache
        used, filled       blocks in use; slots in them that hold K/V
        drawn              tokens generated in this step
        fresh              1: what follows is the whole state, not a change
        requests           new ones: [[number, name, id, what it is if it has several sequences], …]
        texts              token → text of tokens that are new to the page
        running, waiting   the queues, if they have changed
        seqs, gone         changed sequences, see `_change`; finished ones while their request goes on
        keys, uncached, cached   see `_blocks`

    Attributes:
        path: the page; it is complete after every step.

    Raises:
        OSError: the page cannot be written.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.path = Path(engine.config.trace)
        self.engine, self.scheduler, self.tokenizer = engine, engine.scheduler, engine.tokenizer
        engine.block_manager.__class__ = RecordedBlockManager  # the same pool, which now notes what it does
        self.manager: RecordedBlockManager = engine.block_manager
        self.manager.forget()
        scheduler = engine.scheduler
        self.start = time.monotonic()
        self.num_requests = 0
        self.known: dict[Request, Known] = {}  # the unfinished ones
        self.fresh = False  # whether the next line must be a whole state instead of changes
        self._forget()
        header = {
            "model": Path(engine.model_name).name,
            "block_size": self.manager.block_size,
            "num_blocks": self.manager.num_blocks,
            "num_host_blocks": scheduler.swapper.num_host_blocks,
            "budget": scheduler.max_num_batched_tokens,
            "preemption": scheduler.preemption,
        }
        page = PAGE.read_bytes()
        try:
            # Without a buffer every line goes out at once, and nothing is left that could fail at the end.
            self.file: FileIO | None = self.path.open("wb", buffering=0)
            weakref.finalize(self, self.file.close)
            _write_all(self.file, page + _as_json(header))
        except OSError as error:
            raise OSError(
                error.errno, f"the trace cannot be written: {error.strerror}", str(self.path)
            ) from error

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Write the line of a step that has just ended."""
        self._add(batch, {"step": self.engine.num_steps + 1})

    def step_failed(self, error: BaseException) -> None:
        """Write a line that says that a step has failed, and that all requests wait again."""
        self.fresh = True
        self._add(
            ScheduledBatch(),
            {"step": self.engine.num_steps, "said": [sentences.failed(type(error).__name__)]},
        )

    def _add(self, batch: ScheduledBatch, fields: dict[str, Any]) -> None:
        """If it is interrupted, half compared, the next line must not build on it: `fresh` stays True."""
        fresh, self.fresh = self.fresh, True
        if fresh:
            self._forget()
        self._write(self._line(batch, fresh) | fields)
        self.fresh = False

    def _forget(self) -> None:
        """Compare the state with none, not with that of the last line."""
        self.known_tokens: set[int] = set()  # whose text is in the page
        self.seen: dict[tuple[int, int], Seen] = {}  # (request's number, sequence's index) →
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.keys: dict[int, bytes] = {}  # block → its key
        self.num_generated_tokens = self.scheduler.num_generated_tokens
        in_use = [block.block_id for block in self.manager.blocks if block.ref_count > 0]
        self.manager.touched = dict.fromkeys([*in_use, *self.manager.cached])

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line. If that fails (the disk is full), the trace ends, and the engine goes on."""
        if self.file is None:
            return
        try:
            _write_all(self.file, _as_json(line))
        except OSError as error:
            self.file = None
            logger.warning("the trace %s ends here: %s", self.path, error)

    # ── one line ──────────────────────────────────────────────────────────────────────────────────

    def _line(self, batch: ScheduledBatch, fresh: bool) -> dict[str, Any]:
        """The fields of a line. Empty ones are left out, but not a queue that has become empty."""
        scheduler, manager = self.scheduler, self.manager
        running, waiting = list(scheduler.running), sorted(scheduler.waiting.values(), key=scheduler.rank)
        line: dict[str, Any] = {"time": round(time.monotonic() - self.start, 6)}
        newly_waiting = []
        if waiting != self.waiting:
            old = set(self.waiting)
            newly_waiting = [request for request in waiting if request not in old]
        met = [*batch.admitted, *newly_waiting]
        if fresh:  # any request may be one that the page does not know
            met = [*running, *(seq.request for seq in batch.sequences), *met]
        new = [request for request in dict.fromkeys(met) if request not in self.known]
        new.sort(key=attrgetter("arrival_time"))
        for request in new:
            self._introduce(request)
        line["fresh"] = int(fresh)
        line["requests"] = [
            [*astuple(self.known[request]), request.request_id, _several(request)]
            for request in (dict.fromkeys(met) if fresh else new)
        ]
        line["said"] = self._said(batch, new, waiting)
        line["batch"] = [
            [self.known[seq.request].number, seq.index, seq.num_scheduled_tokens] for seq in batch.sequences
        ]
        line["copies"], line["out"], line["in"] = batch.copies, batch.swap_out, batch.swap_in
        line["evicted"] = manager.evicted
        line["hits"] = [block_id for _, found in manager.hits for block_id in found]
        line |= self._sequences(running + newly_waiting) | self._blocks() | self._queues(running, waiting)
        line["texts"] = self._texts(line["seqs"])
        line["drawn"] = self.scheduler.num_generated_tokens - self.num_generated_tokens
        self.num_generated_tokens = self.scheduler.num_generated_tokens
        self.running, self.waiting = running, waiting
        manager.forget()
        return {name: value for name, value in line.items() if value or name in ("running", "waiting")}

    def _introduce(self, request: Request) -> None:
        """Give it a number and a name: A, B, …, Z, AA, AB, … in order of arrival."""
        name, rest = "", self.num_requests + 1
        while rest:
            rest, letter = divmod(rest - 1, 26)
            name = chr(ord("A") + letter) + name
        self.known[request] = Known(self.num_requests, name)
        self.num_requests += 1

    # ── the state: what is different from the last line ───────────────────────────────────────────

    def _sequences(self, requests: list[Request]) -> dict[str, Any]:
        """The changes of the sequences of these requests, and the filled slots of the pool."""
        size, seen, changes, gone = self.manager.block_size, self.seen, [], []
        empty: dict[int, int] = {}  # block → slots in it that none of its sequences has filled
        full: set[int] = set()  # blocks that siblings share count as computed for all but the first of them
        for request in requests:
            number, before = self.known[request].number, {}
            if request.num_sequences > 1 or request.is_beam_search:
                # Its sequences may be new ones: forks of those before.
                before = {i: seen.pop((number, i), None) for i in range(request.num_sequences)}
                seen |= {(number, seq.index): before[seq.index] for seq in request.live if before[seq.index]}
                left = {seq.index for seq in request.live}
                gone += [[number, i] for i in before if before[i] is not None and i not in left]
            for seq in request.live:
                change = self._change(number, seq, before)
                if change is not None:
                    changes.append(change)
                table, num_computed_tokens = seq.block_table, seq.num_computed_tokens
                if request.num_sequences > 1:
                    full.update(table[: num_computed_tokens // size])
                for i in range(num_computed_tokens // size, len(table)):
                    here = size - max(0, num_computed_tokens - i * size)
                    empty[table[i]] = min(here, empty.get(table[i], size))
        used = self.manager.num_blocks - self.manager.num_free_blocks
        filled = used * size - sum(num for block_id, num in empty.items() if block_id not in full)
        return {"seqs": changes, "gone": gone, "used": used, "filled": filled}

    def _change(self, number: int, seq: Sequence, before: dict[int, Seen | None]) -> list[Any] | None:
        """What is new of one sequence.

        [number, index, token]: one more token is known, and one more computed: the usual decode
        [number, index, from, tokens kept, new tokens, computed, blocks kept, new blocks, host table]: tokens
            and table begin like those that sequence `from` of the request had before, -1 for none
        """
        key, token_ids, table = (number, seq.index), seq.token_ids, seq.block_table
        seen, num_tokens = self.seen.get(key), len(token_ids)
        parent = seq.index
        if seen is not None and seen.seq is seq:
            if table == seen.block_table and seq.host_table == seen.host_table:
                num_new = num_tokens - seen.num_tokens
                if num_new == seq.num_computed_tokens - seen.num_computed_tokens <= 1:
                    seen.num_tokens, seen.num_computed_tokens = num_tokens, seq.num_computed_tokens
                    return [*key, token_ids[-1]] if num_new else None
        else:
            parent, seen = self._parent(seq, before)
        num_kept, old_table = (seen.num_tokens, seen.block_table) if seen is not None else (0, [])
        same = 0
        while same < min(len(table), len(old_table)) and table[same] == old_table[same]:
            same += 1
        computed, host_table = seq.num_computed_tokens, list(seq.host_table)
        self.seen[key] = Seen(seq, num_tokens, computed, list(table), host_table)
        return [*key, parent, num_kept, token_ids[num_kept:], computed, same, table[same:], host_table]

    def _parent(self, seq: Sequence, before: dict[int, Seen | None]) -> tuple[int, Seen | None]:
        """The sequence of the last line from which this one was forked, and its index; -1 for none."""
        for index, seen in before.items():
            if seen is not None and seq.token_ids[: seen.num_tokens] == seen.seq.token_ids[: seen.num_tokens]:
                return index, seen
        return -1, None

    def _blocks(self) -> dict[str, Any]:
        """Keys that are new, [block, digest, request's number, tokens], or gone, [block]; the cached blocks.

        The page removes the blocks `uncached` from its list of cached ones, then appends `cached`.
        """
        manager, keys = self.manager, []
        for block_id in manager.touched:
            key = manager.blocks[block_id].key
            if key == self.keys.get(block_id):
                continue
            if key is None:
                del self.keys[block_id]
                keys.append([block_id])
            else:
                self.keys[block_id] = key
                token_ids = array("q", key[-8 * manager.block_size :]).tolist()
                owner = self.known.get(manager.publishers.get(block_id))
                number = -1 if owner is None else owner.number
                keys.append([block_id, short_key(key), number, *token_ids])
        cached = [block_id for block_id in manager.touched if block_id in manager.cached]
        return {"keys": keys, "uncached": list(manager.touched), "cached": cached}

    def _queues(self, running: list[Request], waiting: list[Request]) -> dict[str, Any]:
        """The numbers of the requests in a queue that has changed. Forgets those that are in neither."""
        line: dict[str, Any] = {}
        for name, queue, old in (("running", running, self.running), ("waiting", waiting, self.waiting)):
            if queue != old:
                line[name] = [self.known[request].number for request in queue]
        if line:
            for request in self.known.keys() - set(running) - set(waiting):
                number = self.known.pop(request).number
                for i in range(request.num_sequences):
                    self.seen.pop((number, i), None)
        return line

    def _texts(self, changes: list[list[Any]]) -> dict[int, str]:
        """The texts of the tokens that the page does not know yet."""
        if self.tokenizer is None:
            return {}
        new = {token_id for change in changes for token_id in (change[4] if len(change) > 3 else change[2:])}
        new -= self.known_tokens
        self.known_tokens |= new
        return {token_id: self.tokenizer.decode([token_id]) for token_id in sorted(new)}

    # ── what happened ─────────────────────────────────────────────────────────────────────────────

    def _said(
        self, batch: ScheduledBatch, new: list[Request], waiting: list[Request]
    ) -> list[sentences.Sentence]:
        """In about the order in which a step does it: preempt, admit, evict, copy, compute, fork, finish."""
        manager = self.manager
        said = [
            sentences.arrived(self.known[request].name, request.num_prompt_tokens, _several(request))
            for request in new
        ]
        for request in reversed(self.running):
            if request in batch.admitted or self._waits(request):
                said.append(self._preempted(request, dict(batch.swap_out)))
        for request in batch.admitted:
            said += self._admitted(request, dict(batch.swap_in))
        if manager.evicted:
            said.append(sentences.evicted(manager.evicted))
        for writer, others, src, dst in manager.copies:
            said.append(sentences.copied(self._name(writer), [self._name(seq) for seq in others], src, dst))
        said += self._computed(batch)
        for request in dict.fromkeys([*self.running, *batch.admitted]):
            several = request.num_sequences > 1
            if (several or request.finished) and not self._waits(request):
                said += self._forked_and_finished(request)
        if waiting != self.waiting:
            for request in self.waiting:
                if request.finished and request not in batch.admitted:
                    said.append(sentences.finished(self.known[request].name, "abort", [], []))
        return said

    def _waits(self, request: Request) -> bool:
        """Its id is not enough: once a request is gone, another one may have the same id."""
        return self.scheduler.waiting.get(request.request_id) is request

    def _name(self, seq: Sequence) -> str:
        """A, or A1, A2, … if the request has, or will have, several sequences."""
        name = self.known[seq.request].name
        return name if seq.request.num_sequences == 1 else f"{name}{seq.index + 1}"

    def _old(self, request: Request) -> list[Seen]:
        """The sequences of a request as the last line left them."""
        keys = ((self.known[request].number, i) for i in range(request.num_sequences))
        return [self.seen[key] for key in keys if key in self.seen]

    def _preempted(self, request: Request, out: dict[int, int]) -> sentences.Sentence:
        blocks = dict.fromkeys(block_id for seen in self._old(request) for block_id in seen.block_table)
        moved = {block_id: out[block_id] for block_id in blocks if block_id in out}
        return sentences.preempted(self.known[request].name, moved)

    def _admitted(self, request: Request, moves: dict[int, int]) -> list[sentences.Sentence]:
        name = self.known[request].name
        host = dict.fromkeys(host_id for seen in self._old(request) for host_id in seen.host_table)
        if host:
            return [sentences.swapped_in(name, {host_id: moves[host_id] for host_id in host})]
        said = []
        for its_request, hits in self.manager.hits:
            if its_request is request and hits:
                num_tokens = max(
                    [seen.num_tokens for seen in self._old(request)] or [request.num_prompt_tokens]
                )
                said.append(sentences.found(name, hits, len(hits) * self.manager.block_size, num_tokens))
        return said

    def _computed(self, batch: ScheduledBatch) -> list[sentences.Sentence]:
        said, decodes = [], []
        for i, seq in enumerate(batch.sequences):
            seen = self.seen.get((self.known[seq.request].number, seq.index))
            num_tokens = seen.num_tokens if seen is not None else seq.request.num_prompt_tokens
            first = self.manager.started.get(seq, seen.num_computed_tokens if seen is not None else 0)
            if i < batch.num_decodes and num_tokens > seq.request.num_prompt_tokens:
                decodes.append(self._name(seq))
            else:
                said.append(sentences.prefilled(self._name(seq), first, seq.num_scheduled_tokens, num_tokens))
        return [*said, sentences.decoded(decodes)] if decodes else said

    def _forked_and_finished(self, request: Request) -> list[sentences.Sentence]:
        """Also of a request that came and went in one step, or was aborted since the last one."""
        said, old = [], {seen.seq: seen for seen in self._old(request)}
        new = [seq for seq in request.live if seq not in old]
        if new and 1 < len(request.sequences) <= len(old):
            before, parents = {seen.seq.index: seen for seen in old.values()}, {}
            for seq in new:
                index, _ = self._parent(seq, before)
                parents.setdefault(self._name(before[index].seq), []).append(self._name(seq))
            names = [self._name(seq) for seq in old]
            said.append(sentences.next_beams(parents, [name for name in names if name not in parents]))
        elif new and len(request.sequences) > 1:
            names = [self._name(seq) for seq in request.sequences]
            said.append(sentences.forked(names[0], names, len(request.live[0].block_table)))
        if request.finished:
            name, seq = self.known[request].name, request.sequences[0]
            tables = [seen.block_table for seen in old.values()]
            return [*said, sentences.finished(name, seq.finish_reason, *self._given_back(tables))]
        for seq in request.sequences:
            if seq.finished and (seq in old or new):
                tables = [old[seq].block_table] if seq in old else []
                name, reason = self._name(seq), seq.finish_reason
                said.append(sentences.finished(name, reason, *self._given_back(tables)))
        return said

    def _given_back(self, tables: list[list[int]]) -> tuple[list[int], list[int]]:
        """The blocks of the tables that are in no table any more: cached ones and free ones."""
        blocks = sorted({block_id for table in tables for block_id in table})
        unused = [block_id for block_id in blocks if self.manager.blocks[block_id].ref_count == 0]
        cached = [block_id for block_id in unused if block_id in self.manager.cached]
        return cached, [block_id for block_id in unused if block_id not in self.manager.cached]


def _as_json(line: dict[str, Any]) -> bytes:
    """A line of the page. In it, a "<" could end the script element that the lines are in."""
    return json.dumps(line, separators=(",", ":")).replace("<", "\\u003c").encode() + b"\n"


def _write_all(file: FileIO, data: bytes) -> None:
    """When a disk becomes full, a write stores what still fits, and only the next one raises OSError."""
    while data:
        data = data[file.write(data) :]


def _several(request: Request) -> str:
    """What a request with several sequences is."""
    if request.num_sequences == 1:
        return ""
    width = request.num_sequences
    return f"a beam search of width {width}" if request.is_beam_search else f"{width} samples"
