"""Which back end runs the codecs on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from towpath.codecs.kernels import reference


@dataclass(frozen=True, slots=True)
class Kernels:
    name: str
    encode: Callable[..., Any]
    decode: Callable[..., Any]
    decode_sum: Callable[..., Any]
    decode_sum_encode: Callable[..., Any]


def kernels_for(device: torch.device) -> Kernels:
    return Kernels("reference", reference.encode, reference.decode, reference.decode_sum, reference.decode_sum_encode)
