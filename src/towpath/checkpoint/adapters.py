"""The names and configurations of PEFT adapters, so that an export needs no model.

PEFT is called with placeholders instead of tensors. It returns those that it would save, by its own names.
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

VALUE = "peft"  # the name in a manifest


def adapters_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return the adapters of a model by name. The result is empty for a model without adapters.

    Each has its `config`, as PEFT writes it, and PEFT's names of its `tensors` by the model's names. If PEFT computes
    other tensors from those of the model, an adapter has the `problem` instead.
    """
    if "peft" not in sys.modules or not isinstance(model, nn.Module):
        return {}
    from peft import PeftModel

    for prefix, module in model.named_modules():
        if isinstance(module, PeftModel):
            path = f"{prefix}." if prefix else ""
            return {adapter: _described(module, path, adapter) for adapter in module.peft_config}
    return {}


def _described(model: Any, prefix: str, adapter: str) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    placeholders = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    ours = {id(tensor): prefix + name for name, tensor in placeholders.items()}
    try:
        found = get_peft_model_state_dict(model, placeholders, adapter, save_embedding_layers=False)
        tensors = {ours[id(tensor)]: name for name, tensor in found.items()}
        return {"config": _config(model, adapter), "tensors": tensors}
    except Exception as error:  # some adapters compute with the tensors, and fail with placeholders
        return {"problem": f"{model.peft_config[adapter].peft_type} makes its files out of values ({error!r})"}


def _config(model: Any, adapter: str) -> dict[str, Any]:
    """Return the configuration as PEFT's `save_pretrained` writes it."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return cast(dict[str, Any], json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8")))
