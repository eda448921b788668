"""Everything a training step *is*, as data: placement, wires, strategy, transitions, routes, schedule.

No torch here, and no communication: planning a thousand-GPU job needs nothing but Python.
May import: topology.cluster, errors.
"""
