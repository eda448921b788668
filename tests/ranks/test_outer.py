"""Islands that synchronize now and then train as the same islands do when one process simulates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.islands import Islands, fragments_of, mean_gradients
from tests.ranks.models import MODELS
from tests.ranks.server import World, on_ranks
from tests.ranks.strategies import ROUNDING, in_turn, strategy_of
from tests.ranks.twin import distance
from towpath import Outer, Topology, Transport

# Sums are taken in another order than in one process, nothing else differs. AdamW raises it by some 1e5 at most.
TOLERANCE = 1e-9

PRESETS = tuple(name for name in towpath.strategies() if name not in ROUNDING)

SYNCHRONOUS = Outer(every=1, lr=1.0, momentum=0.0)
LOOKAHEAD = Outer(every=3, lr=0.7, momentum=0.9, islands=1)
STREAMING = Outer(every=3, fragments=2, delay=1, lr=0.7, momentum=0.9, blend=0.25)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def sharded(label: str, topology: Topology, outer: Outer, dtype: torch.dtype = torch.float64, name: str = "gpt") -> Any:
    """On a rank: a model of tests/ranks/models.py, sharded with outer steps."""
    return towpath.shard(MODELS[name].make(dtype), strategy_of(label, topology, outer=outer))


def sync(model: Any) -> None:
    """Let the exchanges of the last step begin and end, as the next forward pass would."""
    model.towpath_engine.sync_islands()


def train_beside(label: str, topology: Topology, outer: Outer, make: Make, steps: int) -> tuple[Any, Islands]:
    """On a rank: train, and simulate all islands in this process. Return both."""
    entry, dtype, rank = MODELS["gpt"], torch.float64, dist.get_rank()
    model = sharded(label, topology, outer)
    optimizer, strategy = make(model), model.towpath_engine.strategy
    world = strategy.topology.world
    islands = Islands(entry.make(dtype), outer, strategy.islands, fragments_of(model, outer), make)
    for step in range(steps):
        entry.loss(model, *entry.micro_batch(rank, 0, step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        islands.step(
            lambda island, copy, step=step: mean_gradients(
                entry, range(island * world, (island + 1) * world), step, dtype
            )(copy)
        )
    return model, islands


def away(model: Any, expected: nn.Module) -> float:
    """On a rank: how far the parameters are from those of a simulated island."""
    values = dict(expected.named_parameters())
    return max(distance(p, values[name].detach()) for name, p in model.named_parameters())


def train(label: str, topology: Topology, outer: Outer, make: Make, steps: int) -> float:
    """On a rank: train, and return how far the parameters end from those of the simulated island."""
    model, islands = train_beside(label, topology, outer, make, steps)
    sync(model)
    return away(model, islands.models[dist.get_rank() // model.towpath_engine.strategy.topology.world])


@in_turn(PRESETS, 1, "preset")
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_every_step_with_plain_sgd_is_synchronous_training(
    preset: str, shape: tuple[int, int], world: Callable[[int], World]
) -> None:
    topology = Topology(*shape)
    for off in world(topology.world).run(train_synchronously, preset, topology):
        assert off <= TOLERANCE


def train_synchronously(label: str, topology: Topology) -> float:
    """On a rank: the reference is one process with the mean gradient of all ranks, and knows no islands."""
    entry, dtype, rank = MODELS["gpt"], torch.float64, dist.get_rank()
    model, plain = sharded(label, topology, SYNCHRONOUS), entry.make(dtype)
    optimizer, of_plain = sgd(model), sgd(plain)
    for step in range(4):
        entry.loss(model, *entry.micro_batch(rank, 0, step, dtype)).backward()
        mean_gradients(entry, range(topology.world), step, dtype)(plain)
        for each in (optimizer, of_plain):
            each.step()
            each.zero_grad()
    sync(model)
    expected = dict(plain.named_parameters())
    return max(distance(p, expected[name].detach()) for name, p in model.named_parameters())


SETTINGS = [
    *((shape, LOOKAHEAD) for shape in ((2, 2), (3, 1))),
    *((shape, Outer(every=3, fragments=2, delay=1, blend=0.25)) for shape in ((2, 2), (3, 1))),
    ((4, 1), Outer(every=3, fragments=2, delay=1, blend=0.25, islands=2)),
]


@in_turn(PRESETS, 1, "preset")
@pytest.mark.parametrize(("shape", "outer"), SETTINGS)
def test_islands_look_ahead_with_fragments_delay_and_blend(
    preset: str, shape: tuple[int, int], outer: Outer, world: Callable[[int], World]
) -> None:
    topology = Topology(*shape)
    for off in world(topology.world).run(train, preset, topology, outer, adamw, 8):
        assert off <= TOLERANCE


# --- what counts as a step --------------------------------------------------------------------------------------------


@in_turn(PRESETS, 1, "preset")
def test_evaluation_and_reading_change_no_bit(preset: str, world: Callable[[int], World]) -> None:
    ranks = world(4)
    quiet, watched = (ranks.run(train_watched, preset, Topology(2, 2), often) for often in (False, True))
    assert quiet == watched


def train_watched(label: str, topology: Topology, often: bool) -> list[str]:
    """On a rank: train, and perhaps evaluate and read the parameters at any time. Return a digest of each parameter."""
    entry, rank = MODELS["gpt"], dist.get_rank()
    model = sharded(label, topology, STREAMING, torch.float32)
    optimizer = adamw(model)

    def watch() -> None:
        if often:
            with torch.no_grad():
                entry.loss(model, *entry.micro_batch(rank, 5, 0, torch.float32))
            with towpath.full_parameters(model):
                pass

    for step in range(8):
        watch()
        entry.loss(model, *entry.micro_batch(rank, 0, step, torch.float32)).backward()
        watch()
        optimizer.step()
        watch()
        optimizer.zero_grad()
    sync(model)
    return [p.to_local().double().sum().item().hex() for p in model.parameters()]


@in_turn(PRESETS, 1, "preset")
@pytest.mark.parametrize("after", ["the optimizer", "an exchange"])
def test_averaged_islands_hold_the_mean_of_their_weights(
    preset: str, after: str, world: Callable[[int], World]
) -> None:
    """Also in the middle of a delay, and a second time without effect."""
    for off, again in world(4).run(average, preset, Topology(2, 2), after):
        assert off <= TOLERANCE
        assert again <= 1e-15


def average(label: str, topology: Topology, after: str) -> tuple[float, float]:
    """On a rank: return how far averaged parameters are from those of the simulated islands, twice."""
    # An exchange begins after steps 1, 3 and 4.
    model, islands = train_beside(label, topology, STREAMING, adamw, 4)

    @torch.no_grad()
    def loss(of: nn.Module) -> float:
        entry = MODELS["gpt"]
        return entry.loss(of, *entry.micro_batch(dist.get_rank(), 1, 0, torch.float64)).item()

    if after == "an exchange":
        sync(model)
        loss(model)  # sends what the optimizer and the exchange wrote, so that only the average is left to send
    towpath.average_islands(model)
    islands.average()
    off = max(away(model, islands.models[0]), abs(loss(model) - loss(islands.models[0])))
    before = [p.to_local().clone() for p in model.parameters()]
    towpath.average_islands(model)
    again = max(
        (p.to_local() - b).abs().max().item() for p, b in zip(model.parameters(), before, strict=True) if b.numel()
    )
    return off, again


@on_ranks(4)
def test_islands_that_made_other_numbers_of_steps_are_not_averaged() -> None:
    """On a rank: let island 1 make one step more, without an exchange."""
    entry, model = MODELS["gpt"], sharded("zero1", Topology(2, 2), Outer(every=8))
    optimizer = sgd(model)
    for step in range(2 + dist.get_rank() // 2):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(towpath.TowpathError, match=r"islands are averaged after step.*on rank"):
        towpath.average_islands(model)


@on_ranks(4)
def test_islands_with_gradients_that_wait_for_their_step_are_not_averaged() -> None:
    """On a rank: let island 1 begin to accumulate gradients, and average."""
    entry, model = MODELS["gpt"], sharded("zero1", Topology(2, 2), Outer(every=8))
    if dist.get_rank() >= 2:
        with towpath.no_sync(model):
            entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float64)).backward()
    words = r"while rank 2 accumulates gradients.*after optimizer\.step\(\)"
    with pytest.raises(towpath.TowpathError, match=words):
        towpath.average_islands(model)


@pytest.mark.parametrize("remedy", ["step", "zero_grad", "zero_grad in place"])
@on_ranks(4)
def test_islands_are_not_averaged_between_backward_and_step(remedy: str) -> None:
    """On a rank: average where island 1 has not stepped, and again after the remedy."""
    entry, model = MODELS["gpt"], sharded("zero1", Topology(2, 2), Outer(every=8))
    optimizer, is_late = sgd(model), dist.get_rank() >= 2
    entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float64)).backward()
    if not is_late:
        optimizer.step()  # the gradients are still there
    with pytest.raises(towpath.TowpathError, match="while rank 2 has gradients that no optimizer has used"):
        towpath.average_islands(model)
    if is_late and remedy == "step":
        optimizer.step()
    elif is_late:
        optimizer.zero_grad(set_to_none=remedy == "zero_grad")
    towpath.average_islands(model)


# --- codecs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int4:64", "int8", "e4m3"])
def test_what_came_out_plus_what_is_kept_is_what_went_in(codec: str, world: Callable[[int], World]) -> None:
    for off in world(3).run(keep_everything, codec):
        assert off <= 1e-5


def keep_everything(codec: str) -> float:
    """On a rank: compare what the islands wanted to send in some exchanges with what arrived, and what is kept."""
    transport = Transport("flat", codec, feedback="all")
    model = sharded("zero3", Topology(3, 1), Outer(every=1, lr=1.0, momentum=0.0, transport=transport), torch.float32)
    entry, optimizer, outer = MODELS["gpt"], sgd(model), model.towpath_engine.outer
    wanted = arrived = torch.zeros(())
    parts = [part for part, _ in outer.parts()]
    for step in range(4):
        entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = torch.cat([part.slow for part in parts])
        moved = before - torch.cat([torch.cat(part._own) for part in parts])
        sync(model)
        wanted, arrived = wanted + moved, arrived + (before - torch.cat([part.slow for part in parts]))
    planned = {name: nbytes for memory in outer.plan.memory_bytes() for name, nbytes in memory.items()}
    assert sum(part.slow.nbytes for part in parts) == planned["slow weights"]
    held = sum(each.nbytes for part in parts for each in part.feedback)
    assert held <= planned["outer feedback"] <= 1.01 * held  # a rank with the last cell may have less of it
    dist.all_reduce(wanted)
    # What a rank kept: of its own differences, and of its slice of the sum.
    kept = torch.zeros_like(wanted)
    start = 0
    for part in parts:
        mine = kept[start : start + part.slow.numel()]
        for bound in part.exchange:
            transfer, collective = bound.transfer, bound.collective
            own = slice(*transfer.bounds(bound.members.slot))
            mine[own] += collective.gather.state[0].to(mine.device)
            cell = collective.reduce._buffers.cell
            rows = collective.reduce.state[0].to(mine.device).view(-1, cell)
            for slot, row in enumerate(rows):
                first, last = transfer.bounds(slot)
                mine[first:last] += row[: last - first]
        start += part.slow.numel()
    dist.all_reduce(kept)
    return ((3 * arrived + kept - wanted).abs().max() / wanted.abs().max()).item()


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["zero1", "ddp"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_islands_that_begin_with_other_weights_raise_on_every_rank(
    shape: tuple[int, int], label: str, world: Callable[[int], World]
) -> None:
    topology = Topology(*shape)
    for average in (False, True):
        for message in world(topology.world).run(begin_apart, label, topology, average):
            assert "slow weights of fragment 0 differ between islands" in message


def begin_apart(label: str, topology: Topology, average: bool) -> str:
    """On a rank: let one island write to a bias, which only one of its ranks exchanges, and return the error."""
    model = sharded(label, topology, Outer(every=1))
    if dist.get_rank() < topology.ranks_per_node:
        with torch.no_grad():
            list(model.parameters())[-1].add_(1)
    entry, optimizer = MODELS["gpt"], sgd(model)
    try:
        for step in range(2 - average):
            entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if average:
            towpath.average_islands(model)
    except towpath.TowpathError as error:
        return str(error)
    return ""
