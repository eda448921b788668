"""How one kind of transfer travels: over which route, and in which codec."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args

from towpath.core.formats import Codec
from towpath.core.routes import ALL_TO_ALL, ROUTES, WITH_OWNERS, Grid, Op, Route, travelled
from towpath.core.units import BucketSpec
from towpath.errors import StrategyError

# --- low rank ---------------------------------------------------------------------------------------------------------
#
# Matrices that travel as products of two thin ones (PowerSGD, Optimus-CC), in elements.
#
# Of a matrix X of `rows` × `columns` there are P (rows × rank, orthonormal) and Q (columns × rank), so that P Qᵀ is
# near X. One starts from the last Q, and adds what P Qᵀ has missed to what is sent next: so the codec has to know the
# matrix's shape, and keeps state. From one rank to another P and Q travel in one message. A sum over ranks takes two:
# P, which all must have before they can make their parts of Q, and Q.


LOW_RANK = "low-rank"


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank`: how many columns P and Q have. What they do not make `rate` times smaller travels as it is."""

    rank: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise StrategyError(f"LowRank: rank is a whole number of at least 1; got {self.rank!r}.")
        if not 1 <= self.rate < float("inf"):
            raise StrategyError(f"LowRank: rate is a number of at least 1; got {self.rate!r}.")

    @staticmethod
    def parse(text: str) -> LowRank:
        match = re.fullmatch(rf"{LOW_RANK}:(\d+)(?:\+rate:(\d+(?:\.\d+)?))?", text)
        if match is None:
            raise StrategyError(
                f"not a codec: {text!r}. Write '{LOW_RANK}:' and the rank, as in '{LOW_RANK}:16', and if need be by "
                f"how many times the factors must be smaller to be worth while: '{LOW_RANK}:16+rate:2'."
            )
        return LowRank(int(match[1]), float(match[2] or 1))

    def __str__(self) -> str:
        return f"{LOW_RANK}:{self.rank}" + (f"+rate:{self.rate:g}" if self.rate != 1 else "")

    def pays(self, shape: Sequence[int]) -> bool:
        """Whether P and Q are smaller than what they stand for; else that travels as it is."""
        rows, columns = matrix_of(shape)
        return self.rank * (rows + columns) * self.rate < rows * columns

    def encoded_elements(self, shape: Sequence[int]) -> int:
        """Of one message."""
        return self.rank * sum(matrix_of(shape)) if self.pays(shape) else prod(shape)

    def kept_elements(self, shape: Sequence[int], feedback: bool) -> int:
        """What the sender keeps: Q, and with `feedback` what was missed."""
        if not self.pays(shape):
            return 0
        return self.rank * matrix_of(shape)[1] + (prod(shape) if feedback else 0)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """As which matrix a tensor is seen: all dimensions but the last are rows."""
    *rows, columns = shape or (1,)
    return prod(rows), columns


@dataclass(frozen=True, slots=True)
class Matrix:
    """`rows` × `columns` elements of a flat buffer, from `start` on."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Factored:
    """How the sum of a flat buffer over ranks travels: of `matrices` their factors, of the rest, which lies from start
    to end of each of `plain`, what is there. The first message has P and the rest, the second Q."""

    codec: LowRank
    matrices: tuple[Matrix, ...]
    plain: tuple[tuple[int, int], ...]

    @staticmethod
    def of(codec: LowRank, bucket: BucketSpec) -> Factored | None:
        """Nothing, where none of its parameters gets smaller."""
        matrices: list[Matrix] = []
        plain: list[tuple[int, int]] = []
        for start, numel, shape in zip(bucket.offsets, bucket.numels, bucket.matrices, strict=False):
            if shape is not None and codec.pays(shape):
                matrices.append(Matrix(start, *shape))
            else:
                plain.append((start, start + numel))
        return Factored(codec, tuple(matrices), tuple(plain)) if matrices else None

    @property
    def messages(self) -> tuple[int, int]:
        """Elements of each."""
        rank = self.codec.rank
        first = rank * sum(m.rows for m in self.matrices) + sum(end - start for start, end in self.plain)
        return first, rank * sum(m.columns for m in self.matrices)

    @property
    def elements(self) -> int:
        """Of the matrices."""
        return sum(m.rows * m.columns for m in self.matrices)

    def kept_elements(self, feedback: bool) -> int:
        """What each rank keeps: Q, and with `feedback` what its messages have missed."""
        return self.messages[1] + (self.elements if feedback else 0)


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
