"""What modules do to their parameters behind the engine's back: it works as in one process, or it is refused by name.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import towpath
from tests.ranks.models import noise
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.test_never_silent import SHAPE, Block, Net, _loss
from tests.ranks.twin import Twin, error_of
from towpath.errors import ShardError, TowpathError

# Parameters spread over both ranks, whole on both beside a spread optimizer, and all whole.
LABELS = ("zero3", "zero1", "ddp")


# --- writes inside a forward -----------------------------------------------------------------------------------------


class Writing(Block):
    """Writes to a weight in its forward pass, in some way."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        WAYS[self.way](self.a)
        return super().forward(x)


WAYS: dict[str, Callable[[nn.Linear], Any]] = {
    "": lambda linear: None,
    "in place": torch.no_grad()(lambda linear: linear.weight.mul_(0.9)),
    "through .data": lambda linear: linear.weight.data.mul_(0.9),
    "to .data": lambda linear: setattr(linear.weight, "data", linear.weight.data * 0.9),
    # The first step that leaves these bounds would go wrong.
    "clipped, to no effect yet": lambda linear: linear.weight.data.clamp_(-100, 100),
    "max_norm": lambda linear: F.embedding(torch.arange(3), linear.weight, max_norm=0.1),
    "another parameter": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach() * 0.9)),
}


@in_turn(LABELS, 1)
@on_ranks(2)
def test_a_write_to_a_parameter_inside_a_forward_is_refused_by_name(label: str) -> None:
    for way in [way for way in WAYS if way]:
        model: Any = towpath.shard(Net(Writing).double(), label, topology=SHAPE)
        model.blocks[2].way = way
        text = error_of(lambda model=model: model(noise(0, 0, 0)))
        assert "'blocks.2.a.weight'" in text, way
        assert f"rank {torch.distributed.get_rank()}" in text or "was replaced" in text, way
        model.blocks[2].way = ""
        model(noise(0, 0, 1)).square().mean().backward()  # and nothing is left behind
        assert all(isinstance(p, towpath.ShardTensor) for p in model.parameters())


@pytest.mark.parametrize("label", LABELS)
@on_ranks(2)
def test_inside_full_parameters_data_may_be_assigned(label: str) -> None:
    twin = Twin(Net, _loss, label, SHAPE)
    with towpath.full_parameters(twin.sharded):
        for p in twin.sharded.parameters():
            p.data = p.data * 0.5
        assert "cannot be cast" in error_of(twin.sharded.half, TowpathError)
    for p in twin.plain.parameters():
        p.data = p.data * 0.5
    twin.train(2)
    twin.check_parameters()


class Bounded(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = kind(4, 6, max_norm=0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_a_norm_that_an_embedding_bounds_in_its_forward_is_refused_at_shard(label: str) -> None:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    texts = [error_of(lambda k=kind: towpath.shard(Bounded(k), label, topology=SHAPE), ShardError) for kind in kinds]
    for text in texts:
        assert "'tokens'" in text and "max_norm=0.5" in text and "torch.renorm" in text


# --- parameters that are kept elsewhere, too -------------------------------------------------------------------------


class Keeping(Block):
    """Computes with what it keeps beside its parameters: in lists, dicts, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight, self.b.weight]
        self.biases = {"of": {"a": [self.a.bias], "b": [self.b.bias]}}
        self.named = [("weight", self.b.weight)]
        object.__setattr__(self, "again", self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.weights[0], self.biases["of"]["a"][0]))
        penalty = x.sum() * self.named[0][1].square().sum()  # each rank's own: not a constant of the loss
        return x + F.linear(hidden, self.again, self.biases["of"]["b"][0]) + 0.1 * penalty  # type: ignore[arg-type]


def _spectral() -> nn.Module:
    """Keeps the memory of its parameter under another name, and makes it anew in every forward pass."""
    block = Block()
    torch.nn.utils.spectral_norm(block.a)
    return block


@in_turn(LABELS, 1)
@on_ranks(2)
def test_parameters_in_a_units_own_lists_and_dicts_are_whole_with_it(label: str) -> None:
    for block in (Keeping, _spectral):
        twin = Twin(lambda block=block: Net(block), _loss, label, SHAPE)
        twin.train(3, micro_steps=2)
        twin.check_parameters()


@on_ranks(2)
def test_a_list_that_changes_after_shard_is_the_modules_own() -> None:
    twin = Twin(lambda: Net(Keeping), _loss, "zero3", SHAPE)
    for model in (twin.plain, twin.sharded):
        blocks: Any = model.blocks
        blocks[0].weights.insert(0, None)
        blocks[0].weights.pop(0)
        blocks[1].biases["other"] = blocks[1].biases.pop("of")
        blocks[1].biases["of"] = blocks[1].biases["other"]
    twin.train(2)
    twin.check_parameters()
    block: Any = twin.sharded.blocks[2]
    before = block.weights
    block.weights = list(before)  # another list, of which the engine does not know
    before.clear()
    assert "'blocks.2.a.weight'" in error_of(lambda: twin.sharded(noise(0, 0, 0)), ShardError)


@pytest.mark.parametrize("kept", ["in a list", "a view in an attribute", "a buffer"])
@on_ranks(2)
def test_what_would_keep_the_old_values_is_refused_at_shard(kept: str) -> None:
    model: Any = Net()
    weight = model.blocks[1].a.weight.detach()
    if kept == "a buffer":
        model.blocks[1].register_buffer("kept", weight.t())
    else:
        model.blocks[1].kept = [weight] if kept == "in a list" else weight[2:]
    text = error_of(lambda: towpath.shard(model, "ddp", topology=SHAPE), ShardError)
    assert "blocks.1.kept" in text and "'blocks.1.a.weight'" in text


# --- parameters that share memory ------------------------------------------------------------------------------------


class Ends(nn.Module):
    def __init__(self, first: Tensor, last: Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(*first.shape[::-1]), nn.Linear(*last.shape[::-1])
        self.first.weight, self.last.weight = nn.Parameter(first), nn.Parameter(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_parameters_on_the_same_memory_are_refused_at_shard(label: str) -> None:
    whole = torch.randn(6, 12)
    pairs = [(whole[:, :6], whole[:, 3:9]), (whole[:, :6], whole[:, :6]), (whole[:, :6], whole[:, :6].t())]
    texts = [error_of(lambda p=pair: towpath.shard(Ends(*p), label, topology=SHAPE), ShardError) for pair in pairs]
    for text in texts:
        assert "'first.weight'" in text and "'last.weight'" in text and "tie" in text


@on_ranks(2)
def test_parameters_beside_each_other_in_one_memory_train_exactly() -> None:
    for cut in (lambda w: w.chunk(2, dim=0), lambda w: w.chunk(2, dim=1)):
        whole = torch.randn(12, 12, generator=torch.Generator().manual_seed(3)).double()
        parts = [part if part.shape == (6, 12) else part[:6] for part in cut(whole)]
        parts = [part[:, :6] for part in parts]
        twin = Twin(lambda parts=parts: Ends(*parts), _loss, "zero3", SHAPE)
        twin.train(2)
        twin.check_parameters()


# --- modules and parameters that come after shard() ------------------------------------------------------------------


def _add_bias(module: nn.Module) -> None:
    if not hasattr(module, "late"):
        module.late = nn.Parameter(torch.ones(6).double())


COMING: dict[str, Callable[[Any], Any]] = {
    "blocks.1.a.weight": lambda model: setattr(model.blocks, "1", Block().double()),
    "first.weight": lambda model: setattr(model, "first", nn.Linear(6, 6).double()),
    "blocks.4.a.weight": lambda model: model.blocks.append(Block().double()),
    "blocks.2.a.scale": lambda model: setattr(model.blocks[2].a, "scale", nn.Parameter(torch.ones(8).double())),
    "blocks.2.b.late": lambda model: model.blocks[2].b.register_forward_pre_hook(lambda module, _: _add_bias(module)),
}


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_parameters_that_come_after_shard_are_refused_by_name(label: str) -> None:
    for name, change in COMING.items():
        twin = Twin(Net, _loss, label, SHAPE)
        twin.train(1)
        change(twin.sharded)
        assert f"'{name}' was added after shard()" in error_of(lambda t=twin: t.sharded(noise(0, 0, 0)))


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_modules_without_parameters_of_their_own_may_come_later(label: str) -> None:
    twin = Twin(Net, _loss, label, SHAPE)
    twin.train(1)
    for model in (twin.plain, twin.sharded):
        blocks: Any = model.blocks
        blocks[1] = nn.Sequential(blocks[1], nn.Tanh())
        blocks[3] = nn.Identity()
    for step in (1, 2):
        twin.loss(twin.sharded, torch.distributed.get_rank(), 0, step).backward()
    assert twin.sharded.blocks[1][0].a.weight.grad is not None
