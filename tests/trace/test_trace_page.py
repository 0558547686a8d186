"""The page of a trace, in a real browser."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, open_browser
from conftest import tokens
from programs import load_file
from random_workloads import forked, mixed
from test_trace import Recorded, greedy, make_engine, record, run_to_end
from traces import find_events, parts_of, read_trace

from nanopaged import BeamSearchParams
from nanopaged.snapshot import Snapshot, short_key

ARROWS = "[...document.querySelectorAll('#links path')].map((path) => +path.dataset.to.split(' ')[1])"
LEFT, RIGHT, HOME, END, SHIFT = "\ue012\ue014\ue011\ue010\ue008"

GO_AND_READ = """(() => {
  window.trace.go(arguments[0], arguments[1]);
  const all = (place, query) => [...place.querySelectorAll(query)];
  const cell = (c) => ({ kind: c.classList[1],
    refs: +c.dataset.refs, colour: c.style.getPropertyValue("--a"),
    filled: c.style.getPropertyValue("--filled") });
  const entry = (e) => [+e.dataset.block, +e.dataset.filled];
  const state = window.trace.stateAt(arguments[0], arguments[1]);
  return {
    pool: all(document, "#pool .cell:not([hidden])").map(cell),
    host: all(document, "#host .cell:not([hidden])").map(cell),
    tables: all(document, "#pool-tables .table").map((t) => all(t, ".entry").map(entry)),
    hostTables: all(document, "#host-tables .table").map((t) => all(t, ".entry").map(entry)),
    reasons: all(document, ".why").map((e) => e.textContent.split(":")[0]),
    colours: all(document, "#pool-tables .table").map((t) => t.style.getPropertyValue("--a")),
    moves: all(document, "#moves [data-move]").map((path) => [path.classList[1], path.dataset.move]),
    marked: all(document, ".cell[data-mark]:not([hidden])")
      .map((c) => [c.dataset.mark, c.parentElement.id, +c.dataset.block]),
    parts: window.trace.parts(arguments[0]), cached: state.cached,
    keys: window.trace.blocksOf(state).map((b) => [b.key ?? null, b.tokens]),
    tokens: [...state.seqs.values()].sort((a, b) => a.number - b.number || a.index - b.index)
      .map((seq) => seq.tokens.slice(0, seq.n)),
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


# ── the picture is the engine's own state ─────────────────────────────────────────────────────────


def check_page(shown: dict[str, Any], snapshot: Snapshot) -> None:
    """Everything that the page shows of a part of a step is as in the snapshot."""
    size = snapshot.block_size
    users: dict[int, list[int]] = defaultdict(list)  # block → the tables that have it
    host_users: Counter[int] = Counter()
    tables, host_tables, contents = [], [], defaultdict(list)
    waiting = [request.sequences[0] for request in snapshot.requests if request.state == "waiting"]
    for seq in sequences_of(snapshot):
        host_users.update(seq.host_table)
        filled = [max(0, min(size, seq.num_computed_tokens - first)) for first in range(0, 10_000, size)]
        for i, block_id in enumerate(seq.block_table):
            users[block_id].append(len(tables))
            contents[block_id].append(list(seq.token_ids[i * size : i * size + filled[i]]))
        table = seq.block_table or seq.host_table
        row = [[block_id, filled[i]] for i, block_id in enumerate(table)]
        if seq.host_table:
            host_tables.append(row)
        elif seq.block_table or any(seq is first for first in waiting):
            tables.append(row)
    assert shown["tables"] == tables
    assert shown["hostTables"] == host_tables
    assert len(shown["reasons"]) == shown["tables"].count([]), "a request without blocks says why"
    assert set(shown["reasons"]) <= {"waits", "preempted"}
    assert shown["tokens"] == [list(seq.token_ids) for seq in sequences_of(snapshot)]
    assert shown["cached"] == list(snapshot.cached)
    assert all(block.state == "free" for block in snapshot.blocks[len(shown["pool"]) :])
    for cell, block, (key, token_ids) in zip(shown["pool"], snapshot.blocks, shown["keys"], strict=False):
        assert (cell["kind"], cell["refs"]) == (block.state, block.ref_count)
        assert key == (None if block.key is None else short_key(block.key))
        assert len(token_ids) == block.num_filled
        assert not block.num_filled or not block.ref_count or token_ids in contents[block.block_id]
        if block.state != "free":
            assert float(cell["filled"].rstrip("%")) == pytest.approx(100 * block.num_filled / size, 1e-4)
        if block.ref_count == 1:
            assert cell["colour"] == shown["colours"][users[block.block_id][0]]
    for block_id, cell in enumerate(shown["host"]):
        assert cell["kind"] == ("used" if host_users[block_id] else "free")
        assert cell["refs"] == host_users[block_id]


def sequences_of(snapshot: Snapshot) -> list[Any]:
    return [seq for request in snapshot.requests for seq in request.sequences]


def check_moves(shown: dict[str, Any], part: str, moves: list[str]) -> None:
    """An arrow for each block that is moved: planned, then done. Both its ends are marked when it is done."""
    kind = {"scheduled": "planned", "copied": "done"}.get(part)
    assert shown["moves"] == ([[kind, move] for move in moves] if kind else [])
    if part == "copied":
        ends = [move.split(" ") for move in moves]
        copies = {("copy", to, int(copy)) for _, _, to, copy in ends}
        sources = {("source", place, int(source)) for place, source, _, _ in ends}
        sources -= {("source", to, copy) for _, to, copy in copies}
        assert set(map(tuple, shown["marked"])) == copies | sources


def states_of_parts(step: Recorded) -> dict[str, Snapshot]:
    if step.scheduled is None:
        return {"failed": step.updated}
    copied = {"copied": step.scheduled} if step.moves else {}
    return {"scheduled": step.scheduled, "updated": step.updated} | copied


@pytest.mark.parametrize("make", [mixed, forked])
def test_random_runs(make: Any, browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In every part of random steps, visited in any order, the page shows the engine's own state."""
    first = request.config.getoption("--first-seed")
    for seed in range(first, first + max(3, request.config.getoption("--random-runs") // 50)):
        page = tmp_path / f"{seed}.html"
        recorded = record(make(seed), page)
        _, *lines = read_trace(page)
        browser.open(page)
        said = browser.run("window.trace.lines.map((line, i) => window.trace.said(i + 1))")
        for sentences_of_step, events in zip(said, find_events(lines), strict=True):
            kinds = {(kind, it["part"]) for it in sentences_of_step for kind in it["kinds"]}
            assert events.items() <= kinds
        rng = random.Random(seed)
        moving = [i for i, step in enumerate(recorded) if step.moves]
        steps = {*rng.sample(range(len(lines)), k=min(4, len(lines))), *moving[:2]}
        for i in rng.sample(sorted(steps), k=len(steps)):
            for part, snapshot in states_of_parts(recorded[i]).items():
                shown = browser.run(GO_AND_READ, i + 1, part)
                assert shown["parts"] == parts_of(lines[i])
                check_page(shown, snapshot)
                check_moves(shown, part, recorded[i].moves)
        console, asked = browser.logs()
        assert console == []
        assert all(url.startswith(("file:", "data:")) for url in asked), asked


# ── what is said ──────────────────────────────────────────────────────────────────────────────────


def sentences(browser: Browser, page: Path) -> dict[str, list[str]]:
    """Kind of event → all its sentences; each begins with its part."""
    browser.open(page)
    said: dict[str, list[str]] = {}
    for step in browser.run("window.trace.lines.map((line, i) => window.trace.said(i + 1))"):
        for it in step:
            for kind in it["kinds"]:
                said.setdefault(kind, []).append(f"{it['part']}: {it['text']}")
    assert browser.logs()[0] == []
    return said


def test_what_is_said_of_forks_copies_hits_and_chunks(browser: Browser, tmp_path: Path) -> None:
    """The paper's Fig. 8: the first writer copies, the last one writes in place. Then a prompt in chunks."""
    engine = make_engine(tmp_path / "run.html", max_num_batched_tokens=8)
    engine.add_request("four score", tokens(5, 7), greedy(3, n=3, seed=1))
    run_to_end(engine)
    engine.reset_prefix_cache()
    engine.add_request("first", tokens(5, 11), greedy(2))
    run_to_end(engine)
    engine.add_request("second", [*tokens(5, 11), 3], greedy(1))
    run_to_end(engine)
    said = sentences(browser, tmp_path / "run.html")
    assert said["fork"] == [
        "updated: The prompt is computed: A is forked into A1, A2 and A3, which share its 2 blocks."
    ]
    assert said["copy"] == [
        "copied: A1 is about to write into block 1, which A2 and A3 also use, so it gets a copy, block 2.",
        "copied: A2 is about to write into block 1, which A3 also uses, so it gets a copy, block 3.",
    ]
    assert said["grow"][:2] == [
        "scheduled: For the newest token of A1 and A2 blocks 2 and 3 are taken.",
        "scheduled: For the newest token of A1, A2 and A3 blocks 4 to 6 are taken.",
    ]
    assert said["decode"][0] == "computed: A1, A2 and A3 compute one token each."
    assert said["finish"][0] == "updated: A is finished: it has as many tokens as were asked for."
    (chunk,) = said["chunk"]
    assert re.search("B computes a chunk of 8 tokens.* 3 of its 11 tokens are left", chunk)
    assert "computed: B computes 3 tokens." in said["prefill"]
    found = r"scheduled: C begins like an earlier text: blocks \d+ and \d+ are found in the prefix cache, "
    assert re.fullmatch(found + "so 8 tokens need not be computed.", "|".join(said["hit"]))
    assert "scheduled: B is admitted: blocks " in said["admit"][1]


@pytest.mark.parametrize("num_host_blocks", [8, 0])
def test_preemption(browser: Browser, tmp_path: Path, num_host_blocks: int) -> None:
    options = {"num_blocks": 6, "num_host_blocks": num_host_blocks, "preemption": "swap"}
    engine = make_engine(tmp_path / "run.html", **options)
    engine.add_request("first", tokens(5, 8), greedy(12))
    engine.add_request("second", tokens(50, 8), greedy(6))
    run_to_end(engine)
    said = sentences(browser, tmp_path / "run.html")
    (preempted,) = said["preempt"]
    assert preempted.startswith("scheduled: Too few blocks are free: B, the last in the order of service")
    assert any(text.startswith("scheduled: No block is free: cached block") for text in said["evict"])
    assert preempted.endswith("moves to the host." if num_host_blocks else "is computed again later.")
    if num_host_blocks:
        leaves, back = said["swap"]
        assert leaves == "copied: B leaves: blocks 2, 3 and 5 → host blocks 0 to 2."
        assert re.fullmatch(r"copied: B comes back: host blocks 0 to 2 → blocks [\d, ]+ and \d\.", back)
        assert any(text.startswith("scheduled: B comes back from the host: ") for text in said["admit"])
    else:
        assert "swap" not in said


def test_words_and_picture_agree_in_a_beam_search(browser: Browser, tmp_path: Path) -> None:
    """Each of the next beams has the table of the beam from which it is said to come."""
    page = tmp_path / "run.html"
    engine = make_engine(page, num_blocks=30)
    engine.add_request("beams", tokens(5, 7), BeamSearchParams(beam_width=3, max_tokens=14, ignore_eos=True))
    run_to_end(engine)
    said = sentences(browser, page)
    assert said["arrive"] == ["scheduled: A (7 tokens, 3 beams) arrives."]
    for step, part in places_with(page, "beams"):
        browser.run("window.trace.go(arguments[0], 'computed')", step)
        old = {name: rows(browser, name) for name in ("A1", "A2", "A3")}
        browser.run("window.trace.go(arguments[0], arguments[1])", step, part)
        (sentence,) = [text for text in browser.texts("#said p") if text.startswith("The next beams")]
        children = [(a, child) for a, b in re.findall(r"(A\d) → ([A\d ]+)", sentence) for child in b.split()]
        assert sorted(child for _, child in children) == ["A1", "A2", "A3"]
        assert all(rows(browser, child) == old[parent] for parent, child in children)


def test_abort_and_failure(browser: Browser, tmp_path: Path) -> None:
    """Steps that fail, and requests that leave between two steps. No text becomes a part of the page."""
    engine = make_engine(tmp_path / "run.html", max_num_seqs=2)
    names = ["0", "</script><img class=bad src=x>", "2"]
    for name in names:
        engine.add_request(name, "</script><b class=bad>To be</b>", greedy(8))
    engine.step()
    engine.runner.fail_next = True
    with pytest.raises(RuntimeError):
        engine.step()
    engine.step()
    for name in names[1:]:
        engine.abort_request(name)
    run_to_end(engine)
    said = sentences(browser, tmp_path / "run.html")
    assert [text.partition(":")[0] for text in said["fail"]] == ["failed"]
    assert "(RuntimeError)" in said["fail"][0]
    assert said["finish"][:2] == ["scheduled: B is aborted.", "scheduled: C is aborted."]
    browser.run("window.trace.go(2)")
    assert browser.run("document.querySelectorAll('.bad').length") == 0


# ── walking through it ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_page(tmp_path: Path) -> Path:
    """A run with a copy on write, a prefix hit, a swap and an eviction."""
    engine = make_engine(tmp_path / "run.html", num_blocks=9, preemption="swap")
    engine.add_request("first", tokens(5, 7), greedy(12, n=2, seed=1))
    engine.add_request("second", tokens(5, 9), greedy(12))
    run_to_end(engine)
    return tmp_path / "run.html"


def places_with(page: Path, kind: str) -> list[tuple[int, str]]:
    """The steps, the first one is 1, and parts with an event of this kind."""
    events = find_events(read_trace(page)[1:])
    return [(step, kinds[kind]) for step, kinds in enumerate(events, 1) if kind in kinds]


def here(browser: Browser) -> tuple[int, str]:
    place = browser.run("window.trace.at()")
    return place["step"], place["part"]


def rows(browser: Browser, name: str) -> list[int]:
    """The physical blocks in the table of a sequence that is shown."""
    return list(map(int, browser.texts(f".table[data-seq='{name}'] .entry")))


def test_keys_and_buttons_walk(browser: Browser, small_page: Path) -> None:
    """Part by part, and with Shift step by step; space plays. A slider that has the focus moves once."""
    browser.open(small_page)
    _, *lines = read_trace(small_page)
    places = [(0, ""), *((i, part) for i, line in enumerate(lines, 1) for part in parts_of(line))]
    walk = [(RIGHT, place) for place in places[1:8]] + [(LEFT, place) for place in places[6::-1]]
    walk += [(LEFT, (0, "")), (SHIFT + RIGHT, (1, "updated")), (RIGHT, (2, "scheduled"))]
    walk += [(LEFT, (1, "updated")), (RIGHT, (2, "scheduled")), (SHIFT + LEFT, (1, "updated"))]
    walk += [(END, places[-1]), (RIGHT, places[-1]), (HOME, (0, ""))]
    for keys, place in walk:
        browser.press(keys)
        assert here(browser) == place
        if keys.startswith(SHIFT):
            browser.press(SHIFT)  # lets it go
    for button, place in (("forward", places[1]), ("forward", places[2]), ("back", places[1])):
        browser.click(f"#{button}")
        assert here(browser) == place
    browser.press(HOME)
    browser.run("document.getElementById('slider').focus()")
    browser.press(RIGHT)
    assert here(browser) == (1, "updated")
    browser.run("document.activeElement.blur()")
    browser.press(" ")
    browser.driver.execute_async_script("setTimeout(arguments[0], 700)")
    assert here(browser) > (1, "updated")
    browser.press(" ")
    assert browser.run("document.getElementById('play').ariaPressed") == "false"


def test_keys_jump_to_events(browser: Browser, small_page: Path) -> None:
    """With Shift backwards. Blocks are marked in all ways."""
    browser.open(small_page)
    for kind in ("copy", "preempt", "swap", "hit", "evict", "fork"):
        key = kind[0]
        places = places_with(small_page, kind)
        assert places, f"the run should have a {kind}"
        browser.press(HOME)
        there_and_back = [(key, place) for place in [*places, places[-1]]]  # there is no later one
        there_and_back += [(key.upper(), place) for place in reversed(places[:-1])]
        for pressed, place in there_and_back:
            browser.press(pressed)
            assert here(browser) == place
    seen: set[str] = set()
    for step, line in enumerate(read_trace(small_page)[1:], 1):
        for part in parts_of(line):
            seen |= {mark for mark, _, _ in browser.run(GO_AND_READ, step, part)["marked"]}
    assert seen == {"source", "copy", "taken", "freed", "kept", "evicted", "hit"}
    assert browser.logs()[0] == []


@pytest.mark.parametrize(
    ("name", "address", "place"),
    [
        ("3", "#3", (3, "updated")),
        ("2-copied", "#2-copied", (2, "copied")),
        ("1-copied", "#1-scheduled", (1, "scheduled")),  # a part that the step does not have: the one before
        ("none", "#1-computed", (1, "computed")),  # a trace does not open empty
    ],
)
def test_the_place_in_the_address(
    browser: Browser, small_page: Path, name: str, address: str, place: tuple[int, str]
) -> None:
    """Also in that of an open page."""
    browser.open(small_page, name)
    assert (browser.run("location.hash"), here(browser)) == (address, place)
    browser.run("location.hash = '#4-computed'")
    browser.driver.execute_async_script("setTimeout(arguments[0], 0)")
    assert here(browser) == (4, "computed")


def test_a_table_says_that_the_newest_token_has_no_kv(browser: Browser, small_page: Path) -> None:
    """Of B's 9 tokens 4 are in the block that A fills. The copy of a block is empty until it is made."""
    framed = ".table[data-seq='B'] .pending"
    for place, texts in (("1-scheduled", ["+5 tokens"]), ("1-computed", []), ("2-computed", [])):
        browser.open(small_page, place)
        assert browser.texts(framed) == texts
    browser.open(small_page, 1)
    assert len(browser.texts(framed)) == 1
    step, _ = places_with(small_page, "copy")[0]
    _, copy = read_trace(small_page)[step]["copies"][0]
    slots = f"#pool .cell[data-block='{copy}'] .slot:not(.due)"
    browser.open(small_page, f"{step}-scheduled")
    assert not "".join(browser.texts(slots)), "nothing is stored in it yet"
    browser.press(RIGHT)
    assert "".join(browser.texts(slots))


def test_a_block_tells_what_it_holds(browser: Browser, small_page: Path) -> None:
    """The grid is reached with the keyboard, and the arrows move from block to block."""
    browser.open(small_page, 1)
    assert browser.text("about").startswith("A recorded run, block by block.")
    assert browser.run("document.getElementById('about').checkVisibility()")
    assert browser.texts("#pool .label")[:3] == ["A1,2 B", "A1,2", "B"]
    browser.run("document.querySelector('#pool .cell').focus()")
    assert re.match(r"Block 0 · full, 4 of 4 .* · 3 references: A1 \(its block 0\)", browser.text("block"))
    browser.press(RIGHT)
    assert browser.text("block").startswith("Block 1 · ")
    assert here(browser) == (1, "updated")
    browser.run("document.querySelector('.table').focus()")
    browser.press(RIGHT)
    name = browser.run("document.activeElement.dataset.seq")
    assert name == "A2"
    assert browser.run(ARROWS) == rows(browser, name), "its arrows only"
    assert browser.logs()[0] == []


# ── what is in view ───────────────────────────────────────────────────────────────────────────────

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "play" / "tour.html"
SCREENS = [("laptop", 1280, 720), ("phone", 390, 844)]
WHERE = """(() => ["pool", "pool-tables", "picture", "caption"].map((id) => {
  const { left, top, right, bottom } = document.getElementById(id).getBoundingClientRect();
  return [left, top, right, bottom];
}))()"""
HAS_ALL_ROWS = """((its) => !its.children.length || its.scrollHeight <= its.clientHeight)(
  document.getElementById("pool-tables"))"""


@pytest.fixture(scope="module")
def presets(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """The page of each of the playground's presets, and the step at which it opens."""
    play, folder = ROOT / "docs" / "play", tmp_path_factory.mktemp("presets")
    run, pages = load_file(play / "playground.py").run, []
    for preset in json.loads((play / "presets.json").read_text(encoding="utf-8"))["presets"]:
        page = folder / f"{preset['name']}.html"
        page.write_text(run(preset["settings"], {})["page"], encoding="utf-8")
        pages.append((page, preset.get("step", 1)))
    return pages


def test_a_run_of_several_texts_opens_with_one_table(browser: Browser, tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "run.html")
    for seed in (5, 25, 45):
        engine.add_request(f"{seed}", [*tokens(5, 4), *tokens(seed, 3)], greedy(2))
    run_to_end(engine)
    browser.driver.get((tmp_path / "run.html").as_uri())
    assert browser.text("only") == (
        "You see the table of A, the first of 3 texts. They begin alike, so they share block 0: "
        "the table of B is 0, 2. A block with any difference (bold) is not shared."
    )
    assert (browser.texts("h3"), len(browser.texts(".dimmed"))) == (["A"], 2)
    assert len(browser.texts("#pool .differs")) == 9, "the last three tokens of each text"
    browser.click("#all")
    assert "block 0 is found in the prefix cache (A computes it in this step)" in browser.text("said")
    assert (browser.texts("h3"), len(browser.texts(".dimmed"))) == (["A", "B", "C"], 0)


@pytest.mark.parametrize(("screen", "width", "height"), SCREENS)
def test_pool_and_tables_are_in_view(
    browser: Browser, presets: list[tuple[Path, int]], screen: str, width: int, height: int
) -> None:
    """At each stop of the tour and in each preset, without scrolling; on a phone, the caption and the pool.

    An arrow leads from a table to a block, or words say that the host has no room. The tokens of a small pool
    are in their slots. The pool and the tables keep their places as long as no more blocks are drawn.
    """
    browser.screen(width, height)
    browser.open(TOUR)
    stops = [(TOUR, place) for place in browser.run("trace.captions.map((c) => `${c.step}-${c.part}`)")]
    for page, step in stops + presets:
        browser.open(page, step)
        pool, tables, picture, caption = browser.run(WHERE)
        assert pool[3] <= height, (page.name, step)
        assert 0 < tables[1] < tables[3] <= pool[1] < pool[3] <= picture[3]
        assert page != TOUR or browser.run(HAS_ALL_ROWS), step
        assert screen == "phone" or picture[3] <= height
        assert page != TOUR or 0 < caption[1] < caption[3] <= height
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.texts("#links path, #moves path, .refused") or not browser.texts(".entry")
        assert "".join(browser.texts("#pool .slot")).strip()
    browser.open(TOUR, "none")
    drawn = "document.querySelectorAll('.cell:not([hidden])').length"
    step = f"(document.getElementById('forward').click(), [{drawn}, {WHERE}.slice(0, 2)])"
    places = browser.run(f"Array.from({{ length: 239 }}, () => {step})")
    assert here(browser) == (60, "updated"), "it is walked to its end"
    _, (pool, tables) = places[-1]
    assert len({str(place) for place in places}) - 1 == len({drawn for drawn, _ in places}) == 3
    assert pool[1] - tables[1] < 80, "at the end it has no tables, and the pool moves up"
    assert browser.run("scrollY") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read(browser: Browser, dark: bool) -> None:
    """A contrast of 4.5 and more (WCAG AA) at all stops of the tour."""
    browser.screen(1280, 720, dark)
    browser.open(TOUR)
    least: dict[str, float] = {}
    for step, part in browser.run("trace.captions.map((c) => [c.step, c.part])"):
        browser.run("trace.go(...arguments)", step, part)
        for name, contrast in browser.contrasts().items():
            least[name] = min(contrast, least.get(name, 21))
    assert {"SPAN.id", "SPAN.user", "H3.", "A."} <= least.keys()
    assert {name: contrast for name, contrast in least.items() if contrast < 4.5} == {}


# ── the tour, and what is not there ───────────────────────────────────────────────────────────────


def test_the_tour(browser: Browser) -> None:
    """It opens at its first stop, a key skips to the next, and Play plays to it. The last one leads on."""
    browser.screen(1280, 720)
    browser.open(TOUR, "none")
    stops = [((c["step"], c["part"]), c["title"]) for c in browser.run("trace.captions")]
    last = len(stops) - 1
    keys = ["g"] * len(stops) + ["G", "g"]
    for key, i in zip(["", *keys], [*range(len(stops)), last, last - 1, last], strict=True):
        if key:
            browser.press(key)
        assert here(browser) == stops[i][0]
        assert browser.text("caption").startswith(f"Stop {i + 1} of {len(stops)}. {stops[i][1]} ")
    links = "[...document.querySelectorAll('{}')].map((a) => a.href.split('#')[0])"
    docs = (ROOT / "docs").as_uri()
    assert browser.run(links.format("#links-on a")) == [
        f"{docs}/play/index.html",
        f"{docs}/book/03-blocks.md",
    ]
    browser.run("trace.go(2, 'copied')")
    assert browser.texts("#pool .dimmed .id") == ["2", "3", "6", "7"], "only what is copied is in colour"
    assert browser.texts("#pool [data-mark=source] .refs") == ["4 → 3 → 2 → 1 refs"]
    assert (len(browser.texts("#links path")), len(browser.texts("#moves path"))) == (3, 3)
    assert browser.texts("#moves text") == ["copy"], "said once"
    assert browser.texts("#pool .due") == [" have", " will", " pray", " am"], "their slots"
    assert browser.run(links.format("#caption a")) == [f"{docs}/reference/glossary.md"]
    browser.run("trace.go(17, 'scheduled')")
    assert browser.texts(".table[data-seq=B] .refused") == ["12 host blocks needed, 4 free"]
    assert browser.texts("#pool [data-mark] .id") == ["16", "25", "26", "27"], "what A takes, and no more"
    assert browser.texts("#pool .due") == [" su", "ore", ";", " s"], "why A takes them"
    assert browser.texts("#links path") == [], "they would pass other tables; the labels say it"
    free = "[...document.querySelectorAll('#host .cell')].filter((c) => c.checkVisibility()).length"
    assert browser.run(free) == 4, "C's blocks are only in its table"
    owners = [label.split() for label in browser.texts("#pool .cell:not(.dimmed) .label")]
    assert Counter(owner for owner, *_ in owners) == {"B": 12, "C": 1}, "whose blocks they were"
    assert Counter(now[0] for _, now, *_ in owners) == {"c": 9, "→": 4}, "cached, and taken by another"
    assert not browser.run("document.getElementById('about').checkVisibility()"), "a tour has captions"
    browser.run("trace.go(1)")
    browser.press(" ")
    browser.until("trace.at().part === 'copied'")
    browser.until("document.getElementById('play').ariaPressed === 'false'")
    assert (here(browser), browser.texts("#play")) == (stops[2][0], ["Play to the next stop"])
    assert browser.logs()[0] == []


def test_an_interrupted_run_and_one_without_steps(browser: Browser, small_page: Path, tmp_path: Path) -> None:
    """Half a line at the end is left out."""
    num_lines = len(read_trace(small_page)) - 1
    small_page.write_text(small_page.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    browser.open(small_page)
    assert browser.run("window.trace.lines.length") == num_lines - 1
    make_engine(tmp_path / "none.html")
    browser.open(tmp_path / "none.html")
    assert browser.text("said") == "Nothing has run yet."
    assert browser.logs()[0] == []
