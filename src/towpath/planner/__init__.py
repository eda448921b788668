"""The planner: it ranks strategies for a model and a cluster, both given as numbers.

cluster.py    what a model is trained on, as a TOML file describes it
profile.py    the same as `towpath probe` has measured it
model.py      what is trained, how long a rank computes it, and what a rank holds
catalog.py    models and clusters by name, or from a file
request.py    what one optimizer step must do
solver.py     all placements, routes, codecs and micro-batches, and the best of them
pipelines.py  the same for models that are split into stages
tables.py     results as rows, sentences and JSON
"""
