"""On which queue each kind of transfer goes."""

from __future__ import annotations

from towpath.core.strategy import Kind

# Kinds that share a queue run one after the other; different queues overlap, and have different wire buffers.
QUEUES = {
    Kind.GATHER: "gather",
    Kind.BACKWARD_GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.SYNC: "sync",
    Kind.USAGE: "control",
    Kind.PUBLISH: "publish",
    Kind.MATRIX_GRADIENTS: "to owners",
    Kind.MATRIX_WEIGHTS: "to owners",
    Kind.MATRIX_UPDATES: "from owners",
    Kind.ACTIVATION: "activation",
    Kind.ACTIVATION_GRADIENT: "activation gradient",
}

# How many of a queue's transfers may be under way at a time, each in wire buffers of its own: a gather begins to travel
# while nodes still share out what the one before it brought.
WAYS = {queue: 2 if queue == "gather" else 1 for queue in QUEUES.values()}
