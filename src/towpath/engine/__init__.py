"""The engine, which runs the training step of one model on one rank.

Read it in this order: layout (a model as units) → parameters/shard_tensor (the user's parameters) → parameters/bucket
(a unit's flat memory) → parameters/unit (its transfers) → executor (the order of a step) → hooks (PyTorch's calls).
It may import collectives and the packages below it.
"""
