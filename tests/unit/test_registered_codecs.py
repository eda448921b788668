"""Codecs that a user registers: what is sent is what their functions say, whatever the length, and never less loud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from towpath.codecs import register
from towpath.codecs.kernels import kernels_for
from towpath.codecs.kernels.pieces import PiecePlace, PieceTable
from towpath.core import formats
from towpath.core.formats import Codec
from towpath.core.transport import Transport
from towpath.errors import ConfigError
from towpath.plan.catalog import load_cluster

CPU = torch.device("cpu")
LENGTHS = (1, 2, 7, 63, 64, 65, 1000)


@pytest.fixture(autouse=True)
def forget_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(formats, "_registered", {})
    yield


def _levels(bits: int) -> None:
    """Whole numbers from 0 to 2^bits − 1, exactly: the scale of a block is one."""

    def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(len(blocks)), blocks.round().to(torch.uint8)

    def decode(scales: Tensor, codes: Tensor) -> Tensor:
        return scales[:, None] * codes.float()

    register(f"levels{bits}", bits=bits, encode=encode, decode=decode)


def _signs() -> None:
    def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks.abs().mean(1), (blocks >= 0).to(torch.uint8)

    register("sign", bits=1, encode=encode, decode=lambda scales, codes: scales[:, None] * (2.0 * codes - 1.0))


def _there_and_back(codec: Codec, x: Tensor) -> Tensor:
    message = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
    kernels_for(CPU).encode(codec, x, message)
    out = torch.empty_like(x)
    kernels_for(CPU).decode(codec, message, out)
    return out


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("bits", formats.CODE_BITS)
def test_what_the_functions_represent_comes_back_to_the_bit(bits: int, n: int) -> None:
    _levels(bits)
    x = (torch.arange(n) * 7 % (1 << bits)).float()
    for text in (f"levels{bits}:32", f"levels{bits}", f"levels{bits}:whole"):
        assert torch.equal(_there_and_back(Codec.parse(text), x), x)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_message_is_its_scales_and_its_codes(n: int) -> None:
    _signs()
    codec = Codec.parse("sign:64")
    assert codec.encoded_bytes(n) == 4 * -(-n // 64) + -(-n // 8)
    assert Codec.parse(str(codec)) == codec


def test_a_rotation_is_undone() -> None:
    _levels(8)
    codec = Codec.parse("levels8:32+hadamard")
    # Of a block of equal values the rotation is one value; the others are zeros.
    x = torch.full((32,), 2.0**0.5 * 2)
    torch.testing.assert_close(_there_and_back(codec, x), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_never_hidden(value: float) -> None:
    _signs()
    x = torch.ones(128)
    x[70] = value
    back = _there_and_back(Codec.parse("sign:64"), x)
    assert back[64:].isnan().all() and torch.equal(back[:64], x[:64])


def test_sums_are_of_what_was_decoded() -> None:
    _signs()
    codec, kernels = Codec.parse("sign:32"), kernels_for(CPU)
    cell, size = codec.cell_bytes(40), codec.encoded_bytes(40)
    wire = torch.zeros(3, cell, dtype=torch.uint8)
    for k, message in zip((1, 2), wire, strict=False):
        kernels.encode(codec, torch.full((40,), float(k)), message[:size])
    total = torch.empty(40)
    kernels.decode_pieces(PieceTable(codec, [PiecePlace(40)], CPU, 2, cell), wire.view(-1), total)
    torch.testing.assert_close(total[:32], torch.full((32,), 3.0), rtol=0, atol=0)
    kernels.encode_pieces(PieceTable(codec, [PiecePlace(40, target=2 * cell)], CPU, 2, cell), None, wire.view(-1), 0)
    expected = torch.empty(size, dtype=torch.uint8)
    kernels.encode(codec, total, expected)
    assert torch.equal(wire[2, :size], expected)


@pytest.mark.parametrize(
    ("name", "bits", "told"),
    [("int8", 8, "not one of"), ("Sign", 1, "small letters"), ("x", 3, "1, 2, 4, 8"), ("sign", 2, "already")],
)
def test_what_cannot_be_a_codec_is_refused(name: str, bits: int, told: str) -> None:
    _signs()
    with pytest.raises(ConfigError, match=told):
        register(name, bits=bits, encode=lambda x: (x, x), decode=lambda s, c: c)


def test_functions_that_return_something_else_are_told_so() -> None:
    register("wrong", bits=8, encode=lambda x: (x.abs().mean(), x), decode=lambda s, c: c)
    with pytest.raises(ConfigError, match=r"scales of torch.float32 and shape \(\)"):
        _there_and_back(Codec.parse("wrong:32"), torch.ones(32))


def test_it_is_unknown_until_it_is_registered_and_planned_afterwards() -> None:
    with pytest.raises(ConfigError, match="unknown codec 'sign'"):
        Transport("two-hop", "sign")
    _signs()
    assert str(Transport("two-hop", "sign").encoding) == "sign:256"
    assert load_cluster("ethernet-10g").hardware.codec_speed("sign").encode > 0
