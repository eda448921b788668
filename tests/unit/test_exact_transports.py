"""Exact transports in a strategy: unlike codecs they change nothing but bytes, and say where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import towpath
from towpath.core.passes import Compression
from towpath.core.routes import Op
from towpath.core.strategy import GRADIENTS, TransferKind
from towpath.core.transport import Transport
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

TWO = Topology(2, 2)
SIZES = (1 << 20, 1 << 10, 333)


def _plan(name: str, precision: str, dtype: str = "float32", trains: bool = True, **options: Any) -> UnitPlan:
    unit = UnitSpec("", (BucketSpec(SIZES, dtype, trains),))
    return plan_unit(towpath.strategy(name, TWO, **options), unit, towpath.Precision(*precision.split()))


def _inexact(plan: UnitPlan) -> UnitPlan:
    """The plan with plain transports in place of exact ones."""
    buckets = [
        replace(
            bucket,
            transfers={
                kind: tuple(replace(t, transport=replace(t.transport, exact=False)) for t in transfers)
                for kind, transfers in bucket.transfers.items()
            },
        )
        for bucket in plan.buckets
    ]
    return replace(plan, buckets=tuple(buckets))


@pytest.mark.parametrize("precision", ["", "bf16 bf16", "bf16 fp32", "fp16 fp16"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "mics", "hpz", "paro-iig", "paro-nig"])
def test_no_master_no_dtype_and_no_layout_changes(name: str, precision: str) -> None:
    """A codec forces masters, sums in float32, and blocks that parameters are aligned to."""
    plain, exact = (_plan(name, precision, exact=each) for each in (False, True))
    assert plain != exact and _inexact(exact) == plain
    assert [b.has_master for b in exact.buckets] == [b.has_master for b in plain.buckets]
    kept, before = (plan.buckets[0].memory_bytes() for plan in (exact, plain))
    assert {kind: value for kind, value in kept.items() if kind != "sent"} == before
    encoded = _plan(name, precision, weights="int8", gradients="int4")
    assert encoded.buckets[0].spec.alignment > plain.buckets[0].spec.alignment


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "paro-iig"])
def test_float64_is_sent_as_it_is(name: str) -> None:
    plain, exact = (_plan(name, "", "float64", exact=each) for each in (False, True))
    every = [t for kind in TransferKind if kind in exact.buckets[0].transfers for t in exact.transfers(kind)]
    assert every and not any(t.coding for t in every)
    kinds = plain.buckets[0].transfers
    assert {k: exact.wire_needs(k) for k in kinds} == {k: plain.wire_needs(k) for k in kinds}
    assert [t.route for t in every] == [t.route for k in kinds for t in plain.transfers(k)]


def test_frozen_parameters_are_sent_as_they_are() -> None:
    """They are only sent after a write, and no memory is kept for them."""
    plain, exact = (_plan("zero1", "", trains=False, exact=each) for each in (False, True))
    assert exact.buckets[0].transfers[TransferKind.PARAM_SYNC] and _inexact(exact) == exact
    assert exact.buckets[0].memory_bytes() == plain.buckets[0].memory_bytes()
    assert exact.wire_needs(TransferKind.PARAM_SYNC) == plain.wire_needs(TransferKind.PARAM_SYNC)


def test_a_codec_stays_next_to_exact_transports() -> None:
    strategy = towpath.strategy("paro-iig", TWO, gradients="int4", exact=True)
    transfers = towpath.schedule(strategy, [1 << 20]).transfers
    assert {t.kind for t in transfers if t.coding} == {TransferKind.PARAM_SYNC}
    assert {t.kind for t in transfers if t.transport.encoding} == {TransferKind.GRAD_SYNC}
    assert "exact" not in str(strategy.grad_sync) and "exact" in str(strategy.param_sync)
    until = towpath.strategy("paro-iig", TWO, gradients="int4", gradients_until=3, exact=True)
    for step, exact in ((2, False), (3, True)):
        transfers = towpath.schedule(until.at(step), [1 << 20]).transfers
        assert [t.coding is not None for t in transfers if t.kind is TransferKind.GRAD_SYNC] == [exact]
    assert "exact" in str(until.grad_sync)


def test_messages_of_two_ranks_cannot_be_exact() -> None:
    exact = Transport(exact=True)
    with pytest.raises(ConfigError, match="activations cannot be exact"):
        Compression(activations=exact)
    with pytest.raises(ConfigError, match="matrix_gradients cannot be exact"):
        exact.check(Op.TO_OWNERS, "muon: matrix_gradients")
    with pytest.raises(ConfigError, match="gather cannot be exact"):
        replace(towpath.strategy("zero3", TWO), gather=exact)


def test_stages_in_low_rank_keep_exact_transports_for_other_steps() -> None:
    strategy = towpath.strategy("ddp", TWO, exact=True)
    made = Compression(gradients=Transport(codec="low-rank:2", after=5)).strategy_of(strategy, 0, 2)
    assert all(made.transport(kind).exact for kind in GRADIENTS if getattr(made.moves, kind.value))
    assert towpath.schedule(made.at(0), [1 << 20]).transfers[0].coding


@pytest.mark.parametrize("exact", ["false", "yes", 1, 0, None])
def test_exact_is_true_or_false(exact: Any) -> None:
    with pytest.raises(ConfigError, match="exact is True or False"):
        towpath.strategy("paro-iig", towpath.Topology(2, 2), exact=exact)
