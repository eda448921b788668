"""`shard(values=…)`: every rank asks for what it holds, and for nothing else.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import towpath
from tests.ranks.models import MODELS, GPTBlock, TiedGPT
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.twin import error_of
from towpath import Topology, errors

SHAPE = Topology(2, 2)
LABELS = ("ddp", "zero1", "zero3", "hpz", "mics:2x1", "paro-iig", "zero++")
labels = in_turn(LABELS, 1)


def _whole() -> dict[str, Tensor]:
    """A model's values, alike on every rank; the tied head is not among them."""
    return _distinct(MODELS["gpt"].make(torch.float32))


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
@on_ranks(4)
def test_the_model_has_the_values_and_computes_with_them(device: str, params: torch.dtype | None, label: str) -> None:
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
    bf16 = torch.bfloat16
    for label, params, times in (("zero3", None, 1), ("zero3", bf16, 1), ("zero1", bf16, 5), ("ddp", None, 4)):
        asked = world(4).run(_count_what_is_asked, label, params)
        assert sum(asked) == times * numel
        assert max(asked) <= numel * times / 4 * 1.1  # padding is shared out too


def _count_what_is_asked(label: str, params: torch.dtype | None) -> int:
    asked = Asked()
    towpath.shard(_from("meta"), strategy_of(label, SHAPE), precision=towpath.Precision(params=params), values=asked)
    return asked.elements.total()


class Rotary(nn.Module):
    """Has a persistent buffer that no method initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("angles", torch.arange(5.0))


class Normed(nn.Module):
    """With persistent buffers, one of them a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rotary = nn.BatchNorm1d(6), Rotary()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@on_ranks(4)
def test_persistent_buffers_come_from_the_same_source_if_it_knows_them() -> None:
    known = {
        **dict(Normed().named_parameters()),
        "norm.running_mean": torch.full((6,), 5.0),
        "norm.num_batches_tracked": torch.tensor([7]),
        "rotary.angles": torch.full((5,), 9.0),  # needs no reset_parameters() then
    }
    with torch.device("meta"):
        model = Normed()
    values = {name: value.detach().flatten() for name, value in known.items()}
    sharded: Any = towpath.shard(model, "zero3", topology=SHAPE, values=lambda n, start, end: values[n][start:end])
    norm = sharded.norm
    (mean, variance, tracked) = norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()
    assert (mean, variance, tracked) == ([5.0] * 6, [1.0] * 6, 7)
    assert sharded.rotary.angles.tolist() == [9.0] * 5


class Gain(nn.Module):
    """Has a parameter that no method initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("make, name", [(Rotary, "angles"), (Gain, "gain")])
@on_ranks(2)
def test_meta_tensors_on_rank_0_alone_are_refused_on_all(make: Callable[[], nn.Module], name: str) -> None:
    with torch.device("cpu" if dist.get_rank() else "meta"):
        model = make()
    message = error_of(lambda: towpath.shard(model, "zero3", topology=Topology(1, 2)), errors.TowpathError)
    dist.barrier()  # a rank that still waits in shard() would meet this
    assert f"{name} is on the meta device" in message
    assert f".{name}" not in message


def _broken(name: str, start: int, end: int) -> Tensor:
    raise OSError("the disk is gone")


FAULTS: dict[str, tuple[Callable[[str, int, int], Tensor], str]] = {
    "unknown": (lambda name, start, end: {}[name], "KeyError.*named_parameters"),
    "too long": (lambda name, start, end: torch.zeros(end - start + 1), "shape.*expected|expected.*shape"),
    "whole numbers": (lambda name, start, end: torch.zeros(end - start, dtype=torch.long), "torch.int64.*floating"),
    "broken": (_broken, "OSError.*the disk is gone"),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(4)
def test_what_is_wrong_with_values_is_said(fault: str) -> None:
    values, words = FAULTS[fault]
    text = error_of(lambda: towpath.shard(_from("meta"), "zero3", topology=SHAPE, values=values), errors.ShardError)
    assert re.search(words, text, re.DOTALL), text
    if fault == "unknown" and dist.get_rank() == 0:  # a tied parameter is told by all its names
        assert "'tokens.weight' or 'head.weight'" in text


@on_ranks(4)
def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    values = _broken if dist.get_rank() == 2 else Asked()
    text = error_of(lambda: towpath.shard(_from("meta"), "zero3", topology=SHAPE, values=values), errors.ShardError)
    assert "the disk is gone" in text and ("rank 2" in text) == (dist.get_rank() != 2)


# --- a model that only rank 0 holds -----------------------------------------------------------------------------------


class Bare(TiedGPT):
    """Modules that cannot initialize themselves: a parameter and buffers without `reset_parameters`."""

    def __init__(self, layers: int = 2, width: int = 12) -> None:
        super().__init__(layers, width)
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("angles", torch.randn(5), persistent=False)


@labels
@on_ranks(4)
def test_ranks_on_the_meta_device_take_rank_0s_values(label: str) -> None:
    torch.manual_seed(3)
    whole = Bare()
    torch.manual_seed(3)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        made = Bare()
    model: Any = towpath.shard(made, strategy_of(label, SHAPE))
    assert model.head.weight is model.tokens.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


class LiveBytes(TorchDispatchMode):
    """Counts the bytes in host memory of tensors that are made inside and alive, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self._storages((args, kwargs))}
        for storage in self._storages(out):
            if storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                if func is torch.ops.aten.set_.source_Storage:  # safetensors maps the file
                    continue
                self._add(storage.nbytes())
                weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes()).atexit = False
        return out

    @staticmethod
    def _storages(tensors: Any) -> list[Any]:
        leaves = [t for t in tree_leaves(tensors) if type(t) in (Tensor, nn.Parameter)]  # a ShardTensor has no memory
        return [t.untyped_storage() for t in leaves if not t.is_meta]

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("how", ["rank 0", "folder", "modules"])
def test_no_rank_holds_more_than_a_unit_beyond_its_shards(world: Worlds, tmp_path: Path, how: str) -> None:
    """Memory for gradients and for unsharded units counts, too. What rank 0 has loaded is freed unit by unit."""
    for rank, (most, shards, unit, whole) in enumerate(world(2).run(_watch_loading, how, tmp_path)):
        loaded = whole if how == "rank 0" and rank == 0 else 0
        assert most <= max(loaded, 2 * shards) + 4 * unit
        assert whole > 15 * unit


def _watch_loading(how: str, folder: Path) -> tuple[int, int, int, int]:
    def make() -> nn.Module:
        return TiedGPT(layers=16, width=64)

    if how == "folder":
        if dist.get_rank() == 0:
            save_file(_distinct(make()), folder / "model.safetensors")
        dist.barrier()
    live = LiveBytes()
    with live:
        values = folder if how == "folder" else None
        with torch.device("meta" if how != "rank 0" or dist.get_rank() else "cpu"):
            model = make()
        sharded: Any = towpath.shard(model, "zero3", topology=Topology(1, 2), units=[GPTBlock], values=values)
    unit = max(4 * sum(bucket.plan.numel for bucket in unit.buckets) for unit in sharded.towpath_engine.units)
    whole = sum(p.numel() for p in sharded.parameters()) * 4
    shards = sum(p.to_local().numel() for p in sharded.parameters()) * 4
    return live.most, shards, unit, whole


# --- files ------------------------------------------------------------------------------------------------------------


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """A state dict whose tied parameters have one name, as safetensors wants it."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@labels
@on_ranks(4)
def test_a_folder_of_safetensors_gives_the_values(tmp_path: Path, label: str) -> None:
    if dist.get_rank() == 0:
        save_file(_whole(), tmp_path / "model.safetensors")
    dist.barrier()
    model: Any = towpath.shard(_from("meta"), strategy_of(label, SHAPE), values=str(tmp_path))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), _whole()[name]), name


@pytest.mark.parametrize(
    ("make", "name", "shape", "words"),
    [
        (TiedGPT, "norm.weight", (2, 6), "norm.weight.*2×6"),
        (Normed, "norm.running_mean", (7,), "norm.running_mean"),
        (Normed, "norm.running_mean", (2, 3), "norm.running_mean"),  # as many elements
        (TiedGPT, "", (), "absent"),
    ],
    ids=["a parameter", "a larger buffer", "a buffer of another shape", "a missing folder on one rank"],
)
@on_ranks(2)
def test_files_that_do_not_fit_are_refused_on_all_ranks(
    tmp_path: Path, make: Callable[[], nn.Module], name: str, shape: tuple[int, ...], words: str
) -> None:
    given = tmp_path / ("absent" if dist.get_rank() and not name else "here")
    if dist.get_rank() == 0:
        given.mkdir()
        values = _distinct(make()) | dict(make().named_buffers())
        save_file(values | ({name: torch.ones(shape)} if name else {}), given / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = make()
    with pytest.raises(errors.TowpathError, match=f"(?s){words}"):
        towpath.shard(model, "zero3", topology=Topology(1, 2), values=given)


# --- another device ---------------------------------------------------------------------------------------------------


class Metric(nn.Module):
    """Has a tensor that is no buffer, as the metrics of torchmetrics have, and moves it along."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.total = fn(self.total)
        return super()._apply(fn, recurse)


def test_a_model_is_moved_to_the_device_as_it_is_sharded() -> None:
    """The meta device stands for a GPU: this is one rank without a process group."""
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.norm, model.rnn, model.metric = nn.BatchNorm1d(4), nn.LSTM(4, 4), Metric()
    weight = model.blocks[0].weight
    towpath.shard(model, "ddp", device="meta")
    assert model.blocks[0].weight is weight
    tensors = [*model.parameters(), *model.buffers(), *model.rnn._flat_weights, model.metric.total]
    assert {t.device.type for t in tensors} == {"meta"}
