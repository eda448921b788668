"""A suite of cases and its command line: which cases run, for how many rounds, and where results go.

A suite is one process. Candidates run in processes of their own, which it starts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from benchmarks import recording
from benchmarks.harness import results
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.comparison import Pool, Say
from benchmarks.harness.figures import Check, verdict
from towpath.errors import ConfigError, TowpathError
from towpath.files import check_output_file
from towpath.topology.launcher import launched

ROUNDS = 6  # the fewest with an interval at 95 %, and even, so that every candidate has each place equally often
QUICK_ROUNDS = 2
SETTLE_SECONDS = 150.0
_MOST_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """How a case measures.

    With `quick`, it does as little as shows that it works. `options` has the suite's own options. `pool` keeps
    candidates for the next case.
    """

    rounds: int
    quick: bool
    say: Say
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    pool: Pool = field(default_factory=Pool)


class Case(Protocol):
    """One measurement of a suite, with a name."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure, and return what a result line keeps. `checks`, a list of `Check`, is also printed."""
        ...


def show(line: dict[str, Any]) -> str:
    """Return a result for the terminal, one figure per line."""
    lines = [verdict(check) for check in line["checks"]]
    lines += [f"FAILED: {line['failed']}"] if "failed" in line else []
    lines += [f"warning: {text}" for text in line["warnings"]]
    return "\n".join([line["case"]["name"], *(f"  {each}" for each in lines)])


@dataclass(frozen=True, slots=True)
class Suite:
    """A list of cases with a command line.

    `options` adds the suite's own options. `chosen` returns the cases that the options select, or others that they
    describe, and `other_cases` is a sentence about those. `shown` returns a result as text. `summary` returns what
    `python -m benchmarks report` prints below the table.
    """

    name: str
    doc: str
    cases: Sequence[Case]
    rounds: int = ROUNDS
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    chosen: Callable[[Sequence[Any], argparse.Namespace], Sequence[Case]] = lambda cases, options: cases
    other_cases: str = ""
    shown: Callable[[dict[str, Any]], str] = show
    summary: Callable[[], str] | None = None

    def run(self, arguments: Sequence[str]) -> None:
        """Measure the cases that a command line names. Raise `ConfigError` for a user's mistake."""
        options = self._parsed(arguments)
        if launched():
            raise ConfigError(
                f"the suite {self.name} starts ranks of its own, but a launcher started this process. Start it without "
                "torchrun. `towpath bench` measures on the ranks of a job."
            )
        signal.signal(signal.SIGTERM, _terminate)
        recording.folder()  # made before the ranks, which share it
        with Pool() as pool:
            self._measure_all(options, pool)

    def _measure_all(self, options: argparse.Namespace, pool: Pool) -> None:
        check_output_file("--output", options.output)
        file = options.output or (None if options.quick else results.file_of(self.name))
        cases = selected(self.chosen(self.cases, options), options.cases, self.other_cases)
        if options.resume:
            cases = _missing(cases, file, options)
            if not cases:
                say("every case has results of this code")
        failed: list[str] = []
        began = time.monotonic()
        for number, case in enumerate(cases, start=1):
            say(f"{self.name}: {case.name} ({number} of {len(cases)}){_left(began, number - 1, len(cases))}")
            try:
                line = self._measured(case, options, pool)
            except KeyboardInterrupt:
                say(f"interrupted in {case.name}, which has no result; --resume continues with it")
                raise SystemExit(128 + signal.SIGINT) from None
            if "failed" in line:
                failed.append(case.name)
            print(json.dumps(line, ensure_ascii=False) if options.json else self.shown(line), flush=True)
            if file is not None:
                results.append(file, line)
        if failed:
            raise SystemExit(f"not measured: {_listed(failed)}")

    def _parsed(self, arguments: Sequence[str]) -> argparse.Namespace:
        names = "\n".join(f"  {shlex.quote(case.name)}" for case in self.cases)
        parser = Parser(
            prog=f"python -m benchmarks {self.name}",
            description=self.doc,
            epilog=f"cases, as they are written in a shell:\n\n{names}\n\n{self.other_cases}",
        )
        parser.add_argument("cases", nargs="*", metavar="CASE", help="of those listed below (default: all)")
        parser.add_argument("--rounds", type=int, default=self.rounds, help=f"default: {self.rounds}")
        parser.add_argument("--quick", action="store_true", help="check that it works, and keep nothing")
        parser.add_argument("--resume", action="store_true", help="leave out cases with results of this code")
        parser.add_argument(
            "--settle",
            type=float,
            default=SETTLE_SECONDS,
            metavar="SECONDS",
            help=f"longest wait for a quiet machine before a case (default: {SETTLE_SECONDS:g})",
        )
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help=f"default: benchmarks/results/{self.name}.jsonl"
        )
        parser.add_argument("--json", action="store_true", help="print each result as a line of JSON")
        self.options(parser)
        options = parser.parse_args(arguments)
        if options.rounds < 1:
            parser.error(f"--rounds is at least 1; got {options.rounds}")
        if options.quick:
            options.rounds, options.settle = QUICK_ROUNDS, 0.0
        return options

    def _measured(self, case: Case, options: argparse.Namespace, pool: Pool) -> dict[str, Any]:
        busy, before = results.wait_for_quiet(options.settle), results.load()
        stamped = results.stamp()
        began = time.monotonic()
        try:
            found: dict[str, Any] = case.measure(Settings(options.rounds, options.quick, say, options, pool))
        except (CaseError, TowpathError) as error:
            found = {"failed": str(error)}
        checks: list[Check] = found.pop("checks", [])
        warnings = [*results.warnings(busy, stamped["clean"]), *found.pop("warnings", [])]
        return {
            "suite": self.name,
            "harness": results.HARNESS,
            **stamped,
            **({"quick": True} if options.quick else {}),
            "asked": _asked(options),
            "load": {"before": before, "after": results.load()},
            "busy_processors": busy,
            "warnings": warnings,
            "took_seconds": round(time.monotonic() - began, 1),
            "case": {**asdict(case), "name": case.name},  # type: ignore[call-overload]
            "checks": [check.recorded() for check in checks],
            **found,
        }


class Parser(argparse.ArgumentParser):
    """A parser that raises `ConfigError`, and lays its help out for the terminal, with at most 100 columns."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake as an error with one line."""
        raise ConfigError(f"{message}. See {self.prog} --help.")


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter that refills paragraphs, and keeps indented text as it is."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, width=min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 2, **settings)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, width) for each in paragraphs)


def _terminate(*_: object) -> None:
    """Leave as an exception, so that labs are closed."""
    sys.exit(128 + signal.SIGTERM)


def selected(cases: Sequence[Case], names: Sequence[str], other_cases: str = "") -> list[Case]:
    """Return the cases with these names, or all without names."""
    wanted, known = set(names), [case.name for case in cases]
    if unknown := sorted(wanted - set(known)):
        there = f"no case {_listed(unknown)}; there are {_listed(known)}."
        raise ConfigError(f"{there} {other_cases}".rstrip())
    return [case for case in cases if not wanted or case.name in wanted]


def _listed(names: Sequence[str]) -> str:
    """Return names as they are written in a shell, in quotes where they have spaces."""
    return ", ".join(map(shlex.quote, names))


def say(text: str) -> None:
    """Print progress to stderr. Only results go to stdout."""
    print(f"  … {text}", file=sys.stderr, flush=True)


def _left(began: float, done: int, total: int) -> str:
    """Return about how long the other cases will take, once one has finished."""
    if not done:
        return ""
    seconds = (time.monotonic() - began) / done * (total - done)
    return f", about {seconds / 60:.0f} min to go" if seconds >= 90 else f", about {seconds:.0f} s to go"


# Options that make the results of a case other results.
_ASKED = ("candidates", "screen", "steps", "kills", "period", "seed", "against")


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line requested of a case, in addition to its name."""
    given = {name: getattr(options, name, None) for name in _ASKED}
    return {"rounds": options.rounds} | {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None and value is not False
    }


def _missing(cases: Sequence[Case], file: Path | None, options: argparse.Namespace) -> list[Case]:
    """Return the cases without results of this code, for as many rounds and the same candidates."""
    code = results.code(results.ROOT)
    if file is None or (code["commit"] is not None and not code["clean"]):
        raise ConfigError("--resume needs a tree as committed, and a file of results.")
    done = results.last(
        line
        for line in results.read(file)
        if results.same_code(line, code, results.versions()["towpath"])
        and line.get("quick", False) == options.quick
        and line.get("asked") == _asked(options)
    )
    return [case for case in cases if case.name not in done]
