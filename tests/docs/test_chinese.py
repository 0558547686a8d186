"""docs/zh: a Chinese page has the parts of its English one, and its figures have Chinese labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import FENCE, ROOT, blocks_of
from programs import load_file

DOCS = ROOT / "docs"
CHINESE = DOCS / "zh"
PAGES = [page for page in sorted(CHINESE.rglob("*.md")) if page.name != "README.md"]
# The words of Chinese tutorials: a section of the glossary that the English page does not need.
ONLY_CHINESE = re.compile(r"^## 中文资料里的叫法\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
PART = re.compile(
    FENCE.pattern + r"|^(?P<heading>#+) |!\[[^\]]*\]\((?P<figure>[^)\s]+)\)|^(?P<table>\|(?:[^\n]+\n\|)+)",
    re.MULTILINE | re.DOTALL,
)
chinese = load_file(DOCS / "book" / "figures" / "chinese.py")


def english(page: Path) -> Path:
    """docs/zh/03-blocks.md → docs/book/03-blocks.md, docs/zh/evening.md → docs/evening.md"""
    (found,) = [*DOCS.glob(f"[!z]*/{page.name}"), *DOCS.glob(page.name)]
    return found


def parts_of(page: Path) -> list[tuple[object, ...]]:
    """Headings with their levels, code blocks, figures and tables with their sizes, in their order.

    The text of a `text` block is left out: it is a drawing or a formula, with words that are translated.
    """
    parts: list[tuple[object, ...]] = []
    for found in PART.finditer(ONLY_CHINESE.sub("", page.read_text(encoding="utf-8"))):
        kind, title, text = found.groups()[:3]
        if found["heading"]:
            parts.append(("heading", len(found["heading"])))
        elif found["figure"]:
            parts.append(("figure", Path(found["figure"]).name))
        elif found["table"]:
            head, *rows = found["table"].rstrip("|").rstrip().split("\n")
            columns = head.count("|") - 1 - ("| 英文 |" in head)  # the glossary has the English words, too
            parts.append(("table", columns, len(rows) - 1))
        else:
            parts.append((kind, title, "" if kind == "text" else text))
    return parts


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_a_page_has_the_parts_of_the_english_one(page: Path) -> None:
    assert parts_of(page) == parts_of(english(page))


@each_page
def test_the_two_pages_link_to_each_other(page: Path) -> None:
    name = english(page).relative_to(DOCS).as_posix()
    assert page.read_text(encoding="utf-8").splitlines()[2] == f"[English](../{name})"
    way = "zh" if english(page).parent == DOCS else "../zh"
    assert english(page).read_text(encoding="utf-8").splitlines()[2] == f"[中文]({way}/{page.name})"


@each_page
def test_links_lead_to_chinese_pages_and_figures(page: Path) -> None:
    """Where there is a Chinese one. The link to the English page itself stands in the third line."""
    text = "".join(page.read_text(encoding="utf-8").splitlines(keepends=True)[3:])
    for target in re.findall(r"\]\(\.\./([^)\s#]+)", text):
        if Path(target).name in {other.name for other in PAGES}:
            raise AssertionError(f"{page.name} links to ../{target}")
        if Path(target).suffix == ".svg":
            assert not (CHINESE / "figures" / Path(target).name).exists(), f"{page.name} shows ../{target}"


def test_the_evening_names_the_same_functions() -> None:
    minutes, theirs = (
        re.findall(r"^\| \**(\d+)|`(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (CHINESE / "evening.md", DOCS / "evening.md")
    )
    assert minutes == theirs


def test_the_readme_has_the_code_of_the_english_page() -> None:
    """Comments of the code are translated."""
    readme = CHINESE / "README.md"
    code, shown = (
        [(block.kind, re.sub(" +#.*", "", block.text)) for block in blocks_of(page)]
        for page in (ROOT / "README.md", readme)
    )
    assert shown == code
    links = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", readme.read_text(encoding="utf-8"), re.MULTILINE)
    assert {page.name for page in PAGES} <= set(links), "the table has every Chinese page"


@pytest.mark.parametrize("name", sorted(chinese.FIGURES))
def test_a_figure_is_the_english_one_with_chinese_labels(name: str) -> None:
    """Other tests compare the English one with what its script draws, and find figures that are not shown."""
    drawn = chinese.in_chinese((DOCS / "book" / "figures" / f"{name}.svg").read_text(encoding="utf-8"))
    assert drawn == (CHINESE / "figures" / f"{name}.svg").read_text(encoding="utf-8"), (
        f"run python docs/book/figures/{name}.py again"
    )


def test_every_translated_label_is_in_a_figure() -> None:
    files = [DOCS / "book" / "figures" / f"{name}.svg" for name in chinese.FIGURES]
    assert {file.name for file in files} == {file.name for file in (CHINESE / "figures").iterdir()}
    labels = [
        chinese.unescape(label)
        for file in files
        for label in chinese.LABEL.findall(file.read_text(encoding="utf-8"))
    ]
    patterns = {chinese.NUMBER.sub("{}", label) for label in labels}
    assert chinese.LABELS.keys() | chinese.SAME <= patterns
