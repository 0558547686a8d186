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
# Where pages were before they had these folders: old addresses lead on.
MOVED = {"book/": "", "reference/": "", "records/": "", "build/": "rebuild/"}
MOVED |= {"play/tour.html": "tour.html", "play/index.html": "playground/index.html"}
MOVED_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>nanopaged: this page has moved</title>
<script>location.replace("{to}" + location.hash)</script>
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript>
<p>This page has moved: <a href="{to}">{to}</a></p>
</html>
"""


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", nargs="?", type=Path, default=SITE, help="of the site: build/site")
    parser.add_argument("--no-playground", action="store_true", help="leave the playground out")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()) and not (args.folder / "search.json").exists():
        parser.error(f"{args.folder} has files, and is no site: name another folder")
    if not args.no_playground:
        fetch_pyodide()

    with tempfile.TemporaryDirectory() as temporary:
        copy_pages(Path(temporary), not args.no_playground)
        command = [sys.executable, "-m", "zensical", "build"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        html = Path(temporary) / "html"
        finish(html)
        if not args.no_playground:
            copy_playground(html)
        lead_on(html)
        faults = list(find_faults(html))
        if faults:
            sys.exit("\n".join(faults))
        shutil.rmtree(args.folder, ignore_errors=True)
        shutil.copytree(html, args.folder)
    print(f"{args.folder}: {len(list(args.folder.rglob('*.html')))} pages")


def fetch_pyodide() -> None:
    """Have docs/play/pyodide, unless it is there."""
    done = subprocess.run([sys.executable, PLAYGROUND / "fetch.py"], stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit("the playground needs Pyodide; --no-playground builds the site without the playground")


# ── before the generator ──────────────────────────────────────────────────────────────────────────


def copy_pages(folder: Path, playground: bool) -> None:
    """Write what the generator reads: its settings, the pages, and the sources that they link to."""
    settings = (DOCS / "site" / "zensical.toml").read_text(encoding="utf-8")
    if not playground:
        settings = re.sub(r".*playground.*\n", "", settings)
    (folder / "zensical.toml").write_text(settings, encoding="utf-8")

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
    for file in [*DOCS.rglob("*.svg"), *DOCS.rglob("*.png")]:
        write(pages / file.relative_to(DOCS), file.read_bytes())
    tour = (PLAYGROUND / "tour.html").read_text(encoding="utf-8")
    write(pages / "play" / "tour.html", with_way_back(tour, "../index.html"))
    write(pages / "extra.css", (DOCS / "site" / "extra.css").read_text(encoding="utf-8"))


def write(file: Path, contents: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def place(path: str) -> str:
    """Where a file of the project stands in the site: its own place below docs, or a page in source/.

    docs/book/03-blocks.md → book/03-blocks.md; nanopaged/engine.py → source/nanopaged/engine.py.md
    """
    if path == "README.md":
        return "project.md"
    if path == "docs/play/README.md":  # in its folder, index.html is the playground
        return "playground.md"
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

    text = LINK.sub(lead, text)
    return PRESET.sub(lambda found: embed(found, in_chinese=page.startswith("docs/zh/")), text)


def embed(found: re.Match[str], in_chinese: bool) -> str:
    """A link to a preset of the playground → the playground within the page, loaded once it is opened."""
    text, address = escape(" ".join(found["text"].split())), found["address"]
    whole = "在单独的页面中打开" if in_chinese else "Open it on a page of its own"
    frame = f'<iframe loading="lazy" title="{text}" src="{address}&amp;embed"></iframe>'
    return (
        f'<details class="play"><summary>{text}</summary>\n{frame}\n<a href="{address}">{whole}</a></details>'
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
    for page in (html / "zh").glob("*.html"):
        # A browser chooses its font by the language, a screen reader its voice.
        text = page.read_text(encoding="utf-8")
        assert '<html lang="en"' in text
        write(page, text.replace('<html lang="en"', '<html lang="zh"', 1))
    for script in html.glob("assets/javascripts/bundle.*.js"):
        # The search field says that it wants the focus only once it is there: said earlier, it would be a
        # message in the console of each address with a #.
        text = script.read_text(encoding="utf-8")
        late = "ref:field=>field&&setTimeout(()=>field.autofocus=!0),"
        write(script, text.replace("autoFocus:!0,", late))


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


def lead_on(html: Path) -> None:
    """Write a page at each address that a page had before it moved. It leads to the new one."""
    for file in list(html.rglob("*.html")):
        new = file.relative_to(html).as_posix()
        for folder, old in MOVED.items():
            if new.startswith(folder) and not (html / (before := old + new.removeprefix(folder))).exists():
                to = posixpath.relpath(new, posixpath.dirname(before))
                write(html / before, MOVED_PAGE.format(to=to))


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
