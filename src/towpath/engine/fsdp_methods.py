"""The methods of FSDP2's modules that a sharded model does not have, and what to use instead."""

from __future__ import annotations

_ACCUMULATE = (
    "Put the micro-steps before the last one inside `with towpath.no_sync(model):`. The backward pass after them "
    "reduces the gradients."
)
_BY_STRATEGY = (
    'The strategy says when weights are whole: "zero3" gathers them again for the backward pass, "zero2" keeps them.'
)
_PREFETCH = "Leave the call out: the engine learns the order of the units in the first step, and then prefetches them."
_COMMUNICATION = (
    "Routes and codecs change what is sent, as in towpath.strategy('zero3', weights='int8'); see docs/routes.md and "
    "docs/codecs.md."
)
_MEAN = "Gradients are the mean over all ranks. Multiply the loss by a factor for another scale."
_BUFFERS = "Leave the call out: the engine allocates no buffer after the second step."
_PARTS = (
    "Use towpath.unshard(model) and towpath.reshard(model) for the whole model, or `with "
    "towpath.full_parameters(model, [part]):` for a part of it."
)

COUNTERPARTS = {
    "reset_iter_state": "Leave the call out: once every rank has caught the exception, training goes on.",
    "reshard": _PARTS,
    "set_all_reduce_hook": _COMMUNICATION,
    "set_allocate_memory_from_process_group_for_comm": _BUFFERS,
    "set_custom_all_gather": _COMMUNICATION,
    "set_custom_reduce_scatter": _COMMUNICATION,
    "set_force_sum_reduction_for_comms": _MEAN,
    "set_gradient_divide_factor": _MEAN,
    "set_is_last_backward": _ACCUMULATE,
    "set_modules_to_backward_prefetch": _PREFETCH,
    "set_modules_to_forward_prefetch": _PREFETCH,
    "set_post_optim_event": "Leave the call out: the engine waits for the optimizer before it sends new weights.",
    "set_reduce_scatter_divide_factor": _MEAN,
    "set_reduce_scatter_max_input_buffers": _BUFFERS,
    "set_reduce_scatter_unused_params": (
        "Leave the call out: a parameter that some ranks use gets the mean over all ranks, one that no rank uses has "
        "no gradient."
    ),
    "set_requires_all_reduce": _ACCUMULATE,
    "set_requires_gradient_sync": _ACCUMULATE,
    "set_reshard_after_backward": _BY_STRATEGY,
    "set_reshard_after_forward": _BY_STRATEGY,
    "set_separate_reduce_scatter_group": "Leave the call out: gathers and reductions have groups of their own.",
    "set_symm_mem_for_comm": _BUFFERS,
    "set_unshard_in_backward": _BY_STRATEGY,
    "unshard": _PARTS,
}
