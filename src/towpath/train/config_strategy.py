"""[strategy] and [parallel]: how the ranks of a job share the model."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from towpath.core import presets
from towpath.core.formats import Codec
from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, Compression, compression
from towpath.core.strategy import OFFLOADS, Offload, Strategy
from towpath.errors import ConfigError, StrategyError
from towpath.topology.cluster import Extent, Topology
from towpath.train.config_checks import not_negative, one_of, option, positive, refuse
from towpath.train.config_text import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """A preset and its options, as `towpath.strategy()` takes them, a file that `Strategy.to_toml()` wrote, or auto:
    what the planner ranks first, with the micro-batch and the checkpointing that go with it."""

    NAME: ClassVar = "strategy"

    name: str = option("zero3", "a preset (README), the path of a strategy's TOML file, or auto")
    nodes: int = option(0, "nodes; 0: as the launcher placed the ranks")
    ranks_per_node: int = option(0, "ranks on each; 0: as the launcher placed them")
    route: str = option("", "one for all transfers: flat, ring, hierarchical, ho-ring, two-hop")
    weights: str = option("", "codec of weights between nodes: int8; none; empty: the preset's")
    gradients: str = option("", "codec of gradients between nodes: int4:64, low-rank:4")
    feedback: str = option("", "hops that keep what gradients lose: first, second, both")
    gradients_after: int = option(0, "steps before the gradients' codec serves; 0: none")
    gradients_until: int = option(0, "steps for which the gradients' codec serves; 0: all")
    offload: str = option("", "optimizer: its states, masters and gradients in the host's memory")
    group: tuple[int, ...] = option((), "mics: [local, nodes] of its partition group")
    params: tuple[int, ...] = option((), "lins: [local, nodes] over which parameters are spread")
    grads: tuple[int, ...] = option((), "lins: the same of gradients")
    optimizer: tuple[int, ...] = option((), "lins: the same of optimizer states")
    backward_params: tuple[int, ...] = option((), "lins: the same of a copy for the backward pass")
    frozen: tuple[int, ...] = option((), "[local, nodes] of what does not train; empty: by memory")
    frozen_codec: str = option("", "what does not train rests in: int8, int4:64")
    allow: tuple[str, ...] = option((), "auto: codecs that it may use between nodes; none: lossless")
    memory: float = option(0.0, "auto: GiB that a rank may hold; 0: nine tenths of its device's")
    profile: str = option("", "auto: what `towpath probe` wrote; empty: probes once and keeps it")
    pipelines: tuple[int, ...] = option((), "auto: parallel.pipeline may be one of these; none: as it is")
    tensors: tuple[int, ...] = option((), "auto: the same of parallel.tensor")
    schedules: tuple[str, ...] = option((), "auto: the same of parallel.schedule")
    compressions: tuple[str, ...] = option((), "auto: the same of parallel.compression")

    def __post_init__(self) -> None:
        if (self.nodes > 0) != (self.ranks_per_node > 0):
            refuse(self, "nodes", self.nodes, f"nodes and ranks_per_node ({self.ranks_per_node}) together, or neither")
        one_of(self, "offload", "", *OFFLOADS)
        for key in _EXTENTS:
            if len(getattr(self, key)) not in (0, 2):
                refuse(self, key, list(getattr(self, key)), "[local, nodes]")
        self._check_auto()
        if self.file is None and not self.auto and self.name not in presets.strategies():
            refuse(
                self, "name", self.name, f"a preset ({presets.closest(self.name)}?), the path of a .toml file, or auto"
            )

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
        self._check_layouts()

    def _check_layouts(self) -> None:
        for key, known in (("schedules", SCHEDULES), ("compressions", COMPRESSIONS)):
            for name in getattr(self, key):
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                    refuse(self, key, name, f"of {', '.join(known)} ({close}?)")
        for key in ("pipelines", "tensors"):
            if any(size < 1 for size in getattr(self, key)):
                refuse(self, key, list(getattr(self, key)), "numbers of ranks, from 1")
        if self.layouts and self.offload:
            refuse(self, "offload", self.offload, "nothing beside strategy.pipelines or strategy.tensors")
        if (self.schedules or self.compressions) and not any(size > 1 for size in self.pipelines):
            refuse(self, "pipelines", list(self.pipelines), "some above 1, beside schedules and compressions of them")

    @property
    def layouts(self) -> bool:
        """Whether auto may cut the model into stages, or share its layers."""
        return max((*self.pipelines, *self.tensors), default=1) > 1

    @property
    def auto(self) -> bool:
        return self.name == "auto"

    @property
    def offloaded(self) -> Offload | None:
        return cast("Offload | None", self.offload or None)

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
        offload = self.offloaded
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
_LAYOUTS = ("pipelines", "tensors", "schedules", "compressions")
_AUTO = ("allow", "memory", "profile", *_LAYOUTS)
_EXTENTS = ("group", "params", "grads", "optimizer", "backward_params", "frozen")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The model in stages, each on neighbouring ranks, so that where these fill a node only what goes between stages
    crosses; and layers in parts, shared by neighbours. [strategy] then is of the ranks that hold the same of it."""

    NAME: ClassVar = "parallel"

    pipeline: int = option(1, "ranks that a micro-batch passes through; 1: no stages")
    tensor: int = option(1, "ranks of one node that share each layer of a block; 1: none")
    schedule: str = option("1F1B", "or GPipe, Interleaved1F1B, … (docs/pipelines.md)")
    compression: str = option("none", "or optimus-cb, optimus-cb+fe, optimus-cb+fe+sc")
    activation_gradients: str = option("", "codec of what stages send back, such as low-rank:16")
    activations: str = option("", "codec of what stages hand on, such as int8")
    gradients: str = option("", "codec of the first stages' gradients: low-rank:128")

    def __post_init__(self) -> None:
        positive(self, "pipeline", "tensor")
        one_of(self, "schedule", *SCHEDULES)
        one_of(self, "compression", *COMPRESSIONS)
        for f in fields(self):
            if self.pipeline == 1 and f.name != "tensor" and getattr(self, f.name) != f.default:
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
