"""The simulator: it replays a training step without training, from the actions of the step machine.

hardware.py   what links, processors and kernels can do, and what each transfer costs on them
bandwidth.py  activities that run at the same time and share links and processors
timeline.py   what a simulated rank did and when
engine.py     the transfer queues of a rank, and what its thread waits for
replay.py     one step of a cluster, with or without pipeline stages
"""
