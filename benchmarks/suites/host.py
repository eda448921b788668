"""Measure the time that one rank of a large world spends on the host, per unit and micro-step.

    host [CASE …] [--against COMMIT] [--rounds 6] [--quick]

The rank runs alone, on a fake process group of 64 ranks that sends nothing (benchmarks/harness/fake_world.py). Its
model has the parameters of Llama's blocks, narrower, but cut into as many parts as the real ones: the number of calls
does not depend on the width. The blocks compute nothing, and the kernels of codecs are left out. What remains is the
time of Python and of PyTorch's dispatcher. With --against, the code of another commit takes turns with HEAD's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import results
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.overhead import checkout

NODES, RANKS_PER_NODE = 8, 8
BLOCKS = 8
# The matrices and norms of a Llama block, 64 times narrower than those of the model with 7 billion parameters.
SHAPES = (*[(64, 64)] * 4, (172, 64), (172, 64), (64, 172), (64,), (64,))
SMALLEST_PART_BYTES = 32
WARM_UP, MICRO_STEPS = 3, 15
# What a flat strategy may take at most, and what zero++ must take at most, of the seconds of another commit.
FLAT, CODED = ("ddp", "zero3", "mics", "paro-iig", "hpz"), ("zero++", "qwz", "qgz", "paro-ggg")
AT_MOST = {**dict.fromkeys(FLAT, 1.05), "zero++": 1 / 6}


class _NoWork(torch.autograd.Function):
    """Returns its input, and gradients of ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = [torch.ones_like(w) for w in weights]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *ctx.gradients


class Block(nn.Module):
    """The parameters of a block, without its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NoWork.apply(x, *self.weights)


def milliseconds(strategy: str, device: str = "cpu") -> float:
    """Return the median milliseconds per unit and micro-step of one rank, without its boundaries.

    On a GPU, its streams and the kernels of codecs are launched.

    Args:
        strategy: The name of a strategy, or "fsdp2" for PyTorch's `fully_shard`.
        device: "cpu" or "cuda".
    """
    import towpath
    from benchmarks.harness.fake_world import fake_world
    from towpath.core import routes

    routes.SMALLEST_PART_BYTES = SMALLEST_PART_BYTES
    torch.set_num_threads(1)
    with fake_world(NODES, RANKS_PER_NODE, device, kernels=device == "cuda", watch=False) as (topology, _):
        blocks = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device, torch.bfloat16)
        if strategy == "fsdp2":
            model, no_sync = blocks, _fully_sharded(blocks, device)
        else:
            model: Any = towpath.shard(blocks, strategy, topology=topology, units=[Block])
            no_sync = model.no_sync
        x, found = torch.ones(2, 4, dtype=torch.bfloat16, device=device, requires_grad=True), list[float]()
        for _ in range(WARM_UP + MICRO_STEPS):
            began = time.perf_counter()
            with no_sync():
                model(x).sum().backward()
            found.append(time.perf_counter() - began)
    return statistics.median(found[WARM_UP:]) / BLOCKS * 1e3


def _fully_sharded(blocks: nn.Sequential, device: str) -> Callable[[], AbstractContextManager[None]]:
    """Shard by FSDP2, and return what stands for `no_sync`. As in zero3, each micro-step reduces gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (NODES * RANKS_PER_NODE,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(blocks, mesh=mesh)
    return nullcontext


@dataclass(frozen=True, slots=True)
class HostCase:
    """One strategy, in processes of its own."""

    name: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Measure HEAD's working tree, and another commit in turn."""
        other: str | None = settings.options.against
        with checkout(other) if other else nullcontext(results.ROOT) as tree:
            sides = {"now": results.ROOT} | ({"before": tree} if other else {})
            found: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(settings.rounds):
                for side, root in sides.items():
                    found[side].append(in_process(self.name, root))
        now = statistics.median(found["now"])
        checks = [Check("host milliseconds per unit and micro-step", now)]
        if other:
            ratio = now / statistics.median(found["before"])
            checks.append(Check("now / before", ratio, at_most=AT_MOST.get(self.name)))
        return {"checks": checks, "milliseconds": found, "against": other}


# The code at the given root, instead of what is installed.
_PROGRAM = """
import json, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path[:0] = [sys.argv[1] + "/src", "."]
from benchmarks.suites.host import milliseconds
print(json.dumps(milliseconds(*sys.argv[2:])))
"""


def in_process(strategy: str, root: Path = results.ROOT, device: str = "cpu") -> float:
    """Return the milliseconds of a strategy, measured in a new process with the code at `root`."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(root), strategy, device]
    done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CaseError(f"{strategy}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="COMMIT", help="the other side")


SUITES = (Suite("host", __doc__ or "", [HostCase(name) for name in (*FLAT, *CODED)], options=_against),)
