"""State dicts as PyTorch's users expect them: of whole tensors, by name, on the ranks that ask for them, and back.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as pytorchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

import towpath
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_values import LiveBytes
from towpath import ShardTensor, Topology, checkpoint
from towpath.errors import CheckpointError, ShardError

SHAPE = Topology(2, 1)
WIDTH = 5

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _both(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> tuple[Any, Any]:
    whole = checkpoint.get_model_state_dict(model, options=options)
    return whole, checkpoint.get_optimizer_state_dict(model, optimizer, options=options)


class Net(nn.Module):
    """Tied, frozen, a scalar, a buffer, and three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.linspace(-1, 1, WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.first(x) + self.fixed
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x) * self.gain


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),  # has a number of its own beside `step`
}


class Run:
    """A model and its optimizer of two groups, sharded or, under no label, whole and fed with all ranks' batches."""

    def __init__(self, label: str | None, optimizer: str = "adamw", seed: int = 3, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net().double()
        self.label = label
        if label is not None:
            towpath.shard(self.model, strategy_of(label, SHAPE), topology=SHAPE, **options)
        blocks = {"params": list(self.model.blocks.parameters()), "lr": 3e-2}
        others = [self.model.first.weight, self.model.gain, self.model.fixed]
        self.optimizer = OPTIMIZERS[optimizer]([{"params": others}, blocks])

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            batches = [_batch(rank, step) for rank in range(SHAPE.world)]
            batch = torch.cat(batches) if self.label is None else batches[dist.get_rank()]
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def _batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def _same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Structure, names in their order, dtypes and values."""
    assert type(found) is type(expected) or isinstance(found, dict)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _same(found[key], expected[key], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            _same(*pair, tolerance)
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert not found.numel() or (found - expected).abs().max() <= tolerance
    else:
        assert found == expected


# --- what one gets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_they_are_what_pytorch_gives_for_the_whole_model(world: Worlds, optimizer: str) -> None:
    world(2).run(_get_as_pytorch, optimizer)


def _get_as_pytorch(optimizer: str) -> None:
    plain, sharded = Run(None, optimizer), Run("zero3", optimizer)
    for run in (plain, sharded):
        run.train(range(3))
    for flat in (False, True):
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        found, expected = (
            given.get_optimizer_state_dict(run.model, run.optimizer, options=options)
            for given, run in ((checkpoint, sharded), (pytorchs, plain))
        )
        if not flat:  # PyTorch's are in the order of the groups; by name it does not matter
            found["state"], expected["state"] = (dict(sorted(each["state"].items())) for each in (found, expected))
        _same(found, expected, 1e-12)
    model, _ = _both(sharded.model, sharded.optimizer, options=FULL)
    _same(model, pytorchs.get_model_state_dict(plain.model), 1e-12)
    assert model["first.weight"] is model["last.weight"]
    assert model["seen"].data_ptr() != sharded.model.seen.data_ptr()
    trained = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    assert model.keys() - checkpoint.get_model_state_dict(sharded.model, options=trained).keys() == {"fixed"}


@pytest.mark.parametrize("label", ["zero3", "mics:1x1", "zero++"])
def test_rank_0_alone_gets_them_on_the_cpu_or_every_rank_does(world: Worlds, label: str) -> None:
    """Also where codecs round what travels and bf16 computes: the values are the masters."""
    world(2).run(_who_gets_what, label)


def _who_gets_what(label: str) -> None:
    run = Run(label, precision=towpath.Precision(params="bfloat16"))
    run.train(range(1))
    expected = {name: p.full_tensor().detach() for name, p in run.model.named_parameters()}
    for options, has in ((FULL, True), (ON_RANK_0, dist.get_rank() == 0)):
        found = checkpoint.get_model_state_dict(run.model, options=options)
        assert bool(found) == has and all(torch.equal(found[name], value) for name, value in expected.items() if has)
        assert not any(isinstance(value, ShardTensor) for value in found.values())
        assert bool(checkpoint.get_optimizer_state_dict(run.model, run.optimizer, options=options)) == has
    assert all(isinstance(checkpoint.get_model_state_dict(run.model)[name], ShardTensor) for name in expected)


def test_getting_them_changes_nothing(world: Worlds) -> None:
    """Not before the first step either, where PyTorch's own would step the optimizer."""
    world(2).run(_get_and_go_on)


def _get_and_go_on() -> None:
    run, other = Run("zero3"), Run("zero3")
    for step in range(3):
        _both(run.model, run.optimizer, options=ON_RANK_0)
        assert run.train(range(step, step + 1)) == other.train(range(step, step + 1))


# --- and back ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@in_turn(["zero1", "zero3"], 1)
def test_training_goes_on_from_them_under_another_strategy_as_in_one_process(
    world: Worlds, optimizer: str, label: str
) -> None:
    world(2).run(_go_on, optimizer, label)


def _go_on(optimizer: str, label: str) -> None:
    plain, sharded = Run(None, optimizer), Run("zero3", optimizer)
    for run in (plain, sharded):
        run.train(range(2))
    model, state = _both(sharded.model, sharded.optimizer, options=ON_RANK_0)
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flattened = checkpoint.get_optimizer_state_dict(sharded.model, sharded.optimizer, options=flat)
    resumed, again = (Run(label, optimizer, seed=4) for _ in range(2))
    again.train(range(1))  # it has states of its own already
    stepped = resumed.optimizer.register_step_pre_hook(lambda *_: pytest.fail("PyTorch's own would step it"))
    for run, states in ((resumed, state), (again, flattened)):
        options = FROM_RANK_0 if states is state else FULL
        checkpoint.set_model_state_dict(run.model, model, options=FROM_RANK_0)
        checkpoint.set_optimizer_state_dict(run.model, run.optimizer, states, options=options)
        assert [g["lr"] for g in run.optimizer.param_groups] == [1e-2, 3e-2]
    stepped.remove()
    losses = [run.train(range(2, 4)) for run in (sharded, resumed, again)]
    assert losses[1] == losses[2] == pytest.approx(losses[0], abs=1e-12)
    assert label != "zero3" or losses[0] == losses[1]
    plain.train(range(2, 4))
    found = checkpoint.get_model_state_dict(resumed.model, options=FULL)
    _same(found, plain.model.state_dict() | {"seen": found["seen"]}, 1e-12)


def test_they_load_into_a_whole_model_and_from_one(world: Worlds) -> None:
    world(2).run(_to_and_from_whole)


def _to_and_from_whole() -> None:
    plain, sharded = Run(None), Run("paro-iig", seed=4)
    plain.train(range(2))
    model, state = pytorchs.get_state_dict(plain.model, plain.optimizer)
    checkpoint.set_optimizer_state_dict(sharded.model, sharded.optimizer, state, options=FULL)
    keys = checkpoint.set_model_state_dict(sharded.model, model, options=FULL)
    assert keys.missing_keys == keys.unexpected_keys == []
    back = Run(None, seed=5)
    given = _both(sharded.model, sharded.optimizer, options=FULL)
    # Of a model without ShardTensors they are PyTorch's own.
    checkpoint.set_optimizer_state_dict(back.model, back.optimizer, given[1], options=FULL)
    checkpoint.set_model_state_dict(back.model, given[0], options=FULL)
    assert plain.train(range(2, 4)) == back.train(range(2, 4))


def test_a_tensor_parallel_model_gives_whole_tensors_too(world: Worlds) -> None:
    found = world(4).run(_get_tensor_parallel)
    assert found == [True, False, False, False]


def _get_tensor_parallel() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    towpath.shard(model, "zero3", mesh=mesh["data"], topology=SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    _same(checkpoint.get_model_state_dict(model, options=FULL), expected)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    values, states = _both(model, optimizer, options=FULL)
    values = {name: value + 1 for name, value in values.items()}
    checkpoint.set_optimizer_state_dict(model, optimizer, states, options=FULL)
    checkpoint.set_model_state_dict(model, values, options=FULL)
    _same(_both(model, optimizer, options=FULL), (values, states))
    return bool(checkpoint.get_model_state_dict(model, options=ON_RANK_0))


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_no_rank_holds_more_than_one_unit_beside_its_shards_and_the_dict(world: Worlds) -> None:
    """Counted of every tensor that is made meanwhile."""
    peaks = world(2).run(_peaks)
    told = 1024  # what the ranks tell one another at the beginning, of which gloo lets go when it likes
    for rank, (unit, model, states, peak_of_model, peak_of_states) in enumerate(peaks):
        assert peak_of_model <= unit + told + model * (rank == 0)
        assert peak_of_states <= unit + told + states * (rank == 0)
        assert peak_of_model > model * (rank == 0), "nothing was counted"


def _peaks() -> tuple[int, ...]:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(64, 32), nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))))
    towpath.shard(model, "zero3", topology=SHAPE, units=list(model[1]))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    largest = max(sum(b.plan.numel for b in unit.buckets) for unit in model.towpath_engine.units) * 4
    whole = sum(p.numel() for p in model.parameters()) * 4
    steps = 4 * sum(1 for _ in model.parameters())
    with LiveBytes() as of_model:
        checkpoint.get_model_state_dict(model, options=ON_RANK_0)
    with LiveBytes() as of_states:
        checkpoint.get_optimizer_state_dict(model, optimizer, options=ON_RANK_0)
    return largest, whole, 2 * whole + steps, of_model.most, of_states.most


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_slices_from_pytorchs_own_are_refused_where_used(world: Worlds) -> None:
    world(2).run(_call_pytorchs)


def _call_pytorchs() -> None:
    """PyTorch's own functions know DTensors only. What they return or load raises an error with the name of ours."""
    run = Run("zero3")
    run.train(range(1))
    state = checkpoint.get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    for model in (run.model, torch.compile(run.model, backend="eager")):
        for options in (FULL, ON_RANK_0):
            for found in (
                pytorchs.get_model_state_dict(model, options=options),
                pytorchs.get_optimizer_state_dict(model, run.optimizer, options=options),
            ):
                if dist.get_rank() and options is ON_RANK_0:
                    assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(found))
                    continue
                with pytest.raises(ShardError, match=r"get_model_state_dict\(model.*get_optimizer_state_dict"):
                    torch.save(found, io.BytesIO())
    before = [p.to_local().clone() for p in run.model.parameters()]
    pytorchs.set_optimizer_state_dict(run.model, run.optimizer, copy.deepcopy(state), options=FULL)
    with pytest.raises(ShardError, match=r"call towpath\.checkpoint\.set_optimizer_state_dict"):
        run.train(range(1, 2))
    assert all(torch.equal(p.to_local(), b) for p, b in zip(run.model.parameters(), before, strict=True))
    run.optimizer.zero_grad()
    checkpoint.set_optimizer_state_dict(run.model, run.optimizer, state, options=FULL)
    whole = checkpoint.get_model_state_dict(run.model, options=FULL)
    pytorchs.set_model_state_dict(run.model, whole, options=FULL)  # whole tensors go into slices
    with towpath.full_parameters(run.model):
        _same(pytorchs.get_model_state_dict(run.model, options=FULL), whole)
        with pytest.raises(CheckpointError, match=r"inside towpath.full_parameters\(\)"):
            checkpoint.get_model_state_dict(run.model, options=FULL)
    with pytest.raises(ShardError, match=r"For torch.save.*get_optimizer_state_dict\(model, optimizer"):
        torch.save(run.optimizer.state_dict(), io.BytesIO())
    torch.save(state, io.BytesIO())
    for sharded in (pytorchs.get_optimizer_state_dict(run.model, run.optimizer),):  # as they go to dcp.save
        checkpoint.set_optimizer_state_dict(run.model, run.optimizer, sharded)
    run.train(range(1, 2))


def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(world: Worlds) -> None:
    world(2).run(_fail_alike)


def _fail_alike() -> None:
    run, rank = Run("zero3"), dist.get_rank()
    run.train(range(1))
    model, state = _both(run.model, run.optimizer, options=ON_RANK_0)
    with pytest.raises(ShardError, match=r"rank 1 has 'nothing more'.*set broadcast_from_rank0=True"):
        checkpoint.set_model_state_dict(run.model, model, options=FULL)
    with pytest.raises(ShardError, match=r"'state\.first.*rank 1 has 'nothing more'.*set broadcast_from_rank0=True"):
        checkpoint.set_optimizer_state_dict(run.model, run.optimizer, state, options=FULL)
    with pytest.raises(CheckpointError, match="got ShardTensors with full_state_dict=True"):
        sharded = checkpoint.get_model_state_dict(run.model)
        checkpoint.set_model_state_dict(run.model, {} if rank else sharded, options=FROM_RANK_0)
    run.model.blocks._fqn_modifiers = dict
    with pytest.raises(CheckpointError, match=r"blocks has _fqn_modifiers\(\), which renames parameters"):
        checkpoint.get_optimizer_state_dict(run.model, run.optimizer, options=FULL)
    del run.model.blocks._fqn_modifiers
    other = Run("zero3").optimizer
    with pytest.raises((CheckpointError, ShardError), match=r"group 0 of the optimizer.*pass the optimizer of this"):
        checkpoint.get_optimizer_state_dict(run.model, other if rank else run.optimizer, options=FULL)
    model.pop("gain", None)
    with pytest.raises(RuntimeError, match=r"Missing key.*gain"):
        checkpoint.set_model_state_dict(run.model, model, options=FROM_RANK_0)
    if rank == 0:
        model["first.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        checkpoint.set_model_state_dict(run.model, model, options=FROM_RANK_0)
    if rank == 0:
        del model["first.weight"]
        del state["state"]["gain"]
    loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    assert checkpoint.set_model_state_dict(run.model, model, options=loose).missing_keys == ["gain", "first.weight"]
    with pytest.raises(RuntimeError, match="Missing optimizer state for parameter 'gain'"):
        checkpoint.set_optimizer_state_dict(run.model, run.optimizer, state, options=FROM_RANK_0)
    checkpoint.set_optimizer_state_dict(run.model, run.optimizer, state, options=loose)
    run.train(range(1, 2))
