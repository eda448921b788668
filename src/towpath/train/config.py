"""The configuration of `towpath train`: a TOML file of seven sections, each a frozen dataclass that checks itself.

    [model]  [data]  [train]  [strategy]  [parallel]  [log]  [checkpoint]

`Config.load(path, ["train.steps=20"])` reads a file and applies overrides. `str(config)` writes every key with its
description, and loads as the same `Config`. Everything that needs neither data, model nor ranks is checked here.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args, get_origin, get_type_hints

from towpath.core import presets
from towpath.core.formats import Codec, DtypeName, Precision
from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, Compression, compression
from towpath.core.strategy import OFFLOADS, SYNC_GRADIENTS, Offload, Strategy, written
from towpath.errors import ConfigError, StrategyError
from towpath.topology.cluster import Extent, Topology

DTYPES: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# In each block of this many samples, every source of a mixture has the share that its weight gives it.
MIXED_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition on the value of a key, and what an error says that it expects."""

    holds: Callable[[Any], bool]
    expected: str


def one_of(*allowed: str) -> Limit:
    """Return the limit to some values."""
    return Limit(lambda value: value in allowed, f"one of {', '.join(map(repr, allowed))}")


# NaN is outside of all of them.
ABOVE_0 = Limit(lambda value: value > 0, "more than 0")
FROM_0 = Limit(lambda value: value >= 0, "0 or more")
SHARE = Limit(lambda value: 0 <= value <= 1, "a share from 0 to 1")
_HELD_OUT = Limit(lambda value: 0 <= value < 1, "a share from 0 up to, not including, 1")
_BELOW_ONE = Limit(lambda value: 0 <= value < 1, "a number from 0 up to, not including, 1")
_BETAS = Limit(lambda value: all(0 <= beta < 1 for beta in value), "two numbers from 0 up to, not including, 1")
_SEED = Limit(lambda value: 0 <= value < 1 << 63, "a whole number from 0 to 2⁶³ − 1")
_POWER_OF_TWO = Limit(lambda value: math.frexp(value)[0] == 0.5, "a power of two")


def option(default: Any, about: str, limit: Limit | None = None, *, unless: str = "") -> Any:
    """Declare a key of a section.

    Args:
        default: The value of the key where the file has none.
        about: The description that `str(config)` writes next to the key.
        limit: The condition on its values, if not all are allowed.
        unless: Another key of the section that decides this one. Where that key is set, this one must not be given.
    """
    return field(default=default, metadata={"about": about, "limit": limit, "unless": unless})


def refuse(section: Any, key: str, got: Any, expected: str) -> None:
    """Raise a `ConfigError` that names the section and the key."""
    raise ConfigError(f"{section.NAME}.{key} = {got!r}: expected {expected}.")


def check_limits(section: Any) -> None:
    """Refuse the first value that is outside of the limit of its key."""
    for f in fields(section):
        limit: Limit | None = f.metadata["limit"]
        if limit is not None and not limit.holds(getattr(section, f.name)):
            refuse(section, f.name, getattr(section, f.name), limit.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model: a GPT of this shape, or the Hugging Face model that `hf` names."""

    NAME: ClassVar = "model"

    hf: str = option("", "a Hugging Face folder or config.json; only weights= goes with it")
    weights: str = option("", "safetensors to start from, file or folder; empty: new weights")
    width: int = option(256, "the width of the embedding", ABOVE_0, unless="hf")
    depth: int = option(8, "the number of blocks", ABOVE_0, unless="hf")
    heads: int = option(8, "attention heads per block", ABOVE_0, unless="hf")
    kv_heads: int = option(0, "key and value heads per block; 0: as many as heads", FROM_0, unless="hf")
    hidden: int = option(0, "feed-forward width; 0: 8/3 of width, as a multiple of 32", FROM_0, unless="hf")
    tied: bool = option(True, "share the embedding's weights with the output layer", unless="hf")
    vocabulary: int = option(0, "the vocabulary size; 0: the tokenizer's", FROM_0, unless="hf")

    def __post_init__(self) -> None:
        check_limits(self)
        if self.width % (2 * self.heads):
            refuse(self, "width", self.width, f"a multiple of 2 × heads = {2 * self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            refuse(self, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The sources of tokens. Without any, training reads the sources of the Python standard library."""

    NAME: ClassVar = "data"

    text: tuple[str, ...] = option((), "text files, folders or globs")
    tokens: tuple[str, ...] = option((), "folders that `towpath data prepare` made")
    weights: tuple[float, ...] = option((), "of text or tokens: each one's share of the samples")
    dataset: str = option("", "a folder with a Hugging Face dataset on disk")
    column: str = option("text", "the field that has the text; empty: the JSON line as it is")
    tokenizer: str = option("bytes", "bytes, or the path of a tokenizer.json")
    held_out: float = option(0.05, "the share of the data, at its end, that only evaluation reads", _HELD_OUT)

    def __post_init__(self) -> None:
        check_limits(self)
        given = [key for key in ("text", "tokens", "dataset") if getattr(self, key)]
        if len(given) > 1:
            refuse(self, given[1], getattr(self, given[1]), f"only one source; data.{given[0]} is given too")
        if self.dataset and not self.column:
            refuse(self, "column", self.column, "the name of the dataset's column with the text")
        source = given[0] if given else "text"
        entries, weights = getattr(self, source), list(self.weights)
        if source == "dataset" and weights:
            refuse(self, "weights", weights, "none: a dataset is one source")
        if len(weights) != len(entries) and (weights or (source == "tokens" and len(entries) > 1)):
            refuse(self, "weights", weights, f"as many numbers as data.{source} has entries, {len(entries)}")
        if any(not weight > 0 or math.isinf(weight) for weight in weights):
            refuse(self, "weights", weights, "numbers above 0")
        if weights and min(weights) / sum(weights) * MIXED_SAMPLES < 1 - 1e-9:
            refuse(self, "weights", weights, f"shares of at least 1 in {MIXED_SAMPLES}")

    def split_sources(self) -> tuple[DataConfig, ...]:
        """Return one configuration for each source that `weights` lists. Without weights, everything is one source."""
        if not self.weights:
            return (self,)
        key = "tokens" if self.tokens else "text"
        return tuple(replace(self, weights=(), **{key: (one,)}) for one in getattr(self, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training itself. `batch` is the batch of the whole job, so any number of ranks trains identically."""

    NAME: ClassVar = "train"

    steps: int = option(200, "optimizer steps", ABOVE_0)
    batch: int = option(32, "sequences per optimizer step, over all ranks", ABOVE_0)
    micro_batch: int = option(4, "sequences that a rank computes at once", ABOVE_0)
    length: int = option(256, "tokens per sequence", ABOVE_0)
    optimizer: str = option("adamw", "or muon: for the matrices of blocks; AdamW for all else", one_of("adamw", "muon"))
    learning_rate: float = option(1e-3, "the peak learning rate, after the warm-up", ABOVE_0)
    muon_learning_rate: float = option(0.02, "muon: the peak learning rate of Muon's matrices", ABOVE_0)
    muon_momentum: float = option(0.95, "muon: the Nesterov momentum", _BELOW_ONE)
    final_share: float = option(0.1, "the last learning rate, as a share of the peak", SHARE)
    warmup: float = option(0.1, "the share of the steps in which the learning rate rises", SHARE)
    weight_decay: float = option(0.1, "the weight decay of matrices; vectors have none", FROM_0)
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's", _BETAS)
    eps: float = option(1e-8, "AdamW's", ABOVE_0)
    clip: float = option(1.0, "the largest norm of the gradient; 0: no clipping", FROM_0)
    seed: int = option(0, "the seed of new weights, the order of the data, and dropout", _SEED)
    precision: str = option("fp32", "dtype of compute and transfers: fp32, bf16, fp16", one_of(*DTYPES))
    tf32: bool = option(False, "fp32: multiply matrices in TF32 on GPUs that have it")
    loss_scale: float = option(65536.0, "fp16: the first loss scale, a power of two", _POWER_OF_TWO)
    reduce: str = option("", "dtype in which gradients are sent; empty: as precision", one_of("", *DTYPES))
    accumulate: str = option("fp32", "dtype in which gradients of micro-steps are summed", one_of(*DTYPES))
    checkpointing: bool = option(False, "recompute each block in backward, to save memory")
    offload_activations: bool = option(False, "keep activations in host memory until backward")
    compile: bool = option(False, "compile each block with torch.compile")
    not_finite: str = option(
        "stop", "if the loss or a gradient is not finite: stop, or skip the step", one_of("stop", "skip")
    )
    evaluate_every: int = option(0, "steps between evaluations; 0: only at the end", FROM_0)
    evaluate_batches: int = option(4, "batches of train.batch sequences per evaluation", ABOVE_0)
    threads: int = option(0, "CPU threads per rank; 0: its share of the node's cores", FROM_0)

    def __post_init__(self) -> None:
        check_limits(self)
        if self.batch % self.micro_batch:
            refuse(self, "micro_batch", self.micro_batch, f"a divisor of train.batch = {self.batch}")

    def micro_steps(self, copies: int) -> int:
        """Return the micro-steps of one optimizer step if `copies` copies of the model share its samples.

        Raises:
            ConfigError: The copies cannot share the batch equally.
        """
        at_once = copies * self.micro_batch
        if self.batch % at_once:
            raise ConfigError(
                f"train.batch = {self.batch} sequences cannot be shared out: {copies} ranks × train.micro_batch "
                f"{self.micro_batch} compute {at_once} at once. Make the batch a multiple of that."
            )
        return self.batch // at_once

    @property
    def dtypes(self) -> Precision:
        """The dtypes of compute, transfers and accumulation, as `shard` takes them."""
        reduce = DTYPES[self.reduce] if self.reduce else None
        # Gradients that are sent in fp32 are also summed in fp32.
        accumulate = None if self.reduce == "fp32" else DTYPES[self.accumulate]
        return Precision(DTYPES[self.precision], reduce, accumulate)


_EXTENTS = ("group", "params", "grads", "optimizer", "backward_params", "frozen")
_PRESET_OPTIONS = (
    *("route", "weights", "gradients", "feedback", "gradients_after", "gradients_until", "frozen_codec"),
    "sync_gradients",
)
_AUTO_OPTIONS = ("allow", "memory", "profile", "exact_from", "pipelines", "tensors", "schedules", "compressions")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """The sharding strategy: a preset with its options, a strategy's TOML file, or "auto".

    With "auto" the planner chooses the strategy, the micro-batch and activation checkpointing.
    """

    NAME: ClassVar = "strategy"

    name: str = option("zero3", "a preset (docs/reference/strategies.md), a TOML file, or auto")
    nodes: int = option(0, "number of nodes; 0: as the launcher placed the ranks")
    ranks_per_node: int = option(0, "ranks per node; 0: as the launcher placed them")
    nodes_per_rack: int = option(0, "nodes per rack, with nodes; 0: all are in one rack")
    route: str = option("", "for all transfers: flat, ring, hierarchical, ho-ring, two-hop")
    weights: str = option("", "codec of weights between nodes: int8; none; empty: the preset's")
    gradients: str = option("", "codec of gradients between nodes: int4:64, low-rank:4")
    feedback: str = option("", "hops that keep their rounding error: first, second, both")
    gradients_after: int = option(0, "steps at the start without compressed gradients; 0: none")
    gradients_until: int = option(0, "the last step with compressed gradients; 0: all steps")
    interleaved: bool = option(False, "compressed gradients in the first half of train.steps only")
    offload: str = option("", "in host memory: optimizer states, params, or optimizer+params", one_of("", *OFFLOADS))
    exact: bool | None = option(None, "fewer bytes, the same bits; empty: false, or auto decides")
    sync_gradients: str = option("", "micro-step: no two-hop synchronization", one_of("", *SYNC_GRADIENTS))
    group: tuple[int, ...] = option((), "mics, hpz, zero++: [ranks, nodes] of a partition group")
    params: tuple[int, ...] = option((), "lins: [ranks, nodes] that share one copy of the parameters")
    grads: tuple[int, ...] = option((), "lins: [ranks, nodes] that share one copy of the gradients")
    optimizer: tuple[int, ...] = option((), "lins: [ranks, nodes] that share one copy of the states")
    backward_params: tuple[int, ...] = option((), "lins: [ranks, nodes] that share the copy for backward")
    frozen: tuple[int, ...] = option((), "[ranks, nodes] that share frozen parameters; empty: by memory")
    frozen_codec: str = option("", "codec in which frozen parameters are stored: int8, int4:64")
    allow: tuple[str, ...] = option((), "auto: codecs that it may use between nodes; empty: none")
    memory: float = option(0.0, "auto: GiB that a rank may use; 0: 90 % of its device's", FROM_0)
    profile: str = option("", "auto: a file by `towpath probe`; empty: measure once, and keep it")
    exact_from: str = option("", "auto: a run whose exact messages to expect; empty: on paper")
    pipelines: tuple[int, ...] = option((), "auto: values to try for parallel.pipeline")
    tensors: tuple[int, ...] = option((), "auto: values to try for parallel.tensor")
    schedules: tuple[str, ...] = option((), "auto: values to try for parallel.schedule")
    compressions: tuple[str, ...] = option((), "auto: values to try for parallel.compression")

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.nodes > 0) != (self.ranks_per_node > 0):
            refuse(self, "nodes", self.nodes, f"nodes and ranks_per_node ({self.ranks_per_node}) together, or neither")
        rack = self.nodes_per_rack
        if rack and (rack < 0 or self.nodes <= 0 or self.nodes % rack):
            refuse(self, "nodes_per_rack", self.nodes_per_rack, f"a divisor of nodes ({self.nodes}), which it needs")
        for key in _EXTENTS:
            if len(getattr(self, key)) not in (0, 2):
                refuse(self, key, list(getattr(self, key)), "[ranks of a node, nodes]")
        for key in _AUTO_OPTIONS if not self.auto else (*_PRESET_OPTIONS, *_EXTENTS):
            if getattr(self, key):
                where = "only with strategy.name = auto" if not self.auto else "nothing: auto chooses it"
                refuse(self, key, getattr(self, key), where)
        if self.auto and self.interleaved and not self.allow:
            refuse(self, "interleaved", True, "codecs in strategy.allow with it: without, no gradients are compressed")
        for codec in self.allow:
            try:
                Codec.parse(codec)
            except StrategyError as error:
                refuse(self, "allow", codec, f"a codec ({error})")
        self._check_layouts()
        if self.file is None and not self.auto and self.name not in presets.strategies():
            close = presets.closest(self.name)
            refuse(self, "name", self.name, f"a preset ({close}?), the path of a .toml file, or auto")

    def _check_layouts(self) -> None:
        for key, known in (("schedules", SCHEDULES), ("compressions", COMPRESSIONS)):
            for name in getattr(self, key):
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                    refuse(self, key, name, f"of {', '.join(known)} ({close}?)")
        for key in ("pipelines", "tensors"):
            if any(size < 1 for size in getattr(self, key)):
                refuse(self, key, list(getattr(self, key)), "numbers of ranks, from 1")
        if self.chooses_layout and self.offload:
            refuse(self, "offload", self.offload, "nothing beside strategy.pipelines or strategy.tensors")
        if (self.schedules or self.compressions) and not any(size > 1 for size in self.pipelines):
            refuse(self, "pipelines", list(self.pipelines), "some above 1, because schedules or compressions are set")

    @property
    def auto(self) -> bool:
        """Whether the planner chooses the strategy."""
        return self.name == "auto"

    @property
    def chooses_layout(self) -> bool:
        """Whether "auto" may also cut the model into stages, or share its layers."""
        return max((*self.pipelines, *self.tensors), default=1) > 1

    @property
    def offload_option(self) -> Offload | None:
        """The `offload` argument of a strategy."""
        return cast("Offload | None", self.offload or None)

    @property
    def file(self) -> Path | None:
        """The strategy's TOML file, or None if `name` is a preset."""
        return Path(self.name) if self.name.endswith(".toml") else None

    def topology(self, launched: Topology) -> Topology:
        """Return the topology of this section, or else `launched`, as the launcher placed the ranks."""
        if not self.nodes:
            return launched
        return Topology(self.nodes, self.ranks_per_node, self.nodes_per_rack or None)

    def build(self, launched: Topology, steps: int) -> Strategy:
        """Return the strategy for ranks that are placed as `launched`. It cannot be "auto".

        Args:
            launched: The topology of the ranks, as the launcher placed them.
            steps: The optimizer steps of the run, for `interleaved`.

        Raises:
            ConfigError: The strategy's file cannot be read, or options are given in addition to it.
        """
        topology = self.topology(launched)
        options: dict[str, Any] = {key: getattr(self, key) for key in _PRESET_OPTIONS if getattr(self, key)}
        options |= {key: Extent(*getattr(self, key)) for key in _EXTENTS if getattr(self, key)}
        options |= {"interleaved": steps} if self.interleaved else {}
        options |= {"exact": True} if self.exact else {}
        offload = self.offload_option
        if self.file is None:
            return presets.strategy(self.name, topology, offload=offload, **options)
        if options:
            raise ConfigError(f"strategy.name is the file {self.file}, which says all: remove {', '.join(options)}.")
        try:
            strategy = Strategy.from_toml(self.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"strategy.name: cannot read {self.file}: {_reason(error)}") from None
        if strategy.outer is not None:
            raise ConfigError(
                f"strategy.name: {self.file} has outer steps, which need a loop of your own. Remove [outer]."
            )
        return strategy if offload is None else replace(strategy, offload=offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Pipeline and tensor parallelism. [strategy] then applies to the ranks that hold the same part of the model.

    Each stage is on neighboring ranks. Where the ranks of a stage fill a node, only activations cross between nodes.
    """

    NAME: ClassVar = "parallel"

    pipeline: int = option(1, "ranks of a pipeline; 1: no pipeline", ABOVE_0)
    tensor: int = option(1, "tensor-parallel ranks of one node; 1: none", ABOVE_0)
    schedule: str = option("1F1B", "or GPipe, Interleaved1F1B, … (docs/guides/pipelines.md)", one_of(*SCHEDULES))
    compression: str = option("none", "or optimus-cb, optimus-cb+fe, optimus-cb+fe+sc", one_of(*COMPRESSIONS))
    activation_gradients: str = option("", "codec of activation gradients between stages: low-rank:16")
    activations: str = option("", "codec of activations between stages: int8")
    gradients: str = option("", "codec of the first stages' gradients: low-rank:128")

    def __post_init__(self) -> None:
        check_limits(self)
        for f in fields(self):
            if self.pipeline == 1 and f.name != "tensor" and getattr(self, f.name) != f.default:
                refuse(self, f.name, getattr(self, f.name), "only with parallel.pipeline above 1")
        self.build_compression()

    @property
    def stages(self) -> int:
        """The stages of the whole pipeline."""
        return self.pipeline * SCHEDULES[self.schedule]

    def build_compression(self) -> Compression:
        """Return the compression of what stages send each other."""
        codecs = ("activation_gradients", "activations", "gradients")
        try:
            return compression(self.compression, **{key: getattr(self, key) for key in codecs if getattr(self, key)})
        except StrategyError as error:
            raise ConfigError(f"parallel: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The files that the run writes. Metrics are always written."""

    NAME: ClassVar = "log"

    folder: str = option("towpath-run", "folder of metrics.jsonl and other files of the run")
    every: int = option(1, "steps between rows of metrics", ABOVE_0)
    tensorboard: bool = option(False, "also write TensorBoard events there")
    wandb: str = option("", "also log to this project of Weights & Biases")
    wandb_offline: bool = option(True, "keep W&B's data in the folder; `wandb sync` sends it")
    trace: tuple[int, ...] = option((), "steps whose trace to write, for ui.perfetto.dev")

    def __post_init__(self) -> None:
        check_limits(self)
        if any(step < 1 for step in self.trace):
            refuse(self, "trace", list(self.trace), "steps, counted from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run saves a checkpoint, and where it resumes. The last state is always saved, after a signal too."""

    NAME: ClassVar = "checkpoint"

    folder: str = option("", "folder of the checkpoints; empty: checkpoints in log.folder")
    every: int = option(0, "steps between checkpoints; 0: use every_minutes", FROM_0)
    every_minutes: float = option(10.0, "minutes between checkpoints, if every is 0; 0: only at the end", FROM_0)
    keep: int = option(2, "number of newest checkpoints to keep; 0: all", FROM_0)
    keep_every: int = option(0, "also keep checkpoints whose step this number divides; 0: none", FROM_0)
    background: bool = option(True, "write checkpoints while the next steps run")
    resume: str = option("auto", "auto: from the newest in the folder; off; or a path")

    def __post_init__(self) -> None:
        check_limits(self)
        if self.keep_every and not self.keep:
            refuse(self, "keep_every", self.keep_every, "0 where checkpoint.keep = 0 keeps all")
        if not self.resume:
            refuse(self, "resume", self.resume, "auto, off or a path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        beyond = [step for step in self.log.trace if step > self.train.steps]
        if beyond:
            raise ConfigError(f"log.trace names step {beyond[0]}, but train.steps is {self.train.steps}.")
        if self.train.evaluate_every and not self.data.held_out:
            raise ConfigError(
                f"train.evaluate_every = {self.train.evaluate_every}: expected 0, since data.held_out = 0 leaves "
                "nothing to evaluate. Or hold out a share, such as 0.05."
            )
        pipeline, tensor = self.parallel.pipeline, self.parallel.tensor
        if pipeline * tensor > 1 and self.strategy.chooses_layout:
            raise ConfigError(
                f"strategy.pipelines and tensors leave the layout to auto, and parallel says pipeline = {pipeline}, "
                f"tensor = {tensor}: expected one of the two."
            )
        pipeline, tensor = max(pipeline, *self.strategy.pipelines, 1), max(tensor, *self.strategy.tensors, 1)
        layout = f"parallel.pipeline = {pipeline}: a pipeline has"
        if pipeline == 1:
            layout = f"parallel.tensor = {tensor}: tensor-parallel layers have"
        missing = {
            "train.compile": self.train.compile,
            "train.optimizer = muon": tensor > 1 and self.train.optimizer == "muon",
            "train.offload_activations": self.train.offload_activations,
        }
        for what, requested in missing.items():
            if requested and pipeline * tensor > 1:
                raise ConfigError(f"{layout} no {what} yet.")

    @staticmethod
    def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a configuration file.

        Args:
            path: A TOML file.
            overrides: Texts of the form `section.key=value` that replace what the file says. The value is TOML; a value
                that is not TOML is text.

        Raises:
            ConfigError: The file cannot be read, or a key or a value is not valid.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {_reason(error)}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}. Correct it there.") from None
        for override in overrides:
            _apply_override(table, override)
        return Config.from_dict(table)

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Config:
        """Return the configuration of sections by name, each a mapping of its keys.

        Raises:
            ConfigError: A section, a key or a value is not valid.
        """
        sections: dict[str, type[Any]] = {f.name: f.default_factory for f in fields(Config)}  # pyright: ignore
        made: dict[str, Any] = {}
        for name, keys in table.items():
            if name not in sections:
                raise ConfigError(f"unknown section [{name}]; {_closest(name, sections)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"{name} = {keys!r}: expected a section [{name}] with keys of its own.")
            made[name] = _section(sections[name], keys)
        return Config(**made)

    def __str__(self) -> str:
        lines: list[str] = []
        for section in (getattr(self, f.name) for f in fields(self)):
            lines += [f"[{section.NAME}]"]
            for f in fields(section):
                if not getattr(section, f.metadata["unless"], None):  # else another key decides this one
                    value = getattr(section, f.name)
                    text = f"{f.name} = {written('' if value is None else value)}"
                    lines += [f"{text:<32} # {f.metadata['about']}"]
            lines += [""]
        return "\n".join(lines)


def _section(kind: type[Any], keys: Mapping[str, Any]) -> Any:
    """Return a section of these keys, whose types are checked."""
    types, by_name = get_type_hints(kind), {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    decided: dict[str, list[str]] = {}  # keys that are given, by the key that decides them
    for key, value in keys.items():
        if key not in by_name:
            raise ConfigError(f"unknown key {kind.NAME}.{key}; {_closest(key, by_name)}")
        values[key] = _typed(types[key], value, f"{kind.NAME}.{key}")
    for name, f in by_name.items():
        if name in values and values.get(f.metadata["unless"]):
            decided.setdefault(f.metadata["unless"], []).append(f"{kind.NAME}.{name}")
    for other, names in decided.items():
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        raise ConfigError(
            f"{', '.join(names)} {verb} given together with {kind.NAME}.{other} = {values[other]!r}, which decides "
            f"{them}: expected one of the two. Leave out {them}, or {kind.NAME}.{other}."
        )
    return kind(**values)


def _typed(kind: Any, value: Any, key: str) -> Any:
    """Return `value` converted to the type of a key, or refuse it."""
    if get_origin(kind) is tuple:
        inner = [a for a in get_args(kind) if a is not Ellipsis]
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if value == "":  # `data.text=` on the command line means none
            values = []
        if len(inner) == len(values) or Ellipsis in get_args(kind):
            return tuple(_typed(inner[0], v, key) for v in values)
        raise ConfigError(f"{key} = {value!r}: expected {len(inner)} values.")
    if kind == (bool | None):
        if value == "":
            return None
        kind = bool
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{key} = {json.dumps(value, default=str)}: expected {names[kind]}.")
    if kind is str:
        try:
            # The name of a file may hold bytes that are not UTF-8. Python keeps them as lone surrogates.
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key} = {value!a}: expected Unicode text; the bytes of a name must be UTF-8.") from None
    return value


def _apply_override(table: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"{text!r} is not an override; expected section.key=value, such as train.steps=20.")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    keys = table.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigError(f"{section} = {keys!r}: expected a section [{section}] with keys of its own.")
    keys[key] = parsed


def _closest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"did you mean {close!r}? Known: {', '.join(names)}."


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file could not be read, and what to do."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}. Check the path."
    return f"it is not text in UTF-8 ({error}). Save it as such."
