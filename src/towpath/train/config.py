"""The configuration of `towpath train`: a TOML file of a few sections, each a frozen dataclass that checks itself.

    [model]  [data]  [train]  [strategy]  [strategy.outer]  [parallel]  [log]  [checkpoint]

`Config.load(path, ["train.steps=20"])` reads a file and applies overrides. `str(config)` writes every key with its
description, and loads as the same `Config`. Everything that needs neither data, model nor ranks is checked here.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, cast, get_args, get_type_hints

from towpath.core import presets
from towpath.core.formats import Codec, DtypeName, Precision
from towpath.core.passes import COMPRESSIONS, SCHEDULES
from towpath.core.shares import Shares, shares_of
from towpath.core.strategy import OFFLOADS, Protect, Strategy, written
from towpath.errors import ConfigError
from towpath.outer.settings import Outer, outer_transport
from towpath.plan.request import OUTER
from towpath.topology.cluster import Topology

DTYPES: dict[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16"}
AUTO_KEYS = ("allow", "memory", "profile")  # of [strategy], for strategy.name = "auto" only


# How a key is declared ------------------------------------------------------------------------------------------------


Limit = tuple[Callable[[Any], object], str]  # a condition on the value of a key, and what an error says that it expects

# NaN is outside of all of them.
ABOVE_0: Limit = (lambda value: value > 0, "more than 0")
FROM_0: Limit = (lambda value: value >= 0, "0 or more")
SHARE: Limit = (lambda value: 0 <= value <= 1, "a share from 0 to 1")
SHARE_BELOW_1: Limit = (lambda value: 0 <= value < 1, "a share from 0 up to, not including, 1")
SEED: Limit = (lambda value: 0 <= value < 1 << 63, "a whole number from 0 to 2⁶³ − 1")
NODES: Limit = (
    re.compile(r"([1-9]\d{0,4}(x|(\+[1-9]\d{0,4})*\+)[1-9]\d{0,4})?").fullmatch,
    "NODESxRANKS, such as 4x8, or the ranks of each node, such as 1+3",
)
STEPS: Limit = (lambda value: all(step > 0 for step in value), "steps, counted from 1")


def one_of(*allowed: str) -> Limit:
    """Return the limit to some values."""
    return (lambda value: value in allowed, f"one of {', '.join(map(repr, allowed))}")


def key(default: Any, about: str, limit: Limit | None = None) -> Any:
    """Declare a key of a section: its default, the description that `str(config)` writes, and a limit of its values."""
    return field(default=default, metadata={"about": about, "limit": limit})


class Section:
    """The base of the sections, which are dataclasses."""

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(cast("Any", self)):
            holds, expected = f.metadata.get("limit") or (None, "")
            if holds is not None and not holds(getattr(self, f.name)):
                self.refuse(f.name, expected)
        self.check()

    def check(self) -> None:
        """Refuse keys that contradict each other."""

    def refuse(self, name: str, expected: str) -> None:
        """Raise a `ConfigError` about a key."""
        value = getattr(self, name)
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"{self.NAME}.{name} = {shown!r}: expected {expected}.")

    def refuse_all(self, expected: str, *without: str) -> None:
        """Raise a `ConfigError` about the first key that is set, except for some."""
        for f in fields(cast("Any", self)):
            if f.name not in without and getattr(self, f.name) != f.default:
                self.refuse(f.name, expected)


# The sections ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model: a GPT of this shape, or the Hugging Face model that `hf` names."""

    NAME: ClassVar = "model"

    hf: str = key("", "a Hugging Face folder or config.json, which decides the shape")
    weights: str = key("", "safetensors to start from, file or folder; empty: new weights")
    width: int = key(256, "the width of the embedding", ABOVE_0)
    depth: int = key(8, "the number of blocks", ABOVE_0)
    heads: int = key(8, "attention heads per block", ABOVE_0)

    def check(self) -> None:
        if self.width % (2 * self.heads):
            self.refuse("width", f"a multiple of 2 × heads = {2 * self.heads}")
        if self.hf:
            self.refuse_all(f"nothing beside model.hf = {self.hf!r}, which decides it", "hf", "weights")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The tokens. Without any, training reads the sources of the Python standard library."""

    NAME: ClassVar = "data"

    tokens: str = key("", "a folder that `towpath data prepare` made")
    held_out: float = key(0.05, "the share of the tokens, at their end, for evaluation", SHARE_BELOW_1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The training itself. `batch` is the batch of the whole job, so any number of ranks trains identically."""

    NAME: ClassVar = "train"

    steps: int = key(200, "optimizer steps", ABOVE_0)
    batch: int = key(32, "sequences per optimizer step, over all ranks", ABOVE_0)
    micro_batch: int = key(4, "sequences that a rank computes at once", ABOVE_0)
    length: int = key(256, "tokens per sequence", ABOVE_0)
    optimizer: str = key("adamw", "or muon: for the matrices of blocks; AdamW for all else", one_of("adamw", "muon"))
    learning_rate: float = key(1e-3, "the peak learning rate, after the warm-up", ABOVE_0)
    warmup: float = key(0.1, "the share of the steps in which the learning rate rises", SHARE)
    weight_decay: float = key(0.1, "the weight decay of matrices; vectors have none", FROM_0)
    clip: float = key(1.0, "the largest norm of the gradient; 0: no clipping", FROM_0)
    seed: int = key(0, "the seed of new weights, the order of the data, and dropout", SEED)
    precision: str = key("fp32", "dtype of compute and transfers: fp32, bf16", one_of(*DTYPES))
    checkpointing: bool = key(False, "recompute each block in backward, to save memory")
    offload_activations: bool = key(False, "keep activations in host memory until backward")
    compile: bool = key(False, "compile each block with torch.compile")
    evaluate_every: int = key(0, "steps between evaluations; 0: only at the end", FROM_0)
    threads: int = key(0, "CPU threads per rank; 0: its share of the node's cores", FROM_0)

    def check(self) -> None:
        if self.batch % self.micro_batch:
            self.refuse("micro_batch", f"a divisor of train.batch = {self.batch}")

    def micro_steps(self, copies: int) -> int:
        """Return the micro-steps of one optimizer step if `copies` copies of the model share its samples."""
        at_once = copies * self.micro_batch
        if self.batch % at_once:
            raise ConfigError(
                f"train.batch = {self.batch} sequences cannot be shared out: {copies} ranks × train.micro_batch "
                f"{self.micro_batch} compute {at_once} at once. Make the batch a multiple of that."
            )
        return self.batch // at_once

    @property
    def dtypes(self) -> Precision:
        """The dtypes of compute and transfers, as `shard` takes them. Micro-steps are summed in fp32."""
        return Precision(DTYPES[self.precision], None, "float32")


@dataclass(frozen=True, kw_only=True)
class OuterConfig(Section):
    """Outer steps: islands of nodes train on their own, and synchronize now and then. Without `every`, there are none.

    A strategy's file also sets the outer learning rate and momentum.
    """

    NAME: ClassVar = "strategy.outer"

    every: int = key(0, "steps between exchanges of the same weights; 0: no outer steps", FROM_0)
    fragments: int = key(1, "parts of the model, exchanged at different steps")
    delay: int = key(0, "steps that an exchange may take while training goes on")
    blend: float = key(0.0, "share of its own weights that an island keeps; delayed: 0.5")
    codec: str = key("", "of exchanges: int8, int4; empty: float32")
    islands: int = key(0, "groups of whole nodes; 0: each node is an island", FROM_0)
    meet: str = key("", "HOST:PORT where islands that come and go meet")

    def check(self) -> None:
        if not self.every:
            self.refuse_all("strategy.outer.every above 0 with it")
        self.build()

    def build(self) -> Outer | None:
        """Return the outer steps, or None if there are none."""
        if not self.every:
            return None
        try:
            transport = outer_transport(self.codec)
            own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("codec", "islands")}
            return Outer(**own, transport=transport, islands=self.islands or None)
        except ConfigError as error:
            raise ConfigError(f"[strategy.outer]: {error}") from None


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """The sharding strategy: a preset with its options (docs/reference/strategies.md), its TOML file, or "auto".

    With "auto" the planner chooses the strategy, the micro-batch and activation checkpointing.
    """

    NAME: ClassVar = "strategy"

    name: str = key("zero3", 'a preset with options ("mics route=ring"), a TOML file, or auto')
    nodes: str = key("", "nodes and ranks, as 4x8 or 1+3; empty: as they were launched", NODES)
    exact: bool | None = key(None, "fewer bytes, the same bits; empty: false, or auto decides")
    offload: str = key("", "in host memory: optimizer states, params, or optimizer+params", one_of("", *OFFLOADS))
    allow: tuple[str, ...] = key((), "auto: codecs and outer, which it may use between nodes")
    protect: int = key(0, "steps between snapshots in the nodes' memory; 0: none", FROM_0)
    shares: str = key("", "speeds of the ranks, as 2,2,1,1; auto measures; empty: equal")
    memory: float = key(0.0, "auto: GiB that a rank may use; 0: 90 % of its device's", FROM_0)
    profile: str = key("", "auto: a file by `towpath probe`; empty: measure once, and keep it")
    outer: OuterConfig = field(default_factory=OuterConfig)

    def check(self) -> None:
        if not self.auto:
            self.refuse_all(
                "only with strategy.name = auto", *(f.name for f in fields(self) if f.name not in AUTO_KEYS)
            )
        try:
            _ = self.divided
        except ConfigError as error:
            raise ConfigError(f"strategy.{error}") from None
        if self.auto and self.outer.every:
            self.outer.refuse("every", "0: auto chooses it, if strategy.allow has 'outer'")
        for codec in (name for name in self.allow if name != OUTER):
            try:
                Codec.parse(codec)
            except ConfigError as error:
                raise ConfigError(f"strategy.allow = {codec!r}: expected a codec ({error})") from None
        preset, _, options = self.name.strip().partition(" ")
        if preset == "auto" and options:
            self.refuse("name", "auto alone: it chooses the options")
        if not self.auto and self.file is None and preset not in presets.strategies():
            self.refuse("name", f"a preset ({presets.closest(preset)}?), the path of a .toml file, or auto")
        if "+" in self.nodes and self.file is None:  # refused before ranks meet
            topology = Topology.parse(self.nodes)
            _ = topology.check_equal("strategy.name = auto") if self.auto else self.build(topology)
            if isinstance(self.divided, tuple) and len(self.divided) != topology.world:
                self.refuse("shares", f"{topology.world} numbers, one for each rank, or auto")

    @property
    def auto(self) -> bool:
        """Whether the planner chooses the strategy."""
        return self.name == "auto"

    @property
    def file(self) -> Path | None:
        """The strategy's TOML file, or None if `name` is a preset."""
        return Path(self.name) if self.name.endswith(".toml") else None

    @property
    def divided(self) -> Shares | None:
        """The shares as a strategy takes them."""
        return shares_of(self.shares or None)

    @property
    def protection(self) -> Protect | None:
        """How often nodes keep snapshots in memory, or None if they keep none."""
        return Protect(self.protect) if self.protect else None

    def topology(self, launched: Topology) -> Topology:
        """Return the topology of this section, or else `launched`, as the launcher placed the ranks."""
        return Topology.parse(self.nodes) if self.nodes else launched

    def build(self, launched: Topology) -> Strategy:
        """Return the strategy for ranks that are placed as `launched`. It cannot be "auto"."""
        options: dict[str, Any] = {name: getattr(self, name) for name in ("offload", "exact") if getattr(self, name)}
        if (outer := self.outer.build()) is not None:
            options["outer"] = outer
        if self.protect:
            options["protect"] = self.protection
        if self.shares:
            options["shares"] = self.divided
        if self.file is None:
            return presets.parse_strategy(self.name, self.topology(launched), **options)
        if options:
            given = ", ".join("[strategy.outer]" if name == "outer" else name for name in options)
            raise ConfigError(f"strategy.name is the file {self.file}, which says all: remove {given}.")
        return Strategy.from_toml(_read(self.file, "the strategy"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Pipeline and tensor parallelism. [strategy] then applies to the ranks that hold the same part of the model.

    Each stage is on neighboring ranks. Where the ranks of a stage fill a node, only activations cross between nodes.
    """

    NAME: ClassVar = "parallel"

    pipeline: int = key(1, "ranks of a pipeline; 1: no pipeline", ABOVE_0)
    tensor: int = key(1, "tensor-parallel ranks of one node; 1: none", ABOVE_0)
    schedule: str = key("1F1B", "or GPipe, Interleaved1F1B (docs/guides/pipelines.md)", one_of(*SCHEDULES))
    compression: str = key("none", "or optimus-cb, optimus-cb+fe, optimus-cb+fe+sc, optimus-cc", one_of(*COMPRESSIONS))

    def check(self) -> None:
        if self.pipeline == 1:
            self.refuse_all("only with parallel.pipeline above 1", "tensor")

    @property
    def ranks(self) -> int:
        """The ranks that share one copy of the model's layers."""
        return self.pipeline * self.tensor

    @property
    def stages(self) -> int:
        """The stages of the whole pipeline."""
        return self.pipeline * SCHEDULES[self.schedule]


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """The files that the run writes. Metrics are always written."""

    NAME: ClassVar = "log"

    folder: str = key("towpath-run", "folder of metrics.jsonl, checkpoints and other files")
    tensorboard: bool = key(False, "also write TensorBoard events there")
    wandb: str = key("", "also log to this project of Weights & Biases")
    trace: tuple[int, ...] = key((), "steps whose trace to write, for ui.perfetto.dev", STEPS)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the run saves a checkpoint, and where it resumes. The last state is always saved, after a signal too."""

    NAME: ClassVar = "checkpoint"

    every: int = key(0, "steps between checkpoints; 0: ten minutes", FROM_0)
    keep: int = key(2, "number of newest checkpoints to keep; 0: all", FROM_0)
    resume: str = key("auto", "auto: from the newest in log.folder; off; or a path")


@dataclass(frozen=True, kw_only=True)
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
        train, parallel = self.train, self.parallel
        if late := [step for step in self.log.trace if step > train.steps]:
            self.log.refuse("trace", f"steps up to train.steps = {train.steps}; got {late[0]}")
        if train.evaluate_every and not self.data.held_out:
            train.refuse("evaluate_every", "0, since data.held_out = 0 leaves nothing to evaluate")
        if parallel.ranks == 1:
            return
        if "+" in self.strategy.nodes:
            Topology.parse(self.strategy.nodes).check_equal("[parallel]")
        if self.strategy.outer.every or OUTER in self.strategy.allow:
            raise ConfigError(
                "[strategy.outer] needs a whole copy of the model in each island, without stages and shared layers. "
                "Set parallel.pipeline and parallel.tensor to 1, or leave outer steps out."
            )
        which = "pipeline" if parallel.pipeline > 1 else "tensor"
        setting = f"parallel.{which} = {getattr(parallel, which)}"
        if self.strategy.protect:
            self.strategy.refuse("protect", f"0 with {setting}; Saver.protect in your own loop takes snapshots")
        if self.strategy.shares:
            self.strategy.refuse("shares", f"none with {setting}")
        missing = {
            "train.compile": train.compile,
            "train.optimizer = muon": parallel.tensor > 1 and train.optimizer == "muon",
            "train.offload_activations": train.offload_activations,
        }
        for what, requested in missing.items():
            if requested:
                parallel.refuse(which, f"1 with {what}, which works on whole models only")

    @staticmethod
    def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a configuration file.

        `overrides` have the form `section.key=value`. The value is TOML; a value that is not TOML is text.
        """
        try:
            table = tomllib.loads(_read(Path(path), "the configuration"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}. Correct it there.") from None
        for override in overrides:
            _apply_override(table, override)
        return Config.from_dict(table)

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Config:
        """Return the configuration of sections by name, each a mapping of its keys."""
        return _parse_section(Config, table)

    def __str__(self) -> str:
        return "\n".join(line for f in fields(self) for line in _toml_lines(getattr(self, f.name)))


# Reading and writing --------------------------------------------------------------------------------------------------


def _parse_section(kind: type[Any], table: Any, name: str = "") -> Any:
    """Return the section `name`, or without a name the configuration, made of a table."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} = {table!r}: expected a section [{name}] with keys of its own.")
    types, values = get_type_hints(kind), dict[str, Any]()
    known = {f.name for f in fields(kind)}
    for each, value in cast("Mapping[str, Any]", table).items():
        full = f"{name}.{each}" if name else each
        if each not in known:
            what = f"unknown key {full}" if name else f"unknown section [{full}]"
            close = difflib.get_close_matches(each, sorted(known), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise ConfigError(f"{what}{meant} Known: {', '.join(sorted(known))}. CHANGELOG.md tells where others went.")
        is_section = isinstance(types[each], type) and issubclass(types[each], Section)
        values[each] = (_parse_section if is_section else _parse_value)(types[each], value, full)
    return kind(**values)


def _parse_value(kind: Any, value: Any, name: str) -> Any:
    """Return `value` converted to the type of a key, or refuse it."""
    expected = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    inner = get_args(kind)
    if Ellipsis in inner:  # a tuple; `log.trace=` on the command line means none
        values: list[Any] = [] if value == "" else list(value) if isinstance(value, (list, tuple)) else [value]
        return tuple(_parse_value(inner[0], each, name) for each in values)
    if inner:  # bool | None
        return None if value == "" else _parse_value(bool, value, name)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} = {json.dumps(value, default=str)}: expected {expected[kind]}.")
    return value


def _toml_lines(section: Any) -> Iterator[str]:
    """Yield the lines of a section in TOML, each key with its description, and then those of the section in it."""
    yield f"[{section.NAME}]"
    for f in fields(section):
        value = getattr(section, f.name)
        if not isinstance(value, Section):
            text = f"{f.name} = {written('' if value is None else value)}"
            yield f"{text:<32} # {f.metadata['about']}"
    yield ""
    for value in vars(section).values():
        if isinstance(value, Section):
            yield from _toml_lines(value)


def _apply_override(table: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    *sections, name = path.strip().split(".")
    if not (equals and sections and name and all(sections)):
        raise ConfigError(f"{text!r} is not an override; expected section.key=value, such as train.steps=20.")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    keys: Any = table
    for section in sections:
        keys = keys.setdefault(section, {})
        if not isinstance(keys, dict):
            raise ConfigError(f"{section} = {keys!r}: expected a section [{section}] with keys of its own.")
    keys[name] = parsed


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror or error}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {path}: it is not text in UTF-8 ({error}). Save it as such.") from None
