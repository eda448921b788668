"""`save_pretrained` of a sharded model, as Hugging Face, PEFT and Diffusers have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from towpath.checkpoint.dcp.calls import described
from towpath.checkpoint.state_dicts import get_model_state_dict
from towpath.engine.build import agree
from towpath.engine.executor import engine_of
from towpath.engine.parameters.full_parameters import reshard, unshard
from towpath.errors import CheckpointError


def save_pretrained(model: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `save`, the model's own method, on rank 0, with whole tensors; every rank must come here.

    Where it takes a state dict it is given one, gathered unit by unit; else the model is whole meanwhile, everywhere.
    """
    engine = engine_of(model)
    groups, signature = engine.comm.groups, inspect.signature(save)
    given = signature.bind(*args, **kwargs).arguments.get("state_dict", kwargs.get("state_dict"))
    if engine.kept_unsharded == engine.units or given:
        return save(*args, **kwargs)
    if given is not None:  # an empty one, as get_model_state_dict gives all ranks but rank 0
        return None
    writes, made = groups.rank == 0, []
    if "state_dict" in signature.parameters or hasattr(model, "peft_config"):  # PEFT takes it without naming it
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        kwargs["state_dict"] = get_model_state_dict(model, options=options)
        writes = bool(kwargs["state_dict"])
    else:
        engine.comm.record.peers.come_together("save_pretrained()")
        made = unshard(engine)
    failure, result = None, None
    try:
        result = save(*args, **kwargs) if writes else None
    except Exception as error:  # whatever it is: the others wait for an answer
        failure = CheckpointError(f"save_pretrained: {described(error)}")
        failure.__cause__ = error
    reshard(engine, None, made)
    agree(groups, [], failure, "save_pretrained()")
    return result
