"""Sums over transfers: the bytes of a schedule (`SentBytes`), and what ran so far (`Totals`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from towpath.core.formats import in_bits
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer


class _ByLink:
    """A base class for objects with `transfers`, planned or done. It sums the bytes that all ranks send."""

    __slots__ = ()
    transfers: tuple[Any, ...]

    @property
    def inter_bytes(self) -> int:
        """The bytes that all ranks together send between nodes."""
        return sum(t.inter_bytes for t in self.transfers)

    @property
    def intra_bytes(self) -> int:
        """The bytes that all ranks together send inside nodes."""
        return sum(t.intra_bytes for t in self.transfers)


class SentBytes(_ByLink):
    """A base class for plans of transfers."""

    __slots__ = ()
    transfers: tuple[Transfer, ...]

    def cable_bytes(self, node: int) -> int:
        """Return how many bytes `node` sends to other nodes in one step."""
        return sum(t.cable_bytes(node) for t in self.transfers)

    @property
    def between_racks_bytes(self) -> int:
        """Bytes sent between racks, summed over all ranks and transfers. They are part of those between nodes."""
        return sum(t.between_racks_bytes for t in self.transfers)

    def rack_bytes(self, rack: int) -> int:
        """Return how many bytes the nodes of `rack` send to other racks in one step."""
        return sum(t.rack_bytes(rack) for t in self.transfers)

    def by_kind(self) -> str:
        """Return a text table with one line for each kind of transfer: calls, and bytes by class of link.

        The bytes of transfers with a coding are upper bounds. The expected bytes then have columns of their own, and a
        last line says what is expected of an element.
        """
        links = {"inside nodes": "intra_bytes", "between nodes": "inter_bytes"}
        if any(t.topology.nodes_per_rack for t in self.transfers):
            links["between racks"] = "between_racks_bytes"
        codings = {coding for t in self.transfers if (coding := t.coding) is not None}
        columns: list[tuple[str, str, bool]] = []  # heading, attribute to sum, whether as expected
        for heading, name in links.items():
            columns.append((heading, name, False))
            if any(_expected(t, name) != getattr(t, name) for t in self.transfers):
                columns.append(("expected", name, True))
        lines = [f"  {'kind':<20} {'calls':>6}" + "".join(f" {heading:>16}" for heading, _, _ in columns)]
        for label in (*TransferKind, "total"):
            mine = [t for t in self.transfers if label in (t.kind, "total")]
            sums = (sum(_expected(t, n) if expected else getattr(t, n) for t in mine) for _, n, expected in columns)
            if mine or label == "total":
                lines.append(f"  {label:<20} {len(mine):>6}" + "".join(f" {nbytes:>16,}" for nbytes in sums))
        told = [f"  expected on paper: {in_bits({coding: coding.share for coding in codings})}"] if codings else []
        return "\n".join([*lines, *told])


def _expected(transfer: Transfer, name: str) -> int:
    """Return the expected part of the bytes that attribute `name` bounds. Inside nodes, sums are sent as they are."""
    bound, coding = getattr(transfer, name), transfer.coding
    if coding is None or (name == "intra_bytes" and not transfer.encoded_inside):
        return bound
    return round(coding.share * bound)


@dataclass(slots=True)
class TransferStats:
    """The calls, bytes and seconds of one transfer so far.

    Bytes are those that all ranks of the job send together. Seconds are this rank's.
    """

    transfer: Transfer
    # The bytes of a call, by class of link. Transfers with a coding send fewer: this is their upper bound.
    call_intra_bytes: int
    call_inter_bytes: int
    calls: int = 0
    seconds_in_flight: float = 0.0
    seconds_exposed: float = 0.0
    # What this rank saw encoded, if the transfer has a coding: bytes of values, and of their messages.
    coded_values: int = 0
    coded_messages: int = 0

    @staticmethod
    def of(transfer: Transfer, copies: int = 1, calls: int = 0) -> TransferStats:
        """Return the stats of a transfer that `copies` groups of ranks all make."""
        return TransferStats(transfer, copies * transfer.intra_bytes, copies * transfer.inter_bytes, calls)

    @property
    def intra_bytes(self) -> int:
        """The bytes sent inside nodes."""
        if self.coded_values and self.transfer.encoded_inside:
            return self._sent(self.call_intra_bytes)
        return self.calls * self.call_intra_bytes

    @property
    def inter_bytes(self) -> int:
        """The bytes sent between nodes. With a coding they are estimated from what this rank has encoded."""
        return self._sent(self.call_inter_bytes)

    def _sent(self, nbytes: int) -> int:
        if not self.coded_values:
            return self.calls * nbytes
        return round(self.coded_messages / self.coded_values * self.calls * nbytes)

    def plus(self, other: TransferStats, sign: int = 1) -> TransferStats:
        """Return the sum of both, or the difference with `sign=-1`, for stats of the same transfer."""
        return TransferStats(  # written out, because a trainer calls it for each transfer after each step
            self.transfer,
            self.call_intra_bytes,
            self.call_inter_bytes,
            self.calls + sign * other.calls,
            self.seconds_in_flight + sign * other.seconds_in_flight,
            self.seconds_exposed + sign * other.seconds_exposed,
            self.coded_values + sign * other.coded_values,
            self.coded_messages + sign * other.coded_messages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(_ByLink):
    """The counts of all transfers so far. Bytes are those of all ranks together, seconds are this rank's.

    Attributes:
        transfers: Calls, bytes and seconds of each transfer.
        seconds_host: The time of the engine's bookkeeping on the training thread, around each unit's forward and
            backward. Waiting for transfers is not part of it: see `seconds_exposed`.
    """

    transfers: tuple[TransferStats, ...]
    seconds_host: float

    _COUNTS: ClassVar = ("seconds_host",)

    def since(self, earlier: Totals) -> Self:
        """Return the counts since `earlier`, which must be of the same model. Memory and `last_step` stay as they are.

        Use it to measure some steps: take `stats` before and after them.

        Args:
            earlier: The stats before these steps.
        """
        before = {t.transfer: t for t in earlier.transfers}
        found = [t.plus(before[t.transfer], -1) if t.transfer in before else t for t in self.transfers]
        kept = tuple(t for t in found if t.calls or t.seconds_exposed)
        return replace(self, transfers=kept, **{n: getattr(self, n) - getattr(earlier, n) for n in self._COUNTS})

    def of_groups(self, count: int) -> Self:
        """Return the stats with the bytes of `count` groups of ranks that all send the same.

        Memory and seconds are unchanged.
        """
        found = (
            replace(t, call_intra_bytes=count * t.call_intra_bytes, call_inter_bytes=count * t.call_inter_bytes)
            for t in self.transfers
        )
        return replace(self, transfers=tuple(found))

    @property
    def seconds_exposed(self) -> float:
        """The seconds in which this rank's computation did nothing but wait for transfers."""
        return sum(t.seconds_exposed for t in self.transfers)

    @property
    def exposed_by_kind(self) -> dict[TransferKind, float]:
        """The exposed seconds of each kind of transfer."""
        found: dict[TransferKind, float] = defaultdict(float)
        for each in self.transfers:
            found[each.transfer.kind] += each.seconds_exposed
        return dict(found)

    @property
    def coded_bytes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """The bytes of values that this rank saw encoded, and of their messages, by coding."""
        found: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for each in (each for each in self.transfers if each.coded_values):
            if (coding := each.transfer.coding) is not None:
                values, messages = found[coding]
                found[coding] = values + each.coded_values, messages + each.coded_messages
        return dict(found)

    @property
    def encoded_shares(self) -> dict[tuple[str, str], float]:
        """The bytes of encoded messages as a share of their values, by coding."""
        return {key: messages / values for key, (values, messages) in self.coded_bytes.items()}
