"""Ranks with unequal batches: the gradient is that of one process, and every sample is seen once.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import towpath
from tests.ranks.models import MODELS, noise
from tests.ranks.reference import optimizer_for
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import ROUNDING, in_turn, seldom, strategy_of
from tests.ranks.test_never_silent import Net
from tests.ranks.test_train import TINY, _near, _steps, _train, alone, config, rows_of, tokens
from tests.ranks.twin import accumulating, distance, error_of
from towpath import Outer, Topology, checkpoint
from towpath.errors import ConfigError, ShardError
from towpath.train.job import StopRequest, init_distributed
from towpath.train.trainer import TrainingRun

__all__ = ["alone", "config", "tokens"]  # fixtures

# Sums are taken in another order than in one process, nothing else differs.
TOLERANCE = 1e-12

PRESETS = tuple(name for name in towpath.strategies() if name not in ROUNDING)
SHAPE, SHARES, MICRO_BATCH = Topology(2, 2), (3, 2, 2, 1), 2
ROWS = (3, 2, 2, 1)  # of the eight of a micro-batch
WORLD = SHAPE.world
MLP = MODELS["mlp"]


def _rows_of(micro: int, step: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of a micro-batch of all ranks. Some labels are ignored, on some rows most of them."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    ids = torch.randint(0, 37, (WORLD * MICRO_BATCH, 6), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < torch.linspace(0, 0.8, len(ids))[:, None]
    ignored[:, -1] = False  # each row has a label
    return ids, ids.masked_fill(ignored, -100)


def _loss(model: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The mean over the labels that are not ignored, and their number."""
    logits, labels = model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels), int((labels != -100).sum())


def _share(model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first, rows = model.towpath_engine.shares.span()
    return tuple(each[first : first + rows] for each in batch)


def _made(label: str, topology: Topology = SHAPE, shares: Any = SHARES, dtype: Any = torch.float64, **more: Any) -> Any:
    strategy = strategy_of(label, topology, shares=shares, **more)
    model: Any = towpath.shard(MODELS["gpt"].make(dtype), strategy, topology=topology)
    model.towpath_engine.shares.divide(MICRO_BATCH)
    return model


def _step(model: Any, plain: nn.Module, step: int, micro_steps: int) -> tuple[float, float]:
    """Compute the gradients of both. Return the mean loss of all tokens, by the ranks and by the one process."""
    told = torch.zeros(2, dtype=torch.float64)
    for micro in accumulating(model, micro_steps):
        loss, count = _loss(model, *_share(model, _rows_of(micro, step)))
        towpath.weigh(model, loss, count).backward()
        told += torch.tensor([loss.item() * count, count], dtype=torch.float64)
    dist.all_reduce(told)
    whole = [torch.cat(each) for each in zip(*(_rows_of(micro, step) for micro in range(micro_steps)), strict=True)]
    expected, count = _loss(plain, *whole)
    assert count == told[1]
    expected.backward()
    return (told[0] / told[1]).item(), expected.item()


def check_gradients(model: Any, plain: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Each gradient is near that of one process, measured by its largest element."""
    named: dict[str, Any] = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        expected = named[name].grad
        assert distance(p.grad, expected) <= tolerance * expected.abs().max().item(), name


@in_turn(PRESETS, 3, "preset")
@pytest.mark.parametrize("micro_steps", [2, seldom(1)])
@on_ranks(WORLD)
def test_gradients_norms_and_losses_are_those_of_one_process(preset: str, micro_steps: int) -> None:
    model, plain = _made(preset), MODELS["gpt"].make(torch.float64)
    optimizers = [optimizer_for(each) for each in (model, plain)]
    shares = model.towpath_engine.shares
    assert shares.rows == ROWS
    for step in range(2):
        found, expected = _step(model, plain, step, micro_steps)
        assert found == pytest.approx(expected, rel=TOLERANCE)
        check_gradients(model, plain)
        # The first step is clipped, and the second is not.
        norms = [
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3 if step == 0 else 1e3).item()
            for each in (model, plain)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)
        check_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(3, 1), seldom((1, 4)), seldom((4, 2)), seldom((1, 1))])
def test_any_shape_of_cluster_takes_unequal_batches(world: Worlds, shape: tuple[int, int]) -> None:
    world(shape[0] * shape[1]).run(_any_shape, Topology(*shape))


def _any_shape(topology: Topology) -> None:
    shares = tuple(1 + rank % 3 for rank in range(topology.world))
    for label in ("zero3", "ddp", "paro-iig"):
        plain = MLP.make(torch.float64)
        model: Any = towpath.shard(MLP.make(torch.float64), strategy_of(label, topology, shares=shares))
        total = model.towpath_engine.shares.divide(3)
        batches = [MLP.micro_batch(number, 0, 0, torch.float64) for number in range(topology.world)]
        whole = [torch.cat(each)[:total] for each in zip(*batches, strict=True)]
        mine = _share(model, whole)
        towpath.weigh(model, MLP.loss(model, *mine), len(mine[0])).backward()
        MLP.loss(plain, *whole).backward()
        check_gradients(model, plain)


@on_ranks(WORLD)
def test_exact_transport_changes_no_bit_of_weighted_gradients() -> None:
    found: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        for exact in (False, True):
            model = _made("paro-iig", dtype=torch.float32, exact=exact)
            _step(model, MODELS["gpt"].make(torch.float32), 0, 2)
            found.append([p.grad.to_local() for p in model.parameters()])
            made = towpath.schedule(model.towpath_engine.strategy, model)
            assert any(transfer.coding for transfer in made.transfers) == exact
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("label", ["zero1 gradients=int8:32", seldom("zero2 gradients=e4m3:32"), seldom("qgz")])
@on_ranks(WORLD)
def test_compressed_gradients_are_near_those_of_one_process(label: str) -> None:
    model, plain = _made(label, dtype=torch.float32), MODELS["gpt"].make(torch.float32)
    _step(model, plain, 0, 2)
    check_gradients(model, plain, 0.25)


@on_ranks(2)
def test_a_rank_whose_data_has_ended_has_no_tokens() -> None:
    """The mean is over the rows that are there."""
    strategy = towpath.strategy("zero3", Topology(2, 1), shares=(3, 1))
    model: Any = towpath.shard(Net().double(), strategy)
    plain = Net().double()
    with towpath.full_parameters(model):
        plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
    data = [[noise(0, 0, step, 6, 6) for step in range(2)], [noise(1, 0, 0, 2, 6)]]
    for step, batch in enumerate(towpath.join(model, data[dist.get_rank()])):
        towpath.weigh(model, model(batch).square().mean(), len(batch)).backward()
        whole = torch.cat([mine[step] for mine in data if step < len(mine)])
        plain(whole).square().mean().backward()
        check_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@on_ranks(2)
def test_loss_scaling_changes_no_bit_of_weighted_gradients() -> None:
    model: Any = towpath.shard(Net(), towpath.strategy("zero2", Topology(2, 1), shares=(2, 1)))
    rows = noise(dist.get_rank(), 0, 0, 2 - dist.get_rank(), 6).float()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.0), list[list[Tensor]]()
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        loss = towpath.weigh(model, model(rows).square().mean(), len(rows))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        found.append([p.grad.to_local().clone() for p in model.parameters()])
        optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@in_turn(["mics", "ddp", "zero2"], 1)
@on_ranks(WORLD)
def test_islands_are_merged_by_tokens(label: str) -> None:
    """With plain SGD and an exchange after each step, islands train as one process does."""
    outer = Outer(every=1, lr=1.0, momentum=0.0)
    model, plain = _made(label, outer=outer, shares=(4, 2, 1, 1)), MODELS["gpt"].make(torch.float64)
    assert sum(model.towpath_engine.shares.rows) == (6 if dist.get_rank() < 2 else 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    for step in range(3):
        found, expected = _step(model, plain, step, 2)
        assert found == pytest.approx(expected, rel=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.towpath_engine.sync_islands()
    named = dict(plain.named_parameters())
    assert max(distance(p, named[name].detach()) for name, p in model.named_parameters()) <= 1e-9


# --- mistakes ---------------------------------------------------------------------------------------------------------


@in_turn(["zero3", "ddp"], 1)
@on_ranks(2)
def test_a_loss_without_a_weight_or_with_two_is_refused_and_training_goes_on(label: str) -> None:
    model: Any = towpath.shard(Net(), towpath.strategy(label, Topology(2, 1), shares=(2, 1)))
    rows = noise(0, 0, 0, 4 if dist.get_rank() == 0 else 2, 6).float()

    def loss() -> Any:
        return model(rows).square().mean()

    def weighed(tokens: int) -> Any:
        return towpath.weigh(model, loss(), tokens)

    rank = dist.get_rank()
    assert error_of(loss().backward).startswith(f"rank {rank}: the strategy has shares, and the loss of this")
    assert "two losses were weighed" in error_of((weighed(len(rows)) + weighed(len(rows))).backward)
    assert "float32" in error_of(lambda: towpath.weigh(model, loss().bfloat16(), 1))
    assert "-1 tokens" in error_of(lambda: weighed(-1))
    assert "has a weight" in error_of(lambda: towpath.weigh(model, weighed(1), 1))
    fraction: Any = 1.5
    assert f"rank {rank}: weigh() got 1.5 tokens" in error_of(lambda: weighed(fraction))
    assert "no rank had a token" in error_of(weighed(0).backward)
    weighed(len(rows)).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_data_that_was_divided_evenly_is_refused() -> None:
    model: Any = towpath.shard(Net(), towpath.strategy("zero1", Topology(2, 1), shares=(2, 1)))
    loss: Any = towpath.weigh(model, model(torch.ones(4, 6)).mean(), 4)
    told = error_of(loss.backward)
    assert "every rank had 4 tokens in this step, and shares=(2, 1) want other numbers" in told


@pytest.mark.parametrize("samples", [False, True])
@on_ranks(2)
def test_unequal_rows_may_have_equally_many_labels(samples: bool) -> None:
    model: Any = towpath.shard(Net(), towpath.strategy("zero1", Topology(2, 1), shares=(3, 1)))
    if samples:
        towpath.ShareSampler(model, 100, 2)
    else:
        _train_one(model, (3, 1)[dist.get_rank()])
    _train_one(model, 1)
    assert model.towpath_engine.step == (1 if samples else 2)


@on_ranks(2)
def test_what_shares_cannot_do_is_refused_with_a_remedy() -> None:
    topology = Topology(2, 1)
    with pytest.raises(ConfigError, match=r"shares=\(2, 1, 1\): expected 2 numbers"):
        towpath.shard(Net(), towpath.strategy("zero3", topology, shares=(2, 1, 1)))
    plain: Any = towpath.shard(Net(), "zero3", topology=topology)
    with pytest.raises(ShardError, match=r"weigh: the strategy has no shares.*shares=…"):
        towpath.weigh(plain, torch.zeros(()), 1)
    with pytest.raises(ShardError, match=r"ShareSampler: the strategy has no shares"):
        towpath.ShareSampler(plain, 100, 2)
    model: Any = towpath.shard(Net(), towpath.strategy("zero3", topology, shares=(2, 1)))
    with pytest.raises(ShardError, match=r"a dataset of 3 samples, and a micro-batch of all ranks has 4"):
        towpath.ShareSampler(model, 3, 2)
    with pytest.raises(ShardError, match=r"pipeline takes equal batches"):
        model.towpath_engine.be_a_stage(2)


# --- data -------------------------------------------------------------------------------------------------------------


def _all_ranks(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _sampled(shares: Any, samples: int = 50, **more: Any) -> tuple[Any, towpath.ShareSampler]:
    strategy = towpath.strategy("zero3", Topology(1, dist.get_world_size()), shares=shares)
    model: Any = towpath.shard(Net(), strategy)
    return model, towpath.ShareSampler(model, samples, 2, **more)


def test_every_sample_of_an_epoch_is_taken_once(world: Worlds) -> None:
    world(3).run(_epochs)


def _epochs() -> None:
    _, sampler = _sampled((3, 2, 1), seed=5)
    orders: list[list[int]] = []
    for _ in range(2):
        assert len(sampler) == 50 // 6
        mine = list(sampler)
        assert [len(batch) for batch in mine] == [(3, 2, 1)[dist.get_rank()]] * 8
        whole = [row for batch in zip(*_all_ranks(mine), strict=True) for rows in batch for row in rows]
        assert len(set(whole)) == len(whole) == 48 and set(whole) < set(range(50))
        orders.append(whole)
    assert orders[0] != orders[1]
    _, again = _sampled((1, 1, 1), seed=5)  # other shares, and the same order
    whole = [row for batch in zip(*_all_ranks(list(again)), strict=True) for rows in batch for row in rows]
    assert whole == orders[0]
    _, plain = _sampled((3, 2, 1), shuffle=False)
    assert next(iter(plain)) == [[0, 1, 2], [3, 4], [5]][dist.get_rank()]


@on_ranks(3)
def test_two_samplers_of_a_model_take_micro_batches_of_one_size() -> None:
    model, sampler = _sampled("auto", shuffle=False)
    shares = model.towpath_engine.shares
    shares._rows.append((0, (3, 2, 1)))  # as measured
    towpath.ShareSampler(model, 20, 2)
    assert next(iter(sampler)) == [[0, 1, 2], [3, 4], [5]][dist.get_rank()]
    with pytest.raises(ConfigError, match=r"micro_batch=4: .* were divided for micro_batch=2.* DistributedSampler"):
        towpath.ShareSampler(model, 20, 4)
    fresh: Any = towpath.shard(Net(), model.towpath_engine.strategy)
    with pytest.raises(ConfigError, match="0 rows for 3 ranks"):
        towpath.ShareSampler(fresh, 20, 0)
    with pytest.raises(ConfigError, match=r"micro_batch=1.5: expected .* a whole number"):
        towpath.ShareSampler(fresh, 20, 1.5)  # type: ignore[arg-type]


def test_a_run_resumes_with_other_shares_and_no_sample_comes_twice(world: Worlds, tmp_path: Path) -> None:
    world(3).run(_resumed, tmp_path)


def _resumed(folder: Path) -> None:
    rows = TensorDataset(torch.arange(50))
    model, sampler = _sampled((3, 2, 1))
    first = [batch.tolist() for (batch,) in islice(DataLoader(rows, batch_sampler=sampler), 3)]
    assert checkpoint.save(folder, 1, checkpoint.State(model, data=sampler)).ok
    model, sampler = _sampled((1, 1, 4))
    assert checkpoint.load(folder, checkpoint.State(model, data=sampler)) is not None
    assert len(sampler) == 5
    rest = [batch.tolist() for (batch,) in DataLoader(rows, batch_sampler=sampler)]
    assert {len(batch) for batch in rest} == {(1, 1, 4)[dist.get_rank()]}
    whole = [row for mine in _all_ranks(first + rest) for batch in mine for row in batch]
    assert len(set(whole)) == len(whole) == 48


# --- measured shares --------------------------------------------------------------------------------------------------


def _told(model: Any) -> dict[str, float]:
    """Let the clock of this rank tell what a test says."""
    told = {"seconds": 0.0}

    def end_step(tokens: int) -> float:
        return told["seconds"]

    model.towpath_engine.shares._clock.end_step = end_step
    return told


def _train_one(model: Any, rows: int) -> None:
    towpath.weigh(model, model(torch.ones(rows, 6)).square().mean(), rows).backward()
    model.zero_grad()


def test_measured_shares_change_on_all_ranks_at_once(world: Worlds) -> None:
    assert world(3).run(_measured)[0] == [
        "shares 3 2 1 rows, slowest rank 0.6 → 0.3 s a step",
        "shares 1 2 3 rows, slowest rank 0.9 → 0.3 s a step",
    ]


def _measured() -> list[str]:
    """Samplers of some ranks are ahead, as those of loaders with workers. All samples come once all the same."""
    model, sampler = _sampled("auto", 600)
    shares, rank, said = model.towpath_engine.shares, dist.get_rank(), list[str]()
    told, shares.say = _told(model), said.append
    batches, taken = iter(sampler), list[list[int]]()

    def train(count: int, seconds: float) -> None:
        taken.extend(islice(batches, count))
        told["seconds"] = seconds
        _train_one(model, len(taken[-1]))

    for speeds, rows in (((0, 0, 0), (2, 2, 2)), ((0.1, 0.15, 0.3), (3, 2, 1)), ((0.3, 0.15, 0.1), (1, 2, 3))):
        train(1 + rank, speeds[rank])
        assert shares.rows == rows
        train(3 - rank, 0)
    taken.extend(islice(batches, 2))
    everyones = _all_ranks(taken)
    assert all(sum(len(mine[number]) for mine in everyones) == 6 for number in range(len(taken)))
    whole = [row for mine in everyones for batch in mine for row in batch]
    assert len(set(whole)) == len(whole) == 6 * len(taken)
    return said


@on_ranks(2)
def test_measured_shares_that_nothing_takes_are_refused() -> None:
    model: Any = towpath.shard(Net(), towpath.strategy("zero3", Topology(2, 1), shares="auto"))
    _told(model)["seconds"] = 0.1
    assert "nothing takes rows from it" in error_of(lambda: _train_one(model, 2))


@on_ranks(2)
def test_the_clock_runs_in_forward_and_backward_passes_with_a_graph() -> None:
    model: Any = towpath.shard(Net(), towpath.strategy("zero3", Topology(2, 1), shares="auto"))
    towpath.ShareSampler(model, 100, 2)
    clock = model.towpath_engine.shares._clock
    spans, ended = list[Any](), clock.end_step

    def end_step(tokens: int) -> float:
        spans.append([sign for _, _, sign in clock._spans if sign > 0])
        return ended(tokens)

    clock.end_step = end_step
    for _ in range(4):
        _train_one(model, 2)
        with torch.no_grad():
            model(torch.ones(2, 6))
        assert not clock.is_running
    assert spans == [[], [], [1, 1], [1, 1]]  # none while the process warms up
    model(torch.ones(2, 6))
    assert clock.is_running  # until the loss is weighed


# --- towpath train ----------------------------------------------------------------------------------------------------


def _unequal(shares: str) -> dict[str, Any]:
    return {"train": {"micro_batch": 2}, "strategy": {"nodes": "2x2", "shares": shares}}


def test_towpath_train_with_shares_trains_as_one_rank(world: Worlds, config: Any, alone: Any) -> None:
    for found in world(4).run(_steps, config(**_unequal("3,2,2,1"))):
        _near(found, alone)


def test_towpath_train_resumes_with_other_shares(world: Worlds, config: Any, alone: Any) -> None:
    steps = TINY["train"]["steps"]
    begun = config(**_unequal("3,2,2,1"), checkpoint={"resume": "auto", "every": 2})
    said = world(4).run(_stopped, begun, 2)[0]
    assert "shares 3 2 2 1 rows of a micro-batch" in said
    resumed = config(**_unequal("1,1,2,4"), checkpoint={"resume": "auto"})
    said = world(4).run(_train, resumed)[0][1]
    assert "shares 1 1 2 4 rows of a micro-batch" in said and "2 steps are done" in said
    losses = [row["loss"] for row in rows_of(resumed)]
    assert len(losses) == steps
    assert losses == pytest.approx(alone[0], abs=2e-5, rel=0)


def _stopped(config: Any, after: int) -> str:
    """Train until a signal comes after some step."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()), init_distributed() as job:
        stop = StopRequest()
        training = TrainingRun(config, job, stop)
        own = training.train_step

        def train_step() -> Any:
            if training.state.step == after - 1:
                stop.signal = SIGTERM
            return own()

        training.train_step = train_step
        training.train()
        assert training.state.step == after
    return err.getvalue()


def test_islands_of_towpath_train_log_the_mean_over_all_tokens(world: Worlds, config: Any) -> None:
    """Before the islands have trained apart, their loss is that of equal batches of the same samples."""
    found = []
    for shares in ("", "3,3,1,1"):
        strategy = {"nodes": "2x2", "name": "mics", "shares": shares, "outer": {"every": 2}}
        mine = config(train={"micro_batch": 2, "steps": 2}, strategy=strategy)
        found.append(world(4).run(_first_losses, mine)[0])
    assert found[1] == pytest.approx(found[0], abs=2e-5)


def _first_losses(config: Any) -> float:
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
        training = TrainingRun(config, job)
        training.train_step()
        loss = training.train_step().loss_of_islands
        assert loss is not None
        return loss
