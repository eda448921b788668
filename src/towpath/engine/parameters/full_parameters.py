"""`unshard()` and `reshard()` of a model, or of some of its units, with the user's writes in between.

Every rank writes to its own unsharded copy, and keeps the slices that it holds. Different writes on different ranks
would leave a mix of them. At `reshard()` the ranks therefore compare two checksums for each parameter: one from
before the writes, and one from after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from towpath.core.queues import LoggedCall
from towpath.engine.executor import Engine
from towpath.engine.parameters.checksum import checksum
from towpath.engine.parameters.unit import Unit
from towpath.errors import ShardError, StepError
from towpath.topology.together import together


def units_of(engine: Engine, model: nn.Module, modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that hold the parameters of `modules`, and with the root its leaves. Every rank must call it."""
    call = "full_parameters()"
    # Before the modules are compared, so that a rank that does not make the call is named.
    engine.comm.program.meet(call)
    with together(engine.comm.groups, call, "Name the same modules on every rank.") as lines:
        known, modules = set(model.modules()), list(modules)
        stranger = next((module for module in modules if module not in known), None)
        if stranger is not None:
            raise ShardError(
                f"full_parameters(modules=): expected modules of the model, got a {type(stranger).__name__} that is "
                "none of them. Take them from the model, as model.layers[0], say."
            )
        inside = {id(m) for module in modules for m in module.modules()}
        found = [unit for unit in engine.units if any(id(owner) in inside for owner in unit.shown.owners)]
        if engine.root in found:
            found += [leaf for leaf in engine.leaves if leaf not in found]
        lines += [repr(unit.name or "root") for unit in found]
    return found


def unshard(engine: Engine, units: Sequence[Unit] | None = None) -> list[Unit]:
    """Unshard `units`, by default all, until `reshard`. Return those that were not unsharded before."""
    engine.begin()
    made = [u for u in (engine.units if units is None else units) if not engine.machine.is_kept_unsharded(u.index)]
    with engine.comm.program.shared("full_parameters()", LoggedCall.PROGRAM):
        engine.param_sync()
        for unit in made:
            # Memory of its own: a slot would be given to the next unit.
            engine.execute(engine.machine.keep_unsharded(unit.index))
            for bucket in unit.buckets:
                bucket.remember()
            unit.checksums = checksums(unit)
        try:
            engine.param_syncs.raise_problems(together=True)
        except BaseException:
            for unit in made:
                engine.execute(engine.machine.allow_reshard(unit.index))
            raise
    return made


def reshard(engine: Engine, modifier_rank: int | None = None, units: Sequence[Unit] | None = None) -> None:
    """Undo `unshard`, and take over the writes to the unsharded parameters.

    `modifier_rank`: The rank whose writes all ranks take over. By default, all ranks must have written the same.

    Raises:
        StepError: Ranks wrote different values. The writes are not taken over.
    """
    kept = [unit for unit in engine.kept_unsharded if units is None or unit in units]
    if not kept:
        return
    # A save in the background may still read the parameters.
    engine.tell_before_rewrite()
    # If the optimizer has stepped since `unshard`, the unsharded parameters are outdated and must not be taken over.
    current = [unit for unit in kept if engine.machine.is_whole(unit.index)]
    try:
        with torch.no_grad():
            if modifier_rank is not None:
                # The buffers have one order on all ranks, which the broadcasts need.
                for bucket in (bucket for unit in current for bucket in unit.buckets):
                    engine.comm.groups.broadcast(bucket.full, modifier_rank)
            else:
                _compare(engine, current)
            for unit in current:
                for bucket in unit.buckets:
                    bucket.write_back()
    finally:
        for unit in kept:
            engine.execute(engine.machine.allow_reshard(unit.index))
            unit.shown.note_versions()


def _compare(engine: Engine, units: list[Unit]) -> None:
    """Raise `StepError` on every rank if ranks wrote different values to a parameter."""
    groups = engine.comm.groups
    if groups.world == 1 or not units:
        return
    mine = torch.cat([torch.stack([u.checksums, checksums(u)]) for u in units], dim=1)
    program = engine.comm.program
    with program.shared("the end of full_parameters()", LoggedCall.PROGRAM):
        everyones = groups.gather_rows(mine, program.wait)  # [ranks, before and after, parameters]
    before, after = everyones[:, 0], everyones[:, 1]
    # Where replicas differed in their last bits before, equal values cannot be expected afterwards. They must still
    # agree on whether the parameter was written to.
    alike = torch.where(before == before[:1], after == after[:1], (before == after) == (before == after)[:1])
    if bool(alike.all()):
        return
    rank, index = (int(i) for i in (~alike).nonzero()[0])
    names = [place.names[0] for unit in units for place in unit.layout.places]
    written = [groups.first + r for r in range(groups.world) if before[r, index] != after[r, index]]
    raise StepError(
        f"rank {groups.number}: parameter {names[index]!r} was written while it was unsharded, and not with the same "
        f"values on every rank: rank {', '.join(map(str, written))} changed it, and rank {groups.first + rank} has "
        f"other values than rank {groups.first}. None of it is taken over, except with ddp and zero1. Write the same "
        "on every rank, or name the rank whose values all take over: full_parameters(model, modifier_rank=0)."
    )


def checksums(unit: Unit) -> torch.Tensor:
    """Return a checksum for each parameter of an unsharded unit, in a tensor of shape [parameters]."""
    # A checksum depends on each bit of the parameter, and on the order of its elements.
    parts = [place.of(bucket.full) for bucket in unit.buckets for place in bucket.layout.places]
    each = [checksum(part.detach().reshape(-1)) for part in parts]
    return torch.stack(each).cpu() if each else torch.zeros(0, dtype=torch.int64)
