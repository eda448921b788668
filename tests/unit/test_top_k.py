"""The top-k codec: what comes out, and what is kept, is together what went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from towpath.codecs.top_k import TopKEncoder, decode_add
from towpath.core.top_k import CHUNK, TopK
from towpath.core.transport import Transport
from towpath.errors import ConfigError


def sent(encoder: TopKEncoder, values: torch.Tensor) -> torch.Tensor:
    message = torch.empty(encoder.codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    encoder.encode(values, message)
    out = torch.zeros_like(values)
    decode_add(encoder.codec, message, out)
    return out


@settings(deadline=None, max_examples=25)
@given(
    elements=st.integers(1, 3 * CHUNK),
    keep=st.sampled_from([4, 64, 1024]),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_what_came_out_plus_what_is_kept_is_what_went_in(elements: int, keep: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    encoder, total, came = TopKEncoder(TopK(keep), elements, torch.device("cpu")), 0.0, 0.0
    for _ in range(3):
        values = size * torch.randn(elements, generator=generator)
        total, came = total + values.double(), came + sent(encoder, values).double()
    assert isinstance(total, torch.Tensor) and isinstance(came, torch.Tensor)
    torch.testing.assert_close(came + encoder.error.double(), total, rtol=0, atol=1e-5 * size)


def test_the_largest_elements_of_each_chunk_are_sent() -> None:
    values = torch.zeros(2 * CHUNK)
    places = torch.tensor([0, 7, 2000, 4095, 4096, 5000, 8191, 8190])
    values[places] = torch.tensor([3.0, -1.0, 3.0, -1.0, 0.5, 0.5, -2.0, -2.0])
    out = sent(TopKEncoder(TopK(4), values.numel(), torch.device("cpu")), values)
    torch.testing.assert_close(out, values)


def test_the_message_has_a_quarter_of_a_bit_per_element() -> None:
    assert TopK(64).encoded_bytes(CHUNK) == 96 + 16 + 4
    assert TopK(64).encoded_bytes(CHUNK + 1) == 2 * (96 + 16 + 4)


def test_the_decay_forgets() -> None:
    encoder = TopKEncoder(TopK(4, 0.5), 8, torch.device("cpu"))
    encoder.error.fill_(4.0)
    message = torch.empty(TopK(4).encoded_bytes(8), dtype=torch.uint8)
    encoder.encode(torch.zeros(8), message)
    torch.testing.assert_close(encoder.error.sort().values, torch.tensor([0.0] * 4 + [2.0] * 4))


def test_a_value_that_is_not_finite_does_not_reach_later_messages() -> None:
    encoder = TopKEncoder(TopK(4), 100, torch.device("cpu"))
    sent(encoder, torch.full((100,), float("nan")))
    assert encoder.error.isfinite().all()
    assert sent(encoder, torch.ones(100)).isfinite().all()


@pytest.mark.parametrize("text", ["top-k:64", "top-k:64+decay:0.95", "top-k:1024"])
def test_text_names_the_codec(text: str) -> None:
    assert str(TopK.parse(text)) == text
    assert str(Transport("flat", text).codec) == text


@pytest.mark.parametrize(
    "text", ["top-k", "top-k:", "top-k:3", "top-k:0", "top-k:2000", "top-k:64+decay:2", "top-k:-4"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Transport("flat", text)


def test_only_exchanges_between_islands_have_it() -> None:
    import towpath

    with pytest.raises(ConfigError, match="between islands"):
        towpath.strategy("zero1", towpath.Topology(2, 2), grad_sync=Transport("flat", "top-k:64"))
    with pytest.raises(ConfigError, match="feedback"):
        Transport("flat", "top-k:64", feedback="first")
