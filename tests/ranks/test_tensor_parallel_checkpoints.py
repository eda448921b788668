"""Checkpoints of tensor-parallel models and stages: they fit any other layout of the same model.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import towpath
from tests.ranks.checkpoints import Content, differing
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.test_pipeline import BATCH, WIDTH, Block, Plain, _batch, _loss, _token_loss, _tokens
from tests.ranks.test_pipeline_layouts import MICRO_BATCHES, _of_tokens, _parallel_end, _tensor_parallel, _tied_ends
from towpath import checkpoint
from towpath.checkpoint import State
from towpath.errors import CheckpointError
from towpath.pipeline import Compression, Pipeline
from towpath.topology.groups import Groups

STAGES = 2
# Stages, data-parallel and tensor-parallel ranks. Half of the copies take the one batch, half the other.
LAYOUTS = [((2, 2, 1), "zero1"), ((1, 2, 2), "zero3"), ((1, 4, 1), "mics")]
MORE_LAYOUTS = [((1, 2, 2), "zero3"), ((2, 2, 1), "zero1"), ((1, 4, 1), "mics"), ((1, 2, 2), "ddp")]
OF_8_RANKS = [
    ((2, 2, 2), "zero3"),
    ((2, 4, 1), "zero1"),
    ((1, 4, 2), "paro-iig"),
    ((2, 2, 2), "ddp"),
    ((1, 8, 1), "mics"),
]


@pytest.mark.parametrize("layouts", [LAYOUTS, seldom(MORE_LAYOUTS), seldom(OF_8_RANKS)], ids=["4", "4, more", "8"])
def test_a_checkpoint_fits_other_tensor_parallel_ranks_stages_and_copies(
    world: Worlds, tmp_path: Path, layouts: list[Any]
) -> None:
    world(prod(layouts[0][0])).run(_refitted, tmp_path, layouts)
    saved = checkpoint.latest(tmp_path)
    assert saved is not None and checkpoint.verify(saved) is None


def _refitted(root: Path, layouts: list[Any]) -> None:
    """A step under each layout, which goes on from what the one before saved; the same steps in one process."""
    whole = nn.Sequential(*(Plain(seed) for seed in range(STAGES)))
    reference, before = _optimizer(whole), Content()
    for step, (sizes, strategy) in enumerate(layouts):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        model = _pipeline(mesh, strategy) if sizes[0] > 1 else _one_model(mesh, strategy)
        optimizer = _optimizer(model)
        state = State(model, optimizer)
        if step:
            loaded = checkpoint.load(root, state)
            assert loaded is not None and loaded.step == step
            assert differing(_content(model, optimizer), before) == []  # bit for bit
        _train(model, step, mesh.get_local_rank("dp"))
        (sum(_loss(whole(x), y) for x, y in (_batch(step, r, MICRO_BATCHES) for r in range(2))) / 2).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        _check(model, optimizer, whole, reference)
        before = _content(model, optimizer)
        saver = checkpoint.Saver(root, state)  # in the background
        saver.save(step + 1)
        outcome = saver.close()
        assert outcome is not None and outcome.ok


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters()), lr=1e-2, eps=1e-5)


def _pipeline(mesh: DeviceMesh, strategy: str) -> Pipeline:
    splits = mesh["tp"].size() > 1
    return Pipeline(
        [partial(_tensor_parallel, seed, mesh["tp"]) if splits else partial(Plain, seed) for seed in range(STAGES)],
        strategy,
        mesh=mesh if splits else mesh["pp", "dp"],
        micro_batches=MICRO_BATCHES,
        loss=_loss,
        example=torch.empty(BATCH, WIDTH).double(),
        units=[Block],
    )


def _one_model(mesh: DeviceMesh, strategy: str) -> Any:
    splits = mesh["tp"].size() > 1
    model = nn.Sequential(*(_tensor_parallel(s, mesh["tp"]) if splits else Plain(s) for s in range(STAGES)))
    topology = towpath.Topology(2, mesh["dp"].size() // 2)
    return towpath.shard(model, strategy, topology=topology, group=mesh["dp"].get_group(), units=[Block])


def _train(model: Any, step: int, copy: int) -> None:
    x, y = _batch(step, copy % 2, MICRO_BATCHES)
    if isinstance(model, Pipeline):
        model.step(x, target=y)
    else:
        _loss(model(x), y).backward()


def _content(model: Any, optimizer: Any) -> Content:
    """Weights and states of all stages, whole."""
    mine = Content()
    for name, parameter in model.named_parameters():
        for key, tensor in ("", parameter), *optimizer.state[parameter].items():
            mine[f"{name} {key}"] = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().detach().clone()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {name: tensor for each in found for name, tensor in each.items()}


def _check(model: Any, optimizer: Any, whole: nn.Module, reference: torch.optim.Optimizer) -> None:
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.full_tensor(), theirs[name], rtol=0, atol=1e-9), name
        for key in ("exp_avg", "exp_avg_sq"):
            found, expected = optimizer.state[parameter][key].full_tensor(), reference.state[theirs[name]][key]
            assert torch.allclose(found, expected, rtol=0, atol=1e-9), (name, key)


def test_ranks_that_share_layers_draw_the_same_random_numbers_after_a_resume(world: Worlds, tmp_path: Path) -> None:
    for first, second, third, fourth in world(4).run(_drawn, tmp_path)[0]:
        assert first == second != third == fourth


def _drawn(root: Path) -> list[list[float]]:
    """Return what all ranks draw after they have resumed, as a model and as stages, a run without shared layers."""
    mesh = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(dist.get_rank())
    assert checkpoint.save(root, 1, State(_one_model(mesh, "zero1"))).ok
    found: list[list[float]] = []
    for sizes, build in ((1, 2, 2), _one_model), ((2, 1, 2), _pipeline):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        loaded = checkpoint.load(root, State(build(mesh, "ddp")))
        assert loaded is not None and "this job of 4 ranks of which 2 share each layer" in " ".join(loaded.notes)
        found.append(Groups().all_gather_objects(torch.rand(()).item()))
    return found


@in_turn([True, False], 1, "fused")
def test_tied_embeddings_of_tensor_parallel_stages_are_one_tensor_of_the_checkpoint(
    world: Worlds, tmp_path: Path, fused: bool
) -> None:
    world(8).run(_tied, tmp_path, fused)


def _tied(root: Path, fused: bool) -> None:
    """A step in stages, and one that goes on from it without stages or slices; the same steps in one process."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stages = [partial(_parallel_end, last, mesh["tp"]) for last in (False, True)]
    ends: dict[str, Any] = {"tied": ("tokens", "head"), "compression": Compression(fused_embeddings=fused)}
    pipeline = _of_tokens(stages, "zero1", mesh, units=[Block], **ends)
    whole, again = _tied_ends(), _tied_ends()
    optimizer, reference, other = map(_optimizer, (pipeline, whole, again))
    batches = [_tokens(0, replica) for replica in range(2)]
    mine = batches[mesh.get_local_rank("dp")]
    pipeline.step(mine, target=mine)
    (sum(_token_loss(whole(ids), ids) for ids in batches) / 2).backward()
    optimizer.step()
    reference.step()
    assert checkpoint.save(root, 1, State(pipeline, optimizer)).ok
    loaded = checkpoint.load(root, State(again, other))
    assert loaded is not None and loaded.step == 1
    for (name, found), expected in zip(again.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-9), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(other.state[found][key], reference.state[expected][key], rtol=0, atol=1e-9), name


def test_a_part_of_the_job_cannot_save_it(world: Worlds) -> None:
    world(8).run(_part)


def _part() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("models", "dp", "tp"))
    model: Any = _tensor_parallel(0, mesh["tp"])
    towpath.shard(model, "zero3", topology=towpath.Topology(2, 1), group=mesh["dp"].get_group(), units=[Block])
    with pytest.raises(CheckpointError, match=r"on 2 data-parallel × 2 tensor-parallel ranks, and the job has 8"):
        State(model)
