"""What offload= means to the schedule, the step machine, the simulator and the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import towpath
from tests.ranks.strategies import seldom
from towpath.collectives.collective import WireBuffers, Workspace
from towpath.core import unit_plan
from towpath.core.routes import Form
from towpath.core.schedule import schedule
from towpath.core.step import StepMachine
from towpath.core.step_state import Submit
from towpath.core.strategy import Offload, TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.engine.parameters.gradients import copy_to_device
from towpath.errors import ConfigError
from towpath.plan.catalog import describe_model, load_cluster
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver

SHAPE = towpath.Topology(2, 2)
MIXED = towpath.Precision("bfloat16", "float32")
NUMEL = 1 << 16
CPU = torch.device("cpu")


@pytest.mark.parametrize("label", ["zero3", "paro-iig", "ddp"])
def test_the_schedule_tells_device_and_host_apart(label: str) -> None:
    plain, offloaded = (
        towpath.schedule(towpath.strategy(label, SHAPE, offload=offload), [NUMEL], 2, MIXED)
        for offload in (None, "optimizer")
    )
    mine = NUMEL // (1 if label == "ddp" else 4)
    assert offloaded.host_memory_bytes() == {"master": 4 * mine, "grad": 4 * mine}
    assert offloaded.host_copy_bytes() == {TransferKind.GRAD_SYNC: 4 * mine, TransferKind.PARAM_SYNC: 4 * mine}
    # Weights stay on the device, in bf16. Where the master has the same extent, it has no P shard beside it otherwise.
    weights = 2 * {"zero3": mine, "paro-iig": NUMEL // 2, "ddp": NUMEL}[label]
    assert plain.memory_bytes()["params"] == (0 if label == "zero3" else weights)
    assert offloaded.memory_bytes() == plain.memory_bytes() | {"master": 0, "params": weights}
    assert plain.host_memory_bytes() == plain.host_copy_bytes() == {}
    assert (offloaded.inter_bytes, offloaded.intra_bytes) == (plain.inter_bytes, plain.intra_bytes)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("label", ["zero3", "paro-igg", "hpz", "zero1"])
def test_the_schedule_counts_the_copies_of_params(label: str, form: Form) -> None:
    block = UnitSpec("block", (BucketSpec((NUMEL,)),))
    units = [UnitSpec("", (BucketSpec((NUMEL,)), BucketSpec((NUMEL,), trainable=False)), root=True), block]
    for exact in (False, True):
        plain, offloaded = (
            schedule(towpath.strategy(label, SHAPE, offload=offload, exact=exact), tuple(units), 3, MIXED, form=form)
            for offload in (None, "params")
        )
        ways = {"zero3": 4, "paro-igg": 2, "hpz": 4, "zero1": 1}[label]
        params = 2 * 2 * NUMEL // ways  # bfloat16, of both units
        assert offloaded.host_memory_bytes() == {"params": params} and offloaded.memory_bytes()["params"] == 0
        assert offloaded.memory_bytes()["frozen"] == plain.memory_bytes()["frozen"] > 0
        assert offloaded.transfers == plain.transfers
        # The root is unsharded from the forward to the backward pass. The block has a copy of its own with hpZ.
        gathers = {TransferKind.GATHER: 3 * params, TransferKind.BACKWARD_GATHER: 3 * params // 2 * (label != "hpz")}
        synced = params
        if exact and label in ("paro-igg", "zero1"):  # the old values, and those of the own slice to encode it
            synced += params + (2 * params * ways // 4 if form is Form.COLLECTIVES else 0)
        expected = {kind: copied for kind, copied in gathers.items() if copied} | {TransferKind.PARAM_SYNC: synced}
        assert offloaded.host_copy_bytes() == expected
        assert plain.host_copy_bytes() == {}


def test_what_the_device_casts_is_staged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_plan, "STAGED_ELEMENTS", 100)
    made = towpath.strategy("ddp", SHAPE, offload="optimizer")
    for own, staged in (("float32", 100), ("bfloat16", 0)):
        plan = plan_unit(made, UnitSpec("", (BucketSpec((250,), own),)), MIXED)
        [bucket] = plan.buckets
        assert bucket.staged == staged
        assert plan.wire_needs(TransferKind.PARAM_SYNC).get(own, 0) == staged
        buffers = WireBuffers(CPU)
        buffers.reserve(plan.wire_needs(TransferKind.PARAM_SYNC))
        before = buffers.made
        master, target = torch.randn(bucket.numel).to(getattr(torch, own)), torch.empty(bucket.numel).bfloat16()
        copy_to_device(master, target, bucket, Workspace(buffers))
        assert torch.equal(target, master.bfloat16()) and buffers.made == before


def test_parameters_are_synced_when_their_unit_is_gathered() -> None:
    """Not all of them before the first unit computes."""
    for label in ("zero3", "paro-iig", "ddp"):
        for offload, at_once in (("optimizer", 2), (None, 4)):
            made = towpath.strategy(label, SHAPE, offload=offload)
            units = [UnitSpec(name, (BucketSpec((NUMEL,)),), root=not name) for name in ("", "a", "b", "c")]
            machine = StepMachine([plan_unit(made, unit, MIXED) for unit in units])
            if label == "zero3" and offload is None:  # its gathers cast the master
                machine.written(0)
                assert not machine.param_sync()
                continue
            for step in range(3):
                synced: list[list[int]] = []
                for index in range(4):
                    actions = machine.forward_begins(index, comes_back=False)
                    kinds = [(a.task.kind, a.task.unit) for a in actions if isinstance(a, Submit)]
                    synced.append([unit for kind, unit in kinds if kind is TransferKind.PARAM_SYNC])
                    for unit in synced[-1]:  # before its gather
                        gather = TransferKind.GATHER, unit
                        assert gather not in kinds or kinds.index((TransferKind.PARAM_SYNC, unit)) < kinds.index(gather)
                for index in reversed(range(4)):
                    machine.forward_ends(index, graph_follows=False)
                if step:
                    # A unit and the one that follows it.
                    assert synced == ([[0, 1], [2], [3], []] if at_once == 2 else [[0, 1, 2, 3], [], [], []])
                for index in range(4):
                    machine.written(index)
            assert machine.param_sync() and not machine.param_sync()  # all that is left


def _solver(offload: Offload | None, memory: int = 80 << 30) -> Solver:
    return Solver(
        describe_model("llama-7b", 2048), load_cluster("ethernet-25g", 4), Request(64, memory, offload=offload)
    )


def test_the_planner_prices_memory_and_the_copies() -> None:
    batching = Batching(1, 1, True)
    plain, offloaded = (
        _solver(offload).predict(towpath.strategy("zero3", towpath.Topology(4, 4), offload=offload), batching)
        for offload in (None, "optimizer")
    )
    moved = ("master", "grad", "optimizer")
    assert all(offloaded.memory[part] == 0 for part in moved)
    assert sum(offloaded.host_memory[part] for part in ("master", "optimizer")) == sum(plain.memory[p] for p in moved)
    staged = offloaded.memory["wire"] - plain.memory["wire"]
    assert 0 < staged <= 4 * unit_plan.STAGED_ELEMENTS
    # Without the optimizer on the host, gathers cast the master, and no shards in bf16 are kept.
    saved = sum(plain.memory[part] for part in moved) - staged - offloaded.memory["params"]
    assert plain.peak_bytes - offloaded.peak_bytes == saved and plain.memory["params"] == 0
    assert offloaded.host_copy_bytes > 0 == plain.host_copy_bytes
    assert offloaded.inter_bytes == plain.inter_bytes and offloaded.seconds > plain.seconds
    assert offloaded.in_flight[TransferKind.GRAD_SYNC] > plain.in_flight.get(TransferKind.GRAD_SYNC, 0.0)


def test_the_planner_prices_copies_of_params() -> None:
    batching = Batching(1, 2, True)
    zero3, plain, offloaded = (
        _solver(offload).predict(towpath.strategy(label, towpath.Topology(4, 4), offload=offload), batching)
        for label, offload in (("zero3", None), ("paro-igg", None), ("paro-igg", "params"))
    )
    assert offloaded.memory["params"] == zero3.memory["params"] == 0 < plain.memory["params"]
    assert offloaded.host_memory == {"params": plain.memory["params"]}
    assert offloaded.peak_bytes < plain.peak_bytes
    assert offloaded.inter_bytes == plain.inter_bytes < zero3.inter_bytes
    # Each micro-step gathers nearly all of it twice, and the parameter sync copies it back.
    params = plain.memory["params"]
    assert 4.8 * params < offloaded.host_copy_bytes <= 5 * params
    for seconds in ("in_flight", "exposed"):
        with_copies, without = (getattr(p, seconds)[TransferKind.GATHER] for p in (offloaded, plain))
        assert with_copies > without, seconds


@pytest.mark.parametrize("offload", [seldom("optimizer"), seldom("params"), "optimizer+params"])
def test_what_does_not_fit_otherwise_fits(offload: Offload) -> None:
    """Where all that the planner may choose offloads, and its bounds know of it."""
    solver = _solver(offload)
    candidates = [c for c in solver.candidates if c.batching == Batching(1, 4, True)]
    assert candidates
    for candidate in candidates[:20]:
        made = solver.candidates.strategy(candidate)
        assert made.offload == offload
        priced = solver.predict(made, candidate.batching)
        assert solver.peak_bytes(candidate) == priced.peak_bytes
        assert solver.bound(candidate)[0] <= priced.seconds * (1 + 1e-9)
        # Without a master of its own, offloading parameters that are sharded widely saves little.
        saves = offload != "params" or made.placement.params.size < made.placement.optimizer.size
        assert not saves or solver.peak_bytes(candidate) < _solver(None).peak_bytes(candidate)


def test_a_cluster_without_its_host_is_refused() -> None:
    cluster = load_cluster("ethernet-25g", 4)
    unknown = replace(cluster, hardware=replace(cluster.hardware, host_memory=None))
    solver = Solver(describe_model("llama-7b", 2048), unknown, Request(64, 80 << 30, offload="optimizer"))
    with pytest.raises(ConfigError, match=r"says nothing of the host's memory. Describe it under \[host\]"):
        solver.predict(solver.candidates.strategy(next(iter(solver.candidates))), Batching(1, 4, True))
