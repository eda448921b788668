"""A live module as the planner knows it: its units, and what each computes and keeps; without memory, on fake tensors.

FLOPs are those of PyTorch's own counter; activations are what autograd saves, each storage once, parameters apart, and
what more there is for a moment in the backward pass.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from towpath.core.formats import dtype_name
from towpath.core.precision import Precision
from towpath.engine.dtypes import torch_dtype
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
    precision: Precision | None = None,
    name: str = "",
) -> Model:
    """`inputs`: what the model is called with, of `tokens` tokens in sequences of `length` (default: all in one)."""
    precision = precision or Precision()
    layouts = lay_out(model, units, precision)
    traced = trace(model, layouts, inputs, precision)
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
    """By unit: FLOPs of a forward pass, elements that autograd keeps of what the unit computes in, bytes that it keeps
    besides, elements of what enters it; by module its call. `passing`: bytes that there are for a moment only, beside
    all that is kept."""

    flops: Mapping[str, float]
    kept: Mapping[str, float]
    kept_besides: Mapping[str, float]
    entering: Mapping[str, float]
    passing: float
    calls: Mapping[nn.Module, Call]

    def units(self, layouts: Sequence[UnitLayout], tokens: int) -> tuple[Unit, ...]:
        """`tokens`: how many were traced."""
        return tuple(
            Unit(
                layout.spec,
                self.flops[layout.name] / tokens,
                self.kept[layout.name] / tokens,
                self.entering[layout.name] / tokens,
                kept_fp32=self.kept_besides[layout.name] / tokens / 4,
                passing_fp32=self.passing / tokens / 4 if layout.spec.kept else 0.0,
                modules=len(layout.modules),
            )
            for layout in layouts
        )


def trace(
    model: nn.Module, layouts: Sequence[UnitLayout], inputs: Sequence[Any], precision: Precision | None = None
) -> Traced:
    """The model as `shard` would run it, both passes; it stays as it was, and takes no memory."""
    precision = precision or Precision()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not `from_tensor`: it would keep weak references to parameters that `shard` is to exchange.
    with mode:
        fakes = {id(t): _like(t, precision) for t in (*model.parameters(), *model.buffers())}
    values: dict[str, torch.Tensor] = {n: fakes[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    owned = {_storage(fake) for fake in fakes.values()}
    dtypes = {u.name: torch_dtype(precision.compute_dtype(u.buckets[0].spec.dtype)) for u in layouts if u.buckets}
    kept = _Kept(owned, dtypes)
    entering: dict[str, float] = defaultdict(float)
    calls: dict[nn.Module, Call] = {}
    counter, live = FlopCounterMode(display=False), LiveBytes(owned)
    where = next(iter(fakes.values())).device if fakes else torch.device("cpu")

    def faked(value: Any) -> Any:
        return _like(value, precision, where) if isinstance(value, torch.Tensor) else value

    with mode:
        given = tree_map(faked, tuple(inputs))
    with (
        mode,
        _noting_units(layouts, kept.inside, entering, calls),
        torch.autograd.graph.saved_tensors_hooks(kept.saved, lambda tensor: tensor),
        counter,
        live,
    ):
        try:
            output = functional_call(model, values, given)
        except Exception as error:
            raise ConfigError(f"the model cannot be run with the inputs it was described with: {error}") from error
    calls[model] = Call(given, {}, output)
    with mode, live:
        _backward(output, fakes.values())
    passing = max(0.0, live.most - kept.nbytes)
    return Traced(_flops(model, layouts, counter), kept.elements, kept.besides, entering, passing, calls)


def _flops(model: nn.Module, layouts: Sequence[UnitLayout], counter: FlopCounterMode) -> dict[str, float]:
    """By unit; what no other unit has computed is the root's."""
    counts = counter.get_flop_counts()
    flops: dict[str, float] = {}
    for layout in layouts:
        if layout.name:
            names = [n for n, module in model.named_modules() if any(module is m for m in layout.modules)]
            flops[layout.name] = sum(sum(counts.get(f"{type(model).__name__}.{n}", {}).values()) for n in names)
    return flops | {"": counter.get_total_flops() - sum(flops.values())}


class _Kept:
    """What autograd saves in a forward pass, by unit: elements of what the unit computes in, and bytes besides.

    `owned`: storages that do not count; `dtypes`: what each unit computes in; `inside[-1]`: the unit under way.
    """

    def __init__(self, owned: Set[int], dtypes: Mapping[str, torch.dtype]) -> None:
        self.elements: dict[str, float] = defaultdict(float)
        self.besides: dict[str, float] = defaultdict(float)
        self.inside = [""]
        self.nbytes = 0
        self._dtypes, self._known = dtypes, set(owned)

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        storage, unit = _storage(tensor), self.inside[-1]
        if storage not in self._known:
            self._known.add(storage)
            nbytes = tensor.untyped_storage().nbytes()
            self.nbytes += nbytes
            if tensor.dtype == self._dtypes.get(unit, torch.float32):
                self.elements[unit] += nbytes / tensor.itemsize
            else:
                self.besides[unit] += nbytes
        return tensor


def _backward(output: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Each gradient of a parameter is gone as soon as it is whole, as in the engine."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    losses = [t for t in roots if not t.dim()] or roots  # where a model gives its loss, the rest is looked at only
    torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """Bytes of what is computed inside, as long as it lives, and the most there were. `owned`: storages left out."""

    def __init__(self, owned: Set[int]) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._known = set(owned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._appears(tensor.untyped_storage())
        return out

    def _appears(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        self._known.add(key)
        self._now += nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._goes, key, nbytes).atexit = False

    def _goes(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


@contextmanager
def _noting_units(
    layouts: Sequence[UnitLayout], inside: list[str], entering: dict[str, float], calls: dict[nn.Module, Call]
) -> Generator[None]:
    """`inside[-1]`: the unit whose forward is under way."""
    handles: list[Any] = []

    def enters(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            inside.append(name)
            entering[name] += sum(prod(t.shape) for t in args if _floats(t))

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


def _like(tensor: torch.Tensor, precision: Precision, device: torch.device | None = None) -> torch.Tensor:
    """In the dtype that it is computed with: parameters are cast, and so is what enters a unit."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = torch_dtype(precision.compute_dtype(dtype_name(dtype)))
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device or tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
