"""Messages between two ranks, as a pipeline's stages send them; and transfers as they lie in a larger job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import each
from towpath.core.buffers import kept_elements, wire_needs
from towpath.core.placement import send
from towpath.core.presets import strategy
from towpath.core.schedule import schedule
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import LowRank, Transport, matrix_of
from towpath.core.units import Activation, BucketSpec, UnitSpec
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

JOB = Topology(4, 2)
SHAPE = (2, 64, 256)  # sequences × tokens × width
PLAIN = 2 * 64 * 256 * 2


def activation(pairs: list[tuple[int, int]], transport: Transport | None = None, dtype: str = "bfloat16") -> Transfer:
    return Transfer(
        TransferKind.ACTIVATION_GRADIENT, Activation(1, SHAPE, dtype), send(pairs), transport or Transport(), JOB
    )


def test_a_message_counts_once_on_the_cable_of_the_node_that_sends_it() -> None:
    """Ranks 2 and 3 live on node 1, ranks 0 and 1 on node 0; 4 and 5 are neighbours."""
    found = activation([(2, 0), (3, 1), (4, 5)])

    assert [found.cable_bytes(node) for node in range(4)] == [0, 2 * PLAIN, 0, 0]
    assert (found.inter_bytes, found.intra_bytes) == (2 * PLAIN, PLAIN)
    assert str(found) == "activation_gradient of stage 1 [2 × 64 × 256], send from rank 2 to 0, 3 to 1, 4 to 5"


def test_it_may_travel_in_a_codec_of_blocks() -> None:
    found = activation([(2, 0)], Transport(codec="int8", feedback="first"))

    assert found.inter_bytes == PLAIN // 2 + PLAIN // 2 // 256 * 4
    assert kept_elements(found) == (PLAIN // 2,)
    assert wire_needs(found) == {"uint8": found.inter_bytes}


def test_in_low_rank_two_thin_matrices_travel_and_the_sender_keeps_one_and_what_was_missed() -> None:
    found = activation([(2, 0)], Transport(codec="low-rank:4", feedback="first"))

    assert found.inter_bytes == 4 * (128 + 256) * 2
    assert kept_elements(found) == (4 * 256 + 128 * 256,)
    assert kept_elements(activation([(2, 0)], Transport(codec="low-rank:4"))) == (4 * 256,)


@given(rows=st.integers(1, 300), columns=st.integers(1, 300), rank=st.integers(1, 300))
def test_low_rank_never_sends_more_than_the_matrix(rows: int, columns: int, rank: int) -> None:
    codec = LowRank(rank)

    assert codec.encoded_elements((rows, columns)) <= rows * columns
    assert codec.pays((rows, columns)) == (codec.encoded_elements((rows, columns)) < rows * columns)
    kept = Transport(codec=codec, feedback="first").kept_for_message((rows, columns))
    assert any(kept) == codec.pays((rows, columns))


def test_a_tensor_is_seen_as_a_matrix_of_its_last_dimension() -> None:
    assert [matrix_of(shape) for shape in [(2, 64, 256), (7, 3), (5,), ()]] == [(128, 256), (7, 3), (1, 5), (1, 1)]


@each(text=["low-rank", "low-rank:0", "low-rank:4+hadamard", "low-rank:-1"])
def test_a_mistaken_rank_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"Write 'low-rank:' and the rank|at least 1"):
        Transport(codec=text)


def test_messages_have_no_route_and_round_once() -> None:
    transport = Transport(codec="low-rank:4", until=3)
    assert (transport.at(2).low_rank, transport.at(3).low_rank) == (LowRank(4), None)
    for wrong in (Transport("ring"), Transport(codec="int8", feedback="both")):
        with pytest.raises(ConfigError):
            wrong.check(activation([(0, 1)]).move.op, "an activation")


def test_what_a_group_sends_is_counted_where_its_ranks_live_in_the_job() -> None:
    """Of two pipeline stages with data-parallel ranks (0, 1, 4, 5) and (2, 3, 6, 7): the second one's cables."""
    small, units = Topology(2, 2), (UnitSpec("", (BucketSpec((1000,)),), root=True),)
    for transfer in schedule(strategy("zero3", small), units, 1).transfers:
        placed = transfer.over((2, 3, 6, 7), JOB)

        assert [placed.cable_bytes(node) for node in range(4)] == [
            0,
            transfer.cable_bytes(0),
            0,
            transfer.cable_bytes(1),
        ]
        assert placed.intra_bytes == transfer.intra_bytes
        assert placed.move.group_of(6).ranks[-1] in (6, 7)
