"""The benchmarks' pipelines in one process: their gradients are those of a pipeline on ranks.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.suites.emulated_pipeline import DroppingLink, EmulatedPipeline, Link, NextMicroBatchLink
from benchmarks.suites.frozen_pipeline import FrozenPipeline, Moments, Pairing
from benchmarks.suites.pipeline import Sizes, Stage, compression_of, loss_of
from tests.ranks.server import on_ranks
from tests.ranks.strategies import seldom
from towpath.codecs.low_rank import first_factor
from towpath.engine.parameters import low_rank_sync
from towpath.pipeline import Pipeline

SIZES = Sizes(16, 3, 2, 24, batch=2, length=6, micro_batches=5, wait_seconds=0.0, rank=2, gradient_rank=3)
DOUBLE = torch.float64


def _batch(generator: torch.Generator, copies: int) -> torch.Tensor:
    return torch.randint(24, (2, copies * SIZES.batch * SIZES.micro_batches, SIZES.length), generator=generator)


def _same_factor(columns: int, rank: int, seed: int, *like: Any) -> torch.Tensor:
    return first_factor(columns, rank, 0, *like)


@seldom
@on_ranks(4)
def test_emulated_steps_are_those_of_the_pipeline() -> None:
    """With errors carried between steps, encoded sums of the first stage, and one sum of the tied embeddings."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    compression = compression_of("cb+fe+sc, 0.5 of stages", SIZES)
    with (
        patch.object(low_rank_sync, "first_factor", _same_factor),
        patch("benchmarks.suites.emulated_pipeline.first_factor", _same_factor),
    ):
        made = Pipeline(
            [lambda index=index: Stage(SIZES, index, count=2).double() for index in range(2)],
            "ddp",
            mesh=mesh,
            micro_batches=SIZES.micro_batches,
            loss=loss_of,
            example=torch.zeros(SIZES.batch, SIZES.length, dtype=torch.int64),
            compression=compression,
            tied=("tokens", "head"),
        )
        emulated = EmulatedPipeline(SIZES, compression, 0, stages=2, copies=2, dtype=DOUBLE)
        optimizer, other = (torch.optim.SGD(each, lr=1.0) for each in (list(made.parameters()), emulated.parameters()))
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            ids, targets = _batch(generator, 2)
            copy = mesh["dp"].get_local_rank()
            made.step(ids.chunk(2)[copy], target=targets.chunk(2)[copy])
            emulated.step(ids, targets)
            optimizer.step(), other.step()
            optimizer.zero_grad()
    (index,) = made.modules
    for name, parameter in made.modules[index].named_parameters():
        expected = emulated.stages[index].get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-9, atol=1e-12, msg=name)


# Frozen weights -------------------------------------------------------------------------------------------------------


def _check_equal(found: torch.Tensor, expected: torch.Tensor | None) -> None:
    """Check that tensors are equal up to float32, in which the loss is computed."""
    assert expected is not None
    assert (found - expected).norm() < 1e-5 * expected.norm()


KINDS: dict[str, tuple[str, type[Link]]] = {
    "cb": ("cb", Link),
    "without feedback": ("cb, no feedback", Link),
    "dropped": ("cb", DroppingLink),
    "next": ("cb", NextMicroBatchLink),
}


def _frozen_and_emulated(kind: str, stages: int = 3) -> tuple[FrozenPipeline, EmulatedPipeline, EmulatedPipeline]:
    name, link = KINDS[kind]
    compression = compression_of(name, SIZES)
    emulated = EmulatedPipeline(SIZES, compression, 0, stages, 2, DOUBLE, link)
    plain = EmulatedPipeline(SIZES, compression_of("uncompressed", SIZES), 0, stages, 2, DOUBLE)
    frozen = FrozenPipeline(plain.stages, SIZES, 2, {kind: (compression, link)}, ["cb"] if kind == "cb" else ())
    return frozen, emulated, plain


@pytest.mark.parametrize("kind", KINDS)
def test_differences_are_those_of_the_emulated_gradients(kind: str) -> None:
    """Over three steps, so that errors of one step arrive in the next one."""
    frozen, emulated, plain = _frozen_and_emulated(kind)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids, targets = _batch(generator, 2)
        exact, found = frozen.exact(ids, targets), frozen.differences(ids, targets)[kind]
        emulated.step(ids, targets)
        for index, stage in enumerate(emulated.stages[:-1]):
            for (name, parameter), gradient, difference in zip(
                stage.named_parameters(), exact[index], found[index], strict=True
            ):
                if name != "tokens.weight":  # both ends of the emulated pipeline have summed it
                    _check_equal(gradient + difference, parameter.grad)
                    assert difference.norm() > 1e-3 * gradient.norm(), name
        plain.step(ids, targets)
        for parameter, gradient in zip(plain.stages[1].parameters(), exact[1], strict=True):
            _check_equal(gradient, parameter.grad)


@pytest.mark.parametrize(("kind", "restores"), [("cb", True), ("next", True), ("without feedback", False)])
def test_only_propagation_restores_the_bias_before_a_cut(kind: str, restores: bool) -> None:
    """Over all steps, what is missing is at most the error that is still under way."""
    frozen, _, _ = _frozen_and_emulated(kind)
    generator = torch.Generator().manual_seed(1)
    place = [name for name, _ in frozen.stages[1].named_parameters()].index("blocks.0.mlp.2.bias")
    missing, exact = torch.zeros(16, dtype=DOUBLE), torch.zeros(16, dtype=DOUBLE)
    for _ in range(12):
        batch = _batch(generator, 2)
        missing += frozen.differences(*batch)[kind][1][place]
        exact += frozen.exact(*batch)[1][place]
    links = [frozen._links[kind][2, copy] for copy in range(2)]
    if restores:
        _check_equal(-sum(link.kept.sum(0) for link in links) / 10, missing)  # type: ignore[union-attr]
    else:
        assert missing.norm() > 0.1 * exact.norm()


def test_pairings_are_what_the_gradient_of_the_last_matrix_is_wrong_by() -> None:
    frozen, _, _ = _frozen_and_emulated("cb")
    generator = torch.Generator().manual_seed(1)
    names = [name for name, _ in frozen.stages[1].named_parameters()]
    wrong = sum(
        frozen.differences(*_batch(generator, 2))["cb"][1][names.index("blocks.0.mlp.2.weight")] for _ in range(4)
    )
    pairing = frozen.pairings["cb", 2]
    _check_equal((pairing.delivered - pairing.lost) / 10, wrong)


def test_the_bias_of_halves_leaves_chance_out() -> None:
    generator = torch.Generator().manual_seed(1)
    exact, noise, biased = Moments(), Moments(), Moments()
    for step in range(40):
        drawn, second = torch.randn(2000, generator=generator), step >= 20
        exact.add(torch.ones(2000), second)
        noise.add(drawn, second)
        biased.add(0.5 + drawn, second)
    only_noise = noise.over(exact)
    assert only_noise["noise"] == pytest.approx(1, rel=0.05)
    assert only_noise["bias"] == pytest.approx(40**-0.5, rel=0.1)
    assert only_noise["bias of halves"] < 0.08
    assert biased.over(exact)["bias of halves"] == pytest.approx(0.5, rel=0.05)


def test_errors_are_paired_with_the_inputs_of_the_message_they_are_added_to() -> None:
    pairing, one, other = Pairing(), torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    pairing.add(0, one, one)
    pairing.add(1, other, one)  # of another copy, so nothing is delivered
    assert torch.equal(pairing.delivered + torch.zeros(2, 2), torch.zeros(2, 2))
    pairing.add(0, one, other)
    assert torch.equal(pairing.delivered, other)
    assert torch.equal(pairing.lost, one + other.T + other)
