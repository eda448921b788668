"""What `towpath train` is told: a TOML file of seven sections, each a frozen dataclass that checks itself.

    [model]  [data]  [train]  [strategy]  [parallel]  [log]  [checkpoint]

`Config.load(path, ["train.steps=20"])` reads it, `str(config)` writes all of it, and what that writes loads as the same
Config. Whatever can be judged without data, model or ranks is judged here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from towpath.core.formats import DtypeName
from towpath.errors import ConfigError
from towpath.train.config_checks import not_negative, one_of, option, positive, refuse
from towpath.train.config_strategy import ParallelConfig, StrategyConfig
from towpath.train.config_text import closest, put_override, reason_of, section_of, written_section


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Our own GPT, unless `hf` names another model."""

    NAME: ClassVar = "model"

    hf: str = option("", "a Hugging Face model: folder or config.json; of the rest, weights")
    weights: str = option("", "safetensors to start from, file or folder; empty: new weights")
    width: int = option(256, "of the embedding", unless="hf")
    depth: int = option(8, "blocks", unless="hf")
    heads: int = option(8, "attention heads in a block", unless="hf")
    kv_heads: int = option(0, "key and value heads, shared by groups of heads; 0: as many", unless="hf")
    hidden: int = option(0, "width of the feed-forward part; 0: 8/3 of width, rounded up to 32", unless="hf")
    tied: bool = option(True, "whether the output uses the embedding's weights", unless="hf")
    vocabulary: int = option(0, "tokens the model knows; 0: as many as the tokenizer has", unless="hf")

    def __post_init__(self) -> None:
        positive(self, "width", "depth", "heads")
        not_negative(self, "kv_heads", "hidden", "vocabulary")
        if self.width % (2 * self.heads):
            refuse(self, "width", self.width, f"a multiple of 2 × heads = {2 * self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            refuse(self, "kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}")


# Over so many samples each source of a mixture gets the share that its weight says.
MIXED_SAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where tokens come from; nothing named means the sources of the Python standard library."""

    NAME: ClassVar = "data"

    text: tuple[str, ...] = option((), "text files, folders or globs")
    tokens: tuple[str, ...] = option((), "folders that `towpath data prepare` made")
    weights: tuple[float, ...] = option((), "of text or tokens: each one's share of the samples")
    dataset: str = option("", "a folder with a Hugging Face dataset on disk")
    column: str = option("text", "where text is: dataset, .parquet, .jsonl; empty: JSON as it is")
    tokenizer: str = option("bytes", "'bytes', or a tokenizer.json")
    held_out: float = option(0.05, "the share at the end that only evaluation reads")

    def __post_init__(self) -> None:
        named = [key for key in ("text", "tokens", "dataset") if getattr(self, key)]
        if len(named) > 1:
            refuse(self, named[1], getattr(self, named[1]), f"only one source; data.{named[0]} is given too")
        if self.dataset and not self.column:
            refuse(self, "column", self.column, "the name of the dataset's column with the text")
        if not 0 <= self.held_out < 1:
            refuse(self, "held_out", self.held_out, "a share from 0 up to, not including, 1")
        self._check_weights(named[0] if named else "text")

    def _check_weights(self, source: str) -> None:
        named, weights = getattr(self, source), list(self.weights)
        if source == "dataset" and weights:
            refuse(self, "weights", weights, "none: a dataset is one source")
        if len(weights) != len(named) and (weights or (source == "tokens" and len(named) > 1)):
            refuse(self, "weights", weights, f"as many numbers as data.{source} has entries, {len(named)}")
        if any(not weight > 0 or math.isinf(weight) for weight in weights):
            refuse(self, "weights", weights, "numbers above 0")
        if weights and min(weights) / sum(weights) * MIXED_SAMPLES < 1 - 1e-9:
            refuse(self, "weights", weights, f"shares of at least 1 in {MIXED_SAMPLES}")

    def alone(self) -> tuple[DataConfig, ...]:
        """Each source that `weights` tells apart, by itself; without weights, all that is named is one."""
        if not self.weights:
            return (self,)
        named = "tokens" if self.tokens else "text"
        return tuple(replace(self, weights=(), **{named: (one,)}) for one in getattr(self, named))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How it is trained. `batch` is the whole job's: the same training on any number of ranks."""

    NAME: ClassVar = "train"

    steps: int = option(200, "optimizer steps")
    batch: int = option(32, "sequences of one optimizer step, over all ranks")
    micro_batch: int = option(4, "sequences that a rank computes at once")
    length: int = option(256, "tokens of a sequence")
    optimizer: str = option("adamw", "or muon: for the matrices of blocks; AdamW for all else")
    learning_rate: float = option(1e-3, "its peak, after the warm-up")
    muon_learning_rate: float = option(0.02, "muon: the peak for what it steps")
    muon_momentum: float = option(0.95, "muon: Nesterov's")
    final_share: float = option(0.1, "share of the peak at which the cosine ends")
    warmup: float = option(0.1, "share of the steps that lead up to the peak")
    weight_decay: float = option(0.1, "of matrices; vectors decay never")
    betas: tuple[float, float] = option((0.9, 0.95), "AdamW's")
    eps: float = option(1e-8, "AdamW's")
    clip: float = option(1.0, "the largest global norm of the gradient; 0: as it is")
    seed: int = option(0, "of new weights, the order of the data, and dropout")
    precision: str = option("fp32", "what travels and computes: fp32, bf16, fp16; masters are fp32")
    tf32: bool = option(False, "fp32: products of matrices in TF32, where a GPU has it")
    loss_scale: float = option(65536.0, "fp16: of the loss, at first; a power of two")
    reduce: str = option("", "what gradients travel in; empty: as precision")
    accumulate: str = option("fp32", "what they are summed in over micro-steps")
    checkpointing: bool = option(False, "keep a block's input only; recompute the rest in backward")
    offload_activations: bool = option(False, "keep what backward needs in the host's memory")
    compile: bool = option(False, "torch.compile for each block")
    not_finite: str = option("stop", "when a loss or gradient is not finite: stop, or skip the step")
    evaluate_every: int = option(0, "steps between evaluations of what is held out; 0: at the end")
    evaluate_batches: int = option(4, "batches of train.batch sequences that an evaluation reads")
    threads: int = option(0, "CPU threads of a rank; 0: its share of the node's cores")

    def __post_init__(self) -> None:
        positive(self, "steps", "batch", "micro_batch", "length", "learning_rate", "eps", "evaluate_batches")
        positive(self, "muon_learning_rate")
        one_of(self, "optimizer", "adamw", "muon")
        if not 0 <= self.muon_momentum < 1:
            refuse(self, "muon_momentum", self.muon_momentum, "a number from 0 up to, not including, 1")
        not_negative(self, "weight_decay", "clip", "seed", "evaluate_every", "threads")
        if self.batch % self.micro_batch:
            refuse(self, "micro_batch", self.micro_batch, f"a divisor of train.batch = {self.batch}")
        for key in ("warmup", "final_share"):
            if not 0 <= getattr(self, key) <= 1:
                refuse(self, key, getattr(self, key), "a share from 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            refuse(self, "betas", self.betas, "two numbers from 0 up to, not including, 1")
        one_of(self, "precision", *DTYPES)
        if math.frexp(self.loss_scale)[0] != 0.5:
            refuse(self, "loss_scale", self.loss_scale, "a power of two")
        one_of(self, "reduce", "", *DTYPES)
        one_of(self, "accumulate", *DTYPES)
        one_of(self, "not_finite", "stop", "skip")

    def micro_steps(self, world: int) -> int:
        """Of one optimizer step, on each of `world` ranks, or copies of a pipeline."""
        at_once = world * self.micro_batch
        if self.batch % at_once:
            raise ConfigError(
                f"train.batch = {self.batch} sequences cannot be shared out: {world} ranks × train.micro_batch "
                f"{self.micro_batch} compute {at_once} at once. Make the batch a multiple of that."
            )
        return self.batch // at_once


DTYPES: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written, and where. The metrics are always."""

    NAME: ClassVar = "log"

    folder: str = option("towpath-run", "of metrics.jsonl and all else that the run writes")
    every: int = option(1, "steps between rows of metrics")
    tensorboard: bool = option(False, "also write TensorBoard's events there")
    wandb: str = option("", "also log to this project of Weights & Biases")
    wandb_offline: bool = option(True, "keep it in the folder; `wandb grad_sync` sends it")
    trace: tuple[int, ...] = option((), "steps of which to write a trace for ui.perfetto.dev")

    def __post_init__(self) -> None:
        positive(self, "every")
        if any(step < 1 for step in self.trace):
            refuse(self, "trace", list(self.trace), "steps, counted from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and where it goes on. Its last state is saved always, also when it is told to stop."""

    NAME: ClassVar = "checkpoint"

    folder: str = option("", "of the checkpoints; empty: checkpoints in log.folder")
    every: int = option(0, "steps between checkpoints; 0: as many as every_minutes takes")
    every_minutes: float = option(10.0, "with every = 0, between checkpoints; 0: only the last state")
    keep: int = option(2, "how many of the newest stay; 0: all")
    keep_every: int = option(0, "besides, those whose step this divides stay; 0: none")
    background: bool = option(True, "write while the next steps run")
    resume: str = option("auto", "auto: from the newest in the folder; off; or a path")

    def __post_init__(self) -> None:
        not_negative(self, "every", "every_minutes", "keep", "keep_every")
        if self.keep_every and not self.keep:
            refuse(self, "keep_every", self.keep_every, "0 where checkpoint.keep = 0 keeps all")
        if not self.resume:
            refuse(self, "resume", self.resume, "auto, off or a path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
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
        self._check_parallel()

    def _check_parallel(self) -> None:
        """What stages, or tensor-parallel layers, do not have yet."""
        pipeline, tensor = self.parallel.pipeline, self.parallel.tensor
        if pipeline * tensor > 1 and self.strategy.layouts:
            raise ConfigError(
                f"strategy.pipelines and tensors leave the layout to auto, and parallel says pipeline = {pipeline}, "
                f"tensor = {tensor}: expected one of the two."
            )
        pipeline, tensor = (
            max((size, *may)) for size, may in ((pipeline, self.strategy.pipelines), (tensor, self.strategy.tensors))
        )
        said = f"parallel.pipeline = {pipeline}: a pipeline has"
        if pipeline == 1:
            said = f"parallel.tensor = {tensor}: tensor-parallel layers have"
        muon = tensor > 1 and self.train.optimizer == "muon"
        missing = {"train.compile": self.train.compile, "train.optimizer = muon": muon}
        missing |= {"train.offload_activations": self.train.offload_activations}
        for what, asked in missing.items():
            if asked and pipeline * tensor > 1:
                raise ConfigError(f"{said} no {what} yet.")

    @staticmethod
    def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {reason_of(error)}.") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}.") from None
        for override in overrides:
            put_override(table, override)
        return Config.of(table)

    @staticmethod
    def of(table: Mapping[str, Any]) -> Config:
        """Sections by name, each a table of its keys."""
        sections: dict[str, type[Any]] = {f.name: f.default_factory for f in fields(Config)}  # pyright: ignore
        made: dict[str, Any] = {}
        for name, keys in table.items():
            kind = sections.get(name)
            if kind is None:
                raise ConfigError(f"unknown section [{name}]; {closest(name, sections)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"{name} = {keys!r}: expected a section [{name}] with keys of its own.")
            made[name] = section_of(kind, keys)
        return Config(**made)

    def __str__(self) -> str:
        sections = [getattr(self, f.name) for f in fields(self)]
        return "\n".join(written_section(section) for section in sections)
