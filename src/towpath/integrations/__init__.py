"""Towpath inside the frameworks that people train with: one module for each, and importing it imports the framework.

    from towpath.integrations.accelerate import Accelerator        # Accelerator(strategy="mics")
    from towpath.integrations.transformers import Trainer          # Trainer(…, strategy="mics")
    import towpath.integrations.lightning                          # lightning.Trainer(strategy="towpath")

Each takes the name of a strategy, a `towpath.Strategy`, or a `Sharding`, which says the rest of what `shard()` takes.
May import: checkpoint, api, and everything below.
"""

from towpath.integrations.sharding import Sharding

__all__ = ["Sharding"]
