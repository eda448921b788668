"""Many pieces of a buffer at a time: their places in memory, and loops for back ends that take one message at a time.

Each piece has a *cell* of the wire buffer, in which its message starts. Cells start at multiples of `CELL_ALIGNMENT`
bytes. Where several members sent the same pieces, each member's cells are one *row* of the wire buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

import torch

from towpath.core.formats import CELL_ALIGNMENT, SCALE_BYTES, Codec

_SEED_FACTOR, _SEED_STEP, _32_BITS = 0x9E3779B1, 0x7FEB352D, 0xFFFFFFFF
# Kernels read and write this many elements at once where all pieces allow it.
_WIDE = 16


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """One piece of a buffer."""

    length: int  # its number of elements
    start: int = 0  # its first element in the flat buffer that is encoded, or decoded into
    source: int = 0  # the byte of the wire buffer where the message to decode starts, in the first row
    target: int = 0  # the byte of the wire buffer where the encoded message starts
    kept: int = 0  # the first element of its error feedback


@final
class PieceTable:
    """The pieces that one launch encodes or decodes. Pieces without elements are left out.

    A kernel reads `table`. It has one line for each piece: the fields of `PiecePlace`, the numbers that give the
    piece's rounding seed, the number of rows, and the bytes between them.

    Args:
        pieces: The pieces, in the order of their rounding seeds.
        rows: How many rows are summed.
        stride: The bytes from one row to the next.
    """

    COLUMNS = 9  # of the table

    def __init__(
        self, codec: Codec, pieces: Sequence[PiecePlace], device: torch.device, rows: int = 1, stride: int = 0
    ) -> None:
        self.codec, self.rows, self.stride = codec, rows, stride
        self.pieces = tuple(piece for piece in pieces if piece.length)
        assert all(n % CELL_ALIGNMENT == 0 for p in self.pieces for n in (p.source, p.target, stride))
        self.sizes = [codec.encoded_bytes(piece.length) for piece in self.pieces]
        self.longest = max((piece.length for piece in self.pieces), default=0)
        self.elements = sum(piece.length for piece in self.pieces)
        lines: list[list[int]] = []
        factor, step = 1, 0  # seed number k is the first one times the factor, plus the step
        for p in self.pieces:
            factor, step = factor * _SEED_FACTOR & _32_BITS, (step * _SEED_FACTOR + _SEED_STEP) & _32_BITS
            lines.append([p.length, p.start, p.source, p.target, p.kept, factor, step, rows, stride])
        self.table = torch.tensor(lines, dtype=torch.int64, device=device).view(-1, self.COLUMNS)
        self._last = factor, step
        places = (n for p in self.pieces for n in (p.length, p.start, p.kept))
        self.unit, self.code_unit = units(codec, [piece.length for piece in self.pieces], places)
        self.launches: dict[Any, Any] = {}  # a back end keeps here what does not change between launches

    def seeds(self, seed: int) -> Iterator[int]:
        """Return the rounding seed of each piece, where `seed` is the last one of the launch before."""
        for _ in self.pieces:
            seed = (seed * _SEED_FACTOR + _SEED_STEP) & _32_BITS
            yield seed

    def last_seed(self, seed: int) -> int:
        factor, step = self._last
        return (seed * factor + step) & _32_BITS


def units(codec: Codec, lengths: Sequence[int], places: Iterable[int]) -> tuple[int, int]:
    """Return hints for compilers: what `places` are multiples of, and the bytes at which codes of messages start."""
    splits = (SCALE_BYTES * codec.scales(length) for length in lengths)
    unit = _WIDE if all(place % _WIDE == 0 for place in places) else 1
    return unit, _WIDE if all(split % _WIDE == 0 for split in splits) else SCALE_BYTES


# `module` is a back end that encodes and decodes one message at a time.


def encode_pieces(
    module: ModuleType,
    pieces: PieceTable,
    values: torch.Tensor | None,
    wire: torch.Tensor,
    seed: int,
    kept: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Encode pieces of `values`, or for None the sums of the decoded rows, as `Kernels.encode_pieces` says."""
    for piece, size, each in zip(pieces.pieces, pieces.sizes, pieces.seeds(seed), strict=True):
        out = wire[piece.target : piece.target + size]
        if values is not None:
            x = values[piece.start : piece.start + piece.length]
        elif kept is None or scratch is None:  # no error is kept, so the sums need not be in memory
            module.decode_sum_encode(pieces.codec, _rows(pieces, piece, size, wire), piece.length, out, each)
            continue
        else:
            x = scratch[: piece.length]
            module.decode_sum(pieces.codec, _rows(pieces, piece, size, wire), x)
        if kept is None or scratch is None:
            module.encode(pieces.codec, x, out, each)
        else:
            _encode_and_keep(module, pieces.codec, x, out, each, kept.view(-1)[piece.kept :], scratch)


def decode_pieces(module: ModuleType, pieces: PieceTable, wire: torch.Tensor, out: torch.Tensor) -> None:
    for piece, size in zip(pieces.pieces, pieces.sizes, strict=True):
        rows = _rows(pieces, piece, size, wire)
        module.decode_sum(pieces.codec, rows, out[piece.start : piece.start + piece.length])


def _rows(pieces: PieceTable, piece: PiecePlace, size: int, wire: torch.Tensor) -> list[torch.Tensor]:
    starts = range(piece.source, piece.source + pieces.rows * pieces.stride, pieces.stride) if pieces.stride else ()
    return [wire[start : start + size] for start in starts or (piece.source,)]


def _encode_and_keep(
    module: ModuleType,
    codec: Codec,
    values: torch.Tensor,
    out: torch.Tensor,
    seed: int,
    error: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Encode `values` and the error that was kept, and keep what is rounded away now. `scratch` has two pieces."""
    n = values.numel()
    total, decoded = scratch.view(2, -1)[:, :n]
    error = error[:n]
    torch.add(values, error, out=total)  # `values` may be `total`
    module.encode(codec, total, out, seed)
    module.decode(codec, out, decoded)
    total.sub_(decoded)
    # A block that overflowed has no useful rounding error, so the previous error is kept.
    torch.where(total.isfinite(), total, error, out=error)
