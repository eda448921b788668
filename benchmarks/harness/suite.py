"""The command line of every suite: which cases, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from towpath.errors import TowpathError

from . import results, stamp
from .failure import CaseError
from .figures import Check, verdict

ROUNDS = 6  # the fewest whose interval is one at 95 %; even, so that everybody has each place equally often
QUICK_ROUNDS = 2
SETTLE_SECONDS = 150.0  # a load of 6 takes as long to leave the average of a minute


@dataclass(frozen=True, slots=True)
class Settings:
    """How a case measures. `quick`: as little as shows that it works. `options`: the suite's own."""

    rounds: int
    quick: bool
    say: Callable[[str], None]
    options: argparse.Namespace = field(default_factory=argparse.Namespace)


class Case(Protocol):
    @property
    def name(self) -> str: ...

    def measure(self, settings: Settings) -> dict[str, Any]:
        """What came out. `checks` (a list of Check) is printed; everything is kept."""
        ...


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    doc: str
    cases: Sequence[Case]
    rounds: int = ROUNDS
    # Adds the suite's own options.
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    # Cases depend on the options in some suites; these are the ones to run.
    chosen: Callable[[Sequence[Case], argparse.Namespace], Sequence[Case]] = lambda cases, options: cases

    def main(self, arguments: Sequence[str] | None = None) -> None:
        options = self._parsed(arguments)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds: labs go down
        file = _file(options, self.name)
        cases = selected(self.chosen(self.cases, options), options.cases)
        if options.resume:
            cases = _missing(cases, file)
        failed: list[str] = []
        for number, case in enumerate(cases, start=1):
            say(f"{self.name}: {case.name} ({number} of {len(cases)})")
            try:
                line = self._measured(case, options)
            except KeyboardInterrupt:
                say(f"interrupted in {case.name}, of which nothing is kept; --resume goes on with it")
                raise SystemExit(128 + signal.SIGINT) from None
            if "failed" in line:
                failed.append(case.name)
            show(line)
            if file is not None:
                results.append(file, line)
        if failed:
            raise SystemExit(f"not measured: {', '.join(failed)}")

    def _parsed(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        names = ", ".join(case.name for case in self.cases)
        parser = argparse.ArgumentParser(description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {names} (default: all)")
        parser.add_argument("--rounds", type=int, default=self.rounds, help=f"default: {self.rounds}")
        parser.add_argument("--quick", action="store_true", help="show in seconds that it works; keep nothing")
        parser.add_argument("--resume", action="store_true", help="leave out what was measured at this very commit")
        parser.add_argument(
            "--settle", type=float, default=SETTLE_SECONDS, help="seconds to wait at most for the load to go down"
        )
        parser.add_argument("-o", "--output", type=Path, help=f"default: {results.file_of(self.name)}")
        self.options(parser)
        options = parser.parse_args(arguments)
        if options.rounds < 1:
            parser.error(f"--rounds is at least 1; got {options.rounds}")
        if options.quick:
            options.rounds, options.settle = QUICK_ROUNDS, 0.0
        return options

    def _measured(self, case: Case, options: argparse.Namespace) -> dict[str, Any]:
        before = stamp.wait_for_quiet(options.settle)
        stamped = stamp.stamp()
        began = time.monotonic()
        try:
            found: dict[str, Any] = case.measure(Settings(options.rounds, options.quick, say, options))
        except (CaseError, TowpathError) as error:
            found = {"failed": str(error)}
        checks: list[Check] = found.pop("checks", [])
        warnings = [*stamp.warnings(before, stamped["clean"]), *found.pop("warnings", [])]
        return {
            "suite": self.name,
            "harness": results.HARNESS,
            **stamped,
            **({"quick": True} if options.quick else {}),
            "load": {"before": before, "after": stamp.load()},
            "warnings": warnings,
            "took_seconds": round(time.monotonic() - began, 1),
            "case": {**asdict(case), "name": case.name},  # type: ignore[call-overload]
            "checks": [check.recorded() for check in checks],
            **found,
        }


def show(line: dict[str, Any]) -> None:
    lines = [verdict(check) for check in line["checks"]]
    lines += [f"FAILED: {line['failed']}"] if "failed" in line else []
    print("\n".join([line["case"]["name"], *(f"  {each}" for each in lines)]))
    print("".join(f"  warning: {text}\n" for text in line["warnings"]), end="", flush=True)


def selected(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases of these names, or all if none is named."""
    known = [case.name for case in cases]
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    return [case for case in cases if not names or case.name in names]


def say(text: str) -> None:
    """Progress; on stderr, so that what is piped is the results."""
    print(f"  … {text}", file=sys.stderr, flush=True)


def _file(options: argparse.Namespace, suite: str) -> Path | None:
    if options.output is None and options.quick:
        return None
    return options.output or results.file_of(suite)


def _missing(cases: Sequence[Case], file: Path | None) -> list[Case]:
    """Those that have no run of this commit, with the tree as committed."""
    code = stamp.code(stamp.ROOT)
    if file is None or not code["commit"] or not code["clean"]:
        raise SystemExit("--resume needs a commit, a tree as committed, and a file of results.")
    here = [line for line in results.read(file) if line.get("commit") == code["commit"] and line["clean"]]
    return [case for case in cases if case.name not in results.last(here)]
