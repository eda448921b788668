"""A copy of the sources with a defect in it, and the first test that fails there. The tree itself stays as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from towpath.codecs.kernels import _native

ROOT = Path(__file__).parents[2]
MINUTES = 15

# The interpreter's first words: the package from the copy, also in the processes that tests start.
_SITE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, {source!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    killer: str  # "" for a survivor
    seconds: float


def tried(put_into: Callable[[Path], None], stages: Sequence[Sequence[str]]) -> Outcome:
    """`put_into(root)` changes the copy at `root`. Each stage is what pytest is called with, the next if all pass."""
    with tempfile.TemporaryDirectory(prefix="towpath-mutant-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        extension = Path(str(_native.__file__))
        shutil.copy(extension, copy / "src" / "towpath" / "codecs" / "kernels" / extension.name)
        put_into(copy)
        (copy / "site").mkdir()
        (copy / "site" / "sitecustomize.py").write_text(_SITE.format(source=str(copy / "src")))
        began = time.monotonic()
        killer = next(filter(None, (_first_failure(copy, tests) for tests in stages)), "")
        return Outcome(killer=killer, seconds=time.monotonic() - began)


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
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
    if ended.returncode in (1, 2) and failed:  # 2: a file of tests cannot be imported
        return failed[1]
    if "ImportError while loading conftest" in ended.stderr:
        return "the import of what the tests use"
    raise SystemExit(f"pytest could not run ({ended.returncode}):\n{ended.stdout[-3000:]}\n{ended.stderr[-2000:]}")


def commit() -> str:
    described = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
