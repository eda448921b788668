"""The engine, which runs the training step of one model on one rank.

Read it in this order: layout (a model as units) → parameters/shard_tensor (the user's parameters) → parameters/bucket
(a unit's flat memory) → parameters/unit (its transfers) → executor (the order of a step) → hooks (PyTorch's calls).
It may import collectives and the packages below it.
"""

import torch

# A decorator that excludes a function from torch.compile and, if recursive, what it calls, too. It is private, and
# unlike `torch.compiler.disable` loads the compiler only at the first call.
eager = torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
