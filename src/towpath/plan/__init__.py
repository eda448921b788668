"""The planner: it simulates a training step of each strategy, and ranks strategies for a model and a cluster.

The simulation, from the actions of the step machine:

hardware.py          what links, processors and kernels can do
transfer_costs.py    what each transfer costs on them
bandwidth.py         activities that run at the same time and share links and processors
simulated_engine.py  the transfer queues of a rank, and what its thread waits for
replay.py            one step of a cluster, with or without pipeline stages
prediction.py        what a simulated rank did and when, and the ranking of predictions

The search:

model.py             what is trained, how long a rank computes it, and what a rank holds
cluster_file.py      what a model is trained on, as a TOML file describes it
profile.py           the same as `towpath probe` has measured it
catalog.py           models and clusters by name, or from a file
request.py           what one optimizer step must do
candidates.py        all placements, routes, codecs and micro-batches
solver.py            what a step of a candidate takes, and the best candidates
pipelines.py         the same for models that are split into stages
tables.py            results as rows, sentences and JSON

What measures a live cluster and a live model, with torch, for strategy="auto":

choice.py            the choice, on all ranks
cluster_probe.py     measures links and kernels
live.py              describes a model from its module
measure.py           times the units of a model, and the engine's own work
"""
