"""Transports: the route and the codec of one kind of transfer.

A codec of blocks (`Codec`) rounds each element to a few bits. The low-rank codec (`LowRank`) sends the factors of a
matrix instead of the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, get_args

from towpath.core.formats import DIFFERENCES, EXACT, VALUES, Codec, Coding, item_bytes
from towpath.core.routes import ALL_TO_ALL, ROUTES, WITH_OWNERS, Form, Grid, Op, Route, effective_route, parts_of
from towpath.core.units import BucketSpec
from towpath.errors import ConfigError, ShardError

# The factors of a matrix X of `rows` × `columns` are P (rows × rank, orthonormal) and Q (columns × rank). P Qᵀ
# approximates X. Each step starts from the Q of the step before. With error feedback, the difference X - P Qᵀ is added
# to the next step's X. The codec therefore needs the matrix's shape, and keeps state.
#
# Between two ranks, P and Q are sent in one message. A sum over ranks takes two messages: P, which every rank needs
# before it can compute its part of Q, and then Q.


LOW_RANK = "low-rank"

# An exact transport sends smaller regions as they are: the time of their messages is mostly latency.
SMALLEST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank codec, which sends two thin factors of each matrix."""

    rank: int  # how many columns P and Q have
    # How many times smaller than the matrix the factors must be. Other tensors are sent unencoded.
    rate: float = 1.0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"LowRank: rank is a whole number of at least 1; got {self.rank!r}.")
        if not 1 <= self.rate < float("inf"):
            raise ConfigError(f"LowRank: rate is a number of at least 1; got {self.rate!r}.")

    @staticmethod
    def parse(text: str) -> LowRank:
        """Return the codec that text such as 'low-rank:16+rate:2' names. Raise ConfigError for other text."""
        match = re.fullmatch(rf"{LOW_RANK}:(\d+)(?:\+rate:(\d+(?:\.\d+)?))?", text)
        if match is None:
            raise ConfigError(
                f"not a codec: {text!r}. Write '{LOW_RANK}:' and the rank, as in '{LOW_RANK}:16', and if need be by "
                f"how many times the factors must be smaller to be worth while: '{LOW_RANK}:16+rate:2'."
            )
        return LowRank(int(match[1]), float(match[2] or 1))

    def __str__(self) -> str:
        return f"{LOW_RANK}:{self.rank}" + (f"+rate:{self.rate:g}" if self.rate != 1 else "")

    def pays(self, shape: Sequence[int]) -> bool:
        """Return whether the factors are small enough to be sent in place of a tensor of `shape`."""
        rows, columns = matrix_of(shape)
        return self.rank * (rows + columns) * self.rate < rows * columns

    def check(self, what: str, matrices: Iterable[tuple[int, int] | None]) -> None:
        """Raise ShardError if it would make none of the matrices smaller, which are a model's gradients."""
        found = [matrix for matrix in matrices if matrix is not None]
        if not any(map(self.pays, found)):
            rows, columns = max(found, key=prod, default=(0, 0))
            raise ShardError(
                f"{what}: {self} makes no gradient of this model smaller: its largest matrix has {rows} × {columns} "
                "elements. Take a smaller rank, or no codec."
            )

    def encoded_elements(self, shape: Sequence[int]) -> int:
        return self.rank * sum(matrix_of(shape)) if self.pays(shape) else prod(shape)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix. All dimensions but the last form the rows."""
    *rows, columns = shape or (1,)
    return prod(rows), columns


@dataclass(frozen=True, slots=True)
class FactoredMatrix:
    """A matrix of `rows` × `columns` elements that starts at element `start` of a flat buffer."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Factored:
    """The layout of a flat buffer whose sum over ranks is sent in low rank.

    The first message contains P of each matrix, and the elements that are not factored. The second message contains Q.
    """

    codec: LowRank
    matrices: tuple[FactoredMatrix, ...]  # the matrices that are sent as factors
    plain: tuple[tuple[int, int], ...]  # start and end of each range that is sent unencoded

    @staticmethod
    def of(codec: LowRank, bucket: BucketSpec) -> Factored | None:
        """Return the layout of `bucket`, or None if no parameter of it gets smaller."""
        matrices: list[FactoredMatrix] = []
        plain: list[tuple[int, int]] = []
        for start, numel, shape in zip(bucket.offsets, bucket.numels, bucket.matrices, strict=False):
            if shape is not None and codec.pays(shape):
                matrices.append(FactoredMatrix(start, *shape))
            else:
                plain.append((start, start + numel))
        return Factored(codec, tuple(matrices), tuple(plain)) if matrices else None

    @property
    def messages(self) -> tuple[int, int]:
        """Number of elements of the first and of the second message."""
        rank = self.codec.rank
        first = rank * sum(m.rows for m in self.matrices) + sum(end - start for start, end in self.plain)
        return first, rank * sum(m.columns for m in self.matrices)

    @property
    def elements(self) -> int:
        return sum(m.rows * m.columns for m in self.matrices)

    def kept_elements(self, feedback: bool) -> int:
        """Return how many elements each rank keeps between steps: Q, and the error feedback if there is any."""
        return self.messages[1] + (self.elements if feedback else 0)


Feedback = Literal["none", "first", "second", "both", "all"]
FEEDBACK: tuple[Feedback, ...] = get_args(Feedback)


@dataclass(frozen=True, slots=True)
class Transport:
    """The route and the codec of one kind of transfer.

    One-hop and two-hop are the only routes whose reductions can be encoded by blocks. On a ring, every member would
    round.

    Attributes:
        route: 'flat' is the backend's own collective. The other routes are Towpath's (`core/routes.py` lists them).
        codec: A `Codec` or its text ('int8', 'int4:64+hadamard'), or 'none'. Messages between two ranks may also use a
            `LowRank` ('low-rank:16'). So may the sum of gradients that are unsharded on every rank.
        feedback: The hops of a reduction at which rounding errors are kept and added in the next step. 'all' adds the
            all-gather in which an all-reduce sends its sums. For messages and low rank it is 'first', and the sender
            keeps them.
        until: The codec is used until this optimizer step, counted from 0. With 0 it is used permanently.
        after: The codec is used from this optimizer step on. Before `after` and from `until` on, nothing is encoded.
        plain_route: The route of these steps. None means `route`. Reductions can be encoded on few routes, and another
            one may be faster without a codec.
        nccl_route: The route over NCCL of what is not encoded. None means the same as elsewhere.
        served: True if the codec is not in use in this step. Parameters stay aligned to its blocks.
        exact: Send what no codec encodes in fewer bytes, without losing a bit (`codecs/exact`). Only for
            gradients and the parameter sync.
    """

    route: Route = "flat"
    codec: Any = "none"
    feedback: Feedback = "none"
    until: int = 0
    after: int = 0
    plain_route: Route | None = None
    nccl_route: Route | None = None
    served: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        for route in self._routes:
            if route not in ROUTES:
                raise ConfigError(f"Transport: unknown route {route!r}; known are {', '.join(ROUTES)}.")
        if isinstance(self.codec, str) and self.codec != "none":
            codec = LowRank if self.codec.startswith(LOW_RANK) else Codec
            object.__setattr__(self, "codec", codec.parse(self.codec))
        elif not isinstance(self.codec, (str, Codec, LowRank)):
            raise ConfigError(f"Transport: codec is a Codec, its text, or 'none'; got {self.codec!r}.")
        if self.feedback not in FEEDBACK:
            raise ConfigError(f"Transport: feedback is one of {', '.join(FEEDBACK)}; got {self.feedback!r}.")
        if isinstance(self.codec, LowRank) and self.feedback not in ("none", "first"):
            raise ConfigError(
                f"Transport: in {self.codec} each rank rounds what it sends itself: feedback is 'none' or 'first'; got "
                f"{self.feedback!r}."
            )
        if self.feedback != "none" and self.codec == "none":
            raise ConfigError(f"Transport: feedback={self.feedback!r} without a codec: nothing is rounded away.")
        if self.served and (self.codec == "none" or self.until or self.after or self.feedback != "none"):
            raise ConfigError(
                "Transport: served is for a codec that is not in use: without feedback=, until= and after=."
            )
        for name in ("until", "after"):
            steps = getattr(self, name)
            if type(steps) is not int or steps < 0:
                raise ConfigError(f"Transport: {name} is a number of optimizer steps, or 0; got {steps!r}.")
            if steps and self.codec == "none":
                raise ConfigError(f"Transport: {name}={steps} without a codec: there is nothing to switch on or off.")
        if 0 < self.until <= self.after:
            raise ConfigError(f"Transport: after={self.after} and until={self.until}: the codec would never be used.")
        if self.plain_route is not None and not self.changes:
            raise ConfigError(
                f"Transport: plain_route={self.plain_route!r} is for steps without the codec, and there are none: pass "
                "until= or after=, or leave it out."
            )

    def at(self, step: int) -> Transport:
        """Return the transport of optimizer step `step`, counted from 0."""
        serves = self.after <= step and not 0 < self.until <= step
        if serves or self.codec == "none":
            return self
        route = self.plain_route or self.route
        return Transport(route, self.codec, nccl_route=self.nccl_route, served=True, exact=self.exact)

    def in_form(self, form: Form) -> Transport:
        """Return the transport with the route that it takes in `form`, and none for another form."""
        if self.nccl_route is None:
            return self
        in_calls = form is Form.COLLECTIVES and self.encoding is None
        return replace(self, route=self.nccl_route if in_calls else self.route, nccl_route=None)

    @property
    def _routes(self) -> list[Route]:
        return [route for route in (self.route, self.plain_route, self.nccl_route) if route is not None]

    @property
    def changes(self) -> set[int]:
        """The optimizer steps at which the transport changes."""
        return {self.until, self.after} - {0}

    def within(self, alignment: int) -> Transport:
        """Return the transport with blocks no longer than `alignment`, so that no block spans two parameters."""
        return self if self.encoding is None else replace(self, codec=self.encoding.within(alignment))

    @property
    def encoding(self) -> Codec | None:
        """The codec of blocks that is in use, or None."""
        return self.codec if isinstance(self.codec, Codec) and not self.served else None

    @property
    def low_rank(self) -> LowRank | None:
        """The low-rank codec that is in use, or None."""
        return self.codec if isinstance(self.codec, LowRank) and not self.served else None

    def coding(self, op: Op, grid: Grid, elements: int, dtype: str, form: Form) -> Coding | None:
        """Return how a collective on a region of `elements` encodes what crosses nodes without loss, or None."""
        is_large = elements * item_bytes(dtype) >= SMALLEST_BYTES
        if not self.exact or self.encoding or self.low_rank or grid.nodes == 1 or dtype not in EXACT or not is_large:
            return None
        # Collectives of the backend add values, so they can only gather encoded ones.
        if form is Form.COLLECTIVES and (op is not Op.ALL_GATHER or elements % (grid.nodes * grid.width)):
            return None
        # The only all-gather that can be exact is a parameter sync.
        return Coding(DIFFERENCES if op is Op.ALL_GATHER else VALUES, dtype)

    def message_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Return the bytes of a message between two ranks with a tensor of `shape`, after encoding."""
        if self.encoding is not None:
            return self.encoding.encoded_bytes(prod(shape))
        return item_bytes(dtype) * (prod(shape) if self.low_rank is None else self.low_rank.encoded_elements(shape))

    def kept_for_message(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return how many elements a sender keeps for tensors of `shape`: of the factor Q, and of the error feedback.

        Between steps, a sender keeps them in a dtype of at least 32 bits.
        """
        if self.low_rank is not None and not self.low_rank.pays(shape):
            return 0, 0
        factor = 0 if self.low_rank is None else self.low_rank.rank * matrix_of(shape)[1]
        return factor, 0 if self.feedback == "none" else prod(shape)

    def route_on(
        self, op: Op, grid: Grid, form: Form = Form.MESSAGES, coded: bool = False, slice_bytes: int = 0
    ) -> str:
        """Return the route that is used for `op` on `grid`, if it is executed in `form`, with slices of these bytes.

        On a plain grid, an encoded reduction uses 'one-hop', because 'flat' cannot encode it. With a coding (`coded`),
        an all-reduce uses 'ring' in place of 'flat', because the backend's own cannot be encoded on its way. In
        collectives, 'ho-ring' in one part is 'hierarchical'. With a coding it is, too, because sizes are not known.
        """
        if op in WITH_OWNERS:
            return "flat"
        if self.encoding is not None and op is not Op.ALL_GATHER and grid.plain:
            return "one-hop"
        route = effective_route(self.route, grid, op, form)
        if form is Form.COLLECTIVES and route == "ho-ring":
            in_parts = not coded and parts_of(route, grid, slice_bytes, op, form) > 1
            route = route if in_parts else "hierarchical"
        return "ring" if coded and op is Op.ALL_REDUCE and route == "flat" else route

    def check(self, op: Op, what: str) -> None:
        """Check that the transport can execute `op`.

        Args:
            op: The operation of the transfer.
            what: The strategy and kind of transfer, for the error message.

        Raises:
            ConfigError: If it cannot, for example if every member of a ring would decode and encode again.
        """
        if self.exact and (op is Op.SEND or op in WITH_OWNERS):
            raise ConfigError(
                f"{what} cannot be exact. Reductions of gradients and parameter syncs can. Leave exact= out of it."
            )
        if op is Op.SEND:
            for route in self._routes:
                if route != "flat":
                    raise ConfigError(f"{what}: a message from one rank to another has no route; got {route!r}.")
            if self.feedback not in ("none", "first"):
                raise ConfigError(
                    f"{what}: the sender alone rounds: feedback is 'none' or 'first'; got {self.feedback!r}."
                )
            return
        if op in WITH_OWNERS:
            self._check_owners(what)
            return
        if self.low_rank is not None:
            raise ConfigError(
                f"{what}: {self.codec} needs full matrices: messages between two ranks, or one sum in a step "
                "of gradients that are unsharded on every rank (ddp, zero1, paro-nng, paro-nni). Here ranges of a flat "
                f"buffer move ({op.value}). Take a codec of blocks, such as 'int8'."
            )
        if self.encoding is None:
            return
        if op is not Op.ALL_GATHER and self.route not in ALL_TO_ALL:
            raise ConfigError(
                f"{what}: {self.codec} on a {op.value} by {self.route} would round at every member. "
                f"Take one of the routes {', '.join(ALL_TO_ALL)}."
            )
        if op is Op.ALL_GATHER and self.feedback != "none":
            raise ConfigError(f"{what}: feedback belongs to reductions; a gather sends weights, which are not summed.")

    def _check_owners(self, what: str) -> None:
        if self.route != "flat":
            raise ConfigError(f"{what}: pieces go straight to the owner, by no route; got {self.route!r}.")
        if self.low_rank is not None or (self.encoding is not None and self.encoding.stochastic):
            raise ConfigError(f"{what}: got {self.codec}. Take a codec of blocks, such as 'int8:64', or none.")
        if self.feedback != "none" or self.until or self.after:
            raise ConfigError(f"{what}: feedback=, until= and after= have no meaning here; got {self}.")

    def __str__(self) -> str:
        codec = "" if (self.encoding or self.low_rank) is None else f", {self.codec}"
        kept = "" if self.feedback == "none" else f", feedback at {self.feedback}"
        since = f", after {self.after} steps" if self.after else ""
        until = f", until step {self.until}" if self.until else ""
        plain = f", otherwise {self.plain_route}" if self.plain_route else ""
        plain += f", over NCCL {self.nccl_route}" if self.nccl_route else ""
        exact = ", exact" if self.exact and (not codec or self.changes) else ""
        return self.route + codec + exact + kept + since + until + plain
