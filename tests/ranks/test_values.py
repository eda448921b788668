"""`shard(values=…)`: every rank asks for what it holds, and for nothing else.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import towpath
from tests.ranks.models import MODELS, TiedGPT
from tests.ranks.server import World
from tests.ranks.strategies import in_turn, strategy_of
from towpath import Topology, errors

Worlds = Callable[[int], World]

SHAPE = Topology(2, 2)
LABELS = ("ddp", "zero1", "zero3", "hpz", "mics:2x1", "paro-iig", "zero++")
labels = in_turn(LABELS, 1)


def _whole() -> dict[str, Tensor]:
    """A model's values, alike on every rank; the tied head is not among them."""
    model = MODELS["gpt"].make(torch.float32)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Asked:
    """Gives the values of `_whole`, and remembers what was asked."""

    def __init__(self) -> None:
        self.whole = _whole()
        self.elements: Counter[str] = Counter()

    def __call__(self, name: str, start: int, end: int) -> Tensor:
        found = self.whole[name].reshape(-1)[start:end]
        self.elements[name] += end - start
        return found


def _from(device: str) -> nn.Module:
    with torch.device(device):
        return TiedGPT()


@labels
@pytest.mark.parametrize("device, params", [("meta", torch.bfloat16), ("cpu", None)], ids=["meta-bf16", "cpu"])
def test_the_model_has_the_values_and_computes_with_them(
    world: Worlds, device: str, params: torch.dtype | None, label: str
) -> None:
    world(4).run(_compare_with_the_whole, device, params, label)


def _compare_with_the_whole(device: str, params: torch.dtype | None, label: str) -> None:
    precision, entry = towpath.Precision(params=params), MODELS["gpt"]
    strategy = strategy_of(label, SHAPE)
    asked = Asked()
    model: Any = towpath.shard(_from(device), strategy, precision=precision, values=asked)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), asked.whole[name]), name
    # And what it computes with is what one computes with that was given real values.
    usual: Any = towpath.shard(entry.make(torch.float32), strategy, precision=precision)
    (ids,) = entry.micro_batch(dist.get_rank(), 0, 0, torch.float32)
    assert torch.equal(model(ids), usual(ids))


def test_a_rank_asks_for_its_slices_only(world: Worlds) -> None:
    numel = sum(p.numel() for p in TiedGPT().parameters())
    for label, params, times in (("zero3", None, 1), ("zero3", torch.bfloat16, 2), ("ddp", None, 4)):
        asked = world(4).run(_count_what_is_asked, label, params)
        assert sum(asked) == times * numel
        assert max(asked) <= numel * times / 4 * 1.1  # padding is shared out too


def _count_what_is_asked(label: str, params: torch.dtype | None) -> int:
    asked = Asked()
    towpath.shard(_from("meta"), strategy_of(label, SHAPE), precision=towpath.Precision(params=params), values=asked)
    return asked.elements.total()


class Normed(nn.Module):
    """With persistent buffers, one of them a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_persistent_buffers_come_from_the_same_source_if_it_knows_them(world: Worlds) -> None:
    for mean, variance, tracked in world(4).run(_buffers_from_values):
        assert (mean, variance, tracked) == ([5.0] * 6, [1.0] * 6, 7)


def _buffers_from_values() -> tuple[list[float], list[float], int]:
    known = {
        "norm.weight": torch.ones(6),
        "norm.bias": torch.zeros(6),
        "norm.running_mean": torch.full((6,), 5.0),
        "norm.num_batches_tracked": torch.tensor([7]),
    }
    with torch.device("meta"):
        model = Normed()
    sharded: Any = towpath.shard(model, "zero3", topology=SHAPE, values=lambda n, start, end: known[n][start:end])
    norm = sharded.norm
    return norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()


def _unknown(name: str, start: int, end: int) -> Tensor:
    raise KeyError(name)


def _too_long(name: str, start: int, end: int) -> Tensor:
    return torch.zeros(end - start + 1)


def _whole_numbers(name: str, start: int, end: int) -> Tensor:
    return torch.zeros(end - start, dtype=torch.long)


def _broken(name: str, start: int, end: int) -> Tensor:
    raise OSError("the disk is gone")


FAULTS = {
    _unknown: ("'", "KeyError", "named_parameters"),
    _too_long: ("shape", "expected"),
    _whole_numbers: ("torch.int64", "floating"),
    _broken: ("the disk is gone", "OSError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_values_is_said(world: Worlds, fault: Callable[..., Tensor]) -> None:
    for message in world(4).run(_fail, fault, 0, 1, 2, 3):
        assert all(word in message for word in FAULTS[fault]), message


def test_a_tied_parameter_that_is_not_known_is_told_by_all_its_names(world: Worlds) -> None:
    assert "'tokens.weight' or 'head.weight'" in world(4).run(_fail, _unknown, 0, 1, 2, 3)[0]  # of rank 0's first slice


def test_a_failure_on_one_rank_is_raised_on_all(world: Worlds) -> None:
    for rank, message in enumerate(world(4).run(_fail, _broken, 2)):
        assert "the disk is gone" in message
        assert ("rank 2" in message) == (rank != 2)


def _fail(fault: Callable[..., Tensor], *ranks: int) -> str:
    with pytest.raises(errors.ShardError) as caught:
        towpath.shard(_from("meta"), "zero3", topology=SHAPE, values=fault if dist.get_rank() in ranks else Asked())
    return str(caught.value)


def test_values_on_some_ranks_only_are_refused(world: Worlds) -> None:
    for message in world(4).run(_only_first_has_values):
        assert "values=" in message


def _only_first_has_values() -> str:
    with pytest.raises(errors.MismatchError) as caught:
        towpath.shard(_from("cpu"), "zero3", topology=SHAPE, values=Asked() if dist.get_rank() == 0 else None)
    return str(caught.value)


SPLIT = {"0": ColwiseParallel(), "1": RowwiseParallel()}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_of_split_parameters_a_rank_asks_for_its_part_only(world: Worlds, device: str) -> None:
    asked: Counter[str] = sum(world(4).run(_split, device), Counter[str]())
    assert asked["0.weight"] == asked["1.weight"] == 6 * 8  # each element once
    assert asked["1.bias"] == 2 * 6  # once on each rank of the mesh


def _split(device: str) -> Counter[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = {"0.weight": (8, 6), "0.bias": (8,), "1.weight": (6, 8), "1.bias": (6,)}
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in values.items()}
    counts = Counter[str]()

    def asked(name: str, start: int, end: int) -> Tensor:
        counts[name] += end - start
        return whole[name].reshape(-1)[start:end]

    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model = parallelize_module(model, mesh["tp"], SPLIT)
    towpath.shard(model, "zero3", topology=Topology(1, 2), group=mesh["dp"].get_group(), values=asked)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.linear(nn.functional.linear(x, whole["0.weight"], whole["0.bias"]), whole["1.weight"])
    assert torch.allclose(model(x), expected + whole["1.bias"], atol=1e-5)
    return counts


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tensor_parallel_model_begins_alike_on_its_mesh_whatever_its_ranks_have_drawn(
    world: Worlds, device: str
) -> None:
    """Halves of a matrix are not alike, and what is replicated is."""
    for seeds in ([0, 1, 2, 3], [5, 5, 5, 5]):
        drawn = world(4).run(_drawn, device, seeds)
        assert all(torch.equal(one, other) for found in drawn for one, other in zip(drawn[0], found, strict=True))
        for matrix, dim in zip(drawn[0][:4:2], (0, 1), strict=True):
            assert not torch.equal(*matrix.chunk(2, dim))


def _drawn(device: str, seeds: list[int]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seeds[dist.get_rank()])
    with torch.device(device):
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3))  # of the last one all is on each
    model = parallelize_module(model, mesh["tp"], SPLIT)
    towpath.shard(model, "zero3", topology=Topology(1, 2), group=mesh["dp"].get_group())
    return [parameter.full_tensor().detach() for parameter in model.parameters()]
