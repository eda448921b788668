"""Pipelines with tensor parallelism inside stages, compression of some stages, and tied embeddings summed in one go or
in two; the groups that NCCL needs; and failures.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import towpath
from tests.ranks.server import World, Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.test_pipeline import (
    BATCH,
    LENGTH,
    SINGLE,
    WIDTH,
    Block,
    Plain,
    _batch,
    _gpt,
    _loss,
    _of_tokens,
    _tensor_parallel,
    _tokens,
)
from tests.ranks.test_start import BOTH, _gpus, _recorded
from towpath.core.routes import Op
from towpath.core.strategy import TransferKind
from towpath.errors import StepError, TowpathError
from towpath.pipeline import Compression, Pipeline, split
from towpath.topology.groups import Groups, new_group

MICRO_BATCHES = 4


def test_the_jobs_schedule_has_every_tensor_parallel_rank(world: Worlds) -> None:
    """But not what DTensor sends."""
    world(8).run(_schedule_with_tensor_parallelism)


def _schedule_with_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    pipeline = _made([partial(_tensor_parallel, seed, mesh["tp"]) for seed in range(2)], "ddp", mesh)
    found = pipeline.schedule(towpath.Topology(2, 4)).transfers
    for kind, stage in ((TransferKind.ACTIVATION, 1), (TransferKind.ACTIVATION_GRADIENT, 0)):
        moved = {op: [t for t in found if t.kind is kind and t.move.op is op] for op in (Op.SEND, Op.ALL_GATHER)}
        ends = [g.ranks if stage else g.ranks[::-1] for t in moved[Op.SEND] for g in t.move.groups]
        assert sorted(ends) == sorted([(rank, rank + 4) for rank in range(4)] * MICRO_BATCHES)
        # The receiving ranks gather the two shares of each message, inside a node.
        peers = [tuple(g.ranks for g in t.move.groups) for t in moved[Op.ALL_GATHER]]
        assert peers == [((4 * stage, 4 * stage + 1), (4 * stage + 2, 4 * stage + 3))] * MICRO_BATCHES
        size = BATCH * WIDTH * 8
        assert sum(t.inter_bytes for t in moved[Op.SEND]) == MICRO_BATCHES * 4 * size // 2
        assert sum(t.intra_bytes for t in moved[Op.ALL_GATHER]) == MICRO_BATCHES * 2 * size
    summed = {g.ranks for t in found if t.kind is TransferKind.GRAD_SYNC for g in t.move.groups}
    assert summed == {(0, 2), (1, 3), (4, 6), (5, 7)}


def _made(stages: list[Any], strategy: Any, mesh: DeviceMesh | tuple[int, int], **options: Any) -> Pipeline:
    if not isinstance(mesh, DeviceMesh):
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("pp", "dp"))
    example = torch.empty(BATCH, WIDTH).double()
    options = {"micro_batches": MICRO_BATCHES, "loss": _loss, "units": [Block], "example": example} | options
    return Pipeline(stages, strategy, mesh=mesh, **options)


# --- compression of some stages --------------------------------------------------------------------------------------


@in_turn(["ddp", "zero1"], 1, "strategy")
def test_gradients_of_full_rank_are_those_of_one_process(world: Worlds, strategy: str) -> None:
    """Rows of a weight of two columns: its factors are smaller where its rank is one."""
    world(4).run(_first_stage_in_low_rank, strategy)


class Thin(nn.Module):
    """Its gradients have rank one: every token is the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


def _first_stage_in_low_rank(strategy: str) -> None:
    row = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    x = row.repeat(MICRO_BATCHES * BATCH, 1)
    found: list[Pipeline] = []
    for compression in (Compression(gradients="low-rank:1", share_of_stages=0.5), Compression()):
        pipeline = _made(
            [partial(Thin, seed) for seed in range(2)], strategy, (2, 2), compression=compression, units=None
        )
        pipeline.step(x, target=-x)
        found.append(pipeline)
    for (name, mine), (_, theirs) in zip(*(p.named_parameters() for p in found), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        grads: list[Any] = [mine.grad, theirs.grad]
        mine_whole, theirs_whole = (g.full_tensor() for g in grads)
        assert torch.allclose(mine_whole, theirs_whole, rtol=0, atol=1e-12), name
    job = found[0].schedule(towpath.Topology(4, 1))
    encoded = [t.transport.low_rank is not None for t in job.transfers if t.kind is TransferKind.GRAD_SYNC]
    assert any(encoded) and not all(encoded)
    assert job.cable_bytes(0) < job.cable_bytes(2)


def test_what_one_stage_refuses_all_ranks_refuse(world: Worlds) -> None:
    world(4).run(_refused_by_one_stage)


def _refused_by_one_stage() -> None:
    stages: list[Any] = [partial(Thin, seed) for seed in range(2)]
    low_rank = [Compression(gradients=f"low-rank:{rank}", share_of_stages=0.5) for rank in (1, 4)]
    with pytest.raises(TowpathError, match=r"low-rank:4 makes no gradient of this model smaller.* 8 × 8 elements"):
        _made(stages, "ddp", (2, 2), compression=low_rank[1], units=None)
    broken = [stages[0], lambda: nn.Linear("eight", 8)]  # type: ignore[arg-type]
    with pytest.raises(TowpathError, match=r"a stage cannot be made: TypeError"):
        _made(broken, "ddp", (2, 2), units=None)
    with pytest.raises(TowpathError, match=r"zero3: reduce: low-rank:1 needs full matrices"):
        _made(stages, "zero3", (2, 2), compression=low_rank[0], units=None)


# --- tied embeddings -------------------------------------------------------------------------------------------------


@in_turn(["1F1B", "Interleaved1F1B"], 1, "schedule")
def test_one_sum_over_both_ends_is_two_sums(world: Worlds, schedule: str) -> None:
    world(4).run(_both_ways, schedule)


def _both_ways(schedule: str) -> None:
    """The same gradients, norms and parameters; of V elements each of D ranks of an end sends V(3D − 2)/D in two sums,
    and V(2D − 1)/D in one (Optimus-CC)."""
    made: list[Pipeline] = []
    for fused in (True, False):
        stages = split(_gpt(tied=True), 2 if schedule in SINGLE else 4, torch.zeros(BATCH, LENGTH, dtype=torch.int64))
        made.append(_of_tokens(stages, "ddp", schedule=schedule, compression=Compression(fused_embeddings=fused)))
    optimizers = [torch.optim.AdamW(list(p.parameters()), lr=1e-2, eps=1e-5) for p in made]
    replica = dist.get_rank() % 2
    for step in range(2):
        ids, norms = _tokens(step, replica), []
        for pipeline, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            pipeline.zero_grad()
            pipeline.step(ids, target=ids)
            norms.append(float(pipeline.clip_grad_norm_(1e9)))
            if step == 1:  # without zero_grad, the next step adds to `.grad`
                if pipeline is made[0]:
                    _check_executed(pipeline)
                pipeline.step(_tokens(2, replica), target=_tokens(2, replica))
        for (name, mine), (_, theirs) in zip(*(p.named_parameters() for p in made), strict=True):
            gradients: list[Any] = [mine.grad, theirs.grad]
            one, other = (g.full_tensor() for g in gradients)
            assert torch.allclose(one, other, rtol=0, atol=1e-12), (step, name)
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    sent = [_summed_by_the_ends(p) / 4 for p in made]
    copies, size = 2, 24 * 16 * 8
    # Fused, the ends are sharded by zero1: what it sends to publish belongs to its sum.
    assert sent[0] == size * (2 * copies - 1) / copies
    assert sent[1] == size * (3 * copies - 2) / copies


def _check_executed(pipeline: Pipeline) -> None:
    """The ends, which are all ranks, have executed what is planned of one sum."""
    tied = pipeline._tied
    assert tied is not None and tied.module is not None
    (both,) = tied.schedules(MICRO_BATCHES, pipeline._passes(0))
    executed, planned = (
        Counter(t for t in each if t.kind is not TransferKind.UNUSED_PARAMS)
        for each in (towpath.stats(tied.module).last_step, both.schedule.transfers)
    )
    assert both.ranks == (0, 1, 2, 3) and executed == planned


VOCABULARY = 64  # of which a rank has a part without padding


class End(nn.Module):
    """One of two stages of a model over tokens: the first embeds them, the last has the same table for a head."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(int(last))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        torch.manual_seed(7)  # the same at both ends
        table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        if last:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = table
        else:
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.tokens.weight = table
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) if hasattr(self, "tokens") else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def _parallel_end(last: bool, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(End(last), mesh, plan | {name: ends[name] for name in ("head" if last else "tokens",)})


def _tied_ends() -> nn.Sequential:
    """Both in one model."""
    ends = [End(False), End(True)]
    ends[1].head.weight = ends[0].tokens.weight
    return nn.Sequential(*ends)


def _summed_by_the_ends(pipeline: Pipeline) -> int:
    assert pipeline._tied is not None
    stages = pipeline._tied.schedules(4, pipeline._passes(0))
    kinds = {TransferKind.GRAD_SYNC, TransferKind.REDUCE, TransferKind.PARAM_SYNC}
    return sum(t.inter_bytes + t.intra_bytes for s in stages for t in s.schedule.transfers if t.kind in kinds)


def test_ranks_that_have_had_fewer_groups_than_others_meet_in_the_next_one(world: Worlds) -> None:
    """As after a pipeline whose stages have strategies of their own."""
    world(4).run(_meet)


def _meet() -> None:
    before = len(dist.distributed_c10d._world.pg_names)
    if dist.get_rank() < 2:
        new_group([0, 1], "of two ranks")
    group = Groups().of(((0, 1, 2, 3),), "that all are to meet in, however many they had before")
    assert dist.get_world_size(group) == 4
    counts = Groups().all_gather_objects(len(dist.distributed_c10d._world.pg_names) - before)
    assert counts == [2] * 4


# --- groups and collectives, as NCCL needs them ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "fused"), [(3, False), seldom(4, False), seldom(3, True), (4, True)], ids=lambda v: str(v).lower()
)
def test_every_rank_takes_part_when_the_ends_make_their_group(world: Worlds, ranks: int, fused: bool) -> None:
    """Where PyTorch splits the communicator of all ranks for a group, the ends would wait for those between them."""
    found = world(ranks).run(_groups_of_a_tied_pipeline, ranks, fused)
    ends = (0, ranks - 1)
    assert [groups for groups, _ in found] == [[ends if rank in ends else (rank,)] for rank in range(ranks)]
    assert [splits for _, splits in found] == [found[0][1]] * ranks


def _groups_of_a_tied_pipeline(ranks: int, fused: bool) -> tuple[list[tuple[int, ...]], int]:
    """The groups of tied embeddings that this rank makes, and how often all ranks would have to split a communicator.
    Stages need different numbers of groups."""
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
    stages = split(_gpt(tied=True), ranks, torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    world, new_group = dist.group.WORLD, dist.new_group
    assert world is not None
    made: list[tuple[int, ...]] = []
    splits: list[list[int]] = []

    def recorded(ranks: list[int], **options: Any) -> Any:
        if options.get("group_desc") == "tied embeddings":
            assert options.get("backend") is None, "some ranks would connect by another backend"
            made.append(tuple(ranks))
        if world.bound_device_id is not None and options.get("backend") is None:
            splits.append(ranks)
        return new_group(ranks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded)
        world.bound_device_id = torch.device("cuda", 0)
        try:
            strategies, packed = ["zero3", *["zero1"] * (ranks - 2), "ddp"], Compression(fused_embeddings=fused)
            _of_tokens(stages, strategies, mesh, compression=packed)
        finally:
            world.bound_device_id = None
    return made, len(splits)


def test_all_stages_connect_before_two_of_them_exchange_messages(world: Worlds) -> None:
    """NCCL connects in the first call, and then waits for all ranks of the group."""
    world(3).run(_connected)


def _connected() -> None:
    with _gpus(BOTH) as patch, _recorded(patch) as calls:
        pipeline = _made([partial(Plain, s) for s in range(3)], "ddp", (3, 1))
    assert ("all-reduce", pipeline._group) in calls


class Shared(nn.Module):
    """An end whose six parameters the other one has, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.shared = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
        self.own = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x))


@on_ranks(2)
def test_both_ends_sum_their_gradients_in_the_same_order() -> None:
    """Three parameters have the same shape: a sum of two others would not be refused."""
    x, y = _batch(0, 0, 2)
    found: list[list[Any]] = []
    for fused in (True, False):
        packed = Compression(fused_embeddings=fused)
        options: dict[str, Any] = {"micro_batches": 2, "units": None, "tied": ("shared", "shared")}
        pipeline = _made([Shared, Shared], "ddp", (2, 1), compression=packed, **options)
        pipeline.step(x, target=y)
        found.append([p.grad for p in pipeline.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.full_tensor(), other.full_tensor(), rtol=0, atol=1e-12)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_dead_stage_is_told_on_all_others() -> None:
    with World(4, group_timeout=3.0) as ranks:
        for connection in ranks._connections:
            connection.send((_dies, (2,), 60.0))
        for rank in (0, 1, 3):
            assert ranks._connections[rank].poll(60.0), "a survivor hangs"
            ok, told = ranks._connections[rank].recv()
            assert ok, told
            assert f"rank {rank}: step 2 failed in stage {rank} of 4" in told
            assert "rank 2, stage 2: has said nothing: it waits or works, or it is gone" in told


def test_what_a_loss_raises_is_told_on_all_others() -> None:
    """Whatever its type: a target that is out of bounds is an IndexError."""
    with World(2, group_timeout=2.0) as ranks:
        told = ranks.run(_raises)
    assert "step 1 failed in stage 1 of 2: IndexError: Target 30 is out of bounds." in told[1]
    assert "step 1 failed in stage 0 of 2: " in told[0]
    assert "rank 1, stage 1: IndexError: Target 30 is out of bounds." in told[0]


@pytest.mark.parametrize("what", ["forward", "message"])
def test_the_others_are_told_what_a_stage_raised(what: str) -> None:
    """Also an error of Towpath's that one rank alone raises, which that rank raises as it is."""
    with World(2, group_timeout=2.0) as ranks:
        told = ranks.run(_raises_in_first_stage, what)
    assert "a stage that fails" in told[0]
    kind = "ValueError: " if what == "forward" else ""
    assert f"rank 0, stage 0: {kind}a stage that fails" in told[1]


def _raises_in_first_stage(what: str) -> str:
    pipeline = _made([partial(Plain, s) for s in range(2)], "ddp", (2, 1), micro_batches=2)

    def fails(*_: Any) -> Any:
        raise ValueError("a stage that fails") if what == "forward" else StepError("a stage that fails")

    (stage,) = pipeline._stages
    if dist.get_rank() == 0 and what == "forward":
        pipeline.modules[0].register_forward_pre_hook(fails)
    elif dist.get_rank() == 0:
        stage.get_fwd_send_ops = fails  # type: ignore[method-assign]
    x, y = _batch(0, 0, 2)
    with pytest.raises(StepError) as failure:
        pipeline.step(x, target=y)
    return str(failure.value)


def _raises() -> str:
    options: dict[str, Any] = {"micro_batches": 2, "loss": nn.functional.cross_entropy}
    pipeline = _made([partial(Plain, s) for s in range(2)], "ddp", (2, 1), **options)
    with pytest.raises(StepError) as failure:
        pipeline.step(torch.zeros(2 * BATCH, WIDTH).double(), target=torch.full((2 * BATCH,), 30))
    return str(failure.value)


def _dies(doomed: int) -> str:
    """Before its second step."""
    pipeline = _made([partial(Plain, s) for s in range(4)], "ddp", (4, 1))
    x, y = _batch(0, 0, MICRO_BATCHES)
    pipeline.step(x, target=y)
    if dist.get_rank() == doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StepError) as failure:
        pipeline.step(x, target=y)
    return str(failure.value)
