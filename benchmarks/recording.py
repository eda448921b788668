"""Gradients of real training, which blocks that wait replay.

A block that waits computes nothing. With zeros for gradients, exact transports would have nothing to send. So a process
of its own trains the same model on text, on the batches of the first ranks, and records the gradients of the blocks.
All ranks of all candidates map the recording into their memory, and a replayed gradient costs a copy.

    record        trains, and writes RANKS gradients of each step, until a file has about MOST_BYTES
    Recording     finds the gradient of a block in a step, a micro-step and a rank, which all differ

A run that is longer than the recording starts it again, with the sign of the gradients reversed in every second
repetition. Gradients that came back unchanged would look to the optimizer like a steady direction, and its steps would
stay too large.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.workload import Workload

# The folder of recordings, which the processes of a suite share.
FOLDER = "TOWPATH_RECORDINGS"
# The ranks whose gradients are recorded, and the steps if they fit into a file of that size.
RANKS, FEWEST_STEPS, MOST_STEPS, MOST_BYTES = 8, 2, 32, 2 << 30


def folder() -> Path:
    """Return the folder of recordings. The first process that asks makes it, and removes it when it ends."""
    if FOLDER not in os.environ:
        made = tempfile.mkdtemp(prefix="towpath-recordings-")
        os.environ[FOLDER] = made
        atexit.register(rmtree, made, ignore_errors=True)
    return Path(os.environ[FOLDER])


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file has: the gradients of `blocks` blocks with `elements` trainable elements each, in `dtype`.

    They are ordered by step, rank and block. The parameters of a block are in the order of `parameters_of`.
    """

    workload: Workload
    steps: int
    ranks: int
    blocks: int
    elements: int

    @staticmethod
    def of(workload: Workload, blocks: Sequence[nn.Module]) -> Recording:
        """Return the recording of a model's blocks. Workloads that differ in how they wait share one."""
        same = replace(workload, micro_steps=1, wait_seconds=None, in_step=False)
        elements = sum(p.numel() for p in parameters_of(blocks[0]) if p.requires_grad)
        ranks = min(RANKS, workload.topology.world)
        step_bytes = ranks * len(blocks) * elements * workload.torch_dtype.itemsize
        steps = max(FEWEST_STEPS, min(MOST_STEPS, MOST_BYTES // step_bytes))
        return Recording(same, steps, ranks, len(blocks), elements)

    @property
    def file(self) -> Path:
        """The file, whether it exists or not."""
        return folder() / f"{sha256(repr(self).encode()).hexdigest()[:16]}.gradients"

    def mapped(self, file: Path, writable: bool = False) -> Tensor:
        """Return the gradients in `file`: [steps, ranks, blocks, elements]."""
        shape = (self.steps, self.ranks, self.blocks, self.elements)
        dtype = self.workload.torch_dtype
        return torch.from_file(str(file), shared=writable, size=prod(shape), dtype=dtype).view(shape)


@cache
def gradients_of(recording: Recording) -> Tensor:
    """Return the gradients of a recording. The first of all processes that ask makes it, and the others wait."""
    file = recording.file
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            # In a process of its own: its memory and its threads are none of a candidate's.
            made = subprocess.run(
                [sys.executable, "-m", __name__, str(file)],
                input=pickle.dumps(recording),
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            if made.returncode:
                raise RuntimeError(
                    f"recording the gradients of blocks that wait failed, with status {made.returncode}: "
                    f"{made.stderr.decode(errors='replace').strip()}"
                )
    return recording.mapped(file)


def record(recording: Recording, file: Path) -> None:
    """Train on text with AdamW, and write the gradients of each step and rank."""
    from benchmarks import gpt

    workload = recording.workload
    masters, model = workload.model(), workload.model().to(workload.torch_dtype)
    device = next(model.parameters()).device
    trained = [(p, m) for p, m in zip(model.parameters(), masters.parameters(), strict=True) if p.requires_grad]
    optimizer = torch.optim.AdamW([m for _, m in trained], lr=workload.learning_rate, fused=True)
    data = [gpt.batches(rank, workload.batch, workload.length) for rank in range(recording.ranks)]
    unfinished = file.with_suffix(".unfinished")
    values = recording.mapped(unfinished, writable=True)
    for of_step in values:
        for of_rank, batches in zip(of_step, data, strict=True):
            inputs, targets = next(batches)
            model(inputs.to(device), targets.to(device)).backward()
            for kept, block in zip(of_rank, model.blocks, strict=True):
                torch.cat([p.grad.flatten() for p in parameters_of(block) if p.grad is not None], out=kept)
            for p, m in trained:
                assert p.grad is not None
                grad = p.grad.float() / recording.ranks
                m.grad, p.grad = grad if m.grad is None else m.grad.add_(grad), None
        torch.nn.utils.clip_grad_norm_([m for _, m in trained], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, m in trained:
                p.copy_(m)
    unfinished.rename(file)


# Replaying ------------------------------------------------------------------------------------------------------------


def parameters_of(block: nn.Module) -> list[Tensor]:
    """Return a block's parameters as its modules read them: under an engine, `parameters()` may return shards."""
    return [getattr(module, name) for module in block.modules() for name, _ in module.named_parameters(recurse=False)]


class Replayed:
    """The recorded gradients of block `number`, one for each backward pass."""

    def __init__(self, recording: Recording, number: int, micro_steps: int) -> None:
        self._recording, self._number, self._micro_steps = recording, number, micro_steps
        self._passes = 0

    def next(self) -> tuple[Tensor, float]:
        """Return the gradient of the next pass, 1-D, and its factor, which is that of the loss and a sign."""
        step, micro = divmod(self._passes, self._micro_steps)
        repetition, step = divmod(step, self._recording.steps)
        self._passes += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        found = gradients_of(self._recording)[step, (rank + micro) % self._recording.ranks, self._number]
        return found, (-1) ** repetition / self._micro_steps


def replayed(workload: Workload, blocks: Sequence[nn.Module]) -> Iterator[Replayed]:
    """Yield the recorded gradients of each block. Nothing is recorded before the first pass."""
    recording = Recording.of(workload, blocks)
    return (Replayed(recording, number, workload.micro_steps) for number in range(len(blocks)))


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    record(pickle.load(sys.stdin.buffer), Path(sys.argv[1]))
