"""The sections [strategy] and [strategy.outer] of a configuration of `towpath train`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from towpath.core import presets
from towpath.core.formats import Codec
from towpath.core.outer import Outer, outer_transport
from towpath.core.pipeline import COMPRESSIONS, SCHEDULES
from towpath.core.strategy import OFFLOADS, Offload, Strategy
from towpath.errors import ConfigError
from towpath.planner.request import OUTER
from towpath.topology.cluster import Extent, Topology
from towpath.train.options import FROM_0, check_limits, one_of, option, reason, refuse

_EXTENTS = ("group", "frozen")
_PRESET_OPTIONS = ("route", "weights", "gradients", "feedback", "gradients_after", "gradients_until", "frozen_codec")
_AUTO_OPTIONS = ("allow", "memory", "profile", "exact_from", "pipelines", "tensors", "schedules", "compressions")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Outer steps: islands of nodes train on their own, and synchronize only now and then.

    Without `every`, there are none.
    """

    NAME: ClassVar = "strategy.outer"

    every: int = option(0, "steps between exchanges of the same weights; 0: no outer steps", FROM_0)
    fragments: int = option(1, "parts of the model, exchanged at different steps")
    delay: int = option(0, "steps that an exchange may take while training goes on")
    lr: float = option(0.7, "of the outer optimizer")
    momentum: float = option(0.9, "of the outer optimizer (Nesterov)")
    blend: float = option(0.0, "the share of an island's weights that stays at an exchange")
    codec: str = option("", "of exchanges: int8, int4; empty: float32")
    islands: int = option(0, "groups of whole nodes; 0: each node is an island", FROM_0)

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.every:
            changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            for key in changed:
                refuse(self, key, getattr(self, key), "strategy.outer.every above 0 with it")
        self.build()

    def build(self) -> Outer | None:
        """Return the outer steps, or None if there are none."""
        if not self.every:
            return None
        try:
            settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("codec", "islands")}
            return Outer(**settings, transport=outer_transport(self.codec), islands=self.islands or None)
        except ConfigError as error:
            raise ConfigError(f"[strategy.outer]: {error}") from None


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
    group: tuple[int, ...] = option((), "mics, hpz, zero++: [ranks, nodes] of a partition group")
    frozen: tuple[int, ...] = option((), "[ranks, nodes] that share frozen parameters; empty: by memory")
    frozen_codec: str = option("", "codec in which frozen parameters are stored: int8, int4:64")
    allow: tuple[str, ...] = option((), "auto: codecs and outer, which it may use between nodes")
    memory: float = option(0.0, "auto: GiB that a rank may use; 0: 90 % of its device's", FROM_0)
    profile: str = option("", "auto: a file by `towpath probe`; empty: measure once, and keep it")
    exact_from: str = option("", "auto: a run whose exact messages to expect; empty: on paper")
    pipelines: tuple[int, ...] = option((), "auto: values to try for parallel.pipeline")
    tensors: tuple[int, ...] = option((), "auto: values to try for parallel.tensor")
    schedules: tuple[str, ...] = option((), "auto: values to try for parallel.schedule")
    compressions: tuple[str, ...] = option((), "auto: values to try for parallel.compression")
    outer: OuterConfig = field(default_factory=OuterConfig)

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
        if self.auto and self.outer.every:
            refuse(self, "outer.every", self.outer.every, "0: auto chooses it, if strategy.allow has 'outer'")
        for codec in (name for name in self.allow if name != OUTER):
            try:
                Codec.parse(codec)
            except ConfigError as error:
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
        options |= {"gradients_until": steps // 2} if self.interleaved else {}
        options |= {"exact": True} if self.exact else {}
        options |= {} if (outer := self.outer.build()) is None else {"outer": outer}
        offload = self.offload_option
        if self.file is None:
            return presets.strategy(self.name, topology, offload=offload, **options)
        if options:
            given = ", ".join("[strategy.outer]" if name == "outer" else name for name in options)
            raise ConfigError(f"strategy.name is the file {self.file}, which says all: remove {given}.")
        try:
            strategy = Strategy.from_toml(self.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"strategy.name: cannot read {self.file}: {reason(error)}") from None
        return strategy if offload is None else replace(strategy, offload=offload)
