"""The state of every random number generator of a rank, as tensors: those of PyTorch, the GPU, NumPy and Python."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from towpath.checkpoint.safe_open import DamagedError, shown

_WORDS = 624  # in the state of a Mersenne twister


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of this process's generators by name."""
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


def check_rng_shapes(saved: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise DamagedError unless dtypes and shapes are those that `rng_state` makes. Nothing is read before."""
    words, one = ("I64", (_WORDS + 2,)), ("F64", ())
    expected = {
        "torch": ("U8", tuple(torch.get_rng_state().shape)),
        "cuda": ("U8", (16,)),  # a seed and an offset
        **dict.fromkeys(("python", "numpy"), words),
        **dict.fromkeys(("python_gauss", "numpy_gauss"), one),
    }
    needed = {"torch", "python", "python_gauss", *(("numpy", "numpy_gauss") if "numpy" in saved else ())}
    for name in sorted(needed | saved.keys()):
        if saved.get(name) != expected.get(name):
            raise DamagedError(
                f"the random numbers' {name} is {shown(saved.get(name))}; expected {expected.get(name)} (dtype, shape)."
            )


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set this process's generators to a state from `rng_state`, or raise DamagedError if it is not possible."""
    try:
        version, *words = state["python"].tolist()
        gauss = state["python_gauss"].item()
        random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "numpy" in state:
            import numpy as np

            position, has_gauss, *key = state["numpy"].tolist()
            if not 0 <= position <= _WORDS:  # NumPy does not check this, and would read outside its state
                raise ValueError(f"NumPy's position is {position}; expected 0 to {_WORDS}")
            inside = {"key": np.array(key, dtype=np.uint32), "pos": position}
            legacy = {"bit_generator": "MT19937", "state": inside, "has_gauss": has_gauss}
            np.random.set_state({**legacy, "gauss": state["numpy_gauss"].item()})
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"the random numbers are no state of a generator ({error}).") from error


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank that did not exist when the checkpoint was written.

    Each rank gets its own seed, and the same one each time the checkpoint is resumed.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    mine = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(mine)
    random.seed(mine)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(mine & 0xFFFFFFFF)
