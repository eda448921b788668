"""The sessions of the tests themselves: what is required and missing ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.record import ROOT


def _pytest(folder: Path, test: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A session of its own with our hooks, in a folder that holds one file of tests."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_it.py").write_text(test)
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), *options, str(folder)]
    environment = {**kept, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_what_is_required_and_missing_ends_a_session_before_its_first_test(tmp_path: Path) -> None:
    """An extension that cannot be imported, on a machine that says it is continuous integration."""
    hidden = "import sys\nsys.modules['towpath.codecs.kernels.cpp_codecs'] = None\n"
    test = "def test_it():\n    print('it ran')\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    ended = _pytest(tmp_path, test, "-n", "0", "--may-miss", "lab,triton", CI="true", PYTHONPATH=path)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "native is required and missing: the C++ extension was not built" in ended.stderr
    assert "passed" not in ended.stdout
    went_on = _pytest(tmp_path, test, "-n", "0", "--may-miss", "native,lab,triton", CI="true", PYTHONPATH=path)
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
