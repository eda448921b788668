"""Outer steps next to what else changes a step: islands train as one process that simulates them.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
from tests.forms import in_form
from tests.ranks.checkpoints import Run, content, differing
from tests.ranks.islands import Islands, fragments_of, mean_of
from tests.ranks.models import DEVICE, MODELS, noise
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.test_engine_promises import Branches, Branching
from tests.ranks.test_frozen import Model as Adapted
from tests.ranks.test_frozen import _loss as _loss_of_adapted
from tests.ranks.test_offload import MIXED
from tests.ranks.test_outer import STREAMING, TOLERANCE, adamw, sync
from tests.ranks.test_owner_stepped import Iterated, _matrices, _others
from tests.ranks.twin import Loss, _build, distance, loss_on
from towpath import Outer, Precision, Topology, Transport, checkpoint
from towpath.core.queues import HOST_EXCHANGES
from towpath.core.routes import Form
from towpath.errors import CheckpointError
from towpath.observe.stats import totals
from towpath.optim import chain, owner_stepped
from towpath.outer.settings import outer_transport

Make = Callable[[nn.Module], optim.Optimizer]

SHAPE, LONG = Topology(2, 2), Topology(4, 1)
LABELS = ("zero3", "paro-iig", "ddp", "zero1", "mics")
# Exchanges begin after steps 1, 3, 4, 6, …: the first of a fragment that follows others begins in the sixth step.
STEPS = 7


# --- as one process ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is trained, and how: `make` in one process, and `make_sharded` on the ranks if that differs."""

    build: Callable[[], nn.Module]
    loss: Loss
    make: Make = adamw
    make_sharded: Make | None = None
    micro_steps: int = 1
    max_norm: float = math.inf
    units: tuple[type[nn.Module], ...] | None = None


def _iterated(model: nn.Module) -> optim.Optimizer:
    return chain(Iterated(_matrices(model)), optim.AdamW(_others(model), lr=2e-3, eps=1e-5))


def _on_owners(model: nn.Module) -> optim.Optimizer:
    return chain(owner_stepped(Iterated(_matrices(model))), optim.AdamW(_others(model), lr=2e-3, eps=1e-5))


class Normed(nn.Module):
    """Running statistics, and a count of batches that no gradient knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().sum().detach()
        return x + torch.tanh(self.norm(self.linear(x)))


def _normed() -> nn.Module:
    return nn.Sequential(*(Normed() for _ in range(3)))


def _loss_of_rows(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return (model(noise(rank, micro, step, 4, 5)) - 1).square().mean()


def _loss_of_branches(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """Two branches take part. In every second step, one is unused on a whole island, and another on the next."""
    first = (rank if step % 2 else rank // 2) + step
    return model(noise(rank, micro, step), (first % 3, (first + 1) % 3)).square().mean()


def _gpt(build: Callable[[], nn.Module] | None = None, **more: Any) -> Case:
    return Case(build or partial(MODELS["gpt"].make, torch.float64), loss_on("gpt"), **more)


CASES: dict[str, Case] = {
    "matrices on owners": _gpt(make=_iterated, make_sharded=_on_owners),
    "adapters": Case(Adapted, _loss_of_adapted),
    "buffers": Case(_normed, _loss_of_rows),
    "unused parameters": Case(Branching, _loss_of_branches, units=(Branches,)),
    "accumulation and clipping": _gpt(micro_steps=2, max_norm=0.5),
}


@in_turn(LABELS, 1)
@pytest.mark.parametrize("case", CASES)
def test_islands_train_as_in_one_process(case: str, label: str, world: Worlds) -> None:
    for off in world(4).run(_train, case, label, SHAPE, STREAMING):
        assert off <= TOLERANCE


def _train(name: str, label: str, topology: Topology, outer: Outer) -> float:
    """Return how far parameters, buffers and norms end from those of the simulated islands."""
    case, rank = CASES[name], dist.get_rank()
    model, plain = (_build(case.build) for _ in range(2))
    model = towpath.shard(model, strategy_of(label, topology, outer=outer), units=case.units)
    world = model.towpath_engine.strategy.topology.world
    islands = Islands(plain, outer, topology.world // world, fragments_of(model, outer), case.make)
    buffers: dict[int, list[Tensor]] = {}
    means = mean_of(case.loss, case.micro_steps, buffers)
    optimizer, off = (case.make_sharded or case.make)(model), 0.0
    for step in range(STEPS):
        norms: dict[int, Tensor] = {}

        def gradients(island: int, copy: nn.Module, step: int = step, norms: dict[int, Tensor] = norms) -> None:
            means(range(island * world, (island + 1) * world), step)(copy)
            norms[island] = nn.utils.clip_grad_norm_(copy.parameters(), case.max_norm)

        _backward(model, case, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        islands.step(gradients)
        assert len({value.item() for value in norms.values()}) == len(norms)  # so that a norm over all would show
        off = max(off, abs((norm - norms[rank // world]).item()))
    sync(model)
    expected = dict(islands.models[rank // world].named_parameters())
    off = max(off, *(distance(p, expected[n].detach()) for n, p in model.named_parameters()))
    for found, kept in zip(model.buffers(), buffers[rank], strict=True):
        off = max(off, (found - kept).abs().max().item())
    return off


def _backward(model: Any, case: Case, step: int) -> None:
    for micro in range(case.micro_steps):
        with nullcontext() if micro == case.micro_steps - 1 else model.no_sync():
            (case.loss(model, dist.get_rank(), micro, step) / case.micro_steps).backward()


def test_buffers_are_broadcast_inside_an_island(world: Worlds) -> None:
    means = world(4).run(_broadcast_buffers)
    assert means[0] == means[1] != means[2] == means[3]


def _broadcast_buffers() -> float:
    model = towpath.shard(_build(_normed), strategy_of("ddp", SHAPE, outer=STREAMING))
    _loss_of_rows(model, dist.get_rank(), 0, 0)
    towpath.broadcast_buffers(model)
    return model[0].norm.running_mean.sum().item()


def test_an_island_whose_data_has_ended_goes_on_with_the_others(world: Worlds) -> None:
    """Island 0 has three batches, and then gets no gradients. Of island 1, one rank has four, and one has five."""
    for steps, off in world(4).run(_join, (3, 3, 4, 5)):
        assert steps == 5 and off <= TOLERANCE


def _join(batches: tuple[int, ...]) -> tuple[int, float]:
    loss, rank, steps = loss_on("gpt"), dist.get_rank(), 0
    model, plain = (_build(partial(MODELS["gpt"].make, torch.float64)) for _ in range(2))
    model = towpath.shard(model, strategy_of("zero3", SHAPE, outer=STREAMING))
    islands, optimizer = Islands(plain, STREAMING, 2, fragments_of(model, STREAMING), adamw), adamw(model)
    means = mean_of(lambda copy, r, micro, step: (step < batches[r]) * loss(copy, r, micro, min(step, batches[r] - 1)))
    for step in towpath.join(model, range(batches[rank])):
        loss(model, rank, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        islands.step(
            lambda island, copy, step=steps: means(range(2 * island, 2 * island + 2), step)(copy),
            skipped=(0,) if steps >= batches[0] else (),
        )
        steps += 1
    sync(model)
    expected = dict(islands.models[rank // 2].named_parameters())
    return steps, max(distance(p, expected[n].detach()) for n, p in model.named_parameters())


# --- loss scaling -----------------------------------------------------------------------------------------------------


@in_turn(LABELS, 1)
@pytest.mark.parametrize("offload", [None, seldom("optimizer")])
def test_an_island_that_overflows_skips_its_step(label: str, offload: str | None, world: Worlds) -> None:
    """Only its own scale falls. Exchanges go on by count."""
    for rank, (off, scale) in enumerate(world(4).run(_overflow, label, offload)):
        assert off <= TOLERANCE
        assert scale == (64.0 if rank < 2 else 256.0)


def _overflow(label: str, offload: str | None) -> tuple[float, float]:
    """On one rank of island 0, the loss overflows in the steps after which exchanges begin or end."""
    loss, rank = loss_on("gpt"), dist.get_rank()
    model, plain = (_build(partial(MODELS["gpt"].make, torch.float64)) for _ in range(2))
    model = towpath.shard(model, strategy_of(label, SHAPE, outer=STREAMING, offload=offload))
    islands, means = Islands(plain, STREAMING, 2, fragments_of(model, STREAMING), adamw), mean_of(loss)
    optimizer, scaler = adamw(model), torch.amp.GradScaler(DEVICE.type, init_scale=256.0)
    for step in range(STEPS):
        overflows = step in (2, 3)
        scaled = scaler.scale(loss(model, rank, 0, step))
        (scaled * (math.inf if overflows and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        islands.step(
            lambda island, copy, step=step: means(range(2 * island, 2 * island + 2), step)(copy),
            skipped=(0,) if overflows else (),
        )
    sync(model)
    expected = dict(islands.models[rank // 2].named_parameters())
    return max(distance(p, expected[n].detach()) for n, p in model.named_parameters()), scaler.get_scale()


# --- the same to the bit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [seldom(Precision()), MIXED], ids=["float32", "bf16"])
@pytest.mark.parametrize("form", [seldom(Form.MESSAGES), Form.COLLECTIVES], ids=str)
@in_turn([(n, each) for n in LABELS for each in ("optimizer", "params", "optimizer+params")], 1, "case")
def test_what_is_offloaded_trains_the_same_to_the_bit(
    case: tuple[str, str], form: Form, precision: Precision, world: Worlds
) -> None:
    world(4).run(_offloaded, *case, form, precision)


def _offloaded(label: str, offload: str, form: Form, precision: Precision) -> None:
    with in_form(form):
        runs = [Run.of(label, SHAPE, offload=each, outer=STREAMING, precision=precision) for each in (offload, None)]
        for run in runs:
            run.train(range(STEPS))
            sync(run.model)
        assert differing(*(run.content() for run in runs)) == []


@in_turn([(label, offload) for label in LABELS for offload in (None, "optimizer")], 1, "case")
@pytest.mark.parametrize("codec", ["none", seldom("int4:64")])
def test_exchanges_over_gloo_and_nccl_have_the_same_bits(
    codec: str, case: tuple[str, str | None], world: Worlds
) -> None:
    world(4).run(_over_both, *case, outer_transport(codec))


def _over_both(label: str, offload: str | None, transport: Transport) -> None:
    """By default, GPUs send them from host memory. The schedule counts it there."""
    contents: list[Any] = []
    with in_form(Form.COLLECTIVES):
        for nccl in (False, True):
            outer = replace(STREAMING, transport=transport, nccl=nccl)
            run = Run.of(label, SHAPE, offload=offload, outer=outer, precision=MIXED)
            run.train(range(STEPS))
            schedule, found = towpath.schedule(run.model.towpath_engine.strategy, run.model), towpath.stats(run.model)
            assert schedule.outer is not None and schedule.outer.from_host is not nccl
            assert ("outer differences" in found.host_memory_bytes) is not nccl
            for planned, held in (
                (schedule.memory_bytes() | schedule.buffer_bytes(), found.memory_bytes),
                (schedule.host_memory_bytes(), found.host_memory_bytes),
            ):
                assert {kind: held[kind] for kind in planned} == planned
            plan, (check, *_) = schedule.outer, run.model.towpath_engine.outer._exchanges[0].transfers
            backend = check.members.process_group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == plan.timeout(run.model.towpath_engine.comm.job.timeout)
            queue = run.model.towpath_engine.comm.queues._buffers.get(HOST_EXCHANGES, [])
            assert sum(buffers.nbytes for buffers in queue) == found.host_memory_bytes.get("outer messages", 0)
            sync(run.model)
            contents.append(run.content())
    assert differing(*contents) == []


# --- what is counted -------------------------------------------------------------------------------------------------


@in_turn(("zero3", "zero1", "mics:1x2", "ddp"), 1)
@pytest.mark.parametrize("topology", [SHAPE, seldom(LONG)], ids=str)
def test_stats_count_the_bytes_of_all_islands(topology: Topology, label: str, world: Worlds) -> None:
    if label == "mics:1x2" and topology == SHAPE:  # no island has two nodes
        label = "mics"
    world(4).run(_count_bytes, label, topology)


def _count_bytes(label: str, topology: Topology) -> None:
    """In a whole period, as the schedule says."""
    run, counted = Run.of(label, topology, outer=Outer(every=2, islands=2)), list[tuple[int, ...]]()
    for step in range(4):
        run.train([step])
        found, looked = towpath.stats(run.model), totals(run.model)
        counted.append((found.intra_bytes, found.inter_bytes, looked.intra_bytes, looked.inter_bytes))
    schedule = towpath.schedule(run.model.towpath_engine.strategy, run.model, 1)
    assert schedule.outer is not None
    intra, inter = (
        2 * sum(getattr(t, kind) for t in schedule.transfers) + getattr(schedule.outer, kind)
        for kind in ("intra_bytes", "inter_bytes")
    )
    # Each of the last two steps publishes what the one before it wrote.
    assert [after - before for before, after in zip(counted[1], counted[3], strict=True)] == [intra, inter] * 2


# --- state dicts ------------------------------------------------------------------------------------------------------


class Pretrained(nn.Sequential):
    def save_pretrained(self, folder: str, state_dict: dict[str, Tensor] | None = None) -> str:
        return folder if state_dict else ""


def test_full_state_dicts_are_those_of_the_first_island(world: Worlds) -> None:
    answers = world(4).run(_state_dicts)
    assert [(count > 0, written) for count, written, _ in answers] == [(True, "here"), *[(False, None)] * 3]
    assert [wrong for _, _, wrong in answers] == [[]] * 4


def _state_dicts() -> tuple[int, str | None, list[str]]:
    """Islands differ after two steps. What rank 0 has is then loaded on all of them."""
    model: Any = towpath.shard(Pretrained(*_normed()), strategy_of("zero3", SHAPE, outer=Outer(every=9)))
    optimizer = adamw(model)
    for step in range(2):
        model(noise(dist.get_rank(), 0, step, 4, 5).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    towpath.broadcast_buffers(model)
    first: list[Any] = [content(model, optimizer)]
    dist.broadcast_object_list(first)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = (
        checkpoint.get_model_state_dict(model, options=options),
        checkpoint.get_optimizer_state_dict(model, optimizer, options=options),
    )
    written = model.save_pretrained("here")
    given = replace(options, broadcast_from_rank0=True)
    checkpoint.set_optimizer_state_dict(model, optimizer, states[1], options=given)
    checkpoint.set_model_state_dict(model, states[0], options=given)
    wrong = differing(content(model, optimizer), first[0])
    return sum(map(len, states)), written, [name for name in wrong if "seen" not in name]  # it is not persistent


@pytest.mark.parametrize("label", ["zero3", seldom("paro-iig"), seldom("ddp")])
@on_ranks(4)
def test_pytorchs_checkpoint_has_the_first_island(label: str, tmp_path: Path) -> None:
    """Islands differ after two steps, and not after all of them have loaded."""
    run = Run.of(label, SHAPE, outer=Outer(every=9))
    run.train(range(2))
    first: list[Any] = [run.content()]
    dist.broadcast_object_list(first)
    states = {
        "model": checkpoint.get_model_state_dict(run.model),
        "optimizer": checkpoint.get_optimizer_state_dict(run.model, run.optimizer),
    }
    dcp.save(states, checkpoint_id=tmp_path)
    dcp.load(states, checkpoint_id=tmp_path)
    assert differing(run.content(), first[0]) == []


# --- checkpoints ------------------------------------------------------------------------------------------------------


CODED = ("zero++", "qgz", "ddp gradients=low-rank:2", "zero3 exact=True", "zero++ gradients_until=1")


@pytest.mark.parametrize("kind", ["offloaded", "coded"])
@in_turn(range(15), 1, "number")
def test_a_run_resumes_bit_for_bit_in_a_delay(number: int, kind: str, world: Worlds, tmp_path: Path) -> None:
    if kind == "coded":
        world(4).run(_resume, tmp_path, CODED[number % len(CODED)], LONG, replace(STREAMING, islands=2))
        return
    offload = ("optimizer", "params", "optimizer+params")[number // len(LABELS)]
    world(4).run(_resume, tmp_path, f"{LABELS[number % len(LABELS)]} offload={offload}", SHAPE, STREAMING)


class Position:
    """How far a rank has read, and the order that it reads in."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": 0, "order": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Scaled:
    """A run whose islands have other loss scales, and have read other data."""

    model: Any
    optimizer: optim.Optimizer
    scaler: torch.amp.GradScaler
    position: Position

    @staticmethod
    def of(label: str, topology: Topology, outer: Outer | None) -> Scaled:
        model = towpath.shard(MODELS["gpt"].make(torch.float32), strategy_of(label, topology, outer=outer))
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0, growth_interval=3)
        return Scaled(model, adamw(model), scaler, Position())

    def train(self, first: int, last: int) -> None:
        entry, rank = MODELS["gpt"], dist.get_rank()
        for step in range(first, last):
            loss = entry.loss(self.model, *entry.micro_batch(rank, 0, self.position.state["step"], torch.float32))
            overflows = rank < 2 and step in (1, 5)
            (self.scaler.scale(loss) * (math.inf if overflows else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.position.state = {"step": step + 1 + 10 * (rank // 2), "order": torch.randperm(3)}

    @property
    def state(self) -> checkpoint.State:
        return checkpoint.State(self.model, self.optimizer, scaler=self.scaler, training=self.position)

    def content(self) -> dict[str, Tensor]:
        sync(self.model)
        extras = {"scale": torch.tensor(self.scaler.get_scale()), "order": self.position.state["order"]}
        return content(self.model, self.optimizer) | extras | {"step": torch.tensor(self.position.state["step"])}


def _resume(root: Path, label: str, topology: Topology, outer: Outer) -> None:
    """Saved after four steps, when the second exchange of a fragment is under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        run, resumed = (Scaled.of(label, topology, outer) for _ in range(2))
    torch.manual_seed(dist.get_rank() // 2)
    run.train(0, 4)
    assert checkpoint.save(root, 4, run.state).ok
    run.train(4, STEPS)
    resumed.train(0, 1)  # so that what is right afterwards was loaded
    loaded = checkpoint.load(root, resumed.state)
    assert loaded is not None and loaded.notes == ()
    assert resumed.position.state["step"] == 4 + 10 * (dist.get_rank() // 2)
    resumed.train(4, STEPS)
    assert differing(resumed.content(), run.content()) == []


def test_extras_may_differ_between_islands_and_not_inside_one(world: Worlds, tmp_path: Path) -> None:
    for same, notes, refused in world(4).run(_extras, tmp_path):
        assert same and not any("training" in note for note in notes)
        assert "'training'" in refused and "rank 2 has" in refused and "rank 3 has" in refused


def _extras(root: Path) -> tuple[bool, tuple[str, ...], str]:
    """A run without islands gets what the first island has saved."""
    run, rank = Scaled.of("zero1", SHAPE, STREAMING), dist.get_rank()
    torch.manual_seed(rank // 2)
    run.train(0, 3)
    assert checkpoint.save(root, 3, run.state).ok
    first = [run.position.state, run.scaler.get_scale()]
    dist.broadcast_object_list(first)
    other = Scaled.of("zero3", SHAPE, None)
    loaded = checkpoint.load(root, other.state)
    assert loaded is not None
    same = other.position.state["step"] == first[0]["step"] and other.scaler.get_scale() == first[1]
    same = same and torch.equal(other.position.state["order"], first[0]["order"])
    if rank == 3:
        run.position.state["step"] += 1
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(root, 4, run.state)
    return same, loaded.notes, str(caught.value)
