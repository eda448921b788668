"""Checkpoints of runs with outer steps: they resume bit for bit, and move to other islands and to none.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import towpath
from tests.ranks.checkpoints import Content, content, differing
from tests.ranks.islands import Islands, fragments_of, mean_gradients
from tests.ranks.models import MODELS
from tests.ranks.reference import optimizer_for
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom, strategy_of
from towpath import Outer, Topology, Transport, checkpoint
from towpath.checkpoint.exporting import export

SHAPE = Topology(2, 2)
# Exchanges begin after steps 1, 3, 4, 6, …, and are applied one step later.
STREAMING = Outer(every=3, fragments=2, delay=1, blend=0.5)
ROUNDED = replace(STREAMING, transport=Transport("flat", "int8", feedback="all"))


class _Run:
    """A sharded model with its optimizer, at some step."""

    def __init__(self, label: str, topology: Topology, outer: Outer | None, dtype: torch.dtype = torch.float32) -> None:
        self.entry, self.dtype = MODELS["gpt"], dtype
        self.model: Any = towpath.shard(self.entry.make(dtype), strategy_of(label, topology, outer=outer))
        self.optimizer = optimizer_for(self.model)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            batch = self.entry.micro_batch(dist.get_rank(), 0, step, self.dtype)
            self.entry.loss(self.model, *batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def content(self) -> Content:
        self.model.towpath_engine.sync_islands()  # exchanges of the last step begin and end
        return content(self.model, self.optimizer)

    @property
    def state(self) -> checkpoint.State:
        return checkpoint.State(self.model, self.optimizer)


@in_turn([2, 3, 4], 1, "saved_at")
@pytest.mark.parametrize("outer", [seldom(STREAMING, id="float32"), ROUNDED], ids=["float32", "int8"])
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_delay(
    outer: Outer, saved_at: int, world: Worlds, tmp_path: Path
) -> None:
    label = ("paro-iig", "ddp", "zero1")[saved_at % 3]
    ranks = world(4)
    expected = ranks.run(_train_and_save, tmp_path, label, outer, saved_at)
    for wrong in ranks.run(_resume, tmp_path, label, outer, saved_at, expected):
        assert wrong == []


def _train_and_save(root: Path, label: str, outer: Outer, saved_at: int) -> Content:
    run = _Run(label, SHAPE, outer)
    run.train(0, saved_at)
    assert checkpoint.save(root, saved_at, run.state).ok
    run.train(saved_at, 8)
    return run.content()


def _resume(root: Path, label: str, outer: Outer, saved_at: int, expected: list[Content]) -> list[str]:
    run = _Run(label, SHAPE, outer)
    run.train(0, 1)  # so that what is right afterwards was loaded
    loaded = checkpoint.load(root, run.state)
    assert loaded is not None and loaded.notes == ()
    run.train(saved_at, 8)
    return differing(run.content(), expected[dist.get_rank()])


def test_in_the_background_exchanges_do_not_change_what_is_saved(world: Worlds, tmp_path: Path) -> None:
    ranks = world(4)
    expected = ranks.run(_save_in_background, tmp_path)
    for wrong in ranks.run(_resume, tmp_path, "paro-iig", STREAMING, 4, expected):
        assert wrong == []


def _save_in_background(root: Path) -> Content:
    run = _Run("paro-iig", SHAPE, STREAMING)
    run.train(0, 4)
    saver = checkpoint.Saver(root, run.state)
    saver.save(4)
    run.train(4, 8)
    outcome = saver.close()
    assert outcome is not None and outcome.ok
    return run.content()


@pytest.mark.parametrize(
    ("topology", "outer", "note"),
    [
        (SHAPE, None, "2 islands"),
        seldom(SHAPE, replace(STREAMING, islands=1), "now there are 1"),
        (Topology(3, 1), STREAMING, "now there are 3"),
        (Topology(4, 2), STREAMING, "now there are 4"),
        seldom(SHAPE, replace(STREAMING, every=4), "has changed"),
    ],
    ids=["synchronous", "one island", "islands of one", "more islands", "another period"],
)
def test_other_islands_begin_with_the_slow_weights(
    topology: Topology, outer: Outer | None, note: str, world: Worlds, tmp_path: Path
) -> None:
    """At step 4 the second exchange of fragment 0 is under way. Its result is applied first."""
    expected = world(4).run(_save_pending, tmp_path)[0]
    found = world(topology.world).run(_load_elsewhere, tmp_path, topology, outer, expected)
    assert len({drawn for _, _, drawn in found}) == topology.world  # no two ranks draw the same random numbers
    for off, notes, _ in found:
        assert off <= 1e-9
        told = " ".join(notes)
        assert note in told
        assert "the checkpoint is of 4 ranks in 2 islands" in told or "random numbers" not in told


def _save_pending(root: Path) -> tuple[Content, Content]:
    """Save after four steps. Return the slow weights of one process, and island 0's own weights."""
    run, entry, dtype = _Run("paro-iig", SHAPE, STREAMING, torch.float64), MODELS["gpt"], torch.float64
    islands = Islands(entry.make(dtype), STREAMING, 2, fragments_of(run.model, STREAMING), optimizer_for)
    for step in range(4):
        islands.step(
            lambda island, model, step=step: mean_gradients(entry, range(2 * island, 2 * island + 2), step, dtype)(
                model
            )
        )
    run.train(0, 4)
    run.content()  # the exchange of step 4 begins
    torch.manual_seed(dist.get_rank())
    assert checkpoint.save(root, 4, run.state).ok
    islands.flush()
    return dict(islands.slow), {n: p.detach() for n, p in islands.before_flush.items()}


def _load_elsewhere(
    root: Path, topology: Topology, outer: Outer | None, expected: tuple[Content, Content]
) -> tuple[float, tuple[str, ...], float]:
    slow, own = expected
    run = _Run("zero3", topology, outer, torch.float64)
    loaded = checkpoint.load(root, run.state)
    assert loaded is not None
    drawn = torch.rand((), dtype=torch.float64).item()
    weights = own if "has changed" in " ".join(loaded.notes) else slow
    found = content(run.model)
    off = max((found[name] - weights[name]).abs().max().item() for name in weights)
    if weights is own and dist.get_rank() >= 2:
        off = 0.0  # island 1 has other weights
    run.train(4, 5)  # at its boundary, slow weights that are not in the checkpoint begin as the weights
    if outer is not None:
        parts = [part for part, _ in run.model.towpath_engine.outer.parts()]
        held = {p.shard_spec.name: s for part in parts for p, s in part.held(part.slow)}
        for name, tensor in held.items():
            mine = tensor.shard_spec.part_of(slow[name])
            off = max(off, (tensor.local - mine).abs().max().item() if mine.numel() else 0.0)
    run.train(5, 8)
    return off, loaded.notes, drawn


def test_a_synchronous_checkpoint_starts_with_slow_weights_like_its_own(world: Worlds, tmp_path: Path) -> None:
    for same in world(4).run(_from_synchronous, tmp_path):
        assert same


def _from_synchronous(root: Path) -> bool:
    before = _Run("zero3", SHAPE, None)
    before.train(0, 2)
    assert checkpoint.save(root, 2, before.state).ok
    run = _Run("mics", SHAPE, STREAMING)
    run.train(0, 5)
    loaded = checkpoint.load(root, run.state)
    assert loaded is not None and "no outer steps" in loaded.notes[0]
    expected = _Run("mics", SHAPE, STREAMING)
    checkpoint.load(root, expected.state)
    for each in (run, expected):
        each.train(2, 8)
    return differing(run.content(), expected.content()) == []


def test_an_export_has_the_slow_weights_or_an_islands_own(world: Worlds, tmp_path: Path) -> None:
    slow, own = world(4).run(_save_pending, tmp_path / "run")[0]
    (saved,) = (tmp_path / "run").glob("step-*")
    for folder, island, expected in (("slow", None, slow), ("island", 0, own)):
        (file,) = export(saved, tmp_path / folder, island=island)
        found = load_file(file)
        assert max((found[name] - expected[name]).abs().max().item() for name in found if name in expected) <= 1e-9
    with pytest.raises(towpath.TowpathError, match="islands 0 to 1"):
        export(saved, tmp_path / "none", island=2)
