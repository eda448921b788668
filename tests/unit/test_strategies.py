"""Strategies by name: what each is, what a wrong name or option is told, and that all survive TOML."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import towpath
from towpath.core.routes import Form
from towpath.core.schedule import schedule
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.units import units_from_numels
from towpath.errors import ConfigError

TOPOLOGY = towpath.Topology(3, 2)
NONE, NODE, ALL = towpath.Extent(1), towpath.Extent(2), towpath.Extent(2, 3)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("ddp", (NONE, NONE, NONE)),
        ("zero1", (NONE, NONE, ALL)),
        ("zero2", (NONE, ALL, ALL)),
        ("zero3", (ALL, ALL, ALL)),
        ("mics", (NODE, NODE, NODE)),
        ("hpz", (ALL, ALL, ALL, NODE)),
        ("paro-igg", (NODE, ALL, ALL)),
        ("paro-iig", (NODE, NODE, ALL)),
        ("paro-nig", (NONE, NODE, ALL)),
    ],
)
def test_a_preset_is_the_placement_of_the_design(name: str, placement: tuple[towpath.Extent, ...]) -> None:
    assert towpath.strategy(name, TOPOLOGY).placement == towpath.Placement(*placement)


def test_the_backward_copy_of_hpz_takes_any_legal_size() -> None:
    topology = towpath.Topology(4, 2)
    for group in (towpath.Extent(1), towpath.Extent(2), towpath.Extent(2, 2), topology.whole):
        for name in ("hpz", "zero++"):
            assert towpath.strategy(name, topology, group=group).placement.backward_params == group
    # Where the copy's group spans nodes, what the backward pass gathers crosses them, and is encoded.
    assert towpath.strategy("zero++", topology).backward_gather.encoding is None
    assert str(towpath.strategy("zero++", topology, group=towpath.Extent(2, 2)).backward_gather) == "ho-ring, int8:256"
    with pytest.raises(ConfigError, match="backward copy 2×3"):
        towpath.strategy("hpz", topology, group=towpath.Extent(2, 3))


def test_there_are_ten_paro_strategies_and_some_have_another_name() -> None:
    assert sum(name.startswith("paro-") for name in towpath.strategies()) == 10
    for paro, other in (("nnn", "ddp"), ("nng", "zero1"), ("ngg", "zero2"), ("ggg", "zero3"), ("iii", "mics")):
        assert towpath.strategy(f"paro-{paro}", TOPOLOGY).placement == towpath.strategy(other, TOPOLOGY).placement


@pytest.mark.parametrize("name", towpath.strategies())
@pytest.mark.parametrize("route", [None, "flat", "ring"])
def test_a_strategy_survives_toml(name: str, route: str | None) -> None:
    strategy = towpath.strategy(name, TOPOLOGY, route=route)
    assert Strategy.from_toml(strategy.to_toml()) == strategy


@given(name=st.text())
@example('a "name"')
@example("C:\\new\nline\x7f\x00 \u2028 🚣")
def test_whatever_its_name_a_strategy_survives_toml(name: str) -> None:
    strategy = replace(towpath.strategy("zero++", TOPOLOGY), name=name)
    assert Strategy.from_toml(strategy.to_toml()) == strategy


@pytest.mark.parametrize(
    "frozen", [None, "as-trained", towpath.Extent(1), towpath.Extent(2), towpath.Extent(2, 2)], ids=str
)
@pytest.mark.parametrize("codec", ["none", "int8", "int4:64", "int4:32+hadamard"])
def test_where_frozen_parameters_lie_survives_toml(frozen: towpath.Extent | str | None, codec: str) -> None:
    strategy = towpath.strategy("zero3", towpath.Topology(2, 2), frozen=frozen, frozen_codec=codec)
    assert Strategy.from_toml(strategy.to_toml()) == strategy
    assert ("frozen = " in strategy.to_toml()) == (frozen is not None)
    assert ("frozen_codec" in strategy.to_toml()) == (codec != "none")


def test_a_name_that_no_file_can_hold_is_refused() -> None:
    strategy = replace(towpath.strategy("zero3", TOPOLOGY), name="\ud800")
    with pytest.raises(ConfigError, match=r"the name '\\ud800' cannot be written"):
        strategy.to_toml()


def test_only_what_crosses_nodes_with_several_members_in_each_leaves_the_flat_route() -> None:
    def routes(name: str, **options: object) -> list[str]:
        made = towpath.strategy(name, TOPOLOGY, **options)
        return [made.transport(kind).route for kind in WITH_TRANSPORT]

    for plain in ("ddp", "zero1", "zero2", "zero3", "hpz", "mics", "paro-iig"):
        assert routes(plain) == ["flat"] * 5
    #                             gather  backward    reduce     sync    publish
    assert routes("paro-igg") == ["flat", "flat", "ho-ring", "flat", "flat"]
    assert routes("paro-nig") == ["flat", "flat", "flat", "flat", "ho-ring"]
    assert routes("paro-ggg") == ["ho-ring", "ho-ring", "ho-ring", "flat", "flat"]
    assert routes("mics", group=ALL) == ["ho-ring", "ho-ring", "ho-ring", "flat", "flat"]
    assert routes("paro-ggg", route="ring") == ["ring"] * 5


def test_over_nccl_few_nodes_take_columns_and_rows() -> None:
    plans = {}
    for nodes, options in ((2, {}), (2, {"route": "flat"}), (4, {}), (8, {})):
        for name in ("zero1", "zero2", "zero3", "hpz", "ddp"):
            made = towpath.strategy(name, towpath.Topology(nodes, 8), **options)
            assert towpath.Strategy.from_toml(made.to_toml()) == made
            plans[name, nodes, bool(options)] = schedule(made, units_from_numels([1 << 20]), 1, form=Form.COLLECTIVES)
    for (name, nodes, is_flat), sent in plans.items():
        crossing = [t.route for t in sent.transfers if t.kind in WITH_TRANSPORT and t.grid.nodes > 1]
        flat = is_flat or name == "ddp" or nodes > 5  # (p - R) / (p - 1) is 0.82 on five nodes of eight
        assert set(crossing) == {"flat" if flat else "hierarchical"}, (name, nodes)
    for name in ("zero1", "zero2", "zero3"):
        few, flat = (plans[name, 2, is_flat].cable_bytes(0) for is_flat in (False, True))
        assert few <= 0.57 * flat
    assert towpath.strategy("zero3", TOPOLOGY).gather == towpath.Transport("flat", nccl_route="hierarchical")
    encoded = towpath.strategy("qgz", TOPOLOGY, gradients_until=3).reduce
    assert encoded.in_form(Form.COLLECTIVES).route == "two-hop"
    assert encoded.at(3).in_form(Form.COLLECTIVES).route == "hierarchical"
    assert encoded.at(3).in_form(Form.MESSAGES).route == "flat"


def test_an_unknown_strategy_lists_the_known_ones_and_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"unknown strategy 'zero-3'; did you mean 'zero3'\? Known: ddp, hpz, "):
        towpath.strategy("zero-3", TOPOLOGY)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fsdp2", "zero3"),
        ("FULL_SHARD", "zero3"),
        ("SHARD_GRAD_OP", "zero2"),
        ("NO_SHARD", "ddp"),
        ("hsdp", "mics"),
        ("_HYBRID_SHARD_ZERO2", "paro-nii"),
    ],
)
def test_what_pytorch_calls_a_placement_leads_to_the_preset_of_it(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown strategy '{typed}'; did you mean '{meant}'\?"):
        towpath.strategy(typed, TOPOLOGY)


def test_without_a_topology_a_strategy_waits_for_one() -> None:
    options = {"gradients": "int4", "exact": True, "group": NODE}
    assert towpath.strategy("mics", **options).on(TOPOLOGY) == towpath.strategy("mics", TOPOLOGY, **options)
    mine = towpath.strategy(towpath.Placement(NONE, NODE, ALL), offload="params")
    assert mine.on(TOPOLOGY) == replace(towpath.strategy("paro-nig", TOPOLOGY, offload="params"), name="custom")
    on_two = towpath.schedule(towpath.strategy("zero3", exact=True), [64], topology=towpath.Topology(1, 2))
    assert on_two.strategy == towpath.strategy("zero3", towpath.Topology(1, 2), exact=True)
    with pytest.raises(ConfigError, match=r"custom' has no option group; it takes weights"):
        towpath.strategy(towpath.Placement(NONE, NODE, ALL), group=NODE)
    with pytest.raises(ConfigError, match=r"pass it to shard\(\) itself. Its options are those of towpath.Workload"):
        towpath.strategy("auto", exact=True)


def test_an_unknown_option_lists_those_of_the_strategy() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'mics' has no option size; it takes group, weights, gradients, .*, gradients_until, route",
    ):
        towpath.strategy("mics", TOPOLOGY, size=2)
    with pytest.raises(ConfigError, match=r"unknown route 'bus'; known are flat, ring"):
        towpath.strategy("mics", TOPOLOGY, route="bus")


def test_text_that_is_no_strategy_is_refused_with_what_is_wrong() -> None:
    good = towpath.strategy("zero3", TOPOLOGY).to_toml()
    with pytest.raises(ConfigError, match="unknown key colour"):
        Strategy.from_toml('colour = "blue"\n' + good)
    with pytest.raises(ConfigError, match="not a strategy"):
        Strategy.from_toml(good.replace("[placement]", "[placements]"))
    with pytest.raises(ConfigError, match="not a strategy"):
        Strategy.from_toml("nonsense")


def test_precision_takes_dtypes_or_their_names() -> None:
    import torch

    assert towpath.Precision(params=torch.bfloat16) == towpath.Precision(params="bfloat16")
    kept = {
        "float64": towpath.Precision(),  # in the model's own, which is no less than float32
        "float32": towpath.Precision("bfloat16", "bfloat16"),
        "bfloat16": towpath.Precision("bfloat16", accumulate="bfloat16"),
        "float16": towpath.Precision("float16", accumulate=None),
    }
    assert {p.dtypes("float64")[2] for p in kept.values()} == set(kept)
    assert towpath.Precision(accumulate="bfloat16").dtypes("float32")[2] == "float32"  # never narrower
    with pytest.raises(ConfigError, match=r"would lose what was sent\. Pass accumulate=float32"):
        towpath.Precision("bfloat16", "float32", "bfloat16")
    with pytest.raises(ConfigError, match=r"Precision\(params=torch.int8\): expected one of bfloat16"):
        towpath.Precision(params=torch.int8)


def test_a_world_of_one_needs_no_process_group() -> None:
    assert towpath.Topology.detect() == towpath.Topology(1, 1)
    with pytest.raises(ConfigError, match="expected 4 ranks in the process group, which has 1"):
        import torch

        towpath.shard(torch.nn.Linear(2, 2), "zero3", topology=towpath.Topology(2, 2))
