"""A case of tools/gpu.py, and what a process does to run one.

This module and its neighbors import nothing but torch and Towpath. A case that reuses a function of tests/ranks names
it as text, and needs what that module imports.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PROOF, FIGURES = "proof", "figures"
# An argument of a case: a folder of its own, which all its ranks share.
FOLDER = "<folder>"
# Over gloo for tensors on the host, and NCCL for those on the GPU.
BOTH = "cpu:gloo,cuda:nccl"


class SkipError(Exception):
    """Raised by a case that finds out that it cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to try, on some ranks."""

    name: str
    feature: str  # of tests/features.py
    # What each rank calls, or the name of it, as in "tests.ranks.test_exact:_compare". It may return figures by name.
    run: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    part: str = PROOF
    # How many ranks of one group. None: a process without ranks, next to others.
    ranks: int | None = 4
    # Whether `run` joins a group itself, in processes that no other case uses (see `join`).
    alone: bool = False
    limit: float = 60.0  # seconds; kernels are compiled in it
    # "cuda", "program NAME" or the name of a module.
    needs: tuple[str, ...] = ()

    def missing(self, device: str) -> str | None:
        """Return why this case cannot run here, if it cannot."""
        for need in self.needs:
            if need == "cuda":
                if device != "cuda":
                    return "needs a CUDA device"
            elif need.startswith("program "):
                if shutil.which(need.removeprefix("program ")) is None:
                    return f"needs the {need}"
            elif importlib.util.find_spec(need) is None:
                return f"needs the module {need}"
        return None

    def call(self, folder: str) -> dict[str, Any]:
        """Run the case in this process, and return its figures."""
        run = self.run
        if isinstance(run, str):
            module, _, name = run.partition(":")
            run = getattr(importlib.import_module(module), name)
        found = run(*(Path(folder) if each == FOLDER else each for each in self.args))
        return found if isinstance(found, dict) else {}  # what a function of tests/ranks returns is for its own test


def perform(case: Case, folder: str) -> dict[str, Any]:
    """Run a case on a rank that other cases use afterwards. Return its figures, or {"skipped": reason}."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tests.ranks.models import DEVICE

    torch.manual_seed(0)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        # What is compared to the bit has to be the same in every run. Faster kernels of attention add in any order.
        with sdpa_kernel(SDPBackend.MATH) if case.part == PROOF else nullcontext():
            found = case.call(folder)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    except SkipError as reason:
        return {"skipped": str(reason)}
    finally:
        gc.collect()  # the queues of a model end with it
        if DEVICE.type == "cuda":
            with suppress(RuntimeError):  # of an earlier kernel: it is what the case has failed with
                torch.cuda.empty_cache()
    return {name: value for name, value in found.items() if isinstance(value, int | float | str)}


def is_sound() -> None:
    """Raise if this rank can no longer use its device, or reach the other ranks."""
    import torch
    import torch.distributed as dist

    from tests.ranks.models import DEVICE

    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    total = torch.ones(1, device=DEVICE)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def perform_alone(case: Case, folder: str, seconds: float) -> None:
    """Run a case in a process of its own, for so many seconds at most, and print its figures as the last line."""
    import faulthandler

    import torch.distributed as dist

    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        found = case.call(folder)
    except SkipError as reason:
        found = {"skipped": str(reason)}
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def join(
    folder: Path,
    backend: str | None = None,
    bound: bool = False,
    own_host: bool = True,
    seconds: float = 60.0,
) -> tuple[int, int]:
    """Join the group of a case that runs alone. Return the rank and the number of ranks.

    Args:
        folder: Where the ranks meet.
        backend: By default gloo, and NCCL as well on a GPU.
        bound: Whether the group is told its device, so that NCCL connects at once.
        own_host: Whether the ranks may share a GPU: NCCL takes each for a host.
        seconds: How long a collective waits for a peer.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.harness.shared_gpu import share_gpu
    from tests.ranks.models import DEVICE

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = None
    if DEVICE.type == "cuda":
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        if own_host:
            share_gpu(rank)
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0) if bound else None
    dist.init_process_group(
        backend or ("gloo" if DEVICE.type == "cpu" else BOTH),
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        device_id=device,
        timeout=timedelta(seconds=seconds),
    )
    return rank, world
