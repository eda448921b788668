"""Every elementwise optimizer of PyTorch trains a sharded model as one process would; the others are refused.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import towpath
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.test_never_silent import Net, _loss
from tests.ranks.test_owner_stepped import OneStepSize
from tests.ranks.twin import Twin
from towpath import checkpoint
from towpath.errors import ShardError

Make = Callable[[Any], optim.Optimizer]

SHAPE = towpath.Topology(2, 1)

# Large enough steps that a state which is lost, or of another slice, shows.
ELEMENTWISE: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.1}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}
PARTS = 2  # of the cases, each with every optimizer: `make test` runs one

FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def _cases(part: int) -> Iterator[tuple[str, Make]]:
    for number, (name, (kind, options)) in enumerate(ELEMENTWISE.items()):
        switches = [{"foreach": False}, {"foreach": True}]
        # Of Nesterov and amsgrad the fused ones, too.
        switches += [{"fused": True}] if kind in FUSED and "lr_decay" not in options else []
        for switch in switches[(number + part) % PARTS :: PARTS]:
            words = ", ".join(f"{key}={value}" for key, value in switch.items())
            yield f"{name}, {words}", lambda p, kind=kind, all_=options | switch: kind(p, **all_)


@in_turn(range(PARTS), 1, "part")
@on_ranks(2)
def test_every_elementwise_optimizer_trains_exactly_saved_and_resumed(tmp_path: Path, part: int) -> None:
    """Two steps; saved; a new model, sharded by another strategy, goes on for two more from what was saved.

    What is saved does not depend on how an optimizer runs: its first way is saved, the others train on.
    """
    labels = ("zero3", "paro-iig", "zero1", "mics")
    assert sum(1 for _ in _cases(part)) >= len(ELEMENTWISE)
    for number, (case, make) in enumerate(_cases(part)):
        twin = _twin(labels[number % len(labels)], make)
        twin.train(2)
        if "foreach=False" in case:
            twin = _resumed(twin, tmp_path / str(number), labels[(number + 1) % len(labels)], make)
        for step in (2, 3):
            twin.backward(step)
            twin.step()
        try:
            twin.check_parameters()
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _resumed(twin: Twin, folder: Path, label: str, make: Make) -> Twin:
    assert checkpoint.save(folder, 2, checkpoint.State(twin.sharded, twin.optimizer)).ok
    resumed = _twin(label, make)
    resumed.plain, resumed.plain_optimizer = twin.plain, twin.plain_optimizer
    loaded = checkpoint.load(folder, checkpoint.State(resumed.sharded, resumed.optimizer))
    assert loaded is not None and loaded.step == 2
    return resumed


def _twin(label: str, make: Make) -> Twin:
    twin = Twin(Net, _loss, label, SHAPE)
    twin.optimizer, twin.plain_optimizer = make(twin.sharded.parameters()), make(twin.plain.parameters())
    return twin


class KeepsPlainStates(optim.Optimizer):
    """As SM3: its states are plain tensors, made by their shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["sums"] = torch.zeros(p.shape, dtype=p.dtype)
            state["sums"] += p.grad
            p -= 0.1 * state["sums"]


REFUSED: dict[str, tuple[Make, str]] = {
    **{
        name: (make, rf"{name} works on full tensors.*towpath.optim.owner_stepped\({name}\(.*take an elementwise")
        for name, make in {
            "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.01),
            "Muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2], lr=0.01),
            "LBFGS": lambda ps: optim.LBFGS(ps, lr=0.1),
        }.items()
    },
    # What couples parameters is not sent to owner_stepped(), which would refuse it.
    "OneStepSize": (
        OneStepSize,
        r"OneStepSize works on .*owner_stepped\(OneStepSize.* cannot step it either",
    ),
    "KeepsPlainStates": (KeepsPlainStates, r"If KeepsPlainStates made it itself: Call towpath.optim.owner_stepped\("),
}


@on_ranks(2)
def test_what_needs_whole_matrices_is_refused_at_its_first_step_with_what_to_do() -> None:
    for name, (make, words) in REFUSED.items():
        twin = _twin("zero3", lambda ps: optim.SGD(ps, lr=0.1))
        before = [p.to_local().clone() for p in twin.sharded.parameters()]
        twin.backward()
        optimizer = make(list(twin.sharded.parameters()))
        with pytest.raises(ShardError, match=words):
            optimizer.step(lambda: torch.zeros(())) if name == "LBFGS" else optimizer.step()
        assert all(torch.equal(p.to_local(), b) for p, b in zip(twin.sharded.parameters(), before, strict=True)), name


@on_ranks(2)
def test_stats_count_the_states_of_combined_optimizers_once() -> None:
    twin = _twin("zero3", lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9))
    assert towpath.stats(twin.sharded).memory_bytes["optimizer"] == 0
    first, *others = twin.sharded.parameters()
    twin.optimizer = towpath.optim.chain(*(optim.SGD(ps, lr=0.1, momentum=0.9) for ps in ([first], others)))
    twin.train(1)
    held = sum(p.to_local().nbytes for p in (first, *others))
    assert towpath.stats(twin.sharded).memory_bytes["optimizer"] == held
