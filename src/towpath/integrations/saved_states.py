"""What frameworks keep of a run beside their own files: our checkpoint in a folder of theirs; and what a run that was
not sharded has left there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from towpath.checkpoint import Saver, State, latest, load
from towpath.checkpoint.folders import step_of
from towpath.checkpoint.rank_contents import described
from towpath.checkpoint.state_dicts import set_model_state_dict, set_optimizer_state_dict
from towpath.engine.executor import engine_of
from towpath.errors import CheckpointError
from towpath.logs import logger

FOLDER = "towpath"
_LOG = logger("integrations")
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save_into(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """One checkpoint in `folder`, in place of the one there. Every rank must call it, and all raise if it fails."""
    state = State(model, optimizer)
    newest = _on_rank_0(model, lambda: latest(folder, quiet=True))
    step = 0 if newest is None else step_of(newest) + 1
    saver = Saver(folder, state, keep_last=1, background=False, lane="checkpoint at once")
    outcome = saver.save(step).outcome()
    saver.close()
    if outcome.failure is not None:
        raise CheckpointError(outcome.failure)


def load_from(folder: str | Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """What `save_into` left, under any strategy and on any number of ranks. Every rank must call it."""
    loaded = load(folder, State(model, optimizer))
    if loaded is None:
        raise CheckpointError(f"{folder}: no checkpoint of a sharded model. Expected what Towpath's integration saved.")
    for note in loaded.notes if engine_of(model).comm.groups.rank == 0 else ():
        _LOG.warning("%s", note)


def load_whole(
    model: nn.Module,
    read_model: Callable[[], Mapping[str, Any]] | None,
    optimizer: Optimizer | None,
    read_optimizer: Callable[[], Mapping[str, Any]] | None,
    *,
    strict: bool = True,
) -> None:
    """Fill both from ordinary state dicts of whole tensors, which rank 0 reads. Every rank must call it."""
    if read_model is not None:
        found = _on_rank_0(model, read_model, share=False)
        set_model_state_dict(model, dict(found or {}), options=replace(_FROM_RANK_0, strict=strict))
    if optimizer is not None and read_optimizer is not None:
        stepped, read = optimizer, read_optimizer
        found = _on_rank_0(model, lambda: _by_name(model, stepped, read()), share=False)
        set_optimizer_state_dict(model, optimizer, found or {}, options=_FROM_RANK_0)


def _by_name(model: nn.Module, optimizer: Optimizer, numbered: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that numbers the parameters, as an optimizer's own does, with their names instead."""
    names = {id(p): name for name, p in model.named_parameters()}
    ours = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in numbered["param_groups"]]
    if [*map(len, ours)] != [*map(len, theirs)]:
        raise CheckpointError(
            f"the optimizer that was saved has groups of {[*map(len, theirs)]} parameters; this one of "
            f"{[*map(len, ours)]}. Make the optimizer as it was when it was saved."
        )
    order = {
        number: name for group, own in zip(theirs, ours, strict=True) for number, name in zip(group, own, strict=True)
    }
    return {
        "state": {order[number]: state for number, state in numbered["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(numbered["param_groups"], ours, strict=True)],
    }


def numbered(model: nn.Module, optimizer: Optimizer, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """And back: what an optimizer of whole parameters would call its state dict."""
    if not by_name:  # on all ranks but rank 0
        return {}
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    number = {name: place for place, name in enumerate(order)}
    return {
        "state": {number[name]: state for name, state in by_name["state"].items()},
        "param_groups": [{**g, "params": [number[name] for name in g["params"]]} for g in by_name["param_groups"]],
    }


def _on_rank_0(model: nn.Module, work: Callable[[], Any], share: bool = True) -> Any:
    """What `work` returns on rank 0, here or, unless `share`, there alone; where it fails, every rank raises."""
    groups = engine_of(model).comm.groups
    found, problem = None, None
    if groups.rank == 0:
        try:
            found = work()
        except Exception as error:  # whatever it is: the others wait for an answer
            problem = described(error)
    told, problem = groups.gather_objects((found if share else None, problem))[0]
    if problem is not None:
        raise CheckpointError(problem)
    return told if share else found


def on_cpu(path: str | Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
