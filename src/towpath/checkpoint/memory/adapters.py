"""What PEFT calls the tensors of a model's adapters, and how it describes them, so that an export needs no model.

PEFT itself is asked, with placeholders in place of the tensors: which of them it would save, and under which names.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

VALUE = "peft"  # under which a manifest has it

Adapters = dict[str, dict[str, Any]]


def adapters_of(model: Any) -> Adapters:
    """By adapter: its `config`, as PEFT writes it, and the names of its `tensors`, ours and PEFT's; or the `problem`,
    where PEFT makes others out of the model's tensors. Empty for a model without adapters."""
    if "peft" not in sys.modules or not isinstance(model, nn.Module):
        return {}
    from peft import PeftModel

    for prefix, module in model.named_modules():
        if isinstance(module, PeftModel):
            return {
                adapter: _described(module, f"{prefix}." if prefix else "", adapter) for adapter in module.peft_config
            }
    return {}


def _described(model: Any, prefix: str, adapter: str) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    placeholders = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    ours = {id(tensor): prefix + name for name, tensor in placeholders.items()}
    try:
        found = get_peft_model_state_dict(model, placeholders, adapter, save_embedding_layers=False)
        tensors = {ours[id(tensor)]: name for name, tensor in found.items()}
        return {"config": _config(model, adapter), "tensors": tensors}
    except Exception as error:  # whatever a tuner does with tensors that hold nothing
        return {"problem": f"{model.peft_config[adapter].peft_type} makes its files out of values ({error!r})"}


def _config(model: Any, adapter: str) -> dict[str, Any]:
    """As `save_pretrained` of PEFT writes it."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return cast(dict[str, Any], json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8")))
