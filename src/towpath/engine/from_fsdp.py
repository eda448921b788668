"""Towpath's counterparts of FSDP2's methods and of the arguments of FSDP and FSDP2, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from towpath.core.presets import Options
from towpath.errors import ShardError

# What to do instead of calling the methods of FSDP2's modules, which a sharded model does not have.
_INSTEAD = {
    "set_is_last_backward set_requires_all_reduce set_requires_gradient_sync": (
        "Put the micro-steps before the last one inside `with towpath.no_sync(model):`. The backward pass after them "
        "reduces the gradients."
    ),
    "set_reshard_after_backward set_reshard_after_forward set_unshard_in_backward": (
        'The strategy says when weights are unsharded: "zero3" gathers them again for backward, "zero2" keeps them.'
    ),
    "set_modules_to_backward_prefetch set_modules_to_forward_prefetch": (
        "Leave the call out: the engine learns the order of the units in the first step, and then prefetches them."
    ),
    "set_all_reduce_hook set_custom_all_gather set_custom_reduce_scatter": (
        "Routes and codecs change what is sent, as in towpath.strategy('zero3', weights='int8'); see "
        "docs/concepts/routes.md and docs/concepts/codecs.md."
    ),
    "set_force_sum_reduction_for_comms set_gradient_divide_factor set_reduce_scatter_divide_factor": (
        "Gradients are the mean over all ranks. Multiply the loss by a factor for another scale."
    ),
    "set_allocate_memory_from_process_group_for_comm set_reduce_scatter_max_input_buffers set_symm_mem_for_comm": (
        "Leave the call out: the engine allocates no buffer after the second step."
    ),
    "reshard unshard": (
        "Use model.unshard() and model.reshard() for the whole model, or `with "
        "towpath.full_parameters(model, [part]):` for a part of it."
    ),
    "reset_iter_state": "Leave the call out: once every rank has caught the exception, training goes on.",
    "set_post_optim_event": "Leave the call out: the engine waits for the optimizer before it sends new weights.",
    "set_reduce_scatter_unused_params": (
        "Leave the call out: a parameter that some ranks use gets the mean over all ranks, one that no rank uses has "
        "no gradient."
    ),
    "set_separate_reduce_scatter_group": "Leave the call out: gathers and reductions have groups of their own.",
}
COUNTERPARTS = {name: instead for names, instead in _INSTEAD.items() for name in names.split()}

_UNITS = "units=[Block], where the blocks are not children of a ModuleList"

# The keyword arguments of FSDP and of FSDP2's `fully_shard`, and what `shard()` has for them.
ARGUMENTS = {
    "auto_wrap_policy": _UNITS,
    "backward_prefetch": "nothing: units are always prefetched",
    "forward_prefetch": "nothing: units are always prefetched",
    "limit_all_gathers": "nothing: two units are unsharded at a time",
    "cpu_offload": 'towpath.strategy(name, offload="optimizer"); weights stay on the device',
    "device_id": "device=",
    "device_mesh": "mesh=",
    "dp_mesh_dims": 'mesh=mesh["replicate", "shard"]',
    "ignored_modules": "no counterpart: every parameter of the model is sharded",
    "ignored_params": "no counterpart: every parameter of the model is sharded",
    "ignored_states": "no counterpart: every parameter of the model is sharded",
    "mixed_precision": "precision=, a dtype or a towpath.Precision",
    "mp_policy": "precision=, which takes the policy as it is",
    "offload_policy": 'towpath.strategy(name, offload="optimizer"); weights stay on the device',
    "param_init_fn": "values=, or the modules' reset_parameters()",
    "process_group": "group=",
    "reshard_after_forward": 'the strategy: "zero3" for True, "zero2" for False',
    "shard_placement_fn": "no counterpart: a unit is cut into equal slices",
    "sharding_strategy": 'the strategy: "zero3" for FULL_SHARD, "mics" for HYBRID_SHARD',
    "sync_module_states": "nothing: the values of rank 0 are every rank's",
    "use_orig_params": "nothing: it is always so",
}


class NoMethodError(ShardError, AttributeError):
    """A method of FSDP2's modules that a sharded model does not have. The message names the replacement.

    It is an AttributeError too, so that `hasattr` returns False and libraries do not take the model for an FSDPModule.
    """


def check_arguments(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name in ARGUMENTS:
            raise ShardError(f"shard() has no {name}=. Use instead: {ARGUMENTS[name]}. See docs/start/from-fsdp2.md.")
        if name in Options.__annotations__:
            raise TypeError(
                f"shard() got {name!r}, an option of towpath.strategy(). Pass towpath.strategy(preset, {name}=…)."
            )
        nearest = difflib.get_close_matches(name, known, 1)
        meant = f" Did you mean {nearest[0]}=?" if nearest else ""
        raise TypeError(f"shard() got an unexpected keyword argument {name!r}.{meant}")
