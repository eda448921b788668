"""A live module as the planner knows it: its units, and what each computes and keeps; without memory, on fake tensors.

FLOPs are those of PyTorch's own counter; activations are what autograd saves, each storage once, parameters apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from towpath.core.formats import dtype_name, item_bytes
from towpath.core.precision import Precision
from towpath.engine.layout import UnitChoice, UnitLayout, lay_out
from towpath.errors import ConfigError
from towpath.planner.model import Model, Unit


def describe_live(
    model: nn.Module,
    inputs: Sequence[Any],
    tokens: int,
    *,
    length: int | None = None,
    units: UnitChoice | None = None,
    name: str = "",
) -> Model:
    """`inputs`: what the model is called with, of `tokens` tokens in sequences of `length` (default: all in one)."""
    layouts = lay_out(model, units, Precision())
    flops, kept, entering = _traced(model, layouts, inputs)
    made = [
        Unit(
            layout.spec,
            flops[layout.name] / tokens,
            kept[layout.name] / tokens / _item(layout),
            entering[layout.name] / tokens / _item(layout),
            modules=len(layout.modules),
        )
        for layout in layouts
    ]
    return Model(name or type(model).__name__, length or tokens, tuple(made))


def _item(layout: UnitLayout) -> int:
    """Bytes of what the unit computes in."""
    return item_bytes(layout.spec.buckets[0].dtype) if layout.spec.buckets else 4


def _traced(
    model: nn.Module, layouts: Sequence[UnitLayout], inputs: Sequence[Any]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """By unit: FLOPs of a forward pass, bytes that autograd keeps, bytes of what enters it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {id(t): mode.from_tensor(t) for t in (*model.parameters(), *model.buffers())}
    values: dict[str, torch.Tensor] = {n: fakes[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    owned = {_storage(fake) for fake in fakes.values()}
    kept: dict[str, float] = defaultdict(float)
    entering: dict[str, float] = defaultdict(float)
    seen: set[int] = set()
    inside = [""]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in owned and storage not in seen:
            seen.add(storage)
            kept[inside[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    counter = FlopCounterMode(display=False)

    def faked(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    given = tree_map(faked, tuple(inputs))
    with (
        mode,
        _noting_units(layouts, inside, entering),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        counter,
    ):
        try:
            functional_call(model, values, given)
        except Exception as error:
            raise ConfigError(f"the model cannot be run with the inputs it was described with: {error}") from error
    counts = counter.get_flop_counts()
    flops: dict[str, float] = {}
    for layout in layouts:
        if layout.name:
            names = [n for n, module in model.named_modules() if any(module is m for m in layout.modules)]
            flops[layout.name] = sum(sum(counts.get(f"{type(model).__name__}.{n}", {}).values()) for n in names)
    flops[""] = counter.get_total_flops() - sum(flops.values())
    return flops, kept, entering


@contextmanager
def _noting_units(layouts: Sequence[UnitLayout], inside: list[str], entering: dict[str, float]) -> Generator[None]:
    """`inside[-1]`: the unit whose forward is under way."""
    handles: list[Any] = []

    def enters(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            inside.append(name)
            entering[name] += sum(prod(t.shape) * item_bytes(dtype_name(t.dtype)) for t in args if _floats(t))

        return hook

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()

    for layout in layouts:
        for module in layout.modules if layout.name else ():
            handles.append(module.register_forward_pre_hook(enters(layout.name)))
            handles.append(module.register_forward_hook(leaves))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
