"""On a rank of the tests' own server: what torchrun would have set, for frameworks that look there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor


@contextmanager
def launched(**more: str) -> Generator[int]:
    """Inside, frameworks find themselves on one node of all ranks. Their warnings are theirs.

    `more`: variables of the environment beside torchrun's, `ACCELERATE_USE_CPU="true"` unless given.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    ours = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # the process group is there already: nobody listens, nobody asks
        "TORCHELASTIC_RUN_ID": "tests",
        **(more or {"ACCELERATE_USE_CPU": "true"}),
    }
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forget()
            yield int(rank)
    finally:
        os.environ.clear()
        os.environ.update(before)


def forget() -> None:
    """Accelerate keeps what it found out for the whole process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-9) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= limit, name
