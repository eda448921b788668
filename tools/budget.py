"""How much there is to read, to learn and to keep working: lines of code, public names, options, commands, keys.

    python -m tools.budget                    print the counts beside the limits of tools/budget.toml
    python -m tools.budget --check            fail if a count exceeds its limit (part of `make check`)
    python -m tools.budget --against COMMIT   print the lines of another commit beside today's

A line of code has code on it. Docstrings, comments and blank lines do not count, only as lines in all.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tools" / "budget.toml"
MODULES = ("checkpoint", "codecs", "errors", "integrations", "optim", "pipeline", "planning", "tracing")

_BESIDE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Counts = dict[str, dict[str, int]]


def lines_of_code(source: str) -> int:
    """Return the lines of `source` that carry code."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            documentation.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BESIDE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def count_lines(files: Mapping[str, str], folder: str) -> tuple[dict[str, int], int]:
    """Return the lines of code by package of `folder`, and all lines. `files` maps paths to sources."""
    code: dict[str, int] = {}
    lines = 0
    for path, source in sorted(files.items()):
        if path.startswith(f"{folder}/"):
            inside = PurePosixPath(path).relative_to(folder).parts
            package = inside[0] if len(inside) > 1 else "modules"
            code[package] = code.get(package, 0) + lines_of_code(source)
            lines += source.count("\n")
    return code | {"total": sum(code.values())}, lines


def read_files(commit: str | None) -> dict[str, str]:
    """Return all Python files of the package and of the tests, of the working tree or of a commit."""
    git = ["git", "-C", str(ROOT)]
    if commit is None:
        tracked = [*git, "ls-files", "--cached", "--others", "--exclude-standard", "src", "tests"]
    else:
        tracked = [*git, "ls-tree", "-r", "--name-only", commit, "src", "tests"]
    names = subprocess.run(tracked, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name in names if name.endswith(".py")]
    if commit is None:
        return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).exists()}
    show = [*git, "cat-file", "--batch"]
    wanted = "".join(f"{commit}:{name}\n" for name in names).encode()
    answer = io.BytesIO(subprocess.run(show, check=True, capture_output=True, input=wanted).stdout)
    found: dict[str, str] = {}
    for name in names:
        size = int(answer.readline().split()[2])
        found[name] = answer.read(size).decode()
        answer.read(1)
    return found


def lines_by_part(files: Mapping[str, str]) -> Counts:
    """Return the lines of the package and of the tests."""
    code, lines = count_lines(files, "src/towpath")
    tests, _ = count_lines(files, "tests")
    return {"code": code, "lines": {"src": lines}, "tests": {"total": tests["total"]}}


def public_counts() -> Counts:
    """Return the numbers of public names, of keyword options, of options of commands, and of keys of TOML files."""
    import typer.main

    import towpath
    from towpath.cli.main import app
    from towpath.core.presets import Options
    from towpath.train.config import Config

    names = {"towpath": len(towpath.__all__)}
    names |= {name: len(importlib.import_module(f"towpath.{name}").__all__) for name in MODULES}
    keywords = inspect.signature(towpath.shard).parameters.values()
    options = {
        "shard": sum(each.kind is inspect.Parameter.KEYWORD_ONLY for each in keywords),
        "strategy": len(Options.__annotations__),
    }
    return {
        "names": names,
        "options": options,
        "commands": dict(_commands(typer.main.get_command(app))),
        "toml": {"train": _keys(Config)},
    }


def _commands(command: Any, name: str = "") -> Iterable[tuple[str, int]]:
    inside: Mapping[str, Any] = getattr(command, "commands", {})
    for each, below in inside.items():
        yield from _commands(below, f"{name} {each}".strip())
    if not inside and not command.hidden:
        yield name, sum(parameter.name != "help" for parameter in command.params)


def _keys(section: Any) -> int:
    made = [f.default_factory for f in dataclasses.fields(section)]
    return sum(_keys(each) if dataclasses.is_dataclass(each) else 1 for each in made)


def report(now: Counts, beside: Mapping[str, Mapping[str, int]], head: str) -> list[str]:
    """Return a table of the counts of today, with other counts in a second column."""
    rows = [f"{'':32}{'today':>8}{head:>12}"]
    for part, counts in now.items():
        for name in sorted({*counts, *beside.get(part, {})}, key=lambda name: (name == "total", name)):
            other = beside.get(part, {}).get(name)
            rows.append(f"{part + ': ' + name:32}{counts.get(name, 0):>8,}{'-' if other is None else f'{other:,}':>12}")
    return rows


def excesses(now: Counts, limits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return what exceeds its limit, and what has none."""
    found: list[str] = []
    for part, counts in now.items():
        for name, count in counts.items():
            limit = limits.get(part, {}).get(name)
            if limit is None:
                found.append(f"{part}.{name} = {count} has no limit: add one to tools/budget.toml.")
            elif count > limit:
                found.append(
                    f"{part}.{name} = {count}, above its limit of {limit}. Remove something, or raise the limit in a "
                    "commit of its own that says what a user gets for it."
                )
    return found


def main() -> int:
    """Print the counts, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="print only what exceeds its limit, and fail if anything does"
    )
    parser.add_argument("--against", metavar="COMMIT", help="print the lines of this commit beside today's")
    asked = parser.parse_args()
    now = lines_by_part(read_files(None))
    if asked.against:
        print("\n".join(report(now, lines_by_part(read_files(asked.against)), asked.against[:10])))
        return 0
    now |= public_counts()
    limits = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    if not asked.check:
        print("\n".join(report(now, limits, "limit")))
    found = excesses(now, limits)
    for line in found:
        print(f"budget: {line}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
