"""Codecs as data, and what the oracle promises of its messages; the other back ends are held against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import messages, same
from tests.ranks.strategies import seldom
from towpath.codecs.kernels.plain import decode, decode_sum, decode_sum_encode, encode, rotated
from towpath.core.formats import CODECS, ROTATED, SCALE_BYTES, WHOLE, Codec
from towpath.errors import ConfigError

# Of float32, each half the last bit: a quotient's or a scale's, and that of a scale times a code.
TWO_ROUNDINGS = 2.0**-23
FLOAT8_MANTISSA = {"e4m3": 3, "e5m2": 2}
BLOCKS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

integer_codecs = st.builds(
    Codec, st.sampled_from(("int8", "int4")), st.sampled_from(BLOCKS), st.booleans(), st.booleans()
)
float8_codecs = st.builds(Codec, st.sampled_from(("e4m3", "e5m2")), st.sampled_from(BLOCKS), st.booleans())
codecs = integer_codecs | float8_codecs | st.just(Codec("bf16"))
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)

# Most lengths are short, and near the ends of blocks; some are long.
lengths = st.integers(1, 700) | st.sampled_from([n + d for n in BLOCKS[1:] for d in (-1, 0, 1)] + [100_003])

# Tensors are the slow part of an example: the number of examples is what keeps these tests in seconds.
examples = settings(max_examples=60, deadline=None)


def values(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of very different sizes, as gradients have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.empty(n // 50 + 1).uniform_(-4, 4, generator=generator)
    return (torch.randn(n, generator=generator) * sizes.repeat_interleave(50)[:n]).to(dtype)


def message_of(codec: Codec, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """At an odd address, as messages may lie."""
    (message,) = messages(codec, x.numel(), 1, 0, "cpu")
    encode(codec, x, message, seed)
    return message


def decoded(codec: Codec, message: torch.Tensor, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((n,), 77.0, dtype=dtype)
    decode(codec, message, out)
    return out


def there_and_back(codec: Codec, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decoded(codec, message_of(codec, x, seed), x.numel())


def scales_of(codec: Codec, message: torch.Tensor, n: int) -> torch.Tensor:
    """For each element the scale of its block."""
    scales = message[: SCALE_BYTES * codec.scales(n)].clone().view(torch.float32)
    return scales.repeat_interleave(codec.block or n)[:n]


class TestAsData:
    @examples
    @given(codecs)
    def test_its_text_is_read_back(self, codec: Codec) -> None:
        assert Codec.parse(str(codec)) == codec

    @pytest.mark.parametrize(
        "text, codec",
        [
            ("bf16", Codec("bf16")),
            ("int8", Codec("int8", 256)),
            (f"int8:{WHOLE}", Codec("int8", 0)),
            ("e4m3:32+hadamard", Codec("e4m3", 32, hadamard=True)),
            ("int4:64+stochastic+hadamard", Codec("int4", 64, hadamard=True, stochastic=True)),
        ],
    )
    def test_texts(self, text: str, codec: Codec) -> None:
        assert Codec.parse(text) == codec

    @pytest.mark.parametrize(
        "text, why",
        [
            ("int8:", "not a codec"),
            ("int8:64:64", "not a codec"),
            ("int8+hadamrd", "not a codec"),
            ("int8\n", "not a codec"),
            ("int8+hadamard+hadamard", "not a codec"),
            ("int8:0", "a block of no elements"),
            ("int3", "unknown codec 'int3'; known are bf16"),
            ("int8:16", "32 to 4096 elements"),
            ("int8:96", "a power of two"),
            ("e4m3+stochastic", "for int8 and int4"),
            ("bf16+hadamard", "neither a block nor a rotation"),
            (f"bf16:{WHOLE}", "neither a block nor a rotation"),
        ],
    )
    def test_refusals(self, text: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            Codec.parse(text)

    @examples
    @given(codecs, st.integers(0, 2**40))
    def test_sizes(self, codec: Codec, n: int) -> None:
        bits = {"bf16": 16, "int4": 4}.get(codec.name, 8)
        scales = 0 if codec.name == "bf16" else -(-n // codec.block) if codec.block else min(n, 1)
        assert codec.scales(n) == scales
        assert codec.encoded_bytes(n) == 4 * scales + (n * bits + 7) // 8


class TestThereAndBack:
    @examples
    @given(integer_codecs, lengths, dtypes, seeds)
    def test_integers_err_by_half_a_scale_or_at_random_by_one(
        self, codec: Codec, n: int, dtype: torch.dtype, seed: int
    ) -> None:
        codec = Codec(codec.name, codec.block, hadamard=False, stochastic=codec.stochastic)
        x = values(n, seed, dtype)
        message = message_of(codec, x, seed)
        error = (decoded(codec, message, n).double() - x.double()).abs()
        allowed = scales_of(codec, message, n).double() * (1.0 if codec.stochastic else 0.5)
        assert (error <= allowed + x.double().abs() * 2 * TWO_ROUNDINGS).all()

    @examples
    @given(float8_codecs, lengths, dtypes, seeds)
    def test_floats_err_by_half_their_last_bit(self, codec: Codec, n: int, dtype: torch.dtype, seed: int) -> None:
        codec = Codec(codec.name, codec.block)
        x = values(n, seed, dtype)
        message = message_of(codec, x)
        error = (decoded(codec, message, n).double() - x.double()).abs()
        mantissa = FLOAT8_MANTISSA[codec.name]
        relative = x.double().abs() * 2.0 ** -(mantissa + 1)
        smallest = torch.finfo({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[codec.name]).smallest_normal
        absolute = scales_of(codec, message, n).double() * smallest * 2.0 ** -(mantissa + 1)
        assert (error <= torch.maximum(relative, absolute) + x.double().abs() * 2 * TWO_ROUNDINGS).all()

    @examples
    @given(st.sampled_from(CODECS[1:]), st.sampled_from(BLOCKS), st.booleans(), lengths, seeds)
    def test_the_largest_of_a_block_is_kept(self, name: str, block: int, stochastic: bool, n: int, seed: int) -> None:
        codec = Codec(name, block, stochastic=stochastic and name.startswith("int"))
        x = values(n, seed)
        back = there_and_back(codec, x, seed)
        for piece, kept in zip(x.split(block or n), back.split(block or n), strict=True):
            largest = piece.abs().argmax()
            # Its quotient is the largest code but for a rounding; at random, that may cost it one code downwards.
            code = 1 / codec.largest if codec.stochastic else 0.0
            assert kept[largest].item() == pytest.approx(piece[largest].item(), rel=2 * TWO_ROUNDINGS + code)
            assert kept.abs().max() <= piece[largest].abs() * (1 + 2 * TWO_ROUNDINGS)

    @examples
    @given(lengths, dtypes, seeds)
    def test_bf16_is_torchs_cast(self, n: int, dtype: torch.dtype, seed: int) -> None:
        x = values(n, seed, dtype)
        assert same(there_and_back(Codec("bf16"), x), x.bfloat16().float())

    @examples
    @given(codecs, lengths, dtypes, seeds)
    def test_decoding_rounds_once_to_the_dtype_asked_for(
        self, codec: Codec, n: int, dtype: torch.dtype, seed: int
    ) -> None:
        message = message_of(codec, values(n, seed).clamp(-1e4, 1e4), seed)
        assert same(decoded(codec, message, n, dtype), decoded(codec, message, n).to(dtype))

    @examples
    @given(codecs, st.integers(1, 300), dtypes, seeds)
    def test_strided_data(self, codec: Codec, n: int, dtype: torch.dtype, seed: int) -> None:
        x = values(3 * n, seed, dtype)[::3]
        assert torch.equal(message_of(codec, x, seed), message_of(codec, x.contiguous(), seed))


class TestBlocks:
    @examples
    @given(integer_codecs | float8_codecs, st.sampled_from([0.0, -0.0]), st.integers(1, 9000))
    def test_zeros_stay_zeros(self, codec: Codec, zero: float, n: int) -> None:
        assert (there_and_back(codec, torch.full((n,), zero)) == 0).all()

    @examples
    @given(
        integer_codecs | float8_codecs,
        st.integers(1, 5000),
        st.sampled_from([math.nan, math.inf, -math.inf]),
        dtypes,
        st.data(),
    )
    def test_what_is_not_finite_spoils_its_block_and_no_other(
        self, codec: Codec, n: int, bad: float, dtype: torch.dtype, data: st.DataObject
    ) -> None:
        at = data.draw(st.integers(0, n - 1))
        x = values(n, 1, dtype).clamp(-1e4, 1e4)
        good = there_and_back(codec, x)
        x[at] = bad
        message = message_of(codec, x)
        back = decoded(codec, message, n)
        block = codec.block or n
        own = torch.arange(n) // block == at // block
        assert back[own].isnan().all()
        assert same(back[~own], good[~own])
        if codec.block == 0:
            assert message.tolist() == [0, 0, 0xC0, 0x7F] + [0] * (len(message) - 4), "a quiet NaN, and codes of zero"

    @pytest.mark.parametrize("text", [*CODECS[1:], "int4+hadamard+stochastic", "e4m3:whole+hadamard"])
    @pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1.2e-38])
    def test_denormals_stay_finite(self, text: str, size: float) -> None:
        codec, x = Codec.parse(text), torch.linspace(-1, 1, 1000) * size
        message = message_of(codec, x)
        back = decoded(codec, message, 1000)
        assert scales_of(codec, message, 1000).min() >= torch.finfo(torch.float32).tiny
        assert back.isfinite().all()
        assert back.abs().max() <= 2 * codec.scales(1000) * torch.finfo(torch.float32).tiny

    @pytest.mark.parametrize("text", CODECS[1:])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_largest_numbers_there_are(self, text: str, dtype: torch.dtype) -> None:
        """But for the last bits of float32: what is within two roundings of its largest number may become Inf."""
        largest = torch.finfo(dtype).max * (1 - 4 * TWO_ROUNDINGS if dtype == torch.float32 else 1)
        codec, x = Codec.parse(text), torch.linspace(-1, 1, 513).double().mul(largest).to(dtype)
        back = decoded(codec, message_of(codec, x), x.numel(), dtype)
        assert back.isfinite().all()


class TestRotation:
    @examples
    @given(lengths, seeds)
    def test_it_is_its_own_inverse(self, n: int, seed: int) -> None:
        x = values(n, seed)
        whole = n // ROTATED * ROTATED
        # Twice five stages of sums and a product, each a rounding, on at most sqrt(32) times the length of 32 elements.
        norms = x[:whole].view(-1, ROTATED).norm(dim=1).repeat_interleave(ROTATED)
        again = rotated(rotated(x))
        assert ((again - x)[:whole].abs() <= norms * 12 * 2.0**-24 * 2).all()
        assert torch.equal(again[whole:], x[whole:])

    def test_it_is_hadamards_matrix(self) -> None:
        turned = torch.stack([rotated(row) for row in torch.eye(ROTATED)])
        parity = torch.tensor([[bin(i & j).count("1") % 2 for j in range(ROTATED)] for i in range(ROTATED)])
        assert torch.equal(turned, (1 - 2.0 * parity) * ROTATED**-0.5)


class TestAtRandom:
    @pytest.mark.parametrize(
        "text", [seldom("int8:32"), seldom("int4:32"), seldom("int8:32+hadamard"), "int4:whole+hadamard"]
    )
    def test_the_mean_is_kept(self, text: str) -> None:
        """Each draw errs by less than a scale, with a variance of at most a quarter of its square; so the mean of
        4,000 strays by scale / 2 / sqrt(4,000) at most, and among 320 elements hardly ever five times as far."""
        codec, n, draws = Codec.parse(text + "+stochastic"), 320, 4000
        x = values(n, 3).clamp(-50, 50)
        total = torch.zeros(n, dtype=torch.float64)
        for seed in range(draws):
            total += there_and_back(codec, x, seed)
        scale = scales_of(codec, message_of(codec, x), n)
        # A rotation is orthonormal: it spreads errors among 32 elements and leaves the variance's bound as it is.
        assert ((total / draws - x).abs() <= 5 * scale / 2 / draws**0.5).all()

    @examples
    @given(st.sampled_from(("int8", "int4")), lengths, seeds)
    def test_the_same_seed_the_same_bytes(self, name: str, n: int, seed: int) -> None:
        codec, x = Codec(name, stochastic=True), values(n, 1)
        first = message_of(codec, x, seed)
        assert torch.equal(first, message_of(codec, x, seed))
        if n > 100:
            assert not torch.equal(first, message_of(codec, x, seed + 1))


class TestSums:
    @examples
    @given(codecs, st.integers(1, 5), st.integers(1, 3000), dtypes, seeds)
    def test_rows_are_summed_in_order(self, codec: Codec, rows: int, n: int, dtype: torch.dtype, seed: int) -> None:
        encoded = messages(codec, n, rows, 3, "cpu")
        total = None
        for i, row in enumerate(encoded):
            encode(codec, values(n, seed + i), row, seed + i)
            total = decoded(codec, row, n) if total is None else total + decoded(codec, row, n)
        assert total is not None
        out = torch.empty(n, dtype=dtype)
        decode_sum(codec, encoded, out)
        assert same(out, total.to(dtype))

        again = torch.empty(codec.encoded_bytes(n), dtype=torch.uint8)
        decode_sum_encode(codec, encoded, n, again, seed)
        assert torch.equal(again, message_of(codec, total, seed))
