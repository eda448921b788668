"""Checkpoints of pipelines: they go on as if nothing had been, and fit any other layout of the same model.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import towpath
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.test_pipeline import BATCH, LENGTH, SINGLE, _gpt, _message_bytes, _token_loss, _tokens
from towpath import checkpoint
from towpath.core.transport import Transport
from towpath.errors import CheckpointError
from towpath.pipeline import Compression, Pipeline, split

# 12 positions of a micro-batch × 16: matrices of which rank 2 is less. All that has a state.
KEEPS = Transport(codec="low-rank:2", feedback="first")
LOSSY = Compression(KEEPS, gradients=KEEPS, share_of_stages=0.5)


def _made(sizes: tuple[int, int], schedule: str, strategy: str, tied: bool, **options: Any) -> Pipeline:
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp"))
    stages = split(_gpt(tied), sizes[0] if schedule in SINGLE else 2 * sizes[0], example)
    options |= {"mesh": mesh, "schedule": schedule, "loss": _token_loss, "example": example}
    return Pipeline(stages, strategy, micro_batches=8 // sizes[1], **options)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters()), lr=1e-2, eps=1e-5)


def _steps(pipeline: Pipeline, optimizer: torch.optim.Optimizer, first: int, copies: int) -> list[float]:
    losses: list[float] = []
    for step in range(first, first + 2):
        ids = _tokens(step, dist.get_rank() % copies)
        losses.append(float(pipeline.step(ids, target=ids)))
        optimizer.step()
        optimizer.zero_grad()
        pipeline.zero_grad()
    return losses


# The codecs begin in the last of four steps, after the checkpoint.
WARM_UP = Compression(*[Transport(codec="low-rank:2", feedback="first", after=3)] * 3, share_of_stages=0.5)
CASES = [
    ("1F1B", "ddp", {"compression": LOSSY}),
    ("1F1B", "ddp", {"compression": WARM_UP}),
    ("1F1B", "zero3", {}),
    ("Interleaved1F1B", "zero1", {"compression": Compression("low-rank:2", fused_embeddings=False)}),
    ("GPipe", "paro-nig", {}),
]


@pytest.mark.parametrize("case", [CASES[0], *map(seldom, CASES[1:])], ids=str)
def test_a_resumed_pipeline_goes_on_bit_for_bit(world: Worlds, tmp_path: Path, case: Any) -> None:
    world(4).run(_resumed, str(tmp_path), *case)


def _resumed(folder: str, schedule: str, strategy: str, options: dict[str, Any]) -> None:
    pipeline = _made((2, 2), schedule, strategy, True, **options)
    optimizer = _optimizer(pipeline)
    _steps(pipeline, optimizer, 0, 2)
    assert checkpoint.save(folder, 2, checkpoint.State(pipeline, optimizer)).ok
    went_on = _steps(pipeline, optimizer, 2, 2)

    if (packed := options.get("compression")) is not None:  # what senders keep fits, however long they send in low rank
        longer = replace(packed.activation_gradients, until=100)
        options = options | {"compression": replace(packed, activation_gradients=longer)}
    again = _made((2, 2), schedule, strategy, True, **options)
    other = _optimizer(again)
    loaded = checkpoint.load(folder, checkpoint.State(again, other))

    assert loaded is not None and loaded.notes == ()
    assert _steps(again, other, 2, 2) == went_on
    for (name, mine), (_, theirs) in zip(again.named_parameters(), pipeline.named_parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), name  # type: ignore[attr-defined]


@in_turn([True, False], 1, "tied")
def test_a_checkpoint_fits_other_stages_and_no_stages(world: Worlds, tmp_path: Path, tied: bool) -> None:
    world(4).run(_refitted, str(tmp_path), tied)


def _refitted(folder: str, tied: bool) -> None:
    """Two stages of two ranks, then four stages, then none, then two stages on each rank; the same steps in one
    process."""
    whole: Any = _gpt(tied)
    reference = _optimizer(whole)
    pipeline = _made((2, 2), "1F1B", "zero3", tied, compression=Compression(fused_embeddings=False))
    optimizer = _optimizer(pipeline)
    _one_step(whole, reference, 0)
    _piped(pipeline, optimizer, 0, 2)
    assert checkpoint.save(folder, 1, checkpoint.State(pipeline, optimizer)).ok

    pipeline = _made((4, 1), "1F1B", "ddp", tied)
    optimizer = _optimizer(pipeline)
    loaded = checkpoint.load(folder, checkpoint.State(pipeline, optimizer))
    assert loaded is not None and loaded.step == 1
    _one_step(whole, reference, 1)
    _piped(pipeline, optimizer, 1, 1)
    assert checkpoint.save(folder, 2, checkpoint.State(pipeline, optimizer)).ok

    model: Any = towpath.shard(_gpt(tied), "mics", topology=towpath.Topology(2, 2))
    optimizer = _optimizer(model)
    loaded = checkpoint.load(folder, checkpoint.State(model, optimizer))
    assert loaded is not None and loaded.step == 2
    _one_step(whole, reference, 2)
    _one_step(model, optimizer, 2)
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.full_tensor(), theirs[name], rtol=0, atol=1e-9), name
    assert checkpoint.save(folder, 3, checkpoint.State(model, optimizer)).ok

    pipeline = _made((2, 2), "Interleaved1F1B", "zero1", tied)
    optimizer = _optimizer(pipeline)
    loaded = checkpoint.load(folder, checkpoint.State(pipeline, optimizer))
    assert loaded is not None and loaded.step == 3
    _one_step(whole, reference, 3)
    _piped(pipeline, optimizer, 3, 2)
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in pipeline.named_parameters():
        assert torch.allclose(parameter.full_tensor(), theirs[name], rtol=0, atol=1e-9), name


def test_a_load_drops_accumulated_gradients(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_loaded_inside_no_sync, str(tmp_path))


def _loaded_inside_no_sync(folder: str) -> None:
    pipeline, other = (_made((2, 1), "1F1B", "zero1", True) for _ in range(2))
    states = [checkpoint.State(each, _optimizer(each)) for each in (pipeline, other)]
    assert checkpoint.save(folder, 0, states[0]).ok
    ids = torch.cat([_tokens(0, 0), _tokens(0, 1)])
    with pipeline.no_sync():
        pipeline.step(ids, target=ids)
    for each, state in zip((pipeline, other), states, strict=True):
        checkpoint.load(folder, state)
        each.step(ids, target=ids)
    for mine, theirs in zip(pipeline.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
    mine, theirs = (_message_bytes(towpath.stats(each).transfers) for each in (pipeline, other))
    assert mine == theirs  # steps inside no_sync count once their gradients are delivered


def _one_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Of the batches of both replicas."""
    ids = torch.cat([_tokens(step, 0), _tokens(step, 1)])
    found = model(ids)
    _token_loss(getattr(found, "logits", found), ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def _piped(pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, copies: int) -> None:
    batches = [_tokens(step, replica) for replica in range(2)]
    ids = batches[dist.get_rank() % 2] if copies == 2 else torch.cat(batches)
    pipeline.step(ids, target=ids)
    optimizer.step()
    optimizer.zero_grad()
    pipeline.zero_grad()


def test_what_a_checkpoint_of_a_pipeline_cannot_be_is_told_on_every_rank(world: Worlds, tmp_path: Path) -> None:
    world(4).run(_told, str(tmp_path))


def _told(folder: str) -> None:
    pipeline = _made((2, 2), "1F1B", "zero1", False)
    kind: Any = torch.optim.AdamW if dist.get_rank() < 2 else torch.optim.SGD
    state = checkpoint.State(pipeline, kind(list(pipeline.parameters()), lr=0.1))
    outcome = checkpoint.save(folder, 1, state)
    assert outcome.failure is not None and "optimizers of different kinds: AdamW, SGD" in outcome.failure
    foreign = [nn.Parameter(torch.zeros(2))] if dist.get_rank() == 3 else []
    optimizer = torch.optim.AdamW([*pipeline.parameters(), *foreign], lr=0.1)
    outcome = checkpoint.save(folder, 1, checkpoint.State(pipeline, optimizer))
    assert outcome.failure is not None and "rank 3: group 0 of the optimizer has one of shape (2,)" in outcome.failure
    state = checkpoint.State(pipeline, torch.optim.AdamW(pipeline.parameters()))
    if dist.get_rank() == 1:  # the others must not wait for what it has of the optimizer
        state.local = replace(state.local, named=lambda: 1 // 0)  # pyright: ignore[reportArgumentType]
    failure = checkpoint.save(folder, 1, state).failure
    assert failure == "saving a checkpoint failed on rank 1: ZeroDivisionError: integer division or modulo by zero"
    mesh = DeviceMesh("cpu", torch.tensor([[0], [1]]), mesh_dim_names=("pp", "dp"))
    if dist.get_rank() < 2:
        small = Pipeline(
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            "ddp",
            mesh=mesh,
            micro_batches=2,
            loss=nn.functional.mse_loss,
            example=torch.zeros(1, 2),
        )
        with pytest.raises(CheckpointError, match="mesh has 2 ranks, and the job 4"):
            checkpoint.State(small)
