"""What was planned, in rows for people and as data for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from towpath.core.strategy import WITH_TRANSPORT, Strategy, TransferKind
from towpath.planner.cluster import GIB
from towpath.planner.pipelines import PricedPipeline
from towpath.planner.solver import Priced, Solver

BASELINE = "zero3"  # what a choice is compared with

HEADINGS = ("", "strategy", "P, G, OS", "batch", "step", "tokens/s", "MFU", "GiB", "GB out", "exposed")


def row(number: int, priced: Priced, solver: Solver) -> tuple[str, ...]:
    batching = priced.batching
    again = ", ckpt" if batching.checkpointing else ""
    return (
        str(number),
        title(priced),
        extents(priced.strategy),
        f"{batching.micro_batch} × {batching.micro_steps}{again}",
        seconds(priced.seconds),
        f"{tokens_per_second(priced, solver):,.0f}",
        f"{mfu(priced, solver):.1%}",
        f"{priced.peak_bytes / GIB:.1f}",
        f"{priced.inter_bytes / solver.cluster.topology.nodes / 1e9:.3g}",
        f"{sum(priced.exposed.values()) / priced.seconds:.0%}",
    )


def title(priced: Priced) -> str:
    """In a pipeline, also how many ranks have stages of it, and by which schedule."""
    if not isinstance(priced, PricedPipeline):
        return label(priced.strategy)
    layout = priced.layout
    parts = f" × {layout.tensor} tp" if layout.tensor > 1 else ""
    packed = "" if layout.compression == "none" else f", {layout.compression}"
    return f"{label(priced.strategy)} in {layout.pipeline} pp{parts}, {layout.schedule}{packed}"


def label(strategy: Strategy) -> str:
    """The name, and its codecs."""
    codecs = dict.fromkeys(w.encoding.name for k in WITH_TRANSPORT if (w := strategy.transport(k)).encoding is not None)
    return " ".join([strategy.name, *codecs])


def extents(strategy: Strategy) -> str:
    place = strategy.placement
    words = f"{place.params}, {place.grads}, {place.optimizer}"
    return words if place.backward_params is None else f"{words}; copy {place.backward_params}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def tokens_per_second(priced: Priced, solver: Solver) -> float:
    return priced.sequences(solver.cluster.topology.world) * solver.model.length / priced.seconds


def mfu(priced: Priced, solver: Solver) -> float:
    """Model-FLOPs utilisation: of what all ranks could compute, the share that goes into the model."""
    peak = solver.cluster.peak_of(solver.request.precision.compute_dtype(solver.request.own))
    return tokens_per_second(priced, solver) * solver.model.flops / (peak * solver.cluster.topology.world)


def as_json(priced: Priced, solver: Solver) -> dict[str, Any]:
    layout = {"layout": asdict(priced.layout)} if isinstance(priced, PricedPipeline) else {}
    return layout | {
        "strategy": priced.strategy.name,
        "toml": priced.strategy.to_toml(),
        "placement": {name: [e.local, e.nodes] for name, e in priced.strategy.placement.extents()},
        "transports": {
            k.value: str(priced.strategy.transport(k))
            for k in WITH_TRANSPORT
            if getattr(priced.strategy.moves, k.value)
        },
        "micro_batch": priced.batching.micro_batch,
        "micro_steps": priced.batching.micro_steps,
        "checkpointing": priced.batching.checkpointing,
        "seconds": priced.seconds,
        "tokens_per_second": tokens_per_second(priced, solver),
        "mfu": mfu(priced, solver),
        "memory_bytes": priced.memory,
        "peak_bytes": priced.peak_bytes,
        "margin_bytes": solver.request.memory - priced.peak_bytes,
        "host_memory_bytes": priced.host_memory,
        "host_copy_bytes": priced.host_copy_bytes,
        "inter_bytes": priced.inter_bytes,
        "intra_bytes": priced.intra_bytes,
        "exposed_seconds": {kind.value: found for kind, found in priced.exposed.items()},
        "in_flight_seconds": {kind.value: found for kind, found in priced.in_flight.items()},
    }


def comparison(sides: Sequence[Priced], solver: Solver) -> list[tuple[str, ...]]:
    """What each strategy does, kind by kind and part by part: its name first, then a cell for each side."""
    nodes, rows = solver.cluster.topology.nodes, list[tuple[str, ...]]()

    def add(name: str, cells: Sequence[str]) -> None:
        rows.append((name, *cells))

    add("step", [seconds(p.seconds) for p in sides])
    add("  computing", [seconds(p.computing) for p in sides])
    if any(isinstance(p, PricedPipeline) for p in sides):
        add("  idle ranks", [f"{p.idle:.0%}" if isinstance(p, PricedPipeline) else "–" for p in sides])
    for kind in TransferKind:
        if any(kind in p.in_flight for p in sides):
            add(
                f"  {kind.value}",
                [
                    f"{seconds(p.in_flight[kind])} in flight, {seconds(p.exposed.get(kind, 0.0))} exposed"
                    if kind in p.in_flight
                    else "–"
                    for p in sides
                ],
            )
    add("GB out of a node", [f"{p.inter_bytes / nodes / 1e9:.4g}" for p in sides])
    add("GB inside a node", [f"{p.intra_bytes / nodes / 1e9:.4g}" for p in sides])
    add("GiB of a rank", [f"{p.peak_bytes / GIB:.2f}" for p in sides])
    for part in dict.fromkeys(part for p in sides for part, size in p.memory.items() if size):
        add(f"  {part}", [f"{p.memory.get(part, 0) / GIB:.2f}" for p in sides])
    if any(p.host_memory for p in sides):
        add("GiB of the host, for a rank", [f"{sum(p.host_memory.values()) / GIB:.2f}" for p in sides])
        add("GB copied to and from it", [f"{p.host_copy_bytes / 1e9:.4g}" for p in sides])
    return rows


def verdict(sides: Sequence[Priced], solver: Solver) -> str:
    """One sentence: what decides between the first and the second, or what the only one waits for."""
    limit = solver.request.memory
    if len(sides) == 1:
        return _alone(sides[0], limit)
    first, second = sides
    for one, other in ((first, second), (second, first)):
        if other.peak_bytes > limit >= one.peak_bytes:
            return _does_not_fit(other, limit)
    if min(first.peak_bytes, second.peak_bytes) > limit:
        return f"Neither fits into the {limit / GIB:.1f} GiB of a rank."
    quicker, slower = (first, second) if first.seconds <= second.seconds else (second, first)
    if slower.seconds - quicker.seconds < 0.005 * quicker.seconds:
        return "They take the same time, within half a percent."
    kinds = set(quicker.exposed) | set(slower.exposed)
    gain = {k: slower.exposed.get(k, 0.0) - quicker.exposed.get(k, 0.0) for k in kinds}
    most = max(gain, key=lambda kind: gain[kind], default=None)
    why = ""
    if most is not None and gain[most] > 0:
        why = f": it waits {seconds(gain[most])} less for {most.value} in a step"
    return f"{quicker.strategy.name} is {slower.seconds / quicker.seconds:.2f} times as fast{why}."


def _alone(priced: Priced, limit: int) -> str:
    if priced.peak_bytes > limit:
        return _does_not_fit(priced, limit)
    waits = sum(priced.exposed.values())
    if waits < 0.005 * priced.seconds:
        return f"{priced.strategy.name} waits for nothing: what it sends is hidden behind what it computes."
    most = max(priced.exposed, key=lambda kind: priced.exposed[kind])
    return (
        f"{priced.strategy.name} waits {seconds(waits)} of {seconds(priced.seconds)}, the longest for {most.value} "
        f"({seconds(priced.exposed[most])}). Name a second strategy to compare it with."
    )


def _does_not_fit(priced: Priced, limit: int) -> str:
    over = (priced.peak_bytes - limit) / GIB
    part = max(priced.memory, key=lambda name: priced.memory[name])
    return (
        f"{priced.strategy.name} does not fit: {over:.2f} GiB more than the {limit / GIB:.1f} GiB of a rank, "
        f"most of it {part} ({priced.memory[part] / GIB:.2f} GiB)."
    )
