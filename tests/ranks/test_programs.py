"""Ranks whose programs differ, or that make a call alone which needs them all: every rank raises, and says how."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.models import MODELS, noise
from tests.ranks.server import World, on_ranks
from tests.ranks.strategies import in_turn, labels, seldom, strategy_of
from tests.ranks.twin import error_of
from towpath.core.queues import LoggedCall, scopes
from towpath.errors import MismatchError, ShardError

SHAPE = towpath.Topology(2, 1)


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def _net(label: str, **options: Any) -> Any:
    torch.manual_seed(3)
    return towpath.shard(Net().double(), strategy_of(label, SHAPE), topology=SHAPE, **options)


def _loss(model: nn.Module, step: int = 0) -> Tensor:
    return model(noise(dist.get_rank(), 0, step)).square().mean()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- programs that differ ---------------------------------------------------------------------------------------------


def _other_rate(model: Any, alone: bool) -> None:
    _train(model, torch.optim.AdamW(model.parameters(), lr=0.02 if alone else 0.01), 2)


def _other_groups(model: Any, alone: bool) -> None:
    first, second, *_ = list(model.blocks)[:: -1 if alone else 1]
    groups = [{"params": [first.weight], "lr": 0.1}, {"params": [second.weight], "lr": 0.01}]
    _train(model, torch.optim.AdamW(groups), 2)


def _no_step(model: Any, alone: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(model).backward()
    if not alone:
        optimizer.step()
    optimizer.zero_grad()
    _loss(model, 1).backward()


def _no_zeroing(model: Any, alone: bool, set_to_none: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(model).backward()
    optimizer.step()
    if not alone:
        optimizer.zero_grad(set_to_none=set_to_none)
    _loss(model, 1).backward()


def _no_zeroing_in_place(model: Any, alone: bool) -> None:
    _no_zeroing(model, alone, set_to_none=False)


def _frozen(model: Any, alone: bool) -> None:
    model.blocks[1].weight.requires_grad_(not alone)
    _loss(model).backward()


def _other_inputs(model: Any, alone: bool) -> None:
    _loss(model).backward(inputs=[model.blocks[0].weight, model.blocks[2 if alone else 1].weight])


def _penalty(model: Any, alone: bool) -> None:
    factor = 1 + sum(p.square().sum() for p in model.parameters())
    (_loss(model) * (factor if alone else 1)).backward()


def _penalties_in_another_order(model: Any, alone: bool) -> None:
    first, second, *_ = [block.weight.norm() for block in list(model.blocks)[:: -1 if alone else 1]]
    (_loss(model) + 2 * first + 3 * second).backward()


DIFFERENCES: dict[Callable[[Any, bool], None], tuple[str, str]] = {
    _other_rate: ("AdamW.step() with lr=0.01", "AdamW.step() with lr=0.02"),
    _other_groups: ("AdamW.step() with checksum_of_their_names=", "AdamW.step() with checksum_of_their_names="),
    _no_step: ("SGD.step()", "the end of the backward pass"),
    _no_zeroing: ("gradients_kept=0", "gradients_kept=6"),
    _no_zeroing_in_place: ("gradients_zeroed=", "gradients_zeroed=0"),
    _frozen: ("frozen=unset", "frozen=('blocks.1.weight',)"),
    _other_inputs: ("backward(inputs=…) with checksum=", "backward(inputs=…) with checksum="),
    _penalty: ("the end of the backward pass", "the backward pass of a norm"),
    _penalties_in_another_order: ("an extreme of 'blocks.", "an extreme of 'blocks."),
}


@in_turn(["ddp", "zero1", "zero3", "mics", "paro-iig"], 1)
@pytest.mark.parametrize("program", DIFFERENCES, ids=lambda program: program.__name__.strip("_"))
def test_ranks_that_run_different_programs_all_raise_and_name_the_difference(program: Any, label: str) -> None:
    here, there = DIFFERENCES[program]
    with World(2) as ranks:  # of its own: where ranks were found to wait in vain, none of its transfers can be trusted
        texts = ranks.run(_differ, program, label)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: the ranks ran different programs: call"), text
        on_rank_0, _, on_rank_1 = text.partition("on rank 0: ")[2].partition(", on rank 1: ")
        assert here in on_rank_0 and there in on_rank_1, text


def _differ(program: Callable[[Any, bool], None], label: str) -> str:
    model = _net(label)
    return error_of(lambda: program(model, dist.get_rank() == 1))


@in_turn(["ddp", "zero1", "mics"], 1)
@on_ranks(2)
def test_other_numbers_of_micro_steps_are_refused(label: str) -> None:
    model = _net(label)
    count = 1 if dist.get_rank() == 1 else 3

    def step() -> None:
        for micro in range(count):
            with nullcontext() if micro == count - 1 else model.no_sync():
                _loss(model, micro).backward()

    rank = dist.get_rank()
    text = error_of(step)
    assert text.startswith(f"rank {rank}: the ranks ran different programs: call 1 of the step was, on rank 0")
    assert "micro_steps=3, on rank 1: the end of the backward pass with micro_steps=1" in text, text


@on_ranks(2)
def test_what_ranks_may_do_differently_stays_allowed() -> None:
    """Norms of what a rank holds whole, other units, evaluation on one rank alone, numbers of batches under join()."""
    for label in ("ddp", "zero1", "zero2"):
        model = _net(label)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for step in range(3):
            in_any_order = list(model.parameters())[:: 1 - 2 * dist.get_rank()]
            torch.nn.utils.get_total_norm(in_any_order).item()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    _loss(model, step)
                if label == "ddp":
                    assert all(float(p.detach().norm()) > 0 for p in model.parameters())
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for batch in towpath.join(model, [1, 2, 3][: 3 - dist.get_rank()]):
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_an_optimizer_that_steps_what_was_not_sharded_besides_says_so_once() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("towpath.engine").addHandler(handler)
    try:
        model, head = _net("zero3"), nn.Linear(6, 2).double()
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        for _ in range(2):
            head(model(torch.ones(2, 6).double())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("towpath.engine").removeHandler(handler)
    assert len(said) == 1 and said[0].startswith(f"[rank {dist.get_rank()}] ")
    assert "SGD steps 2 parameters in addition to those of the sharded model" in said[0], said


# --- values that drift apart ------------------------------------------------------------------------------------------


def _add(weight: Tensor) -> None:
    weight.add_(1e-9)


def _negate(weight: Tensor) -> None:
    weight.neg_()


def _turn_round(weight: Tensor) -> None:
    weight.copy_(weight.full_tensor().flip(0))


@pytest.mark.parametrize(
    ("label", "write"),
    [
        *((label, _add) for label in ("ddp", "mics", "paro-iii", "ddp+mixed")),
        *(("ddp", write) for write in (_negate, _turn_round)),
    ],
)
@on_ranks(2)
def test_copies_of_parameters_that_differ_are_found(label: str, write: Any) -> None:
    label, _, mixed = label.partition("+")
    precision = towpath.Precision(params=torch.bfloat16, reduce=torch.float32) if mixed else None
    model = _net(label, check_every=2, units=[nn.Linear], precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer, 3)
    if dist.get_rank() == 1:
        with torch.no_grad():
            write(model.blocks[1].weight)
    rank = dist.get_rank()
    text = error_of(lambda: _train(model, optimizer, 4))
    assert text.startswith(f"rank {rank}: ranks that hold copies of the same parameters hold different values"), text
    assert "parameters of unit 'blocks" in text and "check_every=" in text, text


@pytest.mark.parametrize("precision", [None, *map(seldom, ("bf16",))])
@on_ranks(4)
def test_copies_agree_to_the_bit_under_every_strategy_and_codec(precision: Any, whole_product: bool) -> None:
    """Else the comparison of values would refuse what trains as it should."""
    shape = towpath.Topology(2, 2)
    copies = [label for label in labels(shape) if _has_copies(label, shape)]
    coded = [f"{name} {codec}" for name in ("ddp", "mics", "paro-iii") for codec in CODECS]
    for label in [*(copies if whole_product else copies[::8]), *coded, "ddp gradients=low-rank:2"]:
        torch.manual_seed(3)
        options = {} if precision is None else {"precision": precision}
        model: Any = towpath.shard(Net(64), strategy_of(label, shape), topology=shape, check_every=1, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            seed = torch.Generator().manual_seed(dist.get_rank() + 10 * step)
            model(torch.randn(3, 64, generator=seed)).float().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert model.towpath_engine._boundary_check._wait is not None, label


def _has_copies(label: str, shape: towpath.Topology) -> bool:
    return any(LoggedCall.VALUES in scope.kinds for scope in scopes(strategy_of(label, shape)))


CODECS = ["gradients=int8", "gradients=int4:64 feedback=both"]


@on_ranks(2)
def test_values_are_not_compared_where_that_is_turned_off() -> None:
    model = _net("ddp", check_every=0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.blocks[1].weight.add_(1e-9)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ShardError, match="check_every: expected a number of optimizer steps"):
            _net("ddp", check_every=wrong)
    with pytest.raises(MismatchError, match="values compared every"):
        _net("ddp", check_every=5 + dist.get_rank())


# --- calls that need every rank ---------------------------------------------------------------------------------------


def _clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _full_tensor(model: Any) -> None:
    model.blocks[0].weight.full_tensor()


def _full_parameters(model: Any) -> None:
    with towpath.full_parameters(model):
        pass


CALLS = {
    _clip: "a norm, a sum",
    _full_tensor: "full_tensor() of 'blocks.0.weight'",
    _full_parameters: "full_parameters()",
}


def _named(call: Callable[..., Any]) -> str:
    return call.__name__.strip("_")


@pytest.mark.parametrize("call", CALLS, ids=_named)
@in_turn(["zero3", "zero1"], 1)
def test_a_call_that_one_rank_makes_alone_ends_in_one_error_on_every_rank(label: str, call: Any) -> None:
    """Long before the patience of the process group, of a minute here, ends."""
    with World(2, group_timeout=60.0) as ranks:
        texts = ranks.run(_call_alone, label, call)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: "), text
        assert CALLS[call] in text and ("which every rank must call" in text or "let every rank" in text), text


def _call_alone(label: str, call: Callable[[Any], None]) -> str:
    model = _net(label, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 1)
    _loss(model).backward()

    def go_on() -> None:
        if dist.get_rank() == 0:
            call(model)
        optimizer.step()
        optimizer.zero_grad()
        _train(model, optimizer, 2)

    return error_of(go_on)


@pytest.mark.compiles
def test_a_forward_that_fails_to_compile_on_some_ranks_ends_on_all() -> None:
    """Long before the patience of the process group, of a minute here, ends."""
    with World(4, group_timeout=60.0) as ranks:
        texts = ranks.run(_compile_on_some)
    for rank, text in enumerate(texts):
        assert ("no compiler here" if rank < 2 else f"rank {rank}: a pass has failed on rank ") in text, text


def _compile_on_some() -> str:
    def backend(graph: Any, inputs: Any) -> Any:
        if dist.get_rank() < 2:
            raise NotImplementedError("no compiler here")
        return graph.forward

    entry = MODELS["gpt"]
    model = towpath.shard(entry.make(torch.float64), "zero3", topology=towpath.Topology(2, 2))
    batch = entry.micro_batch(dist.get_rank(), 0, 0, torch.float64)
    with pytest.raises(Exception) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        entry.loss(torch.compile(model, backend=backend), *batch).backward()
    return str(caught.value)


def test_a_call_that_nobody_answers_says_so_when_patience_ends() -> None:
    with World(2, group_timeout=3.0) as ranks:
        texts = ranks.run(_never_answered)
    assert texts[0].startswith("rank 0: ") and CALLS[_clip] in texts[0], texts[0]
    assert "rank 1: step 1" in texts[0], texts[0]


def _never_answered() -> str:
    model = _net("zero3")
    _loss(model).backward()
    if dist.get_rank() == 1:
        # Nothing more is asked of this rank; it waits where the user's own code would.
        store: Any = dist.distributed_c10d._get_default_store()
        store.clone().wait(["rank 0 is through"])
        return ""
    text = error_of(lambda: _clip(model))
    store: Any = dist.distributed_c10d._get_default_store()
    store.clone().set("rank 0 is through", "")
    return text
