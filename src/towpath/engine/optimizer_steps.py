"""Hooks around the steps of optimizers, and trial steps that find out which parameters an optimizer can step.

PyTorch calls a hook before every step, which prepares the optimizer for its sharded parameters (`adopt`). Another one
follows the step, and notes it in the log of each model that was stepped, so that ranks can compare them.

Trial steps run on small copies of the parameters. `coupling` finds out whether an optimizer can step its parameters one
at a time, as `owner_stepped` requires: each rank calls it with the parameters that the rank owns. `check_compiles`
finds out whether it compiles its step, which would fail on ShardTensors.
"""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
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

from towpath.core.queues import LoggedCall
from towpath.engine import eager
from towpath.engine.agree.digest import CollectiveLog, Details
from towpath.engine.agree.program import Program
from towpath.engine.executor import Engine
from towpath.engine.parameters.partial_sums import Replica
from towpath.engine.parameters.shard_spec import ShardSpec
from towpath.engine.parameters.shard_tensor import ShardTensor, engine_of_parameter, running_step
from towpath.errors import ShardError
from towpath.logs import logger

_LOG = logger("engine")

# Options of a parameter group that do not change the result of a step. They need not be equal on all ranks.
_WITHOUT_EFFECT = {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"}

# Optimizers that step other parameters, too, and were warned about.
_warned: WeakSet[Optimizer] = WeakSet()

# The number of models that were sharded, and for each adopted optimizer that number and the number of its groups then.
_models = 0
_adopted: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def watch_optimizers() -> None:
    """Watch every optimizer step in this process. `build` calls this for each model."""
    global _models
    _models += 1
    if _models == 1:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


@eager
def adopt(optimizer: Optimizer, check: bool = True) -> None:
    """Let an optimizer step sharded parameters, also if it was made before `shard`, which keeps plain parameters.

    The hook before each step calls this, and so does what may see an optimizer before its first step, such as a
    checkpoint. `check`: Whether to check its states. Pass False if they will be replaced.
    """
    seen = _models, len(optimizer.param_groups)
    if _adopted.get(optimizer) == seen:
        return
    state = cast(dict[Any, Any], optimizer.state)
    for parameter in parameters_of(optimizer):
        if name := getattr(parameter, "towpath_replaced", None):
            raise ShardError(
                f"{type(optimizer).__name__} has the DTensor that {name} was before shard(), and that shard() has "
                "replaced. Make the optimizer after shard(), of model.parameters()."
            )
        engine = engine_of_parameter(parameter)
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
    # An optimizer that has stepped before `shard` has states as large as a full parameter. All others are right for a
    # slice, too. A 0-D tensor may be a number of steps, or a product of decays. Some optimizers keep "step" as a vector
    # of one.
    found = [value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor)]
    full = [x for x in found if not isinstance(x, ShardTensor) and x.dim() and x.numel() and x.shape == parameter.shape]
    if not full or any(s.owns_parameter(parameter) for s in engine.matrix_steps):
        return
    assert isinstance(parameter, ShardTensor)
    name = type(optimizer).__name__
    error = ShardError(
        f"rank {engine.comm.number}: {name} has already stepped {parameter.shard_spec.name}, or was made with states "
        "for it: its states are of unsharded parameters. Call shard() before the first step, or make a new optimizer "
        "afterwards. If load_state_dict() loaded them: call towpath.checkpoint.set_optimizer_state_dict instead."
    )
    # Peers whose optimizers are fine wait in the next pass. They quote this error when this rank does not come.
    engine.comm.watchdog.tell(f"{name}.step() failed ({error})")
    raise error


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    adopt(optimizer)
    check_compiles(optimizer)
    _note_running(optimizer)  # last, because a trial step has hooks, too


@eager
def _note_running(optimizer: Optimizer) -> None:
    reference = weakref.ref(optimizer)  # weak, because a step that raises leaves the note behind
    running_step.optimizer = type(optimizer).__name__
    running_step.remedy = lambda: "" if (stepping := reference()) is None else remedy_for(stepping)


@eager
def _after_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    running_step.take()
    # For each model, the names of its parameters in each group. An optimizer may step several models, and other ranks
    # may have other ones, as the stages of a pipeline.
    stepped: dict[Program, dict[int, list[str]]] = {}
    engines: dict[Program, Engine | None] = {}
    beside: list[torch.Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, ShardTensor):
                beside.append(parameter)
            elif (program := parameter.shard_spec.replica.program) is not None:
                stepped.setdefault(program, {}).setdefault(number, []).append(parameter.shard_spec.name)
                if program not in engines:
                    engines[program] = engine_of_parameter(parameter)
    if stepped and beside and optimizer not in _warned:
        _warned.add(optimizer)
        _LOG.warning(
            "%s steps %d parameters in addition to those of the sharded model, the first of shape %s. The ranks do "
            "not average their gradients: shard the whole model, or average them yourself.",
            *(_name(optimizer), len(beside), tuple(beside[0].shape)),
        )
    for program, groups in stepped.items():
        program.stepped(_name(optimizer), _details(optimizer, groups))
    for engine in engines.values():
        if engine is not None:
            engine.optimizer_stepped(optimizer)


def note_step(optimizer: Optimizer, names: Mapping[int, str], log: CollectiveLog) -> None:
    """Note a step in the log of a model whose parameters have these names by `id`."""
    groups = {
        number: named
        for number, group in enumerate(optimizer.param_groups)
        if (named := [names[id(p)] for p in group["params"] if id(p) in names])
    }
    log.note(LoggedCall.STEP, f"{_name(optimizer)}.step()", _details(optimizer, groups))


def _details(optimizer: Optimizer, groups: Mapping[int, Sequence[str]]) -> Details:
    """Return the options of parameter groups, and the names of their parameters, which `groups` has by number."""
    details: list[tuple[tuple[str, Any], ...]] = []
    for number, names in groups.items():
        checksum = crc32("\n".join(sorted(names)).encode())
        options = ((k, _plain(v)) for k, v in optimizer.param_groups[number].items() if k not in _WITHOUT_EFFECT)
        details.append((("parameters", len(names)), ("checksum_of_their_names", checksum), *options))
    return tuple(details)


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


# Trial steps.

# Their number: enough for the estimates of Prodigy and D-Adaptation to grow and take effect.
_STEPS = 6
# The gradients' scales. They differ so much that a norm or mean over several parameters is far from that of each.
_GRADIENT_SCALES = (1.0, 30.0, 0.03)
# The longest side of a small parameter, and how many parameters of one shape and groups of one kind are copied.
_LONGEST_SIDE, _MOST_ALIKE = 6, 2
# Products of batched matrices may round differently. A step that couples parameters differs by far more.
_TOLERANCE = 0.01
# The lowest learning rate of a trial step, because smaller steps would vanish in the rounding of the parameters. The
# user's learning rate is zero at the start of a warm-up.
_LEARNING_RATE = 0.01
_PLAIN = (int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The options of an optimizer's groups, and its plain attributes: everything that is not kept per parameter."""

    options: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]

    @staticmethod
    def of(optimizer: Optimizer) -> OptimizerSettings:
        attributes = {key: value for key, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        return OptimizerSettings(tuple(map(options_of, optimizer.param_groups)), attributes)

    def difference(self, other: OptimizerSettings, tensors: bool = True) -> str | None:
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


def _comparable(value: Any, tensors: bool = True) -> tuple[Any, list[Any]]:
    """Return the structure of a nested value, and its numbers, strings and tensors. Other objects count as equal."""
    leaves, form = tree_flatten(value)
    values = [x.tolist() if tensors and isinstance(x, torch.Tensor) else x for x in leaves]
    # NaN is not equal to itself.
    return form, [x if isinstance(x, (*_PLAIN, list)) and x == x else None for x in values]


def coupling(optimizer: Optimizer) -> str | None:
    """Return why `optimizer` cannot step its parameters one at a time; None if it can.

    The optimizer and its parameters stay as they are, and so do the states of the random number generators.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it computes with all parameters at once"
    other = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if other is not None:
        return f"it steps another optimizer, {type(other).__name__}"
    if beside := _state_without_parameter(optimizer):
        return beside
    devices = {p.device for p in parameters_of(optimizer)}
    try:
        with _undisturbed(devices, compiles=False), _NoCommunication():
            return _trial(optimizer, devices)
    except Exception as error:
        return f"a trial step on small tensors failed with {type(error).__name__}: {error}"


class _NoCommunication(TorchDispatchMode):
    """A dispatch mode that raises if an optimizer communicates. Other ranks step other matrices, and would not join."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ShardError(f"it communicates with other ranks ({func})")
        return func(*args, **(kwargs or {}))


def _trial(optimizer: Optimizer, devices: set[torch.device]) -> str | None:
    """Step all parameters with one copy of the optimizer, and each with a copy of its own. Return what differs."""
    small = small_copy(optimizer)
    together, count = small_copy(small), len(parameters_of(small))
    # The last one has no parameters, as on a rank that owns none. Such a rank must count the step, too.
    apart = [small_copy(small) for _ in range(count + 1)]
    for number, each in enumerate(apart):
        mine = parameters_of(each)[number : number + 1]
        for group in each.param_groups:
            group["params"] = [p for p in group["params"] if any(p is q for q in mine)]
    pairs = list(zip(parameters_of(together), [p for each in apart for p in parameters_of(each)], strict=True))
    start = [p.clone() for p, _ in pairs]
    for step in range(_STEPS):
        for number, pair in enumerate(pairs):
            for p in pair:
                p.grad = _gradient(p, number, step)
        drawn, counted = _random_states(devices), _numbers_in_attributes(together)
        together.step()
        if not all(map(torch.equal, drawn, _random_states(devices))):
            return "it draws random numbers, and the ranks would draw different ones"
        if beside := _state_without_parameter(together):
            return beside
        changed = next(
            (key for key, value in _numbers_in_attributes(together).items() if value != counted.get(key)), None
        )
        if changed is not None:
            return f"step() changes its attribute {changed!r}, and each call with some of the parameters would do so"
        expected = OptimizerSettings.of(together)
        for each in apart:
            each.step()
            if difference := expected.difference(OptimizerSettings.of(each)):
                if parameters_of(each):
                    return f"what step() writes into its groups depends on the parameters there: {difference}"
                return f"step() writes other values into its groups where they have no parameters: {difference}"
        # `owner_stepped` begins each of its calls with the same attributes, and keeps those of the last one.
        for each in apart:
            vars(each).update(OptimizerSettings.of(apart[-1]).attributes)
        for (p, q), old in zip(pairs, start, strict=True):
            if (p - q).abs().nan_to_num().max() > _TOLERANCE * (p - old).abs().nan_to_num().max():
                return "the step of a parameter depends on the gradients of the others"
    return None


def _numbers_in_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers in attributes that are objects or containers; `OptimizerSettings` has all others."""
    found: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key in ("param_groups", "state", "defaults") or key.endswith("_hooks") or isinstance(value, _PLAIN):
            continue
        is_object = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)
        leaves, _ = tree_flatten(vars(value) if is_object else value)
        found[key] = _comparable([x for x in leaves if not isinstance(x, torch.Tensor) or not x.dim()])
    return found


def _state_without_parameter(optimizer: Optimizer) -> str | None:
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
    """Return a copy of an optimizer that has few and small parameters of the same dtypes, and no states.

    `held_as`: Makes the parameter's data from the small tensor, such as a ShardTensor.
    """
    random_numbers = torch.Generator().manual_seed(0)
    made: Any = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    for p in parameters_of(optimizer):
        small = torch.randn([min(side, _LONGEST_SIDE) for side in p.shape], generator=random_numbers)
        memo[id(p)] = nn.Parameter(held_as(small.to(p.device, p.dtype)), p.requires_grad)

    seen = Counter[Hashable]()

    def is_seldom(kind: Hashable) -> bool:
        seen[kind] += 1
        return seen[kind] <= _MOST_ALIKE

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
    """Return a test gradient that changes little from step to step, so that Prodigy and D-Adaptation take steps."""
    steady, noise = (
        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        for seed in (number, 1000 * (step + 1) + number)
    )
    return ((steady + 0.1 * noise) * _GRADIENT_SCALES[number % len(_GRADIENT_SCALES)]).to(
        parameter.device, parameter.dtype
    )


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
