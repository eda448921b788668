"""FSDP2's private state, as far as the wires read or set it. `tools/fsdp_interface.py` checks it for each PyTorch.

FSDP2 lets a module bring its own all-gather and reduce-scatter. It has no public name for the rest: which parameters
belong to the module, what their shards are in memory, and which process groups they are sharded and replicated over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def param_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters that belong to `module` itself."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13, a module had at most one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def parameters_of(module: Any) -> list[Any]:
    """Return FSDP2's record of each parameter of a module, in the order in which they are gathered."""
    return [each for group in param_groups(module) for each in group.fsdp_params]


def shards_of(module: Any) -> list[torch.Tensor]:
    """Return the flat and padded shard of each parameter. A model that leaves the meta device gets others."""
    return [each._sharded_param_data for each in parameters_of(module)]


def versions_of(module: Any) -> list[int]:
    """Return the version counter of each parameter of a module, as optimizers, copies and state dicts move it."""
    # A DTensor counts its writes itself. The counter of the memory that `shards_of` returns stays where it is.
    return [each.sharded_param._version for each in parameters_of(module)]


def trained_in(module: Any, numel: int) -> tuple[int, ...] | None:
    """Return which parameters' gradients make up a shard of `numel` elements. None if this cannot be told."""
    # FSDP2 reduces the gradients that there are, and does not say of which parameters. It can be told if there are
    # those of all parameters that require one.
    each = parameters_of(module)
    trained = tuple(i for i, one in enumerate(each) if one.sharded_param.requires_grad)
    return trained if sum(each[i].padded_sharded_param_size.numel() for i in trained) == numel else None


def has_own_cast(module: Any) -> bool:
    """Return whether a tensor subclass decides what is gathered of a parameter, such as its fp8 values."""
    return any(hasattr(each.sharded_param.to_local(), "fsdp_pre_all_gather") for each in parameters_of(module))


def dtypes_of(module: Any) -> str:
    """Return the dtypes of a module's parameters, and those in which they are gathered and reduced."""
    policy = module._get_fsdp_state()._mp_policy
    dtypes = [each.sharded_param.dtype for each in parameters_of(module)]
    return f"{dtypes}, gathered and reduced in {policy.param_dtype}, {policy.reduce_dtype}"


def groups_of(module: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the process group over which a module is sharded, and that over which it is replicated."""
    info = parameters_of(module)[0].mesh_info
    return getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None)


def set_replicate_group(module: Any, group: dist.ProcessGroup) -> None:
    """Let FSDP2 reduce the gradients of a module over `group`."""
    for each in param_groups(module):
        each.mesh_info.replicate_process_group = group


def comms_of(module: Any) -> tuple[Any, Any]:
    """Return what a module calls to gather and to reduce."""
    group = param_groups(module)[0]
    return group._all_gather_comm, group._reduce_scatter_comm
