"""How one kind of transfer travels: over which route, and in which codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from towpath.core.formats import Codec
from towpath.core.low_rank import LOW_RANK
from towpath.core.low_rank import LowRank
from towpath.core.routes import ALL_TO_ALL, ROUTES, WITH_OWNERS, Grid, Op, Route, travelled
from towpath.errors import StrategyError

Feedback = Literal["none", "first", "second", "both"]
FEEDBACK: tuple[Feedback, ...] = get_args(Feedback)


@dataclass(frozen=True, slots=True)
class Wire:
    """`route`: 'flat' is the backend's own collective, the others are ours (`core/routes.py` lists them).

    `codec`: a `Codec` or its text ('int8', 'int4:64+hadamard'), or 'none': as it is. A reduction is encoded by one-hop
    or two-hop alone: a ring would round at every member. What one rank sends to another, and the sum of gradients that
    are whole on every rank, may also be a `LowRank` ('low-rank:16'). `feedback`: at which hop of a reduction, or
    ('first') by the sender, what was rounded away is kept, to be added the next time. The codec serves from optimizer
    step `after` on, counted from 0, `until` step `until` (0: for ever); before and then all travels as it is. `served`:
    it does not serve now; parameters stay where its blocks put them.
    """

    route: Route = "flat"
    codec: Any = "none"
    feedback: Feedback = "none"
    until: int = 0
    after: int = 0
    served: bool = False

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise StrategyError(f"Wire: unknown route {self.route!r}; known are {', '.join(ROUTES)}.")
        if isinstance(self.codec, str) and self.codec != "none":
            codec = LowRank if self.codec.startswith(LOW_RANK) else Codec
            object.__setattr__(self, "codec", codec.parse(self.codec))
        elif not isinstance(self.codec, (str, Codec, LowRank)):
            raise StrategyError(f"Wire: codec is a Codec, its text, or 'none'; got {self.codec!r}.")
        if self.feedback not in FEEDBACK:
            raise StrategyError(f"Wire: feedback is one of {', '.join(FEEDBACK)}; got {self.feedback!r}.")
        if isinstance(self.codec, LowRank) and self.feedback not in ("none", "first"):
            raise StrategyError(
                f"Wire: in {self.codec} each rank rounds what it sends itself: feedback is 'none' or 'first'; got "
                f"{self.feedback!r}."
            )
        if self.feedback != "none" and self.codec == "none":
            raise StrategyError(f"Wire: feedback={self.feedback!r} without a codec: nothing is rounded away.")
        if self.served and (self.codec == "none" or self.until or self.after or self.feedback != "none"):
            raise StrategyError("Wire: served is for a codec that is not in use: without feedback=, until= and after=.")
        for name in ("until", "after"):
            steps = getattr(self, name)
            if type(steps) is not int or steps < 0:
                raise StrategyError(f"Wire: {name} is a number of optimizer steps, or 0; got {steps!r}.")
            if steps and self.codec == "none":
                raise StrategyError(f"Wire: {name}={steps} without a codec: there is nothing that serves.")
        if 0 < self.until <= self.after:
            raise StrategyError(f"Wire: after={self.after} and until={self.until}: the codec would never serve.")

    def at(self, step: int) -> Wire:
        """The wire of optimizer step `step`, counted from 0."""
        serves = self.after <= step and not 0 < self.until <= step
        return self if serves or self.codec == "none" else Wire(self.route, self.codec, served=True)

    @property
    def changes(self) -> set[int]:
        """The steps from which on it is another."""
        return {self.until, self.after} - {0}

    def within(self, alignment: int) -> Wire:
        """With a codec whose blocks do not span parameters which begin at multiples of `alignment` elements."""
        return self if self.encoding is None else replace(self, codec=self.encoding.within(alignment))

    @property
    def encoding(self) -> Codec | None:
        return self.codec if isinstance(self.codec, Codec) and not self.served else None

    @property
    def low_rank(self) -> LowRank | None:
        return self.codec if isinstance(self.codec, LowRank) and not self.served else None

    def route_on(self, op: Op, grid: Grid) -> str:
        """The route that is taken there."""
        if op in WITH_OWNERS:
            return "flat"
        if self.encoding is not None and op is not Op.ALL_GATHER and grid.plain:
            return "one-hop"
        return travelled(self.route, grid)

    def check(self, op: Op, what: str) -> None:
        """Refuse what cannot be: a reduction over a route that would decode and encode at every member."""
        if op is Op.SEND:
            self._check_send(what)
            return
        if op in WITH_OWNERS:
            self._check_owners(what)
            return
        if self.low_rank is not None:
            raise StrategyError(
                f"{what}: {self.codec} needs whole matrices: what one rank sends to another, or the sum of gradients "
                f"that are whole on every rank (ddp, zero1, paro-nng, paro-nni). Here a {op.value} moves ranges of a "
                "flat buffer. Take a codec of blocks, such as 'int8'."
            )
        if self.encoding is None:
            return
        if op is not Op.ALL_GATHER and self.route not in ALL_TO_ALL:
            raise StrategyError(
                f"{what}: {self.codec} on a {op.value} by {self.route} would round at every member. "
                f"Take one of the routes {', '.join(ALL_TO_ALL)}."
            )
        if op is Op.ALL_GATHER and self.feedback != "none":
            raise StrategyError(
                f"{what}: feedback belongs to reductions; a gather sends weights, which are not summed."
            )

    def _check_send(self, what: str) -> None:
        if self.route != "flat":
            raise StrategyError(f"{what}: a message from one rank to another has no route; got {self.route!r}.")
        if self.feedback not in ("none", "first"):
            raise StrategyError(
                f"{what}: the sender alone rounds: feedback is 'none' or 'first'; got {self.feedback!r}."
            )

    def _check_owners(self, what: str) -> None:
        if self.route != "flat":
            raise StrategyError(f"{what}: pieces go straight to the owner, by no route; got {self.route!r}.")
        if self.low_rank is not None or (self.encoding is not None and self.encoding.stochastic):
            raise StrategyError(f"{what}: got {self.codec}. Take a codec of blocks, such as 'int8:64', or none.")
        if self.feedback != "none" or self.until or self.after:
            raise StrategyError(f"{what}: feedback=, until= and after= have no meaning here; got {self}.")

    def __str__(self) -> str:
        codec = "" if self.encoding is None and self.low_rank is None else f", {self.codec}"
        kept = "" if self.feedback == "none" else f", feedback at {self.feedback}"
        since = f", after {self.after} steps" if self.after else ""
        return self.route + codec + kept + since + (f", until step {self.until}" if self.until else "")
