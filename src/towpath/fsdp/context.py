"""What happens around each step of an optimizer: ranks compare what they have submitted, and send what it has changed.

Units send their shards right after the step, in the order of the forward pass. So weights cross nodes while the layers
before them compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towpath.fsdp.fields import parameters_of
from towpath.fsdp.peers import Peers
from towpath.fsdp.unit import WiredUnit

_active: WeakSet[WiredRanks] = WeakSet()
_watches = False


@final
class WiredRanks:
    """The wires of one model over one process group, on one rank.

    `parameters` returns the parameters whose gradients are reduced over the group. `units` are the modules that gather
    over it, in their order in the model.
    """

    def __init__(
        self, peers: Peers, parameters: Callable[[], Iterable[torch.Tensor]], units: Sequence[WiredUnit] = ()
    ) -> None:
        self.peers, self.units, self._parameters = peers, units, parameters
        _watch_optimizers()
        _active.add(self)

    def before_step(self, stepped: set[int]) -> None:
        """Compare with all ranks what they have submitted, if parameters with these ids will be stepped."""
        if any(id(each) in stepped for each in self._parameters()):
            self.peers.compare(problem for unit in self.units for problem in unit.problems())

    def after_step(self, stepped: set[int]) -> None:
        """Send the shards of units that have parameters with these ids."""
        changed = (u for u in self.units if any(id(each.sharded_param) in stepped for each in parameters_of(u.module)))
        for unit in [unit for unit in changed if unit.take_shard()]:
            unit.send()

    def leave(self) -> None:
        """Wait for all transfers, and no longer watch optimizers."""
        self.peers.comm.queues.finish()
        _active.discard(self)


def _watch_optimizers() -> None:
    global _watches
    if not _watches:
        _watches = True
        register_optimizer_step_pre_hook(lambda optimizer, *_: _each(WiredRanks.before_step, optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: _each(WiredRanks.after_step, optimizer))


def _each(call: Callable[[WiredRanks, set[int]], Any], optimizer: Optimizer) -> None:
    # A parameter without a gradient is not stepped. All ranks agree on which have one, as they reduce them together.
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for each in sorted(_active, key=lambda wired: wired.peers.comm.log.model):
        call(each, stepped)
