"""A strategy: a topology, a placement on it, and a wire for each kind of transfer. A value, nothing else."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from towpath.core.formats import Codec
from towpath.core.placement import LABELS, Placement
from towpath.core.toml import written
from towpath.core.transitions import Transitions, transitions
from towpath.core.wire import Wire
from towpath.errors import StrategyError
from towpath.topology.cluster import Extent, Topology


class Kind(StrEnum):
    """The kinds of transfer in a step."""

    GATHER = "gather"
    BACKWARD_GATHER = "backward_gather"
    REDUCE = "reduce"
    SYNC = "sync"
    PUBLISH = "publish"
    USAGE = "usage"
    MATRIX_GRADIENTS = "matrix_gradients"
    MATRIX_WEIGHTS = "matrix_weights"
    MATRIX_UPDATES = "matrix_updates"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"


# Those that a strategy chooses a wire for: fields of Strategy, and of Transitions.
WIRED = (Kind.GATHER, Kind.BACKWARD_GATHER, Kind.REDUCE, Kind.SYNC, Kind.PUBLISH)
WEIGHTS = (Kind.GATHER, Kind.BACKWARD_GATHER, Kind.PUBLISH)
GRADIENTS = (Kind.REDUCE, Kind.SYNC)


@dataclass(frozen=True, slots=True)
class Strategy:
    """What lies where, and how it travels. Made by `towpath.strategy(name, topology)` or by hand."""

    topology: Topology
    placement: Placement
    name: str = "custom"
    gather: Wire = Wire()
    backward_gather: Wire = Wire()
    reduce: Wire = Wire()
    sync: Wire = Wire()
    publish: Wire = Wire()

    def __post_init__(self) -> None:
        self.placement.check(self.topology)
        for kind in WIRED:
            wire = self.wire(kind)
            if not isinstance(wire, Wire):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StrategyError(
                    f"{self.name}: {kind.value} is a Wire, such as Wire('two-hop', 'int8'); got {wire!r}."
                )
            if kind in (Kind.GATHER, Kind.BACKWARD_GATHER) and wire.encoding is not None and wire.encoding.stochastic:
                raise StrategyError(
                    f"{self.name}: {kind.value} in {wire.codec} would round anew at each gather, and the backward pass "
                    "compute with other weights than the forward pass. Take a codec without +stochastic for weights."
                )
            if kind is Kind.SYNC and wire.low_rank is not None and self.placement.grads.size == 1:
                continue  # whole matrices are there
            for move in getattr(self.moves, kind.value):
                wire.check(move.op, f"{self.name}: {kind.value}")

    @property
    def moves(self) -> Transitions:
        return transitions(self.placement, self.topology)

    def wire(self, kind: Kind) -> Wire:
        return getattr(self, kind.value) if kind in WIRED else Wire()

    def codecs(self, trainable: bool) -> list[Codec]:
        """Those that encode parameters, or gradients if they are `trainable`, or have done so: parameters lie where
        their blocks begin."""
        kinds = [kind for kind in WIRED if getattr(self.moves, kind.value) and (trainable or kind in WEIGHTS)]
        return [codec for kind in kinds if isinstance(codec := self.wire(kind).codec, Codec)]

    def at(self, step: int) -> Strategy:
        """The strategy of optimizer step `step`, counted from 0: codecs may serve for the first steps only."""
        wires = {kind.value: self.wire(kind).at(step) for kind in WIRED}
        return replace(self, **wires)

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.topology.nodes} nodes of {self.topology.ranks_per_node} ranks"]
        lines += [f"  {LABELS[name]:<16} {extent!s:>7}" for name, extent in self.placement.extents()]
        for kind in WIRED:
            moves = getattr(self.moves, kind.value)
            what = ", then ".join(f"{m.op.value} over {m.members} ranks" for m in moves) or "nothing moves"
            route = f" ({self.wire(kind)})" if moves else ""
            lines.append(f"  {kind.value:<16} {what}{route}")
        return "\n".join(lines)

    def to_toml(self) -> str:
        try:
            lines = [f"name = {written(self.name)}"]
        except ValueError as error:
            raise StrategyError(f"the name {self.name!r} cannot be written: {error}. Expected Unicode text.") from None
        lines += ["[topology]", f"nodes = {self.topology.nodes}", f"ranks_per_node = {self.topology.ranks_per_node}"]
        lines += ["[placement]"]
        lines += [f"{name} = [{extent.local}, {extent.nodes}]" for name, extent in self.placement.extents()]
        for kind in WIRED:
            wire = self.wire(kind)
            values = {f.name: getattr(wire, f.name) for f in fields(Wire)}
            lines.append(f"[{kind.value}]")
            lines += [f"{name} = {written(v if isinstance(v, int) else str(v))}" for name, v in values.items()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str) -> Strategy:
        try:
            table = tomllib.loads(text)
            wires = {kind.value: Wire(**table.pop(kind.value)) for kind in WIRED if kind.value in table}
            placement = Placement(**{k: Extent(*v) for k, v in table.pop("placement").items()})
            return Strategy(Topology(**table.pop("topology")), placement, **wires, **_checked(table))
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise StrategyError(f"not a strategy: {error}. Expected what Strategy.to_toml() writes.") from error


def _checked(rest: dict[str, Any]) -> dict[str, Any]:
    if unknown := set(rest) - {"name"}:
        raise StrategyError(f"not a strategy: unknown key {', '.join(sorted(unknown))}.")
    return rest
