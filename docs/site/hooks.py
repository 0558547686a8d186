"""Hooks of MkDocs: pages for the source files that are linked to, and the language of Chinese pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# [text](path#anchor), without addresses in the web
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs, and for each program in it, that a page links to."""
    pages = [file for file in files.documentation_pages() if file.inclusion.is_included()]
    paths = {path for file in pages for path in _linked_sources(file.content_string, file.src_uri)}
    for path in sorted(paths):
        page = File.generated(config, _page_of(path), content=_listing(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links to source files to their pages."""

    def lead(found: re.Match) -> str:
        path = _source(found[1], page.file.src_uri)
        if path is None:
            return found[0]
        return posixpath.relpath(_page_of(path), posixpath.dirname(page.file.src_uri))

    return markdown if page.file.src_uri.startswith("source/") else LINK.sub(lead, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the language of a Chinese page: a browser chooses its font by it, a screen reader its voice."""
    in_chinese = page.file.src_uri.startswith("zh/")
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if in_chinese else output


def _linked_sources(markdown: str, src_uri: str) -> set[str]:
    paths = {_source(found[1], src_uri) for found in LINK.finditer(markdown)}
    return {path for path in paths if path is not None}


def _source(target: str, src_uri: str) -> str | None:
    """The path in the project that a page links to, if it is no page or picture: "nanopaged/engine.py"."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(src_uri), target))
    in_docs = path.startswith("docs/") and not path.endswith((".py", ".patch"))
    return None if in_docs or not (ROOT / path).is_file() else path


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _listing(path: str) -> str:
    """A page without contents at its side: a file with line numbers. Markdown stays what it is."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = {".py": "python", ".patch": "diff"}.get(posixpath.splitext(path)[1], "text")
    return f'---\nhide: [toc]\n---\n# {path}\n\n````{language} linenums="1"\n{text.rstrip()}\n````\n'
