"""The bytes that the transfers of a step send, summed and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from towpath.core.lossless import exact_codec, in_bits
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
        """The expected part of `inter_bytes` that is sent. It differs if transfers are exact."""
        return sum(t.expected_inter_bytes for t in self.transfers)

    def by_kind(self) -> str:
        """Return a text table with one line for each kind of transfer: calls, and bytes by class of link.

        The bytes of exact transfers are upper bounds. The expected bytes then have columns of their own, and a last
        line says what is expected of an element.
        """
        links = {"inside nodes": "intra_bytes", "between nodes": "inter_bytes"}
        if any(t.topology.nodes_per_rack for t in self.transfers):
            links["between racks"] = "between_racks_bytes"
        exact = {(exact_codec(t.move.op), t.dtype): t.expected_share for t in self.transfers if t.exact}
        columns: list[tuple[str, str]] = []  # each one's heading, and the attribute that it sums
        for heading, name in links.items():
            columns.append((heading, name))
            if exact and any(getattr(t, f"expected_{name}") != getattr(t, name) for t in self.transfers):
                columns.append(("expected", f"expected_{name}"))
        names = [name for _, name in columns]
        lines = [f"  {'kind':<20} {'calls':>6}" + "".join(f" {heading:>16}" for heading, _ in columns)]
        for kind in TransferKind:
            mine = [t for t in self.transfers if t.kind is kind]
            if mine:
                lines.append(f"  {kind.value:<20} {_sums(mine, names)}")
        lines.append(f"  {'total':<20} {_sums(self.transfers, names)}")
        return "\n".join([*lines, *([f"  expected on paper: {in_bits(exact)}"] if exact else [])])


def _sums(transfers: Sequence[Transfer], names: Iterable[str]) -> str:
    """Return the number of transfers, and the sums of their attributes `names`."""
    sums = (sum(getattr(t, name) for t in transfers) for name in names)
    return f"{len(transfers):>6}" + "".join(f" {nbytes:>16,}" for nbytes in sums)
