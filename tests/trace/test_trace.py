"""The trace: what is recorded of a step. (The page, and what it says, are tested in test_trace_page.py.)"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import tokens
from fake_runner import FakeRunner
from programs import load_file
from random_workloads import Workload, forked, mixed
from traces import State, name_of, read_trace, states_of

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.sequence import ScheduledBatch
from nanopaged.snapshot import Snapshot, short_key

random_runs = load_file(Path(__file__).parents[1] / "engine" / "test_random_runs.py")


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
    engine, rng = random_runs.make_engine("fake", workload.config(page)), random.Random(workload.seed)
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
    queues = {"running": state.running, "waiting": state.waiting}
    for queue, its_states in (("running", {"running"}), ("waiting", {"waiting", "swapped"})):
        there = [names[r.request_id] for r in snapshot.requests if r.state in its_states]
        assert sorted(queues[queue]) == sorted(there)
    seqs = {}
    for request in snapshot.requests:
        for seq in request.sequences:
            name = names[request.request_id] + seq.name.removeprefix(request.request_id).lstrip(".")
            tables = list(seq.block_table), list(seq.host_table)
            seqs[name] = (list(seq.token_ids), seq.num_computed_tokens, *tables)
    several = {name.rstrip("0123456789") for name in state.seqs if name[-1].isdigit()}
    assert state.seqs == {f"{name}1" if name in several else name: seq for name, seq in seqs.items()}
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


def test_what_never_changes_is_written_once(tmp_path: Path) -> None:
    """The ids of requests are in their first line; each token is there once for each sequence."""
    engine = make_engine(tmp_path / "run.html", num_blocks=400, block_size=16, num_host_blocks=0)
    for i in range(8):
        engine.add_request(f"request {i}", [900 + i] * 40, greedy(5, n=1 + i % 3))
    run_to_end(engine)
    lines = lines_of(tmp_path / "run.html")
    assert [lines[0].count(f"request {i}") for i in range(8)] == [1] * 8
    num = [sum(len(re.findall(rf"[\[,]{900 + i}\b", line)) for line in lines) for i in range(8)]
    assert num == [40 * (1 + i % 3) for i in range(8)]
    assert not any("request" in line for line in lines[1:])


def lines_of(page: Path) -> list[str]:
    """The text of the lines of the steps."""
    return page.read_text(encoding="utf-8").split('id="steps">\n')[1].splitlines()[1:]


Asked = tuple[list[int], SamplingParams | BeamSearchParams]


def lengths_of_lines(
    page: Path, num_blocks: int, asked: list[Asked], earlier: list[Asked], beside: list[Asked]
) -> list[int]:
    """Characters of the lines of steps 2 to 30 of requests; others came earlier, or wait beside them."""
    most = sum(params.width for _, params in asked)
    options = {"num_blocks": num_blocks, "max_num_batched_tokens": 200_000, "max_num_seqs": most}
    engine = make_engine(page, num_host_blocks=0, preemption="recompute", **options)
    for i, (prompt, params) in enumerate(earlier):
        engine.add_request(f"earlier {i}", prompt, params)
    run_to_end(engine)
    num_lines = len(lines_of(page))
    for i, (prompt, params) in enumerate(asked + beside):
        engine.add_request(f"{i}", prompt, params)
    for _ in range(30):
        engine.step()
    return [len(line) for line in lines_of(page)[num_lines + 1 :]]


BEAMS = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "num", "num_blocks", "long", "earlier", "beside"),
    [
        pytest.param(greedy(40), 1, 4000, 20, 40, 0, id="a full prefix cache"),
        pytest.param(greedy(40), 8, 95, 20, 0, 1000, id="a long queue"),
        pytest.param(greedy(40), 64, 40_000, 2000, 0, 0, id="long texts"),
        pytest.param(BEAMS, 1, 2000, 2000, 0, 0, id="long beams"),
        pytest.param(greedy(40, n=3, seed=1), 1, 2000, 2000, 0, 0, id="long samples"),
    ],
)
def test_a_line_is_as_long_as_what_has_changed(
    params: Any, num: int, num_blocks: int, long: int, earlier: int, beside: int, tmp_path: Path
) -> None:
    """Requests beside much that stays as it is give lines like those beside little.

    Args:
        params, num: of the requests.
        num_blocks: of the pool. In that of the long queue, requests are preempted.
        long: tokens of a prompt, instead of 20.
        earlier, beside: other requests, which have ended or wait, instead of none.
    """
    lengths = []
    for size, *others in ((20, 0, 0), (long, earlier, beside)):
        asked = [([i + 1] * size, params) for i in range(num)]
        before = [([i + 100] * 400, greedy(2)) for i in range(others[0])]
        waiting = [([i] * 8, greedy(2)) for i in range(others[1])]
        lengths.append(lengths_of_lines(tmp_path / "run.html", num_blocks, asked, before, waiting))
    for little, much in zip(*lengths, strict=True):
        assert much < 2 * little + 100, lengths


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


def test_a_ctrl_c_just_after_a_line_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder does not know that the page has it. The line of the failed step begins anew."""
    page = tmp_path / "run.html"
    engine = make_engine(page)
    engine.add_request("a", tokens(5, 7), greedy(6, n=2, seed=1))
    engine.step()

    @contextmanager
    def open_and_interrupt(mode: str) -> Iterator[Any]:
        with page.open(mode) as file:
            yield file
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.listeners[0], "path", Mock(open=open_and_interrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_unfinished_requests():
        *_, states = states_of(read_trace(page)[1:])
        check_state(states["updated"], engine.snapshot(), {"a": "A"})
        engine.step()


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


def test_mistakes(tmp_path: Path) -> None:
    for trace, error, message in (
        (tmp_path / "nowhere" / "run.html", FileNotFoundError, "there is no folder '.*nowhere'"),
        (tmp_path, ValueError, "which is a folder: name a file in it"),
        (True, TypeError, "trace must be a file name such as 'run.html', got True"),
    ):
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
