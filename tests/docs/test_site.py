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

import pytest
import yaml
from browser import open_browser
from doc_pages import ROOT, copy_repository
from programs import load_file

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
    settings = (BUILD.parent / "zensical.toml").read_text(encoding="utf-8")
    assert {*re.findall(r'"([^"]+\.md)"', settings)} - {"playground.md"} == pages
    for page in pages:
        html = page.replace("README.md", "index.md").replace(".md", ".html")
        text = (site / html).read_text(encoding="utf-8")
        assert f'<html lang="{"zh" if page.startswith("zh/") else "en"}"' in text, page
        assert re.search(r'href="[./]*tour\.html"', text), f"{page}: no tour in the navigation"
    assert ("a", "../source/nanopaged/block_manager.py.html") in build.Page(
        site / "book" / "03-blocks.html"
    ).links
    source = site / "source" / "nanopaged" / "block_manager.py.html"
    assert "append_slots" in source.read_text(encoding="utf-8")
    assert ("a", "../index.html") in build.Page(site / "play" / "tour.html").links
    for old, to in (("03-blocks.html", "book/03-blocks.html"), ("rebuild/1.html", "../build/1.html")):
        assert f'location.replace("{to}" + location.hash)' in (site / old).read_text(encoding="utf-8")
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
        browser.driver.get(address + "tour.html#19")  # its old address leads on
        assert "Step 19" in browser.run("document.getElementById('where').textContent")
        server.shutdown()
