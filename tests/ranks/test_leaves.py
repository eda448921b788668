"""Large leaves of the root train as in one process, also where the model reads their weights outside of their forward.

In float64, where only the order of sums differs from the twin's (see TOLERANCE in twin.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.models import DEVICE
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.twin import Twin
from towpath import ShardTensor
from towpath import checkpoint as checkpoints
from towpath.engine import layout
from towpath.errors import ShardError, StepError

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


class _Product(torch.autograd.Function):
    """Reads the weight in the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return h @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ h.flatten(0, 1)


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in the forward, as fused linear cross-entropies do."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        out = h @ weight.t()
        ctx.save_for_backward(2 * out @ weight, 2 * out.flatten(0, 1).t() @ h.flatten(0, 1))
        return out.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weight = ctx.saved_tensors
        return grad * of_input, grad * of_weight


def _given_to_a_checkpoint(reentrant: bool, model: GPT, h: Tensor) -> Tensor:
    return checkpoint(functional.linear, h, model.head.weight, use_reentrant=reentrant)


def _both_in_a_checkpoint(model: GPT, h: Tensor) -> Tensor:
    return checkpoint(lambda h: h @ model.embed.weight.t() + model.head(h), h, use_reentrant=False)


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
    "both in a checkpoint": _both_in_a_checkpoint,
    "given to a checkpoint": partial(_given_to_a_checkpoint, False),
    "given to a reentrant checkpoint": partial(_given_to_a_checkpoint, True),
    "given to a function": lambda model, h: _Product.apply(h, model.head.weight),
    "given to a fused loss": lambda model, h: _FusedLoss.apply(h, model.head.weight),
    "views": lambda model, h: h @ model.head.weight.view(WORDS, WIDTH).T,
}


def _ids(rank: int, micro: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * micro + 100 * step)
    return torch.randint(WORDS, (3, 5), generator=generator).to(DEVICE)


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(_ids(rank, micro, step)).square().mean()


def _twin(label: str, use: str, loss: Any = _loss, **options: Any) -> Twin:
    with _small_leaves():
        twin = Twin(lambda: GPT(use), loss, label, SHAPE, **options)
    assert [u.name for u in twin.sharded.towpath_engine.leaves] == ["embed", "head"]
    return twin


@in_turn(LABELS, 1)
@on_ranks(2)
def test_leaves_train_exactly_however_they_are_used(label: str) -> None:
    for use in USES:
        twin = _twin(label, use)
        made = twin.sharded.towpath_engine.weights.made
        twin.train(steps=2, micro_steps=2)
        twin.backward(2)
        twin.check_gradients()
        twin.step()
        twin.check_parameters()
        # The embedding moves to a slot of its own when it is read while the backward pass of the head needs theirs.
        more = label == "zero3" and use == "both in a checkpoint"
        assert twin.sharded.towpath_engine.weights.made == made + more, f"{use}: more slots"
        assert all(isinstance(p, ShardTensor) for p in twin.sharded.parameters())


@on_ranks(2)
def test_leaves_are_entries_and_have_the_compute_dtype() -> None:
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


@on_ranks(2)
def test_leaves_may_be_returned_and_read_without_gradients() -> None:
    USES["returned"] = lambda model, h: (model.head(h), model.head.weight)  # pyright: ignore[reportArgumentType]

    def loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
        out, weight = model(_ids(rank, micro, step))
        return out.square().mean() + weight.square().sum()

    twin = _twin("zero3", "returned", loss)
    twin.train(steps=3, micro_steps=2)
    twin.check_parameters()
    twin = _twin("zero3", "reads")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found, expected = (model(_ids(0, 0, 0)) for model in (twin.sharded, twin.plain))
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_write_to_a_leaf_in_the_forward_of_the_root_is_named() -> None:
    with _small_leaves():
        model: Any = towpath.shard(GPT(), "zero3", topology=SHAPE)

    def _clamp(*_: Any) -> None:
        model.head.weight.clamp_(-1, 1)

    with torch.no_grad():
        handle = model.norm.register_forward_hook(_clamp)
        with pytest.raises(StepError, match=r"'head\.weight' was written to inside the forward"):
            model(_ids(0, 0, 0))
    handle.remove()


@on_ranks(2)
def test_full_parameters_of_the_root_have_its_leaves() -> None:
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


@on_ranks(2)
def test_a_compiled_model_may_read_its_leaves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo reads .grad of tensors that have none
        torch._dynamo.reset()
        twin = _twin("zero3", "reads")
        twin.sharded.compile(backend="eager")
        twin.train(steps=2, micro_steps=2)
        twin.check_parameters()


@on_ranks(2)
def test_backward_to_a_leaf_and_addresses_of_its_memory() -> None:
    for use in ("", "reads", "given to a fused loss"):
        model: Any = _twin("zero3", use).sharded
        model(_ids(0, 0, 0)).square().mean().backward(inputs=[model.head.weight])
        assert model.head.weight.grad is not None and model.embed.weight.grad is None

    model.norm.register_forward_hook(
        lambda _module, _args, h: h.register_hook(lambda _: weights[0].data_ptr()) and None
    )
    weights: list[Any] = []
    model.norm.register_forward_hook(lambda *_: weights.append(model.head.weight))
    loss = model(_ids(0, 0, 0)).square().mean()
    assert weights[0].data_ptr()
    with pytest.raises(ShardError, match="asks for the address"):
        loss.backward()


@on_ranks(2)
def test_checkpoints_do_not_depend_on_leaves(tmp_path: Path) -> None:
    folder = tmp_path
    for number, units in enumerate(([Block], None)):
        runs: list[checkpoints.State] = []
        for each in (units, None if units else [Block]):
            with _small_leaves():
                model: Any = towpath.shard(GPT(), "zero3", topology=SHAPE, units=each)
            assert bool(model.towpath_engine.leaves) == (each is None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            _loss(model, dist.get_rank(), 0, number).backward()
            optimizer.step()
            runs.append(checkpoints.State(model, optimizer))
        checkpoints.save(folder / str(number), 1, runs[0])
        loaded = checkpoints.load(folder / str(number), runs[1])
        assert loaded is not None and loaded.notes == ()
        for saved, found in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
            assert torch.equal(towpath.full_tensor(saved), towpath.full_tensor(found))
            momenta = [run.optimizer.state[p]["momentum_buffer"] for run, p in zip(runs, (saved, found), strict=True)]
            assert torch.equal(*map(towpath.full_tensor, momenta))
