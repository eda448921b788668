"""The planner's results as rows and sentences for people, and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from towpath.core.formats import in_bits
from towpath.core.protection import Survives
from towpath.core.strategy import EXACT_KINDS, GRADIENTS, WITH_TRANSPORT, Offload, Strategy, TransferKind
from towpath.core.transport import SMALLEST_BYTES
from towpath.plan.hardware import GIB
from towpath.plan.pipelines import PipelinePrediction
from towpath.plan.request import Prediction
from towpath.plan.solver import Solver
from towpath.plan.transfer_costs import move_shapes

BASELINE = "zero3"  # the strategy that a choice is compared with
# What JSON calls as a prediction does.
_SAME_IN_JSON = (
    *("seconds", "peak_bytes", "host_copy_bytes"),
    *("inter_bytes", "intra_bytes", "expected_inter_bytes", "expected_intra_bytes"),
)
_OWN_IN_JSON = ("toml", "placement", "transports", "survives", "protection")  # only steps of Towpath's have these
_WORTH_TELLING = 0.02  # the share of a step in which the device waits for launches

HEADINGS = ("", "strategy", "P, G, OS", "batch", "step", "tokens/s", "MFU", "GiB", "GB out", "exposed")
WRAPPER_HEADINGS = ("PyTorch's own", *HEADINGS[3:])


def row(number: int, step: Prediction, solver: Solver) -> tuple[str, ...]:
    """Return one row of a ranking, with a cell for each of `HEADINGS`."""
    return (
        str(number),
        title(step),
        extents(step.strategy),
        _batch(step),
        seconds(step.seconds),
        f"{tokens_per_second(step, solver):,.0f}",
        f"{mfu(step, solver):.1%}",
        f"{step.peak_bytes / GIB:.1f}",
        _gigabytes(step.inter_bytes, step.saved_inter_bytes, solver.cluster.topology.nodes, 3),
        f"{step.waiting / step.seconds:.0%}",
    )


def wrapper_row(step: Prediction, solver: Solver) -> tuple[str, ...]:
    """Return the row of a step of PyTorch's own, with a cell for each of `WRAPPER_HEADINGS`."""
    fits = "" if step.peak_bytes <= solver.request.memory else ", does not fit"
    return (step.strategy.name + fits, *row(0, step, solver)[3:])


def wrapper_as_json(step: Prediction, solver: Solver) -> dict[str, Any]:
    """Return a step of PyTorch's own as data for JSON. `strategy` is its name, and no strategy of Towpath's."""
    return {k: v for k, v in as_json(step, solver).items() if k not in _OWN_IN_JSON}


def _batch(step: Prediction) -> str:
    """Return the micro-batch, the micro-steps, and whether blocks are recomputed."""
    batching = step.batching
    return f"{batching.micro_batch} × {batching.micro_steps}{', ckpt' if batching.checkpointing else ''}"


def title(step: Prediction) -> str:
    """Return the strategy's name and codecs. For a pipeline, add its number of ranks and its schedule."""
    if not isinstance(step, PipelinePrediction):
        return label(step.strategy)
    layout = step.layout
    parts = f" × {layout.tensor} tp" if layout.tensor > 1 else ""
    packed = "" if layout.compression == "none" else f", {layout.compression}"
    return f"{label(step.strategy)} in {layout.pipeline} pp{parts}, {layout.schedule}{packed}"


def label(strategy: Strategy) -> str:
    """Return the strategy's name, its codecs, exact transports and snapshots, and how often islands synchronize."""
    codecs = dict.fromkeys(w.encoding.name for k in WITH_TRANSPORT if (w := strategy.transport(k)).encoding is not None)
    inner = " ".join([strategy.name, *codecs, *(["exact"] if strategy.is_exact else [])])
    inner += f" protect={strategy.protect.every}" if strategy.protect else ""
    if (outer := strategy.outer) is None:
        return inner
    codec = f" {outer.transport.codec}".partition(":")[0] if outer.transport.codec != "none" else ""
    return f"{inner}, every {outer.every}" + (f"+{outer.delay}" if outer.delay else "") + codec


def extents(strategy: Strategy) -> str:
    """Return the extents of parameters, gradients and optimizer states."""
    placement = strategy.placement
    words = f"{placement.params}, {placement.grads}, {placement.optimizer}"
    return words if placement.backward_params is None else f"{words}; copy {placement.backward_params}"


def seconds(value: float) -> str:
    """Return a duration with three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{round(value * 1e3, 4):.3g} ms"


def tokens_per_second(step: Prediction, solver: Solver) -> float:
    """Return the tokens per second of all ranks."""
    return step.sequences(solver.cluster.topology.world) * solver.model.length / step.seconds


def launches(steps: Sequence[Prediction]) -> list[str]:
    """Return sentences about steps that the thread that trains holds up, because it cannot launch them fast enough.

    The wait at the start of a step, before anything has been launched, is not worth a sentence.
    """
    found: list[str] = []
    if late := [step for step in steps if step.is_launch_bound]:
        who = "All" if len(late) == len(steps) else f"{len(late)} of {len(steps)}, ranked last,"
        found.append(
            f"{who} launch for longer than they compute: {title(late[0])} launches for {seconds(late[0].launching)} "
            f"and computes for {seconds(late[0].computing)}. Larger micro-batches help."
        )
    if held_up := [s for s in steps if not s.is_launch_bound and s.unlaunched > _WORTH_TELLING * s.seconds]:
        first = held_up[0]
        found.append(
            f"{title(first)}: of {seconds(first.seconds)}, the device waits {seconds(first.unlaunched)} for the thread "
            f"that trains, which launches for {seconds(first.launching)}."
        )
    return found


def exact_bits(steps: Sequence[Prediction], solver: Solver) -> list[str]:
    """Return a sentence about the bits that exact messages of these steps are expected to take, if there are any."""
    compute, reduce, _ = solver.request.precision.dtypes(solver.request.own)
    form = solver.cluster.hardware.form
    shares: dict[tuple[str, str], float] = {}
    for step in steps:
        shapes = move_shapes(step.strategy.placement, step.strategy.topology)
        for kind in EXACT_KINDS if step.saved_inter_bytes else ():
            dtype, transport = reduce if kind in GRADIENTS else compute, step.strategy.transport(kind)
            for shape in shapes[kind]:
                large = SMALLEST_BYTES * shape.grid.nodes * shape.grid.width
                coding = transport.coding(shape.op, shape.grid, large, dtype, form)
                shares |= {} if coding is None else {coding: coding.share}
    return [f"Exact transports lose nothing. Expected on paper: {in_bits(shares)}."] if shares else []


def _gigabytes(most: int, saved: int, nodes: int, digits: int) -> str:
    """Return the bytes of a node in GB. Where exact transports save some, the expected ones and the upper bound."""
    every = f"{most / nodes / 1e9:.{digits}g}"
    return f"{(most - saved) / nodes / 1e9:.{digits}g} of {every}" if saved else every


def mfu(step: Prediction, solver: Solver) -> float:
    """Return the model FLOPs utilization: the share of the ranks' peak that goes into the model."""
    peak = solver.cluster.peak_of(solver.request.compute_dtype)
    return tokens_per_second(step, solver) * solver.model.flops / (peak * solver.cluster.topology.world)


def as_json(step: Prediction, solver: Solver) -> dict[str, Any]:
    """Return a prediction as data for JSON."""
    staged = isinstance(step, PipelinePrediction)
    protected = [{"buddy": found} if step.strategy.protect else {} for found in step.buddy]
    return {
        **({"layout": asdict(replace(step.layout, strategy=step.strategy.name))} if staged else {}),
        "strategy": step.strategy.name,
        "toml": step.strategy.to_toml(),
        "placement": {name: [e.local, e.nodes] for name, e in step.strategy.placement.extents()},
        "transports": {
            k.value: str(step.strategy.transport(k)) for k in WITH_TRANSPORT if getattr(step.strategy.moves, k.value)
        },
        "micro_batch": step.batching.micro_batch,
        "micro_steps": step.batching.micro_steps,
        "checkpointing": step.batching.checkpointing,
        "tokens_per_second": tokens_per_second(step, solver),
        "mfu": mfu(step, solver),
        "memory_bytes": step.memory,
        "margin_bytes": solver.request.memory - step.peak_bytes,
        "host_memory_bytes": step.host_memory,
        "exposed_seconds": {kind.value: found for kind, found in step.exposed.items()} | protected[1],
        "in_flight_seconds": {kind.value: found for kind, found in step.in_flight.items()} | protected[0],
        "launching_seconds": step.launching,
        "unlaunched_seconds": step.unlaunched,
        "survives": survives(step, solver),
        "protection": protection_as_json(step, solver),
        **{name: getattr(step, name) for name in _SAME_IN_JSON},
    }


def survives(step: Prediction, solver: Solver) -> Survives:
    """Return whether training survives a lost node with `protect`. Stages of a pipeline have no buddies."""
    found = solver.protection(step.strategy).survives
    staged = isinstance(step, PipelinePrediction)
    return Survives.NO if staged and found is Survives.WITH_BUDDIES else found


def protection_as_json(step: Prediction, solver: Solver) -> dict[str, Any] | None:
    """Return what surviving a lost node takes, as data for JSON, or None if it is not possible."""
    if survives(step, solver) is Survives.NO or isinstance(step, PipelinePrediction):
        return None
    found = solver.protection(step.strategy)
    return {
        "every": found.protect.every,
        "buddy_bytes_per_step": found.step_bytes,
        "host_memory_bytes_per_node": found.host_bytes,
        "heal_seconds": found.heal_seconds(solver.cluster.hardware.inter.rate),
    }


def protection(steps: Sequence[Prediction], solver: Solver) -> Iterator[str]:
    """Yield sentences about which steps survive a lost node, by their numbers, and what that takes with the first."""
    found = [survives(step, solver) for step in steps]
    if len(steps) > 1:
        numbers = {kind: [str(n) for n, each in enumerate(found, 1) if each is kind] for kind in Survives}
        told = [f"{', '.join(mine)} {kind.value}" for kind, mine in numbers.items() if mine]
        yield f"Survives a lost node: {'; '.join(told)}."
    if (facts := protection_as_json(steps[0], solver)) is not None:
        sent, memory = facts["buddy_bytes_per_step"] / 1e9, facts["host_memory_bytes_per_node"] / GIB
        told = f"sends {sent:.3g} GB a step from each node to its buddy" if sent else "sends nothing"
        yield (
            f"With protect={facts['every']}, {steps[0].strategy.name} {told}, takes {memory:,.0f} GiB of a node's "
            f"memory, and heals in about {facts['heal_seconds']:.0f} seconds."
        )


def compare(steps: Sequence[Prediction], solver: Solver) -> list[tuple[str, ...]]:
    """Compare predicted steps, transfer by transfer and part by part."""
    nodes, rows = solver.cluster.topology.nodes, list[tuple[str, ...]]()

    def add(name: str, cells: Iterable[str]) -> None:
        rows.append((name, *cells))

    add("P, G, OS", [extents(p.strategy) for p in steps])
    add("survives a node", [survives(p, solver).value for p in steps])
    add("batch", [_batch(p) for p in steps])
    add("step", [seconds(p.seconds) for p in steps])
    add("  tokens/s, MFU", [f"{tokens_per_second(p, solver):,.0f}, {mfu(p, solver):.1%}" for p in steps])
    add("  computing", [seconds(p.computing) for p in steps])
    if any(isinstance(p, PipelinePrediction) for p in steps):
        add("  idle ranks", [f"{p.idle:.0%}" if isinstance(p, PipelinePrediction) else "–" for p in steps])
    for kind in [kind for kind in TransferKind if any(kind in p.in_flight for p in steps)]:
        each = [(p.in_flight.get(kind), p.exposed.get(kind, 0.0)) for p in steps]
        add(
            f"  {kind.value}",
            ("–" if ran is None else f"{seconds(ran)} in flight, {seconds(late)} exposed" for ran, late in each),
        )
    if any(p.strategy.protect for p in steps):
        add(
            "  buddy",
            [f"{seconds(sent)} in flight, {seconds(late)} exposed" for sent, late in (p.buddy for p in steps)],
        )
    if any(p.unlaunched > _WORTH_TELLING * p.seconds for p in steps):
        add("  launching", [f"{seconds(p.launching)} of the thread, {seconds(p.unlaunched)} exposed" for p in steps])
    add("GB out of a node", [_gigabytes(p.inter_bytes, p.saved_inter_bytes, nodes, 4) for p in steps])
    add("GB inside a node", [_gigabytes(p.intra_bytes, p.saved_intra_bytes, nodes, 4) for p in steps])
    add("GiB of a rank", [f"{p.peak_bytes / GIB:.2f}" for p in steps])
    for part in dict.fromkeys(part for p in steps for part, size in p.memory.items() if size):
        add(f"  {part}", [f"{p.memory.get(part, 0) / GIB:.2f}" for p in steps])
    if any(p.host_memory for p in steps):
        add("GiB of the host, for a rank", [f"{sum(p.host_memory.values()) / GIB:.2f}" for p in steps])
        add("GB copied to and from it", [f"{p.host_copy_bytes / 1e9:.4g}" for p in steps])
    return rows


def explain(steps: Sequence[Prediction], solver: Solver) -> str:
    """Explain in one sentence what makes one of two steps faster, or what a single step waits for."""
    for step in steps:
        if step.peak_bytes > solver.request.memory:
            return _does_not_fit(step, solver)
    if len(steps) == 1:
        return f"{title(steps[0])} waits {seconds(steps[0].waiting)} of {seconds(steps[0].seconds)}."
    faster, slower = sorted(steps, key=lambda step: step.seconds)
    if slower.seconds - faster.seconds < 0.005 * faster.seconds:
        return "They take the same time, within half a percent."
    gain = {kind: waits - faster.exposed.get(kind, 0.0) for kind, waits in slower.exposed.items()}
    most = max(gain, key=lambda kind: gain[kind], default=None)
    why = f": it waits {seconds(gain[most])} less for {most.value} in a step" if most and gain[most] > 0 else ""
    return f"{title(faster)} is {slower.seconds / faster.seconds:.2f} times as fast{why}."


def _does_not_fit(step: Prediction, solver: Solver) -> str:
    limit, hint = solver.request.memory, ""
    for offload in () if isinstance(step, PipelinePrediction) else further_offloads(solver, step.strategy.offload):
        needed = solver.predict_memory(replace(step.strategy, offload=offload), step.batching)
        if not hint and sum(needed.values()) <= limit:
            hint = f" With --offload {offload} it would fit."
    return (
        f"{step.strategy.name} does not fit: {(step.peak_bytes - limit) / GIB:.2f} GiB more than the "
        f"{limit / GIB:.1f} GiB of a rank. It needs {parts(step.memory)}.{hint}"
    )


def parts(memory: Mapping[str, int]) -> str:
    """Return the parts of a rank's memory that make up at least a tenth of it, the largest first."""
    named = sorted(memory.items(), key=lambda part: -part[1])
    least = sum(memory.values()) / 10
    return ", ".join(f"{size / GIB:.1f} GiB for {name}" for name, size in named if size >= least)


def further_offloads(solver: Solver, present: Offload | None) -> list[Offload]:
    """Return the offloads that move more to the host's memory than `present` does.

    There are none if the cluster's ranks have no device, or its description lacks the host's memory.
    """
    if solver.cluster.hardware.host_memory is None:
        return []
    moved = set(present.split("+")) if present else set[str]()
    return [offload for offload in get_args(Offload) if moved < set(offload.split("+"))]
