"""The trace: what is recorded of a step. (The page, and what it says, are tested in test_trace_page.py.)"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import tokens
from fake_runner import FakeRunner, fake_engine
from random_workloads import Workload, forked, mixed
from traces import State, name_of, read_trace, states_of

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.sequence import ScheduledBatch
from nanopaged.snapshot import Snapshot, short_key


def make_engine(trace: Path | None, **options: int | str) -> LLMEngine:
    options = {"block_size": 4, "num_host_blocks": 8, "num_blocks": 12, "watermark": 0.0} | options
    config = EngineConfig(TINY_MODEL, load_format="dummy", trace=trace, **options)
    return LLMEngine(config, FakeRunner(config.num_blocks, config.block_size, config.num_host_blocks))


def greedy(max_tokens: int, **options: int | float) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def run_to_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()


BEAMS = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)

# ── a line has the whole state ────────────────────────────────────────────────────────────────────


@dataclass
class Recorded:
    """A line of a trace, as the engine itself saw the step.

    Fields:
        moves: "pool 3 host 0" for each block that is copied, in the order in which it is done.
        num_scheduled: (request id, index of the sequence) → tokens.
    """

    scheduled: Snapshot | None = None  # None: the step failed
    updated: Snapshot | None = None
    moves: list[str] = field(default_factory=list)
    num_scheduled: dict[tuple[str, int], int] = field(default_factory=dict)


class Watcher:
    """A listener that takes snapshots where the trace does."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.now = engine, Recorded()
        engine.listeners.append(self)

    def batch_scheduled(self, batch: ScheduledBatch) -> None:
        moves = [f"pool {src} host {dst}" for src, dst in batch.moves.swap_out]
        moves += [f"host {src} pool {dst}" for src, dst in batch.moves.swap_in]
        moves += [f"pool {src} pool {dst}" for src, dst in batch.moves.copies]
        num = {(seq.request.request_id, seq.index): seq.num_scheduled_tokens for seq in batch.sequences}
        self.now = Recorded(self.engine.snapshot(), None, moves, num)

    def step_ended(self, batch: ScheduledBatch) -> None: ...

    def step_failed(self, error: BaseException) -> None:
        self.now = Recorded()


def record(workload: Workload, page: Path) -> list[Recorded]:
    """Serve a workload with a trace, with steps that fail. Returns what each line of the trace should say."""
    engine, rng = fake_engine(**workload.options, has_texts=True, trace=page), random.Random(workload.seed)
    lines: list[Recorded] = []
    watcher, left = Watcher(engine), dict(enumerate(workload.requests))
    for now in range(1000):
        for i, asked in list(left.items()):
            if asked.arrival <= now:
                engine.add_request(str(i), asked.prompt, asked.params)
                del left[i]
        for name in list(engine.requests):
            after = workload.requests[int(name)].aborted_after
            if after is not None and workload.requests[int(name)].arrival + after <= now:
                engine.abort_request(name)
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        if not engine.has_unfinished_requests():
            if not left:
                return lines
            continue
        engine.runner.fail_next = rng.random() < 0.02
        with suppress(RuntimeError):
            engine.step()
        watcher.now.updated = engine.snapshot()
        lines.append(watcher.now)
    raise AssertionError("the workload does not end")


def names_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Request id → name."""
    return {id: name_of(number) for line in lines for number, id, *_ in line.get("requests", [])}


def check_state(state: State, snapshot: Snapshot, names: dict[str, str]) -> None:
    queues: dict[str, list[str]] = {"running": [], "waiting": [], "swapped": []}
    several = {name.rstrip("0123456789") for name in state.seqs if name[-1].isdigit()}
    seqs = {}
    for request in snapshot.requests:
        queues[request.state].append(names[request.request_id])
        for seq in request.sequences:
            name = names[request.request_id] + seq.name.removeprefix(request.request_id).lstrip(".")
            tables = list(seq.block_table), list(seq.host_table)
            contents = (list(seq.token_ids), seq.num_computed_tokens, *tables)
            seqs[f"{name}1" if name in several else name] = contents
    assert state.seqs == seqs
    assert sorted(state.running) == sorted(queues["running"])
    assert sorted(state.waiting) == sorted(queues["waiting"] + queues["swapped"])
    assert state.cached == list(snapshot.cached)
    assert state.keys == {b.block_id: short_key(b.key) for b in snapshot.blocks if b.key is not None}


@pytest.mark.parametrize("make", [mixed, forked])
def test_random_runs(make: Any, tmp_path: Path) -> None:
    """With aborts, steps that fail and an emptied prefix cache, the states are the engine's own snapshots."""
    num_failed = 0
    for seed in range(20):
        recorded = record(make(seed), tmp_path / "run.html")
        _, *lines = read_trace(tmp_path / "run.html")
        names = names_of(lines)
        for line, states, step in zip(lines, states_of(lines), recorded, strict=True):
            num_failed += "failed" in line
            assert ("failed" in line) == (step.scheduled is None)
            if step.scheduled is not None:
                check_state(states["scheduled"], step.scheduled, names)
            check_state(states["updated"], step.updated, names)
    assert num_failed > 5


def lines_of(page: Path) -> list[str]:
    """The text of the lines of the steps."""
    return page.read_text(encoding="utf-8").split('id="steps">\n')[1].splitlines()[1:]


def lengths_of_lines(
    page: Path, params: Any, num: int, num_blocks: int, long: int = 20, earlier: int = 0, beside: int = 0
) -> list[int]:
    """Characters of the lines of the first steps of `num` requests.

    Args:
        long: tokens of a prompt.
        earlier, beside: other requests, which have ended or wait.
    """
    options = {"num_host_blocks": 0, "preemption": "recompute", "max_num_batched_tokens": 200_000}
    engine = make_engine(page, num_blocks=num_blocks, max_num_seqs=num * params.width, **options)
    for i in range(earlier):
        engine.add_request(f"earlier {i}", [i + 100] * 400, greedy(2))
    run_to_end(engine)
    num_lines = len(lines_of(page))
    for i in range(num):
        engine.add_request(f"{i}", [i + 1] * long, params)
    for i in range(beside):
        engine.add_request(f"beside {i}", [i] * 8, greedy(2))
    for _ in range(30):
        engine.step()
    return [len(line) for line in lines_of(page)[num_lines + 1 :]]


@pytest.mark.parametrize(
    ("params", "num", "num_blocks", "more"),
    [
        pytest.param(greedy(40), 1, 4000, {"earlier": 40}, id="a full prefix cache"),
        pytest.param(greedy(40), 8, 95, {"beside": 1000}, id="a long queue, with preemption"),
        pytest.param(greedy(40), 64, 40_000, {"long": 2000}, id="long texts"),
        pytest.param(BEAMS, 1, 2000, {"long": 2000}, id="long beams"),
        pytest.param(greedy(40, n=3, seed=1), 1, 2000, {"long": 2000}, id="long samples"),
    ],
)
def test_a_line_is_as_long_as_what_has_changed(
    params: Any, num: int, num_blocks: int, more: dict[str, int], tmp_path: Path
) -> None:
    """Requests beside much that stays as it is give lines like those beside little."""
    little = lengths_of_lines(tmp_path / "run.html", params, num, num_blocks)
    much = lengths_of_lines(tmp_path / "run.html", params, num, num_blocks, **more)
    for length, longer in zip(little, much, strict=True):
        assert longer < 2 * length + 100


def test_requests_are_told_apart_not_ids(tmp_path: Path) -> None:
    """The aborted one leaves, and one with its id waits. Names follow the order of arrival."""
    engine = make_engine(tmp_path / "run.html", max_num_seqs=2)
    engine.add_request("a", tokens(5, 7), greedy(9))
    engine.add_request("b", tokens(50, 7), greedy(9))
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", tokens(80, 7), greedy(4))
    run_to_end(engine)
    _, *lines = read_trace(tmp_path / "run.html")
    assert names_of(lines[:1]) | names_of(lines[1:]) == {"a": "C", "b": "B"}
    assert lines[1]["scheduled"]["running"] == [1, 2]
    assert [row[0] for row in lines[1]["scheduled"]["seqs"]] == [1, 2], "the aborted one is forgotten"


def test_a_line_that_was_not_written_has_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C while a step is recorded, a second one while it fails: the next line has all that was lost."""
    page = tmp_path / "run.html"
    engine = make_engine(page)
    engine.add_request("a", tokens(5, 7), greedy(3, n=2, seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(engine.listeners[0], "_write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert len(read_trace(page)) == 1
    while engine.has_unfinished_requests():
        outputs = engine.step()
        *_, states = states_of(read_trace(page)[1:])
        check_state(states["updated"], engine.snapshot(), {"a": "A"})
    assert [len(output.token_ids) for output in outputs[0].outputs] == [3, 3], "no token is lost"


def test_the_trace_changes_nothing(tmp_path: Path) -> None:
    """With and without it, the same tokens, tables and counts, and the engine's own classes."""
    runs = []
    for page in (tmp_path / "run.html", None):
        engine = make_engine(page, num_blocks=9, preemption="swap")
        assert type(engine.block_manager) is BlockManager
        for i in range(4):
            engine.add_request(str(i), tokens(5, 6 + i), greedy(9, n=1 + i % 2, seed=i))
        snapshots = []
        while engine.has_unfinished_requests():
            engine.step()
            snapshots.append(str(engine.snapshot()))
        runs.append((snapshots, engine.stats()))
    assert runs[0] == runs[1]


# ── the file ──────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_complete_after_every_step(tmp_path: Path) -> None:
    """So an interrupt, or a kill, leaves a page. An older page is replaced; no text can end the script."""
    page = tmp_path / "run.html"
    page.write_text("old", encoding="utf-8")
    engine = make_engine(page)
    engine.add_request("</script><b>\ud800", "</script> <!-- <script>", greedy(5))
    assert len(read_trace(page)) == 1
    for num_lines in (2, 3, 4):
        engine.step()
        assert len(read_trace(page)) == num_lines
    viewer, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    assert viewer.startswith("<!doctype html>")
    assert "<" not in data
    assert read_trace(page)[1]["requests"][0][1] == "</script><b>\ud800"


@pytest.mark.parametrize(
    ("trace", "error", "message"),
    [
        ("nowhere/run.html", FileNotFoundError, "'nowhere/run.html', but must be a file in a folder that"),
        (".", FileNotFoundError, "'.', but must be a file in a folder that exists"),
        (True, TypeError, "trace must be a file name like 'run.html', got True"),
    ],
)
def test_mistakes(trace: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(trace=trace)


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands for the disk."""
    resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")
    page, limits = tmp_path / "run.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    engine = make_engine(page)
    engine.add_request("a", tokens(5, 7), greedy(3))
    engine.step()
    resource.setrlimit(resource.RLIMIT_FSIZE, (page.stat().st_size + 40, limits[1]))
    try:
        run_to_end(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (message,) = caplog.messages
    assert message.startswith(f"the trace {page} ends here: ")
    assert engine.stats().num_generated_tokens == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_page_that_cannot_be_written_is_an_error_at_the_start() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        make_engine(Path("/dev/full"))
