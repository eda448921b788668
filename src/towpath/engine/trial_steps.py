"""Trial steps of an optimizer on small copies of its parameters, which find out what the optimizer can step.

`coupling` finds out whether an optimizer can step its parameters one at a time. `owner_stepped` calls an optimizer
with some of its parameters at a time: those that this rank owns, round by round. The result equals that of one process
only if the step of a parameter does not depend on the others. So one copy of the optimizer steps all parameters at
once, another steps one parameter at a time, and both must agree.

`check_compiles` finds out whether the optimizer compiles its step, which would fail on ShardTensors.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.shard_spec import ShardSpec
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import ShardError

# The number of trial steps: enough for the estimates of Prodigy and D-Adaptation to grow and take effect.
STEPS = 6
# The gradients' scales. They differ so much that a norm or mean over several parameters is far from that of each.
_SIZES = (1.0, 30.0, 0.03)
# The longest side of a small parameter, and how many parameters of one shape and groups of one kind are copied.
_SIDE = 6
_ALIKE = 2
# Products of batched matrices may round differently. A step that couples parameters differs by far more.
_TOLERANCE = 0.01
# The lowest learning rate of a trial step, because smaller steps would vanish in the rounding of the parameters. The
# user's learning rate is zero at the start of a warm-up.
_LEARNING_RATE = 0.01
_PLAIN = (int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class Common:
    """The options of an optimizer's groups, and its plain attributes: everything that is not kept per parameter."""

    options: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> Common:
        """Return the current options and attributes of `optimizer`."""
        attributes = {key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        return Common(tuple(map(options_of, optimizer.param_groups)), attributes)

    def difference(self, other: Common, tensors: bool = True) -> str | None:
        """Return a text with the first option that differs and both values; None if all are equal.

        With `tensors`, compare options that are tensors, too. That waits for a device.
        """
        for number, (mine, theirs) in enumerate(zip(self.options, other.options, strict=True)):
            for key in dict.fromkeys([*mine, *theirs]):
                here, there = mine.get(key), theirs.get(key)
                if _comparable(here, tensors) != _comparable(there, tensors):
                    return f"{key!r} of group {number} is {here} or {there}"
        return None


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def call_with(
    optimizer: Optimizer,
    method: str,
    before: Common,
    stand_ins: Mapping[int, nn.Parameter],
    states: dict[nn.Parameter, dict[str, Any]],
) -> Common:
    """Call a method of an optimizer on some parameters, with the options of `before`. Return the options afterwards.

    `stand_ins`: The parameters to step, by the id of the parameter that each replaces. All others are left out.
    `states`: Their states, updated in place. The optimizer keeps its own groups and states.
    """
    inner: Any = optimizer
    groups, state = inner.param_groups, inner.state
    inner.param_groups = [
        {**options, "params": [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins]}
        for options, group in zip(before.options, groups, strict=True)
    ]
    inner.state = defaultdict(dict, states)
    vars(inner).update(before.attributes)
    try:
        getattr(inner, method)()
        states.update({p: inner.state[p] for p in states.keys() & inner.state.keys()})
        return Common.of(inner)
    finally:
        inner.param_groups, inner.state = groups, state


def coupling(optimizer: Optimizer) -> str | None:
    """Return why `optimizer` cannot step its parameters one at a time; None if it can.

    The optimizer and its parameters stay as they are, and so do the states of the random number generators.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it computes with all parameters at once"
    other = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if other is not None:
        return f"it steps another optimizer, {type(other).__name__}"
    if beside := _state_of_none(optimizer):
        return beside
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    try:
        with _undisturbed(devices, compiles=False), _Alone():
            return _difference(optimizer, devices)
    except _CommunicatesError as error:
        return f"it communicates with other ranks ({error})"
    except Exception as error:
        return f"a trial step on small tensors failed with {type(error).__name__}: {error}"


class _CommunicatesError(Exception):
    """Error that a trial step raises instead of running a collective operation."""


class _Alone(TorchDispatchMode):
    """A dispatch mode that raises if an optimizer communicates. Other ranks step other matrices, and would not join."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _CommunicatesError(func)
        return func(*args, **(kwargs or {}))


def _difference(optimizer: Optimizer, devices: set[torch.device]) -> str | None:
    together, apart = small_copy(optimizer), small_copy(optimizer)
    pairs = list(zip(parameters_of(together), parameters_of(apart), strict=True))
    start = [p.clone() for p, _ in pairs]
    states: dict[nn.Parameter, dict[str, Any]] = {p: {} for _, p in pairs}
    idle: str | None = None
    for step in range(STEPS):
        for number, (p, q) in enumerate(pairs):
            p.grad, q.grad = _gradient(p, number, step), _gradient(p, number, step)
        drawn, counted = _random_states(devices), _counters(together)
        together.step()
        if not all(map(torch.equal, drawn, _random_states(devices))):
            return "it draws random numbers, and the ranks would draw different ones"
        if beside := _state_of_none(together):
            return beside
        changed = next((key for key, value in _counters(together).items() if value != counted.get(key)), None)
        if changed is not None:
            return f"step() changes its attribute {changed!r}, and each call with some of the parameters would do so"
        before, expected = Common.of(apart), Common.of(together)
        for _, q in pairs:
            alone = {q: states[q]}
            found = call_with(apart, "step", before, {id(q): q}, alone)
            states |= alone
            if difference := expected.difference(found):
                return f"what step() writes into its groups depends on the parameters there: {difference}"
        for (p, q), old in zip(pairs, start, strict=True):
            if (p - q).abs().nan_to_num().max() > _TOLERANCE * (p - old).abs().nan_to_num().max():
                return "the step of a parameter depends on the gradients of the others"
        # A rank that owns none of the parameters must count the step, too.
        idle = idle or expected.difference(call_with(apart, "step", before, {}, {}))
        for group, options in zip(apart.param_groups, expected.options, strict=True):
            group.update(copy.deepcopy(options))
    return idle and f"step() writes other values into its groups where they have no parameters: {idle}"


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers inside an optimizer's attributes that are objects or containers; `Common` has all others."""
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key in ("param_groups", "state", "defaults") or key.endswith("_hooks") or isinstance(value, _PLAIN):
            continue
        is_object = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)
        leaves, _ = tree_flatten(vars(value) if is_object else value)
        found[key] = _comparable([x for x in leaves if not isinstance(x, torch.Tensor) or not x.dim()])
    return found


def _state_of_none(optimizer: Optimizer) -> str | None:
    keys = [key for key in cast(dict[Any, Any], optimizer.state) if not isinstance(key, torch.Tensor)]
    return f"it keeps state[{keys[0]!r}], which belongs to no parameter" if keys else None


_compiled: WeakSet[Optimizer] = WeakSet()  # optimizers that were tried


def check_compiles(optimizer: Optimizer) -> None:
    """Raise an error with a remedy if the optimizer's step is compiled, which would fail on ShardTensors."""
    if type(optimizer).__module__.split(".")[0] in ("torch", "towpath") or optimizer in _compiled:
        return
    first = next((p for group in optimizer.param_groups for p in group["params"][:1] if type(p) is ShardTensor), None)
    if first is None:
        return
    _compiled.add(optimizer)

    def as_slice(tensor: torch.Tensor) -> ShardTensor:  # all of it, so that no operation communicates
        return ShardTensor(tensor.view(-1), ShardSpec(tensor.shape, 0, tensor.numel(), 0, Replica(None, (0,), 0)))

    try:
        with _undisturbed({p.device for p in parameters_of(optimizer)}, compiles=True):
            slices = small_copy(optimizer, as_slice)
            _compiled.add(slices)
            for p in parameters_of(slices):
                p.grad = torch.ones_like(p)
            slices.step()
    except Exception as error:
        # Any other error is left to the real step, whose message is about the real tensors.
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            return
        raise ShardError(
            f"rank {first.shard_spec.replica.number}: {type(optimizer).__name__} compiles its step, and torch.compile "
            f"cannot trace ShardTensors ({str(error).splitlines()[0]}). {remedy_for(optimizer)}"
        ) from None


def remedy_for(optimizer: Optimizer) -> str:
    """Return the part of an error message that says what to do about an optimizer that cannot step slices."""
    call, reason = f"towpath.optim.owner_stepped({type(optimizer).__name__}(…))", coupling(optimizer)
    elementwise = "take an elementwise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, NAdam, RAdam)"
    if reason is None:
        return f"Call {call}, or {elementwise}."
    return f"{call} cannot step it either: {reason}. Instead, {elementwise}."


def small_copy(optimizer: Optimizer, held_as: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> Optimizer:
    """Return a copy of an optimizer that has few and small parameters, and no states.

    The parameters keep their dtypes and numbers of dimensions.

    `held_as`: Makes the parameter's data from the small tensor, such as a ShardTensor.
    """
    random_numbers = torch.Generator().manual_seed(0)
    made: Any = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    for p in parameters_of(optimizer):
        small = torch.randn([min(side, _SIDE) for side in p.shape], generator=random_numbers)
        memo[id(p)] = nn.Parameter(held_as(small.to(p.device, p.dtype)), p.requires_grad)

    seen = Counter[Hashable]()

    def is_seldom(kind: Hashable) -> bool:
        seen[kind] += 1
        return seen[kind] <= _ALIKE

    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        # The flags and names by which an optimizer may treat a group differently.
        flags = {key: x for key, x in options_of(group).items() if isinstance(x, (bool, str, type(None)))}
        if not is_seldom(repr(flags)):
            continue
        options, small = copy.deepcopy(options_of(group), memo), [memo[id(p)] for p in group["params"]]
        if isinstance(rate := options.get("lr"), torch.Tensor):
            rate.clamp_(min=_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            options["lr"] = max(rate, _LEARNING_RATE)
        groups.append({**options, "params": [p for p in small if is_seldom((number, p.shape))]})
    memo[id(optimizer.param_groups)], memo[id(optimizer.state)] = groups, defaultdict[Any, Any](dict)
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            vars(made)[key] = OrderedDict[int, Any]()
        elif key != "step":  # a learning rate scheduler's wrapper of it would step `optimizer` itself
            vars(made)[key] = copy.deepcopy(value, memo)
    if callable(getattr(made, "train", None)):  # schedule-free optimizers start without a mode
        made.train()
    return made


def _gradient(parameter: torch.Tensor, number: int, step: int) -> torch.Tensor:
    """Return a test gradient that changes little from step to step.

    With steady gradients, optimizers that estimate their step size (Prodigy, D-Adaptation) take visible steps.
    """
    steady, noise = (
        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        for seed in (number, 1000 * (step + 1) + number)
    )
    return ((steady + 0.1 * noise) * _SIZES[number % len(_SIZES)]).to(parameter.device, parameter.dtype)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _comparable(value: Any, tensors: bool = True) -> tuple[Any, list[Any]]:
    """Return the structure of a nested value, and its numbers, strings and tensors. Other objects count as equal."""
    leaves, form = tree_flatten(value)
    values = [x.tolist() if tensors and isinstance(x, torch.Tensor) else x for x in leaves]
    # NaN is not equal to itself.
    return form, [x if isinstance(x, (*_PLAIN, list)) and x == x else None for x in values]


@contextmanager
def _undisturbed(devices: set[torch.device], compiles: bool) -> Generator[None]:
    """Run a trial step without effects: keep the random states, hide warnings, and record no graph."""
    own = [device for device in devices if device.type != "cpu"]
    kind = own[0].type if own else "cuda"
    stance = nullcontext() if compiles else torch.compiler.set_stance("force_eager")
    drawn = random.getstate()
    try:
        with torch.random.fork_rng(own, device_type=kind), torch.no_grad(), stance, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(drawn)


def _random_states(devices: set[torch.device]) -> list[torch.Tensor]:
    others = [device for device in devices if device.type != "cpu"]
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in others)]
