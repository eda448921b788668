"""A training step replayed without training: the step machine's actions, with the time that each of them takes.

hardware.py   what links, processors and kernels can do
fluid.py      things that go on at the same time, and share what they need
loads.py      what a transfer needs, phase by phase
clock.py      threads that compute and wait, and what carries their transfers meanwhile
engine.py     the queues of a rank, and what its thread waits for
replay.py     one step, of ranks that all do the same
messages.py   messages between the ranks of a pipeline
pipeline.py   one step of a pipeline, whose ranks do not
"""
