"""Runs the step of an optimizer that needs full matrices: slices are sent to their owners, and back afterwards.

`core/owner_stepped.py` decides the order. This rank has two kinds of memory:

    memory   per dtype   [rounds in flight, gradients and weights, room]   matrices that this rank owns, gathered
    pieces               slices of gradients and parameters, sent and received in their own memory
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from towpath.core.owner_stepped import ROUNDS_IN_FLIGHT, Iterate, Round, plan_matrices, step_actions
from towpath.core.step_state import Submit, Task, Wait
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import OwnedMatrix
from towpath.engine.executor import Engine
from towpath.engine.layout import torch_dtype, trainable_places
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.transfer_queues import Handle, RankTransfer, Work
from towpath.errors import CheckpointError, StepError


@dataclass(frozen=True, slots=True)
class FullMatrix:
    """A full parameter and its gradient on the rank that owns it. The memory is valid during its round."""

    name: str
    weight: torch.Tensor
    gradient: torch.Tensor | None


Iteration = Callable[[Sequence[FullMatrix]], None]


class MatrixSteps:
    """The steps of one optimizer's matrices for one model, on this rank. `OwnerSteppedOptimizer` holds them.

    Every rank must construct it with the same arguments, because it makes process groups.
    """

    def __init__(self, engine: Engine, wanted: Collection[int], gradients: Transport) -> None:
        places = trainable_places(unit.layout for unit in engine.units)
        chosen = [(parameter, place.parameter) for parameter, place in places if id(place.parameter) in wanted]
        self._engine, self._comm = engine, engine.comm
        self.parameters = {parameter.name: cast(ShardTensor, tensor) for parameter, tensor in chosen}
        self.plan = plan_matrices(
            engine.strategy, [unit.plan for unit in engine.units], [parameter for parameter, _ in chosen], gradients
        )
        self._slot = engine.strategy.moves.optimizer.slots[engine.comm.rank]
        self._bound: dict[Transfer, RankTransfer] = {}
        # All ranks bind all transfers now, in one order, because binding makes process groups.
        for transfer in self.plan.transfers():
            self._bind(transfer)
        self._memory: dict[str, torch.Tensor] = {}
        self._all = frozenset(self.parameters)
        self._owned = {m.name for each in self.plan.rounds for m in each.owned(self._slot)}
        engine.matrix_steps.add(self)

    def owns_parameter(self, parameter: torch.Tensor) -> bool:
        return any(p is parameter and name in self._owned for name, p in self.parameters.items())

    @property
    def is_spread(self) -> bool:
        """True if different ranks own different parameters."""
        return self._engine.strategy.moves.optimizer.count > 1

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def run(self, iterate: Iteration, gradients: bool = True) -> None:
        """Run one step: gather matrices on their owners, call `iterate`, and send the updates back.

        `iterate`: Called for each round with the matrices that this rank owns. It updates their weights in place.
        `gradients`: Whether gradients are sent too. If True, the step covers the parameters that have a gradient. If
        False, it covers all parameters, as a call of the optimizer's `eval()` does.
        """
        # If `iterate` raises, this rank first takes part in the remaining transfers, for which other ranks wait.
        # Allocated in the first step, so that an optimizer that is only loaded takes no memory.
        if not self._memory:
            self._memory = {
                dtype: torch.empty(ROUNDS_IN_FLIGHT, 2, room, dtype=torch_dtype(dtype), device=self._comm.device)
                for dtype, room in self.plan.room.items()
                if room
            }
        names = frozenset(name for name, p in self.parameters.items() if p.grad is not None) if gradients else self._all
        versions = [version for name in names if (version := self.parameters[name].version) is not None]
        for version in versions:
            # A parameter sync with offload may still read the weights that this step overwrites.
            version.wait_for_read()
        rounds = self.plan.step(None if names == self._all else names)
        failure: BaseException | None = None
        for action in step_actions(self.plan, rounds, gradients):
            match action:
                case Submit(task):
                    task.handle, task.after = self._submit(task, rounds[task.unit]), ()
                case Wait(task):
                    cast(Handle, task.handle).wait()
                case Iterate(number, buffer_index):
                    wholes = self._wholes(rounds[number], buffer_index, gradients)
                    try:
                        if wholes and failure is None:
                            iterate(wholes)
                    # Other ranks wait for the transfers that follow, so this rank goes on and raises at the end.
                    except BaseException as error:
                        failure = error
        for version in versions:
            version.written()
        if failure is not None:
            raise failure

    def states_of_owners(
        self, states: Mapping[torch.Tensor, dict[str, Any]], device: torch.device | None, wanted: bool
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each parameter's name and its owner's optimizer state, where `wanted`. Every rank must call it."""
        groups = self._comm.groups
        mine = {n: states[p] for n, p in self.parameters.items() if n in self._owned and p in states}
        told: list[dict[str, dict[str, Any]]] = groups.all_gather_objects(
            {
                name: {key: _outline(f"{name}.{key}", value) for key, value in state.items()}
                for name, state in mine.items()
            }
        )
        # Before anything is yielded, and on every rank, whichever of them owns such a state.
        for error in (o for all_ in told for s in all_.values() for o in s.values() if isinstance(o, CheckpointError)):
            raise error
        for name in self.parameters:
            rank = next((rank for rank, theirs in enumerate(told) if name in theirs), None)
            if rank is None:
                continue
            state: dict[str, Any] = {}
            for key, value in told[rank][name].items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    # Cloned, because the caller keeps the result while the optimizer goes on.
                    own = mine[name][key].clone() if groups.rank == rank else None
                    here = torch.empty_like(value, device=self._comm.device) if own is None else own
                    groups.broadcast(here, rank)
                    value = here.to(device or here.device) if wanted else None
                state[key] = value
            if wanted:
                yield name, state

    # Memory ----------------------------------------------------------------------------------------------------------

    def _gradient(self, matrix: OwnedMatrix) -> torch.Tensor:
        gradient = self.parameters[matrix.name].grad
        if not isinstance(gradient, ShardTensor):
            raise StepError(f"{matrix.name}.grad was replaced by a plain tensor; set it to None, or zero it.")
        return gradient.to_local()

    def _weight(self, matrix: OwnedMatrix) -> torch.Tensor:
        return self.parameters[matrix.name].to_local().detach()

    def _gathered(self, each: Round, buffer_index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the memory in which this rank gathers gradient and weight of each matrix that it owns."""
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        start = 0
        for matrix in each.owned(self._slot):
            if not matrix.stays:
                gradients, weights = self._memory[each.dtype][buffer_index]
                end = start + matrix.numel
                found[matrix.name] = gradients[start:end], weights[start:end]
                start = end
        return found

    def _wholes(self, each: Round, buffer_index: int, gradients: bool) -> list[FullMatrix]:
        gathered = self._gathered(each, buffer_index)
        found: list[FullMatrix] = []
        for m in each.owned(self._slot):
            # A matrix that this rank holds entirely stays where it is.
            weight = gathered[m.name][1] if m.name in gathered else self._weight(m)
            gradient = (gathered[m.name][0] if m.name in gathered else self._gradient(m)) if gradients else None
            found.append(FullMatrix(m.name, weight.view(m.shape), None if gradient is None else gradient.view(m.shape)))
        return found

    # Transfers -------------------------------------------------------------------------------------------------------

    def _bind(self, transfer: Transfer) -> RankTransfer:
        if transfer not in self._bound:
            (self._bound[transfer],) = self._comm.bind([transfer])
        return self._bound[transfer]

    def _submit(self, task: Task, each: Round) -> Handle:
        gathered = self._gathered(each, task.unit % ROUNDS_IN_FLIGHT)
        bound = [self._bind(transfer) for transfer in task.transfers]
        runs: list[Work] = []
        for transfer in bound:
            has_gradients = transfer.transfer.kind is TransferKind.MATRIX_GRADIENTS
            pieces = [(self._gradient if has_gradients else self._weight)(matrix) for matrix in each.matrices]
            place = 0 if has_gradients else 1
            wholes = {n: gathered[m.name][place] for n, m in enumerate(each.matrices) if m.name in gathered}
            runs.append(partial(transfer.run, wholes, pieces))
        after = [cast(Handle, before.handle) for before in task.after]
        return self._comm.queues.submit(task.kind, bound, runs, after)


def _outline(path: str, value: Any) -> Any:
    """Return a value of a state, of a tensor without its elements; or the error if checkpoints cannot hold it."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_traceable_wrapper_subclass(value):
        return not_savable(path, type(value).__name__)
    return value.to("meta") if value.dim() else value.cpu()


def not_savable(path: str, kind: str) -> CheckpointError:
    """Return the error for an optimizer state whose class is made of other tensors, such as torchao's."""
    return CheckpointError(
        f"the optimizer's state {path} is a {kind}, which checkpoints cannot hold: expected plain tensors. Save the "
        "model alone, and start with a new optimizer; or take an optimizer without quantized states."
    )
