"""Outer steps: islands of nodes train on their own, and synchronize their weights only now and then.

`settings` and `exchanges` belong to `core/`, and need no torch. `sync` runs the exchanges in the engine,
`period` replays them, `proposal` plans how often islands synchronize, and `saved` is their part of a checkpoint.
"""
