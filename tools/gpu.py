"""Shows on one GPU that Towpath works there, in four stages of at most eight minutes.

    python tools/gpu.py [STAGE ...]      stages are 1 to 4; default: all

Stages 1 and 2 write tests/results/gpu-*.json, 3 and 4 append to benchmarks/results/*.jsonl. Commit what they write.
Without a GPU, each stage says what it would run.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 480
# Tests of tests/ranks whose models and batches are on the GPU if TOWPATH_TEST_DEVICE says so. Four ranks share it.
ON_RANKS = (
    *("parity", "encoded_training", "offload", "offloaded_activations", "owner_stepped", "optimizers", "checkpoint"),
    *("resume", "around_the_loop", "uneven", "frozen", "lora", "every_model", "never_silent"),
)
FILES = [f"tests/ranks/test_{name}.py" for name in ON_RANKS]


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, and what they show."""

    shows: str
    commands: tuple[tuple[str, ...], ...]
    device: str = ""


def _pytest(workers: int, results: str, *arguments: str) -> tuple[str, ...]:
    options = ("-n", str(workers), "-o", "filterwarnings=default", "--record-to", f"tests/results/{results}.json")
    return ("-m", "pytest", *options, *arguments)


STAGES = (
    Stage(
        "the kernels equal the reference, and jobs start, train and fail as they should",
        (_pytest(min(12, os.cpu_count() or 1), "gpu-tests", "tests/gpu"),),
    ),
    Stage(
        "every preset, route, codec, optimizer, offload and checkpoint on four ranks that pose as four hosts",
        (_pytest(6, "gpu-ranks", "--dist", "loadfile", *FILES),),
        device="cuda",
    ),
    Stage(
        "microseconds per call, the host's time, a step next to FSDP2, kernels next to a copy",
        (
            ("-m", "benchmarks", "gpu", "calls", "host", "step"),
            ("-m", "benchmarks", "kernels", "--device", "cuda", "--quick"),
        ),
    ),
    Stage(
        "bytes by the kernel's counter, and overlap from a trace",
        (
            ("-m", "benchmarks", "gpu", "network"),
            ("-m", "benchmarks", "timeline", "--device", "cuda", "--trace", "benchmarks/results/trace-gpu.json"),
        ),
    ),
)


def run(number: int, until: float) -> str:
    """Run a stage, and return how it ended."""
    stage = STAGES[number - 1]
    environment = {**os.environ, **({"TOWPATH_TEST_DEVICE": stage.device} if stage.device else {})}
    for command in stage.commands:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True)
        try:
            code = process.wait(max(1.0, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"not over after {LIMIT_SECONDS} s: {shlex.join(command)}"
        if code:
            return f"failed ({code}): {shlex.join(command)}"
    return "passed"


def main(arguments: Sequence[str]) -> int:
    """Run the stages, and print a table of how they ended."""
    if any(argument not in ("1", "2", "3", "4") for argument in arguments):
        print(__doc__)
        return 2
    numbers = [int(argument) for argument in arguments] or [1, 2, 3, 4]
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here. On a GPU (and with a torch for CUDA), these stages would run:")
        for number in numbers:
            stage = STAGES[number - 1]
            print(f"\n{number}  {stage.shows}")
            for command in stage.commands:
                print(f"   {'TOWPATH_TEST_DEVICE=cuda ' if stage.device else ''}python {shlex.join(command)}")
        return 0
    ends: list[tuple[int, float, str]] = []
    for number in numbers:
        print(f"\nStage {number}: {STAGES[number - 1].shows}", flush=True)
        began = time.monotonic()
        end = run(number, began + LIMIT_SECONDS)
        ends.append((number, time.monotonic() - began, end))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for number, seconds, end in ends:
        print(f"stage {number}  {seconds:5.0f} s  {end}")
    return int(any(end != "passed" for *_, end in ends))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
