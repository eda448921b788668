"""Calls torch.distributed.checkpoint, and makes of its failures what a user can read.

Its `CheckpointException` is no `Exception`, and holds the failures of all ranks: the same ones on each of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from towpath.checkpoint.control_group import ControlGroup
from towpath.checkpoint.dcp.planning import JsonLoadPlanner, JsonSavePlanner
from towpath.checkpoint.dcp.storage import FolderReader, FolderWriter
from towpath.checkpoint.disk.claim import FolderInUseError
from towpath.errors import CheckpointError, TowpathError


def save(found: dict[str, Any], writer: FolderWriter, planner: JsonSavePlanner, control: ControlGroup) -> None:
    if control.group is not None:
        _explained(lambda: dcp_save(found, storage_writer=writer, planner=planner, process_group=control.group))
        return
    # dcp.save would warn that there is nobody else; these are its steps.
    planner.set_up_planner(found, None, True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def load(targets: dict[str, torch.Tensor], reader: FolderReader, control: ControlGroup) -> None:
    planner = JsonLoadPlanner()
    if control.group is not None:
        _explained(lambda: dcp_load(targets, storage_reader=reader, planner=planner, process_group=control.group))
        return
    metadata = reader.read_metadata()
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    [plan] = reader.prepare_global_plan(planner.create_global_plan([planner.create_local_plan()]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _explained(work: Callable[[], object]) -> None:
    try:
        work()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        others = len(error.failures) - 1
        more = f" ({others} more ranks failed)" if others else ""
        for each in (error, *(failed for failed, _ in error.failures.values())):
            _clear(each)
        kind = FolderInUseError if isinstance(first, FolderInUseError) else CheckpointError
        raise kind(f"rank {rank}: {described(first)}{more}") from None


def _clear(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold. Some of DCP's hold the error itself: the saver, its memory and its
    claim on the folder would live on until Python collects."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def described(error: BaseException) -> str:
    return str(error) if isinstance(error, TowpathError) else f"{type(error).__name__}: {error}"
