"""Which strategy, and why: a model and a cluster as numbers, what a step takes and holds, and what is best.

model.py     what is trained: units, their parameters, FLOPs and activations
cluster.py   what it is trained on; clusters/ has some, profile.py is a measured one
memory.py    what a rank holds at most
cost.py      how long a rank computes, and what a step takes at least
solver.py    every placement, route, codec and micro-batch that may be, and the best of them
"""
