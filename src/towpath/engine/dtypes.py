"""PyTorch's dtypes by the names that strategies and plans have for them."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
