"""A live model's passes are measured unit by unit, on values of its shapes, and the model stays as it was."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from towpath.core.formats import Precision
from towpath.engine.layout import lay_out
from towpath.errors import ConfigError
from towpath.plan import choice
from towpath.plan.catalog import load_cluster
from towpath.plan.choice import line_through, profile_model
from towpath.plan.hardware import Cluster
from towpath.plan.model import LinearSeconds, Model, compute_seconds
from towpath.train.models import GPT, Shape

CPU = torch.device("cpu")
LENGTH = 16


class Block(nn.Module):
    def __init__(self, ran: Counter[str]) -> None:
        super().__init__()
        self.linear, self.ran = nn.Linear(8, 8), ran

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.ran[x.device.type if type(x) is Tensor else "traced"] += 1
        return x + scale * self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Block(self.ran) for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def ids(sequences: int) -> list[Tensor]:
    return [torch.zeros(sequences, LENGTH, dtype=torch.long)]


def measured(model: nn.Module, sizes: list[int], precision: Precision | None = None) -> Model:
    return profile_model(model, lay_out(model), ids, sizes, LENGTH, CPU, precision or Precision())


def test_every_unit_gets_the_seconds_of_its_kind_and_the_model_stays_as_it_was() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn_before = torch.random.get_rng_state()

    found = measured(model, [1, 2])

    assert all(u.measured is not None and u.measured.backward.at(LENGTH) > 0 for u in found.units)
    alike = {u.measured for u in found.units if u.modules == found.units[1].modules and u.spec.name}
    assert len(alike) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn_before)
    assert not any("forward" in block.__dict__ for block in model.blocks)


def test_the_root_runs_without_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five like units one runs, as often as may be, and none with the root."""
    monkeypatch.setattr(choice, "_SECONDS", float("inf"))  # however slow the machine
    model = Net()
    measured(model, [1])
    assert model.ran["cpu"] == 20


def test_a_model_without_memory_is_measured_and_can_be_sharded_afterwards() -> None:
    """`shard` refuses parameters that something refers to weakly."""
    with torch.device("meta"):
        model = GPT(Shape(vocabulary=64, width=16, depth=2, heads=2, hidden=32, tied=True))

    found = measured(model, [1], Precision("bfloat16"))

    gc.collect()
    assert all(p.is_meta and not weakref.getweakrefs(p) for p in model.parameters())
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_measured_seconds_take_the_place_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Net(), [1])

    def refuse(*_: Any) -> float:
        raise AssertionError("nothing is asked of the cluster")

    monkeypatch.setattr(Cluster, "flops_of", refuse)
    cluster = load_cluster("ethernet-1g")
    plain, again = (compute_seconds(found, cluster, "float32", 4 * LENGTH, ckpt) for ckpt in (False, True))

    forward = [u.measured.forward.at(4 * LENGTH) for u in found.units if u.measured is not None]
    assert plain.forward_end == forward[0] and list(plain.forward[1:]) == forward[1:]
    assert [a - b for a, b in zip(again.backward, plain.backward, strict=True)] == pytest.approx([0, *forward[1:]])


def test_a_line_goes_through_what_was_measured_and_never_below_zero() -> None:
    assert line_through([10, 20], [3.0, 5.0]) == LinearSeconds(1.0, 0.2)
    assert line_through([10], [3.0]) == LinearSeconds(0.0, 0.3)
    assert line_through([10, 20], [3.0, 2.0]) == LinearSeconds(0.0, 0.1)  # noise
    assert line_through([10, 20], [1.0, 5.0]) == LinearSeconds(0.0, 0.25)  # steeper than in proportion


def test_a_unit_that_the_inputs_do_not_reach_takes_no_time() -> None:
    class Half(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            for block in self.blocks[:3]:
                x = block(x)
            return self.head(x)

    found = measured(Half(), [1])

    reached = [u.measured.forward.at(LENGTH) > 0 for u in found.units if u.measured is not None]
    assert reached == [True, *[True] * 3, *[False] * 2]


def test_what_cannot_run_by_itself_is_named() -> None:
    class Needy(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            if type(x) is Tensor:
                raise RuntimeError("where is my mask?")
            return x

    model = Net()
    model.blocks = nn.ModuleList(Needy(model.ran) for _ in range(2))
    with pytest.raises(ConfigError, match=r"unit blocks\.0.* cannot be run by itself.*where is my mask"):
        measured(model, [1])


def test_waiting_for_a_core_is_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block takes three seconds, in two of which others have the cores."""
    now = Counter[str]()

    class Slow(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            now.update({"clock": 3, "waited": 2})
            return super().forward(x, scale=scale)

    monkeypatch.setattr(choice.time, "perf_counter", lambda: float(now["clock"]))
    monkeypatch.setattr(choice, "_waited_for_cores", lambda: float(now["waited"]))
    model = Net()
    model.blocks = nn.ModuleList(Slow(model.ran) for _ in range(2))
    _, *blocks = measured(model, [1]).units
    assert [u.measured.forward.at(LENGTH) for u in blocks if u.measured] == [1.0, 1.0]
