"""README and docs: every code block and command runs, its output is as shown, and every reference resolves.

The kinds of block, and what is compared, are described in doc_pages.py.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import keyword
import pkgutil
import re
import textwrap
import tokenize
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import FENCE, KINDS, ROOT, Block, blocks_of, copy_repository, execute, run_commands, run_python
from programs import environment, run_program

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FIGURES = [
    file for file in sorted((DOCS / "book" / "figures").glob("*.py")) if file.stem not in ("svg", "chinese")
]


def named(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def pages_to_run(*kinds: str) -> list[Path]:
    """The pages with blocks of these kinds.

    A fork's own page runs in test_forks.py. Chinese pages have the code of English ones (test_chinese.py).
    """
    pages = [page for page in PAGES if page.parent.parent != DOCS / "forks" and page.parent != DOCS / "zh"]
    return [page for page in pages if any(b.kind in kinds and not b.title for b in blocks_of(page))]


each_page = pytest.mark.parametrize("page", PAGES, ids=named)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project, to run a page in. (Chapter 9 runs Triton's interpreter, which Linux has.)"""
    return copy_repository(tmp_path)


# ── code ──────────────────────────────────────────────────────────────────────────────────────────


@each_page
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """A misspelled kind would not be checked; an output needs a block that prints it."""
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    fences = re.findall(r"^ *```", text, flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks), "a fence is indented, not closed, or has an unknown option"
    indented = re.search(r"\n\n {4,}\S.*", prose_of(page))
    assert indented is None, f"a code block without a fence is not checked: {indented[0].strip()}"
    before = Block("", "", "", 0)
    for block in blocks:
        where = f"{page.name}:{block.line}"
        assert block.kind in KINDS, f"{where}: no kind, or an unknown one: {block.kind!r}"
        if block.kind == "output":
            assert (before.kind, before.title) == ("python", ""), f"{where}: an output of what?"
        if block.kind == "text":
            assert not re.search(r"^(\$ |>>> )", block.text, flags=re.MULTILINE), (
                f"{where}: text with commands"
            )
        if before.kind == "diff":
            assert block.kind == "console", f"{where}: a diff is followed by the test that catches it"
        before = block
    assert before.kind != "diff"


@pytest.mark.parametrize("page", pages_to_run("python"), ids=named)
def test_python_prints_what_the_page_shows(page: Path, copy: Path) -> None:
    run_python(page, copy)


SLOW = {"10-parallel", "11-measuring"}  # two ranks, a bench
COMMANDS = [
    pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in pages_to_run("console", "sh")
]


@pytest.mark.parametrize("page", COMMANDS, ids=named)
def test_commands_print_what_the_page_shows(page: Path, copy: Path) -> None:
    run_commands(page, copy)


@each_page
def test_quotations_stand_in_the_source(page: Path) -> None:
    for block in blocks_of(page):
        if block.kind != "python" or not block.title:
            continue
        where = f"{page.name}:{block.line}"
        file, _, name = block.title.partition(": ")
        source = definition(file, name)
        position = 0
        for part in re.split(r"^ *# …\n", textwrap.dedent(block.text), flags=re.MULTILINE):
            if part.strip():
                found = find_lines(part, source, position)
                assert found is not None, f"{where}: not in {block.title}:\n{part}"
                position = found


def find_lines(part: str, source: str, position: int) -> int | None:
    """Where the lines of `part` end in `source`, from `position` on; they may be indented alike there."""
    for indent in ("", " " * 4, " " * 8, " " * 12, " " * 16):
        lines = textwrap.indent(textwrap.dedent(part), indent)
        found = source.find(lines, position)
        if found >= 0 and (found == 0 or source[found - 1] == "\n"):
            return found + len(lines)
    return None


def definition(file: str, name: str) -> str:
    """The source of a function, method or class; of the file without a name."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if not name:
        return text
    body, node = ast.parse(text).body, None
    for part in name.split("."):
        named_so = [each for each in body if getattr(each, "name", None) == part]
        assert len(named_so) == 1, f"{file} has no {name}"
        node, body = named_so[0], named_so[0].body
    first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
    lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines))


# ── references ────────────────────────────────────────────────────────────────────────────────────


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def slug_of(heading: str) -> str:
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them: `## A b, c` → a-b-c."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), flags=re.MULTILINE):
        slug = slug_of(heading)
        number = sum(anchor == slug or re.fullmatch(rf"{slug}-\d+", anchor) is not None for anchor in anchors)
        anchors.add(f"{slug}-{number}" if number else slug)
    return anchors


@each_page
def test_links_resolve(page: Path) -> None:
    """Files and headings. Addresses in the web are not asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT)
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{page.name} links to {target}: no such heading"


@cache
def known_names() -> frozenset[str]:
    """Every name and every word of a string in the project's Python files, and in the names of its files."""
    names = set(dir(builtins)) | set(keyword.kwlist)
    for file in ROOT.rglob("*"):
        if any(part.startswith(".") for part in file.relative_to(ROOT).parts):
            continue
        names |= set(re.findall(r"\w+", file.name))
        if file.suffix != ".py" or file.name == Path(__file__).name:
            continue
        for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME:
                names.add(token.string)
            elif token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
                names |= set(re.findall(r"\w+", token.string))
    return frozenset(names)


LIBRARIES = ("torch", "numpy", "transformers", "triton", "ray")
# Names of other programs that the docs set or mention, which no Python file of ours has.
FOREIGN = {
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "THP_MEM_ALLOC_ENABLE",
}


def unknown_names(code: str) -> list[str]:
    """The names in inline code that the project does not have: `Sequence.num_tokns` → num_tokns."""
    unknown = []
    for dotted in re.findall(r"(?<!\w)[A-Za-z_][\w.]*\w", "" if re.match(r"https?:|/", code) else code):
        parts = dotted.split(".")
        if parts[0] in LIBRARIES:
            try:
                pkgutil.resolve_name(dotted)
            except (ImportError, AttributeError):
                unknown.append(dotted)
        else:
            like_code = [part for part in parts if "_" in part or re.search("[a-z][A-Z]", part)]
            unknown += [part for part in like_code if part not in known_names() | FOREIGN]
    return unknown


@each_page
def test_names_exist(page: Path) -> None:
    """Inline code that looks like a name is a name of the source. Other projects' names stand in italics."""
    defined = {
        name
        for block in blocks_of(page)
        if block.kind == "python" and not block.title
        for name in re.findall(r"\w+", block.text)
    }
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page)):
        unknown = [name for name in unknown_names(code) if name.split(".")[-1] not in defined]
        assert not unknown, f"{page.name}: `{code}` names {', '.join(unknown)}"


@cache
def help_of(file: str) -> str:
    return run_program([file, "--help"], ROOT, environment(PYTHONPATH=str(ROOT))).stdout


@each_page
def test_commands_have_their_options(page: Path) -> None:
    """`python file.py --option`, in a block or in a sentence: the file exists, and has the option."""
    commands = r"python ([\w/]+\.py)((?: [^`\n|#]*)?)"
    for file, options in re.findall(commands, page.read_text(encoding="utf-8")):
        if file == "script.py":  # the reader's own
            continue
        assert (ROOT / file).exists(), f"{page.name}: there is no {file}"
        for option in re.findall(r" (--[\w-]+)", options):
            assert re.search(rf"{option}\b", help_of(file)), f"{page.name}: {file} has no {option}"


def section(page: Path, anchor: str) -> str:
    """A section with its subsections; without an anchor, what stands before the first heading."""
    text = page.read_text(encoding="utf-8")
    if not anchor:
        return text.partition("\n## ")[0]
    prose = FENCE.sub(lambda fenced: " " * len(fenced[0]), text)  # where # is no comment
    headings = re.finditer(r"^(#+) (.*)$", prose, re.MULTILINE)
    (found,) = (heading for heading in headings if slug_of(heading[2]) == anchor)
    end = re.compile(rf"^#{{1,{len(found[1])}}} ", re.MULTILINE).search(prose, found.end())
    return text[found.start() : end.start() if end else None]


def test_the_minutes_of_the_evening_add_up() -> None:
    text = (DOCS / "evening.md").read_text(encoding="utf-8")
    *minutes, total = map(int, re.findall(r"^\| \**(\d+)\**", text, re.MULTILINE))
    assert sum(minutes) == total
    assert re.search(rf"\b{total} minutes", text)


LINKING = [page for page in sorted(DOCS.rglob("0[1-8]-*.md")) if page.parent.name in ("book", "zh")]


@pytest.mark.parametrize("page", LINKING, ids=named)
def test_a_chapter_shows_its_steps_of_the_tour(page: Path) -> None:
    """The step is in the tour, and has the part at which the chapter points."""
    tour = (DOCS / "play" / "tour.html").read_text(encoding="utf-8")
    _, *lines = map(json.loads, tour.split('id="steps">\n')[1].splitlines())
    links = re.findall(r"\]\(\.\./play/tour\.html#(\d+)(?:-(\w+))?\)", page.read_text(encoding="utf-8"))
    assert links
    for step, part in links:
        line = lines[int(step) - 1]
        parts = {"", "scheduled", "computed", "updated"} | (
            {"copied"} if line.keys() & {"copies", "out", "in"} else set()
        )
        assert part in parts, f"step {step} has no part {part!r}"


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


MEASURED = re.compile(r"\]\(([^)\s#]*(?:benchmarks|cpu|reliability|gpu-status)\.md)#([^)]*)\)")
FIGURE = re.compile(r"(?<![\w.,§])\d[\d,]*\.?\d+(?!\w)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "records"], ids=named)
def test_quoted_figures_stand_where_they_were_measured(page: Path) -> None:
    """A sentence that links to a section of measurements has the figures of that section, or rounds them."""
    for sentence in re.split(r"(?<=[.:;])\s|(?<=[。；])|\n\n|\n(?=-)|\s*\|\s*", prose_of(page)):
        homes = {
            section((page.parent / path).resolve(), anchor) for path, anchor in MEASURED.findall(sentence)
        }
        known = [float(figure.replace(",", "")) for home in homes for figure in FIGURE.findall(home)]
        for figure in FIGURE.findall(re.sub(r"\]\([^)]*\)", "", sentence)) if homes else []:
            digits = len(figure.partition(".")[2])
            assert float(figure.replace(",", "")) in {round(n, d) for n in known for d in (digits, 9)}, (
                f"{page.name} quotes {figure}, which the section that it links to does not have: {sentence}"
            )


def test_every_chapter_has_what_the_readme_says() -> None:
    """An example by hand, an experiment, and a broken variant."""
    for page in sorted((DOCS / "book").glob("[0-9]*.md"))[1:]:
        kinds = {block.kind for block in blocks_of(page) if not block.title or block.kind == "diff"}
        assert {"python", "console", "diff"} <= kinds, page.name
        assert "by hand" in page.read_text(encoding="utf-8").lower(), page.name


def test_a_fork_has_the_same_lines_in_every_table() -> None:
    """test_forks.py counts those of the forks that are files."""
    text = (DOCS / "forks" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\[*]?(\w+)[^|]* \| (\d+) \|", text, re.MULTILINE)
    assert len(set(rows)) == len(dict(rows)), rows


def test_a_claim_about_an_engine_names_its_version_and_file() -> None:
    head, *sections = re.split(
        r"^## ", (DOCS / "reference" / "after-2023.md").read_text(encoding="utf-8"), flags=re.M
    )
    for text in sections:
        for engine in ("vLLM", "SGLang", "mini-sglang", "transformers", "PyTorch"):
            if re.search(rf"\b{engine}\b", text):
                assert re.search(rf"\b{engine}\s+[0-9a-f.]{{5,}}\b", head), f"{engine}: which version?"
                assert re.search(r"\*[\w/]+\.(py|rs|cpp)\*", text), f"which file?\n{text}"


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("script", FIGURES, ids=lambda script: script.stem)
def test_figures_are_those_that_their_scripts_draw(script: Path, copy: Path) -> None:
    pictures = list(DOCS.rglob(f"figures/{script.stem}.svg"))  # with that of the Chinese pages
    assert pictures
    for picture in pictures:
        (copy / picture.relative_to(ROOT)).unlink()
    done = execute([str(script.relative_to(ROOT))], copy)
    assert done.returncode == 0, done.stderr
    for picture in pictures:
        drawn = (copy / picture.relative_to(ROOT)).read_text(encoding="utf-8")
        assert drawn == picture.read_text(encoding="utf-8"), (
            f"run python docs/book/figures/{script.name} again"
        )


def test_every_picture_is_shown_with_its_script() -> None:
    """A page that shows a figure says which command drew it."""
    shown: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            picture = (page.parent / target).resolve()
            shown.add(picture.name)
            assert re.search(rf"{picture.stem}\.py", text), f"{page.name}: which script drew {target}?"
    pictures = {file.name for file in DOCS.rglob("*") if file.suffix in (".svg", ".png")}
    assert shown == pictures, "pictures that no page shows, or that are missing"
