"""A training step as data: strategies, placements, routes, transfers, schedules, and the step machine that drives them.

Nothing here imports torch or communicates, so that planning a job of a thousand GPUs needs only Python. May import:
topology.cluster, errors.
"""
