"""A training step replayed without training: the step machine's actions, with the time that each of them takes.

hardware.py   what links, processors and kernels can do
fluid.py      things that go on at the same time, and share what they need
loads.py      what a transfer needs, phase by phase
replay.py     one step: the thread that trains, the queues, and how they wait for one another
"""
