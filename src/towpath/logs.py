"""Loggers under `towpath`, whose messages begin with the rank that has something to say."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Ranked(_Adapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        rank = _rank()
        return (msg if rank is None else f"[rank {rank}] {msg}"), kwargs


def logger(name: str) -> _Adapter:
    """`towpath.NAME`. Nothing is set up here: what is shown, and where, is the program's to say."""
    return _Ranked(logging.getLogger(f"towpath.{name}"), {})


def _rank() -> int | None:
    """Of this process in its job; None where there is none. Who has not loaded torch is in none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank()
