"""Protection against the loss of a node: snapshots in the memory of all nodes, and what outlives the ranks.

`memory` is a node's folder in shared memory, `keeper` the process that guards it, and `warm` the process from which
ranks fork. These three need no torch when they are imported.
"""
