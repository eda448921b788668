"""`Sharding`: how an integration shards a model that has an optimizer already, and saves and loads both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from towpath.api import shard
from towpath.checkpoint import Saver, State, latest, load
from towpath.checkpoint.folders import step_of
from towpath.checkpoint.state_dicts import set_model_state_dict, set_optimizer_state_dict
from towpath.core.formats import Dtype, Precision
from towpath.core.presets import StrategyLike
from towpath.engine.agree.boundary import CHECK_EVERY
from towpath.engine.executor import engine_of
from towpath.engine.layout import UnitChoice
from towpath.engine.optimizer_steps import adopt, parameters_of
from towpath.engine.parameters.initialise import Values
from towpath.engine.parameters.shard_tensor import engine_of_parameter
from towpath.errors import CheckpointError, ShardError
from towpath.logs import logger
from towpath.optim import members_of, owner_stepped_members
from towpath.plan.request import Workload
from towpath.topology.cluster import Topology
from towpath.topology.together import AllRanks

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# The names of frameworks for mixed precision. As under FSDP, gradients are reduced in float32.
_MIXED: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
# The folder of our checkpoints in a framework's own checkpoint.
FOLDER = "towpath"
_LOG = logger("integrations")
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


# --- sharding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sharding:
    """The arguments with which an integration calls `towpath.shard()`, which explains them.

    Attributes:
        strategy: A preset's name, what `towpath.strategy()` returns, or "auto".
        topology: The nodes and ranks. Detected by default.
        units: Module classes or modules to gather separately.
        precision: The dtype to compute in. By default, the framework's own setting.
        mesh: A DeviceMesh of the data-parallel ranks. By default, all ranks.
        values: A folder or file of safetensors with the initial values, or a function. Use it if the model is on the
            meta device on every rank. By default, rank 0's model has them.
        workload: What a step computes. Required by "auto".
        check_every: The number of optimizer steps between two comparisons of parameters.
    """

    strategy: Literal["auto"] | StrategyLike
    topology: Topology | None = None
    units: UnitChoice | None = None
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None
    mesh: DeviceMesh | None = None
    values: Values | str | Path | None = None
    workload: Workload | None = None
    check_every: int = CHECK_EVERY

    @staticmethod
    def of(strategy: StrategyLike | Sharding) -> Sharding:
        """Return `strategy`, as users pass it to an integration, as a `Sharding`."""
        return strategy if isinstance(strategy, Sharding) else Sharding(strategy)

    def apply(self, model: nn.Module, mixed: str = "no", device: torch.device | None = None) -> None:
        """Shard `model` in place, to train on `device`, by default the model's own.

        `mixed` is the framework's name of its mixed precision, or "no". It has no effect if `precision` is set.
        """
        arguments: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.precision is None and mixed != "no":
            if mixed not in _MIXED:
                raise ShardError(
                    f"mixed precision {mixed!r}: expected none, or one of {', '.join(_MIXED)}. For other dtypes, pass "
                    "Sharding(…, precision=towpath.Precision(…))."
                )
            arguments["precision"] = Precision(params=_MIXED[mixed], reduce=torch.float32)
        shard(model, **arguments, device=device)


def prepare_for_shards(optimizer: Optimizer, model: nn.Module | None = None) -> None:
    """Prepare an optimizer for the sharded parameters that it has, also if it was made before the model was sharded.

    With a `model`, nothing is done unless the optimizer steps parameters of that model.
    """
    adopt(optimizer)
    engines = {engine_of_parameter(p) for p in parameters_of(optimizer)} - {None}
    if not engines or (model is not None and engine_of(model) not in engines):
        return
    for member in members_of(optimizer):
        if needs_owner_stepped(member):
            name = type(member).__name__
            raise ShardError(
                f"{name} computes with full matrices, but each rank holds a slice of them. Pass "
                f"towpath.optim.owner_stepped({name}(…)) instead, or towpath.optim.chain() of it and others."
            )
    for wrapped in owner_stepped_members(optimizer):
        wrapped.share_out()


def needs_owner_stepped(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` is an Adafactor or a Muon, of PyTorch or of another package, that is not wrapped."""
    return any(kind.__name__ in ("Adafactor", "Muon") for kind in type(optimizer).__mro__)


def not_installed(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return an error that names the extra to install."""
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'towpath[{extra}]'.", name=error.name)


# --- saving and loading -----------------------------------------------------------------------------------------------

# The models in a framework's checkpoint, each with the optimizer that steps it.
Pairs = Sequence[tuple[nn.Module, Optimizer | None]]


def save_pairs(folder: str | Path, pairs: Pairs) -> None:
    """Save each model with its optimizer in a numbered folder of our own, inside the framework's checkpoint."""
    for number, (model, optimizer) in enumerate(pairs):
        save_into(Path(folder, FOLDER, str(number)), model, optimizer)


def load_pairs(folder: str | Path, pairs: Pairs) -> None:
    """Load what `save_pairs` saved."""
    for number, (model, optimizer) in enumerate(pairs):
        load_from(Path(folder, FOLDER, str(number)), model, optimizer)


def save_into(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Replace the checkpoint in `folder`. Every rank must call it, and every rank raises if it fails."""
    state = State(model, optimizer)
    newest = _reading(model).on_rank_0(lambda: latest(folder))
    step = 0 if newest is None else step_of(newest) + 1
    saver = Saver(folder, state, keep_last=1, background=False)
    outcome = saver.save(step).outcome()
    saver.close()
    if outcome.failure is not None:
        raise CheckpointError(outcome.failure)


def load_from(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Load what `save_into` saved, under any strategy and on any number of ranks. Every rank must call it."""
    loaded = load(folder, State(model, optimizer))
    if loaded is None:
        raise CheckpointError(
            f"{folder}: no checkpoint of a sharded model. Expected what Towpath's integration saved. Check the path."
        )
    log = _LOG.warning if optimizer is not None else _LOG.info  # only the weights are wanted, to evaluate
    for note in loaded.notes if engine_of(model).comm.job.rank == 0 else ():
        log("%s", note)


def load_full_model(model: nn.Module, read: Callable[[], Mapping[str, Any]], strict: bool = True) -> None:
    """Load an ordinary state dict of full tensors, which rank 0 reads. Every rank must call it."""
    set_model_state_dict(model, _only_on_rank_0(model, read), options=replace(_FROM_RANK_0, strict=strict))


def load_full_optimizer(model: nn.Module, optimizer: Optimizer, read: Callable[[], Mapping[str, Any]]) -> None:
    """Load an optimizer's own state dict of full tensors, which rank 0 reads. Every rank must call it."""
    found = _only_on_rank_0(model, lambda: _by_name(model, optimizer, read()))
    set_optimizer_state_dict(model, optimizer, found, options=_FROM_RANK_0)


def _by_name(model: nn.Module, optimizer: Optimizer, numbered: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's own state dict, which numbers the parameters, with their names as keys."""
    names = {id(p): name for name, p in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    groups = numbered["param_groups"]
    theirs = [list(group["params"]) for group in groups]
    if [*map(len, ours)] != [*map(len, theirs)]:
        raise CheckpointError(
            f"the optimizer that was saved has groups of {[*map(len, theirs)]} parameters; this one of "
            f"{[*map(len, ours)]}. Make the optimizer as it was when it was saved."
        )
    name_of = dict(zip(chain(*theirs), chain(*ours), strict=True))
    return {
        "state": {name_of[number]: state for number, state in numbered["state"].items()},
        "param_groups": [{**group, "params": group_names} for group, group_names in zip(groups, ours, strict=True)],
    }


def _only_on_rank_0(model: nn.Module, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 reads, and nothing on the other ranks. If it fails, every rank raises."""
    found: dict[str, Any] = {}
    _reading(model).on_rank_0(lambda: found.update(read()))
    return found


def _reading(model: nn.Module) -> AllRanks:
    return AllRanks(engine_of(model).comm.job, "reading a checkpoint", CheckpointError)
