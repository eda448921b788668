"""The hooks by which PyTorch calls the engine: around a unit's forward, and from autograd around its backward.

`attach` installs them. It changes the classes of the modules, and registers a hook on every unsharded view of a
parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_map_only

from towpath.core.step_state import ForwardPass
from towpath.engine import eager
from towpath.engine.backward_inputs import let_backward_take_parameters
from towpath.engine.executor import Engine
from towpath.engine.from_fsdp import COUNTERPARTS, NoMethodError
from towpath.engine.layout import has_forward, kept_modules, torch_dtype
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.module_parameters import is_transformed
from towpath.engine.parameters.unit import Unit
from towpath.errors import ShardError, StepError


def attach(model: nn.Module, engine: Engine) -> None:
    let_backward_take_parameters()
    kept = kept_modules(model, engine.precision)
    own_dtype = {id(m) for outermost in kept for m in outermost.modules()}
    lower = torch_dtype(engine.precision.params) if engine.precision.params else None

    def add_role(module: nn.Module, role: type[Any], unit: Unit) -> None:
        add_mixin(module, role)
        forward = _Forward(engine, unit, module, None if id(module) in own_dtype else lower)
        # Past nn.Module.__setattr__, which a user's class may override.
        object.__setattr__(module, "towpath_forward", forward)

    # The dtype first, so that the call of a unit is around that of the module that keeps its dtype.
    for module in kept:
        keep_dtype(module)
    for module in _root_submodules(engine):
        add_role(module, RootSubmodule, engine.root)
    for unit in engine.units:
        for module in unit.modules:
            add_role(module, UnitModule, unit)
        if unit.plan.spec.leaf:
            unit.shown.make_leaf_parameters(unit.modules[0])
        for bucket in unit.trainable:
            for index, view in enumerate(bucket.views):
                # This hook runs after autograd has added the gradient to `view.grad`: once in a backward pass, however
                # often the unit uses the parameter.
                arrived = _arrival(engine, unit, bucket, index)
                view.register_post_accumulate_grad_hook(arrived)
                for shown in (p for p in unit.shown.leaf_parameters if p.unsharded is view):
                    shown.register_post_accumulate_grad_hook(arrived)


def _root_submodules(engine: Engine) -> list[nn.Module]:
    """Return the modules inside the root unit that compute with its parameters and can be called by themselves."""
    (model,) = engine.root.modules
    units = {id(m): unit.plan.spec.leaf for unit in engine.units for m in unit.modules}
    owners = {id(m) for m in engine.root.shown.owners}
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> bool:
        if id(module) in units and module is not model:
            # The modules around a leaf may read its parameters.
            return units[id(module)]
        inside = [visit(child) for child in module.children()]
        computes = id(module) in owners or any(inside)
        if computes and has_forward(module) and module is not model and not isinstance(module, torch.jit.ScriptModule):
            found[id(module)] = module
        return computes

    visit(model)
    return list(found.values())


def add_mixin(module: nn.Module, role: type[Any]) -> None:
    """Add `role` to the module's class. The class keeps its name, because libraries look at it."""
    module.__class__ = _with_role(type(module), role)


@cache
def _with_role(cls: type[nn.Module], role: type[Any]) -> type[Any]:
    """Return the subclass of `role` and `cls`, which is made once."""
    # torch.compile makes a graph for each class, and gives up after eight. So all blocks of a model share one class.
    return type(cls.__name__, (role, cls), {"__module__": cls.__module__})


def keep_dtype(module: nn.Module) -> None:
    """Let a module compute in its own dtype. Inputs are cast to it, and outputs are cast back."""
    own = next((t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.float32)
    add_mixin(module, OwnDtypeModule)
    # Past nn.Module.__setattr__, which a user's class may override.
    object.__setattr__(module, "towpath_dtype", own)


class OwnDtypeModule(nn.Module):
    """A module that `Precision(keep=)` names. It computes in `towpath_dtype`."""

    towpath_dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        met: list[torch.dtype] = []  # of the inputs; the outputs get the first one

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            met.append(tensor.dtype)
            return tensor.to(self.towpath_dtype)

        args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
        output = super().__call__(*args, **kwargs)
        if not met:
            return output
        return tree_map_only(torch.Tensor, lambda t: t.to(met[0]) if t.is_floating_point() else t, output)


class HookedModule(nn.Module):
    """A module whose call runs the engine before and after the forward.

    The subclasses override `__call__` instead of registering forward hooks, because `module.compile()` traces hooks.
    """

    towpath_forward: _Forward

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name in COUNTERPARTS:
            raise NoMethodError(
                f"{type(self).__name__}.{name}: a sharded model has no such method. {COUNTERPARTS[name]}"
            )
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            f"{type(self).__name__} is sharded, and can be neither copied nor pickled. To save it, use "
            "towpath.checkpoint, or model.state_dict() inside `with towpath.full_parameters(model):`. Instead of a "
            "copy build and shard another; for averaged weights use torch._foreach_lerp_ on clones of the parameters."
        )


class UnitModule(HookedModule):
    """A module of a unit. Its call unshards the unit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.towpath_forward.run(super().__call__, args, kwargs)


class RootSubmodule(HookedModule):
    """A module inside the root unit. A call from outside the root's forward unshards the root, as the model's does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.towpath_forward.run_unless_inside(super().__call__, args, kwargs)


@final
class _Forward:
    """The engine's work around the forward of one module. The module holds it as `towpath_forward`."""

    def __init__(self, engine: Engine, unit: Unit, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        # Floating inputs are cast to `compute_dtype`.
        self._engine, self.unit, self._compute_dtype = engine, unit, compute_dtype
        self._module = weakref.ref(module)

    def run_unless_inside(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call`, with the engine's work around it unless an outer call into the unit does that work."""
        entered = self._engine.machine.is_entered(self.unit.index)
        return call(*args, **kwargs) if entered else self.run(call, args, kwargs)

    def read(self, index: int) -> torch.Tensor:
        """Return a copy of the unsharded parameter at `index`, as if a forward of the module had returned it."""
        return self.unit.shown.copy_of(index, lambda call: self.run(call, (), {}))

    @eager(recursive=False)
    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call` with the unit unsharded, and watch its inputs and outputs for gradients."""
        # torch.compile skips this method, and still compiles `call`. In a compiled model the graph around it ends here,
        # and `call` gets a graph of its own.
        graph_follows, module = False, self._module()
        # A backward pass may follow a forward without a graph: a reentrant checkpoint runs its forward so.
        comes_back = torch.is_grad_enabled() or (module is not None and module.training)
        try:
            passed = self._engine.before_forward(self.unit, comes_back)
            entries, args, kwargs = self._enter(passed, args, kwargs)
            output = call(*args, **kwargs)
            graph_follows = self._after(passed, entries, output)
            return output
        except BaseException as error:
            self._engine.forward_failed(self.unit, error)
            raise
        finally:  # after an exception, too, the modules must get their ShardTensors back
            self._engine.after_forward(self.unit, graph_follows)

    @eager
    def _enter(self, passed: ForwardPass | None, args: Any, kwargs: Any) -> tuple[list[Node], Any, Any]:
        """Cast the inputs, and register hooks for their gradients if the forward makes a graph.

        Return the graph nodes that compute these gradients, then the arguments.
        """
        with self._engine.host:
            # `passed` must not keep the nodes. Hooks of these nodes hold `passed`, and such a cycle would never be
            # freed.
            watched: list[torch.Tensor] = []
            inside: list[torch.Tensor] = []
            args = self._entered(args, passed, watched, inside)
            kwargs = {name: self._entered(value, passed, watched, inside) for name, value in kwargs.items()}
            if passed is not None:
                passed.entered = [id(t) for t in (*watched, *inside)]
                watched = watched or inside
                passed.inputs = len(watched)
                # The gradient of an input is complete once the backward of everything in the unit that uses the input
                # has run. So after the last of these hooks, the weights are no longer read, and their slot is free.
                for tensor in watched:
                    tensor.register_hook(partial(self._engine.input_gradient_done, passed))
            return [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in watched], args, kwargs

    def _entered(
        self, value: Any, passed: ForwardPass | None, watched: list[torch.Tensor], inside: list[torch.Tensor]
    ) -> Any:
        """Return an input as the unit gets it, and add it to `watched` or `inside` if it needs a gradient."""
        # Not a closure in `_enter`: a closure that calls itself would keep the inputs until the garbage collector runs.
        if type(value) is tuple:
            return tuple(self._entered(v, passed, watched, inside) for v in value)
        if not isinstance(value, torch.Tensor):
            # The forward may change the caller's lists, dicts and other containers, so they are passed on unchanged.
            inside.extend(t for t in _tensors(value) if t.requires_grad)
            return value
        tensor = value
        if self._compute_dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._compute_dtype)
        if passed is None or not tensor.requires_grad:
            return tensor
        if is_transformed(tensor):
            raise StepError(
                f"rank {self._engine.comm.number}: unit {self.unit.name or 'root'!r} got an input that torch.func "
                "differentiates, whose backward pass does not say when weights must be unsharded. Call "
                "torch.autograd.grad(loss, x) under model.no_sync(), or take the same model without shard()."
            )
        # A view of its own. Its hook runs when this unit has finished, before the unit that made the tensor begins.
        watched.append(tensor.view_as(tensor))
        return watched[-1]

    @eager
    def _after(self, passed: ForwardPass | None, entries: Sequence[Node], output: Any) -> bool:
        """Register hooks for the gradients of the outputs, and return whether any output can get one."""
        with self._engine.host:
            self._engine.check_forward(self.unit, _tensors(output))
            if passed is None:
                return False
            # A leaf, such as a parameter that is returned, would keep the hook for all later passes. An output that
            # was an input does not begin the unit's backward.
            made = [t for t in _tensors(output) if t.requires_grad and not t.is_leaf]
            outputs = [t for t in made if id(t) not in passed.entered]
            passed.entered.clear()
            # Plain tensor hooks: those of register_multi_grad_hook keep a graph alive that no backward pass walks.
            for tensor in outputs:
                tensor.register_hook(partial(self._engine.output_gradient_arrives, passed, entries))
            if not outputs:
                self._engine.machine.graph_dropped(passed)
            return bool(outputs)


def _arrival(engine: Engine, unit: Unit, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
    """Return the hook that gives the engine the accumulated gradient of one parameter."""
    # Weak references: the garbage collector does not look inside the tensor that keeps this hook. A strong reference
    # would keep the model alive permanently.
    its_engine, its_unit, its_bucket = weakref.ref(engine), weakref.ref(unit), weakref.ref(bucket)

    @eager
    def arrived(view: torch.Tensor) -> None:
        engine, unit, bucket = its_engine(), its_unit(), its_bucket()
        if engine is None or unit is None or bucket is None:
            # The model was freed, and only its graph is left.
            return
        # Taken at once: the view would keep the full gradient alive until the next backward pass adds to it.
        grad, view.grad = view.grad, None
        assert grad is not None
        engine.gradient(unit, bucket, index, grad)

    return arrived


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists, dicts (ModelOutputs included) and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
