"""strategy="auto": every rank gets the strategy that the planner ranks first for the running cluster.

The cluster is measured once. The profile is kept, and used again if a message still takes what the profile says. Only
rank 0 plans. The other ranks receive its answer, or its error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.strategy import Strategy
from towpath.engine.layout import UnitLayout
from towpath.errors import ConfigError, PlanError
from towpath.outer.proposal import OuterPlanner, worth_it
from towpath.plan import tables
from towpath.plan.cluster_probe import device_of_job, probe, still_holds
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.live import describe_by_parameters
from towpath.plan.measure import describe_measured, ranks_measure_together
from towpath.plan.model import Model
from towpath.plan.pipelines import PipelinePrediction
from towpath.plan.profile import Profile
from towpath.plan.request import OUTER, Batching, Optimizer, Prediction, Ranking, Request, Workload, codecs_for_both
from towpath.plan.solver import Solver
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks

_PROBE_SECONDS = 8.0
# The share of a device's memory that a rank may hold. The allocator, the driver and libraries need the rest.
_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen strategy, and one line for people."""

    strategy: Strategy
    batching: Batching
    why: str


# Returns the best strategy of a model in stages on a cluster, or None if none fits.
BestPipeline = Callable[[Model, Cluster, Request], PipelinePrediction | None]


def choose(
    groups: Groups,
    topology: Topology,
    describe: Callable[[torch.device], Model],
    request: Request,
    profile: str | Path = "",
    staged: BestPipeline | None = None,
) -> Choice:
    """Choose a strategy, identical on all ranks. Every rank must call it.

    `describe` describes the model for a device. Rank 0 uses the result. The other ranks call it at the same time,
    because they also work at the same time in a step. With no memory in `request`, a rank may take most of its
    device's. `staged` plans the job's stages, if it has any.
    """
    if groups.world != (dist.get_world_size() if dist.is_initialized() else 1):
        raise PlanError(
            f'strategy="auto" measures the whole job, and group= has {groups.world} of its ranks. Pass a strategy: '
            "`towpath plan` finds one."
        )
    kept, where = _kept_profile(groups, topology, profile)
    if kept is not None and (profile or still_holds(kept, groups)):  # a profile of the user's is not checked
        made, how = kept, f"links as measured on {kept.date}"
    else:
        why = "once" if kept is None else f"anew, since its links are not what they were on {kept.date}"
        if groups.rank == 0:
            sys.stderr.write(f'towpath: strategy="auto" measures this cluster {why}, for some seconds\n')
        began = time.monotonic()
        made = probe(topology, _PROBE_SECONDS)
        how = f"links measured in {time.monotonic() - began:.0f} s"
    ranks, device = AllRanks(groups, 'strategy="auto"', PlanError), device_of_job()
    describes = groups.rank == 0 or ranks_measure_together(device)
    model = ranks.each(lambda: describe(device) if describes else None)

    def planned() -> Choice:
        assert model is not None
        return _planned(made, how, model, request, staged)

    choice = ranks.on_rank_0(planned)
    if groups.rank == 0 and made is not kept:
        # If the cache cannot be written, the next run measures again.
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            unfinished = where.with_suffix(f".{os.getpid()}")
            unfinished.write_text(made.to_json(), encoding="utf-8")
            unfinished.replace(where)
        except OSError as error:
            sys.stderr.write(f"towpath: the profile could not be kept: {error}\n")
    return choice


def choose_for(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    workload: Workload,
    groups: Groups,
    topology: Topology,
    precision: Precision,
) -> Strategy:
    """Return the strategy that the planner ranks first for a model and a workload. Rank 0 prints it, and why.

    Every rank must call it, with the same arguments. `layouts` are the units of the model, as `lay_out` returns them.
    """
    if topology.world == 1:
        return presets.strategy("ddp", topology, offload=workload.offload)  # nothing to share
    dtype = next((bucket.dtype for layout in layouts for bucket in layout.spec.buckets), "float32")
    weights, gradients = codecs_for_both(workload.allow)
    request = Request(
        workload.micro_steps * topology.world,
        workload.memory or 0,
        precision,
        dtype,
        Optimizer.named(workload.optimizer),
        weights,
        gradients,
        micro_batches=(1,),
        checkpointing=False,  # the model recomputes by itself, if at all
        offload=workload.offload,
        interleaved=workload.interleaved,
        exact=workload.exact,
        outer=OUTER in workload.allow,
    )

    def describe(device: torch.device) -> Model:
        if not workload.inputs:
            return describe_by_parameters(model, layouts, workload.tokens)
        return describe_measured(model, layouts, lambda _: workload.inputs, [1], workload.tokens, device, precision)

    choice = choose(groups, topology, describe, request, workload.profile)
    if groups.rank == 0:
        sys.stderr.write(f"towpath: {choice.why}\n")
    return choice.strategy


def _kept_profile(groups: Groups, topology: Topology, path: str | Path) -> tuple[Profile | None, Path]:
    """Return the cluster's profile and its file. Rank 0 reads it for all ranks."""
    hosts = groups.gather_objects(os.uname().nodename)
    where = Path(path)
    if not path:
        # The name of the cached file depends on all that a profile depends on: hosts, ranks, device and threads.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        what = [
            f"{topology}",
            hosts[0],
            sorted(set(hosts)),
            device_of_job().type,
            torch.get_num_threads(),
            torch.__version__,
        ]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        where = cache / "towpath" / "profiles" / f"{digest}.json"

    def load() -> str | None:
        try:
            return Profile.load(where).to_json() if path or where.exists() else None
        except (ConfigError, OSError) as error:
            if path:
                raise
            sys.stderr.write(f"towpath: {error} It is measured anew.\n")
            return None

    text = AllRanks(groups, 'strategy="auto"', ConfigError).on_rank_0(load)
    if text is None:
        return None, where
    found = Profile.from_json(text)
    found.check(topology, hosts[0], device_of_job().type)
    return found, where


# The plan ------------------------------------------------------------------------------------------------------------


def _planned(profile: Profile, how: str, model: Model, request: Request, staged: BestPipeline | None) -> Choice:
    cluster = profile.cluster()
    memory = request.memory or int(cluster.memory * _SHARE_OF_MEMORY)
    solver = Solver(model, cluster, replace(request, memory=memory))
    if staged is not None:
        stages = staged(model, cluster, solver.request)
        if stages is None:
            raise PlanError(
                f'strategy="auto": no stages fit into {solver.request.memory / GIB:.2f} GiB a rank. Take more of them, '
                "a smaller micro-batch or activation checkpointing."
            )
        return _choice(stages, "the layout is as configured", how, solver)
    found = solver.solve(best=1)
    if isinstance(found, Ranking):
        best = found.ranked[0]
        outer = OuterPlanner(solver).solve() if solver.request.outer else None
        if outer is not None and worth_it(outer, best):
            best = outer
        return _choice(best, _compared(best, found, solver), how, solver)
    needed, limit = found.nearest.peak_bytes / GIB, solver.request.memory / GIB
    raise PlanError(
        f'strategy="auto": nothing fits into {limit:.2f} GiB a rank; what comes nearest needs {needed:.2f} GiB, '
        f"{tables.extents(found.nearest.strategy)} (P, G, OS). Take more ranks, a smaller micro-batch or "
        "activation checkpointing."
    )


def _choice(step: Prediction, compared: str, how: str, solver: Solver) -> Choice:
    batching = step.batching
    waits = f"{sum(step.exposed.values()) / step.seconds:.0%} of it waiting"
    what = f"{tables.label(step.strategy)} (P, G, OS {tables.extents(step.strategy)})"
    if isinstance(step, PipelinePrediction):
        what, waits = str(step.layout), f"{step.idle:.0%} of it idle"
    again = ", checkpointed" if batching.checkpointing else ""
    told = "".join(f" {line}" for line in (*tables.exact_bits([step], solver), *tables.launches([step])))
    why = (
        f"auto: {what}, micro-batch {batching.micro_batch} × {batching.micro_steps}{again}: "
        f"{tables.seconds(step.seconds)} a step as planned, {waits}, {step.peak_bytes / GIB:.2f} GiB; {compared}; "
        f"{how}.{told}"
    )
    return Choice(step.strategy, batching, why)


def _compared(best: Prediction, found: Ranking, solver: Solver) -> str:
    """Say what the baseline would take, or the best synchronous strategy in place of outer steps."""
    considered = f"; {found.considered:,} considered"
    if best.strategy.outer is not None:
        first = found.ranked[0]
        label, seconds = tables.label(first.strategy), tables.seconds(first.seconds)
        return f"{label}, which synchronizes in every step, {seconds}{considered}"
    baseline = presets.strategy(tables.BASELINE, solver.cluster.topology, offload=solver.request.offload)
    usual = solver.predict(baseline, best.batching)
    if best.strategy == usual.strategy:
        return f"nothing found was faster{considered}"
    if usual.peak_bytes > solver.request.memory:
        return f"{tables.BASELINE} would not fit{considered}"
    return f"{tables.BASELINE} would take {tables.seconds(usual.seconds)}{considered}"
