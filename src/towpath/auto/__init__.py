"""strategy="auto": it measures the running cluster and the model, and lets the planner choose a strategy.

choice.py   the choice, on all ranks
probe.py    measures links and kernels
live.py     describes a model from its module
measure.py  times the units of a model, and the engine's own work
"""
