"""State dicts in memory: the functions of torch.distributed.checkpoint.state_dict, for sharded models.

PyTorch's own gather DTensors and nothing else. These have the same names, arguments and results, and gather
ShardTensors too, one unit at a time. Models without any are left to PyTorch's own, and so is `full_state_dict=False`:
what that returns holds ShardTensors, for torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as pytorchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer
from torch.utils import _pytree as trees

from towpath.checkpoint.dcp.calls import described
from towpath.checkpoint.memory.names import parameters_of
from towpath.checkpoint.memory.optimizer import is_like, name_of
from towpath.engine.build import agree
from towpath.engine.checks.optimizers import adopt
from towpath.engine.executor import Engine
from towpath.engine.parameters.shard_spec import whole_tensors
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError, TowpathError
from towpath.optim import OwnerSteppedOptimizer, members_of

StateDict = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer]

_ADVICE = (
    "Let every rank call it with the same arguments; where rank 0 alone has the dict, set broadcast_from_rank0=True."
)


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> StateDict:
    """The parameters and persistent buffers of `model` by name; every rank must call it.

    With `full_state_dict` whole tensors: on every rank, or, with `cpu_offload` as well, on the CPU of rank 0 alone,
    while the others get an empty dict. They are the values that the optimizer steps (fp32 masters, say), not what
    computes.
    """
    engines, options = _engines(model), options or StateDictOptions()

    def collect() -> StateDict:
        sharded = replace(options, full_state_dict=False, cpu_offload=False)
        return pytorchs.get_model_state_dict(model, submodules=submodules, options=sharded)

    if not (engines and options.full_state_dict):
        return pytorchs.get_model_state_dict(model, submodules=submodules, options=options)
    return _gathered(_alike("get_model_state_dict", engines, collect), engines[0], options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """The states of the optimizers by the names of their parameters, and their groups; every rank must call it.

    Who gets what is as in `get_model_state_dict`. With `full_state_dict`, an optimizer that has not stepped has no
    states. (PyTorch's own steps it once, which changes the steps that follow.)
    """
    engines, options = _engines(model), options or StateDictOptions()

    def collect() -> StateDict:
        if submodules:
            raise CheckpointError("submodules= has no meaning for optimizers: take what you need out of the result.")
        names = {id(p): name for name, p in _parameters(model, options).items()}
        found: StateDict = {"state": {}, "param_groups": []}
        for optimizer in _listed(optimizers):
            _add_by_name(optimizer, names, found)
        return found

    if not (engines and options.full_state_dict):
        _listed(optimizers)
        return pytorchs.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    tree = _alike("get_optimizer_state_dict", engines, collect)
    gathered = _gathered(tree, engines[0], options)
    for optimizer in _listed(optimizers):
        if isinstance(optimizer, OwnerSteppedOptimizer):
            _add_whole_states(optimizer, _parameters(model, options), gathered, options)
    return _flattened(gathered) if options.flatten_optimizer_state_dict and gathered else gathered


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[StateDict, StateDict]:
    """`get_model_state_dict` and `get_optimizer_state_dict`."""
    model_state = get_model_state_dict(model, submodules=submodules, options=options)
    return model_state, get_optimizer_state_dict(model, optimizers, options=options)


def set_model_state_dict(
    model: nn.Module, model_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> Any:
    """Load what `get_model_state_dict` returned, under any strategy; the missing and the unexpected keys.

    With `full_state_dict` every rank passes the whole dict, or, with `broadcast_from_rank0` as well, rank 0 does and
    the others pass an empty one.
    """
    engines, options = _engines(model), options or StateDictOptions()
    if not (engines and options.full_state_dict):
        return pytorchs.set_model_state_dict(model, model_state_dict, options=options)
    parameters: StateDict = {}

    def check() -> StateDict:
        parameters.update(pytorchs.get_model_state_dict(model))
        return model_state_dict

    def take(path: str, value: torch.Tensor) -> torch.Tensor:
        target = parameters.get(path)
        return _slice_of(value, target) if isinstance(target, ShardTensor) and target.shape == value.shape else value

    given = _given("set_model_state_dict", engines, check, options, take)
    return pytorchs.set_model_state_dict(model, given, options=_without_gathering(options))


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> None:
    """Load what `get_optimizer_state_dict` returned, under any strategy; who passes it is as in `set_model_state_dict`.

    Options of the groups (lr, betas, …) are loaded as well.
    """
    engines, options = _engines(model), options or StateDictOptions()
    listed, parameters = _listed(optimizers, check=False), dict[str, nn.Parameter]()
    if not (engines and options.full_state_dict):
        pytorchs.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return
    owned = [optimizer for optimizer in listed if isinstance(optimizer, OwnerSteppedOptimizer)]
    whole = {id(p) for optimizer in owned for group in optimizer.param_groups for p in group["params"]}

    def check() -> StateDict:
        parameters.update(_parameters(model, options))
        names = {id(p): name for name, p in parameters.items()}
        for optimizer in listed:
            _add_by_name(optimizer, names, {"state": {}, "param_groups": []})  # all its parameters are the model's
        return optim_state_dict if "state" in optim_state_dict or not optim_state_dict else _nested(optim_state_dict)

    def take(path: str, value: torch.Tensor) -> torch.Tensor:
        name, _, key = path.removeprefix("state.").rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or id(parameter) in whole or not is_like(key, value, parameter):
            return value
        return _slice_of(value, parameter)

    given = _given("set_optimizer_state_dict", engines, check, options, take)
    names = {id(p): name for name, p in parameters.items()}
    for optimizer in owned:
        _load_whole_states(optimizer, names, given)
    others = [optimizer for optimizer in listed if not isinstance(optimizer, OwnerSteppedOptimizer)]
    if not others:
        return
    for optimizer in others:
        for group in () if optimizer.state else optimizer.param_groups:
            # Or PyTorch would step it once, to find out which states it has.
            for parameter in group["params"]:
                optimizer.state[parameter] = {}
    pytorchs.set_optimizer_state_dict(model, others, given, options=_without_gathering(options))


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: StateDict,
    optim_state_dict: StateDict,
    options: StateDictOptions | None = None,
) -> Any:
    """`set_optimizer_state_dict` and `set_model_state_dict`."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


# Names ----------------------------------------------------------------------------------------------------------------


def _engines(model: nn.Module) -> list[Engine]:
    """Of the model, or of the parts of it that are sharded."""
    return [e for e in (vars(m).get("towpath_engine") for m in model.modules()) if isinstance(e, Engine)]


def _listed(optimizers: Optimizers, check: bool = True) -> list[Optimizer]:
    """Return the optimizers one by one. Those made before `shard` then have the parameters of now (see `adopt`)."""
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in listed:
        adopt(optimizer, check)
    return [member for optimizer in listed for member in members_of(optimizer)]


def _parameters(model: nn.Module, options: StateDictOptions) -> dict[str, nn.Parameter]:
    renaming = [name for name, m in model.named_modules() if hasattr(m, options.dsd_fqn_modifiers)]
    if renaming:
        raise CheckpointError(
            f"{renaming[0] or 'the model'} has {options.dsd_fqn_modifiers}(), which renames parameters; the states of "
            "optimizers go by the names that they have. Save them with full_state_dict=False, or rename them yourself."
        )
    return parameters_of(model)[0]


def _add_by_name(optimizer: Optimizer, names: dict[int, str], found: StateDict) -> None:
    """Its state dict, which counts the parameters, with their names instead."""
    if isinstance(optimizer, OwnerSteppedOptimizer):  # its states are added by `_add_whole_states`
        own = {**Optimizer.state_dict(optimizer), "state": {}}
    else:
        own = optimizer.state_dict()
    groups = optimizer.param_groups
    order = [name_of(names, p, number) for number, group in enumerate(groups) for p in group["params"]]
    found["state"].update({order[number]: state for number, state in own["state"].items()})
    found["param_groups"] += [{**g, "params": [order[number] for number in g["params"]]} for g in own["param_groups"]]


def _add_whole_states(
    optimizer: OwnerSteppedOptimizer,
    parameters: dict[str, nn.Parameter],
    gathered: StateDict,
    options: StateDictOptions,
) -> None:
    """What each rank has of the parameters that it owns."""
    device = torch.device("cpu") if options.cpu_offload else None
    states = optimizer.whole_states(device, wanted=bool(gathered))
    names = {id(p): name for name, p in parameters.items()}
    if gathered:
        gathered["state"].update({names[id(parameter)]: state for parameter, state in states.items()})


def _load_whole_states(optimizer: OwnerSteppedOptimizer, names: dict[int, str], given: StateDict) -> None:
    """Of a dict that goes by names, what this rank owns, and the options of its groups."""
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    options = {name: g for g in given["param_groups"] for name in g["params"]}
    groups: list[StateDict] = []
    for group in optimizer.param_groups:
        mine = [names[id(p)] for p in group["params"]]
        groups.append({**group, **options.get(mine[0] if mine else "", {}), "params": [number[name] for name in mine]})
    states = {number[name]: state for name, state in given["state"].items() if name in number}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _flattened(tree: StateDict) -> StateDict:
    """As PyTorch flattens it: `state.NAME.KEY` and `param_groups.NAME.OPTION`."""
    flat = {f"state.{name}.{key}": v for name, state in tree["state"].items() for key, v in state.items()}
    for group in tree["param_groups"]:
        options = [(key, value) for key, value in group.items() if key != "params"]
        flat.update({f"param_groups.{name}.{key}": v for name in group["params"] for key, v in options})
    return flat


def _nested(flat: StateDict) -> StateDict:
    """And back, with a group for each parameter."""
    found: dict[str, dict[str, StateDict]] = {"state": defaultdict(dict), "param_groups": defaultdict(dict)}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found[kind][name][key] = value
    groups = [{"params": [name], **options} for name, options in found["param_groups"].items()]
    return {"state": dict(found["state"]), "param_groups": groups}


# All ranks alike ------------------------------------------------------------------------------------------------------


def _alike(call: str, engines: Sequence[Engine], work: Callable[[], StateDict], compare: bool = True) -> StateDict:
    """What `work` finds; or an error on every rank, where it failed on one or found other tensors there."""
    engines[0].comm.record.peers.come_together(f"{call}()")
    lines, found, failure = list[str](), StateDict(), None
    try:
        if any(engine.kept_unsharded for engine in engines):
            raise CheckpointError(f"{call} inside towpath.full_parameters(): call it before or after.")
        found = work()
        leaves = trees.tree_flatten_with_path(found)[0] if compare else []
        lines = [f"{_path(keys)}: {_kind(leaf)}" for keys, leaf in leaves]
    except TowpathError as error:
        failure = error
    except Exception as error:  # whatever it is: the others wait for an answer
        failure = CheckpointError(f"{call}: {described(error)}")
    agree(engines[0].comm.groups, lines, failure, call, _ADVICE)
    return found


def _path(keys: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"
    return type(leaf).__name__


# Gathering ------------------------------------------------------------------------------------------------------------


def _gathered(tree: StateDict, engine: Engine, options: StateDictOptions) -> StateDict:
    """With whole tensors, one unit at a time; of one tensor under two names there is one."""
    device = torch.device("cpu") if options.cpu_offload else None
    sharded = {id(leaf.held): leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, ShardTensor)}
    wanted = not options.cpu_offload or _is_first(engine, sharded.values())
    counts, batches = Counter[int](), defaultdict[Any, list[ShardTensor]](list)
    for leaf in sharded.values():  # an optimizer has several states of one parameter: each kind is gathered by itself
        counts[id(leaf.shard_spec)] += 1
        batches[id(leaf.shard_spec.replica), leaf.shard_spec.unit, leaf.dtype, counts[id(leaf.shard_spec)]].append(leaf)
    wholes: dict[int, torch.Tensor] = {}
    for batch, found in zip(batches.values(), whole_tensors([*batches.values()], device, wanted), strict=True):
        wholes.update(zip((id(leaf.held) for leaf in batch), found, strict=wanted))

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, ShardTensor):
            return wholes[id(leaf.held)]
        if isinstance(leaf, torch.Tensor):  # a buffer, or a number of steps: what trains goes on writing to it
            return leaf.detach().to(device or leaf.device, copy=True)
        return leaf

    return trees.tree_map(whole, tree) if wanted else {}


def _is_first(engine: Engine, tensors: Iterable[ShardTensor]) -> bool:
    """Whether this is rank 0, of a tensor-parallel mesh too."""
    mesh_ranks = [t.shard_spec.parallel.ranks for t in tensors if t.shard_spec.parallel is not None]
    groups = engine.comm.groups
    return groups.rank == 0 and (not mesh_ranks or groups.members[0] == min(mesh_ranks[0]))


# Taking over ----------------------------------------------------------------------------------------------------------

Take = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _AtRank0:
    """A tensor that rank 0 has."""

    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(leaf: Any) -> Any:
        return _AtRank0(leaf.shape, leaf.dtype) if _travels(leaf) else leaf


def _given(
    call: str, engines: Sequence[Engine], check: Callable[[], StateDict], options: StateDictOptions, take: Take
) -> StateDict:
    """The dict that was passed, here or on rank 0, with what `take` makes of its tensors, one after the other."""
    groups, device = engines[0].comm.groups, engines[0].comm.device

    def checked() -> StateDict:
        tree = check()
        if any(isinstance(leaf, ShardTensor) for leaf in trees.tree_leaves(tree)):
            raise CheckpointError(
                f"{call}: got ShardTensors with full_state_dict=True. Leave it out, as it was when the dict was made."
            )
        return tree

    given = _alike(call, engines, checked, compare=not options.broadcast_from_rank0)
    at_rank_0 = iter(())
    if options.broadcast_from_rank0:
        at_rank_0 = iter([leaf for leaf in trees.tree_leaves(given) if _travels(leaf)])
        given = groups.gather_objects(trees.tree_map(_AtRank0.of, given) if groups.rank == 0 else None)[0]
    for engine in engines:
        engine.tell_before_rewrite()

    def receive(keys: Sequence[Any], leaf: Any) -> Any:
        if isinstance(leaf, _AtRank0):
            here = next(at_rank_0) if groups.rank == 0 else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            leaf = here.detach().to(device).contiguous()
            groups.broadcast(leaf)
        return take(_path(keys), leaf) if isinstance(leaf, torch.Tensor) else leaf

    return trees.tree_map_with_path(receive, given)


def _travels(leaf: Any) -> bool:
    """Other leaves, numbers of steps for instance, are told with the names."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _slice_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like.detach(), dtype=whole.dtype).copy_(whole)


def _without_gathering(options: StateDictOptions) -> StateDictOptions:
    return replace(
        options,
        full_state_dict=False,
        cpu_offload=False,
        broadcast_from_rank0=False,
        flatten_optimizer_state_dict=False,
    )
