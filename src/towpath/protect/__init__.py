"""Protection against the loss of a node: snapshots in the memory of all nodes, and what outlives the ranks.

Read the modules in this order:

    memory       the folder of a node in shared memory
    keeper       the process that guards it
    warm         the process from which ranks fork
    snapshots    what a training leaves in the memory of its nodes every few steps
    buddies      how a node sends another one what it alone holds
    healing      how a training goes on from a snapshot
    timeline     the seconds from a loss to the next step, by part

The first three and `timeline` need no torch when they are imported.
"""
