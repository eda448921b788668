"""Planning without a GPU: describe a cluster and a model, then rank, simulate and explain strategies.

    from towpath import planning

    cluster = planning.load_cluster("ethernet-10g")
    model = planning.describe_model("llama-7b", length=2048)
    solver = planning.Solver(model, cluster, planning.Request(batch=64, memory=cluster.memory))
    found = solver.solve(best=3)
    print(found.ranked[0].strategy if isinstance(found, planning.Ranking) else found.missing_bytes)

`load_cluster` describes a cluster, and `probe` measures one. `describe_model` describes a published model, and
`describe_module` a PyTorch module. `Solver` plans, predicts steps and memory, and makes timelines. `Pipelines` does the
same for models in stages, and `OuterPlanner` plans outer steps. `explain` and `compare` show what makes a step fast or
slow. `expected_delay` estimates what uneven ranks cost.

Names are loaded on first use. Only `describe_module` and `probe` import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towpath.auto.live import describe_module
    from towpath.auto.probe import probe
    from towpath.planner.catalog import (
        describe_model,
        load_cluster,
        load_exact_shares,
        model_shape,
        shipped_clusters,
    )
    from towpath.planner.cluster import Cluster
    from towpath.planner.islands import OuterPlanner
    from towpath.planner.model import Model, ModelUnit, StagedModel, Transformer
    from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines
    from towpath.planner.prediction import Batching, Infeasible, Prediction, Ranking
    from towpath.planner.profile import Profile
    from towpath.planner.request import Optimizer, Request
    from towpath.planner.solver import Solver
    from towpath.planner.tables import compare, explain
    from towpath.sim.timeline import Delay, RankVariation, Timeline, expected_delay

__all__ = [
    "Batching",
    "Cluster",
    "Delay",
    "Infeasible",
    "Layout",
    "Model",
    "ModelUnit",
    "Optimizer",
    "OuterPlanner",
    "PipelinePrediction",
    "Pipelines",
    "Prediction",
    "Profile",
    "RankVariation",
    "Ranking",
    "Request",
    "Solver",
    "StagedModel",
    "Timeline",
    "Transformer",
    "compare",
    "describe_model",
    "describe_module",
    "expected_delay",
    "explain",
    "load_cluster",
    "load_exact_shares",
    "model_shape",
    "probe",
    "shipped_clusters",
]

_HOMES = {
    "auto.live": ("describe_module",),
    "auto.probe": ("probe",),
    "planner.catalog": ("describe_model", "load_cluster", "load_exact_shares", "model_shape", "shipped_clusters"),
    "planner.cluster": ("Cluster",),
    "planner.islands": ("OuterPlanner",),
    "planner.model": ("Model", "ModelUnit", "StagedModel", "Transformer"),
    "planner.pipelines": ("Layout", "PipelinePrediction", "Pipelines"),
    "planner.profile": ("Profile",),
    "planner.prediction": ("Batching", "Infeasible", "Prediction", "Ranking"),
    "planner.request": ("Optimizer", "Request"),
    "planner.solver": ("Solver",),
    "planner.tables": ("compare", "explain"),
    "sim.timeline": ("Delay", "RankVariation", "Timeline", "expected_delay"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"towpath.{home}"), name)
    raise AttributeError(f"module 'towpath.planning' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
