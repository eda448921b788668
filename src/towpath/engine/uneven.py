"""Uneven data: some ranks may have fewer batches than others.

Such a rank repeats its last batch, with gradients that count as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from towpath.core.collective_log import Call
from towpath.engine.executor import Engine
from towpath.errors import StepError

Batch = TypeVar("Batch")

_HAS_NONE, _REPEATS, _HAS_ONE = 0, 1, 2


def joined(engine: Engine, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield as many batches on every rank as the rank with the most batches has.

    A rank without further batches must still take part in the transfers of the others. It gets its last batch again.
    Raise StepError if a rank has no batch at all.
    """
    groups, program, source = engine.comm.groups, engine.comm.program, iter(batches)
    last: list[Batch] = []
    while True:
        found = list(islice(source, 1))
        mine = _HAS_ONE if found else _REPEATS if last else _HAS_NONE
        last = found or last
        with program.shared("join()", Call.PROGRAM):
            everyones = groups.gather_rows(torch.tensor([mine]), program.wait).flatten().tolist()
        if _HAS_ONE not in everyones:
            return
        if _HAS_NONE in everyones:
            raise StepError(
                f"rank {groups.rank}: rank {everyones.index(_HAS_NONE)} has no batch at all, and cannot repeat its "
                "last one while the others train. Give every rank at least one batch."
            )
        engine.muted = mine == _REPEATS
        try:
            yield last[0]
        finally:
            engine.muted = False
