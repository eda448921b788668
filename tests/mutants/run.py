"""Puts small defects into the sources, one at a time, and shows that a test fails: `mutants.toml` lists them.

    python tests/mutants/run.py [WORD …]    those whose name has one of the words; all, if none is given

A defect that no test notices is a survivor: the exit status is then 1. The result is written to tests/mutants.md when
all were run. `drawn.py` beside it does the same with defects that nobody chose.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants.trial import ROOT, Outcome, commit, tried

RESULT = ROOT / "tests" / "mutants.md"
LIST = Path(__file__).with_name("mutants.toml")
AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str

    def put_into(self, root: Path) -> None:
        path = root / self.file
        path.write_text(self.mutated(path.read_text(encoding="utf-8")), encoding="utf-8")

    def mutated(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times; mend mutants.toml.")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


def table(outcomes: list[tuple[Mutant, Outcome]]) -> str:
    lines = [
        "# Small defects that the tests catch",
        "",
        f"Written by `python tests/mutants/run.py` at {commit()}, {time.strftime('%Y-%m-%d')}: "
        f"{len(outcomes)} defects, {sum(not o.killer for _, o in outcomes)} survived.",
        "",
        "| defect | where | caught by |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {mutant.name} | `{mutant.file}` | {o.killer or '**nothing**'} |" for mutant, o in outcomes]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    outcomes: list[tuple[Mutant, Outcome]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trials = [pool.submit(tried, mutant.put_into, [mutant.tests.split()]) for mutant in chosen]
        for number, (mutant, trial) in enumerate(zip(chosen, trials, strict=True), 1):
            outcomes.append((mutant, trial.result()))
            told = trial.result().killer or "SURVIVED"
            print(f"{number}/{len(chosen)} {mutant.name}: {told} ({trial.result().seconds:.0f} s)", flush=True)
    if not words:
        RESULT.write_text(table(outcomes), encoding="utf-8")
    sys.exit(any(not outcome.killer for _, outcome in outcomes))


if __name__ == "__main__":
    main()
