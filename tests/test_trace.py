"""The trace: what is recorded of a step, and how it is said. (The page is tested in test_trace_page.py.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import tokens
from fake_runner import FakeRunner

from nanopaged import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.trace import sentences
from nanopaged.trace.sentences import PARTS


def make_engine(trace: Path | None, **options: int | str) -> LLMEngine:
    options = {"block_size": 4, "num_host_blocks": 8, "num_blocks": 12, "watermark": 0.0} | options
    config = EngineConfig(TINY_MODEL, load_format="dummy", trace=trace, **options)
    return LLMEngine(config, FakeRunner(config.num_blocks, config.block_size, config.num_host_blocks))


def greedy(max_tokens: int, **options: int | float) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def read_trace(page: Path) -> list[dict[str, Any]]:
    """The line of the engine, and those of the steps."""
    _, data = page.read_text(encoding="utf-8").split('id="steps">\n')
    return [json.loads(line) for line in data.splitlines()]


def said(page: Path, kind: str) -> list[str]:
    """All sentences of one kind."""
    sentences = [sentence for line in read_trace(page)[1:] for sentence in line.get("said", [])]
    return [text for kinds, text, _ in sentences if kind in kinds.split()]


def part_of(page: Path, kind: str) -> set[str]:
    """The parts of steps in which such sentences are said."""
    sentences = [sentence for line in read_trace(page)[1:] for sentence in line.get("said", [])]
    return {PARTS[part] for kinds, _, part in sentences if kind in kinds.split()}


def run_to_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()


# ── what is said ──────────────────────────────────────────────────────────────────────────────────


def test_fork_and_copy_on_write(tmp_path: Path) -> None:
    """The paper's Fig. 8: the first writer copies, the last one writes in place."""
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("four score", tokens(5, 7), greedy(3, n=3, seed=1))
    run_to_end(engine)
    (fork,) = said(tmp_path / "run.html", "fork")
    assert fork == "The prompt is computed: A1 is forked into A1, A2 and A3, which share its 2 blocks."
    assert said(tmp_path / "run.html", "copy") == [
        "A1 writes into block 1, which A2 and A3 also use: copied to block 2.",
        "A2 writes into block 1, which A3 also uses: copied to block 3.",
    ]
    assert said(tmp_path / "run.html", "part") == [
        "A1 and A2 are about to write into a shared block: blocks 2 and 3 are taken for copies."
    ]
    assert said(tmp_path / "run.html", "grow") == [
        "A1, A2 and A3 need a slot each for the newest token: blocks 4 to 6 are taken."
    ], "and not those for the copies"
    for kind, part in (
        ("part", "scheduled"),
        ("copy", "copied"),
        ("decode", "computed"),
        ("fork", "updated"),
    ):
        assert part_of(tmp_path / "run.html", kind) == {part}
    (finish,) = said(tmp_path / "run.html", "finish")
    assert finish.startswith("A is finished (length): ")


def test_prefix_hit_and_chunks(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "run.html", max_num_batched_tokens=8)
    engine.add_request("first", tokens(5, 11), greedy(2))
    run_to_end(engine)
    engine.add_request("second", [*tokens(5, 11), 3], greedy(1))
    run_to_end(engine)
    assert said(tmp_path / "run.html", "chunk") == [
        "A computes a chunk of 8 tokens: the token budget is used up. "
        "3 of its 11 tokens are left for later steps."
    ]
    assert said(tmp_path / "run.html", "prefill")[1:] == [
        "A computes 3 tokens, the last of its 11.",
        "B computes 4 tokens, the last of its 12.",
    ]
    assert said(tmp_path / "run.html", "hit") == [
        "B begins like an earlier text: it finds blocks 0 and 1 in the prefix cache, "
        "8 of its 12 tokens need not be computed. Block 3 is taken for the others."
    ]
    assert (
        said(tmp_path / "run.html", "admit")[0] == "A is admitted: blocks 0 to 2 are taken for its 11 tokens."
    )
    assert part_of(tmp_path / "run.html", "admit") == {"scheduled"}
    assert said(tmp_path / "run.html", "decode") == ["A computes one token."]


def test_a_line_says_what_has_changed_and_no_more(tmp_path: Path) -> None:
    """In a decode step, a sequence has one more token; it may have taken a block before."""
    engine = make_engine(tmp_path / "run.html")
    for first in (5, 50):
        engine.add_request(str(first), tokens(first, 4), greedy(8))
    run_to_end(engine)
    _, first, grows, plain, *_ = read_trace(tmp_path / "run.html")
    assert said(tmp_path / "run.html", "admit") == [
        "A is admitted: block 0 is taken for its 4 tokens.",
        "B is admitted: block 1 is taken for its 4 tokens.",
    ]
    assert [len(change) for change in first["scheduled"]["seqs"]] == [9, 9]
    assert grows["scheduled"].keys() == {"seqs", "uncached"}
    always = {"step", "time", "said", "batch", "seqs", "used", "filled", "drawn"}
    assert grows.keys() - {"texts"} == always | {"scheduled"}
    assert plain.keys() - {"texts"} == always
    assert [change[:2] for change in plain["seqs"]] == [[0, 0], [1, 0]]
    assert all(len(change) == 3 for line in (first, grows, plain) for change in line["seqs"])


def test_a_full_block_is_followed_by_a_new_one(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("first", tokens(5, 4), greedy(4))
    engine.add_request("second", tokens(50, 4), greedy(4))
    run_to_end(engine)
    assert said(tmp_path / "run.html", "grow") == [
        "A and B need a slot each for the newest token: blocks 2 and 3 are taken."
    ]
    scheduled = read_trace(tmp_path / "run.html")[2]["scheduled"]
    assert [change[7] for change in scheduled["seqs"]] == [[2], [3]]


@pytest.mark.parametrize("num_host_blocks", [8, 0])
def test_preemption(tmp_path: Path, num_host_blocks: int) -> None:
    engine = make_engine(
        tmp_path / "run.html", num_blocks=6, num_host_blocks=num_host_blocks, preemption="swap"
    )
    engine.add_request("first", tokens(5, 8), greedy(12))
    engine.add_request("second", tokens(50, 8), greedy(6))
    run_to_end(engine)
    page = tmp_path / "run.html"
    (preempted,) = said(page, "preempt")
    assert preempted.startswith(
        "Too few blocks are free: B, the last in the order of service, is preempted. It"
    )
    if num_host_blocks:
        assert preempted.endswith("Its K/V moves to the host.")
        leaves, back = said(page, "swap")
        assert leaves == "B leaves: blocks 2, 3 and 5 → host blocks 0 to 2."
        assert re.fullmatch(r"B comes back: host blocks 0 to 2 → blocks [\d, ]+ and \d\.", back)
        assert part_of(page, "swap") == {"copied"}
        assert [
            text for text in said(page, "admit") if text.startswith("B comes back from the host: blocks ")
        ]
    else:
        assert preempted.endswith("It gives its blocks back, and its K/V is computed again later.")
        assert not said(page, "swap")
    assert said(page, "evict")


def test_beams(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "run.html", num_blocks=40)
    engine.add_request("beams", tokens(5, 7), BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True))
    run_to_end(engine)
    assert said(tmp_path / "run.html", "arrive") == [
        "A arrives with a prompt of 7 tokens, for a beam search of width 3."
    ]
    for sentence in said(tmp_path / "run.html", "beams"):
        children = re.findall(r"A\d", "".join(re.findall(r"→ ([A\d ]+)", sentence)))
        assert sorted(children) == ["A1", "A2", "A3"], sentence


def test_abort_and_failure(tmp_path: Path) -> None:
    """Steps that fail are recorded, requests that leave between two steps are gone in the next one."""
    engine = make_engine(tmp_path / "run.html", max_num_seqs=2)
    for i in range(3):
        engine.add_request(str(i), tokens(20 * i, 6), greedy(8))
    engine.step()
    engine.runner.fail_next = True
    with pytest.raises(RuntimeError):
        engine.step()
    engine.step()
    engine.abort_request("1")
    engine.abort_request("2")
    run_to_end(engine)
    _, *lines = read_trace(tmp_path / "run.html")
    assert [kinds for kinds, *_ in lines[1]["said"]] == ["fail"]
    assert lines[1]["said"][0][1].startswith("The step failed (RuntimeError): all requests start over.")
    assert lines[1]["waiting"] == [0, 1, 2]
    assert lines[1]["fresh"] == 1, "the page forgets what ran before"
    assert "running" not in lines[1]
    assert "scheduled" not in lines[1], "what the step did before it failed is forgotten"
    assert lines[2]["scheduled"]["running"] == [0, 1]
    assert lines[3]["scheduled"]["running"] == [0]
    aborted = [text for _, text, part in lines[3]["said"] if "aborted" in text and PARTS[part] == "scheduled"]
    assert aborted[0].startswith("B is aborted: ")
    assert aborted[1] == "C is aborted."


@pytest.mark.parametrize("n", [1, 2])
def test_another_request_with_the_id_of_an_aborted_one(tmp_path: Path, n: int) -> None:
    """The page tells requests apart, not ids: the first one does not wait because the second one does."""
    engine = make_engine(tmp_path / "run.html", max_num_seqs=n)
    engine.add_request("a", tokens(5, 7), greedy(9, n=n, seed=1))
    engine.add_request("b", tokens(50, 7), greedy(9))
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", tokens(80, 7), greedy(4, n=n, seed=1))
    run_to_end(engine)
    assert not said(tmp_path / "run.html", "preempt")
    assert [text.split(" ")[0] for text in said(tmp_path / "run.html", "arrive")] == ["A", "B", "C"]
    aborted, *others = said(tmp_path / "run.html", "finish")
    assert aborted.startswith("A is aborted: block 0 stays in the prefix cache")
    assert [text.partition(":")[0] for text in others[-2:]] == [
        "B is finished (length)",
        "C is finished (length)",
    ]


def test_words() -> None:
    assert sentences.blocks([3]) == "block 3"
    assert sentences.blocks([1, 3, 4, 5, 6, 9, 10]) == "blocks 1, 3 to 6, 9 and 10"
    assert sentences.blocks(range(0, 80, 2)).endswith("16, 18 and others")
    _, many, _ = sentences.decoded([f"A{i}" for i in range(20)])
    assert many.endswith("A9 and 10 more compute one token each.")


# ── the file ──────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_complete_after_every_step(tmp_path: Path) -> None:
    """So an interrupt, or a kill, leaves a page."""
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("a", tokens(5, 7), greedy(5))
    assert len(read_trace(tmp_path / "run.html")) == 1
    for num_lines in (2, 3, 4):
        engine.step()
        assert len(read_trace(tmp_path / "run.html")) == num_lines


def test_an_older_page_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text("old", encoding="utf-8")
    make_engine(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_text_cannot_end_the_script(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("</script><b>\ud800", "</script> <!-- <script>", greedy(2))
    run_to_end(engine)
    _, data = (tmp_path / "run.html").read_text(encoding="utf-8").split('id="steps">\n')
    assert "<" not in data
    (request,) = read_trace(tmp_path / "run.html")[1]["scheduled"]["requests"]
    assert request[2] == "</script><b>\ud800"


@pytest.mark.parametrize("method", ["_blocks", "_usage"])
def test_an_interrupted_line_is_followed_by_a_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("a", tokens(5, 7), greedy(6, n=2))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.listeners[0]), method, lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.step()
    *_, line = read_trace(tmp_path / "run.html")
    changes = line["scheduled"]
    assert changes["fresh"] == 1
    assert [change[1:4] for change in changes["seqs"]] == [[0, -1, 0], [1, -1, 0]]
    assert changes["keys"]
    assert changes["requests"] == [[0, "A", "a", "2 samples"]], "it keeps its name"
    engine.add_request("b", tokens(50, 7), greedy(1))
    run_to_end(engine)
    assert [text.split(" ")[0] for text in said(tmp_path / "run.html", "arrive")] == ["A", "B"]


def test_a_step_of_which_no_end_was_told_is_followed_by_a_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C while a step fails: its first half was compared, and never written."""
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("a", tokens(5, 7), greedy(6))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.listeners[0], "step_failed", lambda error: None)
        engine.runner.fail_next = True
        with pytest.raises(RuntimeError):
            engine.step()
    engine.step()
    *_, line = read_trace(tmp_path / "run.html")
    assert line["scheduled"]["fresh"] == 1
    assert line["scheduled"]["running"] == [0]


def test_the_trace_changes_no_output(tmp_path: Path) -> None:
    """With and without it, the same tokens, tables and counts."""
    runs = []
    for page in (tmp_path / "run.html", None):
        engine = make_engine(page, num_blocks=9, preemption="swap")
        for i in range(4):
            engine.add_request(str(i), tokens(5, 6 + i), greedy(9, n=1 + i % 2, seed=i))
        snapshots = []
        while engine.has_unfinished_requests():
            engine.step()
            snapshots.append(str(engine.snapshot()))
        runs.append((snapshots, engine.stats()))
    assert runs[0] == runs[1]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder '.*nowhere': make it first"):
        EngineConfig(trace=tmp_path / "nowhere" / "run.html")
    with pytest.raises(ValueError, match="which is a folder: name a file in it"):
        EngineConfig(trace=tmp_path)
    with pytest.raises(TypeError, match="trace must be the name of a file such as 'run.html', got True"):
        EngineConfig(trace=True)


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands for the disk."""
    resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("a", tokens(5, 7), greedy(3))
    engine.step()
    file = engine.listeners[0].file
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "run.html").stat().st_size + 40, limits[1]))
    try:
        run_to_end(engine)
        file.close()  # as at the exit of the program: nothing is left to be written
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (message,) = caplog.messages
    assert message.startswith(f"the trace {tmp_path / 'run.html'} ends here: ")
    assert engine.stats().num_generated_tokens == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_page_that_cannot_be_written_is_named_at_the_start() -> None:
    with pytest.raises(OSError, match="the trace cannot be written: No space left on device: '/dev/full'"):
        make_engine(Path("/dev/full"))


def test_an_interrupt_while_a_step_is_recorded_loses_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path / "run.html")
    engine.add_request("a", tokens(5, 7), greedy(1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.listeners[0], "_updated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    (output,) = engine.step()
    assert output.finished
    assert len(output.outputs[0].token_ids) == 1
