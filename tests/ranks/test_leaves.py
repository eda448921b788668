"""Large leaves of the root train as in one process, also where the model reads their weights outside of their forward.

In float64, where only the order of sums differs from the twin's (see TOLERANCE in twin.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.server import World
from tests.ranks.strategies import in_turn
from tests.ranks.twin import Twin
from towpath import ShardTensor
from towpath.engine import layout
from towpath.errors import StepError

Worlds = Callable[[int], World]

SHAPE = towpath.Topology(2, 1)
WORDS, WIDTH = 50, 8
LABELS = ("zero3", "paro-iig", "zero1")


@contextmanager
def _small_leaves() -> Iterator[None]:
    """Let leaves of any size be units."""
    before, layout.LARGE_LEAF = layout.LARGE_LEAF, 1 + WIDTH * WIDTH
    try:
        yield
    finally:
        layout.LARGE_LEAF = before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class GPT(nn.Module):
    def __init__(self, use: str = "") -> None:
        super().__init__()
        self.use = use
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, ids: Tensor) -> Tensor:
        return USES[self.use](self, self.hidden(ids).to(self.head.weight.dtype))


def _product(model: GPT, h: Tensor) -> Tensor:
    return functional.linear(h, model.head.weight)


def _in_chunks(product: Callable[[GPT, Tensor], Tensor], reentrant: bool | None, model: GPT, h: Tensor) -> Tensor:
    def of(chunk: Tensor) -> Tensor:
        return torch.tanh(product(model, chunk))

    chunks = h.chunk(3)
    if reentrant is None:
        return torch.cat([of(chunk) for chunk in chunks])
    return torch.cat([checkpoint(of, chunk, use_reentrant=reentrant) for chunk in chunks])


def _norm(model: GPT, h: Tensor) -> Tensor:
    with torch.no_grad():
        norm = model.head.weight.norm() + next(iter(model.parameters())).norm()
    return model.head(h) * norm


# How the end of the model uses the embedding and the head.
USES: dict[str, Callable[[GPT, Tensor], Tensor]] = {
    "": lambda model, h: model.head(h),
    "reads": _product,
    "reads both": lambda model, h: h @ model.head.weight.T + h @ model.embed.weight.t(),
    "calls and reads": lambda model, h: model.head(h) + _product(model, h),
    "detached": lambda model, h: model.head(h.detach()) + model.head(h),
    "reads without gradients": _norm,
    "reads in chunks": partial(_in_chunks, _product, None),
    "reads in checkpoints": partial(_in_chunks, _product, False),
    "reads in reentrant checkpoints": partial(_in_chunks, _product, True),
    "calls in checkpoints": partial(_in_chunks, lambda model, h: model.head(h), False),
    "calls in reentrant checkpoints": partial(_in_chunks, lambda model, h: model.head(h), True),
}


def _ids(rank: int, micro: int, step: int) -> Tensor:
    return torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(rank + 10 * micro + 100 * step))


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(_ids(rank, micro, step)).square().mean()


def _twin(label: str, use: str, loss: Any = _loss, **options: Any) -> Twin:
    with _small_leaves():
        twin = Twin(lambda: GPT(use), loss, label, SHAPE, **options)
    assert [u.name for u in twin.sharded.towpath_engine.leaves] == ["embed", "head"]
    return twin


@in_turn(LABELS, 1)
def test_leaves_train_exactly_however_they_are_used(world: Worlds, label: str) -> None:
    world(2).run(_train, label)


def _train(label: str) -> None:
    for use in USES:
        twin = _twin(label, use)
        made = twin.sharded.towpath_engine.weights.made
        twin.train(steps=3, micro_steps=2)
        twin.backward(3)
        twin.check_gradients()
        twin.step()
        twin.check_parameters()
        assert twin.sharded.towpath_engine.weights.made == made, f"{use}: more slots"
        assert all(isinstance(p, ShardTensor) for p in twin.sharded.parameters())


def test_leaves_are_entries_and_have_the_compute_dtype(world: Worlds) -> None:
    world(2).run(_entries)


def _entries() -> None:
    def loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
        return model.head(model.hidden(_ids(rank, micro, step))).square().mean()

    twin = _twin("zero3", "", loss)
    towpath.register_forward_method(twin.sharded, "hidden")
    twin.train(steps=2, micro_steps=2)
    twin.check_parameters()
    with _small_leaves():
        model: Any = towpath.shard(GPT(), "zero3", topology=SHAPE, precision="bfloat16")
    seen: list[Any] = []
    model.norm.register_forward_hook(lambda *_: seen.extend((model.head.weight, model.head.weight.dtype)))
    model(_ids(0, 0, 0)).sum().backward()
    assert isinstance(seen[0], nn.Parameter) and seen[0].shape == (WORDS, WIDTH) and seen[1] is torch.bfloat16
    assert model.head.weight.dtype is torch.float32


def test_a_write_to_a_leaf_in_the_forward_of_the_root_is_named(world: Worlds) -> None:
    world(2).run(_write)


def _write() -> None:
    with _small_leaves():
        model: Any = towpath.shard(GPT(), "zero3", topology=SHAPE)

    def _clamp(*_: Any) -> None:
        model.head.weight.clamp_(-1, 1)

    with torch.no_grad():
        handle = model.norm.register_forward_hook(_clamp)
        with pytest.raises(StepError, match=r"'head\.weight' was written to inside the forward"):
            model(_ids(0, 0, 0))
    handle.remove()


def test_full_parameters_of_the_root_have_its_leaves(world: Worlds) -> None:
    world(2).run(_whole)


def _whole() -> None:
    with _small_leaves():
        model: Any = towpath.shard(GPT("reads"), "zero3", topology=SHAPE)
    expected = model(_ids(0, 0, 0)).detach()
    with towpath.full_parameters(model, [model.norm]):
        assert not isinstance(model.head.weight, ShardTensor)
        assert torch.equal(model(_ids(0, 0, 0)), expected)
        with torch.no_grad():
            model.head.weight.mul_(2)
    assert torch.allclose(model(_ids(0, 0, 0)), 2 * expected)
    dist.barrier()
