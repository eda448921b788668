"""FSDP2's private state, as far as the wires read or set it. `tools/fsdp_interface.py` checks it for each PyTorch.

FSDP2 lets a module bring its own all-gather and reduce-scatter. It has no public name for the rest: which parameters
belong to the module, what their shards are in memory, and which process groups they are sharded and replicated over.
A module has one group of parameters for each mesh that they are sharded over, and modules may share one. Where a
function takes an `owner`, it is a group, or a module with one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def param_groups(owner: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters that belong to a module itself, or the group that is passed."""
    if not isinstance(owner, nn.Module):
        return [owner]
    state: Any = owner._get_fsdp_state()  # pyright: ignore
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13, a module had at most one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def parameters_of(owner: Any) -> list[Any]:
    """Return FSDP2's record of each parameter, in the order in which they are gathered."""
    return [each for group in param_groups(owner) for each in group.fsdp_params]


def shards_of(owner: Any) -> list[torch.Tensor]:
    """Return the flat and padded shard of each parameter. A model that leaves the meta device gets others."""
    return [each._sharded_param_data for each in parameters_of(owner)]


def versions_of(owner: Any) -> list[int]:
    """Return the version counter of each parameter, as optimizers, copies and state dicts move it."""
    # A DTensor counts its writes itself. The counter of the memory that `shards_of` returns stays where it is.
    return [each.sharded_param._version for each in parameters_of(owner)]


def trained_in(owner: Any, numel: int) -> tuple[int, ...] | None:
    """Return which parameters' gradients make up a shard of `numel` elements. None if this cannot be told."""
    # FSDP2 reduces the gradients that there are, and does not say of which parameters. It can be told if there are
    # those of all parameters that require one.
    each = parameters_of(owner)
    trained = tuple(i for i, one in enumerate(each) if one.sharded_param.requires_grad)
    return trained if sum(each[i].padded_sharded_param_size.numel() for i in trained) == numel else None


def has_own_cast(owner: Any) -> bool:
    """Return whether a tensor subclass decides what is gathered of a parameter, such as its fp8 values."""
    return any(hasattr(each.sharded_param.to_local(), "fsdp_pre_all_gather") for each in parameters_of(owner))


def dtypes_of(owner: Any) -> str:
    """Return the dtypes of parameters, and those in which they are gathered and reduced."""
    policy = parameters_of(owner)[0].mp_policy
    dtypes = [each.sharded_param.dtype for each in parameters_of(owner)]
    return f"{dtypes}, gathered and reduced in {policy.param_dtype}, {policy.reduce_dtype}"


def groups_of(owner: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the process group over which parameters are sharded, and that over which they are replicated."""
    info = parameters_of(owner)[0].mesh_info
    return getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None)


def set_replicate_group(owner: Any, group: dist.ProcessGroup) -> None:
    """Let FSDP2 reduce gradients over `group`."""
    for each in param_groups(owner):
        each.mesh_info.replicate_process_group = group


def comms_of(owner: Any) -> tuple[Any, Any]:
    """Return what FSDP2 calls to gather and to reduce."""
    group = param_groups(owner)[0]
    return group._all_gather_comm, group._reduce_scatter_comm


def set_comms(owner: Any, gather: Any, reduce: Any) -> None:
    """Let FSDP2 call `gather` and `reduce`."""
    # The public names, `set_custom_all_gather` and `set_custom_reduce_scatter`, refuse a module with several groups.
    [group] = param_groups(owner)
    group._all_gather_comm, group._reduce_scatter_comm = gather, reduce
