"""The configuration of `towpath train`: a TOML file of seven sections, each a frozen dataclass that checks itself.

    [model]  [data]  [train]  [strategy]  [parallel]  [log]  [checkpoint]

`Config.load(path, ["train.steps=20"])` reads a file and applies overrides. `str(config)` writes every key with its
description, and loads as the same `Config`. Everything that needs neither data, model nor ranks is checked here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from towpath.core.formats import DtypeName, Precision
from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, Compression, compression
from towpath.errors import ConfigError
from towpath.planner.request import OUTER
from towpath.train.options import (
    ABOVE_0,
    BELOW_ONE,
    BETAS,
    FROM_0,
    HELD_OUT,
    POWER_OF_TWO,
    SEED,
    SHARE,
    check_limits,
    closest,
    lines_of,
    one_of,
    option,
    read_section,
    reason,
    refuse,
)
from towpath.train.strategy_config import StrategyConfig

DTYPES: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# In each block of this many samples, every source of a mixture has the share that its weight gives it.
MIXED_SAMPLES = 1000


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
    held_out: float = option(0.05, "the share of the data, at its end, that only evaluation reads", HELD_OUT)

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
    muon_momentum: float = option(0.95, "muon: the Nesterov momentum", BELOW_ONE)
    final_share: float = option(0.1, "the last learning rate, as a share of the peak", SHARE)
    warmup: float = option(0.1, "the share of the steps in which the learning rate rises", SHARE)
    weight_decay: float = option(0.1, "the weight decay of matrices; vectors have none", FROM_0)
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's", BETAS)
    eps: float = option(1e-8, "AdamW's", ABOVE_0)
    clip: float = option(1.0, "the largest norm of the gradient; 0: no clipping", FROM_0)
    seed: int = option(0, "the seed of new weights, the order of the data, and dropout", SEED)
    precision: str = option("fp32", "dtype of compute and transfers: fp32, bf16, fp16", one_of(*DTYPES))
    tf32: bool = option(False, "fp32: multiply matrices in TF32 on GPUs that have it")
    loss_scale: float = option(65536.0, "fp16: the first loss scale, a power of two", POWER_OF_TWO)
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
        except ConfigError as error:
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
        outer = self.strategy.outer.every or OUTER in self.strategy.allow
        if outer and self.parallel.pipeline * self.parallel.tensor > 1:
            raise ConfigError(
                "[strategy.outer] needs a whole copy of the model in each island, without stages and shared layers. "
                "Set parallel.pipeline and parallel.tensor to 1, or leave outer steps out."
            )
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
            raise ConfigError(f"cannot read the configuration {path}: {reason(error)}") from None
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
                raise ConfigError(f"unknown section [{name}]; {closest(name, sections)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"{name} = {keys!r}: expected a section [{name}] with keys of its own.")
            made[name] = read_section(sections[name], keys)
        return Config(**made)

    def __str__(self) -> str:
        return "\n".join(line for f in fields(self) for line in lines_of(getattr(self, f.name)))


def _apply_override(table: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    *sections, key = path.strip().split(".")
    if not (equals and sections and key and all(sections)):
        raise ConfigError(f"{text!r} is not an override; expected section.key=value, such as train.steps=20.")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    keys: Any = table
    for number, section in enumerate(sections, 1):
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            name = ".".join(sections[:number])
            raise ConfigError(f"{name} = {keys!r}: expected a section [{name}] with keys of its own.")
    keys[key] = parsed
