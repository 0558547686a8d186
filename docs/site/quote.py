"""Bring up to date what pages repeat. Run it after a change of the source or of an English page.

    python docs/site/quote.py                      # rewrites pages, and names them
    python docs/site/quote.py old_name=new_name    # first renames this word in all pages

- A block of Python that begins with `# FILE: NAME` quotes that function or class; `# …` is a gap. The first
  and the last line beside a gap are found again by their likeness, so a quotation follows a renaming.
  What is between them is taken from the source.
- A diff that begins with `--- FILE` is a broken variant of the source. Its old lines follow the source in the
  same way. A name that has changed in them changes in the new lines, too.
- A Chinese page has the code of its English one. Comments may be translated, except in quotations.
- The sizes of the package are counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CHINESE = sorted((DOCS / "zh").glob("*.md"))
ENGLISH = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page not in CHINESE)]

FENCE = re.compile(
    r"^```(?P<kind>\w*)\n(?P<head>(?:# |--- )(?P<title>[\w/]+\.py(?:: [\w.]+)?)\n)?(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
GAP = re.compile(r"^( *# …\n)", re.MULTILINE)
LEAST_ALIKE = 0.5  # lines that are less alike are not the same line, changed


@dataclass
class Block:
    """A fenced block of a page."""

    kind: str
    title: str  # of a quotation FILE: NAME, of a diff FILE, otherwise empty
    text: str  # without the line of the title
    line: int  # the first line of the text


def blocks_in(text: str) -> list[Block]:
    """The fenced blocks of a page's text, in their order."""
    blocks = []
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        blocks.append(Block(found["kind"], found["title"] or "", found["text"], line))
    return blocks


def blocks_of(page: Path) -> list[Block]:
    return blocks_in(page.read_text(encoding="utf-8"))


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("renamed", nargs="*", metavar="OLD=NEW", help="words to rename in all pages first")
    args = parser.parse_args()
    for words in args.renamed:
        old, _, new = words.partition("=")
        if not (old and new):
            parser.error(f"{words} is not OLD=NEW")
        for page in [*ENGLISH, *CHINESE]:
            text = page.read_text(encoding="utf-8")
            page.write_text(re.sub(rf"\b{re.escape(old)}\b", new, text), encoding="utf-8")
    try:
        changed = changed_pages()
    except LookupError as error:
        parser.exit(1, f"{error}\n")
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))


def changed_pages() -> dict[Path, str]:
    """The pages that are not up to date, with the text that they should have.

    Raises:
        LookupError: a quotation has to be written anew; says which.
    """
    texts = {page: page.read_text(encoding="utf-8") for page in ENGLISH + CHINESE}
    wanted: dict[Path, str] = {}
    for page in ENGLISH:
        blocks = blocks_in(texts[page])
        wanted[page] = with_blocks(page, texts[page], [from_source(page, block) for block in blocks])
    for page in CHINESE:
        blocks = from_english(page, blocks_in(texts[page]), blocks_in(wanted[english(page)]))
        wanted[page] = with_blocks(page, texts[page], blocks)
    for pattern in SIZES:
        if not any(re.search(pattern, text, re.MULTILINE) for text in wanted.values()):
            raise LookupError(f"no page says {pattern}: change SIZES in quote.py")
    sizes = sizes_of_package()
    sized = {page: with_sizes(text, sizes) for page, text in wanted.items()}
    return {page: text for page, text in sized.items() if text != texts[page]}


def with_blocks(page: Path, text: str, texts: list[str]) -> str:
    """The text of a page with other texts in its blocks."""
    remaining = iter(texts)
    return FENCE.sub(lambda found: f"```{found['kind']}\n{found['head'] or ''}{next(remaining)}```", text)


def english(page: Path) -> Path:
    """docs/zh/03-blocks.md → docs/book/03-blocks.md, docs/zh/README.md → README.md"""
    if page.name == "README.md":
        return ROOT / "README.md"
    (found,) = [other for other in ENGLISH if other.name == page.name]
    return found


# ── quotations ────────────────────────────────────────────────────────────────────────────────────


def from_source(page: Path, block: Block) -> str:
    """The text of a block: for a quotation or a diff, what it should be now."""
    if not block.title:
        return block.text
    file, _, name = block.title.partition(": ")
    try:
        source = definition((ROOT / file).read_text(encoding="utf-8"), name).splitlines(keepends=True)
        if block.kind == "diff":
            return refresh_diff(block.text, source)
        return refresh_quotation(block.text, source)
    except (LookupError, FileNotFoundError) as error:
        where = f"{page.relative_to(ROOT)}:{block.line}"
        raise LookupError(f"{where}: {error}: write this block anew") from error


def definition(text: str, name: str) -> str:
    """The source of a function, method or class; all of the file without a name."""
    if not name:
        return text
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        members = [member for member in node.body if getattr(member, "name", None) == part]
        if not members:
            raise LookupError(f"the file has no {name}")
        node = members[0]
    first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])


def refresh_quotation(text: str, source: list[str]) -> str:
    """The quoted lines as they are in the source now."""
    pieces = GAP.split(text)  # part, gap, part, …
    parts = [piece.splitlines(keepends=True) for piece in pieces[::2]]
    places = iter(align([line for part in parts for line in part], source))
    for i, part in enumerate(parts):
        of_part = [next(places) for _ in part]
        if not part:
            continue
        for line, place in ((part[0], of_part[0]), (part[-1], of_part[-1])):
            if place < 0:
                raise LookupError(f"the source has no line like {line.strip()!r}")
        shift = indentation(part[0]) - indentation(source[of_part[0]])
        lines = source[of_part[0] : of_part[-1] + 1]
        pieces[2 * i] = "".join(shifted(line, shift) for line in lines)
    return "".join(pieces)


def align(quoted: list[str], source: list[str]) -> list[int]:
    """For each quoted line the number of the source's line that it is most likely, in the same order.

    -1 if there is none. The sum of the likenesses is as high as it can be.
    """
    # best[n]: the sum for the first n lines of the source, and the numbers that were chosen
    best: list[tuple[float, list[int]]] = [(0.0, [])] * (len(source) + 1)
    for line in quoted:
        reached: list[tuple[float, list[int]]] = []
        for n, (total, chosen) in enumerate(best):
            options = [(total + LEAST_ALIKE, [*chosen, -1])]
            if n > 0:
                before, chosen_before = best[n - 1]
                options.append((before + alike(line, source[n - 1]), [*chosen_before, n - 1]))
                options.append(reached[-1])
            reached.append(max(options))
        best = reached
    return best[-1][1]


def alike(line: str, other: str) -> float:
    """From 0 to 1, whatever their indentation is."""
    return SequenceMatcher(None, line.strip(), other.strip(), autojunk=False).ratio()


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def shifted(line: str, by: int) -> str:
    """The line, indented by more or fewer columns."""
    if not line.strip():
        return line
    return " " * by + line if by >= 0 else line[-by:]


def refresh_diff(text: str, source: list[str]) -> str:
    """The diff with its old lines as they are in the source now. They follow each other there."""
    lines = text.splitlines(keepends=True)
    old = [line[1:] for line in lines if not line.startswith("+")]
    scores = []
    for first in range(len(source) - len(old) + 1):
        scores.append(sum(map(alike, old, source[first:])))
    if max(scores) < LEAST_ALIKE * len(old):
        raise LookupError(f"the source has no lines like {old[0].strip()!r}")
    if scores.count(max(scores)) > 1:
        raise LookupError(f"the source has {old[0].strip()!r} in several places")
    first = scores.index(max(scores))
    new = source[first : first + len(old)]
    renamed = renamed_words("".join(old), "".join(new))
    remaining = iter(new)
    refreshed = ""
    for line in lines:
        if line.startswith("+"):
            refreshed += re.sub(r"\w+", lambda word: renamed.get(word[0], word[0]), line)
        else:
            refreshed += line[0] + next(remaining)
    return refreshed


def renamed_words(old: str, new: str) -> dict[str, str]:
    """Old word → new word, if nothing else has changed."""
    before, after = re.findall(r"\w+", old), re.findall(r"\w+", new)
    if len(before) != len(after):
        return {}
    return dict(zip(before, after, strict=True))


# ── Chinese pages ─────────────────────────────────────────────────────────────────────────────────


def from_english(page: Path, blocks: list[Block], english_blocks: list[Block]) -> list[str]:
    """The texts of a Chinese page's blocks. Those of the kind `text` are drawings, which are translated."""
    kinds = [block.kind for block in blocks]
    english_kinds = [block.kind for block in english_blocks]
    if kinds != english_kinds:
        raise LookupError(f"{page.relative_to(ROOT)} has other blocks than the English page: {kinds}")
    texts = []
    for block, english_block in zip(blocks, english_blocks, strict=True):
        only_comments = without_comments(block.text) == without_comments(english_block.text)
        is_own = block.kind == "text" or (only_comments and not block.title)
        texts.append(block.text if is_own else english_block.text)
    return texts


def without_comments(code: str) -> str:
    return re.sub(r" +#.*", "", code)


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────

# Where pages give a size of the package. Each group has a name of `sizes_of_package`.
SIZES = [
    r" (?P<files>[\d,]+) files with (?P<lines>[\d,]+) lines of Python \((?P<tokens>[\d,]+) tokens",
    r" (?P<cpp>[\d,]+) lines of C\+\+\. ",
    r"^\| tokens of Python \| (?P<tokens>[\d,]+) ",
    r"^\| lines of Python \| (?P<lines>[\d,]+) ",
    r" (?P<files>[\d,]+) 个文件，(?P<lines>[\d,]+) 行 Python",
    r"共 (?P<tokens>[\d,]+) 个词法单元）和 (?P<cpp>[\d,]+) 行 C\+\+",
    r"按词法单元计：nanopaged (?P<tokens>[\d,]+) 个",
    r"按行计：(?P<lines>[\d,]+)、",
]


def with_sizes(text: str, sizes: dict[str, str]) -> str:
    """The text with the sizes that the package has now."""
    for pattern in SIZES:
        for found in reversed(list(re.finditer(pattern, text, re.MULTILINE))):
            for name in sorted(found.groupdict(), key=found.start, reverse=True):
                text = text[: found.start(name)] + sizes[name] + text[found.end(name) :]
    return text


def sizes_of_package() -> dict[str, str]:
    """Files, and lines and tokens to the nearest hundred; lines of C++ to the nearest twenty."""
    package = ROOT / "nanopaged"
    lines_of_tokens = []
    for file in package.rglob("*.py"):
        if lines := lines_of_code(file.read_text(encoding="utf-8")):
            lines_of_tokens.append(lines)
    num_cpp = 0
    for file in [*package.rglob("*.cpp"), *package.rglob("*.h")]:
        for line in file.read_text(encoding="utf-8").splitlines():
            num_cpp += bool(line.partition("//")[0].strip())
    return {
        "files": str(len(lines_of_tokens)),
        "lines": f"{round(sum(len(set(lines)) for lines in lines_of_tokens), -2):,}",
        "tokens": f"{round(sum(map(len, lines_of_tokens)), -2):,}",
        "cpp": str(20 * round(num_cpp / 20)),
    }


def lines_of_code(text: str) -> list[int]:
    """The first line of each token, without comments and docstrings. An f-string is one token."""
    lines: list[int] = []
    depth = 0  # inside an f-string, whose parts are tokens of their own since Python 3.12
    begins = True  # a string at the beginning of a statement is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "NL", "ENDMARKER"):
            continue
        is_layout = kind in ("NEWLINE", "INDENT", "DEDENT")
        is_docstring = kind == "STRING" and begins
        if depth == 0 and not is_layout and not is_docstring:
            lines.append(token.start[0])
        begins = is_layout
        depth += {"FSTRING_START": 1, "FSTRING_END": -1}.get(kind, 0)
    return lines


if __name__ == "__main__":
    main()
