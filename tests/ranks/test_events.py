"""The events that a steady step is made of are those that PyTorch's hooks send, for every model of these tests.

A schedule is the step machine run over such a step (`core/schedule.py`): that the engine runs the same machine makes
its transfers the schedule's, if what it is told is the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import on_ranks
from tests.ranks.strategies import strategy_of
from tests.ranks.twin import accumulating
from towpath.core.steady_step import steady_step
from towpath.core.step import StepMachine

SHAPE = towpath.Topology(2, 1)
MICRO_STEPS = 2
EVENTS = (
    *("entered", "forward_begins", "graph_made", "forward_ends", "backward_begins", "gradient_arrives"),
    *("input_gradients_done", "weight_gradients_done", "backward_pass_ended", "micro_step_ended"),
)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(SHAPE.world)
def test_the_hooks_send_the_events_of_the_steady_step(name: str) -> None:
    entry = MODELS[name]
    model: Any = towpath.shard(entry.make(torch.float64), strategy_of("zero3", SHAPE), topology=SHAPE)
    engine = model.towpath_engine
    found = _noted(engine.machine)
    for _ in range(2):
        found.clear()
        for micro in accumulating(model, MICRO_STEPS):
            entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, 0, torch.float64)).backward()
    plans = [unit.plan for unit in engine.units]
    machine = StepMachine(plans, modules=[len(unit.modules) for unit in engine.units])
    expected = _noted(machine)
    list(steady_step(machine, plans, MICRO_STEPS))
    names = [unit.name or "root" for unit in engine.units]
    told, steady = _told(found, names), _told(expected, names)
    assert told == steady, "\n".join(difflib.unified_diff(steady, told, "steady", "hooks", lineterm=""))


def _noted(machine: StepMachine) -> list[tuple[str, Any]]:
    """Each event from now on, and of which unit."""
    events: list[tuple[str, Any]] = []

    def noting(name: str) -> Callable[..., Any]:
        event = getattr(machine, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            (first,) = args or (None,)
            events.append((name, getattr(first, "unit", first)))
            return event(*args, **kwargs)

        return call

    for name in EVENTS:
        setattr(machine, name, noting(name))
    return events


def _told(events: list[tuple[str, Any]], names: list[str]) -> list[str]:
    """One for all parameters of a unit; which of them comes first, autograd decides."""
    lines: list[str] = []
    for name, unit in events:
        line = name if unit is None else f"{name} {names[unit]}"
        if name != "gradient_arrives" or line != lines[-1]:
            lines.append(line)
    return lines
