"""Towpath inside the frameworks that people train with: one module for each, and importing it imports the framework.

    from towpath.integrations.accelerate import Accelerator        # Accelerator(strategy="mics")
    from towpath.integrations.transformers import Trainer          # Trainer(…, strategy="mics")
    import towpath.integrations.lightning                          # lightning.Trainer(strategy="towpath")

Each takes the name of a strategy, a `towpath.Strategy`, or a `Sharding`, which says the rest of what `shard()` takes.
May import: checkpoint, api, and everything below.
"""

import importlib
from typing import Any

from towpath.integrations.sharding import Sharding

__all__ = ["Sharding"]


def __getattr__(name: str) -> Any:
    if name not in ("accelerate", "lightning", "transformers"):
        raise AttributeError(f"module 'towpath.integrations' has no attribute {name!r}")
    return importlib.import_module(f"towpath.integrations.{name}")
