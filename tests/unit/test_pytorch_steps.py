"""Predicted steps of FSDP2, HSDP and DDP, as they are and with `towpath.wires`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.profiles import made_profile
from tests.unit.test_sim import DEPTH, UNITS, hardware
from towpath.core.formats import Precision
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.core.unit_plan import plan_unit
from towpath.plan.bandwidth import Event, Timeline
from towpath.plan.catalog import describe_model, load_cluster
from towpath.plan.hardware import Hardware
from towpath.plan.pytorch import WRAPPERS, Wrapper, predict_wrappers
from towpath.plan.replay import ComputeSeconds, Replay, SimulatedStage
from towpath.plan.request import Batching, Request
from towpath.plan.solver import Solver
from towpath.topology.cluster import Topology

SQUARE = Topology(2, 2)
BY_NAME = {each.name: each for each in WRAPPERS}
REDUCTIONS = (TransferKind.REDUCE, TransferKind.GRAD_SYNC)
GATHERS = (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)


def replayed(wrapper: Wrapper, on: Hardware, micro_steps: int = 1) -> Timeline:
    made = wrapper.strategy(on.topology)
    plans = [plan_unit(made, unit, Precision(), on.form) for unit in UNITS]
    seconds = ComputeSeconds([0.0] + [1e-3] * DEPTH, [0.0] + [2e-3] * DEPTH, 0.0, 0.0)
    steps = partial(wrapper.steps, on_cpus=on.cores is not None)
    return Replay([SimulatedStage(made, plans, seconds)], on, micro_steps=micro_steps, steps=steps).run().ranks[0]


def overlapping(found: Timeline, *kinds: TransferKind) -> list[Event]:
    """Return transfers of these kinds that run while something computes."""
    computing = [event for event in found.events if event.track == "compute"]
    moving = [event for event in found.events if event.kind in kinds]
    assert moving
    return [m for m in moving if any(m.start < c.end - 1e-12 and c.start < m.end - 1e-12 for c in computing)]


ON_CPUS = replace(hardware(SQUARE, cable=1e8), cores=4.0, ranks_sharing=2)
ON_GPUS = hardware(SQUARE, cable=1e8)


def test_on_cpus_fsdp2_overlaps_nothing_and_the_wires_only_syncs() -> None:
    for name in ("FSDP2", "HSDP", "FSDP2 with wires"):
        assert not overlapping(replayed(BY_NAME[name], ON_CPUS), *GATHERS, *REDUCTIONS), name
    # The first forward pass computes while the shards of later units still cross.
    assert overlapping(replayed(BY_NAME["FSDP2 with wires"], ON_CPUS), TransferKind.PARAM_SYNC)
    assert overlapping(replayed(BY_NAME["DDP"], ON_CPUS), TransferKind.GRAD_SYNC)


@pytest.mark.parametrize("name", ["FSDP2", "FSDP2 with wires"])
def test_on_gpus_one_reduction_overlaps_with_one_backward_pass(name: str) -> None:
    """A unit's gradients are reduced once those of the unit before have been, and nothing computes further ahead."""
    found = replayed(BY_NAME[name], hardware(SQUARE, cable=1e6))
    kind = TransferKind.REDUCE if name == "FSDP2" else TransferKind.GRAD_SYNC
    ended = {event.unit: event.end for event in found.events if event.kind is kind}
    began = {event.name: event.start for event in found.events if event.name.startswith("backward of")}
    for index in range(DEPTH - 2):
        assert began[f"backward of blocks.{index}"] >= ended[f"blocks.{index + 2}"] - 1e-12
    assert overlapping(replayed(BY_NAME[name], ON_GPUS), kind)
    assert overlapping(replayed(BY_NAME[name], ON_GPUS), TransferKind.GATHER)


def test_each_micro_step_reduces_under_fsdp2_and_weights_cross_once_with_wires() -> None:
    """HSDP and DDP sum over nodes once."""
    crossing = {
        name: [
            {
                kind: sum(event.crosses for event in found.events if event.kind is kind)
                for kind in (*GATHERS, *REDUCTIONS, TransferKind.PARAM_SYNC)
            }
            for found in (replayed(each, ON_GPUS, micro_steps) for micro_steps in (1, 3))
        ]
        for name, each in BY_NAME.items()
    }
    units = len(UNITS)
    one, three = crossing["FSDP2"]
    assert one[TransferKind.REDUCE] == units and three[TransferKind.REDUCE] == 3 * units
    assert three[TransferKind.GATHER] >= 3 * DEPTH and three[TransferKind.PARAM_SYNC] == 0
    one, three = crossing["FSDP2 with wires"]
    assert one[TransferKind.GRAD_SYNC] == units and three[TransferKind.GRAD_SYNC] == 3 * units
    assert one[TransferKind.PARAM_SYNC] == three[TransferKind.PARAM_SYNC] == units
    assert not any(three[kind] for kind in (*GATHERS, TransferKind.REDUCE))
    for name in ("HSDP", "DDP", "DDP with wires"):
        assert [each[TransferKind.GRAD_SYNC] for each in crossing[name]] == [units, units], name


def test_bytes_of_one_micro_step_are_those_of_the_schedule() -> None:
    """All but the comparison of ranks, which FSDP2 and DDP do not make."""
    for each in WRAPPERS:
        found, made = replayed(each, ON_CPUS), schedule(each.strategy(SQUARE), UNITS, 1, form=ON_CPUS.form)
        compared = (
            0 if each.wired else sum(t.inter_bytes for t in made.transfers if t.kind is TransferKind.UNUSED_PARAMS)
        )
        assert found.inter_bytes == made.inter_bytes - compared, each.name


def predicted(nodes: int, **options: object) -> tuple[Solver, dict[str, tuple[float, int, int]]]:
    cluster = load_cluster("ethernet-10g", nodes)
    solver = Solver(describe_model("gpt-2.5b"), cluster, Request(32, cluster.memory, **options))  # type: ignore
    steps = predict_wrappers(solver)
    return solver, {step.strategy.name: (step.seconds, step.expected_inter_bytes, step.peak_bytes) for step in steps}


def test_wires_win_on_slow_cables_and_hold_the_weights_of_a_column() -> None:
    solver, found = predicted(2, micro_batches=(4,), checkpointing=True)
    assert [*found] == [each.name for each in WRAPPERS]
    stock, wired = found["FSDP2"], found["FSDP2 with wires"]
    assert wired[0] < stock[0] and wired[1] < 0.5 * stock[1]
    batching = Batching(4, 1, True)
    memory = [BY_NAME[name].memory(solver, batching) for name in ("FSDP2", "FSDP2 with wires")]
    held = 2 * solver.model.parameters / solver.cluster.topology.ranks_per_node
    assert memory[1]["weights of the column"] == pytest.approx(held, rel=0.01)
    assert [sum(parts.values()) for parts in memory] == [stock[2], wired[2]]
    # FSDP2 holds the states and gradients in fp32, and no second copy in bf16.
    states = sum(memory[0][part] for part in ("params", "master", "grads", "grad", "optimizer"))
    assert states == pytest.approx(16 * solver.model.parameters / solver.cluster.topology.world, rel=0.01)


def test_a_probed_cluster_has_wires_and_their_gain_depends_on_its_links(tmp_path: Path) -> None:
    gains: list[float] = []
    for cable in (2e7, 2e8):
        profile = tmp_path / "profile.json"
        profile.write_text(made_profile(cable=cable).to_json())
        request = Request(8, 80 << 30, Precision(), micro_batches=(2,), checkpointing=False)
        solver = Solver(describe_model("gpt-2.5b", length=128), load_cluster(profile), request)
        steps = {step.strategy.name: step.seconds for step in predict_wrappers(solver)}
        assert [*steps] == [each.name for each in WRAPPERS]
        gains.append(steps["FSDP2"] / steps["FSDP2 with wires"])
    assert gains[0] > 1.5 * gains[1] > 1.5


def test_the_largest_micro_batch_that_fits_is_taken() -> None:
    solver, found = predicted(2)
    for name, each in BY_NAME.items():
        sizes = {b: sum(each.memory(solver, b).values()) for b in solver.request.batchings(8)}
        fits = [size for size in sizes.values() if size <= solver.request.memory]
        assert (found[name][2] <= solver.request.memory) == bool(fits), name
        if not fits:
            assert found[name][2] == min(sizes.values())


def test_one_node_has_no_wires_and_no_hsdp() -> None:
    assert [*predicted(1)[1]] == ["FSDP2", "DDP"]
    assert predicted(2, offload="optimizer")[1] == {}
