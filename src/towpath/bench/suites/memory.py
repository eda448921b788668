"""How much memory a rank needs to start, and to hand out its state: a GPT of a billion fp32 parameters over four ranks
under `zero3`.

    towpath bench memory [CASE …] [--folder /tmp] [--quick] [--resume]

A case builds the model on the meta device and shards it: `loaded` from a safetensors file (4 GB, made in `--folder`
and removed), `drawn` with new weights, unit by unit. A thread in each rank reads RssAnon every two milliseconds; what
counts is its peak above the level after the imports, and after a tiny model, which has torch import what it imports
late. It may be 0.3 of the model (a quarter is the rank's share) and the largest unit.

`state dict`: the peak of a rank in `get_model_state_dict(full_state_dict=True, cpu_offload=True)`, its shard included.
It may be the rank's quarter, the engine's buffers as scheduled and the largest unit, and on rank 0 the dict itself.
What the call adds on any other rank may be the largest unit.

`limited`: 200 million parameters that train in bf16 under `mics` and `hpz`, once with as much memory as they take,
and once with a limit half way between the two, which the kernel holds each rank to: `hpz` trains there, and a rank of
`mics` is killed. (`mics` keeps the optimizer's states of half the model on each rank of two nodes of two, `hpz` of a
quarter.) Every run is added to benchmarks/results/memory.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
from towpath import lab
from towpath.bench.harness.failure import CaseError
from towpath.bench.harness.figures import Check
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.memory_limit import MemoryGroup, memory_groups
from towpath.checkpoint import get_model_state_dict
from towpath.errors import LabError
from towpath.train.config import ModelConfig
from towpath.train.models.bundle import ModelBundle, build_model

SHAPE = towpath.Topology(2, 2)
MODEL = ModelConfig(width=2048, depth=19, heads=16, kv_heads=16)
TINY = ModelConfig(width=64, depth=2, heads=2)
QUICK_MODEL = ModelConfig(width=256, depth=4, heads=4, kv_heads=4)
LIMITED_MODEL = ModelConfig(width=1024, depth=10, heads=8, kv_heads=8)
LIMITED_STEPS, LIMITED_LENGTH = 3, 16
VOCABULARY = 32_000
SHARE = 0.3
EVERY_SECONDS = 0.002

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    from_file: bool

    def measure(self, settings: Settings) -> dict[str, Any]:
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
    name: str = "state dict"

    def measure(self, settings: Settings) -> dict[str, Any]:
        model = QUICK_MODEL if settings.quick else MODEL
        with lab.Lab(SHAPE, inter=None) as cluster:
            ranks = cluster.call(hand_out, model, timeout_seconds=1800)
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
    name: str = "limited"
    fits: str = "hpz"
    does_not: str = "mics"

    def measure(self, settings: Settings) -> dict[str, Any]:
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
    """The most memory that a rank had; and how many were killed, for want of more than `limit`."""
    with memory_groups(SHAPE.world, limit) as groups, lab.Lab(SHAPE, inter=None) as cluster:
        try:
            cluster.call(train, strategy, model, groups, timeout_seconds=600)
        except LabError:
            if not any(group.killed for group in groups):
                raise  # for another reason
        return max(group.peak_bytes for group in groups), sum(group.killed for group in groups)


def train(rank: int, world: int, strategy: str, config: ModelConfig, groups: Sequence[MemoryGroup]) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    steps(TINY, "zero3", 1)  # what torch imports late is no part of the model
    groups[rank].join()
    steps(config, strategy, LIMITED_STEPS)


def steps(config: ModelConfig, strategy: str, count: int) -> None:
    precision = towpath.Precision(params="bfloat16", reduce="bfloat16")
    model: Any = towpath.shard(build_model(config, VOCABULARY).model, strategy, topology=SHAPE, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (1, LIMITED_LENGTH))
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


CASES = [Case("loaded", True), Case("drawn", False), StateDictCase(), LimitedCase()]


def write(file: Path, model: ModelConfig) -> None:
    """Some values for every parameter, a piece at a time."""
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
    """What every rank does."""
    torch.set_num_threads(1)
    towpath.shard(build_model(TINY, 256).model, "zero3", topology=SHAPE)
    (built, model), peak, kept = watched(lambda: build_and_shard(config))
    if built.values is not None:
        check(model, built.values)
    return {
        "parameters": built.parameters,
        "model_bytes": 4 * built.parameters,
        "unit_bytes": 4 * max(unit_elements(model)),
        "peak_bytes": peak,
        "kept_bytes": kept,
    }


def hand_out(rank: int, world: int, config: ModelConfig) -> dict[str, Any]:
    """What every rank does."""
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
    """How many parameters each unit has."""
    return [sum(bucket.plan.numel for bucket in unit.buckets) for unit in model.towpath_engine.units]


def build_and_shard(config: ModelConfig) -> tuple[ModelBundle, Any]:
    built = build_model(config, VOCABULARY)
    return built, towpath.shard(built.model, "zero3", topology=SHAPE, values=built.values)


def check(model: Any, values: Callable[[str, int, int], torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), values(name, *parameter.span.bounds())), name


def watched(work: Callable[[], Made]) -> tuple[Made, int, int]:
    """What `work` made, the peak of RssAnon meanwhile and its level afterwards, both above the level before."""
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
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="has room for 4 GB")


SUITE = Suite("memory", __doc__ or "", CASES, options=add_folder)
