"""What the pages of the documentation have in fences: programs and commands, and what is to be done with each.

The words after a fence's language are for us; they are kept out of the site (tools/docs/site_pages.py). Of a command:

    bash            `towpath …`, run by `make test` (tests/unit/test_commands.py)
    bash long       run by `make parity`, as it stands, with what the page takes for granted
    bash setup      targets of the Makefile, and pip: what the tests themselves have gone through
    bash cluster    for several machines, or for a tool that is not here: its syntax is checked, no more
    console         run by `make test`, and its output compared

Of a file, `toml` is a configuration of `towpath train`; `toml model` and `toml cluster` are for `towpath plan`.
tests/unit/test_config.py reads them all.

Of a program, `python NAME`: the pieces of one name are one program; `unchecked` is for what cannot be run here.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))]
)
COMMANDS = ("bash", "console")
_FENCE = re.compile(r"^( *)```(\w*) ?([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Fence:
    page: str  # from the root of the repository
    language: str
    said: str
    text: str


def fences(page: Path) -> list[Fence]:
    name = page.relative_to(ROOT).as_posix()
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Fence(name, language, said, textwrap.dedent(text)) for _, language, said, text in found]


def all_fences() -> list[Fence]:
    return [fence for page in PAGES for fence in fences(page)]


def programs(page: str) -> dict[str, str]:
    """Of each name, its pieces one after the other; `page` is named from docs/ or from the root."""
    path = ROOT / page if (ROOT / page).is_file() else ROOT / "docs" / page
    found: dict[str, str] = {}
    for fence in fences(path):
        if fence.language == "python":
            found[fence.said] = found.get(fence.said, "") + fence.text
    return found


def commands(fence: Fence) -> list[str]:
    """Without comments and, in a console, without the prompt and what was printed. One may take several lines."""
    lines = _joined(fence).splitlines()
    if fence.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


def printed(fence: Fence) -> list[str]:
    """In a console: the lines that each command printed, all of them."""
    return [line.rstrip() for line in _joined(fence).splitlines() if not line.startswith("$ ")]


def _joined(fence: Fence) -> str:
    return fence.text.replace("\\\n", "")
