"""Describes a live module for the planner: its units, and what each of them computes and keeps.

Both passes run on fake tensors, which need no memory. FLOPs are those of PyTorch's own counter. Activations are the
storages that autograd saves, each counted once and without parameters. Temporary storages of both passes count, too.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from towpath.plan.model import Model, ModelUnit


def describe_module(
    model: nn.Module,
    inputs: Sequence[Any],
    tokens: int,
    *,
    length: int | None = None,
    units: UnitChoice | None = None,
    precision: Precision | None = None,
    name: str = "",
) -> Model:
    """Describe a module for the planner, without memory and without running it on a device.

    Args:
        model: The module. It may be on the meta device. It stays as it is.
        inputs: The arguments of one forward pass.
        tokens: Number of tokens in `inputs`.
        length: Tokens of a sequence. Default: `tokens`.
        units: The units, as `towpath.shard` takes them. Default: as `towpath.shard` chooses them.
        precision: The dtypes of computation. Default: those of the parameters.
        name: The name of the model. Default: that of its class.

    Returns:
        The model, for `Solver`.

    Raises:
        ConfigError: If the module cannot run with these inputs.
    """
    precision = precision or Precision()
    layouts = lay_out(model, units, precision)
    traced = trace(model, layouts, inputs, precision)
    return Model(name or type(model).__name__, length or tokens, traced.units(layouts, tokens))


def describe_by_parameters(model: nn.Module, layouts: Sequence[UnitLayout], tokens: int) -> Model:
    """Describe a module whose inputs are unknown: each parameter is multiplied once, and no activations are kept."""
    units = [ModelUnit(layout.spec, 0.0, 0.0, 0.0, modules=len(layout.modules)) for layout in layouts]
    # A product and a sum for each parameter.
    return Model(type(model).__name__, tokens, tuple(replace(unit, flops=2 * unit.numel) for unit in units))


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The arguments and the output of a module's call, as tensors on the meta device."""

    args: Any
    kwargs: Any
    output: Any

    @staticmethod
    def outlined(args: Any, kwargs: Any, output: Any) -> ModuleCall:
        """Return a call with shapes only. The tensors themselves would outlive the traced passes."""
        return ModuleCall(*(tree_map(_outline, part) for part in (args, kwargs, output)))


@dataclass(frozen=True, slots=True)
class Traced:
    """The computation and memory of a traced model. All but `calls` are by unit."""

    flops: Mapping[str, float]  # FLOPs of a forward pass
    kept: Mapping[str, float]  # elements in the unit's compute dtype that autograd keeps
    kept_besides: Mapping[str, float]  # bytes in other dtypes that autograd keeps
    # Elements of the inputs. For the root, elements that it keeps from before the first unit.
    entering: Mapping[str, float]
    kept_input: Mapping[str, float]  # elements of the inputs that autograd keeps
    passing: Mapping[str, float]  # bytes of temporary storages at their peak, in addition to all that is kept
    calls: Mapping[nn.Module, ModuleCall]  # the call of each module

    def units(self, layouts: Sequence[UnitLayout], tokens: int) -> tuple[ModelUnit, ...]:
        """Return the units for the planner. `tokens` is the number of traced tokens."""
        return tuple(
            ModelUnit(
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
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    inputs: Sequence[Any],
    precision: Precision | None = None,
    device: torch.device | None = None,
) -> Traced:
    """Trace both passes as `shard` would run them. The model stays as it is, and no memory is needed.

    `device` is where it trains. By default, it is the model's.
    """
    precision = precision or Precision()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    where = device or device_of(model.parameters())

    def faked(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not _is_index(value):
            return _empty_like(value, precision, where)
        return value

    # FakeTensorMode's `from_tensor` would keep weak references to parameters, which `shard` exchanges later.
    with mode:
        fakes = {id(t): _empty_like(t, precision, where) for t in (*model.parameters(), *model.buffers())}
        given = tree_map(faked, tuple(inputs))
    values: dict[str, torch.Tensor] = {n: fakes[id(t)] for n, t in (*model.named_parameters(), *model.named_buffers())}
    owned = {_storage(fake) for fake in fakes.values()}
    dtypes = {u.name: torch_dtype(precision.compute_dtype(u.buckets[0].spec.dtype)) for u in layouts if u.buckets}
    kept = _KeptActivations(owned, dtypes)
    calls: dict[nn.Module, ModuleCall] = {}
    counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION_ON_CPU: _attention_flops})
    live = LiveBytes(owned, kept.inside)

    def both_passes() -> None:
        saving = torch.autograd.graph.saved_tensors_hooks(kept.saved, lambda tensor: tensor)
        with _track_units(layouts, kept, calls), saving, counter:
            try:
                output = model(*given)
            except Exception as error:
                raise ConfigError(f"the model cannot be run with the inputs it was described with: {error}") from error
        calls[model] = ModuleCall.outlined(given, {}, output)
        for parameter in fakes.values():
            if parameter.requires_grad:  # each gradient is released once it is complete, as in the engine
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        losses = [t for t in roots if not t.dim()] or roots  # if a model returns its loss, only that has a gradient
        torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])

    with mode, _Indices(), live:
        functional_call(_Around(model), {f"model.{name}": value for name, value in values.items()}, (both_passes,))
    passing = kept.passing(live.most, layouts)
    flops = _flops(model, layouts, counter)
    return Traced(flops, kept.elements, kept.besides, kept.entering, kept.inputs, passing, calls)


class _Around(nn.Module):
    """Calls a function while the model's values are exchanged: for both passes, because checkpoints recompute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], None]) -> None:
        work()


class _Indices(TorchFunctionMode):
    """Computes small integer tensors with their values, while all other tensors have none.

    Models read positions and masks to decide what to compute. For example, transformers omits the attention mask if no
    token is masked and positions begin at 0. Without values it would keep a mask of length² for each sequence.
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
    """Return whether the tensor has values that are integers or booleans."""
    return not (isinstance(value, FakeTensor) or value.is_meta or value.is_floating_point() or value.is_complex())


# PyTorch's counter knows the fused attention of every device but this one.
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    *heads, length, width = query
    return 2 * prod(heads) * length * key[-2] * (width + value[-1])


def _flops(model: nn.Module, layouts: Sequence[UnitLayout], counter: FlopCounterMode) -> dict[str, float]:
    """Return the FLOPs of each unit. The root gets what no other unit has computed."""
    counts = counter.get_flop_counts()
    flops: dict[str, float] = {}
    for layout in layouts:
        if layout.name:
            names = [n for n, module in model.named_modules() if any(module is m for m in layout.modules)]
            flops[layout.name] = sum(sum(counts.get(f"{type(model).__name__}.{n}", {}).values()) for n in names)
    return flops | {"": counter.get_total_flops() - sum(flops.values())}


class _KeptActivations:
    """Counts what autograd saves in a forward pass, by unit: elements in the compute dtype, and bytes in others.

    `owned` are storages that do not count, `dtypes` the compute dtype of each unit, and `inside[-1]` the running unit.
    """

    def __init__(self, owned: Set[int], dtypes: Mapping[str, torch.dtype]) -> None:
        self.elements: dict[str, float] = defaultdict(float)
        self.besides: dict[str, float] = defaultdict(float)
        self.entering: dict[str, float] = defaultdict(float)
        self.inputs: dict[str, float] = defaultdict(float)
        self.inside = [""]
        self._dtypes, self._known = dtypes, set(owned)
        self._entered: set[int] = set()  # storages of the running unit's inputs

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
        """Begin the forward pass of a module. What the root has kept by now stays until the end."""
        self.entering[""] = self._nbytes("") / self._dtype("").itemsize
        self.inside.append(unit)
        self.entering[unit] += sum(prod(t.shape) for t in args if _floats(t))
        self._entered = {_storage(t) for t in args if _floats(t)}

    def leave(self) -> None:
        self.inside.pop()
        self._entered = set()

    def passing(self, most: Mapping[str, int], layouts: Sequence[UnitLayout]) -> dict[str, float]:
        """Return by unit how much its peak `most` exceeds all that is kept at its end, in bytes."""
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


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that are computed inside, and their peak by unit.

    `owned` are storages that do not count, and `inside[-1]` is the running unit.
    """

    def __init__(self, owned: Set[int], inside: Sequence[str]) -> None:
        super().__init__()
        self.most: dict[str, int] = {}
        self._now, self._inside = 0, inside
        self._known = set(owned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":  # which takes no memory
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        self._known.add(key)
        self._now += nbytes
        unit = self._inside[-1]
        self.most[unit] = max(self.most.get(unit, 0), self._now)
        weakref.finalize(storage, self._remove, key, nbytes).atexit = False

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


@contextmanager
def _track_units(
    layouts: Sequence[UnitLayout], kept: _KeptActivations, calls: dict[nn.Module, ModuleCall]
) -> Generator[None]:
    """Tell `kept` which unit runs, in the forward pass and in the backward pass that follows."""

    def enters(name: str, module: nn.Module, args: Any) -> None:
        kept.enter(name, args)

    def leaves(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        unit = kept.inside[-1]
        kept.leave()
        calls.setdefault(module, ModuleCall.outlined(args, kwargs, output))

        def backward_begins(_: torch.Tensor) -> None:
            kept.inside[-1] = unit

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)

    with ExitStack() as handles:  # a handle removes its hook when its context ends
        for layout in layouts:
            for module in layout.modules if layout.name else ():
                handles.enter_context(module.register_forward_pre_hook(partial(enters, layout.name)))
                handles.enter_context(module.register_forward_hook(leaves, with_kwargs=True))
        yield


def _empty_like(tensor: torch.Tensor, precision: Precision, where: torch.device) -> torch.Tensor:
    """Return an empty tensor in the compute dtype, as parameters and inputs of a unit are cast."""
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
