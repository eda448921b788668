"""The hooks that PyTorch calls around every step of an optimizer.

The hook before a step prepares the optimizer for its sharded parameters: `adopt` accepts one that was made before
`shard`. The hook after it notes the step in the log of each model that it stepped, so that ranks can compare them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towpath.engine import eager
from towpath.engine.agree.program import Program
from towpath.engine.executor import Engine
from towpath.engine.parameters.dtensors import replacement_of
from towpath.engine.parameters.shard_tensor import ShardTensor, engine_with, running_step
from towpath.engine.trial_steps import check_compiles, parameters_of, remedy_for
from towpath.errors import ShardError
from towpath.logs import logger

_LOG = logger("engine")

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
    # A 0-D tensor may be a number of steps, or a product of decays. Some optimizers keep "step" as a vector of one.
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


def _steps(optimizer: Optimizer, *_: Any) -> None:
    adopt(optimizer)
    check_compiles(optimizer)
    _note_running(optimizer)  # last, because a trial step has hooks, too


@eager
def _note_running(optimizer: Optimizer) -> None:
    reference = weakref.ref(optimizer)  # weak, because a step that raises leaves the note behind
    running_step.optimizer = type(optimizer).__name__
    running_step.remedy = lambda: "" if (stepping := reference()) is None else remedy_for(stepping)


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
