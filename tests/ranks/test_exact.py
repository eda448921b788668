"""Exact transports: training equals that without them to the bit, and encoded messages were sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.forms import in_form
from tests.ranks.models import DEVICE, LOUDNESS, MODELS
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom, strategy_of
from towpath.core.routes import Form
from towpath.core.strategy import GRADIENTS, TransferKind

# Every preset that sends gradients or a parameter sync between nodes, and every route.
LABELS = (
    *("ddp", "zero1", "zero2", "zero3", "mics", "hpz"),
    *(f"paro-{name}" for name in ("nnn", "nni", "nng", "nii", "nig", "ngg", "iii", "iig", "igg", "ggg")),
    *("zero1@ring", "zero1@hierarchical", "zero1@one-hop", "zero1@two-hop", "ddp@ho-ring", "ddp@two-hop"),
    *("paro-iig gradients=int4", "paro-igg offload=params"),
)
# The dtype of the model, that of computation and messages, and that of the reduction.
PRECISIONS = {
    "bf16": (torch.bfloat16, towpath.Precision()),
    "bf16, fp32 masters": (torch.float32, towpath.Precision("bf16", "bf16")),
    "fp16, fp32 masters": (torch.float32, towpath.Precision("fp16", "fp16")),
    "fp32": (torch.float32, towpath.Precision()),
}


@in_turn([(label, name) for label in LABELS for name in PRECISIONS], 1, "case")
@pytest.mark.parametrize("micro_steps", [seldom(1), 4])  # in collectives, one is tested below
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=["2x2", "3x1"])
def test_training_is_the_same_to_the_bit(
    world: Worlds, case: tuple[str, str], micro_steps: int, shape: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    steps = 6 if "not parity" in pytestconfig.option.markexpr else 20
    world(shape[0] * shape[1]).run(_compare, *case, micro_steps, shape, steps)


def _compare(label: str, precision: str, micro_steps: int, shape: tuple[int, int], steps: int) -> None:
    strategy = strategy_of(label, towpath.Topology(*shape))
    _check_same(_by_messages(replace(strategy, offload=None)), strategy, precision, micro_steps, steps)


def _check_same(
    plainly: towpath.Strategy, strategy: towpath.Strategy, precision: str, micro_steps: int, steps: int
) -> tuple[towpath.Schedule, Any]:
    """Compare training with exact transports, which have sent encoded messages, with `plainly`."""
    exactly = strategy.with_exact_transports()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        plain, _ = _trained(plainly, precision, micro_steps, steps)
        found, model = _trained(exactly, precision, micro_steps, steps)
        assert plain.keys() == found.keys()
        for name, expected in plain.items():
            assert torch.equal(_bits(found[name]), _bits(expected)), name
        schedule = towpath.schedule(exactly, model, micro_steps)
        used, memory = [t for t in schedule.transfers if t.coding], towpath.stats(model).memory_bytes
        assert used and {kind: memory[kind] for kind in schedule.buffer_bytes()} == schedule.buffer_bytes()
        sent = [each for each in towpath.stats(model).transfers if each.transfer.coding]
        assert {each.transfer.kind for each in sent} == {t.kind for t in used}
        # Encoded messages have another length than their values. A single one may have the same by chance.
        assert all(each.coded_messages for each in sent)
        assert sum(e.inter_bytes for e in sent) != sum(e.calls * e.transfer.inter_bytes for e in sent)
        return schedule, model


def _by_messages(strategy: towpath.Strategy) -> towpath.Strategy:
    """Return the strategy without the backend's own sums, which have an order of their own. Exact ones avoid them."""
    kinds = [kind for kind in GRADIENTS if strategy.transport(kind).route == "flat"]
    return replace(strategy, **{kind.value: replace(strategy.transport(kind), route="ring") for kind in kinds})


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _trained(
    strategy: towpath.Strategy, precision: str, micro_steps: int, steps: int
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train, and return this rank's losses, gradients of the last step, parameters and optimizer states."""
    dtype, policy = PRECISIONS[precision]
    entry, rank = MODELS["gpt"], dist.get_rank()
    model: Any = towpath.shard(entry.make(dtype), strategy, precision=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for micro_step in range(micro_steps):
            with nullcontext() if micro_step == micro_steps - 1 else model.no_sync():
                loss = entry.loss(model, *entry.micro_batch(rank, micro_step, step, dtype))
                (LOUDNESS[step % len(LOUDNESS)] / micro_steps * loss).backward()
            kept[f"loss {step}.{micro_step}"] = loss.detach().to(DEVICE)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        kept[name] = parameter.local.clone()
        if parameter.grad is not None:
            kept[f"{name}.grad"] = parameter.grad.local.clone()
        kept |= {f"{name}.{k}": getattr(v, "local", v) for k, v in optimizer.state[parameter].items()}
    return kept, model


# Strategies whose parameter syncs cross nodes, by collectives of the whole group, and of its rows and columns.
IN_COLLECTIVES = (
    *("zero1@flat", "zero1@hierarchical", "paro-iig", "paro-nig", "lins:2x2|2x2|2x4"),
    *("zero1 offload=optimizer", "paro-igg offload=params", "zero1 offload=optimizer+params"),
)


@in_turn([(label, name) for label in IN_COLLECTIVES for name in PRECISIONS], 1, "case")
@pytest.mark.parametrize("micro_steps", [1, seldom(4)])
def test_in_collectives_training_is_the_same_to_the_bit(world: Worlds, case: tuple[str, str], micro_steps: int) -> None:
    """Parameter syncs are encoded, whose sizes the ranks agree on first."""
    shape = (4, 2) if case[0].startswith("lins") else (2, 2)
    world(shape[0] * shape[1]).run(_compare_in_collectives, *case, micro_steps, shape)


def _compare_in_collectives(label: str, precision: str, micro_steps: int, shape: tuple[int, int]) -> None:
    strategy = strategy_of(label, towpath.Topology(*shape))
    with in_form(Form.COLLECTIVES):
        schedule, model = _check_same(replace(strategy, offload=None), strategy, precision, micro_steps, 3)
    sizes = [t for t in schedule.transfers if t.kind is TransferKind.MESSAGE_SIZES]
    kinds = {TransferKind.PARAM_SYNC, TransferKind.MESSAGE_SIZES}
    syncs = [t for t in schedule.transfers if t.kind in kinds]
    assert len(sizes) == 1 and syncs[0] == sizes[0] and sizes[0].elements == len(syncs)
    assert [t for t in towpath.stats(model).last_step if t.kind in kinds] == syncs


@in_turn([1, 0], 1, "kept")
def test_ranks_that_run_other_units_train_the_same_to_the_bit(world: Worlds, kept: int) -> None:
    """Under zero1 they may. Their parameter syncs, which are sent when units are due, still match."""
    world(2).run(_skip_units, kept)


class Skipping(torch.nn.Module):
    """Blocks, of which a call may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(5))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = torch.tanh(self.blocks[number](x))
        return x


def _skip_units(kept: int) -> None:
    rank, found = dist.get_rank(), list[dict[str, torch.Tensor]]()
    orders = [[0, 1, 2, 3, 4], [3, 1, 4], [2, 0], [4, 3, 2, 1, 0]]
    with pytest.MonkeyPatch.context() as patch, in_form(Form.COLLECTIVES):
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        for exact in (False, True):
            torch.manual_seed(5)
            strategy = towpath.strategy("zero1", towpath.Topology(2, 1), exact=exact)
            model: Any = towpath.shard(Skipping().to(DEVICE), strategy, units=[torch.nn.Sequential])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(4):
                used = orders[(step + rank) % len(orders)] if step != kept else orders[0]
                (model(torch.ones(2, 16, device=DEVICE) * (rank + 1), used) - step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: p.local.clone() for name, p in model.named_parameters()})
            assert exact == any(each.transfer.coding for each in towpath.stats(model).transfers)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("form", Form)
def test_what_a_rank_cannot_decode_raises_on_every_rank(world: Worlds, form: Form) -> None:
    """Its replica has diverged in silence: nothing else in the step would notice."""
    for said in world(2).run(_diverge, form, True):
        assert "rank 0 could not decode param_sync" in said and "relative to other values" in said
        assert "message from rank 1" in said


def test_without_a_boundary_a_rank_raises_after_the_forward(world: Worlds) -> None:
    diverged, other = world(2).run(_diverge, Form.MESSAGES, False)
    assert "rank 0 could not decode param_sync" in diverged and not other


@pytest.mark.parametrize("form", Form)
def test_a_program_that_goes_on_gets_the_error_again_until_it_loads(world: Worlds, form: Form) -> None:
    """Also after an evaluation that met it, and after full_parameters()."""
    for found in world(2).run(_go_on, form):
        assert found == ["raised"] * 3 + ["not kept unsharded", "trains", "trains"]


def _go_on(form: Form) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, in_form(form):
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        return _outcomes_of_diverged()


def _outcomes_of_diverged() -> list[str]:
    model, optimizer, step = _diverged()
    values = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    with contextlib.suppress(towpath.TowpathError), torch.no_grad():
        step(forward_only=True)
    found: list[str] = []
    for _ in range(2):
        found.append(_outcome(step))
        optimizer.zero_grad()
    with contextlib.ExitStack() as stack:
        found.append(_outcome(lambda: stack.enter_context(towpath.full_parameters(model))))
    found.append("kept unsharded" if model.towpath_engine.kept_unsharded else "not kept unsharded")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return [*found, _outcome(step), _outcome(step)]


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except towpath.TowpathError as error:
        return "raised" if "could not decode param_sync" in str(error) else str(error)
    return "trains"


def _diverge(form: Form, trains: bool) -> str:
    with pytest.MonkeyPatch.context() as patch, in_form(form):
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        return _error_of_diverged(trains)


def _error_of_diverged(trains: bool) -> str:
    _, _, step = _diverged()
    try:
        if trains:
            step()
        else:
            with torch.no_grad():
                step(forward_only=True)
    except towpath.TowpathError as error:
        return str(error)
    return ""


def _diverged() -> tuple[Any, torch.optim.Optimizer, Callable[..., None]]:
    """On a rank: a model whose replica on rank 0 has other bits, its optimizer, and a function that trains a step."""
    entry, rank = MODELS["gpt"], dist.get_rank()
    strategy = towpath.strategy("zero1", towpath.Topology(2, 1), exact=True)
    model: Any = towpath.shard(entry.make(torch.bfloat16), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(forward_only: bool = False) -> None:
        loss = entry.loss(model, *entry.micro_batch(rank, 0, 0, torch.bfloat16))
        if not forward_only:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        step()
    for bucket in (bucket for unit in model.towpath_engine.units for bucket in unit.buckets if rank == 0):
        bucket.shard.view(torch.int16).bitwise_xor_(1)
    return model, optimizer, step
