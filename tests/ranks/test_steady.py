"""The steady state: from the third step on a step allocates no buffer, and the peak is what the schedule says."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.models import MODELS, TiedGPT
from tests.ranks.server import on_ranks, run_ranks
from tests.ranks.strategies import seldom, strategy_of
from tests.ranks.twin import accumulating
from towpath.engine.agree.digest import KEPT

SHAPE = towpath.Topology(2, 2)
LABELS = ("ddp", "zero2", "zero3", "hpz", "mics", "paro-iig", "paro-nig")
MIXED = towpath.Precision(params=torch.bfloat16, reduce=torch.float32)


class Checkpointed(TiedGPT):
    """Four blocks, so that units take turns in their slots; the middle ones are recomputed."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i in (1, 2) else block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("micro_steps, precision", [seldom(1, MIXED), (3, towpath.Precision())], ids=["bf16", "fp32"])
@on_ranks(SHAPE.world)
def test_after_the_second_step_no_buffer_is_made(
    micro_steps: int, precision: towpath.Precision, whole_product: bool
) -> None:
    for label in LABELS if whole_product else ("zero3", "paro-iig"):
        model: Any = towpath.shard(Checkpointed(), strategy_of(label, SHAPE), precision=precision)
        # Gradients that are kept and zeroed are as steady as those that are dropped.
        optimizer = torch.optim.AdamW(model.parameters())
        train = partial(_train, model, optimizer, micro_steps=micro_steps, drop_gradients=micro_steps == 1)
        train(2)
        after_two = towpath.stats(model).buffers_made
        assert after_two > 0, label
        with _engine_allocations() as allocations:
            train(1)
            _evaluate(model)
            train(2)
        assert towpath.stats(model).buffers_made == after_two, label
        # And, so as not to ask the engine about itself: what it asked PyTorch for.
        assert not allocations, (label, allocations)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int, *, micro_steps: int, drop_gradients: bool) -> None:
    for step in range(steps):
        for micro in accumulating(model, micro_steps):
            _loss(model, micro, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=drop_gradients)


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        _loss(model, 0, 0)
    with torch.inference_mode():
        _loss(model, 0, 0)
    model.train()


def _loss(model: nn.Module, micro: int, step: int) -> Tensor:
    entry = MODELS["gpt"]
    return entry.loss(model, *entry.micro_batch(dist.get_rank(), micro, step, torch.float32))


@contextmanager
def _engine_allocations() -> Iterator[list[str]]:
    """The lines of the engine and its collectives that make a tensor with memory of its own."""
    owners = {torch: ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "cat"), Tensor: ("clone",)}
    originals = {(owner, name): getattr(owner, name) for owner, names in owners.items() for name in names}
    made: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            module = caller.f_globals["__name__"]
            # The norm of clipping is made of numbers, one for each parameter: no buffers.
            if module.startswith(("towpath.engine", "towpath.collectives")) and not module.endswith(".partial_sums"):
                made.append(f"{module}:{caller.f_lineno}")
            return original(*args, **kwargs)

        return call

    for (owner, name), original in originals.items():
        setattr(owner, name, noting(original))
    try:
        yield made
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


# --- inference --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_any_number_of_forward_passes_without_a_graph_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = towpath.shard(nn.Sequential(blocks, nn.Linear(4, 2)), "zero3", topology=towpath.Topology(2, 1))
    x = torch.ones(1, 4)
    for _ in range(3):
        model(x).sum().backward()
    last_step = towpath.stats(model).last_step
    held: list[dict[str, int]] = []
    for count in (100, KEPT + 100):
        with torch.no_grad():
            for _ in range(count):
                model(x)
        held.append(_held_by(model.towpath_engine))
    # The collective log drops its oldest entries now and then: what it keeps goes up and down below a bound.
    # An entry has three items, and is in a pair, in a list.
    kept = [each.pop("CollectiveLog") for each in held]
    assert max(kept) < 6 * 2 * KEPT + 100, kept
    assert held[0] == held[1], {k: (held[0].get(k), v) for k, v in held[1].items() if held[0].get(k) != v}
    model(x).sum().backward()
    # The root's weights are whole since the first of these passes; all else of the step is as it was.
    assert towpath.stats(model).last_step == last_step[1:] and not last_step[0].unit


def _held_by(root: object) -> dict[str, int]:
    """How many items the containers that our own objects hold have together, by the class of the object."""
    counts: dict[str, int] = {}
    seen: set[int] = set()
    pending: list[tuple[object, str]] = [(root, "")]
    while pending:
        thing, owner = pending.pop()
        if id(thing) in seen or isinstance(thing, (type, nn.Module, Tensor)):
            continue
        seen.add(id(thing))
        if isinstance(thing, (list, tuple, set, frozenset, dict, deque)):
            counts[owner] = counts.get(owner, 0) + len(thing)
        elif not type(thing).__module__.startswith("towpath"):
            continue
        else:
            owner = type(thing).__qualname__
        pending += [(referent, owner) for referent in gc.get_referents(thing)]
    return counts


# --- peak memory -----------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    """Two parameters of a megabyte."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


WIDTH, DEPTH = 512, 60


@pytest.mark.parametrize(
    ("label", "shape"),
    [
        ("zero3", towpath.Topology(2, 1)),
        *(seldom(label, SHAPE) for label in ("zero3", "hpz", "zero2", "mics", "paro-iig")),
    ],
    ids=str,
)
def test_peak_memory_is_what_the_schedule_says(label: str, shape: towpath.Topology) -> None:
    """Over whole steps, with no activations to speak of. In a world of its own: memory is a process's."""
    for found, expected in run_ranks(_peak_memory, shape.world, label, shape):
        assert abs(found / expected - 1) < 0.05, (label, found, expected)


def _peak_memory(label: str, shape: towpath.Topology) -> tuple[int, int]:
    # Give every large tensor pages of its own, as malloc does with all above 32 megabytes; else what is resident
    # depends on which of the model's freed tensors left holes in the heap.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 * 1024) == 1
    strategy = strategy_of(label, shape)
    _run(_sharded(2, strategy))  # code and threads are not counted
    gc.collect()
    before = _resident("VmRSS")
    model = _sharded(DEPTH * shape.world // SHAPE.world, strategy)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: what building takes is another matter
    optimizer = _run(model)
    schedule = towpath.schedule(strategy, model)
    expected = sum(schedule.memory_bytes().values()) + sum(schedule.buffer_bytes().values())
    expected += sum(
        value.to_local().nbytes
        for states in optimizer.state.values()
        for value in (states["exp_avg"], states["exp_avg_sq"])
    )
    return _resident("VmHWM") - before, expected


_MMAP_THRESHOLD = -3


def _sharded(depth: int, strategy: towpath.Strategy) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(depth)))
    return towpath.shard(model, strategy)


def _run(model: nn.Module) -> torch.optim.Optimizer:
    """Two steps: the second has the optimizer's states from its beginning."""
    # `foreach` would make temporaries as large as all parameters of this rank.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


class Shift(nn.Module):
    """A block of whose input autograd keeps nothing."""

    def __init__(self, entered: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))
        self.entered = entered

    def forward(self, x: Tensor) -> Tensor:
        self.entered.append(weakref.ref(x))
        return x + self.bias


@on_ranks(2)
def test_a_units_inputs_live_no_longer_than_autograd_needs_them() -> None:
    """How many units a forward pass entered, and how many of their inputs are still there while a graph is."""
    entered: list[weakref.ref[Tensor]] = []
    model: Any = nn.Sequential(nn.Linear(64, 64), *(Shift(entered) for _ in range(3)))
    model = towpath.shard(model, "zero3", units=list(model)[1:])
    gc.disable()  # which would hide that something else holds them
    try:
        out = model(torch.zeros(4, 64))
        alive = sum(reference() is not None for reference in entered)
        out.sum().backward()
    finally:
        gc.enable()
    assert (len(entered), alive) == (3, 0)
