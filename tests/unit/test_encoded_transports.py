"""Codecs in a strategy: where they go, what they are refused on, and how many bytes they leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import towpath
from towpath.core.presets import parse_strategy
from towpath.core.routes import Op
from towpath.core.strategy import WITH_TRANSPORT, Strategy, TransferKind
from towpath.errors import ConfigError
from towpath.topology.cluster import Extent, Topology

TWO = Topology(2, 2)
BF16 = towpath.Precision("bfloat16", "bfloat16")
MODEL = [1 << 16, 1 << 18, 1 << 18]
ELEMENTS = sum(MODEL)


def inter_bytes(strategy: Strategy, micro_steps: int = 1) -> int:
    return towpath.schedule(strategy, MODEL, micro_steps, BF16).inter_bytes


def transports(strategy: Strategy) -> dict[str, str]:
    return {kind.value: str(strategy.transport(kind)) for kind in WITH_TRANSPORT if strategy.transport(kind).encoding}


def test_the_presets_are_those_of_the_paper() -> None:
    assert transports(towpath.strategy("qwz", TWO)) == {
        "gather": "ho-ring, int8:256",
        "backward_gather": "ho-ring, int8:256",
    }
    assert transports(towpath.strategy("qgz", TWO)) == {"reduce": "two-hop, int4:256"}
    # The backward pass gathers inside the node, from its copy.
    assert transports(towpath.strategy("zero++", TWO)) == {"gather": "ho-ring, int8:256", "reduce": "two-hop, int4:256"}


def test_codecs_go_where_cables_are_and_nowhere_else() -> None:
    quantized = {"weights": "int8", "gradients": "int4:64"}
    assert transports(towpath.strategy("mics", TWO, **quantized)) == {"grad_sync": "two-hop, int4:64"}
    assert set(transports(towpath.strategy("paro-iig", TWO, **quantized))) == {"grad_sync", "param_sync"}
    assert set(transports(towpath.strategy("mics", TWO, group=Extent(2, 2), **quantized))) == {
        "gather",
        "backward_gather",
        "reduce",
    }
    assert transports(towpath.strategy("zero++", Topology(1, 4))) == {}
    assert transports(towpath.strategy("zero++", TWO, weights="none", gradients="e4m3")) == {
        "reduce": "two-hop, e4m3:256"
    }
    assert transports(towpath.strategy("qwz", TWO, route="flat"))["gather"] == "flat, int8:256"


def test_zero_plus_plus_leaves_little_of_what_zero3_sends() -> None:
    """Each technique alone at most what table 1 of ZeRO++ says, and its scales. tests/lab/test_bytes.py counts them."""
    for topology in (TWO, Topology(4, 2)):
        whole = inter_bytes(towpath.strategy("zero3", topology))
        for name, most in (("zero++", 0.27), ("qwz", 2 / 3 * (1 + 4 / 256)), ("hpz", 2 / 3), ("qgz", 3 / 4)):
            assert inter_bytes(towpath.strategy(name, topology)) <= 1.001 * most * whole, name
        # ZeRO++, table 1, of the 3 M that zero3 sends: qwZ 2 M of them halved, hpZ one less, qgZ a quarter of one.
        scales = 1 + 4 / 256 + 1e-3
        flat = {"route": "flat"}
        assert inter_bytes(towpath.strategy("qwz", topology, **flat)) <= whole * scales * (0.5 + 0.5 + 1) / 3
        usage = 1 + 1e-4  # which parameters were used, and what ranks compare
        assert inter_bytes(towpath.strategy("hpz", topology)) <= whole * 2 / 3 * usage
        assert inter_bytes(towpath.strategy("qgz", topology)) <= whole * (1 + 1 + 0.25 * (1 + 8 / 256)) / 3


def test_a_reduction_in_two_hops_puts_each_gradient_on_the_cable_once() -> None:
    """(N − 1)/N · Ψ/Z a node, and the scales."""
    for nodes in (2, 4):
        strategy = towpath.strategy("qgz", Topology(nodes, 2))
        reduced = [t for t in towpath.schedule(strategy, MODEL, 1).transfers if t.kind is TransferKind.REDUCE]
        expected = (nodes - 1) / nodes * ELEMENTS * (0.5 + 4 / 256)
        assert {sum(t.cable_bytes(node) for t in reduced) for node in range(nodes)} == {expected}


def test_an_all_reduce_gathers_in_the_codec_what_it_has_reduced_in_it() -> None:
    made = towpath.strategy("mics", TWO, gradients="int8")
    (grad_sync,) = {
        t.move.op for t in towpath.schedule(made, [1 << 18], 1).transfers if t.kind is TransferKind.GRAD_SYNC
    }
    assert grad_sync is Op.ALL_REDUCE
    plain = towpath.schedule(towpath.strategy("mics", TWO), [1 << 18], 1)
    encoded = towpath.schedule(made, [1 << 18], 1)
    usage = sum(t.inter_bytes for t in plain.transfers if t.kind is TransferKind.UNUSED_PARAMS)
    assert (encoded.inter_bytes - usage) / (plain.inter_bytes - usage) == pytest.approx((1 + 4 / 256) / 4)


def test_what_cannot_be_is_refused() -> None:
    def refused(match: str, **options: object) -> None:
        with pytest.raises(ConfigError, match=match):
            towpath.strategy("zero3", TWO, **options)

    refused("unknown codec 'int3'", weights="int3")
    refused("not a codec: 'int8:sixty'", weights="int8:sixty")
    refused("a block has 32 to 4096 elements", gradients="int8:48")
    refused("stochastic rounding is for int8 and int4", gradients="e4m3+stochastic")
    refused("need gradients= to name a codec", feedback="first")
    refused("backward pass compute with other weights", weights="int8+stochastic")
    refused("route='ring' would round gradients in int4 at every member", route="ring", gradients="int4")
    refused("need gradients= to name a codec", gradients_until=5)

    def refused_alone(match: str, **transport: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            replace(towpath.strategy("zero3", TWO), **transport)

    refused_alone(
        "int8:256 on a reduce-scatter by flat would round at every member", reduce=towpath.Transport("flat", "int8")
    )
    refused_alone("feedback belongs to reductions", gather=towpath.Transport("flat", "int8", "first"))
    refused_alone("reduce is a Transport, such as .*; got 'int8'", reduce="int8")
    refused("until is a number of optimizer steps", gradients="int4", gradients_until=-1)
    with pytest.raises(ConfigError, match="feedback='first' without a codec"):
        towpath.Transport("two-hop", feedback="first")
    with pytest.raises(ConfigError, match=r"plain_route='ring' is for steps without the codec.*pass until="):
        towpath.Transport("two-hop", "int8", plain_route="ring")
    with pytest.raises(ConfigError, match="served is for a codec that is not in use"):
        towpath.Transport("two-hop", served=True)
    with pytest.raises(ConfigError, match="codec is a Codec, its text, or 'none'; got 8"):
        towpath.Transport("two-hop", 8)


def test_elements_that_codecs_do_not_take_are_refused_with_what_to_do() -> None:
    precision = towpath.Precision("float64", "float64")
    with pytest.raises(ConfigError, match=r"gather in int8:256 of .*: its elements are float64.*Pass precision="):
        towpath.schedule(towpath.strategy("zero++", TWO), [64], 1, precision)


def test_published_weights_in_a_codec_leave_the_optimizer_its_own() -> None:
    """Else each step would round the masters themselves."""
    for weights, master in (("none", 0), ("int8", 4)):
        strategy = towpath.strategy("paro-iig", TWO, weights=weights)
        assert towpath.schedule(strategy, [1 << 16], 1).memory_bytes()["master"] == master * (1 << 16) / 4


def test_gradients_may_be_encoded_for_the_first_steps_only() -> None:
    strategy = towpath.strategy("zero++", TWO, gradients_until=100)
    assert parse_strategy("zero++ gradients_until=100", TWO) == strategy
    assert str(strategy.reduce) == "two-hop, int4:256, until step 100, otherwise ho-ring"
    assert Strategy.from_toml(strategy.to_toml()) == strategy
    assert strategy.at(99) == strategy
    assert transports(strategy.at(100)) == {"gather": "ho-ring, int8:256"}
    after = strategy.at(100)
    assert after.reduce.route == towpath.strategy("zero++", TWO, gradients="none").reduce.route == "ho-ring"
    assert str(after.reduce) == "ho-ring" and after.reduce.encoding is None
    assert towpath.strategy("zero++", TWO, gradients_until=9, route="one-hop").reduce.plain_route is None
    assert Strategy.from_toml(after.to_toml()) == after
    # Nothing moves to another place in the middle of a run: 1,000 elements are four blocks of 256, or 63 times 16.
    lengths = [towpath.schedule(s, [1000], 1).plans[0].buckets[0].numel for s in (strategy, after)]
    assert lengths == [1024, 1024]


def test_feedback_is_counted_as_memory() -> None:
    def kept(feedback: str) -> float:
        strategy = towpath.strategy("qgz", TWO, feedback=feedback)
        return towpath.schedule(strategy, [1 << 16], 1).memory_bytes()["feedback"] / (4 << 16)

    assert [kept(f) for f in ("none", "first", "second", "both")] == [0, 1, 0.5, 1.5]


def test_the_only_hop_is_first_and_second() -> None:
    for feedback in ("first", "second", "both"):
        strategy = towpath.strategy("mics", TWO, gradients="int4", feedback=feedback)
        memory = towpath.schedule(strategy, [1 << 16], 1).memory_bytes()
        assert memory["feedback"] == memory["grads"]


def test_weights_without_a_copy_are_gathered_for_backward_as_they_were_for_forward() -> None:
    units = {"": 1 << 16, "blocks.0": 1 << 16}
    root, block = towpath.schedule(towpath.strategy("zero++", TWO), units, 1).plans
    assert {t.transport for t in root.transfers(TransferKind.BACKWARD_GATHER)} == {
        t.transport for t in root.transfers(TransferKind.GATHER)
    }
    assert {t.transport.encoding for t in block.transfers(TransferKind.BACKWARD_GATHER)} == {None}
