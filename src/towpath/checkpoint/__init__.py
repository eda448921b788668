"""Checkpoints that any strategy, any number of ranks and any crash can resume from.

    state = State(model, optimizer, schedule=scheduler, data=loader)
    saver = Saver("runs/a", state, keep_last=3)
    resumed = load("runs/a", state)          # the newest one that is sound, or None
    saver.save(step); saver.close()

    get_model_state_dict(model, options=…)   # PyTorch's functions, for sharded models

A checkpoint is a folder `step-000120` of safetensors files and a manifest in JSON: no pickle, and nobody's code.
May import: engine, lab, and everything below.
"""

from towpath.checkpoint.disk.checks import Verdict, latest, verify
from towpath.checkpoint.disk.manifest import Manifest, read_manifest
from towpath.checkpoint.export import export, import_safetensors
from towpath.checkpoint.load import Loaded, load
from towpath.checkpoint.memory.state import State
from towpath.checkpoint.save import Outcome, Saver, Saving, save
from towpath.checkpoint.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "Loaded",
    "Manifest",
    "Outcome",
    "Saver",
    "Saving",
    "State",
    "Verdict",
    "export",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "import_safetensors",
    "latest",
    "load",
    "read_manifest",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "verify",
]
