"""Planning without a GPU: describe a cluster and a model, then rank strategies and predict their steps.

    from towpath import planning

    cluster = planning.load_cluster("ethernet-10g")
    model = planning.describe_model("llama-7b", length=2048)
    solver = planning.Solver(model, cluster, planning.Request(batch=64, memory=cluster.memory))
    found = solver.solve(best=3)
    print(found.ranked[0].strategy if isinstance(found, planning.Ranking) else found.missing_bytes)

`load_cluster` describes a cluster, and `probe` measures one. `describe_model` describes a published model, and
`describe_module` a PyTorch module. `Solver.predict` predicts a step of one strategy.

Only `describe_module` and `probe` import torch, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from towpath.plan.catalog import describe_model, load_cluster
from towpath.plan.request import Batching, Ranking, Request
from towpath.plan.solver import Solver

if TYPE_CHECKING:
    from towpath.plan.cluster_probe import probe
    from towpath.plan.live import describe_module

__all__ = [
    "Batching",
    "Ranking",
    "Request",
    "Solver",
    "describe_model",
    "describe_module",
    "load_cluster",
    "probe",
]

_HOMES = {"describe_module": "live", "probe": "cluster_probe"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'towpath.planning' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"towpath.plan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
