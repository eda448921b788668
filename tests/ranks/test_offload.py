"""Training with an optimizer, or P shards, in the host's memory is to the bit the same as in the device's.

Where the model is on the CPU, both are the same memory. With the optimizer there, the same code runs: a master of its
own, the mean gradients copied to it at the boundary, what was written copied back in the parameter sync. P shards are
copied in the form of collectives only, as on a GPU.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.forms import in_form
from tests.ranks.checkpoints import Run, content, differing
from tests.ranks.models import DEVICE, MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom
from towpath import Precision, Topology, checkpoint
from towpath.core.routes import Form
from towpath.engine.executor import engine_of
from towpath.errors import ConfigError, MismatchError

SHAPE = Topology(2, 2)
OFFLOADS = ("optimizer", "params", "optimizer+params")
LABELS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "paro-iig", "paro-nig", "zero++", "ddp gradients=low-rank:2")
MIXED = Precision(params=torch.bfloat16, reduce=torch.float32)


@pytest.mark.parametrize("precision", [seldom(Precision()), MIXED], ids=["float32", "bf16"])
@in_turn([(label, offload) for label in LABELS for offload in OFFLOADS], 2, "case")
def test_training_is_the_same_to_the_bit(world: Worlds, case: tuple[str, str], precision: Precision) -> None:
    world(4).run(_compare_with_device, *case, precision)


def _compare_with_device(label: str, offload: str, precision: Precision) -> None:
    """Losses, the norms that clip, gradients, parameters and optimizer states, over steps that accumulate.

    With P shards on the host in the form of a GPU, which copies them.
    """
    with in_form(Form.COLLECTIVES if "params" in offload else Form.MESSAGES):
        runs = [Run.of(label, SHAPE, precision=precision, offload=each) for each in (None, offload)]
    device, host = runs
    entry = MODELS["gpt"]
    for step in range(3):
        norms: list[torch.Tensor] = []
        for run in runs:
            with run.model.no_sync():
                entry.loss(run.model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32)).backward()
            entry.loss(run.model, *entry.micro_batch(dist.get_rank(), 1, step, torch.float32)).backward()
            norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))
        assert torch.equal(*(norm.cpu() for norm in norms)), (step, norms)
        for (name, p), q in zip(device.model.named_parameters(), host.model.parameters(), strict=True):
            assert torch.equal(p.grad.to_local().cpu(), q.grad.to_local().cpu()), (step, name)
        for run in runs:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=step == 0)
    assert differing(host.content(), device.content()) == []


@pytest.mark.parametrize("precision", [seldom(Precision()), MIXED], ids=["float32", "bf16"])
@pytest.mark.parametrize("form", [seldom(Form.MESSAGES), Form.COLLECTIVES])
@on_ranks(4)
def test_memory_is_what_the_schedule_says_of_device_and_host(form: Form, precision: Precision) -> None:
    cases = [(label, "optimizer") for label in ("zero3", "paro-iig", "ddp", "zero++")]
    cases += [("paro-igg exact=True", "params"), ("zero1", "optimizer+params")]
    for label, offload in cases:
        with in_form(form), pytest.MonkeyPatch.context() as patch:
            patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
            _compare_memory_of(Run.of(label, SHAPE, precision=precision, offload=offload), offload, precision)


def _compare_memory_of(run: Run, offload: str, precision: Precision) -> None:
    run.train(range(2))
    strategy = engine_of(run.model).strategy
    planned, found = towpath.schedule(strategy, run.model, 1, precision), towpath.stats(run.model)
    kept = planned.memory_bytes()
    moved = ["params"] * ("params" in offload) + ["master", "grad"] * ("optimizer" in offload)
    assert not any(kept[kind] for kind in moved)
    for kind, expected in (kept | planned.buffer_bytes()).items():
        assert found.memory_bytes[kind] == expected, (strategy.name, kind)
    owned = sum(p.to_local().numel() for p in run.model.parameters())
    states = 2 * 4 * owned  # AdamW's two, in the dtype of the masters
    on_host = {"optimizer": states} if "optimizer" in offload else {}
    assert found.host_memory_bytes == planned.host_memory_bytes() | on_host, strategy.name
    assert found.memory_bytes["optimizer"] == states - on_host.get("optimizer", 0)
    made = found.buffers_made
    run.train(range(2))
    assert towpath.stats(run.model).buffers_made == made, strategy.name
    assert f"in the host's memory: {'master' if offload == 'optimizer' else 'params'}" in str(found)


def test_the_model_computes_in_memory_of_its_own(world: Worlds) -> None:
    world(2).run(_apart)


def _apart() -> None:
    """What the optimizer writes reaches the weights by publication alone, the gradient the optimizer by a copy."""
    run = Run.of("zero3", Topology(1, 2), offload="optimizer")
    run.train(range(1))
    bucket = engine_of(run.model).root.buckets[0]
    before = bucket.shard.clone()
    with torch.no_grad():
        for p in run.model.parameters():
            p.add_(1.0)
    assert torch.equal(bucket.shard, before)
    engine_of(run.model).param_sync()
    engine_of(run.model).comm.queues.finish()
    assert torch.equal(bucket.shard.cpu(), bucket.master) and not torch.equal(bucket.shard, before)
    assert bucket.gradients.sums is not None and bucket.gradients._mean is not None
    assert bucket.gradients._mean.untyped_storage().data_ptr() != bucket.gradients.sums.untyped_storage().data_ptr()


# --- what users do with parameters and states ------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [seldom(Precision()), MIXED], ids=["float32", "bf16"])
@in_turn([(None, "optimizer"), ("optimizer", "params"), ("params", "optimizer+params"), ("params", None)], 1, "runs")
def test_checkpoints_pass_between_runs_that_offload_and_others(
    world: Worlds, tmp_path: Path, runs: tuple[str | None, str | None], precision: Precision
) -> None:
    world(4).run(_checkpoints, tmp_path, *runs, precision)


def _checkpoints(folder: Path, before: str | None, after: str | None, precision: Precision) -> None:
    first = Run.of("paro-iig", SHAPE, precision=precision, offload=before)
    first.train(range(2))
    assert checkpoint.save(folder, 2, first.state()).ok
    second = Run.of("zero3", SHAPE, precision=precision, offload=after).spoil()
    loaded = checkpoint.load(folder, second.state())
    assert loaded is not None and loaded.step == 2
    assert differing(second.content(), first.content()) == []
    second.train(range(2, 3))
    third = Run.of("zero3", SHAPE, precision=precision, offload=before)
    assert checkpoint.load(folder, third.state()) is not None
    third.train(range(2, 3))
    assert differing(second.content(), third.content()) == []


@pytest.mark.parametrize("offload, form", [("optimizer", Form.MESSAGES), ("params", Form.COLLECTIVES)])
@in_turn(("zero3", "paro-iig", "ddp", "zero++"), 1)
@on_ranks(4)
def test_whole_parameters_may_be_read_and_written(label: str, offload: str, form: Form) -> None:
    contents = []
    for each in (None, offload):
        with in_form(form):
            run = Run.of(label, SHAPE, precision=MIXED, offload=each)
        run.train(range(1))
        with towpath.full_parameters(run.model), torch.no_grad():
            for p in list(run.model.parameters())[::2]:
                p.mul_(0.5)
        run.train(range(1, 2))
        contents.append(run.content())
    assert differing(*contents) == []


def test_an_overflow_that_one_rank_sees_is_skipped_by_all(world: Worlds) -> None:
    assert len(set(world(2).run(_overflow))) == 1


def _overflow() -> float:
    run = Run.of("zero3", Topology(1, 2), offload="optimizer")
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    entry = MODELS["gpt"]
    scaler.scale(entry.loss(run.model, *entry.micro_batch(dist.get_rank(), 0, 0, torch.float32))).backward()
    before = content(run.model)
    if dist.get_rank() == 1:
        held = [p for p in run.model.parameters() if p.grad is not None and p.grad.to_local().numel()]
        held[0].grad.to_local()[0] = float("inf")
    scaler.step(run.optimizer)
    scaler.update()
    assert differing(content(run.model), before) == []
    return scaler.get_scale()


# --- what is refused -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank() -> None:
    with pytest.raises(ConfigError, match=r"offload='parameters': expected 'optimizer', 'params', .*, or None"):
        Run.of("zero3", Topology(1, 2), offload="parameters")
    mine = "optimizer" if dist.get_rank() else None
    with pytest.raises(MismatchError, match="given different things"):
        Run.of("zero3", Topology(1, 2), offload=mine)
