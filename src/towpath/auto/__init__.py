"""strategy="auto": measures the cluster and the model that run, and has the planner choose.

From `choice.py`: `probe.py` measures links and kernels, `live.py` looks into a model, `measure.py` times its units.
"""
