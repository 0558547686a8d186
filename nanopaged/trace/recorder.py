"""Writes what happens in each step into a page that a browser shows: `LLM(..., trace="run.html")`.

The file begins with `page.html`, which is the whole viewer. A line of JSON follows for the engine, then one
for each step. Every line goes to the file at once, so the page is complete at any time, also while the engine
runs and after it was interrupted. A line says what has changed since the line before.

The page shows a step in its parts: scheduled, copied, computed, updated (`sentences.PARTS`). A line has two
sets of changes: those until the batch was scheduled, and those of the update. What is copied and computed in
between, the batch says.

Most changes are found by comparing the engine's state with the state before. The rest, such as which block
was evicted, is in the notes of `recorded_pool.py`. The engine and all that is below it know nothing of the
trace: it is one of `LLMEngine.listeners`.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanopaged.sequence import Request, ScheduledBatch, Sequence
from nanopaged.trace import sentences
from nanopaged.trace.recorded_pool import RecordedBlockManager
from nanopaged.trace.sentences import Sentence
from nanopaged.views.snapshot import short_key

if TYPE_CHECKING:
    from nanopaged.engine import LLMEngine

PAGE = Path(__file__).with_name("page.html")

logger = logging.getLogger("nanopaged")


@dataclass(slots=True)
class Seen:
    """A sequence as the page knows it."""

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
        said               what happened: [[kinds of event, sentence, number of the part], …]
        scheduled          what changed from the line before until the batch was scheduled, see below
        evicted, hits      blocks that were evicted; that were found in the prefix cache
        copies, out, in    moves of blocks: [[source, destination], …]
        batch              [[request, sequence, tokens to compute], …]
        used, filled       blocks in use after the step; slots in them that hold K/V
        drawn              tokens generated in this step
        texts              token → text of tokens that are new to the page

    Changes are in `scheduled`, and those of the update in the line itself:

        fresh              1: what follows is the whole state, not a change
        requests           new ones: [[number, name, id, what it is if it has several sequences], …]
        running, waiting   the queues, if they have changed
        seqs, gone         changed sequences, see `_change`; finished ones while their request goes on
        keys, uncached, cached   see `_blocks`

    The line of a failed step is fresh, and has no batch.

    Attributes:
        path: the page; it is complete after every step.

    Raises:
        OSError: the page cannot be written.
    """

    def __init__(self, engine: LLMEngine) -> None:
        assert engine.config.trace is not None
        self.path = Path(engine.config.trace)
        self.engine, self.scheduler, self.tokenizer = engine, engine.scheduler, engine.tokenizer
        manager: Any = engine.block_manager
        manager.__class__ = RecordedBlockManager  # the same pool, which now notes what it does
        self.manager: RecordedBlockManager = manager
        self.manager.forget()
        scheduler = engine.scheduler
        self.start = time.monotonic()
        self.num_requests = 0
        self.known: dict[Request, Known] = {}  # the unfinished ones
        self.fresh = False  # whether the next changes must be a whole state
        self.line: dict[str, Any] = {}  # of the present step
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

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        """Begin the line of a step. If the step then fails, this line is never written."""
        fresh, self.fresh = self.fresh, True
        if fresh:
            self._forget()
        said, num_requests = self._aborted(), self.num_requests
        changes = self._changes(fresh, self._in_order(), batch.admitted)
        if self.num_requests > num_requests:
            said += [
                sentences.arrived(known.name, request.num_prompt_tokens, _several(request))
                for request, known in self.known.items()
                if known.number >= num_requests
            ]
        manager = self.manager
        self.line = {
            "said": said + self._scheduled(batch, changes) + self._copied(batch) + self._computed(batch),
            "scheduled": changes,
            "evicted": manager.evicted,
            "hits": [block_id for found, _ in manager.allocated.values() for block_id in found],
            "copies": batch.copies,
            "out": batch.swap_out,
            "in": batch.swap_in,
            "batch": [
                [self.known[seq.request].number, seq.index, seq.num_scheduled_tokens]
                for seq in batch.sequences
            ],
        }
        manager.forget()

    def step_ended(self, batch: ScheduledBatch) -> None:
        """Write the line of a step that has just ended."""
        for number, index, num_tokens in self.line["batch"]:
            self.seen[number, index].num_computed_tokens += num_tokens
        self.line["said"] += self._updated()
        self._write(self.engine.num_steps + 1, self.line | self._changes(False, self.waiting, ()))

    def step_failed(self, error: BaseException) -> None:
        """Write a line that says that a step has failed, and that all requests wait again."""
        self.fresh = True
        self._forget()
        failed = {"said": [sentences.failed(type(error).__name__)]}
        self._write(self.engine.num_steps, failed | self._changes(True, self._in_order(), ()))

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

    def _write(self, step: int, line: dict[str, Any]) -> None:
        """Append a line. If that fails (the disk is full), the trace ends, and the engine goes on."""
        num_generated_tokens = self.scheduler.num_generated_tokens
        line |= self._usage() | {"drawn": num_generated_tokens - self.num_generated_tokens}
        line["texts"] = self._texts([*line.get("scheduled", {}).get("seqs", []), *line.get("seqs", [])])
        self.num_generated_tokens = num_generated_tokens
        self.manager.forget()
        if self.file is not None:
            now = {"step": step, "time": round(time.monotonic() - self.start, 6)}
            try:
                _write_all(self.file, _as_json(now | _without_empty(line)))
            except OSError as error:
                self.file = None
                logger.warning("the trace %s ends here: %s", self.path, error)
        self.fresh = False  # not before: if this is interrupted, the next line must not build on it

    # ── the state: what has changed ───────────────────────────────────────────────────────────────

    def _changes(self, fresh: bool, waiting: list[Request], admitted: Iterable[Request]) -> dict[str, Any]:
        """What has changed since the last call."""
        running = list(self.scheduler.running)
        newly_waiting = []
        if waiting != self.waiting:
            old = set(self.waiting)
            newly_waiting = [request for request in waiting if request not in old]
        met = dict.fromkeys([*(running if fresh else admitted), *newly_waiting])
        new = self._introduce(met)
        changes: dict[str, Any] = {
            "fresh": int(fresh),
            "requests": [
                [*astuple(self.known[request]), request.request_id, _several(request)]
                for request in (met if fresh else new)  # of a whole state the page may know none
            ],
        }
        changes |= self._sequences(running + newly_waiting) | self._blocks()
        changes = _without_empty(changes) | self._queues(running, waiting)
        self.running, self.waiting = running, waiting
        return changes

    def _in_order(self) -> list[Request]:
        """The waiting requests, in order of service. An update leaves them as they are."""
        return sorted(self.scheduler.waiting.values(), key=self.scheduler.rank)

    def _introduce(self, requests: Iterable[Request]) -> list[Request]:
        """Give the new ones a number and a name: A, B, …, Z, AA, AB, … in order of arrival. Returns them."""
        new = [request for request in requests if request not in self.known]
        new.sort(key=attrgetter("arrival_time"))
        for request in new:
            name, rest = "", self.num_requests + 1
            while rest:
                rest, letter = divmod(rest - 1, 26)
                name = chr(ord("A") + letter) + name
            self.known[request] = Known(self.num_requests, name)
            self.num_requests += 1
        return new

    def _sequences(self, requests: list[Request]) -> dict[str, Any]:
        """The changes of the sequences of these requests."""
        seen, changes, gone = self.seen, [], []
        for request in requests:
            number, before = self.known[request].number, {}
            if request.num_sequences > 1 or request.is_beam_search:
                # Its sequences may be new ones: forks of those before.
                before = {i: seen.pop((number, i), None) for i in range(request.num_sequences)}
                seen |= {(number, seq.index): old for seq in request.live if (old := before[seq.index])}
                left = {seq.index for seq in request.live}
                gone += [[number, i] for i in before if before[i] is not None and i not in left]
            for seq in request.live:
                change = self._change(number, seq, before)
                if change is not None:
                    changes.append(change)
        return {"seqs": changes, "gone": gone}

    def _change(self, number: int, seq: Sequence, before: dict[int, Seen | None]) -> list[Any] | None:
        """What is new of one sequence.

        [number, index, token]: one more token is known, and nothing else has changed: the usual decode
        [number, index, from, tokens kept, new tokens, computed, blocks kept, new blocks, host table]: tokens
            and table begin like those that sequence `from` of the request had before, -1 for none
        """
        key, token_ids, table = (number, seq.index), seq.token_ids, seq.block_table
        seen, num_tokens = self.seen.get(key), len(token_ids)
        parent = seq.index
        if seen is None or seen.seq is not seq:
            parent, seen = self._parent(seq, before)
        elif (
            seq.num_computed_tokens == seen.num_computed_tokens
            and table == seen.block_table
            and seq.host_table == seen.host_table
            and num_tokens - seen.num_tokens in (0, 1)
        ):
            if num_tokens == seen.num_tokens:
                return None
            seen.num_tokens = num_tokens
            return [*key, token_ids[-1]]
        num_kept, old_table = (seen.num_tokens, seen.block_table) if seen is not None else (0, [])
        same = 0
        while same < min(len(table), len(old_table)) and table[same] == old_table[same]:
            same += 1
        computed, host_table = seq.num_computed_tokens, list(seq.host_table)
        self.seen[key] = Seen(seq, num_tokens, computed, list(table), host_table)
        return [*key, parent, num_kept, token_ids[num_kept:], computed, same, table[same:], host_table]

    def _parent(self, seq: Sequence, before: Mapping[int, Seen | None]) -> tuple[int, Seen | None]:
        """The sequence of `before` from which this one was forked, and its index; -1 for none."""
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

    def _usage(self) -> dict[str, int]:
        """The blocks in use, and the slots in them that hold K/V."""
        manager, size = self.manager, self.manager.block_size
        empty: dict[int, int] = {}  # block → slots in it that none of its sequences has filled
        full: set[int] = set()  # blocks that siblings share count as computed for all but the first of them
        for request in self.running:
            for seq in request.live:
                table, num_computed_tokens = seq.block_table, seq.num_computed_tokens
                if request.num_sequences > 1:
                    full.update(table[: num_computed_tokens // size])
                for i in range(num_computed_tokens // size, len(table)):
                    here = size - max(0, num_computed_tokens - i * size)
                    empty[table[i]] = min(here, empty.get(table[i], size))
        used = manager.num_blocks - manager.num_free_blocks
        num_empty = sum(num for block_id, num in empty.items() if block_id not in full)
        return {"used": used, "filled": used * size - num_empty}

    def _texts(self, changes: list[list[Any]]) -> dict[int, str]:
        """The texts of the tokens that the page does not know yet."""
        if self.tokenizer is None:
            return {}
        new = {token_id for change in changes for token_id in (change[4] if len(change) > 3 else change[2:])}
        new -= self.known_tokens
        self.known_tokens |= new
        return {token_id: str(self.tokenizer.decode([token_id])) for token_id in sorted(new)}

    # ── what happened ─────────────────────────────────────────────────────────────────────────────

    def _name(self, seq: Sequence) -> str:
        """A, or A1, A2, … if the request has, or will have, several sequences."""
        name = self.known[seq.request].name
        return name if seq.request.num_sequences == 1 else f"{name}{seq.index + 1}"

    def _old(self, request: Request) -> list[Seen]:
        """The sequences of a request as the page knows them."""
        keys = ((self.known[request].number, i) for i in range(request.num_sequences))
        return [self.seen[key] for key in keys if key in self.seen]

    def _aborted(self) -> list[Sentence]:
        """Requests that have left between two steps."""
        return [
            sentences.aborted(self.known[request].name, *self._given_back(self._old(request)))
            for request in [*self.running, *self.waiting]
            if not request.live
        ]

    def _scheduled(self, batch: ScheduledBatch, changes: dict[str, Any]) -> list[Sentence]:
        """What the scheduler has done, causes before effects."""
        manager, known = self.manager, self.known
        said = [sentences.preempted(known[request].name, way == "swap") for request, way in batch.preempted]
        if manager.evicted:
            said.append(sentences.evicted(manager.evicted))
        copies = {dst: self._name(writer) for writer, _, _, dst in manager.copies}
        taken = set(manager.taken).difference(copies)
        if taken:
            longer = [change for change in changes.get("seqs", []) if len(change) > 3]
            tables = {(change[0], change[1]): change[7] for change in longer}
            grown: dict[str, list[int]] = {}
            for request in self.running:
                for seq in request.live if request not in batch.admitted else ():
                    added = tables.get((known[request].number, seq.index), [])
                    if new := [block_id for block_id in added if block_id in taken]:
                        grown[self._name(seq)] = new
            if grown:
                said.append(sentences.grown(list(grown), [i for new in grown.values() for i in new]))
        if copies:
            said.append(sentences.parted(list(copies.values()), list(copies)))
        for request in batch.admitted:
            name, num_tokens = known[request].name, max([seq.num_tokens for seq in request.live])
            if request not in manager.allocated:
                said.append(sentences.resumed(name, list(self._swapped_in(request, batch).values())))
                continue
            found, new = manager.allocated[request]
            if found:
                num_found = len(found) * manager.block_size
                said.append(sentences.found(name, found, new, num_found, num_tokens))
            else:
                said.append(sentences.admitted(name, new, num_tokens))
        return said

    def _swapped_in(self, request: Request, batch: ScheduledBatch) -> dict[int, int]:
        """Host block → device block, of a request that was admitted and not allocated."""
        blocks = {block_id for seq in request.live for block_id in seq.block_table}
        return {src: dst for src, dst in batch.swap_in if dst in blocks}

    def _copied(self, batch: ScheduledBatch) -> list[Sentence]:
        """What the runner moves before it computes."""
        said, known = [], self.known
        for request, way in batch.preempted:
            if way == "swap":
                hosts = {host_id for seq in request.live for host_id in seq.host_table}
                moved = {src: dst for src, dst in batch.swap_out if dst in hosts}
                said.append(sentences.swapped_out(known[request].name, moved))
        for request in batch.admitted:
            if request not in self.manager.allocated:
                moved = self._swapped_in(request, batch)
                said.append(sentences.swapped_in(known[request].name, moved))
        for writer, others, src, dst in self.manager.copies:
            said.append(sentences.copied(self._name(writer), [self._name(seq) for seq in others], src, dst))
        return said

    def _computed(self, batch: ScheduledBatch) -> list[Sentence]:
        """What the forward pass computes."""
        said, decodes = [], []
        for i, seq in enumerate(batch.sequences):
            num_tokens = len(seq.token_ids)
            if i < batch.num_decodes and num_tokens > seq.request.num_prompt_tokens:
                decodes.append(self._name(seq))
            else:
                first, num = seq.num_computed_tokens, seq.num_scheduled_tokens
                said.append(sentences.prefilled(self._name(seq), first, num, num_tokens))
        return [*said, sentences.decoded(decodes)] if decodes else said

    def _updated(self) -> list[Sentence]:
        """Which requests fork, which sequences end."""
        said = []
        for request in self.running:
            if request.num_sequences > 1 or not request.live:
                said += self._forked_and_finished(request)
        return said

    def _forked_and_finished(self, request: Request) -> list[Sentence]:
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
            given_back = self._given_back(list(old.values()))
            return [*said, sentences.finished(name, seq.finish_reason, *given_back)]
        for seq in request.sequences:
            if seq.finished and (seq in old or new):
                given_back = self._given_back([old[seq]] if seq in old else [])
                said.append(sentences.finished(self._name(seq), seq.finish_reason, *given_back))
        return said

    def _given_back(self, old: list[Seen]) -> tuple[list[int], list[int]]:
        """The blocks of these sequences that are in no table any more: cached ones and free ones."""
        blocks = sorted({block_id for seen in old for block_id in seen.block_table})
        unused = [block_id for block_id in blocks if self.manager.blocks[block_id].ref_count == 0]
        cached = [block_id for block_id in unused if block_id in self.manager.cached]
        return cached, [block_id for block_id in unused if block_id not in self.manager.cached]


def _as_json(line: dict[str, Any]) -> bytes:
    """A line of the page. In it, a "<" could end the script element that the lines are in."""
    return json.dumps(line, separators=(",", ":")).replace("<", "\\u003c").encode() + b"\n"


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """A queue is in them if it has changed, so an empty one stays."""
    return {name: value for name, value in fields.items() if value or name in ("running", "waiting")}


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
