"""Checks of the user's optimizers: trial steps on small copies of their parameters, and a note of every real step.

`coupling` finds out whether an optimizer can step its parameters one at a time. `owner_stepped` calls an optimizer
with some of its parameters at a time: those that this rank owns, round by round. The result equals that of one process
only if the step of a parameter does not depend on the others. So one copy of the optimizer steps all parameters at
once, another steps one parameter at a time, and both must agree.

`watch_optimizers` installs the hooks around each step. Before the first step, `adopt` prepares an optimizer that was
made before `shard`, and another trial step finds out whether the optimizer compiles its step.
"""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from towpath.engine.agree.program import Program
from towpath.engine.executor import Engine
from towpath.engine.parameters.dtensors import replacement_of
from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.shard_spec import ShardSpec
from towpath.engine.parameters.shard_tensor import ShardTensor, engine_with, running_step
from towpath.engine.timing import eager
from towpath.errors import ShardError
from towpath.logs import logger

_LOG = logger("engine")

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


# One call with some of the parameters -------------------------------------------------------------------------------


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
                if not _same(here, there, tensors):
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
    """Call a method of an optimizer while it has only some of its parameters, and the options of `before`.

    `optimizer`: The optimizer. Its groups and states are the same afterwards. `stand_ins`: The parameters to step, by
    the id of the parameter that each replaces. All others are left out. `states`: The states of the stand-ins, updated
    in place.

    Returns:
        The options and attributes that the call ended with.
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


# Trial steps with one parameter at a time ---------------------------------------------------------------------------


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
    alone: str | None = None
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
        for q in (q for _, q in pairs):
            state = {q: states[q]}
            found = call_with(apart, "step", before, {id(q): q}, state)
            states |= state
            if difference := expected.difference(found):
                return f"what step() writes into its groups depends on the parameters there: {difference}"
        for (p, q), old in zip(pairs, start, strict=True):
            if (p - q).abs().nan_to_num().max() > _TOLERANCE * (p - old).abs().nan_to_num().max():
                return "the step of a parameter depends on the gradients of the others"
        # A rank that owns none of the parameters must count the step, too.
        alone = alone or expected.difference(call_with(apart, "step", before, {}, {}))
        for group, options in zip(apart.param_groups, expected.options, strict=True):
            group.update(copy.deepcopy(options))
    return alone and f"step() writes other values into its groups where they have no parameters: {alone}"


def _counters(optimizer: Optimizer) -> dict[str, list[Any]]:
    """Return the numbers inside an optimizer's attributes that are objects or containers; `Common` has all others."""
    found: dict[str, list[Any]] = {}
    for key, value in vars(optimizer).items():
        if key in ("param_groups", "state", "defaults") or key.endswith("_hooks") or isinstance(value, _PLAIN):
            continue
        leaves, _ = tree_flatten(vars(value) if type(value).__module__ != "builtins" and _is_open(value) else value)
        scalars = (x.item() if isinstance(x, torch.Tensor) and not x.dim() else x for x in leaves)
        found[key] = [x for x in scalars if isinstance(x, _PLAIN)]
    return found


def _is_open(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, nn.Module, type)) and not callable(value)


def _state_of_none(optimizer: Optimizer) -> str | None:
    keys = [key for key in cast(dict[Any, Any], optimizer.state) if not isinstance(key, torch.Tensor)]
    return f"it keeps state[{keys[0]!r}], which belongs to no parameter" if keys else None


# Trial steps with slices --------------------------------------------------------------------------------------------


_compiled: WeakSet[Optimizer] = WeakSet()  # optimizers that were tried


def _check_compiles(optimizer: Optimizer) -> None:
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


# Small copies -------------------------------------------------------------------------------------------------------


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

    # The flags and names by which an optimizer may treat a group differently.
    def kind_of_group(group: dict[str, Any]) -> str:
        return repr({k: v for k, v in options_of(group).items() if isinstance(v, (bool, str, type(None)))})

    groups = [_small_group(group, memo) for group in _seldom_alike(optimizer.param_groups, kind_of_group)]
    memo[id(optimizer.param_groups)], memo[id(optimizer.state)] = groups, defaultdict[Any, Any](dict)
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            vars(made)[key] = OrderedDict[int, Any]()
        elif key != "step":  # a learning rate scheduler's wrapper of it would step `optimizer` itself
            vars(made)[key] = copy.deepcopy(value, memo)
    if callable(getattr(made, "train", None)):  # schedule-free optimizers start without a mode
        made.train()
    return made


def _small_group(group: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    small = _seldom_alike([memo[id(p)] for p in group["params"]], lambda p: tuple(p.shape))
    options = copy.deepcopy(options_of(group), memo)
    rate = options.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.clamp_(min=_LEARNING_RATE)
    elif isinstance(rate, (int, float)):
        options["lr"] = max(rate, _LEARNING_RATE)
    return {**options, "params": list(small)}


def _seldom_alike(things: Sequence[Any], kind: Callable[[Any], Hashable]) -> Iterator[Any]:
    """Yield the first `_ALIKE` things of each kind."""
    seen: dict[Hashable, int] = {}
    for thing in things:
        seen[kind(thing)] = seen.get(kind(thing), 0) + 1
        if seen[kind(thing)] <= _ALIKE:
            yield thing


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


def _same(here: Any, there: Any, tensors: bool) -> bool:
    """Return whether two nested values have equal numbers, strings and tensors. Other objects count as equal."""
    (mine, form), (theirs, other) = tree_flatten(here), tree_flatten(there)
    return form == other and all(_same_leaf(x, y, tensors) for x, y in zip(mine, theirs, strict=True))


def _same_leaf(here: Any, there: Any, tensors: bool) -> bool:
    if isinstance(here, torch.Tensor) or isinstance(there, torch.Tensor):
        if not tensors:
            return True
        return isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor) and torch.equal(here, there)
    plain = isinstance(here, _PLAIN) and isinstance(there, _PLAIN)
    return not plain or here == there or (here != here and there != there)  # NaN is NaN


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


# PyTorch calls hooks around every step of an optimizer. The one before it prepares the optimizer for its sharded
# parameters. The one after it notes the step in the log of each model that it stepped, so that ranks can compare them.

# Options of a parameter group that do not change the result of a step. They need not be equal on all ranks.
_HOW = {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"}

# Optimizers that step other parameters, too, and were warned about.
_mixed: WeakSet[Optimizer] = WeakSet()

# The number of models that were sharded, and for each adopted optimizer that number and the number of its groups then.
_models = 0
_adopted: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()


def watch_optimizers() -> None:
    """Watch every optimizer step in this process. `build` calls this for each model."""
    global _models
    _models += 1
    if _models == 1:
        register_optimizer_step_pre_hook(_steps)
        register_optimizer_step_post_hook(_stepped)


@eager
def adopt(optimizer: Optimizer, check: bool = True) -> None:
    """Let an optimizer step sharded parameters, also if it was made before `shard`.

    The hook before each step calls this, and so does what may see an optimizer before its first step, such as a
    checkpoint. `shard` changes plain parameters in place. It replaces DTensors, which lead to their replacements.

    An optimizer that has stepped before `shard` is recognized by states as large as a full parameter. All others are
    right for a slice, too, such as the number of steps. An optimizer with such states alone may go on.

    `check`: Whether to check its states. Default: True. Pass False if they will be replaced.
    """
    seen = _models, len(optimizer.param_groups)
    if _adopted.get(optimizer) == seen:
        return
    state = cast(dict[Any, Any], optimizer.state)
    present = {id(p) for p in parameters_of(optimizer)}
    for group in optimizer.param_groups:
        for number, before in enumerate(group["params"]):
            parameter = replacement_of(before)
            if parameter is not before:
                if id(parameter) in present:
                    name = cast(ShardTensor, parameter).shard_spec.name
                    raise ShardError(
                        f"{name} is in two places of {type(optimizer).__name__}, which was made before shard(): as it "
                        "was then, and as it is now. Each step would update it twice. Add it once."
                    )
                group["params"][number] = parameter
                if before in state:
                    state[parameter] = state.pop(before)
            engine = engine_with(parameter)
            if engine is not None:
                engine.optimizers.add(optimizer)
                if check:
                    _check_states(optimizer, parameter, state.get(parameter, {}), engine)
                    engine.comm.watchdog.status.failed("")
    # Wrappers of other libraries, such as Accelerate's, have no hooks.
    if optimizer not in _adopted and hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        optimizer.register_load_state_dict_post_hook(_loaded)
    _adopted[optimizer] = seen if check else (0, 0)


def _loaded(optimizer: Optimizer) -> None:
    _adopted[optimizer] = 0, 0  # the next step checks the loaded states


def _check_states(optimizer: Optimizer, parameter: torch.Tensor, state: dict[str, Any], engine: Engine) -> None:
    for key, value in state.items():
        # A 0-D tensor may be a number of steps, or a product of decays. Some optimizers keep "step" as a vector of one.
        whole = isinstance(value, torch.Tensor) and not isinstance(value, ShardTensor) and value.dim() > 0
        if (
            whole
            and key != "step"
            and value.numel() > 0
            and value.shape == parameter.shape
            and not any(s.owns_parameter(parameter) for s in engine.matrix_steps)
        ):
            assert isinstance(parameter, ShardTensor)
            name = type(optimizer).__name__
            error = ShardError(
                f"rank {engine.comm.number}: {name} has already stepped {parameter.shard_spec.name}, or was made with "
                "states for it: its states are of unsharded parameters. Call shard() before the first step, or make a "
                "new optimizer afterwards. If load_state_dict() loaded them: call "
                "towpath.checkpoint.set_optimizer_state_dict instead."
            )
            # Peers whose optimizers are fine wait in the next pass. They quote this error when this rank does not come.
            engine.comm.watchdog.tell(f"{name}.step() failed ({error})")
            raise error


def _steps(optimizer: Optimizer, *_: Any) -> None:
    adopt(optimizer)
    _check_compiles(optimizer)
    _note_running(optimizer)  # last, because a trial step has hooks, too


@eager
def _note_running(optimizer: Optimizer) -> None:
    reference = weakref.ref(optimizer)  # weak, because a step that raises leaves the note behind

    def remedy() -> str:
        stepping = reference()
        return remedy_for(stepping) if stepping is not None else ""

    running_step.optimizer, running_step.remedy = type(optimizer).__name__, remedy


@eager
def _stepped(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    running_step.take()
    # For each model, its parameters in each group: how many, and a checksum of their names in any order. An optimizer
    # may step several models, and other ranks may have other ones, as the stages of a pipeline.
    stepped: dict[Program, dict[int, tuple[int, int]]] = {}
    beside: list[torch.Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, ShardTensor):
                beside.append(parameter)
            elif (program := parameter.shard_spec.replica.program) is not None:
                counts = stepped.setdefault(program, {})
                count, checksum = counts.get(number, (0, 0))
                counts[number] = count + 1, checksum ^ crc32(parameter.shard_spec.name.encode())
    if stepped:
        if beside and optimizer not in _mixed:
            _mixed.add(optimizer)
            _LOG.warning(
                "%s steps %d parameters in addition to those of the sharded model, the first of shape %s. The ranks do "
                "not average their gradients: shard the whole model, or average them yourself.",
                *(_name(optimizer), len(beside), tuple(beside[0].shape)),
            )
        options = [
            tuple((name, _plain(value)) for name, value in group.items() if name not in _HOW)
            for group in optimizer.param_groups
        ]
        for program, counts in stepped.items():
            details = tuple(
                (("parameters", count), ("checksum_of_their_names", checksum), *options[number])
                for number, (count, checksum) in counts.items()
            )
            program.stepped(_name(optimizer), details)


def _name(optimizer: Optimizer) -> str:
    inner = getattr(optimizer, "inner", None)  # the optimizer in a wrapper of `towpath.optim`
    return type(optimizer).__qualname__ + (f"({_name(inner)})" if isinstance(inner, Optimizer) else "")


def _plain(value: Any) -> Any:
    """Return a value that ranks can compare and JSON can encode. Do not read a GPU tensor, which would wait for it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return type(value).__name__
