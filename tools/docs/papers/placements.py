"""The placements of Lins by its own sum (equations 1 to 7), and single collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tools.docs.papers.lines import Line, Table, ticked
from tools.docs.papers.settings import BLOCKS, MATRICES, cluster, model_of
from tools.docs.papers.speedups import LINS, MEASURED_BY_PARO, lins_setting
from towpath.core.placement import Placement, legal_placements
from towpath.core.routes import Form, Grid, Op, Route
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.plan.hardware import GIB, Cluster, Hardware
from towpath.plan.model import activation_bytes
from towpath.plan.request import BF16
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone

# Of a GPU's memory, what communication and passing values take (D_tmp). The paper gives no figure.
TEMPORARY_GIB, OTHERS_GIB = 12, (0, 4, 8, 16)
# Placements whose sums differ by less are equally good.
EQUAL = 0.005


@dataclass(frozen=True)
class Placed:
    """`communication`: seconds a step, the sum that Lins minimises. `gib`: of a rank, states and activations."""

    placement: Placement
    communication: float
    gib: float

    def __str__(self) -> str:
        place = self.placement
        return f"{place.params}, {place.grads}, {place.optimizer}: {self.communication:.3f} s, {self.gib:.0f} GiB"


def lins_placements(name: str) -> list[Placed]:
    """Return all placements that fit if nothing is reserved, the cheapest first by equation 1.

    A step on 1,024 GPUs has one micro-step, so that gradients are whole when it ends, wherever they are kept later: G
    takes what P takes. Gradients are summed over all ranks that hold the same, and each rank drops what it does not
    need. New parameters are broadcast by each rank that has some.
    """
    setting = lins_setting(name)
    here, checkpointing = setting.cluster, setting.checkpointing
    topology, hardware = here.topology, here.hardware
    blocks, matrices = model_of(name, 4096, BLOCKS), model_of(name, 4096, MATRICES)
    kept = activation_bytes(blocks, BF16, 4096, checkpointing)
    found: list[Placed] = []
    for placement in legal_placements(topology):
        params, optimizer = placement.params, placement.optimizer
        held = blocks.parameters * (4 / params.size + 12 / optimizer.size) + kept
        if placement.grads != params or held > here.memory:
            continue
        shapes = move_shapes(placement, topology)
        total = sum(
            count * _alone(shape, unit.numel, hardware)
            for kind, count in ((TransferKind.GATHER, 2), (TransferKind.REDUCE, 1))
            for unit in matrices.units
            for shape in shapes[kind]
        )
        grid = Grid(topology.nodes // params.nodes, topology.ranks_per_node // params.local)
        alike = MoveShape(Op.ALL_REDUCE, params.size, grid, params.nodes)
        total += sum(_alone(alike, unit.numel, hardware) for unit in blocks.units)
        total += sum(_broadcasts(shape, blocks.parameters, hardware) for shape in shapes[TransferKind.PARAM_SYNC])
        found.append(Placed(placement, total, held / GIB))
    return sorted(found, key=lambda placed: placed.communication)


def _alone(
    move: MoveShape, numel: int, hardware: Hardware, route: Route = "flat", form: Form = Form.COLLECTIVES
) -> float:
    shape = TransferShape.of_move(move, Transport(route), numel, "bfloat16", form)
    return seconds_alone(phase_costs(shape, hardware), hardware)


def _broadcasts(move: MoveShape, numel: int, hardware: Hardware) -> float:
    """Return the seconds of one broadcast by each member of a group, one after the other, along a ring.

    A broadcast carries a slice through the group. An all-gather carries all of them but the member's own at once.
    """
    moved, waited, members = 0.0, 0.0, move.grid.nodes * move.grid.width
    shape = TransferShape.of_move(move, Transport("flat"), numel, "bfloat16", Form.COLLECTIVES)
    for cost in phase_costs(shape, hardware):
        moved += max(need / hardware.capacities[name] for name, need in cost.needs.items())
        waited += cost.seconds
    return members * (moved / (members - 1) + waited)


def _placements() -> Iterator[Line]:
    def cells(name: str, placement: Placement) -> list[str]:
        everything, there = lins_placements(name), lins_setting(name).cluster.memory / GIB
        own = next(p for p in everything if _is(p.placement, placement))
        places, best = dict[int, str](), own
        for reserved in (TEMPORARY_GIB, *OTHERS_GIB):
            placed = [p for p in everything if p.gib <= there - reserved]
            cheaper = sum(p.communication < own.communication * (1 - EQUAL) for p in placed)
            places[reserved] = f"{cheaper + 1}" if own in placed else "–"
            if reserved == TEMPORARY_GIB:
                equal = sum(abs(p.communication / own.communication - 1) <= EQUAL for p in placed) - 1
                places[reserved] += f" of {len(placed)}" + f", {equal} equal" * bool(equal)
                best = placed[0]
        first, *others = places.values()
        return [str(own), first, ", ".join(others), str(best)]

    for name, (system, *_) in LINS.items():
        note = " ¹" if name == "llama-30b" else ""
        yield Line((f"{name}{note}",), partial(cells, name, system.preset))


def _is(one: Placement, other: Placement) -> bool:
    return (one.params, one.optimizer) == (other.params, other.optimizer)


def collective_seconds(route: Route, here: Cluster, gigabytes: float) -> float:
    """Return the seconds of an all-gather over all ranks, of so much on each at its end.

    The ring is the backend's own. HO-Ring is made of messages, and hierarchical gathers of collectives over columns and
    rows, as in the papers.
    """
    topology = here.topology
    move = MoveShape(Op.ALL_GATHER, 1, Grid(topology.nodes, topology.ranks_per_node), 1)
    form = Form.MESSAGES if route == "ho-ring" else Form.COLLECTIVES
    return _alone(move, int(gigabytes * 5e8), here.hardware, route, form)


def _collectives() -> Iterator[Line]:
    def cells(route: Route, here: Cluster, gigabytes: float, printed: float) -> list[str]:
        ratio = collective_seconds(route, here, gigabytes) / collective_seconds("ring", here, gigabytes)
        return [ticked(ratio, printed)]

    paro, sheet, p3dn = cluster("dgx-a100-800g", 2, MEASURED_BY_PARO), cluster("dgx-a100-800g", 2), cluster("p3dn", 2)
    runs: tuple[tuple[str, str, float, Route, Cluster, float], ...] = (
        ("PaRO", "HO-Ring / ring, 2 × 8 A100, 100 GB in all", 309 / 459, "ho-ring", paro, 100 / 16),
        ("PaRO", "the same, 85 GB/s between nodes", 309 / 459, "ho-ring", sheet, 100 / 16),
        ("MiCS", "hierarchical / vanilla, 2 × 8 V100, 128 MB", 0.721, "hierarchical", p3dn, 0.128),
    )
    for paper, what, printed, route, here, size in runs:
        yield Line((paper, what, f"{printed:.2f}"), partial(cells, route, here, size, printed))


def tables() -> dict[str, Table]:
    others = f"place, with {', '.join(map(str, OTHERS_GIB))} GiB"
    return {
        "papers-placements": Table(
            ("model", "P, G, OS of Table III", "place", others, "the cheapest by the same sum"), tuple(_placements())
        ),
        "papers-collectives": Table(("paper", "time of an all-gather", "printed", "simulated"), tuple(_collectives())),
    }
