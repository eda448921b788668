"""strategy="auto": every rank gets what the planner ranks first for the cluster that runs.

The cluster is measured once; the profile is kept, and used again where one message still takes what it says. It is
measured shortly at first, and longer once a plan tells that steps take long enough for it to pay. Rank 0 plans, since
it alone decides; the others get its answer, or its error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from towpath.auto.live import describe_by_parameters
from towpath.auto.measure import describe_measured, ranks_measure_together
from towpath.auto.probe import device_of_job, probe, still_holds
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.strategy import Offload, Strategy
from towpath.engine.layout import UnitLayout
from towpath.errors import ConfigError, PlanError, TowpathError
from towpath.planner import tables
from towpath.planner.cluster import GIB, Cluster
from towpath.planner.model import Model
from towpath.planner.pipelines import Layout, PricedPipeline
from towpath.planner.profile import Profile
from towpath.planner.request import Optimizer, Request, codecs_for_both
from towpath.planner.solver import Batching, Infeasible, Priced, Ranking, Solver
from towpath.planner.workload import Workload
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups

# A probe is short at first. Where the planned steps leave room for it, a longer one follows: together they take so
# large a share of so many steps at most, and the longer one never more than its full seconds.
SHORT_PROBE_SECONDS, FULL_PROBE_SECONDS = 1.0, 15.0
_SHARE_OF_STEPS, _STEPS = 0.05, 1000
_WORTH_IT = 3  # times as long as the short one, the longer has to be at least
# What a rank may hold of its device's memory: the rest is the allocator's, the driver's and the libraries'.
_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """`seconds`: of a step, as planned. `why`: one line for people."""

    strategy: Strategy
    batching: Batching
    seconds: float
    why: str
    layout: Layout | None = None  # where the model is to be cut into stages, or its layers to be shared


# The best pipeline for a model on a cluster, if any fits.
BestPipeline = Callable[[Model, Cluster, Request], PricedPipeline | None]


@dataclass(frozen=True, slots=True)
class Pipelined:
    """What may be chosen besides plain strategies; or, as `only` it may, in their place."""

    best: BestPipeline
    only: bool


def choose(
    groups: Groups,
    topology: Topology,
    describe: Callable[[torch.device], Model],
    request: Callable[[int], Request],
    profile: str | Path = "",
    pipelined: Pipelined | None = None,
) -> Choice:
    """The same on every rank; every rank must call it.

    `describe(device)`: the model as rank 0 finds it; the other ranks do the same at the same time, as in a step.
    `request(memory)`: what is asked of a step, for ranks of so many bytes of memory.
    """
    if groups.world != (dist.get_world_size() if dist.is_initialized() else 1):
        raise PlanError(
            f'strategy="auto" measures the whole job, and group= has {groups.world} of its ranks. Pass a strategy: '
            "`towpath plan` finds one."
        )
    planner = _Planner(groups, describe, request, pipelined)
    kept, where = _kept_profile(groups, topology, profile)
    began = time.monotonic()
    if kept is not None and (profile or still_holds(kept, groups)):  # a named file is the user's word
        made, choice = kept, planner.choose(kept, f"links as measured on {kept.date}")
    else:
        why = "once" if kept is None else f"anew, since its links are not what they were on {kept.date}"
        made, choice = _probed(groups, topology, planner, SHORT_PROBE_SECONDS, why)
    spent = groups.gather_objects(time.monotonic() - began)[0]
    longer = min(FULL_PROBE_SECONDS, _SHARE_OF_STEPS * _STEPS * choice.seconds - spent)
    if not profile and longer >= _WORTH_IT * made.budget_seconds:
        made, choice = _probed(groups, topology, planner, longer, "longer, since its steps take so long")
    if groups.rank == 0 and made is not kept:
        _keep(made, where)
    return choice


def _probed(groups: Groups, topology: Topology, planner: _Planner, seconds: float, why: str) -> tuple[Profile, Choice]:
    began = time.monotonic()
    if groups.rank == 0:
        sys.stderr.write(f'towpath: strategy="auto" measures this cluster {why}, for some {max(seconds, 3):.0f} s\n')
    made = probe(topology, seconds)
    return made, planner.choose(made, f"links measured in {time.monotonic() - began:.0f} s")


def choose_for(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    workload: Workload,
    groups: Groups,
    topology: Topology,
    precision: Precision,
    offload: Offload | None,
) -> Strategy:
    """Return the strategy that the planner ranks first for a model and a workload. Rank 0 prints it, and why.

    Every rank must call it, with the same arguments. `layouts` are the units of the model, as `lay_out` returns them.
    """
    if topology.world == 1:
        return presets.strategy("ddp", topology, offload=offload)  # nothing to share
    dtype = next((bucket.dtype for layout in layouts for bucket in layout.spec.buckets), "float32")
    weights, gradients = codecs_for_both(workload.allow)

    def request(memory: int) -> Request:
        return Request(
            workload.micro_steps * topology.world,
            workload.memory or memory,
            precision,
            dtype,
            Optimizer.named(workload.optimizer),
            weights,
            gradients,
            micro_batches=(1,),
            checkpointing=False,  # as the model is
            offload=offload,
        )

    def describe(device: torch.device) -> Model:
        if not workload.inputs:
            return describe_by_parameters(model, layouts, workload.tokens)
        return describe_measured(model, layouts, lambda _: workload.inputs, [1], workload.tokens, device, precision)

    choice = choose(groups, topology, describe, request, workload.profile)
    if groups.rank == 0:
        sys.stderr.write(f"towpath: {choice.why}\n")
    return choice.strategy


# The profile ---------------------------------------------------------------------------------------------------------


def _kept_profile(groups: Groups, topology: Topology, path: str | Path) -> tuple[Profile | None, Path]:
    """Of this cluster. Rank 0 reads; all take what it has read."""
    hosts = groups.gather_objects(os.uname().nodename)
    where = Path(path) if path else _cache_file(topology, hosts)
    told: tuple[str, str] | None = None
    if groups.rank == 0 and (path or where.exists()):
        try:
            told = ("profile", Profile.load(where).to_json())
        except ConfigError as error:
            if path:
                told = ("error", str(error))
            else:
                sys.stderr.write(f"towpath: {error} It is measured anew.\n")
    told = groups.gather_objects(told)[0]
    if told is None:
        return None, where
    kind, text = told
    if kind == "error":
        raise ConfigError(text)
    found = Profile.from_json(text)
    found.check(topology, hosts[0], device_of_job().type)
    return found, where


def _cache_file(topology: Topology, hosts: list[str]) -> Path:
    """By all that a profile depends on and that can be asked: hosts, ranks, device, threads."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    what = [f"{topology}", sorted(set(hosts)), device_of_job().type, torch.get_num_threads(), torch.__version__]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache / "towpath" / "profiles" / f"{digest}.json"


def _keep(profile: Profile, where: Path) -> None:
    """A cache that cannot be written costs the next run a probe, and nobody a run."""
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        beside = where.with_suffix(f".{os.getpid()}")
        beside.write_text(profile.to_json(), encoding="utf-8")
        beside.replace(where)
    except OSError as error:
        sys.stderr.write(f"towpath: the profile could not be kept: {error}\n")


# The plan ------------------------------------------------------------------------------------------------------------


class _Planner:
    """Rank 0 plans, and the others wait for what it finds. The model is described once."""

    def __init__(
        self,
        groups: Groups,
        describe: Callable[[torch.device], Model],
        request: Callable[[int], Request],
        pipelined: Pipelined | None,
    ) -> None:
        self._groups, self._describe, self._request, self._pipelined = groups, describe, request, pipelined
        self._model: Model | None = None

    def choose(self, profile: Profile, how: str) -> Choice:
        """`how` the profile was come by, in words."""
        answer: Choice | TowpathError | None = None
        cause: Exception | None = None
        try:
            answer = self._answer(profile, how)
        except TowpathError as error:
            answer = error
        except Exception as error:  # the others wait for an answer
            cause = error
            answer = PlanError(f'strategy="auto": rank 0 could not plan: {type(error).__name__}: {error}')
        answer = self._groups.gather_objects(answer)[0]
        if isinstance(answer, TowpathError):
            raise answer from cause
        assert answer is not None
        return answer

    def _answer(self, profile: Profile, how: str) -> Choice | None:
        device = device_of_job()
        if self._groups.rank == 0:
            self._model = self._model or self._describe(device)
            return _planned(profile, how, self._model, self._request, self._pipelined)
        if self._model is None and ranks_measure_together(device):
            with suppress(Exception):  # what cannot be described is said by rank 0
                self._model = self._describe(device)
        return None


def _planned(
    profile: Profile, how: str, model: Model, request: Callable[[int], Request], pipelined: Pipelined | None
) -> Choice:
    cluster = profile.cluster()
    solver = Solver(model, cluster, request(int(cluster.memory * _SHARE_OF_MEMORY)))
    stages = pipelined.best(model, cluster, solver.request) if pipelined is not None else None
    if pipelined is not None and pipelined.only and stages is None:
        raise PlanError(
            f'strategy="auto": no stages fit into {solver.request.memory / GIB:.2f} GiB a rank. Take more of them, a '
            "smaller micro-batch or activation checkpointing."
        )
    if pipelined is not None and pipelined.only and stages is not None:
        return _staged(stages, "the layout is as configured", how)
    found = _without_stages(solver, stages is not None)
    if stages is not None and not isinstance(found, Ranking):
        return _staged(stages, "nothing fits without stages", how)
    if stages is not None and isinstance(found, Ranking) and stages.seconds < found.ranked[0].seconds:
        best = found.ranked[0]
        without = f"without stages {tables.label(best.strategy)} would take {tables.seconds(best.seconds)}"
        return _staged(stages, without, how)
    if isinstance(found, Infeasible):
        needed, limit = found.nearest.peak_bytes / GIB, solver.request.memory / GIB
        raise PlanError(
            f'strategy="auto": nothing fits into {limit:.2f} GiB a rank; what comes nearest needs {needed:.2f} GiB, '
            f"{tables.extents(found.nearest.strategy)} (P, G, OS). Take more ranks, a smaller micro-batch or "
            "activation checkpointing."
        )
    assert isinstance(found, Ranking)
    best = found.ranked[0]
    return Choice(best.strategy, best.batching, best.seconds, _why(best, found, solver, how))


def _without_stages(solver: Solver, otherwise: bool) -> Ranking | Infeasible | None:
    """`otherwise`: there are stages to take where the batch is no multiple of the ranks."""
    try:
        return solver.solve(best=1)
    except ConfigError:
        if otherwise:
            return None
        raise


def _staged(stages: PricedPipeline, compared: str, how: str) -> Choice:
    batching = stages.batching
    again = ", checkpointed" if batching.checkpointing else ""
    why = (
        f"auto: {stages.layout}, micro-batch {batching.micro_batch} × {batching.micro_steps}{again}: "
        f"{tables.seconds(stages.seconds)} a step as planned, {stages.idle:.0%} of it idle, "
        f"{stages.peak_bytes / GIB:.2f} GiB; {compared}; {how}."
    )
    return Choice(stages.strategy, batching, stages.seconds, why, stages.layout)


def _why(best: Priced, found: Ranking, solver: Solver, how: str) -> str:
    batching = best.batching
    again = ", checkpointed" if batching.checkpointing else ""
    baseline = presets.strategy(tables.BASELINE, solver.cluster.topology, offload=solver.request.offload)
    usual = solver.price(baseline, batching)
    compared = (
        f"{tables.BASELINE} would take {tables.seconds(usual.seconds)}"
        if usual.peak_bytes <= solver.request.memory
        else f"{tables.BASELINE} would not fit"
    )
    if best.strategy == usual.strategy:
        compared = "nothing found was quicker"
    waits = sum(best.exposed.values()) / best.seconds
    return (
        f"auto: {tables.label(best.strategy)} (P, G, OS {tables.extents(best.strategy)}), micro-batch "
        f"{batching.micro_batch} × {batching.micro_steps}{again}: {tables.seconds(best.seconds)} a step as planned, "
        f"{waits:.0%} of it waiting, {best.peak_bytes / GIB:.2f} GiB; {compared}. {found.considered:,} considered; "
        f"{how}."
    )
