"""A copy of the sources with a defect in it, and the first test that fails there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.mutants.locate import Mutant, NotFoundError

ROOT = Path(__file__).parents[2]
MINUTES = 15
CAUGHT, SURVIVED, NOT_FOUND, BROKEN = "caught", "survived", "not found", "broken"

# `sitecustomize.py` of the copy: every Python process of a test imports the package from the copy.
_SITE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, {source!r})
"""


class BrokenError(Exception):
    """The tests of a mutant say nothing about it: pytest could not run, or they fail without the defect, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: str
    detail: str  # the test that failed, or why there is none
    seconds: float


def tried(mutant: Mutant) -> Outcome:
    """Run the tests of `mutant` on a copy with the defect. The sources themselves stay as they are."""
    began = time.monotonic()
    try:
        with copied() as copy:
            mutant.put_into(copy)
            failed = _first_failure(copy, mutant.tests)
        if failed:
            _check_without_defect(mutant, failed)
        status, detail = (CAUGHT, failed) if failed else (SURVIVED, "")
    except NotFoundError as error:
        status, detail = NOT_FOUND, str(error)
    except BrokenError as error:
        status, detail = BROKEN, str(error)
    return Outcome(status=status, detail=detail, seconds=time.monotonic() - began)


@contextmanager
def copied() -> Iterator[Path]:
    """Provide a temporary copy of what the tests need, with the C++ extension that is installed."""
    with tempfile.TemporaryDirectory(prefix="towpath-mutant-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "docs", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy / name)
        extension = find_spec("towpath.codecs.kernels._native")
        if extension is not None and extension.origin is not None:
            shutil.copy(extension.origin, copy / "src" / "towpath" / "codecs" / "kernels")
        (copy / "site").mkdir()
        (copy / "site" / "sitecustomize.py").write_text(_SITE.format(source=str(copy / "src")))
        yield copy


def _check_without_defect(mutant: Mutant, failed: str) -> None:
    """Raise `BrokenError` if the test that failed also fails without the defect."""
    if "::" in failed:
        again = [failed]
    elif failed.startswith("tests/"):  # a file that could not be imported
        again = ["--collect-only", failed]
    else:
        again = mutant.tests
    with copied() as copy:
        if _first_failure(copy, again):
            raise BrokenError(f"fails without the defect, too: {failed}")


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails, without its parameters, or '' if all pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # With CI set, the tests would require tools that a copy may lack.
    environment = {**os.environ, "PYTHONPATH": str(copy / "site"), "CI": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pytest = subprocess.Popen(command, cwd=copy, env=environment, text=True, start_new_session=True, **streams)
    try:
        output, _ = pytest.communicate(timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return f"no end within {MINUTES} minutes"
    finally:
        if pytest.poll() is None:  # the ranks that a test started end with it
            os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()
    if pytest.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    if pytest.returncode in (1, 2) and found:  # 2: a test file could not be imported
        return found[1]
    if "ImportError while loading conftest" in output:
        return "import of conftest.py"
    raise BrokenError(f"pytest ended with status {pytest.returncode}: {' '.join(output.split()[-40:])}")
