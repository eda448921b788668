"""Hooks around each step of an optimizer: ranks compare what they have submitted, and send what it has changed.

Units send their shards right after the step, in the order of the forward pass. So weights cross nodes while the layers
before them compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, final
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towpath.collectives.collective import Workspace
from towpath.core.schedule import over_all_ranks
from towpath.core.strategy import TransferKind
from towpath.engine.optimizer_steps import note_step
from towpath.errors import StepError
from towpath.fsdp.fields import parameters_of
from towpath.fsdp.peers import Peers
from towpath.fsdp.wired_unit import WiredUnit

_active: WeakSet[WiredRanks] = WeakSet()
_watches = False
_made = count()


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
        # Ranks compare over their groups in the order in which they made them, which is the same on all ranks.
        self.number = next(_made)
        self._sizes = peers.comm.bind(
            over_all_ranks(peers.strategy, TransferKind.MESSAGE_SIZES, 2 * len(units), "int64")
        )
        _watch_optimizers()
        _active.add(self)

    def before_step(self, optimizer: Optimizer, stepped: set[int]) -> None:
        """Compare with all ranks what they have submitted, if `optimizer` will step parameters with these ids."""
        names = {id(each): str(number) for number, each in enumerate(self._parameters())}
        if not stepped.isdisjoint(names):
            note_step(optimizer, names, self.peers.comm.log)
            self._compare()

    def after_evaluation(self) -> None:
        """Compare with all ranks what they have submitted in a forward pass that no optimizer step may follow.

        Its gathers stay inside the nodes. If only one node's weights were written, the others would not notice.
        """
        if self.units:
            self._compare(ends_step=False)
        if any(unit.drifted is not None for unit in self.units):
            self._agree(())

    def _compare(self, ends_step: bool = True) -> None:
        self.peers.compare((problem for unit in self.units for problem in unit.problems()), ends_step)

    def after_step(self, optimizer: Optimizer, stepped: set[int]) -> None:
        """Send the shards of units that have parameters with these ids."""
        changed = (u for u in self.units if any(id(each.sharded_param) in stepped for each in parameters_of(u.owner)))
        sending = [unit for unit in changed if unit.take_shard()]
        if sending:
            self._agree(sending)
        for unit in sending:
            unit.send()

    def _agree(self, sending: Sequence[WiredUnit]) -> None:
        """Encode shards, agree with all ranks on the sizes of messages, and learn of weights written through `.data`.

        The host waits here, once in a step, and after an evaluation.
        """
        comm, units = self.peers.comm, self.units
        encoding = [weights for unit in sending if (weights := unit.encoding) is not None]
        sizes = torch.zeros(2 * len(units), dtype=torch.int64, pin_memory=comm.device.type == "cuda")

        def read(_: Workspace) -> None:
            for number, unit in enumerate(units):
                size = None if unit.encoding is None else unit.encoding.sync.collective.encoded_size
                if size is not None:
                    sizes[number : number + 1].copy_(size, non_blocking=True)
                if unit.drifted is not None:
                    sizes[len(units) + number].copy_(unit.drifted, non_blocking=True)

        comm.queues.submit(TransferKind.PARAM_SYNC, (), [*(each.encode for each in encoding), read]).wait(on_host=True)

        def combine(workspace: Workspace) -> None:
            for transfer in self._sizes:
                transfer.run(sizes, sizes, workspace)

        comm.queues.submit(TransferKind.MESSAGE_SIZES, self._sizes, [combine]).wait()
        told = sizes.tolist()
        drifted = [unit.name or "root" for unit, has in zip(units, told[len(units) :], strict=True) if has]
        if drifted:
            raise StepError(
                f"rank {comm.number}: on some rank the weights of {', '.join(drifted)} were written through `.data`, "
                "which PyTorch does not count, so all ranks have computed with the weights of before. Write to "
                "parameters inside torch.no_grad(), without `.data`. If a library writes, call p.mul_(1) afterwards, "
                "for each parameter and inside torch.no_grad()."
            )
        for unit, size in zip(units, told, strict=False):
            if unit in sending and (weights := unit.encoding) is not None:
                weights.sync.collective.agreed_size = size

    def leave(self) -> None:
        """Wait for all transfers, and no longer watch optimizers."""
        self.peers.comm.queues.finish()
        _active.discard(self)


def _watch_optimizers() -> None:
    global _watches
    if not _watches:
        _watches = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(partial(_each, WiredRanks.after_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare before the step. If a closure makes the forward and backward passes, compare after these."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first argument is the optimizer
    if not (_active and callable(closure)):
        return _each(WiredRanks.before_step, optimizer)

    def compared() -> Any:
        loss = closure()
        _each(WiredRanks.before_step, optimizer)
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": compared}
    return (*args[:1], compared, *args[2:]), kwargs


def _each(call: Callable[[WiredRanks, Optimizer, set[int]], Any], optimizer: Optimizer, *_: Any) -> None:
    # A parameter without a gradient is not stepped. All ranks agree on which have one, as they reduce them together.
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for each in sorted(_active, key=lambda wired: wired.number):
        call(each, optimizer, stepped)
