"""Checkpoints that any strategy and any number of ranks can resume from, after any crash.

    state = State(model, optimizer, schedule=scheduler, data=loader)
    saver = Saver("runs/a", state, keep_last=3)
    resumed = load("runs/a", state)          # the newest usable one, or None
    saver.save(step); saver.close()

    get_model_state_dict(model, options=…)   # PyTorch's functions, for sharded models

A checkpoint is a folder `step-000120` with safetensors files and a manifest in JSON. It contains no pickle, so loading
one runs no code of others. Names are resolved on first use (PEP 562).

May import: engine, lab, and everything below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towpath.checkpoint.exporting import export, import_safetensors
    from towpath.checkpoint.loading import latest, load, verify
    from towpath.checkpoint.saving import Saver, save
    from towpath.checkpoint.state import State
    from towpath.checkpoint.state_dicts import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

_HOMES = "state", "saving", "loading", "exporting", "state_dicts"

__all__ = [
    "Saver",
    "State",
    "export",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "import_safetensors",
    "latest",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
