"""State dicts in memory: four functions of torch.distributed.checkpoint.state_dict, for sharded models.

PyTorch's functions gather only DTensors. These have the same names, arguments and results, and also gather
ShardTensors, one unit at a time. They call PyTorch's functions for unsharded models and for `full_state_dict=False`,
which returns ShardTensors for torch.distributed.checkpoint.
"""

from __future__ import annotations

import inspect
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

from towpath.checkpoint.local_state import parameters_of
from towpath.checkpoint.state import is_like, name_of
from towpath.core.formats import dtype_name
from towpath.engine.executor import Engine, engine_of
from towpath.engine.optimizer_steps import adopt
from towpath.engine.parameters.full_parameters import reshard, unshard
from towpath.engine.parameters.shard_spec import whole_tensors
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError
from towpath.optim import OwnerSteppedOptimizer, members_of
from towpath.topology.together import AllRanks, together

StateDict = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer]

_ADVICE = (
    "Let every rank call it with the same arguments; where rank 0 alone has the dict, set broadcast_from_rank0=True."
)


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> StateDict:
    """Return the parameters and persistent buffers of a model by name. Every rank must call it.

    The values are those that the optimizer steps, such as fp32 masters, even if the model computes in another dtype.

    Args:
        model: The model, sharded or not.
        submodules: Return only the tensors of these modules.
        options: PyTorch's options. With `full_state_dict`, every rank gets full tensors. With `cpu_offload` as well,
            only rank 0 gets them, on the CPU, and the others get an empty dict. Otherwise each rank gets its shards.

    Returns:
        The tensors by their names in the unsharded model.

    Raises:
        CheckpointError: It was called inside `full_parameters()`, or it failed on some rank.
        MismatchError: Ranks called it with different models or arguments.
    """
    engines, options = _engines(model), options or StateDictOptions()

    def collect() -> StateDict:
        return pytorchs.get_model_state_dict(model, submodules=submodules, options=_without_gathering(options))

    if not (engines and options.full_state_dict):
        return pytorchs.get_model_state_dict(model, submodules=submodules, options=options)
    return _gathered(_on_all_ranks("get_model_state_dict", engines, collect), engines[0], options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """Return the states of optimizers by the names of their parameters, and their groups. Every rank must call it.

    With `full_state_dict`, an optimizer that has not stepped has no states. PyTorch's function would step it once,
    which changes the following steps.

    Args:
        model: The model, sharded or not.
        optimizers: The model's optimizer, or several.
        submodules: Not supported with `full_state_dict`.
        options: PyTorch's options. They select the ranks that get the states, as in `get_model_state_dict`.

    Returns:
        A dict with "state" and "param_groups", or a flat dict with `flatten_optimizer_state_dict`.

    Raises:
        CheckpointError: It was called inside `full_parameters()`, or it failed on some rank.
        MismatchError: Ranks called it with different optimizers or arguments.
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
    tree = _on_all_ranks("get_optimizer_state_dict", engines, collect)
    gathered = _gathered(tree, engines[0], options)
    for optimizer in _listed(optimizers):
        if isinstance(optimizer, OwnerSteppedOptimizer):
            _add_owned_states(optimizer, _parameters(model, options), gathered, options)
    if options.flatten_optimizer_state_dict and gathered:
        return pytorchs._flatten_optim_state_dict(gathered)  # pyright: ignore[reportPrivateUsage]
    return gathered


def set_model_state_dict(
    model: nn.Module, model_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> Any:
    """Load what `get_model_state_dict` returned, under any strategy. Every rank must call it.

    Args:
        model: The model, sharded or not.
        model_state_dict: The tensors by name. With `full_state_dict` and `broadcast_from_rank0`, only rank 0 passes
            them, and the others pass an empty dict. Otherwise every rank passes its dict.
        options: PyTorch's options, such as those that the dict was made with.

    Returns:
        The missing and the unexpected keys.

    Raises:
        CheckpointError: It was called inside `full_parameters()`, or it failed on some rank.
        MismatchError: Ranks passed different dicts.
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
    """Load what `get_optimizer_state_dict` returned, under any strategy. Every rank must call it.

    It also loads the options of the groups (lr, betas, …).

    Args:
        model: The model, sharded or not.
        optimizers: The model's optimizer, or several.
        optim_state_dict: The states by name. The ranks that pass them are those of `set_model_state_dict`.
        options: PyTorch's options, such as those that the dict was made with.

    Raises:
        CheckpointError: It was called inside `full_parameters()`, or it failed on some rank.
        MismatchError: Ranks passed different dicts.
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
        _load_owned_states(optimizer, names, given)
    others = [optimizer for optimizer in listed if not isinstance(optimizer, OwnerSteppedOptimizer)]
    if not others:
        return
    for optimizer in others:
        for group in () if optimizer.state else optimizer.param_groups:
            # Or PyTorch would step it once, to find out which states it has.
            for parameter in group["params"]:
                optimizer.state[parameter] = {}
    pytorchs.set_optimizer_state_dict(model, others, given, options=_without_gathering(options))


# --- names ------------------------------------------------------------------------------------------------------------


def _engines(model: nn.Module) -> list[Engine]:
    """Return the engine of the model, or those of its sharded submodules."""
    return [e for e in (vars(m).get("towpath_engine") for m in model.modules()) if isinstance(e, Engine)]


def _listed(optimizers: Optimizers, check: bool = True) -> list[Optimizer]:
    """Return the optimizers one by one, and give those made before `shard` the sharded parameters (see `adopt`)."""
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
    """Add the state dict of an optimizer to `found`, with names in place of the numbers of parameters."""
    if isinstance(optimizer, OwnerSteppedOptimizer):  # its states are added by `_add_owned_states`
        own = {**Optimizer.state_dict(optimizer), "state": {}}
    else:
        own = optimizer.state_dict()
    groups = optimizer.param_groups
    order = [name_of(names, p, number) for number, group in enumerate(groups) for p in group["params"]]
    found["state"].update({order[number]: state for number, state in own["state"].items()})
    found["param_groups"] += [{**g, "params": [order[number] for number in g["params"]]} for g in own["param_groups"]]


def _add_owned_states(
    optimizer: OwnerSteppedOptimizer,
    parameters: dict[str, nn.Parameter],
    gathered: StateDict,
    options: StateDictOptions,
) -> None:
    """Gather the states of parameters from the ranks that own them, and add them to `gathered`."""
    device = torch.device("cpu") if options.cpu_offload else None
    states = optimizer.whole_states(device, wanted=bool(gathered))
    names = {id(p): name for name, p in parameters.items()}
    if gathered:
        gathered["state"].update({names[id(parameter)]: state for parameter, state in states.items()})


def _load_owned_states(optimizer: OwnerSteppedOptimizer, names: dict[int, str], given: StateDict) -> None:
    """Load the states that this rank owns, and the options of its groups, from a dict with names of parameters."""
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    options = {name: g for g in given["param_groups"] for name in g["params"]}
    groups: list[StateDict] = []
    for group in optimizer.param_groups:
        mine = [names[id(p)] for p in group["params"]]
        groups.append({**group, **options.get(mine[0] if mine else "", {}), "params": [number[name] for name in mine]})
    states = {number[name]: state for name, state in given["state"].items() if name in number}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _nested(flat: StateDict) -> StateDict:
    """Return the nested dict of a flat one, with one group for each parameter."""
    found: dict[str, dict[str, StateDict]] = {"state": defaultdict(dict), "param_groups": defaultdict(dict)}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found[kind][name][key] = value
    groups = [{"params": [name], **options} for name, options in found["param_groups"].items()]
    return {"state": dict(found["state"]), "param_groups": groups}


# --- agreement --------------------------------------------------------------------------------------------------------


def _on_all_ranks(
    call: str, engines: Sequence[Engine], work: Callable[[], StateDict], compare: bool = True
) -> StateDict:
    """Return the result of `work`. Raise on every rank if it fails on one, or if the results have other tensors."""
    comm = engines[0].comm
    comm.program.meet(f"{call}()")

    def checked() -> StateDict:
        if any(engine.kept_unsharded for engine in engines):
            raise CheckpointError(f"{call} inside towpath.full_parameters(): call it before or after.")
        return work()

    found = AllRanks(comm.job, f"{call}()", CheckpointError).each(checked)
    if compare:
        with together(comm.job, f"{call}()", _ADVICE) as lines:
            lines += [f"{_path(keys)}: {_kind(leaf)}" for keys, leaf in trees.tree_flatten_with_path(found)[0]]
    return found


def _path(keys: Sequence[Any]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _kind(leaf: Any) -> str:
    tensor = isinstance(leaf, torch.Tensor)
    return f"{dtype_name(leaf.dtype)} of shape {tuple(leaf.shape)}" if tensor else type(leaf).__name__


# --- gathering --------------------------------------------------------------------------------------------------------


def _gathered(tree: StateDict, engine: Engine, options: StateDictOptions) -> StateDict:
    """Return `tree` with full tensors, which are gathered one unit at a time. Tied tensors stay one tensor."""
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
        if isinstance(leaf, torch.Tensor):  # a buffer, or a number of steps, which the training changes later
            return leaf.detach().to(device or leaf.device, copy=True)
        return leaf

    return trees.tree_map(whole, tree) if wanted else {}


def _is_first(engine: Engine, tensors: Iterable[ShardTensor]) -> bool:
    """Return whether this is rank 0, also of a tensor-parallel mesh."""
    mesh_ranks = [t.shard_spec.parallel.ranks for t in tensors if t.shard_spec.parallel is not None]
    groups = engine.comm.job  # of several islands, the first one's weights are returned
    return groups.rank == 0 and (not mesh_ranks or groups.members[0] == min(mesh_ranks[0]))


# --- loading ----------------------------------------------------------------------------------------------------------

Take = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _AtRank0:
    """The description of a tensor that rank 0 has."""

    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(leaf: Any) -> Any:
        return _AtRank0(leaf.shape, leaf.dtype) if _is_sent(leaf) else leaf


def _given(
    call: str, engines: Sequence[Engine], check: Callable[[], StateDict], options: StateDictOptions, take: Take
) -> StateDict:
    """Return the dict that was passed, here or on rank 0. `take` converts each of its tensors."""
    groups, device = engines[0].comm.job, engines[0].comm.device

    def checked() -> StateDict:
        tree = check()
        if any(isinstance(leaf, ShardTensor) for leaf in trees.tree_leaves(tree)):
            raise CheckpointError(
                f"{call}: got ShardTensors with full_state_dict=True. Leave it out, as it was when the dict was made."
            )
        return tree

    given = _on_all_ranks(call, engines, checked, compare=not options.broadcast_from_rank0)
    at_rank_0 = iter(())
    if options.broadcast_from_rank0:
        at_rank_0 = iter([leaf for leaf in trees.tree_leaves(given) if _is_sent(leaf)])
        given = groups.all_gather_objects(trees.tree_map(_AtRank0.of, given) if groups.rank == 0 else None)[0]
    for engine in engines:
        engine.tell_before_rewrite()

    def receive(keys: Sequence[Any], leaf: Any) -> Any:
        if isinstance(leaf, _AtRank0):
            here = next(at_rank_0) if groups.rank == 0 else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            leaf = here.detach().to(device).contiguous()
            groups.broadcast(leaf)
        return take(_path(keys), leaf) if isinstance(leaf, torch.Tensor) else leaf

    return trees.tree_map_with_path(receive, given)


def _is_sent(leaf: Any) -> bool:
    """Return whether a leaf is sent as a tensor. Others, such as numbers of steps, are sent with the names."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _slice_of(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like.detach(), dtype=full.dtype).copy_(full)


def _without_gathering(options: StateDictOptions) -> StateDictOptions:
    others = "full_state_dict", "cpu_offload", "broadcast_from_rank0", "flatten_optimizer_state_dict"
    return replace(options, **dict.fromkeys(others, False))


# --- save_pretrained --------------------------------------------------------------------------------------------------


def save_pretrained(model: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Save a sharded model by its own `save_pretrained`, as Hugging Face, PEFT and Diffusers define it.

    Rank 0 writes, and gets the method's result. If the method accepts a state dict, full tensors are gathered unit by
    unit. Otherwise the parameters are unsharded meanwhile, on every rank. Every rank must call it.
    """
    engine = engine_of(model)
    groups, signature = engine.comm.job, inspect.signature(save)
    given = signature.bind(*args, **kwargs).arguments.get("state_dict", kwargs.get("state_dict"))
    if engine.kept_unsharded == engine.units or given:
        return save(*args, **kwargs)
    if given is not None:  # an empty dict, which get_model_state_dict returns on all ranks but rank 0
        return None
    writes, made = groups.rank == 0, []
    if "state_dict" in signature.parameters or hasattr(model, "peft_config"):  # PEFT accepts it without naming it
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        kwargs["state_dict"] = get_model_state_dict(model, options=options)
        writes = bool(kwargs["state_dict"])
    else:
        engine.comm.program.meet("save_pretrained()")
        made = unshard(engine)
    try:
        return AllRanks(groups, "save_pretrained()", CheckpointError).each(
            lambda: save(*args, **kwargs) if writes else None
        )
    finally:
        reshard(engine, None, made)
