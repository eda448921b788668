"""Towpath trains large PyTorch models across nodes that are connected by slow links.

    model = towpath.shard(model, "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

Names are resolved on first use (PEP 562), so that planning a large job needs nothing but Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from towpath.version import __version__ as __version__

if TYPE_CHECKING:
    from towpath import checkpoint as checkpoint
    from towpath import codecs as codecs
    from towpath import errors as errors
    from towpath import integrations as integrations
    from towpath import optim as optim
    from towpath import pipeline as pipeline
    from towpath import planning as planning
    from towpath import tracing as tracing
    from towpath.api import (
        average_islands,
        broadcast_buffers,
        full_parameters,
        full_tensor,
        join,
        meet_islands,
        no_sync,
        schedule,
        shard,
        weigh,
    )
    from towpath.core.formats import Precision
    from towpath.core.placement import Placement
    from towpath.core.presets import strategies, strategy
    from towpath.core.schedule import Schedule
    from towpath.core.strategy import Protect, Strategy
    from towpath.core.transport import Transport
    from towpath.engine.parameters.shard_tensor import ShardTensor
    from towpath.engine.saved_activations import offload_activations
    from towpath.engine.share_sampler import ShareSampler
    from towpath.errors import TowpathError
    from towpath.fsdp.wires import wires
    from towpath.observe.stats import Stats, stats
    from towpath.outer.settings import Outer
    from towpath.plan.request import Workload
    from towpath.sharded_module import register_forward_method
    from towpath.topology.cluster import Extent, Topology
    from towpath.topology.init import init

__all__ = [
    "Extent",
    "Outer",
    "Placement",
    "Precision",
    "Protect",
    "Schedule",
    "ShardTensor",
    "ShareSampler",
    "Stats",
    "Strategy",
    "Topology",
    "TowpathError",
    "Transport",
    "Workload",
    "average_islands",
    "broadcast_buffers",
    "full_parameters",
    "full_tensor",
    "init",
    "join",
    "meet_islands",
    "no_sync",
    "offload_activations",
    "register_forward_method",
    "schedule",
    "shard",
    "stats",
    "strategies",
    "strategy",
    "weigh",
    "wires",
]

# Modules that are attributes after `import towpath` alone.
_MODULES = ("checkpoint", "codecs", "errors", "integrations", "optim", "pipeline", "planning", "tracing")

_HOMES = {
    "Extent": "topology.cluster",
    "Outer": "outer.settings",
    "Placement": "core.placement",
    "Precision": "core.formats",
    "Protect": "core.strategy",
    "Schedule": "core.schedule",
    "ShardTensor": "engine.parameters.shard_tensor",
    "ShareSampler": "engine.share_sampler",
    "Stats": "observe.stats",
    "Strategy": "core.strategy",
    "Topology": "topology.cluster",
    "TowpathError": "errors",
    "Transport": "core.transport",
    "Workload": "plan.request",
    "init": "topology.init",
    "offload_activations": "engine.saved_activations",
    "register_forward_method": "sharded_module",
    "stats": "observe.stats",
    "strategies": "core.presets",
    "strategy": "core.presets",
    "wires": "fsdp.wires",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"towpath.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'towpath' has no attribute {name!r}; it has {', '.join((*__all__, *_MODULES))}")
    return getattr(importlib.import_module(f"towpath.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
