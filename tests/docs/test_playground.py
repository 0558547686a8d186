"""The playground: its presets show what they say, and a browser computes what CPython does."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import Browser, Site, open_browser
from programs import load_file
from traces import find_events, name_of, read_trace, states_of

from nanopaged.block_manager import blocks_needed

ROOT = Path(__file__).parents[2]
HERE = ROOT / "docs" / "play"
PRESETS = {
    preset["name"]: preset
    for preset in json.loads((HERE / "presets.json").read_text(encoding="utf-8"))["presets"]
}

playground, fetch = load_file(HERE / "playground.py"), load_file(HERE / "fetch.py")


def lines_of(page: str) -> list[dict[str, Any]]:
    """The header of a recorded page and its lines, without the times."""
    return [{name: value for name, value in line.items() if name != "time"} for line in read_trace(page)]


class Run:
    """What a recorded page says, for the claims of presets. Steps count from 1."""

    def __init__(self, settings: dict[str, Any]) -> None:
        result = playground.run(settings, {})
        assert result["failure"] is None, result["failure"]
        self.header, *self.lines = lines_of(result["page"])
        self.num_steps, self.events = len(self.lines), find_events(self.lines)
        self.states = [states["updated"] for states in states_of(self.lines)]
        self.scheduled = [states["scheduled"] for states in states_of(self.lines)]

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
        return next(s.seqs[name][2] for s in reversed(self.states[:step]) if name in s.seqs)

    def usage(self, step: int) -> tuple[int, int]:
        """The blocks in use after the step, and the slots in them that hold K/V."""
        filled, size = {}, self.header["block_size"]
        for _, computed, table, _ in self.states[step - 1].seqs.values():
            for i, block_id in enumerate(table):
                filled[block_id] = max(filled.get(block_id, 0), min(size, max(0, computed - i * size)))
        return len(filled), sum(filled.values())

    def hits(self, step: int) -> list[int]:
        """Blocks that were found by the requests that were admitted."""
        names, size = map(name_of, self.line(step)["admitted"]), self.header["block_size"]
        found = [self.scheduled[step - 1].seqs[name] for name in names]
        return [block_id for _, computed, table, _ in found for block_id in table[: computed // size]]

    def parents(self, step: int) -> dict[str, list[str]]:
        """Beam → the beams forked from it."""
        parents: dict[str, list[str]] = {}
        for child, (token_ids, *_) in self.states[step - 1].seqs.items():
            old = self.scheduled[step - 1].seqs.items()
            parent = next(name for name, (its, *_) in old if its == token_ids[: len(its)])
            parents.setdefault(parent, []).append(child)
        return parents

    def computes(self, step: int) -> dict[str, int]:
        """Request → tokens that it computes in the step."""
        return {name_of(number): num for number, _, num in self.line(step).get("batch", [])}

    @property
    def most_running(self) -> int:
        """Requests whose tokens are computed in one step."""
        return max(len(self.computes(step)) for step in range(1, self.num_steps + 1))

    @property
    def num_computed(self) -> int:
        return sum(num for line in self.lines for _, _, num in line.get("batch", []))

    @property
    def finished(self) -> list[str]:
        """Requests in the order in which they end."""
        ended = [name_of(row[0]) for line in self.lines for row in line["updated"]["seqs"] if row[5]]
        return list(dict.fromkeys(ended))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shows_what_it_says(name: str) -> None:
    """In its claims, `left` and `right` are its runs; `changed(num_blocks=9, A="…", n=3)` is another one."""
    preset = PRESETS[name]
    settings = preset["settings"]

    @cache
    def changed(**changes: Any) -> Run:
        rows = [dict(row) for row in settings["requests"]]
        for field, value in list(changes.items()):
            if len(field) == 1:  # the prompt of a request; "n" is that of the first one
                row, key = (0, "n") if field == "n" else (ord(field) - ord("A"), "prompt")
                rows[row][key] = changes.pop(field) if field == "n" else value
                changes.pop(field, None)
        return Run({**settings, **changes, "requests": rows})

    names = {"left": changed(), "right": changed(**preset.get("beside", {})), "changed": changed}
    assert len(preset["claims"]) >= 2
    for claim in preset["claims"]:
        assert eval(claim, names), claim
    for label, knob in preset["knob"]:
        assert changed(**knob).num_steps, label
    assert (ROOT / "docs" / "book" / f"{preset['chapter']}.md").is_file()
    assert first_step(preset) <= names["left"].num_steps


def first_step(preset: dict[str, Any]) -> int:
    """The one that is shown at first: 3, or "3-scheduled" for a part of it."""
    return int(str(preset.get("step", 1)).partition("-")[0])


# ── settings and changes ──────────────────────────────────────────────────────────────────────────


def small(**changes: Any) -> dict[str, Any]:
    """Settings with two requests."""
    rows = [{"prompt": "to be or not to be", "max_tokens": 4}, {"prompt": "to be or", "max_tokens": 4}]
    return {"num_blocks": 8, "requests": rows} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0, but must be at least 1"),
        ({"num_blocks": 5000}, "num_blocks is 5,000, but the playground allows at most 4,096"),
        ({"preemption": "auto"}, "preemption is 'auto', which measures a model: choose swap or recompute"),
        ({"trace": "run.html"}, "there is no setting 'trace', but num_blocks"),
        ({"rank": "5"}, "rank is 5, but must be a function"),
        ({"requests": []}, "there is no request: add one"),
        ({"requests": [{"prompt": " "}]}, "request 1: the prompt is empty: it needs at least one token"),
        ({"requests": [{"prompt": "a", "arrival": 0}]}, "request 1: arrival is 0, but must be at least 1"),
        ({"requests": [{"prompt": "a", "n": 2, "beam_width": 2}]}, "request 1: n is 2, but a beam search"),
        ({"requests": [{"prompt": "a", "beam_width": 17}]}, "request 1: beam_width is 17, but the"),
        ({"requests": [{"prompt": "a", "n": 17}]}, "request 1: the request is for 17 sequences, but max_num"),
        ({"num_blocks": 2}, "request 1: a prompt of 6 tokens with max_tokens=4 may need 3 blocks of 4 slots"),
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


A_LEAK = "        self.trim(seq, 0)\n", "        self.trim(seq, 1)\n"
LEAK = change("block_manager.py", *A_LEAK)


def test_a_broken_invariant_ends_the_run_at_its_step() -> None:
    """A finished request keeps its first block."""
    first = Run(small()).steps("finish")[0]
    result = playground.run(small(), LEAK)
    assert result["failure"]["kind"] == "invariant"
    assert result["failure"]["step"] == first
    assert result["failure"]["message"].endswith("free != 8")
    assert len(lines_of(result["page"])) == 1 + first
    assert playground.run(small(), {})["failure"] is None, "the next run has the source again"


def test_an_exception_is_reported_at_its_line() -> None:
    """That of the changed file, even if the exception is raised in another one that it calls."""
    own = change("scheduler.py", "self._preempt(self.running.pop(), batch)", "self._preempt(None, batch)")
    rows = [{"prompt": "to be or not", "max_tokens": 6}] * 3
    result = playground.run({"num_blocks": 4, "enable_prefix_caching": False, "requests": rows}, own)
    failure, lines = result["failure"], lines_of(result["page"])
    assert (failure["kind"], failure["file"]) == ("source", "nanopaged/scheduler.py")
    assert failure["message"].startswith("AttributeError: 'NoneType' object has no attribute")
    assert "request.live" in own[failure["file"]].splitlines()[failure["line"] - 1]
    assert failure["step"] == len(lines) - 1
    assert lines[-1]["failed"] == "AttributeError"

    broken = change("swap.py", "class Swapper:", "class Swapper")
    failure = playground.run(small(), broken)["failure"]
    at = 1 + broken["nanopaged/swap.py"].splitlines().index("class Swapper")
    assert failure.pop("message").startswith("SyntaxError: ")
    assert failure == {"kind": "source", "file": "nanopaged/swap.py", "line": at, "step": 0}

    failure = playground.run(small(rank="lambda request: request.age"), {})["failure"]
    assert (failure["file"], failure["line"]) == ("rank", 1)
    assert failure["message"] == "AttributeError: 'Request' object has no attribute 'age'"


def test_a_change_is_used_and_leaves_the_tests_package_alone() -> None:
    """Blocks are handed out from the other end, and what is printed is collected."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("nanopaged")}
    take = "self.blocks[self.free_ids.pop()]"
    other_end = take.replace("pop()", "pop(0)") + "; print('taken')"
    result = playground.run(small(), change("block_manager.py", take, other_end))
    assert result["failure"] is None
    assert result["printed"].split() == ["taken"] * result["printed"].count("taken")
    assert lines_of(result["page"])[1]["scheduled"]["seqs"][0][3] == [7, 6]
    assert before == {name: module for name, module in sys.modules.items() if name.startswith("nanopaged")}


def test_a_run_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground, "MOST_STEPS", 3)
    result = playground.run(small(), {})
    assert result["failure"] == {"kind": "steps", "message": "The run ends here, after 3 steps.", "step": 3}
    assert len(lines_of(result["page"])) == 1 + 3


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


def test_the_functions_of_the_editor_exist() -> None:
    functions = of_script("playground.js", r"const FUNCTIONS = \{(.*?)\};")
    for file, names in re.findall(r"(\w+): \[(.*?)\]", functions):
        source = (ROOT / "nanopaged" / f"{file}.py").read_text(encoding="utf-8")
        for name in re.findall(r'"(.*?)"', names):
            owner, _, member = name.rpartition(".")
            begin = rf"class {owner}\b.*^ +(def |self\.){member}[(:]" if owner else rf"def {member}\("
            assert re.search(f"^{begin}", source, re.MULTILINE | re.DOTALL), name


def test_the_worker_fetches_the_files_that_a_run_imports() -> None:
    Run(small(rank="lambda request: request.arrival_time"))
    modules = playground.package(frozenset()).modules.values()
    imported = {Path(module.__file__) for module in modules if getattr(module, "__file__", None)}
    names = of_script("worker.js", r"FILES = `(.*?)`").split()
    assert {ROOT / "nanopaged" / f"{name}.py" for name in names} == imported


def test_without_npm_pyodide_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"there is no npm here: install Node\.js"):
        fetch.fetch(tmp_path / "pyodide")
    assert not (tmp_path / "pyodide").exists()


# ── in a browser ──────────────────────────────────────────────────────────────────────────────────

FRAMES = "[...document.querySelectorAll('iframe')]"


class Playground(Browser):
    """The page in a browser."""

    def __init__(self, driver: Any, site: Site) -> None:
        super().__init__(driver)
        self.site, self.num_runs = site, 0

    def open(self, address: str = "", runs: bool = True) -> None:
        """Load the page anew."""
        self.driver.get("about:blank")
        self.num_runs = 0
        self.driver.get(f"{self.site.root}docs/play/{address}")
        if runs:
            self.wait()

    def go(self, address: str, rank: bool = False) -> None:
        """Change the address of the open page. A rank is code of its author, so it waits for the reader."""
        self.run("void (location.hash = arguments[0])", address)
        if rank:
            self.until("document.getElementById('told').textContent.includes('Read it, then press Run')")
            self.click("#form .run")
        self.wait()

    def press_run(self, selector: str = "#form .run") -> None:
        """Or another button that runs the engine."""
        self.click(selector)
        self.wait()

    def wait(self) -> None:
        """Until the next run has ended, and its pictures are drawn."""
        self.num_runs += 1
        drawn = f"{FRAMES}.every((frame) => frame.contentWindow.trace)"
        self.until(f"document.body.dataset.runs >= {self.num_runs} && {drawn}")

    def until(self, condition: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + 60
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition}: {self.text('told')} {self.text('problem')}"
            time.sleep(0.02)

    def set_field(self, selector: str, value: str) -> None:
        script = "((field, value) => { field.value = value; field.onchange(); })(...arguments)"
        self.run(script, self.driver.find_element("css selector", selector), value)
        self.wait()

    def change(self, function: str, old: str, new: str, runs: bool = True) -> None:
        """Replace a piece of a function in the editor, and run it."""
        if not self.run("document.getElementById('source').open"):
            self.click("#source summary")
            self.until("document.getElementById('function').value")
        option = f"[...document.querySelectorAll('#function option')].find((o) => o.text === '{function}')"
        self.run(f"({option}.selected = true, document.getElementById('function').onchange())")
        text = self.run("document.getElementById('text').value")
        assert text.count(old) == 1
        start = text.index(old)
        self.run("document.getElementById('text').focus()")
        self.run("document.getElementById('text').setSelectionRange(...arguments)", start, start + len(old))
        self.run("document.execCommand('insertText', false, arguments[0])", new)
        if runs:
            self.press_run()

    def pictures(self) -> list[list[dict[str, Any]]]:
        """What each picture was given: the header and the lines of its page, without the times."""
        steps = "map((frame) => frame.contentDocument.getElementById('steps').textContent)"
        return [lines_of(f'id="steps">{text}') for text in self.run(f"{FRAMES}.{steps}")]

    def steps(self) -> list[int]:
        """That each picture shows."""
        return self.run(f"{FRAMES}.map((frame) => +frame.contentDocument.getElementById('slider').value)")


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
    browser.run("localStorage.clear()")
    browser.logs()
    yield Playground(browser.driver, site)
    console, asked = browser.logs()
    assert console == []
    assert all(url.startswith((site.root, "data:", "blob:", "about:")) for url in asked), asked


def random_settings(seed: int) -> dict[str, Any]:
    """Prompts that begin alike, every kind of request, a pool in which each of them just fits."""
    rng = random.Random(seed)
    words = ["to", "be", "or", "not", "king", "queen", "a", "é", "<b>", "</script>"]
    stems = [rng.choices(words, k=rng.randint(1, 12)) for _ in range(2)]
    size, rows, most, longest = rng.choice([1, 2, 3, 4, 4, 8, 16]), [], 1, 1
    for _ in range(rng.randint(1, 8)):
        prompt = rng.choice(stems) + rng.choices(words, k=rng.randint(0, 6))
        n, width = rng.choice([(1, 0), (1, 0), (rng.randint(2, 4), 0), (1, rng.randint(1, 4))])
        row = {"prompt": " ".join(prompt), "n": n, "beam_width": width, "max_tokens": rng.randint(1, 20)}
        rows.append(row | {"arrival": rng.choice([1, 1, rng.randint(1, 30)])})
        shared = len(prompt) // size
        blocks = blocks_needed(len(prompt) + row["max_tokens"] - 1, size)
        most = max(most, shared + max(n, width) * (blocks - shared))
        longest = max(longest, len(prompt) + row["max_tokens"])
    chunked = rng.random() < 0.6
    return {
        "num_blocks": most + rng.choice([0, 0, rng.randint(0, 4), rng.randint(0, 30)]),
        "block_size": size,
        "num_host_blocks": rng.choice([0, 3, 20, 100]),
        "max_num_batched_tokens": rng.randint(1, 40) if chunked else longest + rng.randint(0, 20),
        "max_num_seqs": rng.randint(4, 12),
        "enable_chunked_prefill": chunked,
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.3]),
        "preemption": rng.choice(["swap", "recompute"]),
        "enable_prefix_caching": rng.random() < 0.7,
        "rank": "lambda request: -request.arrival_time" if seed % 8 == 7 else "",
        "requests": rows,
    }


@pytest.mark.slow
def test_random_settings_are_the_same_in_the_browser(opened: Playground, pytestconfig: pytest.Config) -> None:
    """Every line of the recorded page, so also what is drawn of it."""
    opened.open()
    first = pytestconfig.option.first_seed
    kinds: set[str] = set()
    for seed in range(first, first + 40):
        settings = random_settings(seed)
        run = Run(settings)
        opened.go(f"#settings={quote(json.dumps(settings))}", rank=bool(settings["rank"]))
        assert opened.text("problem") == ""
        assert opened.pictures() == [[run.header, *run.lines]], f"settings of seed {seed}"
        kinds |= {kind for events in run.events for kind in events}
    assert kinds >= {"copy", "preempt", "swap", "hit", "evict", "fork", "beams", "chunk"}


@pytest.mark.slow
def test_every_preset_opens(opened: Playground) -> None:
    """In the page and, with one of its knob's values, as it stands in a chapter."""
    opened.open()
    for name, preset in PRESETS.items():
        opened.go(f"#preset={name}")
        assert opened.text("title") == preset["title"]
        settings = preset["settings"]
        runs = [Run(settings | its) for its in ({}, preset.get("beside")) if its is not None]
        assert opened.pictures() == [[run.header, *run.lines] for run in runs]
        assert opened.steps() == [min(first_step(preset), run.num_steps) for run in runs]
    name, preset = next(iter(PRESETS.items()))
    opened.open(f"#preset={name}&embed", runs=False)
    assert "Run loads Python" in opened.text("told")
    assert not opened.run("document.getElementById('form').checkVisibility()")
    opened.press_run(".embedded .run")
    opened.driver.find_elements("css selector", "#knob option")[1].click()
    opened.wait()
    run = Run(preset["settings"] | preset["knob"][1][1])
    assert opened.pictures() == [[run.header, *run.lines]]


@pytest.mark.slow
def test_two_pictures_step_together(opened: Playground) -> None:
    """The shorter run stays at its end, and the step stays when a setting is changed."""
    opened.open("#preset=reserved")
    walk = [(0, "last", [4, 4]), (1, "last", [4, 12]), (0, "first", [0, 0]), (1, "step-forward", [1, 1])]
    for picture, button, steps in walk:
        opened.run(f"{FRAMES}[{picture}].contentDocument.getElementById('{button}').click()")
        assert opened.steps() == steps
    opened.set_field("#num_blocks-left", "16")
    assert opened.steps() == [1, 1]


@pytest.mark.slow
def test_settings_are_changed_in_the_form(opened: Playground) -> None:
    """They run at once, stand in the address, and a wrong one is marked."""
    opened.open("#preset=prefix-hit")
    opened.set_field("#block_size-left", "2")
    run = Run(PRESETS["prefix-hit"]["settings"] | {"block_size": 2})
    assert opened.pictures()[0][1:] == run.lines
    opened.press_run("#add")
    shown = opened.pictures()
    assert len(shown[0][1]["requests"]) == 1 + len(run.lines[0]["requests"])
    opened.open(opened.run("location.hash"))
    assert opened.pictures() == shown

    output = "#requests > :nth-child(2) [name=max_tokens]"
    opened.set_field(output, "0")
    problem = "request 2: max_tokens is 0, but must be at least 1 (None is as many as max_model_len allows)"
    assert opened.text("problem") == problem
    marked = "[...document.querySelectorAll('[aria-invalid]')].map((field) => field.ariaLabel)"
    assert opened.run(marked) == ["output of request 2"]
    assert opened.pictures() == shown, "the last pictures stay"
    opened.set_field(output, "3")
    assert opened.run(marked) == []


@pytest.mark.slow
def test_a_change_of_the_source_is_shown_beside_it(opened: Playground) -> None:
    """And what it breaks, at its step; it stays when the page is loaded again, until it is taken back."""
    settings = PRESETS["copy-on-write"]["settings"]
    opened.open("#preset=copy-on-write")
    pop = "self.free_ids.pop()", "self.free_ids.pop(0)"
    opened.change("BlockManager.take", *pop)
    ours = change("block_manager.py", *pop)
    before, after = (lines_of(playground.run(settings, its)["page"]) for its in ({}, ours))
    assert opened.pictures() == [before, after]
    assert before != after

    opened.open("#preset=copy-on-write")
    assert opened.pictures() == [before, after]
    opened.press_run("#reset")
    assert opened.pictures() == [before]

    opened.change("all of block_manager.py", *A_LEAK)
    expected = playground.run(settings, LEAK)
    failure = expected["failure"]
    assert opened.pictures() == [before, lines_of(expected["page"])]
    broken = f"After step {failure['step']} an invariant is broken: {failure['message']}"
    assert opened.texts("figure .problem") == [broken]
    assert opened.steps()[1] == failure["step"]


@pytest.mark.slow
def test_mistakes_in_the_source(opened: Playground) -> None:
    """A syntax error and an exception at their lines; a loop without an end is stopped."""
    opened.open("#preset=copy-on-write")
    opened.change("BlockManager.take", "if self.free_ids:", "if self.free_ids")
    (at,) = opened.texts("#numbers .wrong")
    wrong = f"SyntaxError: expected ':' (nanopaged/block_manager.py, line {at})"
    assert opened.text("problem").startswith(wrong)
    assert "if self.free_ids" in opened.run("document.getElementById('text').value").split("\n")[2]

    opened.change("BlockManager.take", "if self.free_ids", "if self.free_blocks:")
    wrong = "Step 1 failed. AttributeError: 'BlockManager' object has no attribute 'free_blocks'"
    assert opened.texts("figure .problem")[0].startswith(wrong)
    assert opened.texts("#numbers .wrong") == [at]

    endless = "while True: pass\n        if self.free_ids:"
    opened.change("BlockManager.take", "if self.free_blocks:", endless, runs=False)
    opened.click("#form .run")
    time.sleep(1)
    opened.press_run("#stop")
    assert re.match(r"The run was stopped after \d+ seconds, in step 1\.", opened.text("problem"))
    opened.press_run("#reset")
    assert len(opened.pictures()) == 1


@pytest.mark.slow
def test_the_second_load_is_from_the_cache(opened: Playground) -> None:
    sizes = json.loads((HERE / "pyodide" / "files.json").read_text(encoding="utf-8"))["sizes"]
    assert of_script("playground.js", r"([\d.]+ MB), once") == f"{sum(sizes.values()) / 1e6:.1f} MB"
    opened.command("Network.clearBrowserCache")
    sent = []
    for _ in range(2):
        opened.site.sent = 0
        opened.open()
        sent.append(opened.site.sent)
    assert sent[0] > 13e6 > 1e6 > sent[1]


@pytest.mark.slow
def test_the_page_says_why_it_cannot_run(browser: Browser, tmp_path: Path) -> None:
    """As a file; without Pyodide; without the source."""
    browser.driver.get("about:blank")
    browser.driver.get((HERE / "index.html").as_uri())
    assert "python -m http.server" in browser.text("problem")
    shutil.copytree(HERE, tmp_path / "docs" / "play", ignore=shutil.ignore_patterns("pyodide"))
    page = Playground(browser.driver, Site(tmp_path))
    page.open()
    assert page.text("problem") == "Pyodide is missing. Run: python docs/play/fetch.py"
    browser.logs()
