"""Hooks of mkdocs (mkdocs.yml): they add pages from outside docs/, and files that pages link to.

The home page is README.md. The other entries of `PAGES` are pages too. Any other file of the repository that a page
links to, such as a script, is copied into the site under `repository/`. A Markdown file that is copied, for example
benchmarks/LOG.md, becomes a page that the navigation does not list.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
DOCS = "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "guides/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "examples/README.md": "start/examples.md",
    "benchmarks/README.md": "comparisons/index.md",
}
# Pages generated from results (tools/docs/figures.py).
PAGES |= {
    page.relative_to(ROOT).as_posix(): f"comparisons/{page.name}" for page in ROOT.glob("benchmarks/comparisons/*.md")
}
COPIED = "repository"
_FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    sources = {Path(DOCS, f.src_uri).as_posix(): f.content_string for f in files.documentation_pages()}
    for source, page in PAGES.items():
        sources[source] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=sources[source]))
    wanted = sorted({target for source, text in sources.items() for target in linked(source, text)})
    copied: set[str] = set()
    while wanted:
        target = wanted.pop()
        path = ROOT / target
        if target.startswith(f"{DOCS}/") or target in PAGES or target in copied or not path.is_file():
            continue
        copied.add(target)
        uri = f"{COPIED}/{target}"
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
        if target.endswith(".md"):
            wanted += linked(target, path.read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links relative to its place in the site."""
    uri = page.file.src_uri
    source = next((source for source, at in PAGES.items() if at == uri), f"{DOCS}/{uri}")
    if uri.startswith(f"{COPIED}/"):
        source = uri.removeprefix(f"{COPIED}/")

    # The words after a fence's language are for the tests (tests/commands.py), and unknown to the highlighter.
    markdown = _FENCE.sub(r"\1", markdown)

    def moved(match: re.Match[str]) -> str:
        target = _from_root(source, match[1])
        return posixpath.relpath(_in_site(target), posixpath.dirname(uri) or ".")

    return _LINK.sub(moved, markdown)


def linked(source: str, text: str) -> list[str]:
    """The files that a page links to, by their paths from the root of the repository."""
    return [_from_root(source, match) for match in _LINK.findall(text)]


def _from_root(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _in_site(target: str) -> str:
    if target in PAGES:
        return PAGES[target]
    inside = target.removeprefix(f"{DOCS}/")
    return inside if inside != target else f"{COPIED}/{target}"
