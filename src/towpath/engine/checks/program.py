"""What a user's program does with one model that every rank must do identically, noted for the next boundary.

A rank that steps another optimizer, or the same one with another learning rate, drifts away from its peers, and nothing
fails. PyTorch calls a hook after every optimizer's step; what it stepped, and how, goes to the model's journal, which
the ranks compare at the boundary (`core/journal.py`). So do norms and full tensors, which are collectives that the
program starts: a rank that makes one alone is told so while it waits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, final
from weakref import WeakSet
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from towpath.core.journal import Call, Journal
from towpath.engine.checks.activity import Peers
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.streams.streams import eager
from towpath.errors import StepError
from towpath.logs import logger

_LOG = logger("engine")

# How often a rank that waits in a shared call looks whether it can still end.
_LOOK = timedelta(seconds=1)
# Of a parameter group: names, and how a step is computed. None of it changes what is computed.
_HOW = {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"}
_END_OF_BACKWARD = "the end of the backward pass"


@final
class Program:
    """Notes what the program does with one model on one rank. `zeroed`: gradients set to zero in place so far."""

    def __init__(self, journal: Journal, peers: Peers) -> None:
        self._journal, self._peers = journal, peers
        self.zeroed = 0

    def stepped(self, optimizer: str, details: tuple[tuple[tuple[str, Any], ...], ...]) -> None:
        self._journal.note(Call.STEP, f"{optimizer}.step()", details)

    def ends_backward(self, micro_steps: int, kept: int, frozen: tuple[str, ...]) -> None:
        """Note the boundary itself.

        `kept`: how many parameters have a `.grad` that the new one will be added to. `frozen`: which of those that
        `shard()` found training do not require gradients now.
        """
        counted = (("micro_steps", micro_steps), ("gradients_kept", kept), ("gradients_zeroed", self.zeroed))
        counted += (("frozen", frozen),) if frozen else ()
        self._journal.note(Call.PROGRAM, _END_OF_BACKWARD, (counted,))
        self.zeroed = 0

    def ends_at(self, names: Sequence[str]) -> None:
        """A backward pass with `inputs=` gives gradients to these parameters alone."""
        said = (("parameters", len(names)), ("first", names[0]), ("checksum", crc32("\n".join(names).encode())))
        self._journal.note(Call.PROGRAM, "backward(inputs=…)", (said,))

    @contextmanager
    def shared(self, what: str, kind: Call | None) -> Generator[None]:
        """Around a collective that the program has started. `kind`: among which ranks it is compared; None: nowhere."""
        if kind is not None:
            self._journal.note(kind, what)
        self._peers.journal = self._journal
        try:
            with self._peers.activity.shared(what):
                yield
        except RuntimeError as error:
            raise StepError(
                f"rank {self._journal.rank}: {what} failed: {error}\nEvery rank that shares the parameters must make "
                f"this call, at the same place. {self._peers.describe_all()}"
            ) from error

    def wait(self, work: dist.Work | None) -> None:
        """Wait on the host for a collective; raise where the ranks have found out that it will never end.

        `work`: None for a collective on a GPU, which runs on the current stream and holds up no host.
        """
        while work is not None:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._peers.raise_if_diverged()


# Optimizers that step parameters of sharded models and others: said once.
_mixed: WeakSet[Optimizer] = WeakSet()


@cache
def note_optimizer_steps() -> None:
    """Let PyTorch tell of every optimizer's step in this process, from the first sharded model on."""
    register_optimizer_step_post_hook(_stepped)


@eager
def _stepped(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    # By model: how many of its parameters are in which group. An optimizer may step several models, of which other
    # ranks have other ones: the stages of a pipeline.
    stepped: dict[Program, dict[int, int]] = {}
    beside: list[torch.Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, ShardTensor):
                beside.append(parameter)
            elif (program := parameter.span.replica.program) is not None:
                counts = stepped.setdefault(program, {})
                counts[number] = counts.get(number, 0) + 1
    if stepped:
        if beside and optimizer not in _mixed:
            _mixed.add(optimizer)
            _LOG.warning(
                "%s steps %d parameters beside those of the sharded model, the first of shape %s. The ranks do not "
                "average their gradients: shard the whole model, or average them yourself.",
                *(_name(optimizer), len(beside), tuple(beside[0].shape)),
            )
        options = [_hyperparameters(group) for group in optimizer.param_groups]
        for program, counts in stepped.items():
            details = tuple((("parameters", count), *options[number]) for number, count in counts.items())
            program.stepped(_name(optimizer), details)


def _name(optimizer: Optimizer) -> str:
    inner = getattr(optimizer, "inner", None)  # of a wrapper, as `towpath.optim.whole_matrices` makes them
    return type(optimizer).__qualname__ + (f"({_name(inner)})" if isinstance(inner, Optimizer) else "")


def _hyperparameters(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _plain(value)) for name, value in group.items() if name not in _HOW)


def _plain(value: Any) -> Any:
    """Return a value that ranks can compare and JSON can carry. A tensor on a device is not read: that would wait."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return type(value).__name__
