"""The command line of every suite: which cases, how many rounds, where the results go.

On one machine a suite is one process, which starts contestants in processes of their own. Under a launcher (torchrun)
every rank runs the suite, all alike: rank 0 decides, says and writes, the others do as it does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from towpath.bench.harness import results, stamp
from towpath.bench.harness.failure import CaseError
from towpath.bench.harness.figures import Check, verdict
from towpath.bench.harness.help import HelpFormatter
from towpath.bench.harness.job import Job, decided, running_job
from towpath.bench.harness.pool import Pool
from towpath.errors import ConfigError, TowpathError
from towpath.files import check_output_file

ROUNDS = 6  # the fewest whose interval is one at 95 %; even, so that everybody has each place equally often
QUICK_ROUNDS = 2
SETTLE_SECONDS = 150.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a case measures. `quick`: as little as shows that it works. `options`: the suite's own. `job`: the one that
    this process is a rank of; None on one machine, where contestants get ranks of their own. `pool`: for contestants
    that go on to the next case."""

    rounds: int
    quick: bool
    say: Callable[[str], None]
    options: argparse.Namespace = field(default_factory=argparse.Namespace)
    job: Job | None = None
    pool: Pool = field(default_factory=Pool)


class Case(Protocol):
    @property
    def name(self) -> str: ...

    def measure(self, settings: Settings) -> dict[str, Any]:
        """What came out. `checks` (a list of Check) is printed; everything is kept."""
        ...


def show(line: dict[str, Any]) -> str:
    """A result for people: each figure on a line."""
    lines = [verdict(check) for check in line["checks"]]
    lines += [f"FAILED: {line['failed']}"] if "failed" in line else []
    lines += [f"warning: {text}" for text in line["warnings"]]
    return "\n".join([line["case"]["name"], *(f"  {each}" for each in lines)])


def all_cases(cases: Sequence[Case], options: argparse.Namespace) -> Sequence[Case]:
    return cases


def no_options(parser: argparse.ArgumentParser) -> None:
    """The suite has none of its own."""


@dataclass(frozen=True, slots=True)
class Suite:
    """`options` adds the suite's own. `chosen`: of the cases those that the options mean, or others that they ask for;
    `options.job` is there too. `other_cases`: a sentence on options that make other cases. `shown`: a result, for
    people. `in_job`: it can run as the ranks of a job."""

    name: str
    doc: str
    cases: Sequence[Case]
    rounds: int = ROUNDS
    options: Callable[[argparse.ArgumentParser], None] = no_options
    chosen: Callable[[Sequence[Case], argparse.Namespace], Sequence[Case]] = all_cases
    other_cases: str = ""
    shown: Callable[[dict[str, Any]], str] = show
    in_job: bool = False

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """As a script."""
        try:
            self.run(arguments)
        except ConfigError as error:
            raise SystemExit(str(error)) from None

    def run(self, arguments: Sequence[str] | None = None, command: str | None = None) -> None:
        """`command`: what this is called in the help. A user's mistake is a ConfigError."""
        options = self._parsed(arguments, command)
        signal.signal(signal.SIGTERM, _terminate)
        with running_job(self.name, self.in_job) as job, Pool() as pool:
            options.job = job
            self._measure_all(options, job, pool)

    def _measure_all(self, options: argparse.Namespace, job: Job | None, pool: Pool) -> None:
        _check_output(options.output, job)
        file, speak = _file(options, self.name), say if job is None or job.rank == 0 else silent
        cases = selected(self.chosen(self.cases, options), options.cases, self.other_cases)
        if options.resume:
            cases = _missing(cases, file, job, options)
            if not cases:
                speak("everything that was asked for is there, measured with this very code")
        failed: list[str] = []
        began = time.monotonic()
        for number, case in enumerate(cases, start=1):
            speak(f"{self.name}: {case.name} ({number} of {len(cases)}){_left(began, number - 1, len(cases))}")
            try:
                line = self._measured(case, options, speak, job, pool)
            except KeyboardInterrupt:
                speak(f"interrupted in {case.name}, of which nothing is kept; --resume goes on with it")
                raise SystemExit(128 + signal.SIGINT) from None
            if "failed" in line:
                failed.append(case.name)
            if job is None or job.rank == 0:
                print(json.dumps(line, ensure_ascii=False) if options.json else self.shown(line), flush=True)
                if file is not None:
                    results.append(file, line)
        if failed:
            raise SystemExit(f"not measured: {_listed(failed)}")

    def _parsed(self, arguments: Sequence[str] | None, command: str | None) -> argparse.Namespace:
        names = "\n".join(f"  {shlex.quote(case.name)}" for case in self.cases)
        parser = Parser(
            prog=command,
            description=self.doc,
            epilog=f"cases, as they are written in a shell:\n\n{names}\n\n{self.other_cases}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("cases", nargs="*", metavar="CASE", help="of those listed below (default: all)")
        parser.add_argument("--rounds", type=int, default=self.rounds, help=f"default: {self.rounds}")
        parser.add_argument("--quick", action="store_true", help="show soon that it works; keep nothing")
        parser.add_argument("--resume", action="store_true", help="leave out what was measured with this very code")
        parser.add_argument(
            "--settle",
            type=float,
            metavar="SECONDS",
            help=f"wait so long at most for a quiet machine (default: {SETTLE_SECONDS:g}; in a job 0)",
        )
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"default: {results.file_of(self.name)}")
        parser.add_argument("--json", action="store_true", help="print each result as a line of JSON")
        self.options(parser)
        options = parser.parse_args(arguments)
        if options.rounds < 1:
            parser.error(f"--rounds is at least 1; got {options.rounds}")
        if options.quick:
            options.rounds, options.settle = QUICK_ROUNDS, 0.0
        return options

    def _measured(
        self, case: Case, options: argparse.Namespace, speak: Callable[[str], None], job: Job | None, pool: Pool
    ) -> dict[str, Any]:
        settle = options.settle if options.settle is not None else (SETTLE_SECONDS if job is None else 0.0)
        busy, before = stamp.wait_for_quiet(settle), stamp.load()
        stamped = stamp.stamp()
        began = time.monotonic()
        try:
            found: dict[str, Any] = case.measure(Settings(options.rounds, options.quick, speak, options, job, pool))
        except (CaseError, TowpathError) as error:
            found = {"failed": str(error)}
        checks: list[Check] = found.pop("checks", [])
        warnings = [*stamp.warnings(busy, stamped["clean"]), *found.pop("warnings", [])]
        return {
            "suite": self.name,
            "harness": results.HARNESS,
            **stamped,
            **({"quick": True} if options.quick else {}),
            "asked": _asked(options),
            "load": {"before": before, "after": stamp.load()},
            "busy_processors": busy,
            "warnings": warnings,
            "took_seconds": round(time.monotonic() - began, 1),
            "case": {**asdict(case), "name": case.name},  # type: ignore[call-overload]
            "checks": [check.recorded() for check in checks],
            **found,
        }


class Parser(argparse.ArgumentParser):
    """A mistake on the command line is one error, as every other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")


def _terminate(*_: object) -> None:
    """As an exception, so that labs go down."""
    sys.exit(128 + signal.SIGTERM)


def selected(cases: Sequence[Case], names: Sequence[str], other_cases: str = "") -> list[Case]:
    """The cases of these names, or all if none is named. `other_cases`: the suite's word on those that are not here."""
    known = [case.name for case in cases]
    if unknown := sorted(set(names) - set(known)):
        there = f"no case {_listed(unknown)}; there are {_listed(known)}."
        raise ConfigError(f"{there} {other_cases}".rstrip())
    return [case for case in cases if not names or case.name in names]


def _listed(names: Sequence[str]) -> str:
    """Each as it is written in a shell: in quotes where it has spaces."""
    return ", ".join(map(shlex.quote, names))


def say(text: str) -> None:
    """Progress; on stderr, so that what is piped is the results."""
    print(f"  … {text}", file=sys.stderr, flush=True)


def silent(text: str) -> None:
    """On the ranks that say nothing."""


def _left(began: float, done: int, total: int) -> str:
    """How long the rest will take, once one is done."""
    if not done:
        return ""
    seconds = (time.monotonic() - began) / done * (total - done)
    return f", about {seconds / 60:.0f} min to go" if seconds >= 90 else f", about {seconds:.0f} s to go"


def _check_output(path: Path | None, job: Job | None) -> None:
    """In a job rank 0 writes: what is wrong for it, all ranks say."""
    wrong = None
    try:
        check_output_file("--output", path)
    except ConfigError as error:
        wrong = str(error)
    if (wrong := decided(job, wrong)) is not None:
        raise ConfigError(wrong)


def _file(options: argparse.Namespace, suite: str) -> Path | None:
    if options.output is None and options.quick:
        return None
    return options.output or results.file_of(suite)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What a case was asked for besides its name."""
    contestants = getattr(options, "contestants", None)
    named = {} if contestants is None else {"contestants": list(contestants)}
    return {"rounds": options.rounds, **named, **({"screen": True} if getattr(options, "screen", False) else {})}


def _missing(cases: Sequence[Case], file: Path | None, job: Job | None, options: argparse.Namespace) -> list[Case]:
    """Those of which this code has no figures, for as many rounds and the same contestants."""
    code = stamp.code(stamp.ROOT)
    if file is None or (code["commit"] is not None and not code["clean"]):
        raise ConfigError("--resume needs a tree as committed, and a file of results.")
    mine = [
        line
        for line in results.read(file)
        if stamp.same_code(line, code, stamp.version())
        and line.get("quick", False) == options.quick
        and line.get("asked") == _asked(options)
    ]
    done = decided(job, list(results.last(mine)))
    return [case for case in cases if case.name not in done]
