"""Strategies by label, so that a test's id says which one it ran: zero3, mics:2x1, zero3@ring, lins:1x1|2x1|2x2,
mics weights=int8 gradients=int4."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import towpath
from towpath import Extent, Topology
from towpath.core.placement import legal_placements
from towpath.core.routes import ROUTES

if TYPE_CHECKING:
    import pytest  # tools/gpu.py runs without it

# Presets with codecs: what they train is near what one process trains, not equal to it (tests/ranks/test_codecs.py).
ROUNDING = ("zero++", "qwz", "qgz")


def labels(topology: Topology) -> list[str]:
    """Every preset; mics inside a node and across nodes; some over each route; every legal placement of Lins."""
    presets = [name for name in towpath.strategies() if name not in ("mics", *ROUNDING)]
    groups = {extent_label(g) for g in (Extent(topology.ranks_per_node), _spanning(topology))}
    chains = [
        f"lins:{'|'.join(extent_label(extent) for _, extent in placement.extents())}"
        for placement in sorted(legal_placements(topology), key=lambda p: [_order(e) for _, e in p.extents()])
    ]
    routed = [f"zero3@{route}" for route in ROUTES if route != "flat"] + ["paro-iig@ring", "ddp@ho-ring", "ddp@two-hop"]
    return [*presets, *(f"mics:{group}" for group in sorted(groups)), *routed, *chains]


def strategy_of(label: str, topology: Topology, **more: Any) -> towpath.Strategy:
    """The strategy of a label, with more options unless these are None."""
    label, *coded = label.split()
    name, _, route = label.partition("@")
    name, _, words = name.partition(":")
    extents = [Extent(*map(int, word.split("x"))) for word in words.split("|") if word]
    options: dict[str, Any] = {"route": route} if route else {}
    if name == "mics" and extents:
        options["group"] = extents[0]
    values = [option.split("=") for option in coded]
    options.update((key, int(value) if value.isdecimal() else value) for key, value in values)
    if "exact" in options:
        options["exact"] = options["exact"] in (1, "true", "True")
    if "x" in options.get("frozen", ""):
        options["frozen"] = Extent(*map(int, options["frozen"].split("x")))
    options |= {option: value for option, value in more.items() if value is not None}
    return towpath.strategy(towpath.Placement(*extents) if name == "lins" else name, topology, **options)


def family(label: str, topology: Topology) -> str:
    """The strategy without its numbers. The placements of Lins count as three, by how far P is spread."""
    name, _, words = label.partition(":")
    if name != "lins":
        return name
    spread = {extent_label(Extent(1)): "nowhere", extent_label(topology.whole): "everywhere"}
    return f"lins, P {spread.get(words.partition('|')[0], 'part way')}"


def extent_label(extent: Extent) -> str:
    return f"{extent.local}x{extent.nodes}"


def _order(extent: Extent) -> tuple[int, int]:
    return extent.nodes, extent.local


def _spanning(topology: Topology) -> Extent:
    """The smallest extent of more than one node."""
    nodes = next(n for n in range(2, topology.nodes + 1) if topology.nodes % n == 0)
    return Extent(topology.ranks_per_node, nodes)


def in_turn(values: Sequence[Any], count: int, name: str = "label") -> Callable[[Any], Any]:
    """Parametrizes `name`: each test, and each case of a test, runs on `count` of the values, the next one on others.

    `make parity` runs all on all.
    """

    import pytest

    def mark(test: Any) -> Any:
        return pytest.mark.in_turn(name, count, tuple(values))(pytest.mark.parametrize(name, values, ids=str)(test))

    return mark


def leave_to_parity(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of `in_turn` whose turn it is not."""
    import pytest

    numbers: dict[str, dict[tuple[Any, ...], int]] = {}
    for item in items:
        turn = item.get_closest_marker("in_turn")
        if turn is None or not isinstance(item, pytest.Function):
            continue
        name, count, values = turn.args
        # Not by pytest's indices: it gives every case its own where a value cannot be hashed.
        others = tuple(sorted((k, repr(v)) for k, v in item.callspec.params.items() if k != name))
        cases = numbers.setdefault(item.nodeid.partition("[")[0], {})
        first = zlib.crc32(item.originalname.encode()) + cases.setdefault(others, len(cases))
        turns = {(first + i * len(values) // count) % len(values) for i in range(count)}
        if values.index(item.callspec.params[name]) not in turns:
            item.add_marker(pytest.mark.parity)


def seldom(*values: Any, id: str | None = None) -> Any:
    """Return a case that only `make parity` runs, because its neighbours test nearly the same."""
    import pytest

    return pytest.param(*values, marks=pytest.mark.parity, id=id)
