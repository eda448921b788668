"""Pipelines of sharded stages, on `torch.distributed.pipelining`.

`split` cuts a model into stages, and `Pipeline` trains them. `Compression` encodes what stages exchange. Names are
resolved on first use (PEP 562): `torch.distributed.pipelining` is imported only for `Pipeline`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from towpath.core.passes import COMPRESSIONS, SCHEDULES, Compression, compression

if TYPE_CHECKING:
    from towpath.pipeline.pipeline import Pipeline
    from towpath.pipeline.splitting import split

__all__ = ["COMPRESSIONS", "SCHEDULES", "Compression", "Pipeline", "compression", "split"]

_HOMES = {"Pipeline": "pipeline", "split": "splitting"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'towpath.pipeline' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"towpath.pipeline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
