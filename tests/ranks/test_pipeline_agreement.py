"""Ranks of a pipeline that are given different things: one error on every rank, before anything is sent, and the next
correct call works.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.test_pipeline import BATCH, LENGTH, SINGLE, WIDTH, _batch, _loss, _token_loss
from towpath.errors import MismatchError, ShardError, StepError
from towpath.pipeline import Compression, Pipeline, split
from towpath.train.models import GPT, Shape

MICRO_BATCHES = 4


class Layer(nn.Module):
    """It remembers what it has seen, and draws numbers: a pass too many shows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


def _made(schedule: str = "1F1B", strategy: str = "zero1", **options: Any) -> Pipeline:
    given: dict[str, Any] = {
        "stages": [partial(Layer, seed) for seed in range(2 if schedule in SINGLE else 4)],
        "strategy": strategy,
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")),
        "schedule": schedule,
        "micro_batches": MICRO_BATCHES,
        "loss": _loss,
        "example": torch.empty(BATCH, WIDTH).double(),
    }
    return Pipeline(**given | options)


def test_auto_and_sharded_stages_are_refused_with_what_to_do(world: Worlds) -> None:
    for auto, sharded in world(4).run(_refuse_auto_and_sharded_stages):
        assert 'does not take the strategy "auto": name one' in auto and "towpath plan" in auto, auto
        assert "Layer, is sharded already. Build it anew" in sharded, sharded


def _refuse_auto_and_sharded_stages() -> tuple[str, str]:
    with pytest.raises(ShardError) as auto:
        _made(strategy="auto")
    stages = [Layer(seed) for seed in range(2)]
    _made(stages=stages)
    with pytest.raises((ShardError, MismatchError)) as sharded:
        _made(stages=stages)
    return str(auto.value), str(sharded.value)


# --- layouts ---------------------------------------------------------------------------------------------------------


# --- construction ----------------------------------------------------------------------------------------------------

OTHER: dict[str, dict[str, Any]] = {
    "micro_batches=8": {"micro_batches": 8},
    "schedule=GPipe": {"schedule": "GPipe"},
    "stage 1: given, zero2": {"strategy": ["zero1", "zero2"]},
    "example=3×8 float64": {"example": torch.empty(3, WIDTH).double()},
    "compression.activation_gradients=flat, low-rank:1": {"compression": Compression("low-rank:1")},
    "precision=Precision": {"precision": "bf16"},
}


@pytest.mark.parametrize("words", [seldom(w) if w.startswith(("micro", "example")) else w for w in OTHER])
def test_other_arguments_on_one_rank_are_refused_on_every_rank(world: Worlds, words: str) -> None:
    odd = 1 + 2 * (list(OTHER).index(words) % 2)  # of another replica, or of another stage as well
    for told in world(4).run(_given_others, odd, words):
        assert words in told and f"rank {odd} has" in told
        assert "Pass the same arguments to Pipeline on every rank." in told


def _given_others(odd: int, words: str) -> str:
    options = dict(OTHER[words])
    if options.get("precision"):
        from towpath import Precision

        options["precision"] = Precision("bfloat16")
    with pytest.raises(MismatchError) as refused:
        _made(**options if dist.get_rank() == odd else {})
    x, y = _batch(0, 0, MICRO_BATCHES)
    assert _made().step(x, target=y).isfinite()
    return str(refused.value)


def test_models_that_are_cut_elsewhere_are_refused(world: Worlds) -> None:
    """The ranks of the last stage have a model of one block more: block 2 would run nowhere."""
    for told in world(4).run(_cut_elsewhere):
        assert "rank 0 has 'stage 0: model.layers.0 to model.layers.1, zero1'" in told
        assert "rank 2 has 'stage 0: model.layers.0 to model.layers.2, zero1'" in told


def _cut_elsewhere() -> str:
    depth = 4 if dist.get_rank() < 2 else 5
    model = GPT(Shape(vocabulary=24, width=16, depth=depth, heads=2, hidden=24, tied=False))
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with pytest.raises(MismatchError) as refused:
        _made(stages=split(model, 2, example), example=example, loss=_token_loss)
    return str(refused.value)


# --- steps -----------------------------------------------------------------------------------------------------------

# By what is wrong: schedule and strategy, the rank that is given it, and what its error says. Ranks 0 and 1 have the
# first stage, and ranks 2 and 3 the last one.
WRONG = {
    "short target": ("1F1B", "zero1", 3, "a target of 7×8: expected 8 rows, for 4 micro-batches"),
    "target of one row each": ("Interleaved1F1B", "zero3", 2, "a target of 4×8: expected 8 rows"),
    "no target": ("GPipe", "ddp", 2, "no target: expected one of 8 rows on the rank of the last stage"),
    "target of no dimension": ("Interleaved1F1B", "zero1", 3, "a target of no dimension: expected 8 rows"),
    "short input": ("1F1B", "mics", 1, "a batch of 7×8: expected 8×8"),
    "input of another dtype": ("Interleaved1F1B", "zero2", 0, "a batch whose tensor 0 is float32: expected float64"),
    "no tensor": ("Interleaved1F1B", "ddp", 0, "a batch with a list: expected tensors"),
}


def _args(pipeline: Pipeline, wrong: str, x: torch.Tensor, y: torch.Tensor) -> tuple[list[Any], Any]:
    """What is read on this rank, and nothing else."""
    inputs: dict[str, Any] = {"short input": x[:7], "input of another dtype": x.float(), "no tensor": x.tolist()}
    targets = {"short target": y[:7], "target of one row each": y[:4], "target of no dimension": y.sum()}
    args = [inputs.get(wrong, x)] if 0 in pipeline.modules else []
    reads_target = len(pipeline.owners) - 1 in pipeline.modules and wrong != "no target"
    return args, targets.get(wrong, y) if reads_target else None


@in_turn(list(WRONG), 1, "wrong")
def test_a_wrong_batch_on_one_rank_is_refused_on_every_rank_and_the_next_one_trains(world: Worlds, wrong: str) -> None:
    schedule, strategy, odd, words = WRONG[wrong]
    call = ("step", "evaluate")[list(WRONG).index(wrong) % 2]
    for rank, told in enumerate(world(4).run(_given_wrong, schedule, strategy, wrong, odd, call)):
        assert words in told
        assert (f"Pipeline.{call}() failed on rank {odd}: " in told) is (rank != odd)


def _given_wrong(schedule: str, strategy: str, wrong: str, odd: int, call: str) -> str:
    """Between two steps that train as those of a pipeline that was never given it."""
    pipelines = [_made(schedule, strategy) for _ in range(2)]
    told, losses = "", []
    for pipeline in pipelines:
        optimizer = torch.optim.AdamW(list(pipeline.parameters()), lr=1e-2)
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            x, y = _batch(step, dist.get_rank() % 2, MICRO_BATCHES)
            args, target = _args(pipeline, "", x, y)
            losses.append(float(pipeline.step(*args, target=target)))
            optimizer.step()
            optimizer.zero_grad()
            if pipeline is pipelines[1] and step < 2:
                args, target = _args(pipeline, wrong if dist.get_rank() == odd else "", x, y)
                with pytest.raises(StepError) as refused:
                    getattr(pipeline, call)(*args, target=target)
                told = str(refused.value)
    assert losses[:3] == losses[3:]
    for (name, mine), (_, theirs) in zip(*(_tensors(p) for p in pipelines), strict=True):
        assert torch.equal(mine, theirs), name
    return told


def _tensors(pipeline: Pipeline) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, Any]] = [(name, p) for name, p in pipeline.named_parameters()]
    found = [(name, p.to_local()) for name, p in found]
    return found + [(name, b) for module in pipeline.modules.values() for name, b in module.named_buffers()]


@pytest.mark.parametrize("call", ["evaluate()", "step() inside no_sync()"])
def test_ranks_in_different_calls_are_told(world: Worlds, call: str) -> None:
    for told in world(4).run(_other_calls, call):
        assert f"rank 0 has 'Pipeline.step() of step 1', rank 3 has 'Pipeline.{call} of step 1'" in told


def _other_calls(call: str) -> str:
    pipeline = _made()
    x, y = _batch(0, 0, MICRO_BATCHES)
    odd = dist.get_rank() == 3
    inside = pipeline.no_sync() if odd and "no_sync" in call else nullcontext()
    with inside, pytest.raises(StepError) as refused:
        (pipeline.evaluate if odd and call == "evaluate()" else pipeline.step)(x, target=y)
    assert pipeline.step(x, target=y).isfinite()
    return str(refused.value)
