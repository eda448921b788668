"""Every kind of model people bring trains as its plain twin does: each test is one kind.

Functions whose names begin with an underscore run on every rank. All is in float64, where only the order of sums
differs from the twin's (see TOLERANCE in twin.py), and on smooth layers.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.utils import ModelOutput

import towpath
from tests.ranks.models import DEVICE
from tests.ranks.reference import optimizer_for
from tests.ranks.server import World, run_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.twin import TOLERANCE, Loss, Twin, distance
from towpath import Topology, errors
from towpath.core.strategy import TransferKind
from towpath.engine.layout import lay_out

Worlds = Callable[[int], World]

SHAPE = Topology(2, 2)
LABELS = ("zero3", "hpz", "mics:2x1", "paro-iig", "zero1", "paro-igg offload=params")
labels = in_turn(LABELS, 1)

WIDTH = 6


def _noise(rank: int, micro: int, step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro + 100 * step)
    return torch.randn(*(shape or (3, WIDTH)), generator=generator, dtype=torch.float64).to(DEVICE)


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(_noise(rank, micro, step)).square().mean()


def _train(build: Callable[[], nn.Module], label: str, loss: Loss = _loss) -> None:
    _trained(build, label, loss)


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
@pytest.mark.parametrize("where", [seldom("outside"), seldom("inside"), "both"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpointing_around_or_inside_a_block_changes_nothing(
    world: Worlds, how: str, where: str, label: str
) -> None:
    world(4).run(_train_checkpointed, how, where, label)


def _train_checkpointed(how: str, where: str, label: str) -> None:
    call = CHECKPOINTS[how]
    inner, outer = (call if where in (place, "both") else None for place in ("inside", "outside"))
    twin = _trained(lambda: _chain(inner, outer), label)
    # Nothing is gathered, or reduced, twice for a recomputation: the step is the schedule's, queue by queue.
    expected = towpath.schedule(strategy_of(label, SHAPE), twin.sharded, micro_steps=2).transfers
    found = towpath.stats(twin.sharded).last_step
    for kinds in (
        {TransferKind.GATHER, TransferKind.BACKWARD_GATHER},
        {TransferKind.REDUCE},
        {TransferKind.GRAD_SYNC, TransferKind.UNUSED_PARAMS},
        {TransferKind.PARAM_SYNC},
    ):
        assert [t for t in found if t.kind in kinds] == [t for t in expected if t.kind in kinds]


@pytest.mark.parametrize("how", [seldom("reentrant"), "non-reentrant"])
def test_a_recomputation_gathers_from_the_backward_copy_not_across_nodes(world: Worlds, how: str) -> None:
    for plain, checkpointed in world(4).run(_inter_bytes_of_gathers, how):
        assert plain == checkpointed
        assert checkpointed[TransferKind.GATHER] > 0
        assert checkpointed[TransferKind.BACKWARD_GATHER] == 0


def _inter_bytes_of_gathers(how: str) -> list[dict[TransferKind, int]]:
    sent: list[dict[TransferKind, int]] = []
    for call in (None, CHECKPOINTS[how]):
        twin = Twin(lambda call=call: _chain(outer=call), _loss, "hpz", SHAPE)
        twin.train(steps=2)
        last = towpath.stats(twin.sharded).last_step
        kinds = (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)
        sent.append({kind: sum(t.inter_bytes for t in last if t.kind is kind) for kind in kinds})
    return sent


# --- torch.compile ---------------------------------------------------------------------------------------------------

COMPILES = ("forward", "in place", "wrapped", "in place, after shard()")


def _compiled(way: str, backend: str) -> nn.Module:
    model: Any = _chain()
    options: dict[str, Any] = {"fullgraph": True, "backend": backend}
    for i, block in enumerate(model.blocks):
        if way == "forward":
            block.forward = torch.compile(block.forward, **options)
        elif way == "in place":
            block.compile(**options)
        elif way == "wrapped":
            model.blocks[i] = torch.compile(block, **options)
    return model


@pytest.mark.compiles
@in_turn(("zero3", "hpz", "paro-iig", "zero1"), 1)
@pytest.mark.parametrize("way", [seldom(way) if way in ("in place", "forward") else way for way in COMPILES])
def test_blocks_compiled_as_one_graph_each_train_exactly(world: Worlds, way: str, label: str) -> None:
    """On two ranks: each of them compiles for itself."""
    world(2).run(_train_compiled, way, label, timeout=600)


def _train_compiled(way: str, label: str, backend: str = "aot_eager") -> None:
    topology = Topology(2, 1)
    with _fresh_compiler():
        twin = Twin(lambda: _compiled(way, backend), _loss_of_plain_eager, label, topology)
        if way == "in place, after shard()":
            for block in twin.sharded.blocks:
                block.compile(fullgraph=True, backend=backend)
        twin.train(steps=2, micro_steps=2)
        twin.check_parameters()
        frames = torch._dynamo.utils.counters["stats"]
        assert frames["unique_graphs"] > 0  # the blocks were compiled,
        assert not torch._dynamo.utils.counters["graph_break"]  # and whole


def _loss_of_plain_eager(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """The twin is compiled too, for its names' sake; it runs as it is written."""
    if hasattr(model, "no_sync"):
        return _loss(model, rank, micro, step)
    with torch.compiler.set_stance("force_eager"):
        return _loss(model, rank, micro, step)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Without the graphs of the tests before: their number is limited for each function."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with warnings.catch_warnings():
            # It looks at the .grad of a block's input, and hides the warning in a way that does not work for errors.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            # And inductor's own imports are deprecated.
            warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
            yield
    finally:
        torch._dynamo.reset()


@pytest.mark.parity  # to compile takes longer than all else here
@pytest.mark.compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compiled_to_machine_code_train_exactly(world: Worlds) -> None:
    world(2).run(_train_by_inductor, timeout=600)


def _train_by_inductor() -> None:
    """Without vectors: to find out which the processor has, it would compile a program for each kind first."""
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        _train_compiled("forward", "zero3", "inductor")


# --- evaluation ------------------------------------------------------------------------------------------------------

EVALUATIONS: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@labels
@pytest.mark.parametrize("mode", EVALUATIONS)
def test_evaluation_at_any_time_sees_the_newest_parameters_and_changes_nothing(
    world: Worlds, mode: str, label: str
) -> None:
    """Before the first step, between micro-steps, between a forward and its backward, between steps."""
    world(4).run(_train_and_evaluate, mode, label)


def _train_and_evaluate(mode: str, label: str) -> None:
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
def test_memory_first_touched_in_inference_mode_serves_training(world: Worlds, label: str) -> None:
    """Units inside a unit need memory of their own, which is made when they first run."""
    world(4).run(_evaluate_first, label)


def _evaluate_first(label: str) -> None:
    twin = Twin(_chain, _loss, label, SHAPE, units=[Block, nn.Linear])
    with torch.inference_mode():
        _loss(twin.sharded, 0, 0, 0)
    twin.train(steps=2, micro_steps=2)
    twin.check_parameters()


# --- several forwards ------------------------------------------------------------------------------------------------


def _summed(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return _loss(model, rank, micro, step) + _loss(model, rank, micro + 5, step)


@labels
def test_two_forwards_then_one_backward(world: Worlds, label: str) -> None:
    world(4).run(_train, _chain, label, _summed)


@labels
@pytest.mark.parametrize("accumulate", [seldom(False), True], ids=["two boundaries", "one boundary"])
@pytest.mark.parametrize("last_first", [seldom(False), True], ids=["in order", "last first"])
def test_two_forwards_then_two_backwards(world: Worlds, label: str, accumulate: bool, last_first: bool) -> None:
    world(4).run(_train_interleaved, label, accumulate, last_first)


def _train_interleaved(label: str, accumulate: bool, last_first: bool) -> None:
    twin = Twin(_chain, _loss, label, SHAPE)
    for step in range(3):
        losses = [_loss(twin.sharded, dist.get_rank(), micro, step) for micro in range(2)]
        if last_first:
            losses.reverse()
        with twin.sharded.no_sync() if accumulate else nullcontext():
            losses[0].backward()
        losses[1].backward()
        for rank in range(4):
            (_summed_micro_steps(twin.plain, rank, step) / 4).backward()
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


def _summed_micro_steps(model: nn.Module, rank: int, step: int) -> Tensor:
    return _loss(model, rank, 0, step) + _loss(model, rank, 1, step)


@labels
def test_one_forward_then_two_backwards_over_its_graph(world: Worlds, label: str) -> None:
    world(4).run(_train_retained, label)


def _train_retained(label: str) -> None:
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


class Siamese(nn.Module):
    """Every block is run on two inputs, side by side; `call` says how."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x.flip(0)
        for block in self.blocks:
            call = block if self._call is None else partial(self._call, block)
            left, right = call(left), call(right)
        return left * right


@labels
@pytest.mark.parametrize("how", [seldom("plain"), seldom("reentrant"), "non-reentrant"])
def test_a_unit_may_run_on_two_inputs_side_by_side(world: Worlds, label: str, how: str) -> None:
    world(4).run(_train_siamese, label, how)


def _train_siamese(label: str, how: str) -> None:
    _train(lambda: Siamese(CHECKPOINTS.get(how)), label, lambda *of: _loss_with_grad_inputs(*of))


def _loss_with_grad_inputs(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """A reentrant checkpoint around the first block has gradients only where its inputs want them."""
    return model(_noise(rank, micro, step).requires_grad_()).square().mean()


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
    images = _noise(rank, micro, step, 4, 3, 5, 5).to(memory_format=torch.channels_last)
    return model(images).square().mean()


@labels
def test_a_channels_last_model_trains_exactly(world: Worlds, label: str) -> None:
    world(4).run(_train, _channels_last, label, _conv_loss)


def _transposed() -> nn.Module:
    """Cast to and fro, its matrices columns first: nothing lies as a new module's parameters do."""
    model = _chain().to(torch.bfloat16).to("cpu").double()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


@labels
def test_a_cast_model_with_transposed_parameters_trains_exactly(world: Worlds, label: str) -> None:
    world(4).run(_train, _transposed, label)


# --- buffers ---------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Buffers of every kind: of a unit and of the root, persistent and not, integers, strided, a single number."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.register_buffer("mask", torch.full((3,), bool(fill % 2)))
        self.register_buffer("angles", torch.full((5,), float(fill)), persistent=False)
        self.register_buffer("columns", torch.full((4, 3), float(fill)).t())
        self.register_buffer("rounded", torch.full((2,), float(fill), dtype=torch.bfloat16))
        self.register_buffer("number", torch.tensor(fill), persistent=False)
        for block in self.blocks:
            block[1].running_mean.fill_(fill)  # pyright: ignore[reportIndexIssue]
            block[1].num_batches_tracked.fill_(fill)  # pyright: ignore[reportIndexIssue]


def test_every_buffer_is_the_first_ranks_at_the_start_and_stays_the_same_tensor(world: Worlds) -> None:
    world(4).run(_shard_different_buffers)


def _shard_different_buffers() -> None:
    model = Buffered(dist.get_rank())
    before = dict(model.named_buffers())
    towpath.shard(model, "zero3", topology=SHAPE)
    for name, expected in Buffered(0).named_buffers():
        found = model.get_buffer(name)
        assert found is before[name], name
        assert torch.equal(found, expected), name
        assert found.stride() == expected.stride(), name
    assert [*model.state_dict()] == [*Buffered(0).state_dict()]


def test_a_buffer_with_gaps_in_memory_is_the_first_ranks(world: Worlds) -> None:
    assert world(4).run(_shard_buffer_with_gaps) == [0.0] * 4


def _shard_buffer_with_gaps() -> float:
    model = nn.Linear(4, 4)
    model.register_buffer("every_other", torch.full((4, 6), float(dist.get_rank()))[:, ::2])
    towpath.shard(model, "zero3", topology=SHAPE)
    return model.get_buffer("every_other").max().item()


@labels
def test_running_statistics_are_each_ranks_own_and_as_without_sharding(world: Worlds, label: str) -> None:
    world(4).run(_compare_statistics, label)


def _compare_statistics(label: str) -> None:
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

WRAPS: dict[str, Callable[[Tensor], Value]] = {
    "dict": lambda x: {"hidden": x, "steps": 3, "nothing": None},
    "dataclass": lambda x: State(x, 3),
    "nested tuple": lambda x: (3, ([x], None)),
    "ModelOutput": lambda x: Output(hidden=x, extras=(x.detach(),)),
}


def _unwrap(value: Any) -> Tensor:
    if isinstance(value, tuple):
        return value[1][0][0]
    return value["hidden"] if isinstance(value, dict) else value.hidden


class Wrapping(nn.Module):
    """A block that takes and returns its tensor inside something."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.block, self._wrap = Block(), wrap

    def forward(self, value: Value) -> Value:
        return WRAPS[self._wrap](self.block(_unwrap(value)))


class Mixed(nn.Module):
    """Blocks that pass one another dicts, dataclasses, tuples and ModelOutputs; the model returns one as well."""

    def __init__(self, wraps: tuple[str, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Wrapping(wrap) for wrap in wraps)

    def forward(self, x: Tensor) -> Value:
        value: Value = State(self.first(x), 0)
        for block in self.blocks:
            value = block(value)
        return value


def _wrapped_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return _unwrap(model(_noise(rank, micro, step))).square().mean()


@labels
@pytest.mark.parametrize("kinds", [*(seldom((k, k)) for k in WRAPS), tuple(WRAPS)], ids=[*WRAPS, "all"])
def test_units_may_return_their_tensors_inside_anything(world: Worlds, label: str, kinds: tuple[str, ...]) -> None:
    world(4).run(_train, partial(Mixed, kinds), label, _wrapped_loss)


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
def test_units_may_share(world: Worlds, label: str, build: Callable[[], nn.Module]) -> None:
    world(4).run(_train, build, label)


# --- later steps in another order -------------------------------------------------------------------------------------

# The first step settles what is gathered ahead; each later one is another way to be wrong about it.
ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2), (1, 1, 3), (3, 0, 3, 1, 2), (0, 1, 2, 3))


@labels
@pytest.mark.parametrize("how", [seldom("plain"), seldom("reentrant"), "non-reentrant"])
def test_later_steps_may_run_in_another_order(world: Worlds, label: str, how: str) -> None:
    world(4).run(_train_in_other_orders, label, how)


def _train_in_other_orders(label: str, how: str) -> None:
    """Both micro-steps of a step differ as well, and so does an evaluation between."""
    twin = Twin(lambda: Chain([Block() for _ in range(4)], CHECKPOINTS.get(how)), _ordered_loss, label, SHAPE)
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


def test_backward_never_reads_a_copy_that_the_forward_pass_did_not_make(world: Worlds) -> None:
    """The second block's weights are gathered ahead, while the first computes without a graph: no copy is kept then."""
    world(4).run(_train, _fixed_features, "hpz")


def _fixed_features() -> nn.Module:
    return FixedFeatures([Block() for _ in range(3)]).eval()


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


def _uneven(how: str = "none") -> nn.Module:
    inner = [Block(), Block(), Block(), Wide(), Block(), Block()]
    return Chain([Stage(module) for module in inner], CHECKPOINTS.get(how))


@labels
@pytest.mark.parametrize("how", ["none", *map(seldom, CHECKPOINTS)])
def test_small_neighbours_travel_together_and_train_exactly(world: Worlds, label: str, how: str) -> None:
    world(4).run(_train_uneven, label, how)


def _train_uneven(label: str, how: str) -> None:
    twin = _trained(lambda: _uneven(how), label)
    units = [u.name for u in twin.sharded.towpath_engine.units]
    assert units == ["", "blocks.0..blocks.2", "blocks.3", "blocks.4..blocks.5"]
    steps = towpath.schedule(strategy_of(label, SHAPE), twin.sharded, micro_steps=2)
    if how == "none":
        executed = towpath.stats(twin.sharded).last_step
        assert Counter((t.kind, t.unit) for t in executed) == Counter((t.kind, t.unit) for t in steps.transfers)


class Lists(nn.Module):
    """Layers that are lists or dicts of modules: they are never called, but their modules are."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for module in _callable_in(layer):
                x = x + module(x)
        return x


def _callable_in(layer: Any) -> Iterator[nn.Module]:
    for module in layer.values() if isinstance(layer, nn.ModuleDict) else layer:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_in(module)
        else:
            yield module


def _pair() -> nn.Module:
    return nn.ModuleList([Wide(), Block()])


def _dict() -> nn.Module:
    return nn.ModuleDict({"attention": Wide(), "activation": nn.Tanh(), "mlp": Block()})


def _deep() -> nn.Module:
    return nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"last": Wide()})])


class SharedBetweenLists(Lists):
    """Every layer begins with the same module."""

    def __init__(self) -> None:
        shared = Wide()
        super().__init__(lambda: nn.ModuleList([shared, Block()]))


@pytest.mark.parametrize(
    ("build", "units"),
    [
        seldom(partial(Lists, _pair), [f"layers.{i}.{j}" for i in range(3) for j in range(2)]),
        seldom(partial(Lists, _dict), [f"layers.{i}.{name}" for i in range(3) for name in ("attention", "mlp")]),
        (partial(Lists, _deep), [f"layers.{i}.{name}" for i in range(3) for name in ("0.0", "1.last")]),
        (SharedBetweenLists, ["layers.0.0", "layers.0.1", "layers.1.1", "layers.2.1"]),
    ],
    ids=["lists", "dicts", "lists of both", "one module in all lists"],
)
def test_the_units_of_lists_in_lists_are_the_modules_that_run(
    world: Worlds, build: Callable[[], nn.Module], units: list[str]
) -> None:
    world(4).run(_train_lists, build, units)


def _train_lists(build: Callable[[], nn.Module], units: list[str]) -> None:
    twin = _trained(build, "zero3")
    assert [u.name for u in twin.sharded.towpath_engine.units] == ["", *units]


def test_a_unit_of_several_modules_may_be_left_in_the_middle(world: Worlds) -> None:
    """The second of its modules runs after another unit has taken the memory, and one of them not at all."""
    world(4).run(_leave_in_the_middle)


def _leave_in_the_middle() -> None:
    twin = Twin(_uneven, _loss, "zero3", SHAPE)
    for step, order in enumerate(([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5], [5, 0, 3, 4, 2], [2, 4, 3, 3, 0])):
        for model in (twin.plain, twin.sharded):
            model.order = order  # pyright: ignore[reportAttributeAccessIssue]
        twin.backward(step)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


# --- tensor parallelism ----------------------------------------------------------------------------------------------


class ParallelModel(nn.Module):
    """Two transformer-like MLPs: matrices are split over the tensor-parallel ranks, norms and embeddings are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


# Two data-parallel ranks: on two nodes (the tensor-parallel mesh is the node), or, for mics, as one.
PARALLEL = (
    *((label, Topology(2, 1)) for label in ("zero3", "hpz", "paro-iig", "zero1", "paro-igg offload=params")),
    ("mics:2x1", Topology(1, 2)),
)


@in_turn(PARALLEL, 1, "parallel")
def test_a_tensor_parallel_model_trains_exactly_and_clips_by_the_norm_over_both_meshes(
    world: Worlds, parallel: tuple[str, Topology]
) -> None:
    world(4).run(_train_tensor_parallel, *parallel)


SPLIT_MATRICES = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
# The norm's parameters are the same on every rank of the mesh, and their gradients come as partial sums.
SPLIT_ROWS_TOO = {
    "norm": SequenceParallel(sequence_dim=0),
    "mlp.0": ColwiseParallel(input_layouts=Shard(0)),
    "mlp.2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "": PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    ),
}


def _mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any]) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh["tp"], plan)
    return model


def _rows(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(_noise(rank, 0, step, 4, WIDTH)).square().mean()


def _train_tensor_parallel(label: str, topology: Topology) -> None:
    _check_tensor_parallel(label, topology, SPLIT_MATRICES)


def _check_tensor_parallel(label: str, topology: Topology, plan: dict[str, Any], optimizer_first: bool = False) -> None:
    mesh = _mesh()
    torch.manual_seed(7)
    plain = ParallelModel().to(DEVICE, torch.float64)
    model = _tensor_parallel(copy.deepcopy(plain), mesh, plan)
    before = optimizer_for(model) if optimizer_first else None
    towpath.shard(model, strategy_of(label, topology), topology=topology, group=mesh["dp"].get_group())
    optimizers = [before or optimizer_for(model), optimizer_for(plain)]
    for step in range(3):
        _rows(model, mesh["dp"].get_local_rank(), step).backward()
        for rank in range(2):
            (_rows(plain, rank, step) / 2).backward()
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        # float64, sums in another order; each split matrix counts in full, and what is not split counts once.
        assert abs(float(found) - float(expected)) <= TOLERANCE * float(expected)
        assert float(expected) > 0.05  # it clips
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.shape == expected.shape, name
        assert (found.full_tensor() - expected).abs().max() <= TOLERANCE, name
        for statistic in (lambda t: t.norm(), lambda t: t.sum(), lambda t: t.norm(float("inf")), lambda t: t.max()):
            assert abs(float(statistic(found.detach()) - statistic(expected.detach()))) <= TOLERANCE, name


def test_parameters_replicated_on_the_tensor_parallel_mesh_train_exactly_and_count_once(world: Worlds) -> None:
    world(4).run(_check_tensor_parallel, "zero3", Topology(2, 1), SPLIT_ROWS_TOO)


def test_an_optimizer_made_before_a_tensor_parallel_model_is_sharded_stays_valid(world: Worlds) -> None:
    world(4).run(_check_tensor_parallel, "zero3", Topology(2, 1), SPLIT_MATRICES, True)


@pytest.mark.parametrize("before", [seldom("nothing"), "a step", "a state dict"])
def test_replaced_parameters_lead_an_optimizer_to_new_ones(world: Worlds, before: str) -> None:
    world(4).run(_lead_to_new_ones, before)


def _lead_to_new_ones(before: str) -> None:
    mesh = _mesh()
    model = _tensor_parallel(ParallelModel().double(), mesh, SPLIT_MATRICES)
    optimizer = torch.optim.AdamW(model.parameters())
    if before == "a step":
        _rows(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    replaced = [p for p in optimizer.param_groups[0]["params"] if isinstance(p, DTensor)]
    assert replaced
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    assert not any(p._local_tensor.numel() for p in replaced)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):  # the gradients of the first pass are dropped
        optimizer.zero_grad(set_to_none=step == 0)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        scaler.scale(_rows(model, mesh["dp"].get_local_rank(), step)).backward()
    scaler.unscale_(optimizer)
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    assert float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)) == expected > 0
    if before == "a step":
        with pytest.raises(errors.ShardError, match="AdamW has already stepped"):
            scaler.step(optimizer)
        return
    if before == "a state dict":
        options = StateDictOptions(full_state_dict=True)
        state = towpath.checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
        towpath.checkpoint.set_optimizer_state_dict(model, optimizer, state, options=options)
    scaler.step(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert all(p in optimizer.state for p in parameters)


def test_a_replaced_parameter_loses_no_write_and_can_be_frozen(world: Worlds) -> None:
    world(4).run(_use_replaced)


def _use_replaced() -> None:
    mesh = _mesh()
    model = _tensor_parallel(ParallelModel().double(), mesh, SPLIT_MATRICES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = next(p for p in model.parameters() if isinstance(p, DTensor))
    name = next(name for name, p in model.named_parameters() if p is old)
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    uses: list[Callable[[], Any]] = [lambda: old.data.mul_(2), old.norm, old.full_tensor, old.to_local]
    for use in uses:
        with pytest.raises(errors.ShardError, match="Take the parameters from model"):
            use()
    old.requires_grad_(False)
    assert not model.get_parameter(name).requires_grad and not old.requires_grad
    old.requires_grad = True
    _rows(model, mesh["dp"].get_local_rank(), 0).backward()
    assert model.get_parameter(name).grad is not None
    optimizer.add_param_group({"params": [model.get_parameter(name)]})
    with pytest.raises(errors.ShardError, match=f"{name} is in two places of SGD"):
        optimizer.step()


def test_whole_values_are_loaded_into_split_parameters(world: Worlds) -> None:
    world(4).run(_load_into_tensor_parallel)


def _load_into_tensor_parallel() -> None:
    mesh = _mesh()
    torch.manual_seed(7)
    other = ParallelModel()
    model = _tensor_parallel(ParallelModel(), mesh, SPLIT_ROWS_TOO)
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    model.load_state_dict(other.state_dict())
    for (name, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected), name
    with towpath.full_parameters(model):
        for found, expected in zip(model.parameters(), other.parameters(), strict=True):
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(whole, expected)


def test_a_tensor_parallel_model_from_the_meta_device_is_the_one_built_at_once(world: Worlds) -> None:
    world(4).run(_tensor_parallel_from_meta)


def _tensor_parallel_from_meta() -> None:
    mesh = _mesh()
    plan = {"": ColwiseParallel()}
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(DeterministicMatrix() for _ in range(2))
    _tensor_parallel(model, mesh, plan)
    towpath.shard(model, "zero3", topology=Topology(2, 1), group=mesh["dp"].get_group())
    for found in model.parameters():
        assert torch.equal(found.full_tensor(), torch.full((2 * WIDTH, WIDTH), 0.5))


class DeterministicMatrix(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH, bias=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


def test_a_mesh_that_is_data_parallel_too_is_refused(world: Worlds) -> None:
    world(4).run(_refuse_overlapping_meshes)


def _refuse_overlapping_meshes() -> None:
    mesh = _mesh()
    model = _tensor_parallel(ParallelModel(), mesh, SPLIT_MATRICES)
    with pytest.raises(errors.ShardError, match=r"Pass group=, the data-parallel process group"):
        towpath.shard(model, "zero3", topology=SHAPE)  # all four ranks, as if nothing were split


def test_codecs_on_a_tensor_parallel_mesh_are_refused(world: Worlds) -> None:
    world(4).run(_refuse_codecs)


def _refuse_codecs() -> None:
    mesh = _mesh()
    model = _tensor_parallel(ParallelModel(), mesh, SPLIT_MATRICES)
    with pytest.raises(errors.ShardError, match=r"zero\+\+ has codecs, and the model is on a tensor-parallel mesh"):
        towpath.shard(model, "zero++", topology=towpath.Topology(2, 1), group=mesh["dp"].get_group())


# --- meta-device construction ----------------------------------------------------------------------------------------


class Deterministic(nn.Module):
    """Its values are known without drawing any; so are its buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
            self.scale.copy_(torch.linspace(1.0, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


class Tables(nn.Module):
    """Its buffer is random, and drawn anew whenever its parameter is."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * self.weight


class MetaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Deterministic()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(self.gain(x))))


def _meta_model(blocks: int = 3) -> nn.Module:
    with torch.device("meta"):
        return Chain([MetaBlock() for _ in range(blocks)]).double()


def test_a_random_buffer_from_the_meta_device_is_the_first_ranks(world: Worlds) -> None:
    tables = world(4).run(_random_table)
    assert all(table == tables[0] for table in tables)


def _random_table() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(Tables(), Tables())
    torch.manual_seed(dist.get_rank())
    sharded: Any = towpath.shard(model, "zero3", topology=SHAPE)
    return [*sharded[0].table.tolist(), *sharded[1].table.tolist()]


@labels
@pytest.mark.parametrize("how", ["frozen", "shared"])
def test_a_module_on_the_meta_device_may_have_its_parameters_in_different_buffers(
    world: Worlds, how: str, label: str
) -> None:
    """A matrix that does not train, and a bias that does; a matrix that another unit has too, and a bias of its own."""
    world(4).run(_shard_divided_from_meta, how, label)


def _shard_divided_from_meta(how: str, label: str) -> None:
    model: Any = _meta_model()
    if how == "frozen":
        for block in model.blocks:
            block.linear.weight.requires_grad_(False)
    else:
        model.blocks[2].linear.weight = model.blocks[0].linear.weight
    sharded: Any = towpath.shard(model, strategy_of(label, SHAPE), topology=SHAPE)
    for block in sharded.blocks:
        for parameter in block.linear.parameters():
            assert 0 < parameter.full_tensor().abs().max() <= WIDTH**-0.5  # Linear's own initialisation
    _loss(sharded, dist.get_rank(), 0, 0).backward()


@labels
def test_a_model_on_the_meta_device_is_initialised_by_its_modules_and_trains_exactly(world: Worlds, label: str) -> None:
    world(4).run(_train_from_meta, label)


def _train_from_meta(label: str) -> None:
    torch.manual_seed(dist.get_rank())  # each rank draws other values; the first rank's count
    sharded: Any = towpath.shard(_meta_model(), strategy_of(label, SHAPE), topology=SHAPE)
    plain: Any = Chain([MetaBlock() for _ in range(3)]).double()
    drawn = {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "gain" in name or "norm" in name:
                torch.testing.assert_close(drawn[name], parameter.detach(), rtol=0, atol=1e-15)
            else:  # Linear's: uniform within the root of 1 / WIDTH
                assert 0 < drawn[name].abs().max() <= WIDTH**-0.5
            parameter.copy_(drawn[name])
    assert len({d.abs().max().item() for n, d in drawn.items() if n.endswith("linear.weight")}) == 3
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(sharded.get_buffer(name), buffer, rtol=0, atol=1e-15)
    optimizers = [optimizer_for(sharded), optimizer_for(plain)]
    for step in range(3):
        _loss(sharded, dist.get_rank(), 0, step).backward()
        for rank in range(4):
            (_loss(plain, rank, 0, step) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert distance(found, expected[1].detach()) <= TOLERANCE, name


def test_from_the_meta_device_a_rank_never_holds_more_than_one_unit_beyond_its_shards() -> None:
    blocks = 6
    # They are drawn in the very buffer that is cut into shards.
    largest = max(b.spec.padded(slices=4) for unit in lay_out(_meta_model(blocks)) for b in unit.buckets) * 8
    # New ranks: next to the threads of earlier models, a broadcast may let go of its tensor some microseconds later.
    for peak in run_ranks(_materialise_watched, 4, blocks):
        assert 0 < peak <= largest


def _materialise_watched(blocks: int) -> int:
    """The most bytes of Linears' parameters that were alive at once when some module was initialised."""
    seen: dict[int, tuple[StorageWeakRef, int]] = {}
    peak = 0
    reset = nn.Linear.reset_parameters

    def watched(layer: nn.Linear) -> None:
        nonlocal peak
        reset(layer)
        for parameter in layer.parameters():
            storage = parameter.untyped_storage()
            seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        peak = max(peak, sum(nbytes for storage, nbytes in seen.values() if not storage.expired()))

    model = _meta_model(blocks)
    nn.Linear.reset_parameters = watched
    try:
        towpath.shard(model, "zero3", topology=SHAPE)
    finally:
        nn.Linear.reset_parameters = reset
    return peak


def test_a_module_that_cannot_initialise_itself_is_named(world: Worlds) -> None:
    for message in world(4).run(_shard_without_reset):
        assert "blocks.1" in message
        assert "reset_parameters" in message


def _shard_without_reset() -> str:
    model: Any = _meta_model()
    with torch.device("meta"):
        model.blocks[1].bare = nn.ParameterList([torch.empty(3, dtype=torch.float64)])
    with pytest.raises(errors.ShardError) as caught:
        towpath.shard(model, "zero3", topology=SHAPE)
    return str(caught.value)
