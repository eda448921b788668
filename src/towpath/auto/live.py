"""A live module as the planner knows it: its units, and what each computes and keeps; without memory, on fake tensors.

FLOPs are those of PyTorch's own counter; activations are what autograd saves, each storage once, parameters apart, and
what more there is for a moment in the backward pass.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from towpath.core.formats import Precision, dtype_name
from towpath.engine.layout import UnitChoice, UnitLayout, device_of, lay_out, torch_dtype
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
    """Of a module: what it was called with and what came out, as tensors on the meta device."""

    args: Any
    kwargs: Any
    output: Any

    @staticmethod
    def outlined(args: Any, kwargs: Any, output: Any) -> Call:
        """Copy shapes only: the tensors themselves would outlive the passes that are traced."""
        return Call(*(tree_map(_outline, part) for part in (args, kwargs, output)))


@dataclass(frozen=True, slots=True)
class Traced:
    """By unit: FLOPs of a forward pass, elements that autograd keeps of what the unit computes in, bytes that it keeps
    besides, elements of what enters it (of the root, what it keeps from before the first unit), elements of this among
    what is kept, and bytes that there are for a moment only, beside all that is kept. By module: its call."""

    flops: Mapping[str, float]
    kept: Mapping[str, float]
    kept_besides: Mapping[str, float]
    entering: Mapping[str, float]
    kept_input: Mapping[str, float]
    passing: Mapping[str, float]
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
                kept_input=self.kept_input[layout.name] / tokens,
                passing_fp32=self.passing[layout.name] / tokens / 4,
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
    where = device_of(list(layouts)) if any(layout.buckets for layout in layouts) else torch.device("cpu")

    def faked(value: Any) -> Any:
        return _like(value, precision, where) if isinstance(value, torch.Tensor) and not _is_index(value) else value

    # Not `from_tensor`: it would keep weak references to parameters that `shard` is to exchange.
    with mode:
        fakes = {id(t): _like(t, precision, where) for t in (*model.parameters(), *model.buffers())}
        given = tree_map(faked, tuple(inputs))
    values: dict[str, torch.Tensor] = {n: fakes[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    owned = {_storage(fake) for fake in fakes.values()}
    dtypes = {u.name: torch_dtype(precision.compute_dtype(u.buckets[0].spec.dtype)) for u in layouts if u.buckets}
    kept = _Kept(owned, dtypes)
    calls: dict[nn.Module, Call] = {}
    counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION_ON_CPU: _attention_flops})
    live = LiveBytes(owned, kept.inside)

    def both_passes() -> None:
        saving = torch.autograd.graph.saved_tensors_hooks(kept.saved, lambda tensor: tensor)
        with _noting_units(layouts, kept, calls), saving, counter:
            try:
                output = model(*given)
            except Exception as error:
                raise ConfigError(f"the model cannot be run with the inputs it was described with: {error}") from error
        calls[model] = Call.outlined(given, {}, output)
        _backward(output, fakes.values())

    with mode, _Indices(), live:
        functional_call(_Around(model), {f"model.{name}": value for name, value in values.items()}, (both_passes,))
    passing = kept.passing(live.most, layouts)
    flops = _flops(model, layouts, counter)
    return Traced(flops, kept.elements, kept.besides, kept.entering, kept.inputs, passing, calls)


class _Around(nn.Module):
    """Call a function with the model's values exchanged, in both passes: checkpoints recompute in the second."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], None]) -> None:
        work()


class _Indices(TorchFunctionMode):
    """Computes small tensors of integers with their values, while all others have none.

    Models look at positions and masks before they decide what to compute: transformers leaves the attention mask out
    if no token is masked and positions begin at 0. Without values it would keep a mask of length² for each sequence.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if tensors and all(map(_is_index, tensors)) and prod(t.numel() for t in tensors) <= _MOST_INDICES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        made = isinstance(out, torch.Tensor) and not tensors and not out.is_floating_point() and not out.is_meta
        if made and 0 < out.numel() <= _MOST_INDICES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return out


_MOST_INDICES = 1 << 22


def _is_index(value: torch.Tensor) -> bool:
    """Whether it has values, of integers or truth values."""
    return not (isinstance(value, FakeTensor) or value.is_meta or value.is_floating_point() or value.is_complex())


# PyTorch's counter knows the fused attention of every device but this one.
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    *heads, length, width = query
    return 2 * prod(heads) * length * key[-2] * (width + value[-1])


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
        self.entering: dict[str, float] = defaultdict(float)
        self.inputs: dict[str, float] = defaultdict(float)
        self.inside = [""]
        self._dtypes, self._known = dtypes, set(owned)
        self._entered: set[int] = set()  # storages of what entered the unit under way

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        storage, unit = _storage(tensor), self.inside[-1]
        if storage not in self._known:
            self._known.add(storage)
            nbytes = tensor.untyped_storage().nbytes()
            if tensor.dtype == self._dtype(unit):
                self.elements[unit] += nbytes / tensor.itemsize
            else:
                self.besides[unit] += nbytes
            if storage in self._entered:
                self.inputs[unit] += nbytes / self._dtype(unit).itemsize
        return tensor

    def enter(self, unit: str, args: Any) -> None:
        """A module of `unit` begins its forward pass. What the root has kept by now stays until the end."""
        self.entering[""] = self._nbytes("") / self._dtype("").itemsize
        self.inside.append(unit)
        self.entering[unit] += sum(prod(t.shape) for t in args if _floats(t))
        self._entered = {_storage(t) for t in args if _floats(t)}

    def leave(self) -> None:
        self.inside.pop()
        self._entered = set()

    def passing(self, most: Mapping[str, int], layouts: Sequence[UnitLayout]) -> dict[str, float]:
        """By unit: bytes of the `most` there were at once in its passes, beside all that is kept by its end."""
        names = [layout.name for layout in layouts if layout.name]
        found = {"": max(0.0, most.get("", 0) - sum(map(self._nbytes, ["", *names])))}
        before = self.entering[""] * self._dtype("").itemsize
        for name in names:
            before += self._nbytes(name)
            found[name] = max(0.0, most.get(name, 0) - before)
        return found

    def _nbytes(self, unit: str) -> float:
        return self.elements[unit] * self._dtype(unit).itemsize + self.besides[unit]

    def _dtype(self, unit: str) -> torch.dtype:
        return self._dtypes.get(unit, torch.float32)


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
    """Bytes of what is computed inside, as long as it lives, and the most there were by unit. `owned`: storages left
    out; `inside[-1]`: the unit under way."""

    def __init__(self, owned: Set[int], inside: Sequence[str]) -> None:
        super().__init__()
        self.most: dict[str, int] = {}
        self._now, self._inside = 0, inside
        self._known = set(owned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":  # there nothing takes memory
                self._appears(tensor.untyped_storage())
        return out

    def _appears(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        self._known.add(key)
        self._now += nbytes
        unit = self._inside[-1]
        self.most[unit] = max(self.most.get(unit, 0), self._now)
        weakref.finalize(storage, self._goes, key, nbytes).atexit = False

    def _goes(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


@contextmanager
def _noting_units(layouts: Sequence[UnitLayout], kept: _Kept, calls: dict[nn.Module, Call]) -> Generator[None]:
    """Tell `kept` which unit is under way, in the forward pass and in the backward pass that follows."""
    handles: list[Any] = []

    def enters(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            kept.enter(name, args)

        return hook

    def leaves(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        unit = kept.inside[-1]
        kept.leave()
        calls.setdefault(module, Call.outlined(args, kwargs, output))

        def backward_begins(_: torch.Tensor) -> None:
            kept.inside[-1] = unit

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)

    for layout in layouts:
        for module in layout.modules if layout.name else ():
            handles.append(module.register_forward_pre_hook(enters(layout.name)))
            handles.append(module.register_forward_hook(leaves, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _like(tensor: torch.Tensor, precision: Precision, where: torch.device) -> torch.Tensor:
    """In the dtype that it is computed with: parameters are cast, and so is what enters a unit."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = torch_dtype(precision.compute_dtype(dtype_name(dtype)))
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=where)
    return made.requires_grad_(tensor.requires_grad)


def _outline(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
