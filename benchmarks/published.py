"""Published measurements of training with PyTorch, with the settings they were taken with.

`load()` reads `published.toml`: who measured, on which cluster and model, with which settings, and what was printed.
A forecast of a run may use one run on one node of the same group. The other runs across nodes are in two halves: a
forecaster may be developed on the first, and is tested on the second, whose errors are not looked at before.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "published.toml"
CHOICES = {
    "parallelism": ("full shard", "shard gradients", "hybrid shard", "replicate"),
    "precision": ("bf16", "fp8"),
    "reduce": ("bf16", "fp32", "unknown"),
    "checkpointing": ("none", "selective", "full"),
    "synchronizes": ("each", "last", "unknown"),
    "trains": ("all", "lora"),
    "states": ("bf16", "fp32"),
    "unit": ("tokens/s/GPU", "tokens/s", "samples/s", "MFU"),
}


class PublishedError(ValueError):
    """An entry of `published.toml` that is incomplete, unknown or contradicts another one."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A page, table or thread with measurements, and what its figures count."""

    id: str
    url: str
    version: str  # the commit, or the number and date of a thread
    software: str
    counts: str  # what the printed throughput and memory count


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs and networks of one cluster. `assumed` lists what its sources do not print."""

    id: str
    gpu: str
    gpu_memory_gb: float
    bf16_flops: float
    gpus_per_node: int
    network: str
    node_gbits: float  # one way, all adapters of a node together
    network_source: str
    inside: str
    inside_source: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a decoder, from the configuration that its source names."""

    id: str
    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocabulary: int
    tied: bool
    shape_source: str
    positions: int = 0  # learned ones
    printed_parameters: int | None = None

    @property
    def matrices(self) -> int:
        """Elements of the matrices of all blocks."""
        attention = 2 * self.width**2 * (1 + self.kv_heads / self.heads)
        return round(self.layers * (attention + (3 if self.gated else 2) * self.width * self.ffn))

    @property
    def parameters(self) -> int:
        """Elements of all matrices. Norms and biases are left out: they are below 1 % of every model here."""
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions
        return self.matrices + tables * self.width


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement. A step has `accumulation` micro-batches of `micro_batch` samples on each data-parallel rank."""

    id: str
    source: Source
    where: str  # the table or section of the source
    cluster: Cluster
    model: Model
    nodes: int
    parallelism: str
    micro_batch: int
    sequence: int
    precision: str
    reduce: str  # the type in which gradients are reduced
    checkpointing: str
    compile: bool
    printed: float
    unit: str
    gpus_on_node: int = 0  # 0: all of the cluster's
    shard: int = 0  # ranks that one copy of the weights is sharded over; 0: all data-parallel ranks
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    accumulation: int = 1
    synchronizes: str = "each"  # which micro-batches reduce gradients
    optimizer: str = "adamw"
    trains: str = "all"
    states: str = "fp32"  # the type of the parameters and of the optimizer's states
    variant: str = ""  # what else tells the run from others of the same settings
    memory_gib: float | None = None  # the peak that the source printed
    printed_mfu: float | None = None
    mfu_flops_per_token: float | None = None  # for the unit MFU: what the source counts for a token
    printed_seconds: float | None = None
    recomputed: float | None = None  # share of the forward pass that selective checkpointing repeats
    calibrates: bool = False  # the run on one node that fixes the rate of its group
    bound: str = ""  # why communication seems to limit this run, by the source or by its other rows
    assumed: tuple[str, ...] = ()
    note: str = ""

    @property
    def gpus(self) -> int:
        return self.nodes * (self.gpus_on_node or self.cluster.gpus_per_node)

    @property
    def data_ranks(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def tokens_per_step(self) -> int:
        return self.data_ranks * self.accumulation * self.micro_batch * self.sequence

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The printed figure in the unit that most sources use."""
        if self.mfu_flops_per_token:
            return self.printed * self.cluster.bf16_flops / self.mfu_flops_per_token
        tokens = {"tokens/s/GPU": self.gpus, "tokens/s": 1, "samples/s": self.sequence}[self.unit]
        return self.printed * tokens / self.gpus

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.tokens_per_step / (self.tokens_per_second_per_gpu * self.gpus)

    @property
    def group(self) -> tuple[str, ...]:
        """The runs that share a rate of the GPU: kernels differ by model family, precision and compilation."""
        kernels = "compiled" if self.compile else "eager"
        return (self.cluster.id, self.model.family, self.precision, kernels, self.trains)

    @property
    def half(self) -> str | None:
        """Return "development" or "hold-out" of a run across nodes, None of one on a single node."""
        return None if self.nodes == 1 else half(self.id)


@dataclass(frozen=True, kw_only=True)
class Uncalibrated:
    """A group of runs without one on a single node, and what a forecast of it could use instead."""

    group: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Published:
    """All entries of the file."""

    runs: tuple[Run, ...]
    uncalibrated: dict[tuple[str, ...], str]

    def across_nodes(self, part: str | None = None) -> tuple[Run, ...]:
        """Return the runs on two or more nodes: all, or those of one half."""
        return tuple(run for run in self.runs if run.nodes > 1 and part in (None, run.half))

    def calibrating(self, run: Run) -> Run | None:
        """Return the run on one node that fixes the rate of `run`'s group, None if there is none."""
        return next((other for other in self.runs if other.calibrates and other.group == run.group), None)


def half(run_id: str) -> str:
    """Return the half that a run across nodes belongs to. It depends on the id alone, which a rule makes."""
    return "hold-out" if int(sha256(run_id.encode()).hexdigest(), 16) % 2 else "development"


def name(run: Run) -> str:
    """Return the id that a run must have, so that its half is not a choice."""
    sharding = {"full shard": "fsdp", "shard gradients": "zero2", "hybrid shard": "hsdp", "replicate": "ddp"}
    extents = {"tp": run.tensor, "pp": run.pipeline, "cp": run.context}
    parts = [
        run.cluster.id,
        run.model.id,
        f"{run.gpus}gpu",
        sharding[run.parallelism] + (str(run.shard) if run.shard else ""),
        *(f"{label}{extent}" for label, extent in extents.items() if extent > 1),
        f"seq{run.sequence}",
        f"b{run.micro_batch}x{run.accumulation}",
        f"ac-{run.checkpointing}",
        run.precision,
        "compiled" if run.compile else "eager",
        *([run.trains] if run.trains != "all" else []),
        *([run.variant] if run.variant else []),
    ]
    return "-".join(parts)


def load(text: str | None = None) -> Published:
    """Read and check the file.

    Args:
        text: Its content. None reads `published.toml`.

    Raises:
        PublishedError: A key is unknown or missing, an id is not unique, or entries contradict each other.
    """
    data = tomllib.loads(FILE.read_text() if text is None else text)
    unknown = data.keys() - {"source", "cluster", "model", "table", "uncalibrated"}
    _require(not unknown, "the file", f"has unknown entries {sorted(unknown)}", "remove them")
    kinds = {"source": Source, "cluster": Cluster, "model": Model}
    parts = {key: _by_id(kind, data.get(key, [])) for key, kind in kinds.items()}
    runs: list[Run] = []
    for table in data.get("table", []):
        _require(table.keys() == {"shared", "rows"}, "a table", f"has {sorted(table)}", "give it `shared` and `rows`")
        for row in table["rows"]:
            both = row.keys() & table["shared"].keys()
            _require(not both, str(row.get("id")), f"repeats {sorted(both)} of its table", "say it once")
            runs.append(_run(table["shared"] | row, parts))
    exceptions = [_read(Uncalibrated, entry) for entry in data.get("uncalibrated", [])]
    _check(runs, exceptions)
    return Published(runs=tuple(runs), uncalibrated={entry.group: entry.reason for entry in exceptions})


def _run(row: dict[str, Any], parts: dict[str, dict[str, Any]]) -> Run:
    label = str(row.get("id", row))
    for key, known in parts.items():
        _require(row.get(key) in known, label, f"names {key} {row.get(key)!r}", f"use one of {sorted(known)}")
    run = _read(Run, row | {key: known[row[key]] for key, known in parts.items()})
    for key, allowed in CHOICES.items():
        value = getattr(run, key)
        _require(value in allowed, run.id, f"has {key} = {value!r}", f"use one of {', '.join(allowed)}")
    _require(run.id == name(run), run.id, "is not what the rule makes of its settings", f"use {name(run)}")
    ranks = run.tensor * run.pipeline * run.context
    _require(run.gpus % ranks == 0, run.id, f"has {run.gpus} GPUs for groups of {ranks}", "correct the extents")
    hybrid = run.parallelism == "hybrid shard"
    _require(hybrid == bool(run.shard), run.id, f"has shard = {run.shard}", "give it to hybrid sharding only")
    _require(run.data_ranks % (run.shard or 1) == 0, run.id, f"shards over {run.shard} ranks", "use a divisor")
    counted = bool(run.mfu_flops_per_token) == (run.unit == "MFU")
    _require(counted, run.id, f"has the unit {run.unit}", "give mfu_flops_per_token to MFU, and to nothing else")
    _require(run.printed > 0, run.id, f"printed {run.printed}", "take it from the source")
    return run


def _check(runs: list[Run], exceptions: list[Uncalibrated]) -> None:
    seen: set[str] = set()
    for run in runs:
        _require(run.id not in seen, run.id, "is there twice", "tell the runs apart by `variant`")
        seen.add(run.id)
    fixed = [run for run in runs if run.calibrates]
    for run in fixed:
        _require(run.nodes == 1, run.id, f"calibrates on {run.nodes} nodes", "take a run on one node")
    groups = [run.group for run in fixed] + [entry.group for entry in exceptions]
    for group in groups:
        _require(groups.count(group) == 1, str(group), "has several rates", "calibrate it once, or say why not")
    needed = {run.group for run in runs if run.nodes > 1}
    for group in sorted(needed ^ set(groups)):
        problem = "has no rate" if group in needed else "has a rate and no run across nodes"
        _require(False, str(group), problem, "mark one run with `calibrates`, or add `[[uncalibrated]]`")


def _by_id(kind: type[Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        item = _read(kind, entry)
        _require(item.id not in found, item.id, "is there twice", "keep one")
        _require(bool(re.fullmatch(r"[a-z0-9.-]+", item.id)), item.id, "is not an id", "use a-z, 0-9, . and -")
        found[item.id] = item
    return found


def _read(kind: type[Any], entry: dict[str, Any]) -> Any:
    label = str(entry.get("id", kind.__name__))
    known = {field.name for field in fields(kind)}
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    _require(entry.keys() <= known, label, f"has unknown keys {sorted(entry.keys() - known)}", "remove them")
    _require(needed <= entry.keys(), label, f"lacks {sorted(needed - entry.keys())}", "take them from the source")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})


def _require(holds: bool, label: str, got: str, remedy: str) -> None:
    if not holds:
        raise PublishedError(f"published.toml: {label} {got}. To do: {remedy}.")
