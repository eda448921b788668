"""The cases of tools/gpu.py, a test each. One run of the script tries all that were selected. Skipped without CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.cases import CASES
from tests.session.record import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.compiles,  # all kernels, from cold
]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each case ended, by name."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    mine = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    only = [each for item in mine for each in ("--only", item.callspec.params["case"].name)]
    subprocess.run([sys.executable, str(ROOT / "tools/gpu.py"), "--out", str(folder), *only])
    lines = map(json.loads, (folder / "cases.jsonl").read_text().splitlines())
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(case: Any, ended: dict[str, dict[str, Any]]) -> None:
    assert case.name in ended, "the case was not reached"
    found = ended[case.name]
    if found["outcome"] == "skipped":
        pytest.skip(found["error"])
    assert found["outcome"] == "passed", found["error"]
