"""Blocks, parts and whole models that torch.compile compiles, before shard() or after it, train exactly."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import towpath
from tests.ranks.models import TiedGPT
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.test_entry_points import Nested, _seeded
from tests.ranks.test_every_model import _chain, _loss
from tests.ranks.twin import Twin
from towpath import Topology

COMPILES = ("forward", "in place", "wrapped", "in place, after shard()")


def _compiled(way: str, backend: str) -> nn.Module:
    model: Any = _chain()
    options: dict[str, Any] = {"fullgraph": True, "backend": backend}
    for i, block in enumerate(model.blocks):
        if way == "forward":
            block.forward = torch.compile(block.forward, **options)
        elif way == "in place":
            block.compile(**options)
        elif way == "wrapped":
            model.blocks[i] = torch.compile(block, **options)
    return model


@pytest.mark.compiles
@in_turn(("zero3", "hpz", "paro-iig", "zero1"), 1)
@pytest.mark.parametrize("way", [seldom(way) if way in ("in place", "forward") else way for way in COMPILES])
def test_blocks_compiled_as_one_graph_each_train_exactly(world: Worlds, way: str, label: str) -> None:
    """On two ranks: each of them compiles for itself."""
    world(2).run(_train_compiled, way, label, timeout=600)


def _train_compiled(way: str, label: str, backend: str = "aot_eager") -> None:
    topology = Topology(2, 1)
    with _fresh_compiler():
        twin = Twin(lambda: _compiled(way, backend), _loss_of_plain_eager, label, topology)
        if way == "in place, after shard()":
            for block in twin.sharded.blocks:
                block.compile(fullgraph=True, backend=backend)
        twin.train(steps=2, micro_steps=2)
        twin.check_parameters()
        frames = torch._dynamo.utils.counters["stats"]
        assert frames["unique_graphs"] > 0  # the blocks were compiled,
        assert not torch._dynamo.utils.counters["graph_break"]  # and whole


def _loss_of_plain_eager(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """The twin is compiled too, for its names' sake; it runs as it is written."""
    if hasattr(model, "no_sync"):
        return _loss(model, rank, micro, step)
    with torch.compiler.set_stance("force_eager"):
        return _loss(model, rank, micro, step)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Without the graphs of the tests before: their number is limited for each function."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with warnings.catch_warnings():
            # It looks at the .grad of a block's input, and hides the warning in a way that does not work for errors.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            # And inductor's own imports are deprecated.
            warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
            yield
    finally:
        torch._dynamo.reset()


@pytest.mark.parity  # to compile takes longer than all else here
@pytest.mark.compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@on_ranks(2, timeout=600)
def test_blocks_compiled_to_machine_code_train_exactly() -> None:
    """Without vectors: to find out which the processor has, it would compile a program for each kind first."""
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        _train_compiled("forward", "zero3", "inductor")


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "the whole, wrapped": lambda model, options: torch.compile(model, **options),
    "blocks, wrapped": lambda model, options: _wrap_blocks(model, options),
    "a step": lambda model, options: model,
}


RARER = ("the whole, wrapped", "a step")  # nearly as others


@pytest.mark.compiles
@pytest.mark.parametrize("way", [seldom(way) if way in RARER else way for way in WAYS])
@on_ranks(2)
def test_compiling_after_shard_changes_nothing(way: str) -> None:
    options = {"backend": "aot_eager"}
    with _fresh_compiler():
        plain, sharded = (_seeded(lambda: Nested(TiedGPT())) for _ in range(2))
        towpath.shard(sharded, "zero3", topology=Topology(2, 1), units=list(sharded.inner.blocks))
        compiled = WAYS[way](sharded, options)
        ids = torch.arange(12).view(2, 6)

        def step(model: Any) -> None:
            model(ids).square().mean().backward()

        run = torch.compile(step, **options) if way == "a step" else step
        for _ in range(2):
            run(compiled)
            step(plain)
        for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert (found.grad.full_tensor() - expected.grad).abs().max() < 1e-10, name
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def _wrap_blocks(model: Any, options: Any) -> Any:
    blocks = model.inner.blocks
    for i, block in enumerate(list(blocks)):
        blocks[i] = torch.compile(block, **options)
    return model
