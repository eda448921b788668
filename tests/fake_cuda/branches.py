"""The branches of the sources that only a GPU takes, and which of them ran.

A branch is an `if`, a conditional expression or an `and` that asks for a GPU: `device.type == "cuda"`,
`tensor.is_cuda`, `torch.cuda.is_available()`, or a name that was assigned from one of these. It also is a statement
that uses `torch.cuda`, a stream or an event, and each statement of a class that only exists on GPUs. A branch ran if
an instruction of its source did, of the side that a GPU takes.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import towpath
from tests.fake_cuda import device

SOURCES = Path(towpath.__file__).parent
# Classes that are made on GPUs only.
ON_GPUS = {"CudaStream", "_CudaHandle", "DeviceTimer", "DeviceCopies", "_Offloaded"}

# A statement with one of these words uses a stream, an event or the device.
_USES = ("torch.cuda.", ".synchronize()", ".wait_stream(", ".wait_event(", ".record_stream(")
# What these make is None where there is no GPU.
_MADE = ("torch.cuda.Stream", "torch.cuda.Event")


@dataclass(frozen=True, order=True)
class Branch:
    """A place in the sources that only runs on a GPU."""

    file: str
    line: int
    column: int
    end: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    def has(self, position: Any) -> bool:
        line, end_line, column, end_column = position
        if line is None or column is None:
            return False
        return (self.line, self.column) <= (line, column) and (end_line, end_column) <= self.end


class _Finder:
    """Finds the branches of one file."""

    def __init__(self, path: Path) -> None:
        source = path.read_bytes()
        self._lines = source.splitlines()  # bytes, because columns count them
        self._file = path.relative_to(SOURCES).as_posix()
        self._tree = ast.parse(source)
        nodes = list(ast.walk(self._tree))
        self._names: set[str] = set()  # variables and attributes that say whether there is a GPU, or are None without
        self.found: set[Branch] = set()
        for _ in range(2):  # one may be assigned from another
            for node in nodes:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    self._note_names(node)
        for node in nodes:
            self._visit(node)

    def _note_names(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        values = [node.value]
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = targets[0].elts, node.value.elts
        for target, value in zip(targets, values, strict=False):
            made = isinstance(value, ast.Call) and ast.unparse(value.func) in _MADE
            says = isinstance(value, (ast.Compare, ast.BoolOp, ast.IfExp, ast.Attribute)) and self._asks(value)
            if (made or says) and isinstance(target, (ast.Name, ast.Attribute)):
                self._names.add(ast.unparse(target))

    def _asks(self, node: ast.AST) -> bool:
        """Return whether an expression asks for a GPU."""
        return self._polarity(node) is not None

    def _polarity(self, node: ast.AST) -> bool | None:
        """Return whether the expression is true on a GPU, or None if it does not ask for one."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._polarity(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            found = [p for p in map(self._polarity, node.values) if p is not None]
            return found[0] if found else None
        if isinstance(node, ast.IfExp):
            return self._polarity(node.test)
        if isinstance(node, ast.Compare):
            same = isinstance(node.ops[0], (ast.Eq, ast.Is, ast.In))
            sides = [node.left, *node.comparators]
            if any(isinstance(s, ast.Constant) and s.value == "cuda" for s in sides):
                return same
            is_none = any(isinstance(s, ast.Constant) and s.value is None for s in sides)
            if is_none and any(ast.unparse(s) in self._names for s in sides):
                return not same
            return None
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in self._names:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.cuda.is_"):
            return True
        return None

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.If() | ast.While():
                self._visit_if(node)
            case ast.IfExp():
                polarity = self._polarity(node.test)
                if polarity is not None:
                    self._add(node.body if polarity else node.orelse)
            case ast.BoolOp():
                for before, after in pairwise(node.values):
                    polarity = self._polarity(before)
                    if polarity is not None and polarity is isinstance(node.op, ast.And):
                        self._add(after)
            case ast.comprehension():
                for test in node.ifs:
                    if self._asks(test):
                        self._add(test)
            case ast.ClassDef():
                if node.name in ON_GPUS:
                    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                    for each in (inner for method in methods for inner in ast.walk(method)):
                        if isinstance(each, ast.stmt):
                            self._add_statement(each)
            case ast.FunctionDef():
                self._visit_body(node.body)
            case ast.stmt() if not isinstance(node, (ast.ImportFrom, ast.Import)):
                own = ast.unparse(node) if not hasattr(node, "body") else ""
                # A module's own statements run when it is imported.
                uses = any(word in own for word in _USES)
                if uses and not isinstance(node, ast.AnnAssign) and node not in self._tree.body:
                    self._add_statement(node)
            case _:
                pass

    def _visit_if(self, node: ast.If | ast.While) -> None:
        polarity = self._polarity(node.test)
        if polarity is True:
            self._add_statement(node.body[0])
        elif polarity is False and node.orelse:
            self._add_statement(node.orelse[0])

    def _visit_body(self, body: list[ast.stmt]) -> None:
        """After `if not on_gpu: return`, what follows is the branch of a GPU."""
        for statement, following in pairwise(body):
            if not isinstance(statement, ast.If) or statement.orelse or self._polarity(statement.test) is not False:
                continue
            if isinstance(statement.body[-1], (ast.Return, ast.Raise)):
                self._add_statement(following)

    def _add_statement(self, node: ast.stmt) -> None:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_text or isinstance(node, (ast.FunctionDef, ast.Pass, ast.AnnAssign, ast.Import, ast.ImportFrom))):
            self._add(node)

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            return  # the compiler leaves nothing of it to see
        position: Any = node
        line, column = position.lineno, position.col_offset
        end = position.end_lineno, position.end_col_offset
        text = self._lines[line - 1][column : end[1] if end[0] == line else None].decode()
        if isinstance(node, (ast.If, ast.With, ast.For, ast.While, ast.Try)):
            first = node.body[0]  # up to there
            end = first.lineno, first.col_offset
        self.found.add(Branch(self._file, line, column, end, text))


@cache
def branches() -> frozenset[Branch]:
    """Return all branches for GPUs in the sources."""
    words = ("cuda", *_USES)
    paths = [path for path in SOURCES.rglob("*.py") if any(word in path.read_text() for word in words)]
    return frozenset(branch for path in paths for branch in _Finder(path).found)


# For each function that has run in this process: the branches of its instructions, by offset, that have not run yet.
_left: dict[int, dict[int, list[Branch]]] = {}
_seen: list[CodeType] = []  # so that none is freed, whose id another one would get: code of modules runs once


@contextmanager
def recording(known: Iterable[Branch]) -> Generator[set[Branch]]:
    """Yield a set that gets those of the known branches that run inside the block, on all threads.

    A function is watched until all of its branches have run, also in earlier blocks of this process: a step that is
    traced is several times slower. So a set may lack branches that ran in such a block.
    """
    by_file: dict[str, list[Branch]] = {}
    for branch in known:
        by_file.setdefault(str(SOURCES / branch.file), []).append(branch)
    ran: set[Branch] = set()

    def branches_of(code: CodeType) -> dict[int, list[Branch]]:
        """Return the branches that each instruction belongs to, by its offset."""
        found: dict[int, list[Branch]] = {}
        for number, position in enumerate(code.co_positions()):
            if here := [branch for branch in by_file[code.co_filename] if branch.has(position)]:
                found[2 * number] = here
        return found

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in by_file:
            return None
        left = _left.get(id(code))
        if left is None:
            left = _left[id(code)] = branches_of(code)
            _seen.append(code)
        if not left:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return stepped

    def stepped(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            left = _left[id(frame.f_code)]
            if here := left.get(frame.f_lasti):
                ran.update(here)
                for number in [n for n, those in list(left.items()) if ran.issuperset(those)]:
                    left.pop(number, None)  # another thread may have been first
        return stepped

    before = sys.gettrace()
    sys.settrace(called)
    threading.settrace(called)
    device.trace = called
    try:
        yield ran
    finally:
        sys.settrace(before)
        threading.settrace(before)  # pyright: ignore[reportArgumentType]
        device.trace = None


def listed(found: Iterable[Branch]) -> Iterator[str]:
    """Yield one line for each branch."""
    return map(str, sorted(found))
