"""The schedule of a step: what moves, when, and how many bytes over which links."""

from math import prod

import pytest

import towpath
from towpath.core.presets import parse_strategy
from towpath.core.strategy import TransferKind
from towpath.errors import ConfigError

ELEMENTS = 3 * 2**20  # divisible by every cut used here: no padding
BYTES = 4 * ELEMENTS
MODEL = {"block": ELEMENTS}


def inter(name: str, topology: towpath.Topology, micro_steps: int, **options: object) -> float:
    """Bytes between nodes of one optimizer step, all ranks together, in units of the model's size."""
    schedule = towpath.schedule(towpath.strategy(name, topology, **options), MODEL, micro_steps)
    return sum(t.inter_bytes for t in schedule.transfers if t.kind is not TransferKind.UNUSED_PARAMS) / BYTES


@pytest.mark.parametrize("topology", [towpath.Topology(2, 2), towpath.Topology(4, 2), towpath.Topology(2, 4)], ids=str)
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_the_volumes_are_those_of_table_2_of_paro_as_corrected(topology: towpath.Topology, micro_steps: int) -> None:
    s, g, n = micro_steps, topology.nodes, topology.world
    assert inter("zero3", topology, s) == pytest.approx(3 * s * g * (n - 1) / n)
    assert inter("paro-iig", topology, s) == pytest.approx(2 * (g - 1))
    assert inter("mics", topology, s) == pytest.approx(2 * (g - 1))
    assert inter("paro-igg", topology, s) == pytest.approx(s * (g - 1) + (g - 1))
    assert inter("paro-nig", topology, s) == pytest.approx(2 * (g - 1))
    # Over flat routes a global reduction or gather crosses as a flat ring does.
    assert inter("paro-igg", topology, s, route="flat") == pytest.approx(s * g * (n - 1) / n + (g - 1))
    assert inter("paro-nig", topology, s, route="flat") == pytest.approx((g - 1) + g * (n - 1) / n)
    assert inter("hpz", topology, s) == pytest.approx(2 * s * g * (n - 1) / n)


def test_ddp_and_zero1_communicate_at_the_boundary_only() -> None:
    topology = towpath.Topology(2, 2)
    for name in ("ddp", "zero1", "paro-nni"):
        assert inter(name, topology, 1) == inter(name, topology, 7)


@pytest.mark.parametrize("name", towpath.strategies())
@pytest.mark.parametrize("topology", [towpath.Topology(2, 3), towpath.Topology(3, 1), towpath.Topology(1, 4)], ids=str)
def test_every_node_sends_alike_and_the_links_add_up(name: str, topology: towpath.Topology) -> None:
    schedule = towpath.schedule(towpath.strategy(name, topology), MODEL, 2)
    cables = [schedule.cable_bytes(node) for node in range(topology.nodes)]
    assert max(cables) - min(cables) <= len(schedule.transfers)  # roundings
    assert sum(cables) == pytest.approx(schedule.inter_bytes, abs=len(schedule.transfers))
    if topology.nodes == 1:
        assert schedule.inter_bytes == 0


def test_mics_in_a_group_that_spans_nodes_gathers_in_the_group_and_syncs_between_groups() -> None:
    topology = towpath.Topology(4, 2)
    schedule = towpath.schedule(towpath.strategy("mics", topology, group=towpath.Extent(2, 2)), MODEL, 1)
    members = {t.kind: t.move.members for t in schedule.transfers}
    assert members[TransferKind.GATHER] == members[TransferKind.REDUCE] == 4
    assert members[TransferKind.GRAD_SYNC] == 2


def test_the_root_unit_is_not_gathered_again_for_its_backward_pass() -> None:
    strategy = towpath.strategy("zero3", towpath.Topology(2, 2))
    schedule = towpath.schedule(strategy, {"": 1000, "a": 1000, "b": 1000}, 1)
    gathered = [t.unit for t in schedule.transfers if t.kind is TransferKind.BACKWARD_GATHER]
    assert gathered == ["b", "a"]
    assert [t.unit for t in schedule.transfers if t.kind is TransferKind.REDUCE] == ["b", "a", ""]


def test_mixed_precision_travels_in_its_own_dtypes() -> None:
    strategy = towpath.strategy("zero3", towpath.Topology(2, 2))
    schedule = towpath.schedule(strategy, MODEL, 1, towpath.Precision("bfloat16", "float32"))
    dtypes = {t.kind: t.dtype for t in schedule.transfers}
    assert dtypes[TransferKind.GATHER] == dtypes[TransferKind.BACKWARD_GATHER] == "bfloat16"
    assert dtypes[TransferKind.REDUCE] == "float32"


@pytest.mark.parametrize("name", towpath.strategies())
def test_memory_is_that_of_the_formula(name: str) -> None:
    """c/s_p + a/s_g + master 4/s_os (none in pure fp32), hpZ c/R, and `.grad` unless a view of G; a: of the sum.

    Where P and OS have the same extent, and the weights are sharded, the master is all that is kept of them.
    """
    topology = towpath.Topology(2, 3)
    strategy = towpath.strategy(name, topology)
    p, g, o = (e.size for e in (strategy.placement.params, strategy.placement.grads, strategy.placement.optimizer))
    copy = strategy.placement.backward_params
    for precision, c, a, master, grad in (
        (towpath.Precision(), 4, 4, 0, 0),
        (towpath.Precision("bfloat16", "float32"), 2, 4, 4, 0),
        (towpath.Precision("bfloat16"), 2, 4, 4, 0),  # it travels in bf16, and is summed in fp32
        (towpath.Precision("bfloat16", accumulate=None), 2, 2, 4, 4),
        (towpath.Precision("float16", "float16", "float64"), 2, 8, 4, 4),
    ):
        got = towpath.schedule(strategy, MODEL, 1, precision).memory_bytes()
        expected = {
            "params": 0 if master and p == o > 1 else c * ELEMENTS / p,
            "grads": a * ELEMENTS / g,
            "master": master * ELEMENTS / o,
            "grad": grad * ELEMENTS / o,
            "backward_params": c * ELEMENTS / copy.size if copy else 0,
            "feedback": 0,
        }
        assert got == pytest.approx(expected)


@pytest.mark.parametrize("name", towpath.strategies())
def test_how_a_sum_is_kept_changes_nothing_of_what_travels(name: str) -> None:
    """At the boundary it is rounded to what travels, in a wire buffer; a codec takes it as it is."""
    strategy = towpath.strategy(name, towpath.Topology(2, 3))
    narrow, wide = (
        towpath.schedule(strategy, MODEL, 2, towpath.Precision("bfloat16", "bfloat16", a)) for a in (None, "float32")
    )
    assert [(t.kind, t.elements, t.inter_bytes, t.intra_bytes) for t in narrow.transfers] == [
        (t.kind, t.elements, t.inter_bytes, t.intra_bytes) for t in wide.transfers
    ]
    before, now = narrow.buffer_bytes(), wide.buffer_bytes()
    rounded = now.pop("wire") - before.pop("wire")
    assert before == now
    shards = [2 * bucket.numel // bucket.grads.count for plan in wide.plans for bucket in plan.buckets]
    assert 0 <= rounded <= max(shards) + 128, "more than one sum in two bytes an element"


@pytest.mark.parametrize("name", ["zero3", "ddp", "mics", "paro-igg"])
@pytest.mark.parametrize("world", [(1, 1), (2, 2), (2, 3), (16, 8)], ids=str)
def test_an_fp16_sum_is_divided_in_two_parts_and_all_others_once(name: str, world: tuple[int, int]) -> None:
    topology = towpath.Topology(*world)
    name = name if topology.nodes > 1 else name.split()[0]
    for dtype in ("float16", "bfloat16", "float32"):
        precision = towpath.Precision(dtype, dtype)
        made = towpath.schedule(parse_strategy(name, topology), [1 << 20], 1, precision)
        bucket = made.plans[0].buckets[0]
        parts = [bucket.divisors(kind, topology.world) for kind in (TransferKind.REDUCE, TransferKind.GRAD_SYNC)]
        assert prod(before * after for before, after in parts) == pytest.approx(topology.world)
        if dtype != "float16":
            assert parts == [(1, 1), (1, topology.world)]
        else:  # about the root of the terms at each end; √2 more where that is no power of two
            assert all(max(before, after) <= (2 * before * after) ** 0.5 for before, after in parts)


def test_a_schedule_is_for_a_whole_number_of_micro_steps() -> None:
    strategy = towpath.strategy("zero3", towpath.Topology(2, 2))
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="whole number"):
            towpath.schedule(strategy, MODEL, wrong)  # type: ignore[arg-type]


def test_a_preset_s_name_is_a_strategy_on_the_topology_that_is_passed() -> None:
    four = towpath.Topology(2, 2)
    made = towpath.strategy("zero3", four)
    assert str(towpath.schedule("zero3", MODEL, topology=four)) == str(towpath.schedule(made, MODEL))
    with pytest.raises(ConfigError, match=r"was made for 2 × 2 .*, but topology=4 × 2 was"):
        towpath.schedule(made, MODEL, topology=towpath.Topology(4, 2))
    with pytest.raises(ConfigError, match=r"expected a preset.s name, or a Strategy as .* makes it; got 3"):
        towpath.schedule(3, MODEL)  # pyright: ignore[reportArgumentType]
