"""`towpath bench` in a job: a candidate that fails on one rank while others wait for it, or on all ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from lab.runs import as_rank
from tests.ranks.server import run_commands
from tests.ranks.strategies import seldom
from towpath import comparison
from towpath.cli.main import main

# The first losses of the second round, which measures in reverse order. A measurement has seven steps.
SECOND_LOSS = {"torch-ddp": 15, "zero3": 22}


def run(failing: str, loss: int) -> list[tuple[int, str, str]]:
    """Return the exit code and the output of both ranks."""
    words = "bench zero3 --peers torch-ddp --model tiny --length 8 --batch 1 --rounds 2"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_commands(_run_bench, [as_rank(rank, 2, store.port) for rank in range(2)], failing, loss, words)


def _run_bench(ranks: str, number: int, words: str) -> None:
    compute, calls = F.cross_entropy, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if os.environ["RANK"] in ranks and calls == number:
            raise ValueError("a loss that fails")
        return compute(*args)

    F.cross_entropy = failing
    comparison.MODELS["tiny"] = (64, 1, 2048)
    sys.argv[1:] = words.split()
    main()


@pytest.mark.parametrize("candidate", ["torch-ddp", seldom("zero3")])
def test_a_failure_on_one_rank_ends_bench_on_all(candidate: str) -> None:
    found = run("1", SECOND_LOSS[candidate])
    assert [code for code, _, _ in found] == [1, 1], found
    assert f"{candidate}: rank 1: ValueError: a loss that fails. Other ranks waited there" in found[1][2]
    assert all(name in found[0][1] for name in ("zero3", "torch-ddp")) and not found[1][1]
