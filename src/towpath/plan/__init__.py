"""The planner: it simulates a training step of each strategy, and ranks strategies for a model and a cluster.

The simulation, from the actions of the step machine:

hardware.py          a cluster: what its links, processors and kernels can do
transfer_costs.py    what each transfer costs on them
bandwidth.py         the clock: activities that share links and processors, and the timeline of what they did
simulated_engine.py  the transfer queues of a rank, and what its thread waits for
replay.py            one step of a cluster, with or without pipeline stages

The search:

request.py           what one optimizer step must do, and the predicted steps that answer it
model.py             what is trained, how long a rank computes it, and what a rank holds
profile.py           a cluster as `towpath probe` has measured it
catalog.py           models and clusters by name, or from a file
solver.py            the candidates, what a step of each takes, and the best of them
pipelines.py         the same for models that are split into stages
pytorch.py           FSDP2, HSDP and DDP, as they are and with wires, to compare with
tables.py            results as rows, sentences and JSON

What measures a live cluster and a live model, with torch, for strategy="auto":

choice.py            the choice, on all ranks; times the units of a model
cluster_probe.py     measures links, collectives and kernels
live.py              describes a model from its module
"""
