"""Loggers under `towpath`. Their messages begin with the rank that logs them."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any


class _RankAdapter(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        # A process that has not loaded torch is no rank, and must not load it to log a message.
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return msg, kwargs
        return f"[rank {distributed.get_rank()}] {msg}", kwargs


def logger(name: str) -> _RankAdapter:
    """Return the logger `towpath.NAME`. It adds no handler, so the program decides what is shown, and where."""
    return _RankAdapter(logging.getLogger(f"towpath.{name}"), {})
