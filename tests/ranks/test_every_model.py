"""Every kind of model people bring trains as its plain twin does: each test is one kind.

Functions whose names begin with an underscore run on every rank. All is in float64, where only the order of sums
differs from the twin's (see TOLERANCE in twin.py), and on smooth layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.utils import ModelOutput

import towpath
from tests.ranks.models import noise
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.twin import TOLERANCE, Loss, Twin, by_queue
from towpath import Topology

SHAPE = Topology(2, 2)
LABELS = ("zero3", "hpz", "mics:2x1", "paro-iig", "zero1", "paro-igg offload=params")
labels = in_turn(LABELS, 1)

WIDTH = 6


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(noise(rank, micro, step)).square().mean()


def _trained(build: Callable[[], nn.Module], label: str, loss: Loss = _loss) -> Twin:
    """Three steps of two micro-steps; the gradients of the first, and the parameters at the end, are the twin's."""
    twin = Twin(build, loss, label, SHAPE)
    twin.backward(micro_steps=2)
    twin.check_gradients()
    twin.step()
    twin.train(steps=2, micro_steps=2)
    twin.check_parameters()
    return twin


class Block(nn.Module):
    """A residual block, of which `inner` says how the inside is called."""

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self._inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        plain = self._inner is None or not torch.is_grad_enabled()
        return x + (self.mlp(x) if plain else self._inner(self.mlp, x))


class Chain(nn.Module):
    """A layer, blocks in the order of `order`, another layer; `outer` says how the blocks are called."""

    def __init__(self, blocks: list[nn.Module], outer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.order: list[int] = list(range(len(blocks)))
        self._outer = outer

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in self.order:
            plain = self._outer is None or not torch.is_grad_enabled()
            x = self.blocks[i](x) if plain else self._outer(self.blocks[i], x)
        return self.last(x)


def _chain(inner: Callable[..., Any] | None = None, outer: Callable[..., Any] | None = None) -> nn.Module:
    return Chain([Block(inner) for _ in range(3)], outer)


# --- activation checkpointing ----------------------------------------------------------------------------------------

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    # The results of these operations are kept, and all others are recomputed.
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ),
}


@labels
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_around_and_inside_a_block_changes_nothing(world: Worlds, how: str, label: str) -> None:
    world(4).run(_train_checkpointed, how, label)


def _train_checkpointed(how: str, label: str) -> None:
    twin = _trained(lambda: _chain(CHECKPOINTS[how], CHECKPOINTS[how]), label)
    # Nothing is gathered, or reduced, twice for a recomputation: the step is the schedule's, queue by queue.
    expected = towpath.schedule(strategy_of(label, SHAPE), twin.sharded, micro_steps=2).transfers
    found = towpath.stats(twin.sharded).last_step
    assert by_queue(found) == by_queue(expected)


# --- evaluation ------------------------------------------------------------------------------------------------------

EVALUATIONS: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@labels
@pytest.mark.parametrize("mode", EVALUATIONS)
@on_ranks(4)
def test_evaluation_at_any_time_sees_the_newest_parameters_and_changes_nothing(mode: str, label: str) -> None:
    """Before the first step, between micro-steps, between a forward and its backward, between steps."""
    twin = Twin(_chain, _loss, label, SHAPE)

    def evaluate(step: int, training: bool) -> None:
        values = []
        for model in (twin.sharded, twin.plain):
            model.train(training)
            with EVALUATIONS[mode]():
                values.append(_loss(model, 9, 0, step).item())
            model.train()
        assert abs(values[0] - values[1]) <= TOLERANCE

    for step in range(3):
        evaluate(step, training=step == 1)
        with twin.sharded.no_sync():
            (_loss(twin.sharded, dist.get_rank(), 0, step) / 2).backward()
        evaluate(step, training=False)
        loss = _loss(twin.sharded, dist.get_rank(), 1, step) / 2
        evaluate(step, training=True)
        loss.backward()
        for rank in range(4):
            for micro in range(2):
                (_loss(twin.plain, rank, micro, step) / 8).backward()
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@labels
@on_ranks(4)
def test_memory_first_touched_in_inference_mode_serves_training(label: str) -> None:
    """Units inside a unit need memory of their own, which is made when they first run."""
    twin = Twin(_chain, _loss, label, SHAPE, units=[Block, nn.Linear])
    with torch.inference_mode():
        _loss(twin.sharded, 0, 0, 0)
    twin.train(steps=2, micro_steps=2)
    twin.check_parameters()


# --- several forwards ------------------------------------------------------------------------------------------------


def _summed(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return _loss(model, rank, micro, step) + _loss(model, rank, micro + 5, step)


@labels
@on_ranks(4)
def test_two_forwards_then_one_backward(label: str) -> None:
    _trained(_chain, label, _summed)


@labels
@on_ranks(4)
def test_two_forwards_then_two_backwards_the_last_one_first(label: str) -> None:
    twin = Twin(_chain, _loss, label, SHAPE)
    for step in range(3):
        first, last = (_loss(twin.sharded, dist.get_rank(), micro, step) for micro in (0, 5))
        with twin.sharded.no_sync() if step else nullcontext():
            last.backward()
        first.backward()
        for rank in range(4):
            (_summed(twin.plain, rank, 0, step) / 4).backward()
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@labels
@on_ranks(4)
def test_one_forward_then_two_backwards_over_its_graph(label: str) -> None:
    twin = Twin(_chain, _loss, label, SHAPE)
    for step in range(2):
        loss = _loss(twin.sharded, dist.get_rank(), 0, step)
        loss.backward(retain_graph=True)
        loss.backward()
        for rank in range(4):
            (_loss(twin.plain, rank, 0, step) / 2).backward()
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


# --- modules cast or moved before -------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU()) for _ in range(3)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def _channels_last() -> nn.Module:
    return Convolutions().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _conv_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    images = noise(rank, micro, step, 4, 3, 5, 5).to(memory_format=torch.channels_last)
    return model(images).square().mean()


def _transposed() -> nn.Module:
    """Cast to and fro, its matrices columns first: nothing lies as a new module's parameters do."""
    model = _chain().to(torch.bfloat16).to("cpu").double()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


@labels
@pytest.mark.parametrize(
    ("build", "loss"), [(_channels_last, _conv_loss), (_transposed, _loss)], ids=["channels last", "transposed"]
)
@on_ranks(4)
def test_a_model_in_another_memory_format_trains_exactly(
    label: str, build: Callable[[], nn.Module], loss: Loss
) -> None:
    _trained(build, label, loss)


# --- buffers ---------------------------------------------------------------------------------------------------------


@labels
@on_ranks(4)
def test_running_statistics_are_each_ranks_own_and_as_without_sharding(label: str) -> None:
    torch.manual_seed(7)
    plain = Convolutions().double()
    sharded: Any = towpath.shard(copy.deepcopy(plain), strategy_of(label, SHAPE), topology=SHAPE)
    for step in range(2):
        for model in (sharded, plain):
            _conv_loss(model, dist.get_rank(), 0, step).backward()
            model.zero_grad()
    for (name, found), expected in zip(sharded.named_buffers(), plain.buffers(), strict=True):
        # The weights are the same to the bit, and so is the arithmetic.
        assert torch.equal(found, expected), name
    for model in (sharded, plain):
        model.eval()
    assert torch.equal(_conv_loss(sharded, 5, 0, 9), _conv_loss(plain, 5, 0, 9))


# --- what units take and return --------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    steps: int


@dataclass
class Output(ModelOutput):
    hidden: Tensor | None = None
    extras: tuple[Tensor, ...] | None = None


Value = dict[str, Any] | State | tuple[Any, ...] | Output

WRAPS: tuple[Callable[[Tensor], Value], ...] = (
    lambda x: {"hidden": x, "steps": 3, "nothing": None},
    lambda x: State(x, 3),
    lambda x: (3, ([x], None)),
    lambda x: Output(hidden=x, extras=(x.detach(),)),
)


def _unwrap(value: Any) -> Tensor:
    if isinstance(value, tuple):
        return value[1][0][0]
    return value["hidden"] if isinstance(value, dict) else value.hidden


class Wrapping(nn.Module):
    """A block that takes and returns its tensor inside something."""

    def __init__(self, wrap: Callable[[Tensor], Value]) -> None:
        super().__init__()
        self.block, self._wrap = Block(), wrap

    def forward(self, value: Value) -> Value:
        return self._wrap(self.block(_unwrap(value)))


class Mixed(nn.Module):
    """Blocks that pass one another dicts, dataclasses, tuples and ModelOutputs; the model returns one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Wrapping, WRAPS))

    def forward(self, x: Tensor) -> Value:
        value: Value = State(self.first(x), 0)
        for block in self.blocks:
            value = block(value)
        return value


@labels
@on_ranks(4)
def test_units_may_return_their_tensors_inside_anything(label: str) -> None:
    _trained(Mixed, label, lambda model, *at: _unwrap(model(noise(*at))).square().mean())


# --- shared parameters -----------------------------------------------------------------------------------------------


def _sharing_weights() -> nn.Module:
    """Neighbors and strangers: blocks 0 and 1 share a matrix, 1 and 3 a bias, the last layer a matrix of block 2's."""
    model: Any = Chain([Block() for _ in range(4)])
    model.blocks[1].mlp[0].weight = model.blocks[0].mlp[0].weight
    model.blocks[3].mlp[2].bias = model.blocks[1].mlp[2].bias
    model.last.bias = model.blocks[2].norm.weight
    return model


def _sharing_modules() -> nn.Module:
    """A module inside two blocks, and a block at two places of the list."""
    model: Any = Chain([Block() for _ in range(3)])
    model.blocks[1].mlp = model.blocks[0].mlp
    model.blocks.append(model.blocks[2])
    model.order = [0, 1, 2, 3]
    return model


@labels
@pytest.mark.parametrize("build", [_sharing_weights, _sharing_modules], ids=["parameters", "modules"])
@on_ranks(4)
def test_units_may_share(label: str, build: Callable[[], nn.Module]) -> None:
    _trained(build, label)


# --- later steps in another order -------------------------------------------------------------------------------------

# The first step settles what is gathered ahead; each later one is another way to be wrong about it.
ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2), (1, 1, 3), (3, 0, 3, 1, 2), (0, 1, 2, 3))


@labels
@on_ranks(4)
def test_later_steps_may_run_in_another_order(label: str) -> None:
    """Both micro-steps of a step differ as well, and so does an evaluation between."""
    outer = CHECKPOINTS["non-reentrant"]
    twin = Twin(lambda: Chain([Block() for _ in range(4)], outer), _ordered_loss, label, SHAPE)
    for step in range(len(ORDERS)):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        twin.step()
        with torch.no_grad():
            _ordered_loss(twin.sharded, 0, 5, step)
    twin.check_parameters()


def _ordered_loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
    model.order = ORDERS[(step + micro) % len(ORDERS) if step else 0]
    return _loss(model, rank, micro, step)


class FixedFeatures(Chain):
    """Only what follows the first block trains, and in evaluation mode at that, as a fixed backbone runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.first(x))
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.last(x)


@on_ranks(4)
def test_backward_never_reads_a_copy_that_the_forward_pass_did_not_make() -> None:
    """The second block's weights are gathered ahead, while the first computes without a graph: no copy is kept then."""
    _trained(lambda: FixedFeatures([Block() for _ in range(3)]).eval(), "hpz")


# --- small units that travel together --------------------------------------------------------------------------------


class Wide(nn.Module):
    """A residual block of more parameters than three of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stage(nn.Module):
    """A block with another's class, so that blocks small and large stand in one list."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _uneven() -> nn.Module:
    inner = [Block(), Block(), Block(), Wide(), Block(), Block()]
    return Chain([Stage(module) for module in inner])


@labels
@on_ranks(4)
def test_small_neighbours_travel_together_and_train_exactly(label: str) -> None:
    twin = _trained(_uneven, label)
    units = [u.name for u in twin.sharded.towpath_engine.units]
    assert units == ["", "blocks.0..blocks.2", "blocks.3", "blocks.4..blocks.5"]
    steps = towpath.schedule(strategy_of(label, SHAPE), twin.sharded, micro_steps=2)
    executed = towpath.stats(twin.sharded).last_step
    assert Counter((t.kind, t.unit) for t in executed) == Counter((t.kind, t.unit) for t in steps.transfers)


@on_ranks(4)
def test_a_unit_of_several_modules_may_be_left_in_the_middle() -> None:
    """The second of its modules runs after another unit has taken the memory, and one of them not at all."""
    twin = Twin(_uneven, _loss, "zero3", SHAPE)
    for step, order in enumerate(([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5], [5, 0, 3, 4, 2], [2, 4, 3, 3, 0])):
        for model in (twin.plain, twin.sharded):
            model.order = order  # pyright: ignore[reportAttributeAccessIssue]
        twin.backward(step)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
