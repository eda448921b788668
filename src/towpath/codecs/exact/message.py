"""The header of an exact message: what it is, how long it is, and what must hold before a value changes.

The bytes of a message, in which all numbers are little-endian:

     0   b"TPX1"
     4   0 for values, 1 for differences
     5   the dtype: 0 for bfloat16, 1 for float16, 2 for float32
     6   two bytes of zero
     8   the number of elements
    16   the bytes of the message, a multiple of 8. Zeros fill it up.
    24   the digest of the old values, or 0
    32   the checksum: the digest of the message without these 8 bytes
    40   the table: for each block the length of its payload (16 bits) and its parameter (16 bits)
         the payloads, one after another

A payload of length 0 stands for zeros: no value, or no difference. One as long as its values has the values themselves.
All others are described in `specification.py`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Protocol

import torch

from towpath.core import formats
from towpath.core.formats import BLOCK, ENTRY_BYTES, HEADER_BYTES, dtype_name
from towpath.errors import StepError

MAGIC = int.from_bytes(b"TPX1", "little")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_HEADER = struct.Struct("<IBBHQQQQ")
_CHECKSUM_AT = 32


class MessageError(StepError):
    """An exact message that is damaged, too short, of other elements, or relative to values that this rank lacks."""


class Problem(IntEnum):
    """The checks of a message, in their order. Decoders on GPUs return the first that fails, or 0."""

    OTHER = 1
    SHORT = 2
    DAMAGED = 3
    STALE = 4
    INVALID = 5

    @property
    def text(self) -> str:
        """The error text: what was wrong, and what to do."""
        return _TEXTS[self]


_TEXTS = {
    Problem.OTHER: "the bytes are not the expected exact message. Run the same version of Towpath, with the same "
    "strategy and model, on all ranks.",
    Problem.SHORT: "the exact message is longer than what arrived. Receive message_bound() bytes.",
    Problem.DAMAGED: "the checksum of an exact message is wrong, so its bytes changed on the way or in memory. Load "
    "the last checkpoint, and check the network and the memory of both nodes if it happens again.",
    Problem.STALE: "the exact difference is relative to other values than this rank holds, so replicas have diverged. "
    "Load a checkpoint on all ranks. If you write parameters by hand, write the same values on all ranks.",
    Problem.INVALID: "the exact message has a correct checksum but impossible content. Run the same version of Towpath "
    "on all ranks, and report a bug if they do.",
}


class HostKernels(Protocol):
    """A back end whose results the host sees at once. A module or an object with these functions."""

    def digest(self, values: torch.Tensor, first: int) -> int:
        """Return the digest of a contiguous tensor. Its first 8 bytes are word number `first`."""
        ...

    def encode(self, old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> int:
        """Write the table and the payloads into `out`. Return their bytes."""
        ...

    def decode(self, body: torch.Tensor, values: torch.Tensor, difference: bool) -> bool:
        """Decode the table and the payloads into `values`. Return whether the content is possible."""
        ...


def message_bound(elements: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a message of so many elements takes."""
    return formats.message_bound(elements, dtype_name(dtype))


def table_bytes(elements: int) -> int:
    return ENTRY_BYTES * -(-elements // BLOCK)


def header_words(elements: int, dtype: torch.dtype, difference: bool) -> tuple[int, int]:
    """Return the first two words of a header as integers of 64 bits."""
    return MAGIC | difference << 32 | DTYPES.index(dtype) << 40, elements


def check_arguments(values: torch.Tensor, old: torch.Tensor | None, message: torch.Tensor) -> None:
    """Check what kernels rely on: they only get addresses."""
    assert values.dtype in DTYPES and message.dtype == torch.uint8, (values.dtype, message.dtype)
    for tensor in (values, message) if old is None else (values, message, old):
        assert tensor.is_contiguous() and tensor.device == values.device, (tensor.stride(), tensor.device)
    assert old is None or (old.dtype == values.dtype and old.numel() == values.numel()), (old.dtype, old.shape)


def encode(kernels: HostKernels, old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> int:
    """Write a message into `out`. Return its bytes."""
    end = HEADER_BYTES + kernels.encode(old, values, out[HEADER_BYTES:])
    nbytes = -(-end // 8) * 8
    out[end:nbytes] = 0
    first, elements = header_words(values.numel(), values.dtype, old is not None)
    relative_to = 0 if old is None else kernels.digest(old, 0)
    header = struct.pack("<4Q", first, elements, nbytes, relative_to)
    out[:_CHECKSUM_AT] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    checksum = struct.pack("<Q", _checksum(kernels, out[:nbytes]))
    out[_CHECKSUM_AT:HEADER_BYTES] = torch.frombuffer(bytearray(checksum), dtype=torch.uint8)
    return nbytes


def decode(kernels: HostKernels, message: torch.Tensor, values: torch.Tensor, difference: bool) -> None:
    """Decode a message into `values`, or raise `MessageError`."""
    elements, dtype = values.numel(), values.dtype
    if len(message) < HEADER_BYTES:
        raise MessageError(f"got {len(message)} bytes: {Problem.SHORT.text}")
    *start, count, nbytes, relative_to, checksum = _HEADER.unpack(bytes(message[:HEADER_BYTES].tolist()))
    if (start, count) != ([MAGIC, difference, DTYPES.index(dtype), 0], elements):
        kind = "differences" if difference else "values"
        raise MessageError(
            f"got a header {start} of {count} elements instead of {kind} of {elements} elements of "
            f"{dtype_name(dtype)}: {Problem.OTHER.text}"
        )
    if not HEADER_BYTES + table_bytes(elements) <= nbytes <= len(message) or nbytes % 8:
        raise MessageError(f"got {len(message)} of {nbytes} bytes: {Problem.SHORT.text}")
    whole = message[:nbytes]
    if (found := _checksum(kernels, whole)) != checksum:
        raise MessageError(f"got {found:#018x} instead of {checksum:#018x}: {Problem.DAMAGED.text}")
    if difference and (held := kernels.digest(values, 0)) != relative_to:
        raise MessageError(f"got {held:#018x} instead of {relative_to:#018x}: {Problem.STALE.text}")
    if not kernels.decode(whole[HEADER_BYTES:], values, difference):
        raise MessageError(Problem.INVALID.text)


def _checksum(kernels: HostKernels, whole: torch.Tensor) -> int:
    words = _CHECKSUM_AT // 8
    return (kernels.digest(whole[:_CHECKSUM_AT], 0) + kernels.digest(whole[HEADER_BYTES:], words + 1)) % 2**64
