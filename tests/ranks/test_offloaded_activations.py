"""Activations in the host's memory: the same training to the bit, and weights stay in their slots.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.checkpoints import Run, differing
from tests.ranks.models import MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn
from towpath import Topology
from towpath.engine import saved_activations
from towpath.engine.executor import engine_of
from towpath.errors import ShardError, StepError

SHAPE = Topology(2, 1)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@in_turn(("zero3", "hpz", "ddp", "zero++"), 1)
def test_training_is_the_same_to_the_bit(world: Worlds, label: str, checkpointed: bool) -> None:
    world(2).run(_compare, label, checkpointed)


def _compare(label: str, checkpointed: bool) -> None:
    plain, offloaded = Run.of(label, SHAPE), Run.of(label, SHAPE)
    for run in (plain, offloaded) if checkpointed else ():
        for block in run.model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_activations, "_AHEAD_BYTES", 1 << 12)  # on a GPU, some of a pass
        kept = _count_kept(patch)
        for step in range(3):
            for run in (plain, offloaded):
                _backward(run, step, offload=run is offloaded)
                assert (len(kept) > 0) == (run is offloaded)
                run.optimizer.step()
                run.optimizer.zero_grad()
            kept.clear()
    assert differing(offloaded.content(), plain.content()) == []


def _backward(run: Run, step: int, offload: bool = True) -> None:
    entry = MODELS["gpt"]
    with towpath.offload_activations(run.model, smallest_bytes=1) if offload else nullcontext():
        loss = entry.loss(run.model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32))
    loss.backward()


def _count_kept(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was copied to the host."""
    kept: list[torch.Tensor] = []
    copied, offload = saved_activations._copied, saved_activations.DeviceCopies.offload

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(copied(tensor))
        return kept[-1]

    def begin(self: saved_activations.DeviceCopies, tensor: torch.Tensor, passed: Any) -> Any:
        kept.append(tensor.clone())
        return offload(self, tensor, passed)

    patch.setattr(saved_activations, "_copied", copy)
    patch.setattr(saved_activations.DeviceCopies, "offload", begin)  # on a GPU
    return kept


@on_ranks(2)
def test_weights_and_buffers_are_left_where_they_are() -> None:
    """Whatever memory they are in: slots, those of units that are pinned, and shards that are whole."""
    for label in ("zero3", "ddp", "paro-ngg"):
        run = Run.of(label, SHAPE)
        weights = [p.full_tensor().detach() for p in run.model.parameters() if p.dim() == 2]
        with pytest.MonkeyPatch.context() as patch:
            kept = _count_kept(patch)
            _backward(run, 0)
            with towpath.full_parameters(run.model):
                _backward(run, 1)
            # By their values: a copy has other memory.
            matrices = [k for k in kept if k.dim() == 2]
            same = [k for k in matrices if any(torch.equal(k, w) or torch.equal(k.T, w) for w in weights)]
            assert kept and not same, label


@on_ranks(2)
def test_what_is_small_is_left_where_it_is() -> None:
    run = Run.of("zero3", SHAPE)
    entry = MODELS["gpt"]
    with pytest.MonkeyPatch.context() as patch:
        kept = _count_kept(patch)
        with towpath.offload_activations(run.model):
            entry.loss(run.model, *entry.micro_batch(0, 0, 0, torch.float32)).backward()
        assert not kept


@on_ranks(2)
def test_weights_that_may_be_another_unit_s_are_refused_as_without_it() -> None:
    run = Run.of("zero3", SHAPE)
    entry = MODELS["gpt"]
    with towpath.offload_activations(run.model, smallest_bytes=1):
        loss = entry.loss(run.model, *entry.micro_batch(0, 0, 0, torch.float32))
    for unit in engine_of(run.model).units:
        unit.shown.invalidate_views(True)  # raised once more than the engine will put back
    with pytest.raises(StepError, match="was modified since its forward pass"):
        loss.backward()


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(ShardError, match="expected a model that"), towpath.offload_activations(torch.nn.Linear(1, 1)):
        pass
