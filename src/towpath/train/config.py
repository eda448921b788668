"""What `towpath train` is told: a TOML file of seven sections, each a frozen dataclass that checks itself.

    [model]  [data]  [train]  [strategy]  [parallel]  [log]  [checkpoint]

`Config.load(path, ["train.steps=20"])` reads it, `str(config)` writes all of it, and what that writes loads as the same
Config. Whatever can be judged without data, model or ranks is judged here.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from towpath.core import presets
from towpath.core.compression import COMPRESSIONS, Compression, compression
from towpath.core.formats import Codec
from towpath.core.pipeline import SCHEDULES
from towpath.core.strategy import OFFLOADS, Strategy
from towpath.errors import ConfigError, StrategyError
from towpath.topology.cluster import Extent, Topology
from towpath.train.config_checks import not_negative, one_of, positive, refuse
from towpath.train.config_text import closest, put_override, reason_of, section_of, written_section


def _key(default: Any, about: str) -> Any:
    """A key of a section, with what the written file says of it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Our own GPT, unless `hf` names another model."""

    NAME: ClassVar = "model"

    hf: str = _key("", "a Hugging Face model: folder or config.json; of the rest, weights")
    weights: str = _key("", "safetensors to start from, file or folder; empty: new weights")
    width: int = _key(256, "of the embedding")
    depth: int = _key(8, "blocks")
    heads: int = _key(8, "attention heads in a block")
    kv_heads: int = _key(0, "key and value heads, shared by groups of heads; 0: as many")
    hidden: int = _key(0, "width of the feed-forward part; 0: 8/3 of width, rounded up to 32")
    tied: bool = _key(True, "whether the output uses the embedding's weights")
    vocabulary: int = _key(0, "tokens the model knows; 0: as many as the tokenizer has")

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

    text: tuple[str, ...] = _key((), "text files, folders or globs")
    tokens: tuple[str, ...] = _key((), "folders that `towpath data prepare` made")
    weights: tuple[float, ...] = _key((), "of text or tokens: each one's share of the samples")
    dataset: str = _key("", "a folder with a Hugging Face dataset on disk")
    column: str = _key("text", "where text is: dataset, .parquet, .jsonl; empty: JSON as it is")
    tokenizer: str = _key("bytes", "'bytes', or a tokenizer.json")
    held_out: float = _key(0.05, "the share at the end that only evaluation reads")

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

    steps: int = _key(200, "optimizer steps")
    batch: int = _key(32, "sequences of one optimizer step, over all ranks")
    micro_batch: int = _key(4, "sequences that a rank computes at once")
    length: int = _key(256, "tokens of a sequence")
    optimizer: str = _key("adamw", "or muon: for the matrices of blocks; AdamW for all else")
    learning_rate: float = _key(1e-3, "its peak, after the warm-up")
    muon_learning_rate: float = _key(0.02, "muon: the peak for what it steps")
    muon_momentum: float = _key(0.95, "muon: Nesterov's")
    final_share: float = _key(0.1, "share of the peak at which the cosine ends")
    warmup: float = _key(0.1, "share of the steps that lead up to the peak")
    weight_decay: float = _key(0.1, "of matrices; vectors decay never")
    betas: tuple[float, float] = _key((0.9, 0.95), "AdamW's")
    eps: float = _key(1e-8, "AdamW's")
    clip: float = _key(1.0, "the largest global norm of the gradient; 0: as it is")
    seed: int = _key(0, "of new weights, the order of the data, and dropout")
    precision: str = _key("fp32", "what travels and computes: fp32, bf16, fp16; masters are fp32")
    tf32: bool = _key(False, "fp32: products of matrices in TF32, where a GPU has it")
    loss_scale: float = _key(65536.0, "fp16: of the loss, at first; a power of two")
    reduce: str = _key("", "what gradients travel in; empty: as precision")
    accumulate: str = _key("fp32", "what they are summed in over micro-steps")
    checkpointing: bool = _key(False, "keep a block's input only; recompute the rest in backward")
    offload_activations: bool = _key(False, "keep what backward needs in the host's memory")
    compile: bool = _key(False, "torch.compile for each block")
    not_finite: str = _key("stop", "when a loss or gradient is not finite: stop, or skip the step")
    evaluate_every: int = _key(0, "steps between evaluations of what is held out; 0: at the end")
    evaluate_batches: int = _key(4, "batches of train.batch sequences that an evaluation reads")
    threads: int = _key(0, "CPU threads of a rank; 0: its share of the node's cores")

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


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """A preset and its options, as `towpath.strategy()` takes them, a file that `Strategy.to_toml()` wrote, or auto:
    what the planner ranks first, with the micro-batch and the checkpointing that go with it."""

    NAME: ClassVar = "strategy"

    name: str = _key("zero3", "a preset (README), the path of a strategy's TOML file, or auto")
    nodes: int = _key(0, "nodes; 0: as the launcher placed the ranks")
    ranks_per_node: int = _key(0, "ranks on each; 0: as the launcher placed them")
    route: str = _key("", "one for all transfers: flat, ring, hierarchical, ho-ring, two-hop")
    weights: str = _key("", "codec of weights between nodes: int8; none; empty: the preset's")
    gradients: str = _key("", "codec of gradients between nodes: int4:64, low-rank:4")
    feedback: str = _key("", "hops that keep what gradients lose: first, second, both")
    gradients_after: int = _key(0, "steps before the gradients' codec serves; 0: none")
    gradients_until: int = _key(0, "steps for which the gradients' codec serves; 0: all")
    offload: str = _key("", "optimizer: its states, masters and gradients in the host's memory")
    group: tuple[int, ...] = _key((), "mics: [local, nodes] of its partition group")
    params: tuple[int, ...] = _key((), "lins: [local, nodes] over which parameters are spread")
    grads: tuple[int, ...] = _key((), "lins: the same of gradients")
    optimizer: tuple[int, ...] = _key((), "lins: the same of optimizer states")
    backward_params: tuple[int, ...] = _key((), "lins: the same of a copy for the backward pass")
    frozen: tuple[int, ...] = _key((), "[local, nodes] of what does not train; empty: by memory")
    frozen_codec: str = _key("", "what does not train rests in: int8, int4:64")
    allow: tuple[str, ...] = _key((), "auto: codecs that it may use between nodes; none: lossless")
    memory: float = _key(0.0, "auto: GiB that a rank may hold; 0: nine tenths of its device's")
    profile: str = _key("", "auto: what `towpath probe` wrote; empty: probes once and keeps it")

    def __post_init__(self) -> None:
        if (self.nodes > 0) != (self.ranks_per_node > 0):
            refuse(self, "nodes", self.nodes, f"nodes and ranks_per_node ({self.ranks_per_node}) together, or neither")
        one_of(self, "offload", "", *OFFLOADS)
        for key in _EXTENTS:
            if len(getattr(self, key)) not in (0, 2):
                refuse(self, key, list(getattr(self, key)), "[local, nodes]")
        self._check_auto()
        if self.file is None and not self.auto and self.name not in presets.strategies():
            close = difflib.get_close_matches(self.name, presets.strategies(), n=1, cutoff=0.0)[0]
            refuse(self, "name", self.name, f"a preset ({close}?), the path of a .toml file, or auto")

    def _check_auto(self) -> None:
        not_negative(self, "memory")
        for key in _AUTO if not self.auto else (*_OPTIONS, *_EXTENTS):
            if getattr(self, key):
                where = "only with strategy.name = auto" if not self.auto else "nothing: auto chooses it"
                refuse(self, key, getattr(self, key), where)
        for codec in self.allow:
            try:
                Codec.parse(codec)
            except StrategyError as error:
                refuse(self, "allow", codec, f"a codec ({error})")

    @property
    def auto(self) -> bool:
        return self.name == "auto"

    @property
    def file(self) -> Path | None:
        return Path(self.name) if self.name.endswith(".toml") else None

    def topology(self, launched: Topology) -> Topology:
        """As this section says, else as the launcher placed the ranks."""
        return Topology(self.nodes, self.ranks_per_node) if self.nodes else launched

    def make(self, topology: Topology) -> Strategy:
        """Any but auto, on the cluster that runs, `topology`, unless this section says how to cut that."""
        topology = self.topology(topology)
        options: dict[str, Any] = {key: getattr(self, key) for key in _OPTIONS if getattr(self, key)}
        options |= {key: Extent(*getattr(self, key)) for key in _EXTENTS if getattr(self, key)}
        offload = self.offload or None
        if self.file is None:
            return presets.strategy(self.name, topology, offload=offload, **options)
        if options:
            raise ConfigError(f"strategy.name is the file {self.file}, which says all: remove {', '.join(options)}.")
        try:
            made = Strategy.from_toml(self.file.read_text(encoding="utf-8"))
            return made if offload is None else replace(made, offload=offload)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"strategy.name: cannot read {self.file}: {reason_of(error)}.") from None


_OPTIONS = ("route", "weights", "gradients", "feedback", "gradients_after", "gradients_until", "frozen_codec")
_AUTO = ("allow", "memory", "profile")
_EXTENTS = ("group", "params", "grads", "optimizer", "backward_params", "frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The model in stages, each on ranks of its own: neighbours, so that where a stage has as many as a node, only what
    goes between stages crosses. [strategy] then is of the ranks that hold one stage."""

    NAME: ClassVar = "parallel"

    pipeline: int = _key(1, "ranks that a micro-batch passes through; 1: no stages")
    schedule: str = _key("1F1B", "or GPipe, Interleaved1F1B, … (docs/pipelines.md)")
    compression: str = _key("none", "or optimus-cb, optimus-cb+fe, optimus-cb+fe+sc")
    activation_gradients: str = _key("", "codec of what stages send back, such as low-rank:16")
    activations: str = _key("", "codec of what stages hand on, such as int8")
    gradients: str = _key("", "codec of the first stages' gradients: low-rank:128")

    def __post_init__(self) -> None:
        positive(self, "pipeline")
        one_of(self, "schedule", *SCHEDULES)
        one_of(self, "compression", *COMPRESSIONS)
        for f in fields(self):
            if self.pipeline == 1 and getattr(self, f.name) != f.default:
                refuse(self, f.name, getattr(self, f.name), "only with parallel.pipeline above 1")
        self.make()

    @property
    def stages(self) -> int:
        return self.pipeline * SCHEDULES[self.schedule]

    def make(self) -> Compression:
        options = {key: getattr(self, key) for key in _COMPRESSED if getattr(self, key)}
        try:
            return compression(self.compression, **options)
        except StrategyError as error:
            raise ConfigError(f"parallel: {error}") from None


_COMPRESSED = ("activation_gradients", "activations", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written, and where. The metrics are always."""

    NAME: ClassVar = "log"

    folder: str = _key("towpath-run", "of metrics.jsonl and all else that the run writes")
    every: int = _key(1, "steps between rows of metrics")
    tensorboard: bool = _key(False, "also write TensorBoard's events there")
    wandb: str = _key("", "also log to this project of Weights & Biases")
    wandb_offline: bool = _key(True, "keep it in the folder; `wandb sync` sends it")
    trace: tuple[int, ...] = _key((), "steps of which to write a trace for ui.perfetto.dev")

    def __post_init__(self) -> None:
        positive(self, "every")
        if any(step < 1 for step in self.trace):
            refuse(self, "trace", list(self.trace), "steps, counted from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and where it goes on. Its last state is saved always, also when it is told to stop."""

    NAME: ClassVar = "checkpoint"

    folder: str = _key("", "of the checkpoints; empty: checkpoints in log.folder")
    every: int = _key(0, "steps between checkpoints; 0: as many as every_minutes takes")
    every_minutes: float = _key(10.0, "with every = 0, between checkpoints; 0: only the last state")
    keep: int = _key(2, "how many of the newest stay; 0: all")
    keep_every: int = _key(0, "besides, those whose step this divides stay; 0: none")
    background: bool = _key(True, "write while the next steps run")
    resume: str = _key("auto", "auto: from the newest in the folder; off; or a path")

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
        if self.parallel.pipeline > 1:
            self._check_stages()

    def _check_stages(self) -> None:
        """What stages do not have yet."""
        missing = {"strategy.name = auto": self.strategy.auto, "train.compile": self.train.compile}
        missing["train.offload_activations"] = self.train.offload_activations
        for what, asked in missing.items():
            if asked:
                raise ConfigError(f"parallel.pipeline = {self.parallel.pipeline}: a pipeline has no {what} yet.")

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
