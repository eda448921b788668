"""Puts small defects into the sources, one at a time, and shows that a test fails: `mutants.toml` lists them.

    python tests/mutants/run.py [WORD …]    those whose name has one of the words; all, if none is given

Each runs in a copy of the sources, so that the tree stays as it is. A defect that no test notices is a survivor: the
exit status is then 1. The result is written to tests/mutants.md when all were run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from towpath.codecs.kernels import _native

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tests" / "mutants.md"
LIST = Path(__file__).with_name("mutants.toml")
MINUTES = 10

# The interpreter's first words: the package from the copy, also in the processes that tests start.
_SITE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, {source!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str

    def put_into(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.name}: {self.file} has its text {text.count(self.old)} times; mend mutants.toml.")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    mutant: Mutant
    killer: str  # "" for a survivor
    seconds: float


def tried(mutant: Mutant) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="towpath-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        extension = Path(str(_native.__file__))
        shutil.copy(extension, copy / "src" / "towpath" / "codecs" / "kernels" / extension.name)
        mutant.put_into(copy)
        (copy / "site").mkdir()
        (copy / "site" / "sitecustomize.py").write_text(_SITE.format(source=str(copy / "src")))
        began = time.monotonic()
        killer = _first_failure(copy, mutant.tests.split())
        return Outcome(mutant=mutant, killer=killer, seconds=time.monotonic() - began)


def _first_failure(copy: Path, tests: list[str]) -> str:
    """The first test that fails, or '' if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "site"), "CI": ""}
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=60 * MINUTES, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {MINUTES} minutes"
    if ended.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if ended.returncode != 1 or failed is None:
        raise SystemExit(f"pytest could not run ({ended.returncode}):\n{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}")
    return failed[1]


def mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


def table(outcomes: list[Outcome], commit: str) -> str:
    lines = [
        "# Small defects that the tests catch",
        "",
        f"Written by `python tests/mutants/run.py` at {commit}, {time.strftime('%Y-%m-%d')}: "
        f"{len(outcomes)} defects, {sum(not o.killer for o in outcomes)} survived.",
        "",
        "| defect | where | caught by |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {o.mutant.name} | `{o.mutant.file}` | {o.killer or '**nothing**'} |" for o in outcomes]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    outcomes: list[Outcome] = []
    for number, mutant in enumerate(chosen, 1):
        outcomes.append(tried(mutant))
        told = outcomes[-1].killer or "SURVIVED"
        print(f"{number}/{len(chosen)} {mutant.name}: {told} ({outcomes[-1].seconds:.0f} s)", flush=True)
    if not words:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        RESULT.write_text(table(outcomes, commit.stdout.strip()), encoding="utf-8")
    sys.exit(any(not o.killer for o in outcomes))


if __name__ == "__main__":
    main()
