"""The site: every page is there, every link leads somewhere, and nothing comes from another server."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from time import sleep
from xml.etree import ElementTree

import pytest
import yaml
from browser import Site, open_browser
from doc_pages import ROOT, copy_repository
from programs import load_file

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import Request, Sample
from nanopaged.text import StopRules

SVG = "{http://www.w3.org/2000/svg}"
BUILD = ROOT / "docs" / "site" / "build.py"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
build = load_file(BUILD)


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Without the playground, whose Python would have to be fetched."""
    command = [sys.executable, root / "docs" / "site" / "build.py", folder, "--no-playground"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    done = build_site(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    """What is to be seen of the site without a browser."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = {build.place(file.relative_to(ROOT).as_posix()) for file in files} - {"playground.md"}
    listed = [(BUILD.parent / name).read_text(encoding="utf-8") for name in ("zensical.toml", "zh.toml")]
    forks = {page for page in pages if page.startswith("forks/") and page != "forks/README.md"}
    assert {*re.findall(r'"([^"]+\.md)"', "".join(listed))} - {"playground.md"} == pages - forks
    front = (site / "index.html").read_text(encoding="utf-8")
    assert all(f'href="./{page.replace("README.md", "index.html")}"' in front for page in forks)
    for page in pages:
        html = page.replace("README.md", "index.md").replace(".md", ".html")
        text = (site / html).read_text(encoding="utf-8")
        chinese = page.startswith("zh/")
        assert f'<html lang="{"zh" if chinese else "en"}"' in text, page
        labels = [
            'aria-label="导航栏"' in text,
            "查阅" in text,
            'aria-label="Navigation"' in text,
            "Look up" in text,
        ]
        assert labels == [chinese, chinese, not chinese, not chinese], page
        assert re.search(r'href="[./]*play/tour\.html"', text), f"{page}: no tour in the navigation"
    assert ("a", "../source/nanopaged/block_manager.py.html") in build.Page(
        site / "book" / "03-blocks.html"
    ).links
    source = site / "source" / "nanopaged" / "block_manager.py.html"
    assert "append_slots" in source.read_text(encoding="utf-8")
    assert ("a", "../index.html") in build.Page(site / "play" / "tour.html").links
    assert "../reference/glossary.html#" in (site / "play" / "tour.html").read_text(encoding="utf-8")
    for old, to in (
        ("03-blocks.html", "book/03-blocks.html"),
        ("rebuild/1.html", "../build/1.html"),
        ("12-wrong-claims.html", "reference/wrong-claims.html"),
        ("book/14-after-2023.html", "../reference/after-2023.html"),
        ("book/13-forks.html", "12-forks.html"),
    ):
        assert f'location.replace("{to}" + location.hash)' in (site / old).read_text(encoding="utf-8")
    assert "<title>nanopaged: PagedAttention" in (site / "index.html").read_text(encoding="utf-8")
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    page = copy / "docs" / "zh" / "glossary.md"
    links = "[nothing](nowhere.py) [no heading](../book/07-sharing.md#no-such)"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}\n", encoding="utf-8")
    done = build_site(copy, tmp_path / "site")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "zh/glossary.html links to nowhere.py, which does not exist",
        "zh/glossary.html links to ../book/07-sharing.html#no-such, which has no such anchor",
    ]
    assert not (tmp_path / "site").exists()


def test_a_folder_with_other_files_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    done = build_site(ROOT, tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} has files, and is no site: name another folder" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="#here" id="here">', None),
        ('<a href="play/tour.html#19">', None),  # the tour's own script reads the number
        ('<a href="https://arxiv.org/abs/2309.06180">', None),
        ('<img src="data:,">', None),
        ('<a href="b.html#nowhere">', "a.html links to b.html#nowhere, which has no such anchor"),
        ('<a href="/b.html">', "a.html links to /b.html, which does not exist"),
        ('<script src="https://cdn.org/a.js">', "a.html loads https://cdn.org/a.js from another server"),
        ('<link href="//fonts.org/a">', "a.html loads //fonts.org/a from another server"),
    ],
)
def test_what_is_found(tmp_path: Path, html: str, fault: str | None) -> None:
    (tmp_path / "a.html").write_text(html, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="there">', encoding="utf-8")
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "tour.html").write_text("", encoding="utf-8")
    assert list(build.find_faults(tmp_path)) == ([fault] if fault else [])


# ── links ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("page", "link", "led"),
    [
        ("docs/book/03-blocks.md", "../../nanopaged/swap.py", "../source/nanopaged/swap.py.md"),
        ("docs/zh/03-blocks.md", "../../nanopaged/swap.py", "../source/nanopaged/swap.py.md"),
        ("docs/README.md", "book/exercises", "source/docs/book/exercises/README.md"),
        ("README.md", "docs/zh/README.md", "zh/README.md"),
        ("docs/zh/03-blocks.md", "../play/tour.html#19", "../play/tour.html#19"),
        ("docs/zh/03-blocks.md", "nowhere.py", "nowhere.py"),
        ("docs/zh/03-blocks.md", "https://arxiv.org/a.py", "https://arxiv.org/a.py"),
    ],
)
def test_where_links_lead(page: str, link: str, led: str) -> None:
    sources: set[str] = set()
    code = f"\n```python\n[text]({link})\n```\n"
    assert build.rewrite(f"[text]({link})\n{code}", page, True, sources) == f"[text]({led})\n{code}"
    assert [build.place(source) for source in sources] == ([led.lstrip("./")] if "source/" in led else [])


# ── the live figure ───────────────────────────────────────────────────────────────────────────────

FIGURE = ROOT / "docs" / "book" / "figures" / "write_a_token.svg"


def test_the_live_figure_shows_what_the_block_manager_does() -> None:
    """Tables, references and the number of filled slots after each write, of a run that the engine makes."""
    svg = ElementTree.parse(FIGURE).getroot()
    ends = list(map(int, svg.findtext(f"{SVG}metadata").split()))
    groups = [(group, *map(int, group.get("data-frames").split())) for group in svg.iter(f"{SVG}g")]
    manager = BlockManager(5, 4)
    rules = StopRules(frozenset(), frozenset(), 0, 99)
    first = Request("A", None, list(range(7)), SamplingParams(n=2), rules, seed=0).live[0]
    assert manager.allocate([first])
    first.num_computed_tokens = 7
    sequences = [first, manager.fork(first, 1)]
    for write, frame in enumerate(ends):
        if write > 0:
            writer = sequences[(write - 1) % 2]
            writer.append(Sample(99, 0.0))
            copies = manager.append_slots(sequences)
            assert bool(copies) is (frame - ends[write - 1] > 1), "a copy is shown in frames of its own"
            writer.num_computed_tokens += 1
        texts: dict[str, list[str]] = {}
        for group, begin, end in groups:
            if begin <= frame <= end:
                assert group.get("data-of") not in texts, "one state of each thing"
                texts[group.get("data-of")] = [text.text for text in group.iter(f"{SVG}text")]
        for i, seq in enumerate(sequences):
            assert texts[f"table {i}"] == list(map(str, seq.block_table))
        for block in manager.blocks:
            number, *words, references = texts[f"block {block.block_id}"]
            assert int(number) == block.block_id
            assert references == ("free", "1 reference", "2 references")[block.ref_count]
            filled = [
                seq.num_computed_tokens - 4 * seq.block_table.index(block.block_id)
                for seq in sequences
                if block.block_id in seq.block_table
            ]
            assert len(words) == min(4, max(filled, default=0))
    assert write >= 6
    assert FIGURE.stat().st_size <= 500_000


# ── the playground ────────────────────────────────────────────────────────────────────────────────

PRESET = "../play/index.html#preset=prefix-hit"


def test_a_line_that_is_a_preset_becomes_the_playground() -> None:
    text = f"Before.\n\n[Play it: how\nmany?]({PRESET})\n\nSee [the same]({PRESET}).\n"
    page = build.rewrite(text, "docs/book/06-prefix-cache.md", True, set())
    assert f'<iframe loading="lazy" title="Play it: how many?" src="{PRESET}&amp;embed"></iframe>' in page
    assert f'<a href="{PRESET}">Open it on a page of its own</a>' in page
    assert page.endswith(f"\n\nSee [the same]({PRESET}).\n")
    # Without a playground, nothing leads to it.
    without = build.rewrite(text, "docs/book/06-prefix-cache.md", False, set())
    assert " ".join(without.split()) == "Before. See the same."


def test_the_playground_finds_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metas = '<meta name="source" content="{}">\n<meta name="chapters" content="{}">\n<body>\n'
    playground, site = tmp_path / "docs" / "play", tmp_path / "site"
    (playground / "pyodide").mkdir(parents=True)
    (playground / "pyodide" / "python.wasm").touch()
    (playground / "index.html").write_text(metas.format("../../", "../*.md"), encoding="utf-8")
    monkeypatch.setattr(build, "PLAYGROUND", playground)
    build.copy_playground(site)
    text = (site / "play" / "index.html").read_text(encoding="utf-8")
    assert text.startswith(metas.format("../", "../*.html"))
    assert '<a href="../index.html">' in text
    for file in ("play/pyodide/python.wasm", "nanopaged/engine.py", "nanopaged/page.html"):
        assert (site / file).is_file(), file


# ── the code host ─────────────────────────────────────────────────────────────────────────────────


def test_the_workflow_runs_what_is_there() -> None:
    """Its commands are those of the docs."""
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    commands = {step["run"].split(" #")[0] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert {".ci/run", "python docs/site/build.py"} <= commands
    contributing = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"`{command}`" in contributing for command in commands)


# ── in a browser ──────────────────────────────────────────────────────────────────────────────────


CONTRAST = """((selector) => {
  const context = document.createElement("canvas").getContext("2d");
  const lightness = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);  // a colour with alpha is laid over the one before
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((it) =>
      (it / 255 <= 0.04045 ? it / 255 / 12.92 : ((it / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const link = document.querySelector(selector);
  lightness(getComputedStyle(document.body).backgroundColor);
  const ground = lightness(getComputedStyle(link).backgroundColor);
  const ink = lightness(getComputedStyle(link.querySelector(".md-ellipsis")).color);
  return (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
})(...arguments)"""


@pytest.mark.slow
def test_the_search_loads_when_asked_and_finds_chapters_first(site: Path) -> None:
    field = "[...document.body.children].at(-1).shadowRoot.querySelector('input')"
    server = Site(site)
    with open_browser() as browser:
        for page, words, first in (
            ("index.html", "block table", "book/03-blocks.html"),
            ("zh/index.html", "块表", "zh/03-blocks.html"),
        ):
            browser.driver.get(server.root + page)
            sleep(0.5)
            assert not [url for url in browser.logs()[1] if "search.json" in url]
            browser.click(".md-search__button")
            while not browser.run(f"{field}?.checkVisibility()"):
                sleep(0.05)
            assert [url for url in browser.logs()[1] if "search.json" in url]
            label = browser.run(f"{field}.ariaLabel")
            assert label == ("搜索" if page.startswith("zh/") else "Search")
            browser.run(f"{field}.focus()")
            browser.command("Input.insertText", text=words)
            found = f"[...{field}.getRootNode().querySelectorAll('ol a')].map((link) => link.href)"
            while not (links := browser.run(found)):
                sleep(0.05)
            assert links[0].split("?")[0].split("#")[0] == server.root + first


@pytest.mark.slow
def test_the_button_of_the_front_page_writes_a_token(site: Path) -> None:
    """The figure shows one frame at a time, up to the last; the copy takes frames of its own."""
    server = Site(site)
    frames = len(ElementTree.parse(FIGURE).findall(f".//{SVG}g[@data-of='caption']"))
    with open_browser() as browser:
        browser.driver.get(server.root + "index.html")
        captions = [browser.run("document.querySelector('.live [role=status]').textContent")]
        while browser.run("document.querySelector('.live button').textContent") == "Write a token":
            browser.click(".live button")
            captions.append(browser.run("document.querySelector('.live [role=status]').textContent"))
            shown = browser.run(
                "[...document.querySelectorAll('.live g')].filter((g) => g.style.visibility !== 'hidden')"
                ".map((g) => g.dataset.of)"
            )
            assert len({*shown}) == len(shown) >= 5 + 2 + 1, "one state of each thing"
        assert len(captions) == frames
        assert "is copied" in captions[2]
        browser.click(".live button")
        assert browser.run("document.querySelector('.live [role=status]').textContent") == captions[0]


@pytest.mark.slow
def test_pages_in_a_browser(site: Path) -> None:
    """No message, no request to another server, nothing wider than the screen; as dark as the system."""
    names = ["index.html", "book/03-blocks.html#the-kv-cache-tensor", "zh/glossary.html", "play/tour.html#19"]
    names += ["source/nanopaged/block_manager.py.html"]
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, open_browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        for width, dark, name in product((1400, 390), (False, True), names):
            browser.screen(width, 900, dark)
            browser.driver.get("about:blank")
            browser.logs()
            browser.driver.get(address + name)
            sleep(0.3)  # scripts run on
            console, asked = browser.logs()
            assert console == []
            assert [url for url in asked if not url.startswith((address, "data:"))] == []
            assert browser.run("document.documentElement.scrollWidth") <= width
            colour = browser.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128) is dark
            if "play/" not in name and "source/" not in name:
                assert browser.run(CONTRAST, ".md-nav__link--active") >= 4.5
        browser.driver.get(address + "tour.html#19")  # its old address leads on
        assert "Step 19" in browser.run("document.getElementById('where').textContent")
        server.shutdown()
