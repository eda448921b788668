"""The pictures and tables of docs/concepts/routes.md, from the plans of the routes.

`towpath.core.routes.sends` says which rank sends what to which, and in which step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import hypot
from pathlib import Path

import towpath
from towpath import Topology, Transport
from towpath.cli.plots import light_and_dark
from towpath.core.buffers import wire_elements
from towpath.core.placement import GroupCollective
from towpath.core.routes import COLLECTIVES, ROUTES, Grid, Group, Op, Send, parts_of, sends
from towpath.core.strategy import WITH_TRANSPORT, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.units import Range

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SHAPE, SMALL = Topology(2, 4), Topology(2, 2)
REGION_MEBIBYTES = 64
# What the links of a node carry in one unit of time, in slices: its cable (each way), and those inside it together.
CABLE, INSIDE = 1, 16
SHOWN = 8  # units of time; one route takes twice as long, and its bars leave the sheet
DRAWN = ("ring", "hierarchical", "ho-ring", "two-hop", "one-hop")  # flat is counted as a ring
assert {*DRAWN, "flat"} == set(ROUTES), "a route is new here: draw it, and give it a formula"


def plan_of(op: Op, route: str, shape: Topology) -> list[Send]:
    return list(sends(op, route, group_of(shape), nodes_of(shape), parts_in(route, shape)))


def parts_in(route: str, shape: Topology) -> int:
    """Return the number of parts that a route cuts a long slice into."""
    return parts_of(route, Grid.of(nodes_of(shape)), REGION_MEBIBYTES * 2**20 // shape.world)


def group_of(shape: Topology) -> Group:
    everyone = tuple(range(shape.world))
    return Group(everyone, everyone)


def nodes_of(shape: Topology) -> list[int]:
    return [shape.node_of(rank) for rank in range(shape.world)]


# --- the time a plan takes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    node: int
    crossing: bool  # what the node sends over its cable; else what its members send each other

    @property
    def rate(self) -> int:
        return CABLE if self.crossing else INSIDE


@dataclass(frozen=True, slots=True)
class Busy:
    """A link carries `slices`, of messages of `steps`, from `start` to `end`."""

    link: Link
    steps: frozenset[int]
    start: Fraction
    end: Fraction

    @property
    def slices(self) -> Fraction:
        return (self.end - self.start) * self.link.rate


def simulate(plan: Sequence[Send], shape: Topology) -> list[Busy]:
    """When which link is busy. A message starts once both its ends have reached its step: a member has when all that it
    sends and receives, and that is due by then, is complete. Two members' messages follow one another; the messages of
    different pairs share a link evenly. (On two nodes, what one sends is what the other receives: one count for both.)
    """
    left = {i: Fraction(1, s.parts) for i, s in enumerate(plan)}
    now, busy = Fraction(0), list[Busy]()
    while left:
        # The first step at which a member waits: for what is due by then and not complete.
        reached = dict.fromkeys(range(shape.world), max(plan[i].step for i in left))
        for i in left:
            for member in (plan[i].source, plan[i].target):
                reached[member] = min(reached[member], plan[i].until - 1)
        heads: dict[tuple[int, int], int] = {}
        for i in left:
            heads.setdefault((plan[i].source, plan[i].target), i)
        on: dict[Link, list[int]] = defaultdict(list)
        for (source, target), i in heads.items():
            if plan[i].step <= min(reached[source], reached[target]):
                on[Link(shape.node_of(source), shape.node_of(source) != shape.node_of(target))].append(i)
        lasts = min(left[i] * len(under_way) / link.rate for link, under_way in on.items() for i in under_way)
        for link, under_way in on.items():
            busy.append(Busy(link, frozenset(plan[i].step for i in under_way), now, now + lasts))
            for i in under_way:
                left[i] -= lasts * link.rate / len(under_way)
                if not left[i]:
                    del left[i]
        now += lasts
    return busy


def bars(busy: Sequence[Busy], link: Link) -> Iterator[Busy]:
    """Neighbours in time that carry the same step are one."""
    merged: Busy | None = None
    for each in (b for b in busy if b.link == link):
        if merged and merged.end == each.start and merged.steps == each.steps:
            merged = Busy(link, merged.steps, merged.start, each.end)
            continue
        if merged:
            yield merged
        merged = each
    if merged:
        yield merged


def taken(busy: Sequence[Busy]) -> Fraction:
    return max(b.end for b in busy)


def tidy(value: Fraction | float) -> str:
    """Two decimals at most."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


# --- SVG -------------------------------------------------------------------------------------------------------------

PAPER, LINE, TEXT, FAINT = "#fbfaf7", "#cfcabd", "#22252b", "#5c6168"
ON_PAPER, BOX = "#ffffff", "#f0ede4"
CROSSING, SHARING = ("#c2541b", "#9c4210"), ("#1f6f78", "#35858f")  # two shades each: neighbouring bars differ
ON_DARK = {
    PAPER: "#1d2125", LINE: "#444c56", TEXT: "#e6e8ea", FAINT: "#aab2bb", ON_PAPER: "#14171a", BOX: "#282e35",
    CROSSING[0]: "#f2925c", CROSSING[1]: "#ffb48a", SHARING[0]: "#6cc5cf", SHARING[1]: "#94dbe3",
}  # fmt: skip
FONT = "font-family=\"'DejaVu Sans', Verdana, 'Helvetica Neue', Arial, sans-serif\""


@dataclass(slots=True)
class Canvas:
    """Lines of SVG on a sheet of their own, light or dark as the reader prefers."""

    width: float
    height: float
    lines: list[str]

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, extra: str = "") -> None:
        self.lines.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{extra}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str) -> None:
        self.lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{stroke}"/>')

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = TEXT, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}>'
            f"{text}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        length = hypot(x2 - x1, y2 - y1)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        self.line(x1, y1, x2 - 6 * ux, y2 - 6 * uy, colour, ' stroke-width="2"')
        wings = [(x2 - 9 * ux - side * 4.5 * uy, y2 - 9 * uy + side * 4.5 * ux) for side in (1, -1)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *wings])
        self.lines.append(f'<polygon points="{points}" fill="{colour}"/>')

    def svg(self, title: str) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        sheet = f'<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="8"'
        text = "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img">',
                f"<title>{title}</title>",
                f'{sheet} fill="{PAPER}" stroke="{LINE}"/>',
                *self.lines,
                "</svg>\n",
            ]
        )
        return light_and_dark(text, ON_DARK)


# --- picture 1: the links over time ----------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT = 960, 130, 80
PANEL, ROW, BAR = 144, 22, 16


def draw_gathers(shape: Topology = SHAPE) -> str:
    """One panel a route: when the links of each node are busy in an all-gather, and with how much."""
    head, foot = 84, 10
    canvas = Canvas(WIDTH, head + PANEL * len(DRAWN) + foot, [])
    nodes, ranks = shape.nodes, shape.ranks_per_node
    canvas.text(24, 32, f"All-gather on {nodes} nodes of {ranks} ranks: when each link is busy", size=16, bold=True)
    canvas.text(24, 54, f"A slice is 1/{shape.world} of the region. In the bars: how many slices they carry.")
    canvas.text(
        24, 71, f"In one unit of time a cable carries {CABLE} slice each way, a node's inside {INSIDE} together."
    )
    for i, (colour, what) in enumerate(((CROSSING[0], "over a cable"), (SHARING[0], "inside a node"))):
        canvas.rect(WIDTH - 126, 44 + 17 * i, 12, 12, colour)
        canvas.text(WIDTH - 108, 54 + 17 * i, what)
    for number, route in enumerate(DRAWN):
        _panel(canvas, head + PANEL * number, route, simulate(plan_of(Op.ALL_GATHER, route, shape), shape), shape)
    return canvas.svg(f"When each link is busy in an all-gather on {nodes} nodes of {ranks} ranks, by route")


def _panel(canvas: Canvas, top: float, route: str, busy: Sequence[Busy], shape: Topology) -> None:
    links = [Link(node, crossing) for crossing in (True, False) for node in range(shape.nodes)]
    rows, end = top + 30, taken(busy)
    bottom = rows + ROW * len(links)
    canvas.line(16, top, WIDTH - 16, top, LINE)
    canvas.text(24, top + 20, f"{label_of(route)}: {tidy(end)} units of time", size=14, bold=True)
    canvas.text(WIDTH - 20, top + 20, "slices in all", "end", 11, FAINT)
    for tick in range(SHOWN + 1):
        canvas.line(_at(tick), rows, _at(tick), bottom, LINE, ' stroke-width="0.5"')
        canvas.text(_at(tick), bottom + 14, str(tick), "middle", 11, FAINT)
    for i, link in enumerate(links):
        y = rows + ROW * i
        canvas.text(LEFT - 10, y + 15, f"{'cable of' if link.crossing else 'inside'} node {link.node}", "end")
        for shade, bar in enumerate(bars(busy, link)):
            _bar(canvas, y, bar, (CROSSING if link.crossing else SHARING)[shade % 2])
        total = sum((b.slices for b in busy if b.link == link), Fraction(0))
        canvas.text(WIDTH - 20, y + 15, tidy(total), "end")
    if end <= SHOWN:
        canvas.line(_at(end), rows - 2, _at(end), bottom + 2, TEXT, ' stroke-width="1.5" stroke-dasharray="3 2"')


def _at(time: Fraction | float) -> float:
    return LEFT + float(time) * (WIDTH - LEFT - RIGHT) / SHOWN


def _bar(canvas: Canvas, y: float, bar: Busy, colour: str) -> None:
    start, end, text = _at(bar.start), _at(min(bar.end, SHOWN)), tidy(bar.slices)
    canvas.rect(start, y + (ROW - BAR) / 2, end - start, BAR, colour)
    if bar.end > SHOWN:
        canvas.text(end - 8, y + 15, f"until {tidy(bar.end)} →", "end", 11, ON_PAPER)
    if end - start >= 8 * len(text) + 2:
        canvas.text((start + end) / 2, y + 15, text, "middle", 11, ON_PAPER, bold=True)


def label_of(route: str) -> str:
    return "ring (and flat)" if route == "ring" else route


# --- picture 2: who talks to whom ------------------------------------------------------------------------------------

COLUMNS, CELL_WIDTH, CELL_HEIGHT = 3, 312, 236


def draw_steps(route: str = "ho-ring", shape: Topology = SMALL) -> str:
    """One panel a step of an all-gather: every message, and the pieces that it carries."""
    plan = plan_of(Op.ALL_GATHER, route, shape)
    steps = {step: list(posted) for step, posted in groupby(plan, key=lambda s: s.step)}
    head, rows = 84, -(-len(steps) // COLUMNS)
    canvas = Canvas(2 * 12 + COLUMNS * CELL_WIDTH, head + rows * CELL_HEIGHT + 8, [])
    world, parts = shape.world, plan[0].parts
    title = f"All-gather by {route} on {shape.nodes} nodes of {shape.ranks_per_node} ranks: who sends what"
    canvas.text(24, 32, title, size=16, bold=True)
    letters = ", ".join(f"{_letter(rank)} of rank {rank}" for rank in range(world))
    canvas.text(24, 54, f"Slices: {letters}. {_letter(0)}1 is the first of the {parts} parts of {_letter(0)}.")
    canvas.text(
        24, 71, "A step is posted once all that is due before it is complete; what is due later runs on meanwhile."
    )
    for number, (step, posted) in enumerate(steps.items()):
        row, column = divmod(number, COLUMNS)
        left, top = 12 + column * CELL_WIDTH, head + row * CELL_HEIGHT
        due = ", ".join(str(until) for until in sorted({s.until for s in posted}))
        ending = "due at the end" if int(due) > max(steps) else f"due before step {due}"
        canvas.text(left + 14, top + 20, f"step {step}", size=14, bold=True)
        canvas.text(left + CELL_WIDTH - 14, top + 20, ending, "end", 12, FAINT)
        _step(canvas, left, top + 30, posted, shape)
    return canvas.svg(title)


def _letter(slot: int) -> str:
    return chr(ord("A") + slot)


def _step(canvas: Canvas, left: float, top: float, posted: Sequence[Send], shape: Topology) -> None:
    """Draw nodes side by side, with their members one above the other, and an arrow for each direction of a pair."""
    assert shape == SMALL, "the labels are laid out for two nodes of two"
    where = {m: (left + 66 + 180 * shape.node_of(m), top + 56 + 96 * shape.local_of(m)) for m in range(shape.world)}
    for node in range(shape.nodes):
        x = left + 66 + 180 * node
        canvas.rect(x - 52, top, 104, 188, BOX, LINE)
        canvas.text(x, top + 18, f"node {node}", "middle", 12, FAINT)
    carried: dict[tuple[int, int], list[str]] = defaultdict(list)
    for s in posted:
        carried[s.source, s.target].append(f"{_letter(s.slot)}{s.part + 1}")
    for (source, target), pieces in carried.items():
        (x1, y1), (x2, y2) = where[source], where[target]
        if y1 == y2:  # between nodes: one way above, the other below
            way = 1 if x2 > x1 else -1
            canvas.arrow(x1 + 18 * way, y1 - 6 * way, x2 - 18 * way, y2 - 6 * way, CROSSING[0])
            canvas.text((x1 + x2) / 2, y1 - 12 if way > 0 else y1 + 21, " ".join(pieces), "middle", 12, CROSSING[1])
        else:
            way = 1 if y2 > y1 else -1
            canvas.arrow(x1 - 6 * way, y1 + 18 * way, x2 - 6 * way, y2 - 18 * way, SHARING[0])
            for line, piece in enumerate(pieces):
                y = (y1 + y2) / 2 + 4 + 16 * (line - (len(pieces) - 1) / 2)
                canvas.text(x1 - 12 * way, y, piece, "end" if way > 0 else "start", 12, SHARING[0])
    for member, (x, y) in where.items():
        canvas.circle(x, y, 15, ON_PAPER, TEXT)
        canvas.text(x, y + 4, str(member), "middle", 12, bold=True)


# --- tables ----------------------------------------------------------------------------------------------------------

Formula = Callable[[int, int], int]  # of N nodes and R ranks a node, in slices


@dataclass(frozen=True, slots=True)
class Carried:
    """The slices that a gather or a reduce-scatter sends on the links of each node, as text and as functions."""

    cable: str
    inside: str
    cable_slices: Formula
    inside_slices: Formula


_TWO_LEVELS = Carried("p − R", "(R − 1) · p", lambda n, r: n * r - r, lambda n, r: (r - 1) * n * r)
CARRIED = {
    "ring": Carried("p − 1", "(R − 1) · (p − 1)", lambda n, r: n * r - 1, lambda n, r: (r - 1) * (n * r - 1)),
    "hierarchical": _TWO_LEVELS,
    "ho-ring": _TWO_LEVELS,
    "two-hop": _TWO_LEVELS,
    "one-hop": Carried("R · (p − R)", "R · (R − 1)", lambda n, r: r * (n * r - r), lambda n, r: r * (r - 1)),
}


def transfer_of(op: Op, route: str, shape: Topology, elements: int) -> Transfer:
    return Transfer(
        TransferKind.GRAD_SYNC,
        Range("", "", elements, "float32"),
        GroupCollective(op, 1, (group_of(shape),)),
        Transport(route),
        shape,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(route: str) -> str:
    return "`ring`, `flat`" if route == "ring" else f"`{route}`"


def bytes_table(shape: Topology = SHAPE) -> str:
    def mebibytes(op: Op, route: str) -> list[str]:
        transfer = transfer_of(op, route, shape, REGION_MEBIBYTES * 2**20 // 4)
        return [tidy(b / 2**20) for b in (transfer.cable_bytes(0), transfer.intra_bytes / shape.nodes)]

    head = ["route", "cable, slices", "inside, slices", "cable, MiB", "inside, MiB"]
    head += ["all-reduce: cable, MiB", "all-reduce: inside, MiB"]
    return table(
        head,
        [
            [code(r), CARRIED[r].cable, CARRIED[r].inside, *mebibytes(Op.ALL_GATHER, r), *mebibytes(Op.ALL_REDUCE, r)]
            for r in DRAWN
        ],
    )


def time_table(shape: Topology = SHAPE) -> str:
    rows: list[list[str]] = []
    for route in DRAWN:
        gather = plan_of(Op.ALL_GATHER, route, shape)
        times = [tidy(taken(simulate(plan_of(op, route, shape), shape))) for op in COLLECTIVES]
        rows.append([code(route), *times, str(len({s.step for s in gather})), str(sum(s.source == 0 for s in gather))])
    return table(["route", *(op.value for op in COLLECTIVES), "steps of a gather", "messages a rank sends in it"], rows)


def wire_table(shapes: Sequence[Topology] = (SHAPE, Topology(2, 8), Topology(4, 8))) -> str:
    def share(route: str, shape: Topology) -> str:
        elements = 2**20 * shape.world
        parts = parts_in(route, shape)
        needs = wire_elements(Op.REDUCE_SCATTER, route, Grid.of(nodes_of(shape)), parts, elements)
        own, sums = (tidy(100 * n / elements) + " %" for n in needs)
        return own if not needs[1] else f"{own} ({sums})"

    head = ["route", *(f"{s.nodes} × {s.ranks_per_node}" for s in shapes)]
    return table(head, [[code(r), *(share(r, s) for s in shapes)] for r in DRAWN])


def presets_table(shape: Topology = SHAPE) -> str:
    """Presets that take the same routes for the same kinds share a row."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in towpath.strategies():
        strategy = towpath.strategy(name, shape)
        if any(strategy.transport(kind).encoding for kind in TransferKind):  # docs/concepts/codecs.md
            continue
        moving = [kind for kind in WITH_TRANSPORT if getattr(strategy.moves, kind.value)]
        routes: dict[str, list[str]] = defaultdict(list)
        for kind in moving:
            routes[strategy.transport(kind).route].append(f"`{kind.value}`")
        assert set(routes) <= {"flat", "ho-ring"}, routes
        names[", ".join(routes["ho-ring"]) or "none", ", ".join(routes["flat"]) or "none"].append(f"`{name}`")
    rows = sorted(names.items(), key=lambda item: (item[0][0] == "none", item))
    return table(["preset", "`ho-ring`", "`flat`"], [[", ".join(who), ho, flat] for (ho, flat), who in rows])


TABLES = {
    "routes-bytes": bytes_table,
    "routes-time": time_table,
    "routes-wire-buffers": wire_table,
    "routes-presets": presets_table,
}
PICTURES = {FOLDER / "routes-gather.svg": draw_gathers, FOLDER / "routes-ho-ring.svg": draw_steps}
