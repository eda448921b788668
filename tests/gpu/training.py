"""Cases of training: on ranks that share the device, next to one process, to what was not encoded, or to an oracle."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks import reference
from tests.ranks.checkpoints import Run
from tests.ranks.models import DEVICE, LOUDNESS, MODELS, noise
from tests.ranks.reference import Task, optimizer_for
from tests.ranks.strategies import strategy_of
from tests.ranks.twin import accumulating, distance, mean_of_all_ranks
from towpath import Outer, Precision, Topology, Transport

SHAPE = Topology(2, 2)
STEPS, MICRO_STEPS, MAX_NORM = 3, 2, 0.1
MIXED = Precision(params=torch.bfloat16, reduce=torch.float32)

# In float64 only the order of sums differs from one process (tests/ranks/test_parity.py).
TOLERANCE = 1e-9

LOSSLESS = (
    *("ddp", "zero1", "zero2", "zero3", "hpz", "mics:2x1", "paro-iig", "paro-igg", "paro-ggg"),
    "lins:1x1|2x1|2x2",
)
ROUTED = (*(f"zero3@{route}" for route in ("hierarchical", "one-hop", "two-hop", "ho-ring")), "ddp@two-hop")


# --- against one process ----------------------------------------------------------------------------------------------


@cache
def _expected(ranks: int) -> reference.Result:
    """Train in one process, which is this one."""
    return reference.train_in_one_process(Task("gpt", ranks, MICRO_STEPS, "float64", STEPS))


def trains_as_one_process(label: str, offload: Any = None, shape: Topology = SHAPE) -> dict[str, Any]:
    """Losses, norms that clip, and parameters, in float64."""
    expected, entry = _expected(shape.world), MODELS["gpt"]
    model: Any = towpath.shard(entry.make(torch.float64), strategy_of(label, shape, offload=offload))
    optimizer = optimizer_for(model)
    worst = 0.0
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for micro in accumulating(model, MICRO_STEPS):
            loss = entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, step, torch.float64))
            (LOUDNESS[step] * loss / MICRO_STEPS).backward()
            total += LOUDNESS[step] * loss.detach() / (MICRO_STEPS * shape.world)
        dist.all_reduce(total)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), expected.max_norm))
        for found, right in ((total.item(), expected.losses[step]), (norm, expected.norms[step])):
            worst = max(worst, abs(found - right) / max(abs(right), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
    for name, found in model.named_parameters():
        worst = max(worst, distance(found, expected.parameters[name]))
    assert worst <= TOLERANCE, f"{worst:.1e} from one process, at most {TOLERANCE:.0e} expected"
    assert shape.world == 1 or towpath.stats(model).transfers
    return {"worst": worst}


def trains_fp32_masters(label: str, most_of_all: float | None = None, shape: Topology = SHAPE) -> dict[str, Any]:
    """In bf16: gradients are the mean of those of one process that computes in bf16, and masters make AdamW's steps.

    A gradient may be off by the 8 bits of bf16, relative to its largest element: some kernels add in no fixed order.
    Under codecs, `most_of_all` limits how far all gradients are, relative to their norm.
    """
    entry, dtype = MODELS["gpt"], torch.float32
    model: Any = towpath.shard(entry.make(dtype), strategy_of(label, shape), topology=shape, precision=MIXED)
    plain = entry.make(dtype)  # the masters
    optimizers = optimizer_for(model), optimizer_for(plain)
    worst = of_all = 0.0
    for step in range(STEPS):
        for micro in accumulating(model, MICRO_STEPS):
            batch = entry.micro_batch(dist.get_rank(), micro, step, dtype)
            (entry.loss(model, *batch) / MICRO_STEPS).backward()
        expected = _gradients_in_bf16(plain, step, shape.world)
        found = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        for name, right in expected.items():
            worst = max(worst, ((found[name] - right).abs().max() / right.abs().max().clamp(min=1e-4)).item())
        both = [torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)]
        of_all = max(of_all, ((both[0] - both[1]).norm() / both[1].norm()).item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM  # it clips
        for name, p in plain.named_parameters():
            p.grad = found[name] * (MAX_NORM / (norm.to(DEVICE) + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, master), p in zip(model.named_parameters(), plain.parameters(), strict=True):
            off = (master.full_tensor() - p).abs().max().item()
            assert master.dtype == dtype and off <= 1e-6, f"master {name} is {off:.1e} from AdamW's in step {step}"
            with torch.no_grad():
                p.copy_(master.full_tensor())
    found_off, most = (worst, 2**-7) if most_of_all is None else (of_all, most_of_all)
    assert found_off <= most, f"gradients are {found_off:.1e} off, at most {most:.1e} expected"
    return {"worst": worst, "of all": of_all}


def _gradients_in_bf16(masters: nn.Module, step: int, ranks: int) -> dict[str, torch.Tensor]:
    """The mean, in float32, of the gradients of all ranks and micro-steps."""
    entry = MODELS["gpt"]
    half = entry.make(torch.float32)
    half.load_state_dict(masters.state_dict())
    half.to(torch.bfloat16)
    found = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in half.named_parameters()}
    for rank in range(ranks):
        for micro in range(MICRO_STEPS):
            half.zero_grad()
            (entry.loss(half, *entry.micro_batch(rank, micro, step, torch.float32)) / MICRO_STEPS).backward()
            for name, p in half.named_parameters():
                assert p.grad is not None
                found[name] += p.grad.float() / ranks
    return found


def rounds_as_the_oracle(name: str, with_its_options: bool) -> None:
    """Weights to the bit, and each element of a gradient within the rounding of its block."""
    from tests.ranks import test_encoded_training as oracle

    options = oracle.TRAINED[name] if with_its_options else {}
    for build, loss in ((oracle._gpt, oracle._gpt_loss), (oracle._tiny, oracle._tiny_loss)):
        model: Any = towpath.shard(build(), towpath.strategy(name, SHAPE, **options))
        oracle._check_accumulation(model, build().to(DEVICE), loss, SHAPE)


# --- outer steps ------------------------------------------------------------------------------------------------------


def islands_train_as_in_one_process(label: str, delay: int) -> dict[str, Any]:
    """To 1e-9. At the end, in the middle of an exchange, all islands are averaged."""
    from tests.ranks.test_outer import away, train_beside

    outer = Outer(every=2, fragments=2, delay=delay, blend=0.5 if delay else 0.0)
    model, islands = train_beside(label, SHAPE, outer, optimizer_for, 5)
    towpath.average_islands(model)
    islands.average()
    worst = away(model, islands.models[0])
    assert worst <= TOLERANCE, f"{worst:.1e} from simulated islands"
    return {"worst": worst}


def resumes_in_an_exchange(folder: Path, label: str, delay: int, codec: str) -> None:
    """Saved and loaded between two steps, one of them in the delay of an exchange, it trains on bit for bit."""
    from tests.ranks import test_outer_checkpoints as outer_checkpoints

    outer = Outer(every=3, fragments=2, delay=delay, blend=0.5 if delay else 0.0)
    if codec != "float32":
        outer = replace(outer, transport=Transport("flat", codec, feedback="all"))
    mine = outer_checkpoints._train_and_save(folder, label, outer, 4)
    expected: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(expected, mine)
    wrong = outer_checkpoints._resume(folder, label, outer, 4, expected)
    assert not wrong, wrong


def keeps_what_is_not_sent(codec: str) -> dict[str, Any]:
    """What the islands received, and what they keep for later, is what they wanted to send."""
    from tests.ranks.test_outer import keep_everything

    off = keep_everything(codec)
    assert off <= 1e-5, off
    return {"worst": off}


def diverging_islands_raise(label: str) -> None:
    from tests.ranks.test_outer import begin_apart

    said = begin_apart(label, SHAPE, False)
    assert "slow weights of fragment 0 differ between islands" in said, said


# --- exact transports -------------------------------------------------------------------------------------------------


def exact_is_the_same_to_the_bit(label: str, precision: str) -> None:
    """Two micro-steps, three steps and clipping. On gloo, in NCCL's form."""
    from tests.ranks.test_exact import _compare_in_collectives

    _compare_in_collectives(label, precision, MICRO_STEPS, (2, 2))


def a_diverged_replica_raises() -> None:
    """On both ranks: what rank 1 sends is a difference to values that rank 0 does not have."""
    from tests.ranks.test_exact import _diverge
    from towpath.core.routes import Form

    said = _diverge(Form.COLLECTIVES, True)
    assert "rank 0 could not decode param_sync" in said and "relative to other values" in said, said


# --- offloading, and what surrounds a step ----------------------------------------------------------------------------


def offloads_to_the_bit(label: str, offload: str) -> None:
    from tests.ranks.test_offload import _compare_with_device

    _compare_with_device(label, offload, MIXED)


def full_parameters_are_read_and_written(label: str) -> None:
    """What is written inside is what every rank trains with afterwards, to the bit as without sharding of weights."""
    contents = []
    for each in (label, "ddp"):
        run = Run.of(each, SHAPE, dtype=torch.float64)
        with towpath.full_parameters(run.model), torch.no_grad():
            for p in list(run.model.parameters())[::2]:
                p.mul_(0.5)
        run.train(range(2))
        contents.append(run.content())
    for name, expected in contents[1].items():
        assert (contents[0][name] - expected).abs().max() <= TOLERANCE, name


def an_overflow_is_skipped_by_all() -> None:
    """One rank sees it, and the optimizer is in the host's memory."""
    from tests.ranks.test_offload import _overflow

    scales: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scales, _overflow())
    assert len(set(scales)) == 1, scales


def adapters_train_on_encoded_weights(label: str, codec: str) -> dict[str, Any]:
    """Frozen weights rest in a codec. Training is that of one process on the weights that the codec makes of them."""
    from tests.ranks.test_frozen import WIDTH, Adapted

    torch.manual_seed(3)
    plain = nn.Sequential(*(Adapted() for _ in range(3))).to(DEVICE)
    model: Any = towpath.shard(
        copy.deepcopy(plain), strategy_of(f"{label} frozen_codec={codec}", SHAPE), units=[Adapted]
    )
    moved = worst = 0.0
    with torch.no_grad():
        for name, p in plain.named_parameters():
            whole = model.get_parameter(name).full_tensor()
            if not p.requires_grad:
                moved = max(moved, ((whole - p).abs().max() / p.abs().max()).item())
            p.copy_(whole)
    assert 0 < moved <= 0.5 / (127 if codec.startswith("int8") else 7) * 1.01, moved
    optimizers = [optimizer_for(each) for each in (model, plain)]
    for step in range(STEPS):
        x = noise(dist.get_rank(), 0, step, 4, WIDTH).float()
        (model(x) - 0.1).square().mean().backward()
        with mean_of_all_ranks(plain):
            (plain(x) - 0.1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, p in plain.named_parameters():
        found = model.get_parameter(name).full_tensor()
        assert p.requires_grad or torch.equal(found, p), name
        worst = max(worst, (found - p).abs().max().item())
    assert worst <= 1e-5, worst
    return {"worst": worst}
