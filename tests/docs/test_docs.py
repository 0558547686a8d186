"""README and docs: code and commands print what is shown, quotations are current, and references resolve.

The kinds of block, and what is compared, are described in doc_pages.py.
"""

from __future__ import annotations

import builtins
import keyword
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import KINDS, ROOT, blocks_of, copy_repository, execute, quote, run_commands, run_python
from traces import parts_of as parts_of_step
from traces import read_trace

DOCS = ROOT / "docs"
PAGES = quote.ENGLISH + quote.CHINESE
FIGURES = []
for file in sorted((DOCS / "book" / "figures").glob("*.py")):
    if file.with_suffix(".svg").exists():
        is_slow = file.stem == "saturation"  # a simulation; chapter 11 runs it once more for its own output
        FIGURES.append(pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * is_slow))


def named(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


each_page = pytest.mark.parametrize("page", PAGES, ids=named)
CHINESE = [page for page in quote.CHINESE if page.name != "README.md"]  # that one is shorter
each_chinese_page = pytest.mark.parametrize("page", CHINESE, ids=named)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, to run pages in. (Chapter 9 runs Triton's interpreter, which Linux has.)"""
    return copy_repository(tmp_path_factory.mktemp("docs"))


# ── code ──────────────────────────────────────────────────────────────────────────────────────────


def test_pages_repeat_what_the_source_says() -> None:
    stale = [named(page) for page in quote.changed_pages()]
    assert stale == [], "run python docs/site/quote.py"


@each_page
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """A misspelled kind would not be checked; an output needs a block that prints it."""
    blocks = blocks_of(page)
    fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks), "a fence is indented, not closed, or has an unknown option"
    assert {block.kind for block in blocks} <= KINDS
    before = ["", *[f"{block.kind} {block.title}" for block in blocks]]
    for block, previous in zip(blocks, before, strict=False):
        where = f"{page.name}:{block.line}"
        assert block.kind != "output" or previous == "python ", f"{where}: an output of what?"
        assert block.kind == "console" or not previous.startswith("diff"), f"{where}: what fails?"


def pages_to_run(*kinds: str) -> list[Path]:
    """The pages with blocks of these kinds. A fork's own page runs in test_forks.py."""
    pages = []
    for page in quote.ENGLISH:
        runs = any(block.kind in kinds and not block.title for block in blocks_of(page))
        if runs and page.parent.parent != DOCS / "forks":
            pages.append(page)
    return pages


@pytest.mark.parametrize("page", pages_to_run("python"), ids=named)
def test_python_prints_what_the_page_shows(page: Path, copy: Path) -> None:
    run_python(page, copy)


COMMANDS = []
for page in pages_to_run("console", "sh"):
    breaks = any(block.kind == "diff" for block in blocks_of(page))
    COMMANDS.append(pytest.param(page, marks=[pytest.mark.slow] * breaks))


@pytest.mark.parametrize("page", COMMANDS, ids=named)
def test_commands_print_what_the_page_shows(page: Path, copy: Path) -> None:
    """A chapter that breaks the source runs tests, which takes seconds. That their names exist is quick."""
    run_commands(page, copy)


@each_page
def test_commands_have_their_options(page: Path) -> None:
    """`python file.py --option`, in a block or in a sentence: the file exists, and has the option.

    `python -m pytest file.py -k name`: the file has that name.
    """
    text = page.read_text(encoding="utf-8")
    for file, options in re.findall(r"python ([\w/]+\.py)((?: [^`\n|#]*)?)", text):
        if file == "script.py":  # the reader's own
            continue
        assert (ROOT / file).exists(), f"{page.name}: there is no {file}"
        source = (ROOT / file).read_text(encoding="utf-8")
        for option in set(re.findall(r" (--[\w-]+)", options)) - {"--help"}:
            assert f'"{option}"' in source, f"{page.name}: {file} has no {option}"
    tests = r"python -m pytest (?:-q )?\"?((?:docs|tests)/[\w/]+\.py)(?:::| -k \"?)?(\w*)"
    for file, name in re.findall(tests, text):
        assert name in (ROOT / file).read_text(encoding="utf-8"), f"{page.name}: {file} has no {name}"


# ── references ────────────────────────────────────────────────────────────────────────────────────


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return quote.FENCE.sub("", page.read_text(encoding="utf-8"))


def slug_of(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@cache
def anchors_of(file: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them; of the tour, its steps and their parts."""
    anchors: set[str] = set()
    if file.name == "tour.html":
        _, *steps = read_trace(file)
        for number, step in enumerate(steps, start=1):
            anchors |= {str(number), *[f"{number}-{part}" for part in parts_of_step(step)]}
        return anchors
    for heading in re.findall(r"^#+ (.*)$", prose_of(file), flags=re.MULTILINE):
        slug = slug_of(heading)
        number = sum(anchor == slug or re.fullmatch(rf"{slug}-\d+", anchor) is not None for anchor in anchors)
        anchors.add(f"{slug}-{number}" if number else slug)
    return anchors


@each_page
def test_links_resolve(page: Path) -> None:
    """Files, headings and steps of the tour. Addresses in the web are not asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT)
        if anchor and (file.suffix == ".md" or file.name == "tour.html"):
            assert anchor in anchors_of(file), f"{page.name} links to {target}: nothing is there"


LIBRARIES = {"torch", "numpy", "transformers", "triton", "ray"}


@cache
def known_words() -> frozenset[str]:
    """Every word in the project's Python files, and in the names of its files."""
    words = {*dir(builtins), *keyword.kwlist}
    for file in ROOT.rglob("*"):
        if any(part.startswith(".") for part in file.relative_to(ROOT).parts):
            continue
        words.update(re.findall(r"\w+", file.name))
        if file.suffix == ".py":
            words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    return frozenset(words)


@each_page
def test_names_exist(page: Path) -> None:
    """Inline code that looks like a name is a name of the source. Other projects' names stand in italics.

    Names in capitals may be variables of the environment, which other programs read.
    """
    known = set(known_words())
    for block in blocks_of(page):
        if block.kind == "python":
            known.update(re.findall(r"\w+", block.text))
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page)):
        if re.match(r"https?:|/", code):
            continue
        for dotted in re.findall(r"(?<!\w)[A-Za-z_][\w.]*\w", code):
            parts = dotted.split(".")
            if parts[0] in LIBRARIES:
                continue
            for part in parts:
                looks_like_code = ("_" in part and not part.isupper()) or re.search("[a-z][A-Z]", part)
                assert part in known or not looks_like_code, f"{page.name}: `{code}` names {part}"


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


MEASURED = re.compile(r"\]\(([^)\s#]*(?:benchmarks|cpu|reliability|gpu-status)\.md)#([^)]*)\)")
FIGURE = re.compile(r"(?<![\w.,§])\d[\d,]*\.?\d+(?!\w)")
SENTENCE = re.compile(r"(?<=[.:;])\s|(?<=[。；])|\n\n|\n(?=-)|\s*\|\s*")


def section(page: Path, anchor: str) -> str:
    """A section with its subsections; without an anchor, what stands before the first heading."""
    text = page.read_text(encoding="utf-8")
    if not anchor:
        return text.partition("\n## ")[0]
    prose = quote.FENCE.sub(lambda fenced: " " * len(fenced[0]), text)  # where # is no comment
    headings = re.finditer(r"^(#+) (.*)$", prose, re.MULTILINE)
    (found,) = (heading for heading in headings if slug_of(heading[2]) == anchor)
    end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(prose, found.end())
    return text[found.start() : end.start() if end else None]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "records"], ids=named)
def test_quoted_figures_stand_where_they_were_measured(page: Path) -> None:
    """A sentence that links to a section of measurements has the figures of that section, or rounds them."""
    for sentence in SENTENCE.split(prose_of(page)):
        measured = []
        for path, anchor in MEASURED.findall(sentence):
            measured += FIGURE.findall(section((page.parent / path).resolve(), anchor))
        if not measured:
            continue
        known = [float(figure.replace(",", "")) for figure in measured]
        for figure in FIGURE.findall(re.sub(r"\]\([^)]*\)", "", sentence)):
            digits = len(figure.partition(".")[2])
            rounded = {round(number, digits) for number in known}
            assert float(figure.replace(",", "")) in rounded.union(known), (
                f"{page.name} quotes {figure}, which the section that it links to does not have: {sentence}"
            )


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", FIGURES)
def test_figures_are_those_that_their_scripts_draw(script: Path, copy: Path) -> None:
    pictures = list(DOCS.rglob(f"figures/{script.stem}.svg"))  # with that of the Chinese pages
    assert pictures
    for picture in pictures:
        (copy / picture.relative_to(ROOT)).unlink()
    done = execute([str(script.relative_to(ROOT))], copy)
    assert done.returncode == 0, done.stderr
    for picture in pictures:
        drawn = (copy / picture.relative_to(ROOT)).read_bytes()
        assert drawn == picture.read_bytes(), f"run python docs/book/figures/{script.name} again"


# ── Chinese pages ─────────────────────────────────────────────────────────────────────────────────

# The words of Chinese tutorials: a section of the glossary that the English page does not need.
ONLY_CHINESE = re.compile(r"^## 中文资料里的叫法\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
PART = re.compile(
    quote.FENCE.pattern + r"|^(?P<heading>#+) |!\[[^\]]*\]\((?P<figure>[^)\s]+)\)|^(?P<row>\|).*\|$",
    re.MULTILINE | re.DOTALL,
)


def parts_of(page: Path) -> list[str]:
    """Levels of headings, kinds of blocks, names of figures and rows of tables, in their order."""
    parts = []
    for found in PART.finditer(ONLY_CHINESE.sub("", page.read_text(encoding="utf-8"))):
        figure = Path(found["figure"]).name if found["figure"] else None
        parts.append(found["heading"] or figure or found["row"] or found["kind"])
    return parts


@each_chinese_page
def test_a_chinese_page_has_the_parts_of_the_english_one(page: Path) -> None:
    """Their code is compared with the quotations. Each links to the other in its third line."""
    other = quote.english(page)
    assert parts_of(page) == parts_of(other)
    third, third_of_other = (file.read_text(encoding="utf-8").splitlines()[2] for file in (page, other))
    assert third == f"[English](../{other.relative_to(DOCS).as_posix()})"
    folder = "zh" if other.parent == DOCS else "../zh"
    assert third_of_other == f"[中文]({folder}/{page.name})"


@each_chinese_page
def test_a_chinese_page_leads_to_chinese_pages_and_figures(page: Path) -> None:
    """Where there are Chinese ones, except in its third line."""
    own = {file.name for file in (DOCS / "zh").rglob("*")} - {"README.md"}
    for line in page.read_text(encoding="utf-8").splitlines()[3:]:
        for target in re.findall(r"\]\(\.\./([^)\s#]+)", line):
            assert Path(target).name not in own, f"{page.name} links to ../{target}"


def test_every_chapter_is_there_in_chinese() -> None:
    chapters = {page.name for page in (DOCS / "book").glob("*.md")}
    assert chapters <= {page.name for page in quote.CHINESE}
