"""What of a pipeline travels compressed (Optimus-CC): between stages, of tied embeddings, and inside stages."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

from towpath.core.low_rank import LOW_RANK
from towpath.core.low_rank import LowRank
from towpath.core.pipeline import Message, Order, messages
from towpath.core.routes import Op
from towpath.core.strategy import GRADIENTS, Strategy
from towpath.core.wire import Wire
from towpath.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Compression:
    """Each of the first three is a codec's text, or a `Wire`; of 'low-rank:16' what a message misses is added to the
    next one, unless the `Wire` says otherwise.

    `activation_gradients`: what stages send back, where it is exposed (`core/pipeline.py`), or all of it
    (`every_gradient`). `activations`: what they hand on. `gradients`: how the data-parallel ranks of a stage bring
    theirs together, in the first stages of the pipeline, a `share_of_stages` of all; the others do it as their strategy
    says. `fused_embeddings`: the gradients of tied embeddings come together in one sum over the ranks of both ends;
    else first in each end, and then between the two.
    """

    activation_gradients: Any = "none"
    activations: Any = "none"
    gradients: Any = "none"
    every_gradient: bool = False
    share_of_stages: float = 0.75
    fused_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("activation_gradients", "activations", "gradients"):
            wire = getattr(self, name)
            if not isinstance(wire, Wire):
                wire = Wire(codec=wire, feedback="first" if str(wire).startswith(LOW_RANK) else "none")
                object.__setattr__(self, name, wire)
            if name != "gradients":
                wire.check(Op.SEND, f"Compression: {name}")
            elif wire.codec != "none" and not isinstance(wire.codec, LowRank):
                raise StrategyError(
                    f"Compression: gradients takes low rank, such as 'low-rank:4'; got {wire.codec}. Codecs of blocks "
                    "belong to the strategy."
                )
        if not 0 < self.share_of_stages <= 1:
            raise StrategyError(f"Compression: share_of_stages is above 0 and at most 1; got {self.share_of_stages!r}.")

    @property
    def _wires(self) -> dict[str, Wire]:
        return {name: getattr(self, name) for name in ("activation_gradients", "activations", "gradients")}

    @property
    def changes(self) -> set[int]:
        """The optimizer steps at which a codec begins or ceases to serve."""
        return {step for wire in self._wires.values() for step in wire.changes}

    def at(self, step: int) -> Compression:
        """Return the compression of optimizer step `step`, counted from 0."""
        return replace(self, **{name: wire.at(step) for name, wire in self._wires.items()}) if self.changes else self

    def encodes(self, message: Message) -> bool:
        """Whether it takes a wire of these; else it travels as it is."""
        return not message.backward or message.exposed or self.every_gradient

    def of(self, message: Message) -> Wire:
        wire: Wire = self.activation_gradients if message.backward else self.activations
        return wire if self.encodes(message) else Wire()

    def strategy_of(self, strategy: Strategy, stage: int, stages: int) -> Strategy:
        """That of a stage, of so many."""
        if self.gradients.codec == "none" or stage >= ceil(self.share_of_stages * stages):
            return strategy
        moving = [kind for kind in GRADIENTS if getattr(strategy.moves, kind.value)]
        return replace(strategy, **{k.value: replace(self.gradients, route=strategy.wire(k).route) for k in moving})


def encoded_gradients(order: Order, compression: Compression) -> frozenset[tuple[int, int]]:
    """Those that stages send back and that take its wire, by the stage that sends them and the micro-batch."""
    return frozenset((m.source, m.micro_batch) for m in messages(order) if m.backward and compression.encodes(m))


# The three parts of Optimus-CC, with the ranks of its section 9: compressed backpropagation, fused embedding
# synchronisation, selective stage compression.
_BACKPROPAGATION = Compression("low-rank:16", fused_embeddings=False)
_FUSED = replace(_BACKPROPAGATION, fused_embeddings=True)
COMPRESSIONS = {
    "none": Compression(),
    "optimus-cb": _BACKPROPAGATION,
    "optimus-cb+fe": _FUSED,
    "optimus-cb+fe+sc": replace(_FUSED, gradients="low-rank:128"),
}


def compression(name: str, **options: Any) -> Compression:
    """The preset `name`: 'none', 'optimus-cb', 'optimus-cb+fe' or 'optimus-cb+fe+sc'. Options: the fields of a
    `Compression`, in the place of the preset's."""
    if name not in COMPRESSIONS:
        close = difflib.get_close_matches(str(name), COMPRESSIONS, n=1, cutoff=0.0)[0]
        known = ", ".join(COMPRESSIONS)
        raise StrategyError(f"unknown compression {name!r}; did you mean {close!r}? Known: {known}.")
    known = [field.name for field in fields(Compression)]
    if unknown := set(options) - set(known):
        raise StrategyError(
            f"compression {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}."
        )
    return replace(COMPRESSIONS[name], **options)
