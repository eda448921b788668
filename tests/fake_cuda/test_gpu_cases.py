"""The cases of `make gpu` on real ranks with the fake device: what they train is what one process trains."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from tests.fake_cuda.ranks import gpu_ranks
from tests.fake_cuda.runtime import DEVICE
from tests.gpu import on_ranks as cases
from tests.gpu.case import Case
from tests.ranks.server import Worlds, _on_gpu
from tests.ranks.strategies import seldom

# Those of `make test`. `make parity` runs all that need neither a true device nor its compiler.
FEW = ("zero3, float64", "exact paro-iig, bf16")
COMPILER = "torch.compile and activation checkpointing"

CASES = {
    case.name: case
    for case in (*cases.ON_FOUR, *cases.ON_FEWER, *cases.ON_ONE)
    if "cuda" not in case.needs and not (case.feature == COMPILER and "compiled" in case.name)
}


@pytest.mark.parametrize("name", [name if name in FEW else seldom(name) for name in CASES])
def test_a_case_passes(world: Worlds, tmp_path: Path, name: str) -> None:
    world(CASES[name].ranks or 1).run(_perform, CASES[name], str(tmp_path))


def _perform(case: Case, folder: str) -> None:
    _train_on_gpus()
    with gpu_ranks(), warnings.catch_warnings(action="ignore"):
        case.call(folder)


@cache
def _train_on_gpus() -> None:
    """Let what tests of this rank build be on the device, as on a machine with a GPU (tests/ranks/server.py)."""
    for name, module in list(sys.modules.items()):
        found: Any = getattr(module, "DEVICE", None)
        if name.startswith("tests.") and isinstance(found, torch.device):
            module.DEVICE = DEVICE  # pyright: ignore[reportAttributeAccessIssue]
    towpath.shard = _on_gpu(towpath.shard)
