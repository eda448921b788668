"""Gradients of real training, which models whose blocks wait replay.

A block that waits computes nothing. With zeros for gradients, exact transports would have nothing to send. So a process
of its own trains the same model on the same batches, and records the gradients of each rank and micro-step. All ranks
of all candidates map the recording into their memory.

    record        trains, and writes the gradients
    Replayed      makes the gradients of a module again, one set in each backward pass

The gradient of a linear layer is the product of two small matrices, which have a row for each token. With few tokens,
the recording has these factors, and a replay multiplies them. That takes about as long as writing the result. Without
them, only a few steps would fit into memory. Steps that are replayed have the statistics of the recorded ones only if
they are the same steps: the first steps of AdamW are the longest, and gradients shrink as the model learns.

A run that is longer than the recording goes on with the second half of it, again and again, with the signs reversed
every second time. Gradients that came back unchanged would look to AdamW like a steady direction.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks import gpt

if TYPE_CHECKING:
    from benchmarks.workload import Workload

# The folder of recordings, which the processes of a suite share.
FOLDER = "TOWPATH_RECORDINGS"
# The most ranks whose gradients are recorded, and the steps. Fewer of them are recorded if a file would be larger.
RANKS, FEWEST_STEPS, MOST_STEPS, MOST_BYTES = 8, 2, 40, 3 << 30


def folder() -> Path:
    """Return the folder of recordings. The first process that asks makes it, and removes it when it ends."""
    if FOLDER not in os.environ:
        made = tempfile.mkdtemp(prefix="towpath-recordings-")
        os.environ[FOLDER] = made
        atexit.register(rmtree, made, ignore_errors=True)
    return Path(os.environ[FOLDER])


@dataclass(frozen=True, slots=True)
class Part:
    """The place of a parameter's gradient in a row of a recording: as it is, or as two factors of `tokens` rows."""

    begin: int
    shape: tuple[int, ...]
    tokens: int = 0

    @property
    def elements(self) -> int:
        """The recorded elements."""
        return self.tokens * sum(self.shape) or prod(self.shape)

    def of(self, row: Tensor) -> Tensor:
        """Return the gradient in a row as it is: 1-D."""
        return row[self.begin : self.begin + self.elements]

    def factors(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the layer's outputs, [tokens, outputs], and its inputs, [tokens, inputs]."""
        outputs, inputs = self.of(row).split([self.tokens * size for size in self.shape])
        return outputs.view(self.tokens, -1), inputs.view(self.tokens, -1)


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a file: a row of `elements` elements for each step, micro-step and rank, in this order.

    `parts` has the places in a row of the parameters of each owner, and None for those that do not train. Owners are
    the model itself and its blocks.
    """

    workload: Workload
    steps: int
    ranks: int
    elements: int
    parts: tuple[tuple[Part | None, ...], ...]

    @staticmethod
    def of(workload: Workload, model: gpt.GPT) -> Recording:
        """Return the recording for a model. Workloads that differ in how they wait share one."""
        same = replace(workload, wait_seconds=None, in_step=False)
        begin, parts = 0, list[tuple[Part | None, ...]]()
        for slots in owners(model):
            own: list[Part | None] = []
            for module, name in slots:
                weight = getattr(module, name)
                tokens = _tokens_of_factors(workload, module, weight)
                part = Part(begin, tuple(weight.shape), tokens) if weight.requires_grad else None
                begin += 0 if part is None else part.elements
                own.append(part)
            parts.append(tuple(own))
        ranks = min(RANKS, workload.topology.world)
        step_bytes = workload.micro_steps * ranks * begin * workload.torch_dtype.itemsize
        steps = max(FEWEST_STEPS, min(MOST_STEPS, MOST_BYTES // step_bytes))
        return Recording(same, steps, ranks, begin, tuple(parts))

    @property
    def file(self) -> Path:
        """The file, whether it exists or not."""
        return folder() / f"{sha256(repr(self).encode()).hexdigest()[:16]}.gradients"

    def mapped(self, file: Path, writable: bool = False) -> Tensor:
        """Return the rows in `file`: [steps, micro-steps, ranks, elements]."""
        shape = (self.steps, self.workload.micro_steps, self.ranks, self.elements)
        dtype = self.workload.torch_dtype
        return torch.from_file(str(file), shared=writable, size=prod(shape), dtype=dtype).view(shape)


Slots = Sequence[tuple[nn.Module, str]]


def owners(model: gpt.GPT) -> list[Slots]:
    """Return the modules and names of the parameters of the model itself, and of each of its blocks."""
    own = [(model.tokens, "weight"), (model, "positions"), (model.norm, "weight"), (model.norm, "bias")]
    return [own, *(slots_of(block) for block in model.blocks)]


def slots_of(block: nn.Module) -> Slots:
    """Return the modules and names of a block's parameters. Under an engine, `parameters()` may return shards."""
    return [(module, name) for module in block.modules() for name, _ in module.named_parameters(recurse=False)]


def _tokens_of_factors(workload: Workload, module: nn.Module, weight: Tensor) -> int:
    """Return the rows of the factors of a gradient, or 0 if factors are not far smaller than the gradient."""
    tokens = workload.batch * workload.length
    small = isinstance(module, nn.Linear) and weight.ndim == 2 and 4 * tokens * sum(weight.shape) <= weight.numel()
    return tokens if small else 0


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
    """Train on text with AdamW, and write the gradients."""
    workload = recording.workload
    masters, model = workload.model(), workload.model().to(workload.torch_dtype)
    trained = [(p, m) for p, m in zip(model.parameters(), masters.parameters(), strict=True) if p.requires_grad]
    optimizer = torch.optim.AdamW([m for _, m in trained], lr=workload.learning_rate, fused=True)
    data = [replace(workload, in_step=False).data(rank) for rank in range(recording.ranks)]
    unfinished = file.with_suffix(".unfinished")
    rows = recording.mapped(unfinished, writable=True)
    writer = _Writer(recording, model)
    for step in rows:
        for row, batches in ((row, data[rank]) for micro in step for rank, row in enumerate(micro)):
            writer.row = row
            model(*next(batches)).backward()
            writer.write_whole_gradients()
            for p, m in trained:
                assert p.grad is not None
                grad = p.grad.float() / step.shape[:2].numel()
                m.grad, p.grad = grad if m.grad is None else m.grad.add_(grad), None
        torch.nn.utils.clip_grad_norm_([m for _, m in trained], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, m in trained:
                p.copy_(m)
    unfinished.rename(file)


class _Writer:
    """Writes the gradients of a pass to `row`. Hooks write the factors while the pass runs."""

    def __init__(self, recording: Recording, model: gpt.GPT) -> None:
        self.row = torch.empty(0)
        self._whole: list[tuple[Part, nn.Module, str]] = []
        for slots, parts in zip(owners(model), recording.parts, strict=True):
            for (module, name), part in zip(slots, parts, strict=True):
                if part is not None and part.tokens:
                    self._watch(module, part)
                elif part is not None:
                    self._whole.append((part, module, name))

    def write_whole_gradients(self) -> None:
        """Write the gradients that have no factors."""
        for part, module, name in self._whole:
            part.of(self.row).copy_(getattr(module, name).grad.flatten())

    def _watch(self, module: nn.Module, part: Part) -> None:
        def entered(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs = given[0].detach()

            def left(grad: Tensor) -> None:
                for kept, factor in zip(part.factors(self.row), (grad, inputs), strict=True):
                    kept.copy_(factor.reshape(kept.shape))

            output.register_hook(left)

        module.register_forward_hook(entered)


# Replaying ------------------------------------------------------------------------------------------------------------


class Replayed:
    """The recorded gradients of owner `number`, one set for each backward pass. The first one makes the recording."""

    def __init__(self, recording: Recording, number: int) -> None:
        self._recording, self._parts = recording, recording.parts[number]
        self._passes = 0

    def next(self, dtypes: Sequence[torch.dtype], grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of the next pass in these dtypes. Autograd may keep them and write to them.

        `grad` is the gradient of what the owner computed. If it is fake, the planner traces a pass for its shapes.
        """
        if isinstance(grad, FakeTensor):
            pairs = zip(self._parts, dtypes, strict=True)
            return [part and torch.empty(part.shape, dtype=dtype, device=grad.device) for part, dtype in pairs]
        recording, micro_steps = self._recording, self._recording.workload.micro_steps
        step, micro = divmod(self._passes, micro_steps)
        step, sign = repeated(step, recording.steps)
        self._passes += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        row, factor = gradients_of(recording)[step, micro, rank % recording.ranks], sign / micro_steps
        return [
            part and _gradient(part, row, factor, dtype, grad.device)
            for part, dtype in zip(self._parts, dtypes, strict=True)
        ]


def repeated(step: int, steps: int) -> tuple[int, int]:
    """Return the recorded step that stands for a step, and the sign of its gradients."""
    if step < steps:
        return step, 1
    again = steps - steps // 2
    repetition, further = divmod(step - steps, again)
    return steps - again + further, -1 if repetition % 2 == 0 else 1


def _gradient(part: Part, row: Tensor, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    if part.tokens:
        outputs, inputs = (gpt.widened(each.to(device)) for each in part.factors(row))
        return torch.mm((outputs * factor).t(), inputs).to(row.dtype).to(dtype)
    made = torch.empty(part.shape, dtype=dtype, device=device)
    return torch.mul(part.of(row).view(part.shape).to(device), factor, out=made)


def replayed(workload: Workload, model: gpt.GPT) -> list[Replayed]:
    """Return the recorded gradients of the model itself, and of each of its blocks."""
    recording = Recording.of(workload, model)
    return [Replayed(recording, number) for number in range(len(recording.parts))]


if __name__ == "__main__":
    torch.set_num_threads(1)  # with little to compute, several would wait for each other
    record(pickle.load(sys.stdin.buffer), Path(sys.argv[1]))
