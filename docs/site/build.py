"""Builds the site: the book, the source files that it links to, the tour and the playground.

    pip install -c constraints.txt zensical # or the extra "docs"
    python docs/site/build.py               # into build/site
    python -m http.server -d build/site     # shows it at http://localhost:8000

The pages are copied to a temporary folder, where links to source files lead to pages made of them. Zensical
makes HTML of the copy. A link to a page, a heading or a picture that is not there fails the build.
The playground needs Pyodide, which docs/play/fetch.py gets with npm; --no-playground leaves both out.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PLAYGROUND = DOCS / "play"
SITE = ROOT / "build" / "site"

# A fenced block, or the target of [text](path#anchor) where it is no address in the web.
LINK = re.compile(r"^ *```.*?^ *```$|(?<=\]\()(?P<path>[^)#\s:]+)", re.MULTILINE | re.DOTALL)
# A paragraph that is one link to a preset of the playground.
PRESET = re.compile(
    r"(?<=\n\n)\[(?P<text>[^\]]+)\]"
    r"\((?P<address>[./]*play/index\.html#preset=[\w-]+)\)(?=\n\n|\n?\Z)"
)
# The link of a page to the other language, which the site has in the header.
OTHER_LANGUAGE = re.compile(r"^\[(?:English|中文)\]\([^)]+\)\n\n", re.MULTILINE)
# The figure that the site shows with a button.
LIVE = re.compile(r"!\[[^\]]+\]\([\w./]*figures/write_a_token\.svg\)")


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", nargs="?", type=Path, default=SITE, help="of the site: build/site")
    parser.add_argument("--no-playground", action="store_true", help="leave the playground out")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()) and not (args.folder / "search.json").exists():
        parser.error(f"{args.folder} has files, and is no site: name another folder")
    if not args.no_playground:
        run([sys.executable, str(PLAYGROUND / "fetch.py")], ROOT)

    with tempfile.TemporaryDirectory() as temporary:
        html = generate(Path(temporary), playground=not args.no_playground)
        if faults := list(find_faults(html)):
            sys.exit("\n".join(faults))
        shutil.rmtree(args.folder, ignore_errors=True)
        shutil.copytree(html, args.folder)
    print(f"{args.folder}: {len(list(args.folder.rglob('*.html')))} pages")


def generate(folder: Path, playground: bool) -> Path:
    """Make the site in a folder inside of this one."""
    copy_pages(folder, playground)
    for settings in ("zensical.toml", "zh.toml"):
        run([sys.executable, "-m", "zensical", "build", "--config-file", settings], folder)
    html = folder / "html"
    shutil.copytree(folder / "html-zh" / "zh", html / "zh", dirs_exist_ok=True)
    finish(html)
    if playground:
        copy_playground(html)
    return html


def run(command: list[str], folder: Path) -> None:
    """Run a command; if it fails, end with what it printed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


# ── before the generator ──────────────────────────────────────────────────────────────────────────


def copy_pages(folder: Path, playground: bool) -> None:
    """Write what the generator reads: its settings, the pages, and the sources that they link to."""
    settings = (DOCS / "site" / "zensical.toml").read_text(encoding="utf-8")
    forks = [f'    "{file.relative_to(DOCS).as_posix()}",' for file in sorted(DOCS.glob("forks/*/README.md"))]
    settings = settings.replace("    # one for each fork", "\n".join(forks))
    for name, its in (("zensical.toml", settings), ("zh.toml", in_chinese(settings))):
        write(folder / name, its if playground else re.sub(r".*(playground|play/index).*\n", "", its))

    pages = folder / "pages"
    sources: set[str] = set()
    for file in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if file.parent == PLAYGROUND and not playground:
            continue
        page = file.relative_to(ROOT).as_posix()
        text = rewrite(file.read_text(encoding="utf-8"), page, playground, sources)
        write(pages / place(page), text)
    for directory in [path for path in sources if (ROOT / path).is_dir()]:
        sources |= {file.relative_to(ROOT).as_posix() for file in files_of(directory)}
    for path in sources:
        write(pages / place(path), listing(path))
    for file in DOCS.rglob("*.png"):
        write(pages / file.relative_to(DOCS), file.read_bytes())
    dark = f"<style>@media (prefers-color-scheme: dark) {{{in_the_dark()}}}</style>\n</svg>"
    for file in DOCS.rglob("*.svg"):
        write(pages / file.relative_to(DOCS), file.read_text(encoding="utf-8").replace("</svg>", dark))
    tour = (PLAYGROUND / "tour.html").read_text(encoding="utf-8")
    tour = re.sub(r"(\.\./[\w/-]+)\.md\b", r"\1.html", tour)  # the links of its captions
    write(pages / "play" / "tour.html", with_way_back(tour, "../index.html"))
    write(pages / "live.js", (DOCS / "site" / "live.js").read_bytes())
    style = (DOCS / "site" / "extra.css").read_text(encoding="utf-8")
    write(pages / "extra.css", style + in_the_dark('[data-md-color-scheme="slate"] .live '))


# Colours of the figures: ink, lines, fills → what they are in the dark.
DARK = {
    "#1f2328": "#e6e8eb", "#59636e": "#a9b1ba", "#d1d9e0": "#3a414a", "#ffffff": "#1b1e24",
    "#f6f8fa": "#23272e", "#0b5cad": "#6cb2ff", "#9a5b00": "#f0b35a", "#1a7f37": "#6fd08c",
    "#6639ba": "#b79cf5", "#a01c61": "#f28cc0", "#0a7070": "#66d0d0", "#c2185b": "#ff6fa5",
    "#cfe2ff": "#1d3a5f", "#ffe3b3": "#54390f", "#d3f0d0": "#1f4527", "#f9d6e8": "#551f3b",
    "#e3d9fb": "#3a2a5e", "#d2f1f0": "#134546", "#eef0f2": "#2a2f37", "#8ec1f0": "#2f5f93",
    "#e8a33d": "#8a5a14",
}  # fmt: skip


def in_the_dark(within: str = "") -> str:
    """Rules of CSS that give figures their dark colours."""
    changes = [(of, *pair) for pair in DARK.items() for of in ("fill", "stroke")]
    return "".join(f'{within}[{of}="{old}"] {{{of}: {new}}}\n' for of, old, new in changes)


CHINESE = (DOCS / "site" / "zh.toml").read_text(encoding="utf-8")


def in_chinese(settings: str) -> str:
    """The settings for the Chinese pages: their navigation, and the labels of the theme in Chinese."""
    nav = re.compile(r"^nav = \[.*?^\]", re.MULTILINE | re.DOTALL)
    settings = translate(nav.sub(lambda _: nav.search(CHINESE)[0], settings))
    settings = settings.replace('site_dir = "html"', 'site_dir = "html-zh"')
    return settings.replace("[project.theme]", '[project.theme]\nlanguage = "zh"')


def translate(text: str) -> str:
    """Replace each quoted word that zh.toml has."""
    for old, new in re.findall(r'^(".+") = (".+")$', CHINESE, re.MULTILINE):
        text = text.replace(old, new)
    return text


def write(file: Path, contents: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def place(path: str) -> str:
    """Where a file of the project stands in the site: its own place below docs, or a page in source/.

    docs/book/03-blocks.md → book/03-blocks.md; nanopaged/engine.py → source/nanopaged/engine.py.md
    """
    places = {
        "README.md": "project.md",
        "docs/README.md": "contents.md",
        "docs/zh/README.md": "zh/contents.md",
        "docs/site/front.md": "README.md",
        "docs/zh/front.md": "zh/README.md",
        "docs/play/README.md": "playground.md",  # in its folder, index.html is the playground
    }
    if path in places:
        return places[path]
    if path.startswith("docs/") and path.endswith((".md", ".svg", ".png", ".html")):
        return path.removeprefix("docs/")
    return f"source/{path}/README.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def rewrite(text: str, page: str, playground: bool, sources: set[str]) -> str:
    """A page's text for the site: its links lead to where the files are in the site.

    Files and folders that become pages by being linked to are added to `sources`.
    """
    if not playground:
        text = re.sub(r"\[([^\]]+)\]\([\w./]*play/(?!tour)[^)]*\)", r"\1", PRESET.sub("", text))

    def lead(found: re.Match[str]) -> str:
        if found["path"] is None:  # a fenced block
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(found["path"])))
        if path.startswith("..") or not (ROOT / path).exists():
            return found[0]  # find_faults will name it
        if place(path).startswith("source/"):
            sources.add(path)
        return posixpath.relpath(place(path), posixpath.dirname(place(page)))

    in_chinese = page.startswith("docs/zh/")
    text = OTHER_LANGUAGE.sub("", text, count=1)
    text = LIVE.sub(lambda _: live(place(page), in_chinese), LINK.sub(lead, text))
    return PRESET.sub(lambda found: embed(found, in_chinese), text)


def embed(found: re.Match[str], in_chinese: bool) -> str:
    """A link to a preset of the playground → the playground within the page, loaded once it is opened."""
    text, address = escape(" ".join(found["text"].split())), found["address"]
    whole = "在单独的页面中打开" if in_chinese else "Open it on a page of its own"
    frame = f'<iframe loading="lazy" title="{text}" src="{address}&amp;embed"></iframe>'
    return (
        f'<details class="play"><summary>{text}</summary>\n{frame}\n<a href="{address}">{whole}</a></details>'
    )


def live(page: str, in_chinese: bool) -> str:
    """The figure itself, in place of an image of it, with the button that live.js reads."""
    folder = DOCS / ("zh" if in_chinese else "book")
    words = "A1 写入一个 token|从头开始" if in_chinese else "A1 writes a token|Again"
    svg = (folder / "figures" / "write_a_token.svg").read_text(encoding="utf-8").replace("\n", "")
    script = posixpath.relpath("live.js", posixpath.dirname(page))
    return (
        f'<figure class="live">{svg}<figcaption><button type="button" class="md-button md-button--primary" '
        f'data-words="{words}" hidden></button> <span role="status"></span></figcaption></figure>'
        f'<script src="{script}" defer></script>'
    )


def files_of(directory: str) -> list[Path]:
    return sorted(file for file in (ROOT / directory).iterdir() if file.is_file())


def listing(path: str) -> str:
    """A page of a source file, with line numbers; of a folder, with links to its files."""
    # The search finds the package's code, beside the book.
    excluded = "false" if path.startswith("nanopaged/") else "true"
    head = f"---\nhide: [toc]\nsearch: {{exclude: {excluded}}}\n---\n# {path}\n\n"
    if (ROOT / path).is_dir():
        return head + "\n".join(f"- [{file.name}]({file.name}.md)" for file in files_of(path))
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    language = {".py": "python", ".patch": "diff"}.get(posixpath.splitext(path)[1], "text")
    return f'{head}````{language} linenums="1"\n{text}\n````\n'


def with_way_back(page: str, home: str) -> str:
    """A page that has the window to itself, with a link to the site; the playground hides it in a chapter."""
    assert page.count("<body>") == 1
    link = f'<nav class="whole-page" style="padding: 10px 20px 0"><a href="{home}">← nanopaged</a></nav>'
    return page.replace("<body>", f"<body>\n{link}")


# ── after the generator ───────────────────────────────────────────────────────────────────────────


def finish(html: Path) -> None:
    """Change what the generator has no setting for."""
    for name in ("404.html", "sitemap.xml"):  # they need the site's address
        (html / name).unlink()
    (script,) = html.glob("assets/javascripts/bundle.*.js")
    # The search field says that it wants the focus only once it is there: said earlier, it would be a message
    # in the console of each address with a #.
    change(script, "autoFocus:!0,", "ref:field=>field&&setTimeout(()=>field.autofocus=!0),")
    # The buttons of a code block are no landmark, and the empty corner of a table is no heading.
    change(script, 'C("nav",{class:"md-code__nav"})', 'C("div",{class:"md-code__nav"})')
    for page in html.rglob("*.html"):
        write(page, re.sub(r"<th([^>]*)>\s*</th>", r"<td\1></td>", page.read_text(encoding="utf-8")))
    link_languages(html)
    # A wide block of code is scrolled with keys, also where nothing hovers.
    change(script, 'h&&n?e.setAttribute("tabindex"', 'h?e.setAttribute("tabindex"')
    change_search(html, script)


# Drawn, because not every machine has the glyphs.
CHINESE_WORD = (
    '<svg viewBox="0 0 46 24" role="img"><title>中文</title>'
    '<path d="M3 7h16v8H3zM11 2v20M26 7h18M34 2l2 5M40 7q-3 10-14 14M30 7q3 10 14 14"/></svg>'
)


def link_languages(html: Path) -> None:
    """Give the header of each page a link to the same page in the other language, or to its front page."""
    folder = html / "zh"
    english = [*html.glob("*.html"), *html.glob("book/*.html"), *html.glob("reference/*.html")]
    pairs = {page: folder / page.name for page in english if (folder / page.name).exists()}
    pairs |= {other: page for page, other in pairs.items()}
    for page in html.rglob("*.html"):
        to_english = page.parent == folder
        other = pairs.get(page, (html if to_english else folder) / "index.html")
        lang, word = ("en", "English") if to_english else ("zh", CHINESE_WORD)
        address = posixpath.relpath(other, page.parent)
        link = f'<a class="language" href="{address}" lang="{lang}" hreflang="{lang}">{word}</a>\n'
        before = '<form class="md-header__option"'
        write(page, page.read_text(encoding="utf-8").replace(before, link + before))


# With the names of the generator's script: at a click on the search, at its key, on a page that was found.
WHEN_ASKED = (
    'R(b(document,"click"),b(document,"keydown")).pipe(G(null),S(e=>fe().searchParams.has("h")||e&&('
    'e.type==="click"?e.target.closest(".md-search,[for=__search]"):e.key==="k"&&(e.ctrlKey||e.metaKey))),'
    'de(1),g(e=>(e?.type==="keydown"&&(e.preventDefault(),Po()),Af())),ne(1))'
)


def change_search(html: Path, script: Path) -> None:
    """Load it when it is asked for, put chapters first, and let that of Chinese pages speak Chinese."""
    change(script, '=Se(".md-search")?Af():Ze', f'=Se(".md-search")?{WHEN_ASKED}:Ze')
    write(script.with_name("bundle.zh.js"), translate(script.read_text(encoding="utf-8")))
    for page in (html / "zh").glob("*.html"):
        change(page, script.name, "bundle.zh.js")
    # Titles with all words side by side stand in the order of the index, not in that of the words' places.
    # A title counts by the best of its places: in "Blocks and block tables" that is not the first block.
    (worker,) = html.glob("assets/javascripts/workers/search.*.js")
    change(worker, "i!==d?i-d:o[0]!==u[0]?o[0]-u[0]:0", "i!==d?i-d:s.id-a.id")
    best = "((t,r,e)=>Gt(t,r,f=>f.length<new Set(r.data.map(x=>x.value)).size?void 0:f)||Gt(t,r,e))"
    change(worker, "l=B(Gt)", f"l=B({best})")
    index = json.loads((html / "search.json").read_text(encoding="utf-8"))
    index["items"].sort(key=place_in_search)
    write(html / "search.json", json.dumps(index, ensure_ascii=False, separators=(",", ":")))


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {old!r} {text.count(old)} times"
    write(file, text.replace(old, new))


def place_in_search(item: dict[str, Any]) -> tuple[int, int]:
    """Chapters stand before other pages, and those before the errata, the records and the source.

    Within each, whole pages stand before their sections.
    """
    page = item["location"]
    last = "wrong-claims.html" in page or page.startswith(("records/", "source/"))
    return (2 if last else 0 if re.match(r"(book|zh)/\d", page) else 1), item["level"]


def copy_playground(html: Path) -> None:
    """Copy the playground, and the sources that it loads."""
    for file in [*(ROOT / "nanopaged").rglob("*.py"), ROOT / "nanopaged" / "page.html"]:
        write(html / file.relative_to(ROOT), file.read_bytes())
    left_out = shutil.ignore_patterns("__pycache__", "fetch.py", "*.md")
    shutil.copytree(PLAYGROUND, html / "play", ignore=left_out, dirs_exist_ok=True)
    index = html / "play" / "index.html"
    text = with_way_back(index.read_text(encoding="utf-8"), "../index.html")
    # Where nanopaged/ and the chapters are, seen from the playground: in a checkout → in the site.
    for name, old, new in (("source", "../../", "../"), ("chapters", "../*.md", "../*.html")):
        meta = f'<meta name="{name}" content="{{}}">'
        assert meta.format(old) in text
        text = text.replace(meta.format(old), meta.format(new))
    write(index, text)


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []  # tag, address
        # Code has no links, and is most of the text.
        self.feed(re.sub(r"<pre>.*?</pre>", "", file.read_text(encoding="utf-8"), flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.append((tag, value or ""))


def find_faults(html: Path) -> Iterator[str]:
    """Links to nothing, and what a page would load from another server."""
    pages = {file: Page(file) for file in html.rglob("*.html") if "pyodide" not in file.parts}
    # The tour and the playground read what follows # themselves.
    steered = [file for file in pages if file.parent.name == "play"]
    for file, page in pages.items():
        where = file.relative_to(html).as_posix()
        for tag, link in page.links:
            address = urlsplit(link)
            if address.netloc or address.scheme:
                if tag != "a" and address.scheme != "data":
                    yield f"{where} loads {link} from another server"
                continue
            target = Path(posixpath.normpath(file.parent / unquote(address.path))) if address.path else file
            if not target.is_file():
                yield f"{where} links to {link}, which does not exist"
                continue
            anchors = {"", *pages[target].anchors} if target in pages and target not in steered else None
            if anchors is not None and unquote(address.fragment) not in anchors:
                yield f"{where} links to {link}, which has no such anchor"


if __name__ == "__main__":
    main()
