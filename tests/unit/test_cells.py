"""Where messages start on the wire, and how many launches write them, from the layout alone: no ranks run."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import towpath
from towpath.codecs import packing
from towpath.codecs.kernels import Kernels
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.collectives import backend
from towpath.collectives.all_to_all import AllToAllReduceScatter
from towpath.collectives.backend import EncodedAllGather, of_bytes
from towpath.collectives.collective import Collective, GroupRank, WireBuffers, Workspace
from towpath.core.formats import Codec, cell_alignment
from towpath.core.placement import GroupCollective
from towpath.core.presets import strategies
from towpath.core.routes import Group, Op, SlicePart, encoded_slice, piece_bounds
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import BucketSpec, Range, UnitSpec
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

CPU = torch.device("cpu")
WORLDS = [Topology(2, 2), Topology(2, 8), Topology(8, 8)]
# A block of Llama-7B, one of odd sizes, and one whose messages are short.
UNITS = [(4096 * 4096,) * 4 + (4096 * 11008,) * 3 + (4096,) * 2, (1_000_003, 77, 5), (300, 7)]


def members_of(transfer: Transfer, position: int) -> GroupRank:
    group: Any = None
    nodes = tuple(map(transfer.topology.node_of, transfer.move.groups[0].ranks))
    return GroupRank(group, transfer.move.groups[0], position, nodes, group, group)


def encoded_transfers(shape: Topology) -> Iterator[Transfer]:
    """All that a preset sends in a codec, its own or, if it has none, in int8 and int4."""
    for name in strategies():
        for options in ({}, {"weights": "int8", "gradients": "int4"}, {"weights": "e4m3:32", "gradients": "int8:1024"}):
            try:
                strategy = towpath.strategy(name, shape, **options)
            except ConfigError:
                continue  # nothing of it crosses nodes, or it takes no such codec
            for numels in UNITS:
                plan = schedule(strategy, (UnitSpec("block", (BucketSpec(numels),)),), 1).plans[0]
                for bucket in plan.buckets:
                    yield from (t for ts in bucket.transfers.values() for t in ts if t.transport.encoding)


@pytest.mark.parametrize("shape", WORLDS, ids=str)
def test_every_message_starts_aligned(shape: Topology) -> None:
    checked: Counter[str] = Counter()
    for transfer in dict.fromkeys(encoded_transfers(shape)):
        codec, count = transfer.transport.encoding, transfer.move.members
        assert codec is not None
        if transfer.move.op is not Op.REDUCE_SCATTER:
            cell = encoded_slice(codec, transfer.elements, count)
            sent = of_bytes(replace(transfer, move=replace(transfer.move, op=Op.ALL_GATHER)), codec)
            starts = [
                piece_bounds(sent.elements, count, SlicePart(slot, part, sent.parts), sent.grain)[0]
                for slot in range(count)
                for part in range(sent.parts)
            ]
            assert not any(start % cell_alignment(cell) for start in [cell, *starts]), transfer
            checked["gather"] += 1
        if transfer.move.op is not Op.ALL_GATHER:
            for position in {0, count // 2, count - 1}:
                reduction = AllToAllReduceScatter(transfer, members_of(transfer, position), CPU)
                cell = reduction._buffers.wire_cell
                for stage in reduction._stages:
                    places = [n for e in stage.exchanges for n in (e.sent, e.received, e.row)]
                    for table in (stage.table, *(e.table for e in stage.exchanges)):
                        places += [n for piece in table.pieces for n in (piece.source, piece.target)]
                    assert not any(n % cell_alignment(cell) for n in [cell, *places]), transfer
            checked["reduction"] += 1
    assert checked["gather"] and checked["reduction"]


def test_cells_are_rounded_up_to_lines_only_if_they_are_long() -> None:
    codec = Codec.parse("int8:32")
    assert [codec.cell_bytes(n) for n in (0, 1, 32, 7240, 7296)] == [0, 16, 48, 8160, 8320]
    assert cell_alignment(8191) == 16 and cell_alignment(8192) == 128


# --- launches ---------------------------------------------------------------------------------------------------------


class _Kernel:
    """A kernel of Triton that only counts."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self._name, self._launches = name, launches

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        assert grid[1] <= 65535
        return self._launched

    def _launched(self, *args: Any, **constants: Any) -> None:
        self._launches[self._name] += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of Triton's kernels, where no GPU is at hand."""
    counted: Counter[str] = Counter()
    module = importlib.import_module("towpath.codecs.kernels.triton_codecs")
    for name in ("_largest_kernel", "_encode_kernel", "_decode_kernel"):
        monkeypatch.setattr(module, name, _Kernel(name, counted))
    kernels = Kernels(module)
    for user in (packing, backend):
        monkeypatch.setattr(user, "kernels_for", lambda device: kernels)
    return counted


@pytest.fixture
def _sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        def wait(self) -> None: ...

    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: Done())


def transfer_of(op: Op, shape: Topology, route: str, codec: str, feedback: str, elements: int) -> Transfer:
    ranks = tuple(range(shape.world))
    move = GroupCollective(op, 1, (Group(ranks, ranks),))
    payload = Range("block", "float", elements, "bfloat16")
    return Transfer(TransferKind.REDUCE, payload, move, Transport(route, codec, feedback), shape)


def run(collective: Collective, transfer: Transfer, device: str = "cpu") -> None:
    start, end = transfer.bounds(0)
    region = torch.zeros(transfer.elements, dtype=torch.bfloat16, device=device)
    collective.run(region, region[start:end].clone(), Workspace(WireBuffers(torch.device(device))))


class _Nothing(Collective):
    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None: ...


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.usefixtures("_sends_nothing")
@pytest.mark.parametrize("shape", [*WORLDS, Topology(64, 8)], ids=str)
def test_any_number_of_members_takes_few_launches(
    shape: Topology, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 64)
    group: Any = object()
    for codec, feedback, most in (("int4", "none", 12), ("int4", "both", 12), ("int8:whole", "both", 20)):
        transfer = transfer_of(Op.REDUCE_SCATTER, shape, "two-hop", codec, feedback, 1024 * shape.world)
        assert transfer.parts == 4
        members = replace(members_of(transfer, 0), row=group, column=group)
        run(AllToAllReduceScatter(transfer, members, CPU, collectives=True), transfer)
        assert launches.total() == most, (codec, feedback, launches)
        launches.clear()
    for codec, most in (("int8", 2), ("int4:whole", 3)):
        transfer = transfer_of(Op.ALL_GATHER, shape, "flat", codec, "none", 1024 * shape.world)
        run(EncodedAllGather(transfer, members_of(transfer, 0), _Nothing(), CPU), transfer)
        assert launches.total() == most, (codec, launches)
        launches.clear()


class _Calls(TorchDispatchMode):
    """Counts the calls that move data."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("as_strided", "view", "slice", "empty", "zeros", "clone", "detach", "_unsafe_view"):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_sends_nothing")
@pytest.mark.parametrize("shape", WORLDS, ids=str)
def test_plain_pieces_are_moved_and_summed_in_few_calls(shape: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.core.routes.SMALLEST_PART_BYTES", 64)
    group: Any = object()
    transfer = transfer_of(Op.REDUCE_SCATTER, shape, "two-hop", "none", "none", 1024 * shape.world)
    members = replace(members_of(transfer, 0), row=group, column=group)
    reduction = AllToAllReduceScatter(transfer, members, torch.device("meta"), collectives=True)
    with _Calls() as calls:
        run(reduction, transfer, "meta")
    # In each of four parts: a strided copy, and two sums in float32 that are narrowed.
    assert calls.counted == Counter({"copy_": 12, "sum": 8})


def test_pieces_without_elements_are_left_out() -> None:
    pieces = PieceTable(Codec.parse("int8"), [PiecePlace(0), PiecePlace(5, 1), PiecePlace(0)], CPU)
    assert len(pieces.table) == len(pieces.pieces) == 1 and list(pieces.seeds(3)) == [pieces.last_seed(3)]
