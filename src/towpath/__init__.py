"""Towpath: train large PyTorch models across nodes whose link to each other is narrow.

    model = towpath.shard(model, "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

Names are resolved on first use (PEP 562), so that planning a large job needs nothing but Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towpath.api import Stats, full_parameters, schedule, shard, stats
    from towpath.engine.hooks import register_forward_method
    from towpath.engine.shard_tensor import ShardTensor
    from towpath.errors import TowpathError
    from towpath.spec.placement import Placement
    from towpath.spec.precision import Precision
    from towpath.spec.presets import strategies, strategy
    from towpath.spec.schedule import Schedule
    from towpath.spec.strategy import Strategy
    from towpath.spec.wire import Wire
    from towpath.topology.cluster import Extent, Topology

__version__ = "0.1.0"

__all__ = [
    "Extent",
    "Placement",
    "Precision",
    "Schedule",
    "ShardTensor",
    "Stats",
    "Strategy",
    "Topology",
    "TowpathError",
    "Wire",
    "full_parameters",
    "register_forward_method",
    "schedule",
    "shard",
    "stats",
    "strategies",
    "strategy",
]

_HOMES = {
    "Extent": "topology.cluster",
    "Placement": "spec.placement",
    "Precision": "spec.precision",
    "Schedule": "spec.schedule",
    "ShardTensor": "engine.shard_tensor",
    "Strategy": "spec.strategy",
    "Topology": "topology.cluster",
    "TowpathError": "errors",
    "Wire": "spec.wire",
    "register_forward_method": "engine.hooks",
    "strategies": "spec.presets",
    "strategy": "spec.presets",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'towpath' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"towpath.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
