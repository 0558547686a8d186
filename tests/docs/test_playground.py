"""The playground: its presets show what they say, and a browser computes what CPython does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Browser, Site, open_browser
from programs import load_file
from traces import find_events, name_of, read_trace, states_of

ROOT = Path(__file__).parents[2]
HERE = ROOT / "docs" / "play"
playground, fetch = load_file(HERE / "playground.py"), load_file(HERE / "fetch.py")
PRESETS = {preset["name"]: preset for preset in playground.DEFAULTS["presets"]}


def lines_of(page: str) -> list[dict[str, Any]]:
    """The header of a recorded page and its lines, without the times."""
    return [{name: value for name, value in line.items() if name != "time"} for line in read_trace(page)]


class Run:
    """What a recorded page says, for the claims of presets. Steps count from 1."""

    def __init__(self, settings: dict[str, Any]) -> None:
        result = playground.run(settings, {})
        assert result["failure"] is None, result["failure"]
        self.header, *self.lines = lines_of(result["page"])
        self.num_steps = len(self.lines)
        self.events = find_events(self.lines)
        states = states_of(self.lines)
        self.states = [state["updated"] for state in states]
        self.scheduled = [state["scheduled"] for state in states]

    def line(self, step: int) -> dict[str, Any]:
        """Its fields, see `Recorder`. Empty ones are left out."""
        return self.lines[step - 1]

    def steps(self, kind: str) -> list[int]:
        """Those with an event of this kind."""
        return [step for step, kinds in enumerate(self.events, start=1) if kind in kinds]

    def running(self, step: int) -> str:
        return "".join(self.states[step - 1].running)

    def waiting(self, step: int) -> str:
        return "".join(self.states[step - 1].waiting)

    def table(self, name: str, step: int) -> list[int]:
        """The last one that it had, by the end of the step."""
        return next(state.seqs[name][2] for state in reversed(self.states[:step]) if name in state.seqs)

    def hits(self, step: int) -> list[int]:
        """Blocks that were found by the requests that were admitted."""
        found = []
        for number in self.line(step)["admitted"]:
            _, num_computed, table, _ = self.scheduled[step - 1].seqs[name_of(number)]
            found += table[: num_computed // self.header["block_size"]]
        return found

    def computes(self, step: int) -> dict[str, int]:
        """Request → tokens that it computes in the step."""
        return {name_of(number): num for number, _, num in self.line(step).get("batch", [])}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shows_what_it_says(name: str) -> None:
    """In its claims, `left` and `right` are its runs; `changed(num_blocks=9, A="…", n=3)` is another one."""
    preset = PRESETS[name]
    settings = preset["settings"]

    @cache
    def changed(n: int | None = None, A: str | None = None, C: str | None = None, **changes: Any) -> Run:  # noqa: N803
        rows = [dict(row) for row in settings["requests"]]
        for row, field, value in ((0, "n", n), (0, "prompt", A), (2, "prompt", C)):
            if value is not None:
                rows[row][field] = value
        return Run({**settings, **changes, "requests": rows})

    names = {"left": changed(), "right": changed(**preset.get("beside", {})), "changed": changed}
    for claim in preset["claims"]:
        assert eval(claim, names), claim
    for label, knob in preset["knob"]:
        assert changed(**knob).num_steps, label
    assert (ROOT / "docs" / "book" / f"{preset['chapter']}.md").is_file()


def test_the_recorded_runs_are_those_of_today() -> None:
    recorded = json.loads((HERE / "runs.json").read_text(encoding="utf-8"))
    assert recorded == playground.record_presets(), "run docs/play/playground.py again"


# ── settings and changes ──────────────────────────────────────────────────────────────────────────


def small(**changes: Any) -> dict[str, Any]:
    """Settings with two requests."""
    rows = [{"prompt": "to be or not to be", "max_tokens": 4}, {"prompt": "to be or", "max_tokens": 4}]
    return {"num_blocks": 8, "requests": rows} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 5000}, "num_blocks is 5,000, but the playground allows at most 4,096"),
        ({"preemption": "auto"}, "preemption is 'auto', which measures a model: choose swap or recompute"),
        ({"trace": "run.html"}, "there is no setting 'trace', but num_blocks"),
        ({"rank": "5"}, "rank is 5, but must be a function"),
        ({"requests": []}, "there is no request: add one"),
        ({"requests": [{"prompt": "a", "arrival": 0}]}, "request 1: arrival is 0, but must be at least 1"),
        ({"requests": [{"prompt": "a", "n": 2, "beam_width": 2}]}, "request 1: n is 2, but a beam search"),
        ({"requests": [{"prompt": "a", "beam_width": 17}]}, "request 1: beam_width is 17, but the"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 9},
            "max_num_batched_tokens is 9, but without chunked prefill a text must fit in one step, and the "
            "longest here has 10 tokens",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(changes: dict[str, Any], message: str) -> None:
    result = playground.run(small(**changes), {})
    assert result["page"] is None
    assert result["failure"]["kind"] == "settings"
    assert result["failure"]["message"].startswith(message)


def change(file: str, old: str, new: str) -> dict[str, str]:
    """The file of the package with one change."""
    text = (ROOT / "nanopaged" / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return {f"nanopaged/{file}": text.replace(old, new)}


def test_a_broken_invariant_ends_the_run_at_its_step() -> None:
    """A finished request keeps its first block."""
    first = Run(small()).steps("finish")[0]
    leak = change("block_manager.py", "        self.trim(seq, 0)\n", "        self.trim(seq, 1)\n")
    result = playground.run(small(), leak)
    assert result["failure"]["kind"] == "invariant"
    assert result["failure"]["step"] == first
    assert result["failure"]["message"].endswith("free != 8")
    assert len(lines_of(result["page"])) == 1 + first
    assert playground.run(small(), {})["failure"] is None, "the next run has the source again"


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "message"),
    [
        # raised in `_preempt`, which the changed line calls
        ("scheduler.py", "self.running.pop()", "None", "request.live", "AttributeError: 'NoneType' object"),
        ("swap.py", "class Swapper:", "class Swapper", "class Swapper", "SyntaxError: "),
        (
            "block_manager.py",
            "if not self.free_ids:",
            "assert 0 > 1\n        if 1:",
            "0 > 1",
            "AssertionError: ",
        ),
        (
            "block_manager.py",
            "if not self.free_ids:",
            "raise SystemExit\n        if 1:",
            "raise",
            "SystemExit: ",
        ),
    ],
)
def test_an_exception_is_reported_at_its_line(file: str, old: str, new: str, line: str, message: str) -> None:
    rows = [{"prompt": "to be or not", "max_tokens": 6}] * 3
    changes = change(file, old, new)
    result = playground.run({"num_blocks": 4, "enable_prefix_caching": False, "requests": rows}, changes)
    failure = result["failure"]
    assert (failure["kind"], failure["file"]) == ("source", f"nanopaged/{file}")
    assert failure["message"].startswith(message)
    assert line in changes[failure["file"]].splitlines()[failure["line"] - 1]
    if result["page"] is not None:
        lines = lines_of(result["page"])
        assert failure["step"] == len(lines) - 1
        assert lines[-1]["failed"] == message.partition(":")[0]


def test_an_exception_of_the_rank_is_reported() -> None:
    failure = playground.run(small(rank="lambda request: request.age"), {})["failure"]
    assert (failure["file"], failure["line"]) == ("rank", 1)
    assert failure["message"] == "AttributeError: 'Request' object has no attribute 'age'"


def test_a_run_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "MOST_STEPS", 5)
    result = playground.run(small(max_num_seqs=1), {})  # both requests take 4 steps
    assert result["failure"] == {"kind": "steps", "message": "The run ends here, after 5 steps.", "step": 5}


def test_steps_without_a_request_are_left_out() -> None:
    """Requests that arrive together stay together, and a rank can use the step in which they arrived."""
    rows = [{"prompt": "a b", "max_tokens": 2}] + [{"prompt": "c d", "max_tokens": 2, "arrival": 9}] * 2
    run = Run({"requests": rows, "rank": "lambda request: -request.arrival_time"})
    computed = [run.computes(step) for step in range(1, run.num_steps + 1)]
    assert computed == [{"A": 2}, {"A": 1}, {"C": 2, "B": 2}, {"C": 1, "B": 1}]


# ── what the page and the worker repeat of it ─────────────────────────────────────────────────────


def of_script(name: str, pattern: str) -> str:
    return re.search(pattern, (HERE / name).read_text(encoding="utf-8"), re.DOTALL)[1]


def test_the_page_has_a_field_for_each_setting() -> None:
    for constant, settings in (("FIELDS", {*playground.ENGINE, "rank"}), ("COLUMNS", {*playground.REQUEST})):
        fields = of_script("playground.js", rf"const {constant} = \{{(.*?)\}};")
        assert set(re.findall(r'(\w+): "', fields)) == settings


def test_the_worker_fetches_the_files_that_a_run_imports() -> None:
    Run(small(rank="lambda request: request.arrival_time"))
    modules = playground.package(frozenset()).modules.values()
    imported = {Path(module.__file__) for module in modules if getattr(module, "__file__", None)}
    names = of_script("worker.js", r"FILES = `(.*?)`").split()
    assert {ROOT / "nanopaged" / f"{name}.py" for name in names} == imported


# ── in a browser ──────────────────────────────────────────────────────────────────────────────────

FRAMES = "[...document.querySelectorAll('iframe')]"
DRAWN = f"{FRAMES}.every((frame) => frame.contentWindow.trace)"
HOST_CELLS = f"{FRAMES}.map((frame) => frame.contentDocument.querySelectorAll('#host .cell').length)"
STEPS = f"{FRAMES}.map((frame) => +frame.contentDocument.getElementById('slider').value)"
SEEN = "document.getElementById(arguments[0]).checkVisibility()"
TYPE = """((old, changed) => {
  const [choice, text] = ["function", "text"].map((id) => document.getElementById(id));
  choice.value = "nanopaged/block_manager.py take";
  choice.onchange();
  text.focus();
  text.setSelectionRange(text.value.indexOf(old), text.value.indexOf(old) + old.length);
  document.execCommand("insertText", false, changed);
})(...arguments)"""


class Playground(Browser):
    """The page in a browser."""

    def __init__(self, driver: Any, site: Site) -> None:
        super().__init__(driver)
        self.site = site
        self.num_runs = 0

    def open(self, address: str = "") -> None:
        """Load the page anew, which shows a recorded run, or runs the engine."""
        self.driver.get("about:blank")
        self.num_runs = 0
        self.driver.get(f"{self.site.root}docs/play/{address}")
        self.wait()

    def wait(self) -> None:
        """Until the next run has ended, and its pictures are drawn."""
        self.num_runs += 1
        self.until(f"document.body.dataset.runs >= {self.num_runs} && {DRAWN}")

    def go(self, address: str) -> None:
        """Change the address of the open page."""
        self.run("void (location.hash = arguments[0])", address)
        self.wait()

    def press_run(self, selector: str = "#form .run") -> None:
        """Or another button that runs the engine."""
        self.click(selector)
        self.wait()

    def set_field(self, selector: str, value: str) -> None:
        script = "((field, value) => { field.value = value; field.onchange(); })(...arguments)"
        self.run(script, self.driver.find_element("css selector", selector), value)
        self.wait()

    def change(self, old: str, new: str) -> None:
        """Replace a piece of `BlockManager.take` in the editor."""
        if not self.run("document.getElementById('source').open"):
            self.click("#source summary")
            self.until("document.getElementById('function').value")
        self.run(TYPE, old, new)

    def pictures(self) -> list[list[dict[str, Any]]]:
        """What each picture was given: the header and the lines of its page, without the times."""
        steps = "map((frame) => frame.contentDocument.getElementById('steps').textContent)"
        return [lines_of(f'id="steps">{text}') for text in self.run(f"{FRAMES}.{steps}")]


@pytest.fixture(scope="module")
def site() -> Site:
    try:
        fetch.fetch(HERE / "pyodide")
    except SystemExit as error:
        pytest.skip(str(error))
    return Site(ROOT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser, site: Site) -> Iterator[Playground]:
    """No test leaves a message in the console, and no request leaves the machine."""
    browser.driver.get(f"{site.root}docs/play/presets.json")
    browser.run("[localStorage, sessionStorage].forEach((storage) => storage.clear())")
    browser.logs()
    yield Playground(browser.driver, site)
    console, asked = browser.logs()
    assert console == []
    assert all(url.startswith((site.root, "data:", "blob:", "about:")) for url in asked), asked


@pytest.mark.slow
def test_a_preset_opens_with_its_pictures(opened: Playground) -> None:
    """Recorded ones, at the step of the question, before Python is there. Then it computes the same lines."""
    opened.open()
    kinds: set[str] = set()
    for name, preset in PRESETS.items():
        opened.go(f"#preset={name}")
        assert opened.text("title") == preset["title"]
        runs = [Run(preset["settings"] | its) for its in ({}, preset.get("beside")) if its is not None]
        pictures = [[run.header, *run.lines] for run in runs]
        assert opened.pictures() == pictures, "recorded"
        assert not opened.run(SEEN, "status"), "nothing seems to be awaited"
        assert opened.run(STEPS) == [preset["from"]] * len(runs)
        opened.press_run()
        assert opened.pictures() == pictures
        opened.click("#ask summary")
        step = int(str(preset["step"]).partition("-")[0])  # of "3-scheduled"
        opened.until(f"{STEPS}.every((step) => step === {step})")
        if name == "three-requests":
            assert opened.run(HOST_CELLS) == [6], "the host is drawn when a block moves to it"
        kinds.update(kind for run in runs for events in run.events for kind in events)
    assert kinds >= {"copy", "preempt", "swap", "hit", "evict", "fork", "beams", "chunk"}


@pytest.mark.slow
def test_settings_are_changed_in_the_form(opened: Playground) -> None:
    """They run at once and stand in the address. Wrong ones are refused, and the last pictures stay."""
    opened.open("#preset=prefix-hit")
    opened.set_field("#block_size-left", "2")
    run = Run(PRESETS["prefix-hit"]["settings"] | {"block_size": 2})
    opened.open(opened.run("location.hash"))
    assert opened.pictures() == [[run.header, *run.lines]]
    opened.set_field("#requests > :nth-child(2) [name=max_tokens]", "0")
    assert opened.text("problem") == "request 2: “output” is 0, but must be at least 1"
    marked = "[...document.querySelectorAll('[aria-invalid]')].map((field) => field.ariaLabel)"
    assert opened.run(marked) == ["output of request 2"]
    assert opened.pictures() == [[run.header, *run.lines]]


@pytest.mark.slow
def test_links_are_checked_before_they_run(opened: Playground) -> None:
    """A rank, which is code, waits for the reader, and the last error is gone."""
    opened.open()
    many = json.dumps({"requests": [{"prompt": "a"}] * 5000})
    for text, why in (
        (many, "it has 5000 requests, and the playground allows 100."),
        ('{"requests": [{"n": "2"}]}', 'it has "2" for “n”.'),
        ("{", "its settings cannot be read."),
        ('{"rank": "len"}', ""),
    ):
        opened.run("void (location.hash = arguments[0])", f"#settings={quote(text)}")
        sentence = (
            f"The link cannot be opened: {why} The form has the settings of the example." if why else ""
        )
        opened.until(f"document.getElementById('problem').textContent === {json.dumps(sentence)}")
        assert opened.run("document.body.dataset.runs") == "1"


@pytest.mark.slow
def test_the_source_is_changed(opened: Playground) -> None:
    """A change is shown beside the source, also when the page is loaded again, until it is taken back."""
    settings = PRESETS["copy-on-write"]["settings"]
    pop = "self.free_ids.pop()", "self.free_ids.pop(0)"
    runs = [playground.run(settings, changes) for changes in ({}, change("block_manager.py", *pop))]
    before, after = [lines_of(result["page"]) for result in runs]
    assert before != after
    opened.open("#preset=copy-on-write")
    opened.change(*pop)
    opened.press_run()
    assert opened.pictures() == [before, after]
    opened.open("#preset=copy-on-write")
    assert opened.pictures() == [before, after]
    opened.press_run("#reset")
    assert opened.pictures() == [before]

    opened.change("if not self.free_ids:", "if not self.free_blocks:")
    opened.press_run()
    wrong = "Step 1 failed. AttributeError: 'BlockManager' object has no attribute 'free_blocks'"
    (problem,) = opened.texts("figure .problem")
    assert problem.startswith(wrong)
    assert re.search(r"block_manager\.py, line \d+\)", problem)
    opened.click("figure .problem button")
    assert opened.run("getSelection().toString()").strip() == "if not self.free_blocks:"

    opened.change(
        "if not self.free_blocks:", "while len(self.free_ids) < 11: pass\n        if not self.free_ids:"
    )
    opened.click("#form .run")
    opened.run("void (document.getElementById('source').open = false)")
    opened.until("document.getElementById('told').textContent.startsWith('Step 2')")
    assert opened.run(SEEN, "stop")
    opened.press_run("#stop")
    assert opened.texts("figure .problem")[0].startswith("The run was stopped, in step 2. A changed loop may")
    assert opened.pictures() == [before, before[:2]], "the steps before it are there"
