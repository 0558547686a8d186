"""The site: every page is there, every link leads somewhere, and nothing comes from another server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from time import sleep

import pytest
import yaml
from browser import Browser, Site, open_browser
from doc_pages import ROOT
from programs import load_file

BUILD = ROOT / "docs" / "site" / "build.py"
build = load_file(BUILD)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(BUILD), str(folder), "--no-playground"])
    build.main()


# ── what build.py does without the generator ──────────────────────────────────────────────────────


def test_a_dead_link_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "html" / "index.html"

    def generate(folder: Path, playground: bool) -> Path:
        return page.parent

    monkeypatch.setattr(build, "generate", generate)
    build.write(page, '<a href="nowhere.html">')
    with pytest.raises(SystemExit, match=r"links to nowhere.html, which does not exist"):
        run_main(monkeypatch, tmp_path / "site")
    assert not (tmp_path / "site").exists()
    build.write(page, '<a href="https://arxiv.org/abs/2309.06180">')
    run_main(monkeypatch, tmp_path / "site")
    assert (tmp_path / "site" / page.name).exists()
    with pytest.raises(SystemExit):
        run_main(monkeypatch, tmp_path / "site")
    assert "has files, and is no site: name another folder" in capsys.readouterr().err
    assert (tmp_path / "site" / page.name).exists()


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="#here" id="here">', None),
        ('<a href="play/tour.html#19">', None),  # the tour's own script reads the number
        ('<a href="https://arxiv.org/abs/2309.06180"><img src="data:,">', None),
        ('<a href="b.html#nowhere">', "a.html links to b.html#nowhere, which has no such anchor"),
        ('<a href="/b.html">', "a.html links to /b.html, which does not exist"),
        ('<script src="https://cdn.org/a.js">', "a.html loads https://cdn.org/a.js from another server"),
        ('<link href="//fonts.org/a">', "a.html loads //fonts.org/a from another server"),
    ],
)
def test_what_is_found(tmp_path: Path, html: str, fault: str | None) -> None:
    build.write(tmp_path / "a.html", html)
    build.write(tmp_path / "b.html", '<h2 id="there">')
    build.write(tmp_path / "play" / "tour.html", "")
    assert list(build.find_faults(tmp_path)) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("docs/book/03-blocks.md", "../../nanopaged/swap.py", "../source/nanopaged/swap.py.md"),
        ("docs/README.md", "book/exercises", "source/docs/book/exercises/README.md"),
        ("README.md", "docs/zh/README.md", "zh/contents.md"),
        ("docs/zh/03-blocks.md", "../play/tour.html#19", "../play/tour.html#19"),
        ("docs/zh/03-blocks.md", "nowhere.py", "nowhere.py"),
        ("docs/zh/03-blocks.md", "https://arxiv.org/a.py", "https://arxiv.org/a.py"),
    ],
)
def test_where_links_lead(page: str, link: str, target: str) -> None:
    sources: set[str] = set()
    code = f"\n```python\n[text]({link})\n```\n"
    assert build.rewrite(f"[text]({link})\n{code}", page, True, sources) == f"[text]({target})\n{code}"
    assert [build.place(source) for source in sources] == (
        [target.lstrip("./")] if "source/" in target else []
    )


def test_a_line_that_is_a_preset_becomes_the_playground() -> None:
    preset = "../play/index.html#preset=prefix-hit"
    text = f"Before.\n\n[Play it: how\nmany?]({preset})\n\nSee [the same]({preset}).\n"
    page = build.rewrite(text, "docs/book/06-prefix-cache.md", True, set())
    assert f'<iframe loading="lazy" title="Play it: how many?" src="{preset}&amp;embed"></iframe>' in page
    assert f'<a href="{preset}">Open it on a page of its own</a>' in page
    assert page.endswith(f"\n\nSee [the same]({preset}).\n")
    without = build.rewrite(text, "docs/book/06-prefix-cache.md", False, set())
    assert without.split() == ["Before.", "See", "the", "same."]


def test_the_playground_finds_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metas = '<meta name="source" content="{}">\n<meta name="chapters" content="{}">\n<body>\n'
    playground, site = tmp_path / "docs" / "play", tmp_path / "site"
    build.write(playground / "pyodide" / "python.wasm", "")
    build.write(playground / "index.html", metas.format("../../", "../*.md"))
    monkeypatch.setattr(build, "PLAYGROUND", playground)
    build.copy_playground(site)
    text = (site / "play" / "index.html").read_text(encoding="utf-8")
    assert text.startswith(metas.format("../", "../*.html"))
    assert '<a href="../index.html">' in text
    for file in ("play/pyodide/python.wasm", "nanopaged/engine.py", "nanopaged/page.html"):
        assert (site / file).is_file(), file


def test_the_workflow_runs_what_is_there() -> None:
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"].split(" #")[0] for job in jobs.values() for step in job["steps"] if "run" in step]
    contributing = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [command for command in commands if f"`{command}`" not in contributing] == []


# ── the site ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the playground, whose Python would have to be fetched."""
    folder = build.generate(tmp_path_factory.mktemp("site"), playground=False)
    assert list(build.find_faults(folder)) == []
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Site:
    return Site(folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.mark.slow
def test_every_page_is_there(folder: Path) -> None:
    """In its language, and in the navigation; a fork's page is linked by the list of forks."""
    navigation = [(BUILD.parent / name).read_text(encoding="utf-8") for name in ("zensical.toml", "zh.toml")]
    listed = set(re.findall(r'"([^"]+\.md)"', "".join(navigation)))
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page = build.place(file.relative_to(ROOT).as_posix())
        if page == "playground.md":
            continue
        assert page in listed or re.match(r"forks/\w+/", page), f"{page} is not in the navigation"
        html = page.replace("README.md", "index.md").replace(".md", ".html")
        text = (folder / html).read_text(encoding="utf-8")
        chinese = page.startswith("zh/")
        assert f'<html lang="{"zh" if chinese else "en"}"' in text, page
        assert ("查阅" in text, "Look up" in text) == (chinese, not chinese), page
        assert re.search(r'href="[./]*play/tour\.html"', text), f"{page}: no tour in the navigation"
    for page, link in (
        ("book/03-blocks.html", "../source/nanopaged/block_manager.py.html"),
        ("play/tour.html", "../index.html"),
        ("index.html", "./forks/radix/index.html"),
    ):
        assert ("a", link) in build.Page(folder / page).links
    for style in folder.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_the_search_loads_when_asked_and_finds_chapters_first(site: Site, browser: Browser) -> None:
    field = "[...document.body.children].at(-1).shadowRoot.querySelector('input')"
    found = f"[...{field}.getRootNode().querySelectorAll('ol a')].map((link) => link.href)"
    for page, label, words, first in (
        ("index.html", "Search", "block table", "book/03-blocks.html"),
        ("zh/index.html", "搜索", "块表", "zh/03-blocks.html"),
    ):
        browser.driver.get(site.root + page)
        sleep(0.5)
        assert not [url for url in browser.logs()[1] if "search.json" in url]
        browser.click(".md-search__button")
        browser.until(f"{field}?.checkVisibility()")
        assert [url for url in browser.logs()[1] if "search.json" in url]
        assert browser.run(f"{field}.ariaLabel") == label
        browser.run(f"{field}.focus()")
        browser.command("Input.insertText", text=words)
        browser.until(f"{found}.length > 0")
        assert browser.run(found)[0].split("?")[0].split("#")[0] == site.root + first


@pytest.mark.slow
def test_the_button_of_the_front_page_writes_a_token(site: Site, browser: Browser) -> None:
    """The figure shows one frame at a time, up to the last, and begins again. The button names the writer."""
    browser.driver.get(site.root + "index.html")
    captions = [browser.texts(".live [role=status]")]
    shown = "[...document.querySelectorAll('.live g')].filter((g) => g.style.visibility !== 'hidden')"
    while (button := browser.texts(".live button")[0]) != "Again":
        browser.click(".live button")
        captions.append(browser.texts(".live [role=status]"))
        assert re.fullmatch("A[12] writes a token", button)
        assert button[:2] in captions[-1][0]
        things = browser.run(f"{shown}.map((g) => g.dataset.of)")
        assert len({*things}) == len(things) >= 5 + 2 + 1, "one state of each thing"
    assert len(captions) == len(browser.texts(".live g[data-of=caption]"))
    browser.click(".live button")
    assert browser.texts(".live [role=status]") == captions[0]


@pytest.mark.slow
def test_pages_in_a_browser(site: Site, browser: Browser) -> None:
    """No message, no request to another server, nothing wider than the screen; as dark as the system."""
    names = ["index.html", "book/03-blocks.html#the-kv-cache-tensor", "zh/glossary.html", "play/tour.html#19"]
    names.append("source/nanopaged/block_manager.py.html")
    for width, dark, name in product((1400, 390), (False, True), names):
        browser.screen(width, 900, dark)
        browser.driver.get("about:blank")
        browser.logs()
        browser.driver.get(site.root + name)
        sleep(0.3)  # scripts run on
        console, asked = browser.logs()
        assert console == []
        assert [url for url in asked if not url.startswith((site.root, "data:"))] == []
        assert browser.run("document.documentElement.scrollWidth") <= width
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128) is dark
        if name == "index.html":
            fill = browser.run("getComputedStyle(document.querySelector('.live rect')).fill")
            assert (sum(map(int, re.findall(r"\d+", fill)[:3])) < 3 * 128) is dark, "the figure, too"
        if name.startswith(("book", "zh")):
            assert browser.texts(".language") == ["English" if name.startswith("zh") else "中文"]
            entries = "[...document.querySelectorAll('.md-nav--primary .md-nav__link')]"
            shown = f"{entries}.filter((it) => it.closest('.md-nav').clientHeight && it.clientHeight)"
            assert browser.run(f"new Set({shown}.map((it) => it.textContent.trim())).size") <= 25
            assert min(browser.contrasts(".md-nav__link--active *").values(), default=21) >= 4.5
