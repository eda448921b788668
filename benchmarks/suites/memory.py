"""Measure how much memory a rank needs to start a GPT of a billion fp32 parameters, and to return its state.

    memory [CASE …] [--folder DIR] [--quick] [--resume]

Four ranks shard the model under `zero3`. A case builds the model on the meta device and shards it: `loaded` from a
safetensors file of 4 GB in `--folder`, `drawn` with new weights, unit by unit. A thread in each rank reads RssAnon
every two milliseconds. The figure is its peak above the level after the imports and after a tiny model, which makes
torch import the rest. The limit is 0.3 of the model, of which a quarter is the rank's share, and the largest unit.

`state dict` is the peak in `get_model_state_dict(full_state_dict=True, cpu_offload=True)`, with the rank's shard. The
limit is the rank's quarter, the scheduled buffers of the engine and the largest unit, and on rank 0 also the dict. On
any other rank, the call itself may allocate the largest unit.

`limited` trains 200 million parameters in bf16 under `mics` and `hpz`, first without a limit, and then with a limit
halfway between the two peaks, which the kernel enforces on each rank. `hpz` trains there, and a rank of `mics` is
killed. On two nodes of two ranks, each rank of `mics` keeps the optimizer states of half the model, and `hpz` of a
quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

import lab
import towpath
from benchmarks.harness.candidates import CaseError
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from lab.errors import LabError
from towpath.checkpoint import get_model_state_dict
from towpath.train.config import ModelConfig
from towpath.train.models import ModelBundle, build_model

SHAPE = towpath.Topology(2, 2)
MODEL = ModelConfig(width=2048, depth=19, heads=16)
TINY = ModelConfig(width=64, depth=2, heads=2)
QUICK_MODEL = ModelConfig(width=256, depth=4, heads=4)
LIMITED_MODEL = ModelConfig(width=1024, depth=10, heads=8)
LIMITED_STEPS, LIMITED_LENGTH = 3, 16
VOCABULARY = 32_000
SHARE = 0.3
EVERY_SECONDS = 0.002

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class StartCase:
    """A start of the model, from a file or with new weights."""

    name: str
    from_file: bool

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Start the model on four ranks."""
        model = QUICK_MODEL if settings.quick else MODEL
        with tempfile.TemporaryDirectory(dir=settings.options.folder) as temporary:
            file = Path(temporary, "model.safetensors")
            if self.from_file:
                write(file, model)
                model = replace(model, weights=str(file))
            with lab.Lab(SHAPE, inter=None) as cluster:
                ranks = cluster.call(start, model, timeout_seconds=1800)
        first = ranks[0]
        limit = int(SHARE * first["model_bytes"]) + first["unit_bytes"]
        return {
            "checks": [Check("peak bytes of a rank", max(rank["peak_bytes"] for rank in ranks), limit)],
            "parameters": first["parameters"],
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "kept_bytes": [rank["kept_bytes"] for rank in ranks],
            "model_bytes": first["model_bytes"],
            "unit_bytes": first["unit_bytes"],
        }


@dataclass(frozen=True, slots=True)
class StateDictCase:
    """The full state dict of the model."""

    name: str = "state dict"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Return the state dict on four ranks."""
        model = QUICK_MODEL if settings.quick else MODEL
        with lab.Lab(SHAPE, inter=None) as cluster:
            ranks = cluster.call(return_state, model, timeout_seconds=1800)
        first = ranks[0]
        held = first["model_bytes"] // SHAPE.world + first["buffer_bytes"] + first["unit_bytes"]
        others = ranks[1:]
        return {
            "checks": [
                Check("peak bytes of rank 0", first["peak_bytes"], held + first["model_bytes"]),
                Check("peak bytes of any other rank", max(rank["peak_bytes"] for rank in others), held),
                Check("of it the call's own", max(rank["added_bytes"] for rank in others), first["unit_bytes"]),
            ],
            **{key: first[key] for key in ("parameters", "model_bytes", "unit_bytes", "buffer_bytes")},
            "peak_bytes": [rank["peak_bytes"] for rank in ranks],
            "added_bytes": [rank["added_bytes"] for rank in ranks],
            "seconds": max(rank["seconds"] for rank in ranks),
        }


@dataclass(frozen=True, slots=True)
class LimitedCase:
    """Two strategies with a limit between their peaks."""

    name: str = "limited"
    fits: str = "hpz"
    does_not: str = "mics"

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Train with and without the limit."""
        model = QUICK_MODEL if settings.quick else LIMITED_MODEL
        names = (self.fits, self.does_not)
        peaks: dict[str, int] = {}
        for name in names:
            settings.say(f"{name} with as much memory as it takes")
            peaks[name], killed = trained(name, model, None)
            if killed:
                raise CaseError(f"{name} does not even fit into the memory that this machine has")
        limit = sum(peaks.values()) // 2
        killed_by: dict[str, int] = {}
        for name in names:
            settings.say(f"{name} with {limit / 1e6:.0f} MB for each rank")
            _, killed_by[name] = trained(name, model, limit)
        return {
            "checks": [
                *(Check(f"{name}: peak bytes of a rank", peak) for name, peak in peaks.items()),
                Check(f"{self.fits}, limited half way between: ranks killed", killed_by[self.fits], 0),
                Check(f"{self.does_not}, limited half way between: ranks killed", killed_by[self.does_not], at_least=1),
            ],
            "limit_bytes": limit,
            "peak_bytes": peaks,
        }


def trained(strategy: str, model: ModelConfig, limit: int | None) -> tuple[int, int]:
    """Return the most memory that a rank had, and how many ranks the kernel killed."""
    with memory_groups(SHAPE.world, limit) as groups, lab.Lab(SHAPE, inter=None) as cluster:
        try:
            cluster.call(train, strategy, model, groups, timeout_seconds=600)
        except LabError:
            if not any(group.killed for group in groups):
                raise  # for another reason
        return max(group.peak_bytes for group in groups), sum(group.killed for group in groups)


def train(rank: int, world: int, strategy: str, config: ModelConfig, groups: Sequence[MemoryGroup]) -> None:
    """Train on one rank, in its control group."""
    torch.set_num_threads(1)
    steps(TINY, "zero3", 1)  # makes torch import the rest, which is no part of the model
    groups[rank].join()
    steps(config, strategy, LIMITED_STEPS)


def steps(config: ModelConfig, strategy: str, count: int) -> None:
    """Train for a few steps."""
    precision = towpath.Precision(params="bfloat16", reduce="bfloat16")
    model: Any = towpath.shard(build_model(config, VOCABULARY).model, strategy, topology=SHAPE, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (1, LIMITED_LENGTH))
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = [StartCase("loaded", True), StartCase("drawn", False), StateDictCase(), LimitedCase()]


def write(file: Path, model: ModelConfig) -> None:
    """Write a safetensors file with some values for every parameter, a piece at a time."""
    built = build_model(model, VOCABULARY)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in built.model.named_parameters():
        start, end = end, end + parameter.nbytes
        header[built.names[name]] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    piece = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            left = 4 * prod(entry["shape"])
            while left:
                left -= out.write(piece[:left])


def start(rank: int, world: int, config: ModelConfig) -> dict[str, Any]:
    """Start the model on one rank, and return its memory."""
    torch.set_num_threads(1)
    towpath.shard(build_model(TINY, 256).model, "zero3", topology=SHAPE)

    def build_and_shard() -> tuple[ModelBundle, Any]:
        built = build_model(config, VOCABULARY)
        return built, towpath.shard(built.model, "zero3", topology=SHAPE, values=built.values)

    (built, model), peak, kept = watched(build_and_shard)
    if built.values is not None:
        check(model, built.values)
    return {
        "parameters": built.parameters,
        "model_bytes": 4 * built.parameters,
        "unit_bytes": 4 * max(unit_elements(model)),
        "peak_bytes": peak,
        "kept_bytes": kept,
    }


def return_state(rank: int, world: int, config: ModelConfig) -> dict[str, Any]:
    """Make the full state dict on one rank, check it, and return the memory that it took."""
    torch.set_num_threads(1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tiny = towpath.shard(build_model(TINY, 256).model, "zero3", topology=SHAPE)
    get_model_state_dict(tiny, options=options)
    level = rss_anon()
    built = build_model(config, VOCABULARY)
    model = towpath.shard(built.model, "zero3", topology=SHAPE, values=lambda _, start, end: torch.ones(end - start))
    sharded, began = rss_anon(), time.perf_counter()
    found, added, _ = watched(lambda: get_model_state_dict(model, options=options))
    seconds = time.perf_counter() - began
    whole = {name: value.shape for name, value in build_model(config, VOCABULARY).model.state_dict().items()}
    assert {name: value.shape for name, value in found.items()} == (whole if rank == 0 else {})
    assert all(bool((value == 1).all()) for value in found.values() if value.is_floating_point())
    return {
        "parameters": built.parameters,
        "model_bytes": 4 * built.parameters,
        "unit_bytes": 4 * max(unit_elements(model)),
        "buffer_bytes": sum(towpath.schedule("zero3", model).buffer_bytes().values()),
        "peak_bytes": sharded + added - level,
        "added_bytes": added,
        "seconds": seconds,
    }


def unit_elements(model: Any) -> list[int]:
    """Return the number of parameters of each unit."""
    return [sum(bucket.plan.numel for bucket in unit.buckets) for unit in model.towpath_engine.units]


def check(model: Any, values: Callable[[str, int, int], torch.Tensor]) -> None:
    """Check that every shard has its values."""
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), values(name, *parameter.shard_spec.bounds())), name


def watched(work: Callable[[], Made]) -> tuple[Made, int, int]:
    """Return the result of `work`, and the peak of RssAnon and its level afterwards, both above the level before."""
    before = rss_anon()
    peak = before
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(EVERY_SECONDS):
            peak = max(peak, rss_anon())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        made = work()
    finally:
        over.set()
        sampler.join()
    after = rss_anon()
    return made, max(peak, after) - before, after - before


def rss_anon() -> int:
    """Return the private memory of this process."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suite."""
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has room for 4 GB")


# Memory limits --------------------------------------------------------------------------------------------------------

# The folders of the memory controller by version of control groups, and its files for the limit, the peak and kills.
_CONTROLLERS = {
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.peak", "memory.events"),
}
# A process that would swap instead is killed as well.
_NO_SWAP = {"memory.memsw.limit_in_bytes": "{}", "memory.swap.max": "0"}
_EMPTY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group for one process and its children. Memory from before the process joined does not count."""

    folder: Path
    peak_file: str
    killed_file: str

    def join(self) -> None:
        """Add this process."""
        (self.folder / "cgroup.procs").write_text("0")

    @property
    def peak_bytes(self) -> int:
        """The most memory that the group had."""
        return int((self.folder / self.peak_file).read_text())

    @property
    def killed(self) -> int:
        """Number of processes that the kernel killed because memory was short."""
        words = (self.folder / self.killed_file).read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextmanager
def memory_groups(count: int, limit_bytes: int | None) -> Generator[list[MemoryGroup]]:
    """Make control groups with a limit for each, and remove them at the end. None is no limit."""
    found = next((each for each in _CONTROLLERS.items() if _serves(*each)), None)
    if found is None:
        raise LabError(
            "memory cannot be limited here: that needs root, and the memory controller of control groups under "
            f"{' or '.join(map(str, _CONTROLLERS))}."
        )
    root, (limit_file, peak_file, killed_file) = found
    made: list[MemoryGroup] = []
    try:
        for number in range(count):
            folder = Path(tempfile.mkdtemp(prefix=f"towpath-{os.getpid()}-{number}-", dir=root))
            made.append(MemoryGroup(folder, peak_file, killed_file))
            if limit_bytes is not None:
                (folder / limit_file).write_text(str(limit_bytes))
                for name, text in _NO_SWAP.items():
                    with suppress(OSError):  # a system without swap has no such file
                        (folder / name).write_text(text.format(limit_bytes))
        yield made
    finally:
        for each in made:
            _remove(each.folder)


def _serves(root: Path, files: tuple[str, ...]) -> bool:
    """Return whether groups can be made in a folder, and have all these files."""
    try:
        probe = Path(tempfile.mkdtemp(prefix="towpath-", dir=root))
    except OSError:
        return False
    try:
        return all((probe / name).exists() for name in files)
    finally:
        probe.rmdir()


def _remove(folder: Path) -> None:
    """Remove a group's folder, which may have processes for a moment after they were killed."""
    until = time.monotonic() + _EMPTY_SECONDS
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


SUITES = (Suite("memory", __doc__ or "", CASES, options=add_folder),)
