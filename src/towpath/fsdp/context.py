"""All units of a model over one process group, and what happens around each step of an optimizer.

Before a step, the ranks compare what each of them has submitted since the last one. After it, the units whose
parameters it has stepped send their shards, in the order of the forward pass. So weights cross nodes while the layers
before them compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towpath.collectives.collective import Workspace
from towpath.core.schedule import unused_params_transfers
from towpath.core.scopes import LoggedCall
from towpath.core.strategy import TransferKind
from towpath.fsdp.unit import Peers, WiredUnit, parameters_of

_ACTIVE: WeakSet[WiredGroup] = WeakSet()


@final
class WiredGroup:
    """The units of one model over one process group, on one rank. `units` are in the order of the modules."""

    def __init__(self, peers: Peers, units: Sequence[WiredUnit]) -> None:
        self.peers, self.units = peers, units
        comm, log = peers.comm, peers.comm.log
        self._compared = comm.bind(unused_params_transfers(peers.strategy, 1, log.bytes))
        if not _ACTIVE:
            watch_optimizers()
        _ACTIVE.add(self)

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare with all ranks what they have submitted, if `optimizer` steps parameters of a unit."""
        if self._stepped_by(optimizer):
            self.compare()

    def compare(self) -> None:
        """Raise StepError on every rank if one has submitted other transfers, or could not decode a message."""
        comm = self.peers.comm
        for unit in self.units:
            if unit.sync is not None:
                for problem in unit.sync.collective.problems():
                    comm.log.note(LoggedCall.UNDECODED, str(unit.sync.transfer), ((("problem", problem),),))
        told = torch.tensor([0, *comm.log.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._compared:
                transfer.run(told, told, workspace)

        comm.queues.submit(TransferKind.UNUSED_PARAMS, self._compared, [combine]).wait()
        comm.log.check(bytes(told.tolist()[1:]), comm.groups.gather_objects)
        comm.record.end_step()
        comm.watchdog.status.step += 1

    def after_step(self, optimizer: Optimizer) -> None:
        """Send the shards that `optimizer` has stepped."""
        sending = [unit for unit in self._stepped_by(optimizer) if unit.take_shard()]
        for unit in sending:
            unit.send()

    def _stepped_by(self, optimizer: Optimizer) -> list[WiredUnit]:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        return [u for u in self.units if any(id(each.sharded_param) in stepped for each in parameters_of(u.module))]

    def leave(self) -> None:
        """Stop to watch optimizers, after all transfers have ended."""
        self.peers.comm.queues.finish()
        _ACTIVE.discard(self)


_is_watching = False


def watch_optimizers() -> None:
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_steps)
        register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_ACTIVE):
        each.before_step(optimizer)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_ACTIVE):
        each.after_step(optimizer)
