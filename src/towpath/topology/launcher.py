"""The environment of a rank: where the launcher and the node say that it is, and where the ranks meet."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence

from towpath.errors import ConfigError


def launched() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def node_name() -> str:
    """Return a text that the ranks of this node have, and no others: the launcher's number of it, or the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def meeting_point() -> tuple[str, str]:
    """Return the host and the port of the launcher's store."""
    return os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "29500")


# A node learns the name of its rack from its environment. `towpath.init()` numbers the ranks rack by rack, in whatever
# order the launcher has numbered the nodes.

# The name of a rack, and whether the user gave it.
RackName = tuple[str, bool]


def rack_name() -> RackName:
    """Return the name of this node's rack, or an empty name if its environment has none.

    It is `TOWPATH_RACK`, or else the switches above the node that Slurm names with its plugin topology/tree.
    """
    if name := os.environ.get("TOWPATH_RACK", "").strip():
        return name, True
    return os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0], False


def numbers_by_rack(racks: Sequence[RackName]) -> list[int]:
    """Return the new number of each rank, so that the ranks of a rack are consecutive. Rank 0 remains rank 0.

    Args:
        racks: The rack of each rank, by the launcher's numbers.
    """
    names = checked_racks(racks)
    first = {name: names.index(name) for name in set(names)}
    order = sorted(range(len(names)), key=lambda rank: (first[names[rank]], rank))
    return sorted(range(len(order)), key=order.__getitem__)


def checked_racks(racks: Sequence[RackName]) -> list[str]:
    """Return the name of each rank's rack. Raise if the user named racks that do not have equally many ranks."""
    names = [name for name, _ in racks]
    sizes = Counter(names)
    if len(sizes) == 1 or not any(told for _, told in racks):
        return names
    remedy = "To train without racks, set TOWPATH_RACK to the same name on every node."
    if "" in sizes:
        named, unnamed = next(i for i, name in enumerate(names) if name), names.index("")
        raise ConfigError(
            f"rank {named} is in rack {names[named]!r}, and rank {unnamed} is in none. Set TOWPATH_RACK on every node. "
            f"{remedy}"
        )
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name!r} has {n}" for name, n in sizes.items())
        raise ConfigError(f"uneven racks: {counts} ranks. Start equally many nodes in each rack. {remedy}")
    return names
