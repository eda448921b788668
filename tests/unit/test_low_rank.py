"""Gradients in low rank: what of a bucket travels by its factors, in which transfers, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from towpath.codecs.low_rank import first_factor, orthonormal, with_unit_columns
from towpath.core.formats import Precision, item_bytes
from towpath.core.presets import strategy
from towpath.core.routes import Op
from towpath.core.schedule import schedule
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transport import Factored, FactoredMatrix, LowRank, Transport
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, UnitSpec
from towpath.errors import ConfigError
from towpath.fsdp.peers import Wishes
from towpath.topology.cluster import Extent, Topology

SQUARE = Topology(2, 2)
# Two matrices that get smaller, a vector, one matrix that would not, and one that must not.
BUCKET = BucketSpec((64 * 32, 64, 32 * 48, 8 * 8, 64 * 64), matrices=((64, 32), None, (32, 48), (8, 8), None))
UNITS = (UnitSpec("", (BucketSpec((40,)),), root=True), UnitSpec("block", (BUCKET,)))
WHOLE = ("ddp", "zero1", "paro-nng", "paro-nni")


def test_matrices_that_get_smaller_travel_by_their_factors_and_the_rest_as_it_is() -> None:
    found = Factored.of(LowRank(4), BUCKET)

    assert found is not None
    first, second, third, fourth, _ = BUCKET.offsets[:5]
    assert found.matrices == (FactoredMatrix(first, 64, 32), FactoredMatrix(third, 32, 48))
    assert found.plain == ((second, second + 64), (fourth, fourth + 64), (BUCKET.offsets[4], BUCKET.offsets[4] + 4096))
    assert found.messages == (4 * (64 + 32) + 64 + 64 + 4096, 4 * (32 + 48))
    assert found.kept_elements(feedback=False) == 4 * (32 + 48)
    assert found.kept_elements(feedback=True) == 4 * (32 + 48) + 64 * 32 + 32 * 48


def test_where_nothing_gets_smaller_nothing_changes() -> None:
    assert Factored.of(LowRank(4), BucketSpec((64, 64), matrices=((8, 8), None))) is None
    assert Factored.of(LowRank(4), BucketSpec((64,))) is None
    plain, coded = (schedule(s, UNITS[:1], 1).transfers for s in (strategy("ddp", SQUARE), _made("ddp")))
    assert [(t.payload, t.move) for t in plain] == [(t.payload, t.move) for t in coded]


@pytest.mark.parametrize("rate, travels", [(1, True), (2.5, True), (5.3, True), (5.4, False)])
def test_a_rate_may_be_asked_of_the_factors(rate: float, travels: bool) -> None:
    assert LowRank(4, rate).pays((64, 32)) == travels  # 2,048 elements, or 4 · 96


@pytest.mark.parametrize("name", WHOLE)
def test_two_sums_over_all_ranks_bring_them(name: str) -> None:
    made = _made(name)
    found = [t for t in schedule(made, UNITS, 3).transfers if t.kind is TransferKind.GRAD_SYNC and t.unit == "block"]

    factored = Factored.of(LowRank(4), BUCKET)
    assert factored is not None and tuple(t.elements for t in found) == factored.messages
    assert all(t.move.op is Op.ALL_REDUCE and t.move.members == 4 and t.micro_step == 2 for t in found)
    flat = schedule(_made(name, route="flat"), UNITS, 1).transfers
    flat = [t for t in flat if t.kind is TransferKind.GRAD_SYNC and t.unit == "block"]
    assert sum(t.inter_bytes for t in flat) == pytest.approx(2 * 2 * 0.75 * sum(factored.messages) * 4, rel=0.01)
    # What else a strategy sends stays as it is.
    others = [(t.kind, t.payload) for t in schedule(strategy(name, SQUARE), UNITS, 3).transfers]
    assert [f for f in others if f[0] is not TransferKind.GRAD_SYNC] == [
        (t.kind, t.payload) for t in schedule(made, UNITS, 3).transfers if t.kind is not TransferKind.GRAD_SYNC
    ]


def test_memory_is_told() -> None:
    factored = Factored.of(LowRank(4), BUCKET)
    assert factored is not None
    for feedback, precision in (("first", Precision()), ("none", Precision(params="bfloat16"))):
        made = strategy("zero1", SQUARE, gradients="low-rank:4", feedback=feedback)
        plan = plan_unit(made, UNITS[1], precision)
        kept = factored.kept_elements(feedback == "first") * 4
        assert plan.buckets[0].memory_bytes()["feedback"] == kept
        item = item_bytes(plan.buckets[0].reduce_dtype)
        assert plan.wire_needs(TransferKind.GRAD_SYNC)["uint8"] == sum(factored.messages) * item


def test_feedback_is_on_unless_it_is_turned_off_and_first_steps_may_travel_as_they_are() -> None:
    made = _made("ddp", gradients_until=9)
    made = replace(made, grad_sync=replace(made.grad_sync, after=3))

    assert (made.grad_sync.feedback, made.grad_sync.after, made.grad_sync.until) == ("first", 3, 9)
    assert _made("ddp", feedback="none").grad_sync.feedback == "none"
    assert [made.at(step).grad_sync.low_rank for step in (0, 2, 3, 8, 9)] == [None, None, LowRank(4), LowRank(4), None]
    assert made.grad_sync.changes == {3, 9}
    assert Strategy.from_toml(made.to_toml()) == made
    assert "low-rank:4, feedback at first, after 3 steps, until step 9" in str(made)


@pytest.mark.parametrize("name", ["zero2", "zero3", "mics", "hpz", "paro-iig", "paro-nig"])
def test_where_gradients_are_cut_it_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"low-rank:4 needs full matrices.*ddp, zero1, paro-nng, paro-nni"):
        _made(name)


def test_mistakes_are_refused() -> None:
    for message, transport in (
        ("feedback is 'none' or 'first'; got 'both'", {"codec": "low-rank:4", "feedback": "both"}),
        ("after=4 and until=4: the codec would never be used", {"codec": "int8", "after": 4, "until": 4}),
        ("after is a number of optimizer steps", {"codec": "int8", "after": -1}),
        ("after=2 without a codec", {"after": 2}),
        ("'low-rank:16\\+rate:2'", {"codec": "low-rank:4:2"}),
        ("rate is a number of at least 1", {"codec": "low-rank:4+rate:0.5"}),
    ):
        with pytest.raises(ConfigError, match=message):
            Transport(**transport)
    with pytest.raises(ConfigError, match="need gradients= to name a codec"):
        strategy("ddp", SQUARE, gradients_until=3)


def test_inside_one_node_nothing_is_rounded() -> None:
    assert _made("ddp", Topology(1, 4)).grad_sync.low_rank is None
    mics = strategy("mics", Topology(2, 1), gradients="low-rank:4", group=Extent(1))
    assert mics.grad_sync.low_rank == LowRank(4)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_matrix_of_low_rank_is_found_at_once() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (40, 30))
    x, q = left @ right.T, first_factor(30, 5, 7, torch.float64, torch.device("cpu"))
    for _ in range(3):  # the last two of its five columns are of nothing: they stay what they were
        (p,) = orthonormal([x @ q], torch.float64)
        found = x.T @ p
        assert torch.allclose(p @ found.T, x, atol=1e-9)
        q = with_unit_columns(found, q)
    assert q.isfinite().all()


def test_nothing_hides_what_is_not_finite() -> None:
    for poison in (float("nan"), float("inf")):
        columns = torch.ones(6, 2)
        columns[3, 1] = poison
        bad, good = orthonormal([columns, torch.ones(4, 2)], torch.float32)
        assert bad.isnan().all() and good.isfinite().all()
    assert torch.equal(with_unit_columns(torch.zeros(4, 2), torch.ones(4, 2)), torch.ones(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bases_are_orthonormal_and_span_the_columns(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(rows: int, columns: int = 6) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    one_row = torch.zeros(50, 6, dtype=torch.float64)
    one_row[7] = drawn(1)
    ill = torch.linalg.qr(drawn(90)).Q * torch.logspace(0, -4, 6, dtype=torch.float64)
    cases = [  # the matrix, and its rank
        (drawn(200), 6),
        (drawn(70) * torch.logspace(-20, 20, 6, dtype=torch.float64), 6),
        (ill @ torch.linalg.qr(drawn(6)).Q, 6),
        (drawn(64, 3) @ drawn(3), 3),
        (drawn(33, 1).expand(33, 6), 1),
        (torch.ones(99, 6), 1),
        (one_row, 1),
        (drawn(4), 4),
        (torch.zeros(8, 6), 0),
    ]
    matrices = [matrix.to(dtype) for matrix, _ in cases]
    exact = 1e-6 if dtype == torch.float32 else 1e-9
    for matrix, basis, (_, rank) in zip(matrices, orthonormal(matrices, dtype), cases, strict=True):
        product = basis.double().T @ basis.double()
        # Columns that depend on others are zero.
        assert torch.allclose(product, torch.diag(product.diagonal().round()), rtol=0, atol=exact)
        assert int(product.diagonal().round().sum()) == rank, matrix.shape
        unit = matrix.double() / matrix.double().norm(dim=0).clamp_min(1e-300)
        assert torch.allclose(basis.double() @ (basis.double().T @ unit), unit, rtol=0, atol=exact)


def test_all_matrices_take_as_many_launches_as_one() -> None:
    def launches(count: int) -> int:
        matrices = [torch.ones(rows, 4) for rows in (4096, 1024, 1024, 4096, 14336, 14336, 4096)[:count]]
        with Launches() as found:
            orthonormal(matrices, torch.float32)
        return found.count

    assert launches(7) - launches(1) == 6, "a copy of each matrix"


class Launches(TorchDispatchMode):
    """Counts operations that launch kernels on a GPU: all but views and allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


def _made(name: str, topology: Topology = SQUARE, **options: object) -> Strategy:
    return strategy(name, topology, gradients="low-rank:4", **options)


@pytest.mark.parametrize("preset", ["paro-iig", "ddp"])
def test_wires_refuse_low_rank_for_flat_buffers(preset: str) -> None:
    with pytest.raises(ConfigError, match="low-rank:4"):
        Wishes(exact=True, gradients="low-rank:4", hold=None, topology=None).strategy(preset, SQUARE)
