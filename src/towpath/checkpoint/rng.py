"""The state of every random number generator of one rank, as tensors: PyTorch's, the device's, NumPy's and Python's."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy as np

        legacy: Any = np.random.get_state(legacy=False)
        inside = legacy["state"]
        words = [inside["pos"], legacy["has_gauss"], *inside["key"].tolist()]
        state["numpy"] = torch.tensor(words, dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(legacy["gauss"], dtype=torch.float64)
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        position, has_gauss, *key = state["numpy"].tolist()
        inside = {"key": np.array(key, dtype=np.uint32), "pos": position}
        legacy = {"bit_generator": "MT19937", "state": inside, "has_gauss": has_gauss}
        np.random.set_state({**legacy, "gauss": state["numpy_gauss"].item()})


def seed_anew(seed: int, step: int, rank: int) -> None:
    """For a rank that did not exist when the checkpoint was written: a seed of its own, alike in every resumption."""
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    mine = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(mine)
    random.seed(mine)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(mine & 0xFFFFFFFF)
