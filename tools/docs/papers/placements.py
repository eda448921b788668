"""The placements of Lins by its own sum (equations 1 to 7), and single collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tools.docs.papers.lines import Line
from tools.docs.papers.settings import BLOCKS, LINS, MATRICES, cluster, lins_setting, model_of
from towpath.core.placement import Placement, legal_placements
from towpath.core.routes import Form, Grid, Op, Route
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.plan.hardware import GIB, Hardware
from towpath.plan.model import activation_bytes
from towpath.plan.request import BF16
from towpath.plan.transfer_costs import MoveShape, TransferShape, move_shapes, phase_costs, seconds_alone

# Of a GPU's memory, what communication and passing values take (D_tmp). The paper gives no figure.
RESERVED_GIB = 0, 12
# Placements whose sums differ by less are equally good.
EQUAL = 0.005


@dataclass(frozen=True)
class Placed:
    """`communication`: seconds a step, the sum that Lins minimises. `gib`: of a rank, states and activations."""

    placement: Placement
    communication: float
    gib: float


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


def _place(name: str, placement: Placement) -> list[str]:
    """Return the place of a placement by the sum among those that fit, with each reserved amount of memory."""
    everything, there = lins_placements(name), lins_setting(name).cluster.memory / GIB
    own = next(p for p in everything if _is(p.placement, placement))
    places: list[str] = []
    for reserved in RESERVED_GIB:
        placed = [p for p in everything if p.gib <= there - reserved]
        cheaper = sum(p.communication < own.communication * (1 - EQUAL) for p in placed)
        places.append(f"{cheaper + 1} of {len(placed)}" if own in placed else "–")
    return ["–", ", ".join(places)]


def _is(one: Placement, other: Placement) -> bool:
    return (one.params, one.optimizer) == (other.params, other.optimizer)


def lines() -> Iterator[Line]:
    """Yield the placements of Table III."""
    for name, (system, _) in LINS.items():
        placement = system.preset
        assert isinstance(placement, Placement)
        reserved = ", ".join(map(str, RESERVED_GIB))
        what = f"place of P {placement.params}, OS {placement.optimizer}, {name}, with {reserved} GiB reserved"
        yield Line(("Table III", what, "1"), partial(_place, name, placement))


def gather_line(place: str, what: str, printed: str, route: Route) -> Line:
    """Return the time of an all-gather on two nodes by a route, over that of the backend's ring.

    HO-Ring is made of messages, and hierarchical gathers of collectives over columns and rows, as in the papers.
    """

    def cells() -> list[str]:
        is_paro = route == "ho-ring"
        here = cluster("dgx-a100-800g", 2, 56) if is_paro else cluster("p3dn", 2)
        move = MoveShape(Op.ALL_GATHER, 1, Grid(2, here.topology.ranks_per_node), 1)
        numel = int((100 / 16 if is_paro else 0.128) * 5e8)  # of 16 bits, for all of 100 GB, or for 128 MB
        form = Form.MESSAGES if is_paro else Form.COLLECTIVES
        ring = _alone(move, numel, here.hardware, "ring")
        return ["–", f"{_alone(move, numel, here.hardware, route, form) / ring:.2f}"]

    return Line((place, what, printed), cells)
