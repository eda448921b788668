"""A live module as the planner knows it: its units, and what each computes and keeps; without memory, on fake tensors.

FLOPs are those of PyTorch's own counter; activations are what autograd saves, each storage once, parameters apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    traced = trace(model, layouts, inputs)
    return Model(name or type(model).__name__, length or tokens, traced.units(layouts, tokens))


# Of a token's forward pass: a product and a sum.
_FLOPS_PER_PARAMETER = 2


def describe_by_parameters(model: nn.Module, layouts: Sequence[UnitLayout], tokens: int) -> Model:
    """Where nobody says what the model is called with: every parameter is multiplied once, and nothing is kept."""
    units = [Unit(layout.spec, 0.0, 0.0, 0.0, modules=len(layout.modules)) for layout in layouts]
    return Model(
        type(model).__name__, tokens, tuple(replace(unit, flops=_FLOPS_PER_PARAMETER * unit.numel) for unit in units)
    )


@dataclass(frozen=True, slots=True)
class Call:
    """Of a module: what it was called with and what came out, as fake tensors."""

    args: Any
    kwargs: Any
    output: Any


@dataclass(frozen=True, slots=True)
class Traced:
    """By unit: FLOPs of a forward pass, bytes that autograd keeps, bytes of what enters it; by module its call."""

    flops: Mapping[str, float]
    kept: Mapping[str, float]
    entering: Mapping[str, float]
    calls: Mapping[nn.Module, Call]

    def units(self, layouts: Sequence[UnitLayout], tokens: int) -> tuple[Unit, ...]:
        """`tokens`: how many were traced."""
        return tuple(
            Unit(
                layout.spec,
                self.flops[layout.name] / tokens,
                self.kept[layout.name] / tokens / _item(layout),
                self.entering[layout.name] / tokens / _item(layout),
                modules=len(layout.modules),
            )
            for layout in layouts
        )


def _item(layout: UnitLayout) -> int:
    """Bytes of what the unit computes in."""
    return item_bytes(layout.spec.buckets[0].dtype) if layout.spec.buckets else 4


def trace(model: nn.Module, layouts: Sequence[UnitLayout], inputs: Sequence[Any]) -> Traced:
    """The model as it was; without memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not `from_tensor`: it would keep weak references to parameters that `shard` is to exchange.
    with mode:
        fakes = {id(t): _like(t) for t in (*model.parameters(), *model.buffers())}
    values: dict[str, torch.Tensor] = {n: fakes[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    owned = {_storage(fake) for fake in fakes.values()}
    kept: dict[str, float] = defaultdict(float)
    entering: dict[str, float] = defaultdict(float)
    seen: set[int] = set()
    inside = [""]
    calls: dict[nn.Module, Call] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in owned and storage not in seen:
            seen.add(storage)
            kept[inside[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    counter = FlopCounterMode(display=False)

    where = next(iter(fakes.values())).device if fakes else torch.device("cpu")

    def faked(value: Any) -> Any:
        return _like(value, where) if isinstance(value, torch.Tensor) else value

    with mode:
        given = tree_map(faked, tuple(inputs))
    with (
        mode,
        _noting_units(layouts, inside, entering, calls),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        counter,
    ):
        try:
            output = functional_call(model, values, given)
        except Exception as error:
            raise ConfigError(f"the model cannot be run with the inputs it was described with: {error}") from error
    counts = counter.get_flop_counts()
    flops: dict[str, float] = {}
    for layout in layouts:
        if layout.name:
            names = [n for n, module in model.named_modules() if any(module is m for m in layout.modules)]
            flops[layout.name] = sum(sum(counts.get(f"{type(model).__name__}.{n}", {}).values()) for n in names)
    flops[""] = counter.get_total_flops() - sum(flops.values())
    calls[model] = Call(given, {}, output)
    return Traced(flops, kept, entering, calls)


@contextmanager
def _noting_units(
    layouts: Sequence[UnitLayout], inside: list[str], entering: dict[str, float], calls: dict[nn.Module, Call]
) -> Generator[None]:
    """`inside[-1]`: the unit whose forward is under way."""
    handles: list[Any] = []

    def enters(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            inside.append(name)
            entering[name] += sum(prod(t.shape) * item_bytes(dtype_name(t.dtype)) for t in args if _floats(t))

        return hook

    def leaves(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop()
        calls.setdefault(module, Call(args, kwargs, output))

    for layout in layouts:
        for module in layout.modules if layout.name else ():
            handles.append(module.register_forward_pre_hook(enters(layout.name)))
            handles.append(module.register_forward_hook(leaves, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
