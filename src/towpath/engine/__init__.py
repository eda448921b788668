"""What runs a training step: flat units, their buffers, the order of transfers, and the hooks that drive it.

Read it in this order: layout (a model as units) → shard_tensor (what the user's parameters become) → bucket (a unit's
flat memory) → unit (its transfers) → executor (the order of a step) → hooks (where PyTorch calls in).
May import: collectives, core, topology, errors.
"""
