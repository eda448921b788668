"""The bytes that the transfers of a step send, summed and as a table."""

from __future__ import annotations

from towpath.core.lossless import in_bits
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer


class SentBytes:
    """A base class for objects with `transfers`. It sums the bytes that all ranks send."""

    __slots__ = ()
    transfers: tuple[Transfer, ...]

    @property
    def inter_bytes(self) -> int:
        """Bytes sent between nodes, summed over all ranks and transfers."""
        return sum(t.inter_bytes for t in self.transfers)

    @property
    def intra_bytes(self) -> int:
        """Bytes sent inside nodes, summed over all ranks and transfers."""
        return sum(t.intra_bytes for t in self.transfers)

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

    @property
    def expected_inter_bytes(self) -> int:
        """The expected part of `inter_bytes` that is sent. It differs if transfers have codings."""
        return sum(_expected(t, "inter_bytes") for t in self.transfers)

    def by_kind(self) -> str:
        """Return a text table with one line for each kind of transfer: calls, and bytes by class of link.

        The bytes of transfers with codings are upper bounds. The expected bytes then have columns of their own, and a
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
