"""A model, or some of its units, whole on every rank for a while: `unshard()`, and what `reshard()` keeps of the
user's writes.

Every rank writes to a copy of its own, and keeps of it the slices that it holds. What ranks wrote differently would be
kept in parts, from each rank its own: so they compare, for every parameter, a checksum of before and one of after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from towpath.core.journal import Call
from towpath.engine.build import agree
from towpath.engine.executor import Engine
from towpath.engine.parameters.unit import Unit
from towpath.errors import ShardError, StepError, TowpathError

_ROW = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def units_of(engine: Engine, model: nn.Module, modules: Iterable[nn.Module]) -> list[Unit]:
    """The units in which the parameters of `modules` lie. Every rank must ask for the same."""
    engine.wiring.record.peers.come_together("full_parameters()")
    failure: TowpathError | None = None
    known, modules = set(model.modules()), list(modules)
    stranger = next((module for module in modules if module not in known), None)
    if stranger is not None:
        failure = ShardError(
            f"full_parameters(modules=): expected modules of the model, got a {type(stranger).__name__} that is none "
            "of them. Take them from the model, as model.layers[0], say."
        )
    inside = {id(m) for module in modules for m in module.modules()}
    found = [unit for unit in engine.units if any(id(owner) in inside for owner in unit.owners)]
    asked = [repr(unit.name or "root") for unit in found]
    agree(engine.wiring.groups, asked, failure, "full_parameters()", "Name the same modules on every rank.")
    return found


def unshard(engine: Engine, units: Sequence[Unit] | None = None) -> list[Unit]:
    """Make `units`, or all, whole, each in memory of its own, until `reshard`; which of them were not yet."""
    engine.begin()
    made = [u for u in (engine.units if units is None else units) if not engine.machine.is_pinned(u.index)]
    with engine.wiring.program.shared("full_parameters()", Call.PROGRAM):
        engine.execute(engine.machine.publish())
        for unit in made:
            engine.execute(engine.machine.pin(unit.index))
            for bucket in unit.buckets:
                bucket.remember()
            unit.checksums = checksums(unit)
    return made


def reshard(engine: Engine, modifier_rank: int | None = None, units: Sequence[Unit] | None = None) -> None:
    """Undo `unshard` of `units`, or of all, and take over what was written to the whole parameters meanwhile; by
    `modifier_rank` alone, if one is named."""
    pinned = [unit for unit in engine.pinned if units is None or unit in units]
    if not pinned:
        return
    engine.tell_before_rewrite()
    # Where the optimizer has stepped meanwhile, what is whole is old.
    current = [unit for unit in pinned if engine.machine.is_whole(unit.index)]
    try:
        with torch.no_grad():
            if modifier_rank is not None:
                _take_from(engine, current, modifier_rank)
            else:
                _compare(engine, current)
            for unit in current:
                for bucket in unit.buckets:
                    bucket.write_back()
    finally:
        for unit in pinned:
            engine.execute(engine.machine.unpin(unit.index))
            unit.note_versions()


def _take_from(engine: Engine, units: list[Unit], rank: int) -> None:
    for unit in units:
        for bucket in unit.buckets:
            engine.wiring.groups.broadcast(bucket.full, rank)


def _compare(engine: Engine, units: list[Unit]) -> None:
    """Raise, on every rank, where one wrote to a parameter what another one did not."""
    groups = engine.wiring.groups
    if groups.world == 1 or not units:
        return
    mine = torch.cat([torch.stack([u.checksums, checksums(u)]) for u in units], dim=1)
    program = engine.wiring.program
    with program.shared("the end of full_parameters()", Call.PROGRAM):
        everyones = groups.gather_rows(mine, program.wait)  # [ranks, before and after, parameters]
    before, after = everyones[:, 0], everyones[:, 1]
    # Replicas may differ in their last bits from the start; they must still agree on whether it was written to.
    alike = torch.where(before == before[:1], after == after[:1], (before == after) == (before == after)[:1])
    if bool(alike.all()):
        return
    rank, index = (int(i) for i in (~alike).nonzero()[0])
    names = [place.names[0] for unit in units for bucket in unit.buckets for place in bucket.layout.places]
    written = [r for r in range(groups.world) if before[r, index] != after[r, index]]
    raise StepError(
        f"rank {groups.rank}: parameter {names[index]!r} was written while it was whole, and not alike on every rank: "
        f"rank {', '.join(map(str, written))} changed it, and rank {rank} has other values than rank 0. None of "
        "it is taken over; where every rank holds the parameter whole anyway (ddp, zero1), the writes stand, and the "
        "model must be built anew. Write the same on every rank, or name the rank whose values all take over: "
        "full_parameters(model, modifier_rank=0)."
    )


def checksums(unit: Unit) -> torch.Tensor:
    """Of every parameter of a unit that is whole: [parameters]. Depends on every bit, and on the order of elements."""
    parts = [place.of(bucket.full) for bucket in unit.buckets for place in bucket.layout.places]
    return torch.stack([_checksum(part) for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    bits = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    total = torch.zeros((), dtype=torch.int64)
    for number, sums in enumerate((rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.long())):
        weights = torch.arange(1, sums.numel() + 1, device=sums.device) * 2 + number
        total += (sums * weights).sum().cpu() * (2 * number + 1)
    return total
