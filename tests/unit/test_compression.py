"""What of a pipeline travels compressed, as data: which messages, which stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

import towpath
from towpath.core.passes import (
    COMPRESSIONS,
    Compression,
    compression,
    encoded_gradients,
    one_forward_one_backward,
)
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.errors import ConfigError

TOPOLOGY = towpath.Topology(2, 1)


def test_the_papers_parts_build_on_one_another() -> None:
    plain, cb, fe, sc = (COMPRESSIONS[name] for name in ("none", "optimus-cb", "optimus-cb+fe", "optimus-cb+fe+sc"))
    assert plain == Compression() and plain.fused_embeddings
    assert (str(cb.activation_gradients.codec), cb.activation_gradients.feedback) == ("low-rank:16", "none")
    assert not cb.fused_embeddings and fe == compression("optimus-cb", fused_embeddings=True)
    assert (str(sc.gradients.codec), sc.gradients.feedback) == ("low-rank:128", "first") and sc.share_of_stages == 0.75
    papers = Transport(codec="low-rank:16", feedback="first")
    assert COMPRESSIONS["optimus-cc"] == replace(sc, activation_gradients=papers)
    propagated = Transport(codec="low-rank:4", feedback="first")
    changed = compression("optimus-cb+fe+sc", activation_gradients=propagated, gradients=Transport(codec="low-rank:8"))
    assert changed.gradients.feedback == "none" and changed.activation_gradients.feedback == "first"


def test_all_gradients_may_be_encoded_and_not_only_the_exposed() -> None:
    order = one_forward_one_backward(4, 8)
    assert len(encoded_gradients(order, Compression("low-rank:4"))) == 6
    assert len(encoded_gradients(order, Compression("low-rank:4", every_gradient=True))) == 3 * 8


@pytest.mark.parametrize(("share", "compressed"), [(0.75, 3), (0.5, 2), (0.1, 1), (1.0, 4)])
def test_gradients_of_the_first_stages_are_of_low_rank(share: float, compressed: int) -> None:
    made = Compression(gradients=Transport(codec="low-rank:4+rate:2", after=3), share_of_stages=share)
    own = towpath.strategy("zero1", TOPOLOGY, route="ho-ring")
    found = [made.strategy_of(own, stage, 4) for stage in range(4)]
    assert [str(s.grad_sync.codec) for s in found] == ["low-rank:4+rate:2"] * compressed + ["none"] * (4 - compressed)
    assert found[0].grad_sync.route == "ho-ring" and found[0].at(2).grad_sync.low_rank is None
    assert found[0].transport(TransferKind.PARAM_SYNC) == own.param_sync
    assert (found[-1] == own) == (compressed < 4)


def test_a_step_of_a_warm_up_has_the_wires_that_serve_then() -> None:
    later = Transport(codec="low-rank:4", after=2)
    given = Compression(later, Transport(codec="int8", until=3), later)
    assert given.changes == {2, 3}
    for step, encoded in ((0, (False, True)), (2, (True, True)), (3, (True, False))):
        now = given.at(step)
        assert (now.activation_gradients.low_rank is not None, now.activations.encoding is not None) == encoded
        assert (now.gradients.low_rank is not None) is encoded[0]
    assert compression("optimus-cb").at(7) == COMPRESSIONS["optimus-cb"]


def test_gradients_that_a_stage_cuts_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero2: reduce: low-rank:4 needs full matrices"):
        Compression(gradients="low-rank:4").strategy_of(towpath.strategy("zero2", TOPOLOGY), 0, 2)


def test_what_is_no_compression_is_told() -> None:
    with pytest.raises(ConfigError, match=r"unknown compression 'optimus-c'; did you mean 'optimus-cc'"):
        compression("optimus-c")
    with pytest.raises(ConfigError, match="has no option rank; it has activation_gradients"):
        compression("optimus-cb", rank=4)
    with pytest.raises(ConfigError, match=r"gradients takes low rank, .*got int8:256.* belong to the strategy"):
        Compression(gradients="int8")
    with pytest.raises(ConfigError, match="a message from one rank to another has no route"):
        Compression(activations=Transport("ring", "int8"))
    with pytest.raises(ConfigError, match=r"share_of_stages is above 0 and at most 1; got 1\.5"):
        Compression(share_of_stages=1.5)
