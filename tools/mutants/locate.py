"""Mutants: where each defect goes, found by function and pattern, and what the source is with the defect in it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NotFoundError(Exception):
    """A mutant does not fit the sources any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One defect, and the test files of which at least one test has to fail with it."""

    name: str
    pattern: str
    replace: str
    tests: list[str]
    function: str = ""  # "module:qualified.name"; or, for code outside functions, `file`
    file: str = ""

    @property
    def where(self) -> str:
        return self.function or self.file

    def put_into(self, root: Path) -> None:
        """Put the defect into the sources under `root`, or raise `NotFoundError`."""
        path, mutated = self.mutated(root)
        path.write_text(mutated, encoding="utf-8")

    def mutated(self, root: Path) -> tuple[Path, str]:
        """Return the file and its text with the defect. Raise `NotFoundError` if this mutant does not fit `root`."""
        for test in self.tests:
            if not (root / test.partition("::")[0]).exists():
                raise NotFoundError(f"there is no {test}")
        module, _, function = self.function.partition(":")
        path = root / (self.file or f"src/{module.replace('.', '/')}.py")
        if not path.exists():
            raise NotFoundError(f"there is no {path.relative_to(root)}")
        source = path.read_text(encoding="utf-8")
        mutated = replaced(source, function, self.pattern, self.replace)
        if path.suffix == ".py":
            try:
                ast.parse(mutated)
            except SyntaxError as error:
                raise NotFoundError(f"the replacement is no valid Python: {error}") from error
        return path, mutated


def read(path: Path) -> list[Mutant]:
    """Return the mutants that a TOML file lists, one per table."""
    return [Mutant(name=name, **table) for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()]


def replaced(source: str, function: str, pattern: str, replacement: str) -> str:
    """Return `source` with the only match of `pattern` inside `function` replaced.

    Args:
        function: Qualified name, as in `Class.method` or `outer.inner`. Empty: the whole text, in any language.
        pattern: Regular expression. `^` and `$` match at each line.
        replacement: Template of `re.sub`, with `\\1` for a group.

    Raises:
        NotFoundError: There is no such function, no match, more than one match, or the replacement changes nothing.
    """
    spans = list(_spans(source, function)) if function else [(0, len(source))]
    if not spans:
        raise NotFoundError(f"there is no function {function}")
    compiled = re.compile(pattern, re.MULTILINE)
    matches = [match for start, end in spans for match in compiled.finditer(source, start, end)]
    if len(matches) != 1:
        raise NotFoundError(f"the pattern matches {len(matches)} times")
    (match,) = matches
    mutated = source[: match.start()] + match.expand(replacement) + source[match.end() :]
    if mutated == source:
        raise NotFoundError("the replacement changes nothing")
    return mutated


def _spans(source: str, function: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each definition of `function`: a property and its setter share one name."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    for name, node in _definitions(ast.parse(source), ""):
        if name == function:
            yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno] - 1


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _definitions(node, f"{prefix}{node.name}." if named else prefix)
