"""What the engine promises beyond parity of a plain loop: each test is one promise, kept on real ranks.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
from tests.ranks.checkpoints import Run, differing
from tests.ranks.models import MODELS, TiedGPT, noise
from tests.ranks.reference import optimizer_for
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.twin import Twin, accumulating, loss_on, mean_of_all_ranks
from towpath import Topology, errors

SHAPE = Topology(2, 2)

# One of each way that gradients and parameters travel: all-reduce, late and early reduction, two hops, gathers.
KINDS = ("ddp", "zero2", "zero3", "hpz", "mics:2x1", "paro-nig", "paro-iig", "lins:1x1|2x1|2x1")
kinds = in_turn(KINDS, 1)

_gpt_loss = loss_on("gpt")


# --- hpz and zero3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["flat", seldom("ring")])
@on_ranks(4)
def test_hpz_equals_zero3_bit_for_bit(route: str) -> None:
    runs = [Run.of(f"{name}@{route}", SHAPE) for name in ("hpz", "zero3")]
    for run in runs:
        run.train(range(4), micro_steps=2)
    assert differing(*(run.content() for run in runs)) == []


# --- accumulation ----------------------------------------------------------------------------------------------------


@kinds
@on_ranks(4)
def test_gradients_accumulate_over_two_boundaries_and_may_be_zeroed(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    for step in (0, 2, 4):
        twin.backward(step)
        twin.backward(step + 1, micro_steps=2)
        twin.check_gradients()
        twin.step(set_to_none=step != 2)
        assert all(p.grad is None if step != 2 else not p.grad.full_tensor().any() for p in twin.sharded.parameters())
    twin.check_parameters()


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_what_is_off_is_the_order_of_the_sums_and_nothing_else(label: str) -> None:
    """One process that adds the same gradients in the same order ends with the same bits; in another order it does not.

    Where gradients travel in every micro-step, those of the ranks are added first; else those of the micro-steps.
    """
    entry, rank = MODELS["gpt"], dist.get_rank()
    model: Any = towpath.shard(entry.make(torch.float64), label, topology=Topology(2, 1))
    optimizer = optimizer_for(model)
    for step in range(4):
        for micro in accumulating(model, 2):
            entry.loss(model, *entry.micro_batch(rank, micro, step, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    orders = [_trained_in_order(ranks_first) for ranks_first in (True, False)]
    found = [p.full_tensor().detach() for p in model.parameters()]
    same = [all(torch.equal(f, e) for f, e in zip(found, each, strict=True)) for each in orders]
    assert same == ([True, False] if label in ("zero2", "zero3") else [False, True])


def _trained_in_order(ranks_first: bool) -> list[Tensor]:
    """Trained in one process; the gradients of two micro-steps of two ranks are added in this order."""
    entry = MODELS["gpt"]
    model = entry.make(torch.float64)
    parameters, optimizer = list(model.parameters()), optimizer_for(model)

    def gradients(rank: int, micro: int, step: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(entry.loss(model, *entry.micro_batch(rank, micro, step, torch.float64)), parameters)

    for step in range(4):
        each = [gradients(rank, micro, step) for rank in range(2) for micro in range(2)]
        for parameter, (a, b, c, d) in zip(parameters, zip(*each, strict=True), strict=True):
            parameter.grad = ((a + c) + (b + d) if ranks_first else (a + b) + (c + d)) / 2
        optimizer.step()
    return [p.detach() for p in parameters]


# --- parameters that not all use -------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Five branches in one unit, of which each forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({f"use-{i}": nn.Linear(6, 6) for i in range(5)})

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for i in use:
            x = x + torch.tanh(self.branches[f"use-{i}"](x))
        return x


class Branching(nn.Module):
    """The root unit has branches too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Branches()
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        x = self.first(x, use)
        for block in self.blocks:
            x = block(x, use)
        return x


def _branching_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """Branch 0: all ranks; 1: not rank 0; 2: rank 3 alone, in its first micro-step; 3: in odd steps; 4: never."""
    use = [0]
    use += [1] if rank != 0 else []
    use += [2] if rank == 3 and micro == 0 else []
    use += [3] if step % 2 else []
    return model(noise(rank, micro, step), tuple(use)).square().mean()


@kinds
@pytest.mark.parametrize("micro_steps", [1, 2])
@on_ranks(4)
def test_a_gradient_is_none_only_where_no_rank_used_the_parameter(label: str, micro_steps: int) -> None:
    twin = Twin(Branching, _branching_loss, label, SHAPE)
    for step in range(4):
        twin.backward(step, micro_steps)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


class Link(nn.Module):
    """With a spare layer that is never used, its gradients are complete only when those of its inputs are."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


# --- backward(inputs=...) ---------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two chains of blocks that do not feed each other, and a root with parameters before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.left = nn.ModuleList(Link(spare=False) for _ in range(3))
        self.right = nn.ModuleList(Link(spare=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left = right = self.first(x)
        for block in self.left:
            left = torch.tanh(block(left))
        for block in self.right:
            right = torch.tanh(block(right))
        return self.last(left * right)


# Names of parameters, by how they begin: all; of blocks that wait for one another's memory; and others in each of two
# micro-steps.
CROSSWISE = ("left.2.linear.bias", "right.0", "left.0.linear.weight")
INPUTS = {
    "all": (("",), ("",)),
    "crosswise": (CROSSWISE, CROSSWISE),
    "others-later": (("right.2.linear.weight", "first"), ("left.0", "last.bias")),
}


@kinds
@pytest.mark.parametrize("key", INPUTS)
@on_ranks(4)
def test_backward_with_inputs_gives_gradients_to_these_parameters_only(label: str, key: str) -> None:
    """Two micro-steps, each for the parameters whose names begin so; and then a step as usual."""
    named = INPUTS[key]
    twin = Twin(Towers, lambda *_: torch.zeros(()), label, SHAPE, units=[Link])

    def backward(model: nn.Module, micro: int, step: int) -> None:
        loss = model(noise(dist.get_rank(), micro, step)).square().mean()
        if step == 1:
            loss.backward()
        else:
            loss.backward(inputs=[p for name, p in model.named_parameters() if name.startswith(named[micro])])

    for step in range(3):
        for micro in accumulating(twin.sharded, 2):
            backward(twin.sharded, micro, step)
        with mean_of_all_ranks(twin.plain):
            backward(twin.plain, 0, step)
            backward(twin.plain, 1, step)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@kinds
@on_ranks(4)
def test_backward_with_inputs_may_pass_through_another_sharded_model(label: str) -> None:
    """As a generator is trained by its critic, which gets no gradient then."""
    generator, critic = (Twin(Towers, lambda *_: torch.zeros(()), label, SHAPE, units=[Link]) for _ in range(2))

    def backward(made_by: nn.Module, judged_by: nn.Module, step: int) -> None:
        loss = judged_by(made_by(noise(dist.get_rank(), 0, step))).square().mean()
        loss.backward(inputs=list((made_by if step % 2 else judged_by).parameters()))

    for step in range(4):
        backward(generator.sharded, critic.sharded, step)
        with mean_of_all_ranks(generator.plain), mean_of_all_ranks(critic.plain):
            backward(generator.plain, critic.plain, step)
        for twin in (generator, critic):
            twin.check_gradients()
            twin.step()
    generator.check_parameters()


# --- the moment of shard() -------------------------------------------------------------------------------------------


FULL = StateDictOptions(full_state_dict=True)
STEPPED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", STEPPED)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@on_ranks(2)
def test_optimizers_that_stepped_before_shard_are_refused(strategy: str, kind: str) -> None:
    model: Any = nn.Linear(5, 3)
    optimizer = STEPPED[kind](model.parameters())
    _stepped(model, optimizer)
    towpath.shard(model, strategy, topology=Topology(2, 1))
    before = [p.full_tensor().clone() for p in model.parameters()]
    model(torch.ones(2, 5)).sum().backward()
    for _ in range(2):
        words = rf"rank {dist.get_rank()}: {kind} has already stepped weight.*make a new optimizer afterwards"
        with pytest.raises(errors.ShardError, match=words):
            optimizer.step()
    with pytest.raises(errors.ShardError, match=f"{kind} has already stepped"):
        towpath.checkpoint.get_optimizer_state_dict(model, optimizer, options=FULL)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    _stepped(model, STEPPED[kind](model.parameters()))


@on_ranks(2)
def test_an_optimizer_without_states_may_step_before_shard() -> None:
    torch.manual_seed(7)
    plain = nn.Linear(5, 3)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        if step == 1:
            towpath.shard(model, "zero3", topology=Topology(2, 1))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            _stepped(each, optimizer)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected)


@on_ranks(2)
def test_states_of_parameters_with_one_element_are_found() -> None:
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        model: Any = nn.Sequential(nn.Linear(5, 3), nn.PReLU())
        stepped = torch.optim.SGD([model[1].weight], lr=0.1, momentum=0.9, **how)
        model(torch.ones(2, 5)).sum().backward()
        stepped.step()
        model.zero_grad()
        towpath.shard(model, "zero3", topology=Topology(2, 1))
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(errors.ShardError, match=r"SGD has already stepped 1\.weight"):
            stepped.step()
        fresh = torch.optim.NAdam(model.parameters())  # has 0-D states of its own
        fresh.step()
        fresh.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        fresh.step()


@on_ranks(2)
def test_one_rank_that_stepped_before_shard_leaves_none_waiting() -> None:
    model: Any = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        _stepped(model, optimizer)
    towpath.shard(model, "zero3", topology=Topology(2, 1))
    model(torch.ones(2, 5)).sum().backward()
    refused = pytest.raises(errors.ShardError, match="AdamW has already stepped weight")
    with refused if dist.get_rank() == 0 else nullcontext():
        optimizer.step()
    with pytest.raises(errors.TowpathError) as caught:  # rank 0 goes on in vain
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
    assert "rank 0" in str(caught.value) and "AdamW.step()" in str(caught.value)


@on_ranks(2)
def test_a_live_graph_is_refused_with_the_reason() -> None:
    model: Any = nn.Linear(5, 3)
    loss = model(torch.ones(2, 5)).sum()
    with pytest.raises(errors.ShardError, match=r"graph|backward"):
        towpath.shard(model, "zero3", topology=Topology(2, 1))
    assert loss.requires_grad


class Headed(nn.Module):
    def __init__(self, out: int = 3, **buffers: Tensor) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, out)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


# What rank 1 passes in place of `Headed(mean=torch.zeros(4)), "zero3", topology=SHAPE`, and what the error says of it.
OTHER_CALLS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "model": (lambda: {"model": Headed(5, mean=torch.zeros(4))}, "head.weight"),
    "one buffer more": (lambda: {"model": Headed(mean=torch.zeros(4), steps=torch.zeros(()))}, "steps"),
    "another shape of a buffer": (lambda: {"model": Headed(mean=torch.zeros(2, 2))}, "2×2"),
    "another dtype of a buffer": (lambda: {"model": Headed(mean=torch.zeros(4).double())}, "float64"),
    "strategy": (lambda: {"strategy": "zero2"}, "zero2.*zero3|zero3.*zero2"),
    "topology": (lambda: {"topology": Topology(4, 1)}, "topology"),
    "no topology": (lambda: {"topology": None}, "is to be detected.*is passed|is passed.*is to be detected"),
    "values": (lambda: {"values": lambda name, start, end: torch.zeros(end - start)}, "values="),
    "outer": (lambda: {"strategy": towpath.strategy("zero3", SHAPE, outer=towpath.Outer(every=2))}, "outer = None"),
}


@pytest.mark.parametrize("what", OTHER_CALLS)
@on_ranks(4)
def test_ranks_with_different_arguments_all_fail_with_what_differs(what: str) -> None:
    given: dict[str, Any] = {"model": Headed(mean=torch.zeros(4)), "strategy": "zero3", "topology": SHAPE}
    if dist.get_rank() == 1:
        given |= OTHER_CALLS[what][0]()
    with pytest.raises(errors.MismatchError, match=rf"(?s)rank.*({OTHER_CALLS[what][1]})"):
        towpath.shard(**given)


ODD_BUFFERS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense"),
    "expanded": (lambda: torch.ones(1).expand(4), "contiguous"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "dequantize"),
}


@pytest.mark.parametrize("kind", ODD_BUFFERS)
@on_ranks(2)
def test_buffers_without_memory_of_their_own_are_refused_by_name(kind: str) -> None:
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.register_buffer("odd", ODD_BUFFERS[kind][0]())
    with pytest.raises(errors.ShardError, match=rf"buffer 'odd'.*{ODD_BUFFERS[kind][1]}\(\)"):
        towpath.shard(model, "zero3", topology=towpath.Topology(2, 1))


def test_without_a_process_group_it_is_a_world_of_one() -> None:
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()

    sharded: Any = towpath.shard(model, "zero3")
    sharded(torch.ones(2, 4)).sum().backward()

    assert sharded is model
    assert torch.equal(sharded.weight.full_tensor(), before)
    assert torch.equal(sharded.bias.grad.full_tensor(), torch.full((3,), 2.0))


# --- ShardTensor -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_operation_that_needs_the_whole_tensor_says_how_to_get_it() -> None:
    model: Any = towpath.shard(nn.Linear(5, 3), "zero3", topology=Topology(2, 1))
    for operation in (
        lambda w: w @ torch.ones(5),
        lambda w: w.reshape(15),
        lambda w: w[0],
        lambda w: w.numpy(),
    ):
        with pytest.raises(errors.ShardError, match=r"full_tensor|full_parameters"):
            operation(model.weight.detach())


@kinds
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")], ids=str)
@on_ranks(4)
def test_the_stock_clip_costs_one_all_reduce_and_returns_the_global_norm(label: str, order: float) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    twin.backward(micro_steps=2)
    calls = 0
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        found = nn.utils.clip_grad_norm_(twin.sharded.parameters(), 0.1, norm_type=order)
    finally:
        dist.all_reduce = all_reduce
    expected = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1, norm_type=order)
    assert abs(float(found) - float(expected)) <= 1e-10 * float(expected)  # float64, sums in another order
    twin.check_gradients()
    assert calls == (label != "ddp")  # where nothing is sharded every rank has the whole
