"""Towpath: train large PyTorch models across nodes whose link to each other is narrow.

    model = towpath.shard(model, "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

Names are resolved on first use (PEP 562), so that planning a large job needs nothing but Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towpath.errors import TowpathError as TowpathError
    from towpath.topology.cluster import Extent as Extent
    from towpath.topology.cluster import Topology as Topology

__version__ = "0.1.0"

_HOME = {
    "Extent": "towpath.topology.cluster",
    "Topology": "towpath.topology.cluster",
    "TowpathError": "towpath.errors",
}

__all__ = ["Extent", "Topology", "TowpathError"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'towpath' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
