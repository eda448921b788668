"""strategy="auto": every rank gets the strategy that the planner ranks first for the running cluster.

The cluster is measured once. The profile is kept, and used again if a message still takes what the profile says. Only
rank 0 plans. The other ranks receive its answer, or its error.

The passes of the model's units are timed. Of equal units one is timed, with random values and inputs. Never more than
one unit is in memory, and the model, which may be on the meta device, stays as it is. The root unit runs without the
other units. Ranks that share processor cores measure at the same time, because they also evict one another's caches in
a step. The time that a rank waits for a core does not count. The simulator predicts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.strategy import Strategy
from towpath.engine.layout import UnitLayout, torch_dtype
from towpath.errors import ConfigError, PlanError
from towpath.outer.proposal import OuterPlanner, saves_enough
from towpath.plan import tables
from towpath.plan.cluster_probe import device_of_job, probe, still_holds
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.live import ModuleCall, Traced, describe_by_parameters, trace
from towpath.plan.model import LinearSeconds, MeasuredPasses, Model, ModelUnit
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
    topology.check_equal('strategy="auto"')
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
        return profile_model(model, layouts, lambda _: workload.inputs, [1], workload.tokens, device, precision)

    choice = choose(groups, topology, describe, request, workload.profile)
    if groups.rank == 0:
        sys.stderr.write(f"towpath: {choice.why}\n")
    return choice.strategy


def _kept_profile(groups: Groups, topology: Topology, path: str | Path) -> tuple[Profile | None, Path]:
    """Return the cluster's profile and its file. Rank 0 reads it for all ranks."""
    hosts = groups.all_gather_objects(os.uname().nodename)
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
        if outer is not None and saves_enough(outer, best):
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
    if usual.peak_bytes > solver.request.memory:
        return f"{tables.BASELINE} would not fit{considered}"
    if usual.seconds <= best.seconds:
        return f"nothing found was faster{considered}"
    return f"{tables.BASELINE} would take {tables.seconds(usual.seconds)}{considered}"


# The time of a model's units ------------------------------------------------------------------------------------------

_REPEATS = 5, 20  # the fewest and the most repetitions
_SECONDS = 0.5  # for one kind of unit, if the number of repetitions allows it
# For the calling thread: nanoseconds on a core, nanoseconds of waiting for one, and times that it got one.
_SCHEDULED = Path("/proc/thread-self/schedstat")
_SCALE = 0.02  # of random values: that of new weights

# The seconds of a forward pass, of a backward pass, and of the processor in both.
PassSeconds = tuple[float, float, float]


def profile_model(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    inputs: Callable[[int], Sequence[Any]],
    sizes: Sequence[int],
    length: int,
    device: torch.device,
    precision: Precision,
) -> Model:
    """Describe a model for the planner, with measured times.

    `inputs` returns the model's inputs for some number of sequences of `length` tokens. `sizes` are the numbers of
    sequences that are measured. `layouts` are the units, as `lay_out` returns them.
    """
    own = next((bucket.dtype for layout in layouts for bucket in layout.spec.buckets), "float32")
    dtype = torch_dtype(precision.compute_dtype(own))
    taken: list[list[PassSeconds]] = []
    described: tuple[ModelUnit, ...] = ()
    for size in sizes:
        traced = trace(model, layouts, inputs(size), precision, device)
        described = traced.units(layouts, size * length)
        taken.append(_time_units(model, layouts, traced, device, dtype))
    tokens = [size * length for size in sizes]
    units: list[ModelUnit] = []
    for unit, *rows in zip(described, *taken, strict=True):
        forward, backward, worked = zip(*rows, strict=True)
        took = forward[-1] + backward[-1]  # zero for a unit that the inputs do not reach
        share = min(1.0, worked[-1] / took) if took else 1.0
        measured = MeasuredPasses(line_through(tokens, forward), line_through(tokens, backward), share)
        units.append(replace(unit, measured=measured))
    return Model(type(model).__name__, length, tuple(units))


def line_through(tokens: Sequence[int], seconds: Sequence[float]) -> LinearSeconds:
    """Return the line through the first and the last point.

    It starts at zero if there is only one point, or if the two points give a negative slope or offset.
    """
    rise = (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]) if len(tokens) > 1 else 0.0
    fixed = seconds[0] - rise * tokens[0]
    return LinearSeconds(fixed, rise) if rise > 0 and fixed >= 0 else LinearSeconds(0.0, seconds[-1] / tokens[-1])


def _time_units(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> list[PassSeconds]:
    seen: dict[object, PassSeconds] = {}
    found: list[PassSeconds] = []
    for layout in layouts:
        modules = [m for m in layout.modules if m in traced.calls] if layout.name else []
        key = (layout.spec.buckets, layout.spec.root, tuple(map(type, modules)), traced.flops[layout.name])
        if key not in seen:
            try:
                # The random numbers of the user's program stay the same.
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    if layout.name:
                        each = [_time(m, m.named_parameters(), traced.calls[m], device, dtype) for m in modules]
                    else:
                        each = [_time_root(model, layouts, traced, device, dtype)]
            except Exception as error:
                what = f"unit {layout.name}" if layout.name else "the root"
                raise ConfigError(
                    f"{what} cannot be run by itself, with inputs like its own: {error}. Leave out Workload(inputs=…), "
                    "so that nothing is measured of the model, or name a strategy."
                ) from error
            forward, backward, worked = (sum(each_of) for each_of in zip((0.0, 0.0, 0.0), *each, strict=True))
            seen[key] = (forward, backward, worked)
        found.append(seen[key])
    return found


def _time_root(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> PassSeconds:
    # A model may read the parameters of leaves without calling them.
    near = [layout for layout in layouts if layout.spec.root or layout.spec.leaf]
    own = {id(place.parameter) for layout in near for bucket in layout.buckets for place in bucket.places}
    mine = [(name, p) for name, p in model.named_parameters() if id(p) in own]
    others = [m for layout in layouts[1:] for m in layout.modules if m in traced.calls]
    with _without_computing(others, traced, device, dtype):
        return _time(model, mine, traced.calls[model], device, dtype)


@contextmanager
def _without_computing(
    modules: Sequence[nn.Module], traced: Traced, device: torch.device, dtype: torch.dtype
) -> Generator[None]:
    """Replace the forward of each module by one that returns outputs of the right shape and computes nothing."""

    def replacement(call: ModuleCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            entered = {t.shape: t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}

            def like(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                # The output depends on an input where it can, so that the gradient reaches the embedding.
                return entered[value.shape] * 1 if value.shape in entered else _random_like(value, device, dtype)

            return tree_map(like, call.output)

        return forward

    before = {module: module.__dict__.get("forward") for module in modules}
    for module in modules:
        module.forward = replacement(traced.calls[module])
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _time(
    module: nn.Module,
    parameters: Iterable[tuple[str, nn.Parameter]],
    call: ModuleCall,
    device: torch.device,
    dtype: torch.dtype,
) -> PassSeconds:
    def random(value: Any) -> Any:
        return _random_like(value, device, dtype) if isinstance(value, torch.Tensor) else value

    values = {name: random(value) for name, value in (*parameters, *module.named_buffers())}
    args, kwargs = tree_map(random, call.args), tree_map(random, call.kwargs)
    forwards: list[float] = []
    backwards: list[float] = []

    def run() -> None:
        began = _now(device)
        output = functional_call(module, values, args, kwargs)
        between = _now(device)
        roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        forwards.append(between - began)
        backwards.append(_now(device) - between)

    run()  # the first run fills caches
    worked, began = time.process_time(), time.perf_counter()
    least, most = _REPEATS
    while len(forwards) < least or (len(forwards) < most and time.perf_counter() - began < _SECONDS):
        run()
    share = 1.0  # where a device computes, it works all the time
    if device.type == "cpu":
        worked = (time.process_time() - worked) / torch.get_num_threads()
        took = sum(forwards[1:]) + sum(backwards[1:])
        share = min(1.0, worked / took) if took else 1.0
    forward, backward = median(forwards[1:]), median(backwards[1:])
    return forward, backward, share * (forward + backward)


def _random_like(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if value.is_floating_point():
        made = torch.randn(value.shape, device=device, dtype=dtype) * _SCALE
        return made.requires_grad_(value.requires_grad)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, device=device, dtype=torch.bool)
    return torch.zeros(value.shape, device=device, dtype=value.dtype)  # an index that is always valid


def _now(device: torch.device) -> float:
    """Return the time of a clock that stands still while this thread waits for a core."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.perf_counter() - (_waited_for_cores() or 0.0)


def _waited_for_cores() -> float | None:
    """Return the seconds that this thread has waited for a core, or None if the kernel does not report them."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def ranks_measure_together(device: torch.device) -> bool:
    """Return whether all ranks may measure at once. It needs a kernel that reports how long threads wait for cores."""
    return device.type != "cpu" or _waited_for_cores() is not None
