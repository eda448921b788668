"""Exact codecs: fewer bytes on the wire, and the same bits after decoding. For bfloat16, float16 and float32.

    specification.py  plain torch, which all others equal     triton_kernels.py  Triton, on GPUs
    kernels/cpp_codecs.py  C++, on the CPU

Two codecs use what a receiver knows. Every bit pattern is restored, NaN payloads and -0 included.

- **Differences** are for weights whose old value the receiver holds. An optimizer's step is about as large for small
  weights as for large ones, so the old exponent tells how many bits the step takes.
- **Values** are for gradients. In a block of similar magnitude few exponents are common, and they take two bits.

A message has a header, a table with an entry for each block of 512 elements, and the payloads of the blocks. All
numbers are little-endian:

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

A payload of length 0 stands for zeros: no value, or no difference. One as long as its values has the values themselves,
so a message is never longer than its values, its header and its table. `specification.py` describes all others. All
back ends write the same bytes, so that any of them decodes any message.

A decoder verifies the old values and the checksum before it changes a value. On a CPU it raises `MessageError`. On a
GPU it returns the outcome, a tensor that `raise_failed` reads, because a host that waited for each message would stall
the GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import torch

from towpath.codecs.exact import specification
from towpath.codecs.exact.specification import table_bytes
from towpath.codecs.kernels import kernels_for
from towpath.core import formats
from towpath.core.formats import HEADER_BYTES, dtype_name
from towpath.errors import StepError

if TYPE_CHECKING:
    from towpath.codecs.kernels.cpp_codecs import ExactKernels

# A back end whose results the host sees at once. It has the functions of `specification`.
HostKernels: TypeAlias = "ModuleType | ExactKernels"

MAGIC = int.from_bytes(b"TPX1", "little")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

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


def message_bound(elements: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a message of so many elements takes."""
    return formats.message_bound(elements, dtype_name(dtype))


def header_words(elements: int, dtype: torch.dtype, difference: bool) -> tuple[int, int]:
    """Return the first two words of a header as integers of 64 bits."""
    return MAGIC | difference << 32 | DTYPES.index(dtype) << 40, elements


def check_arguments(values: torch.Tensor, old: torch.Tensor | None, message: torch.Tensor) -> None:
    """Check what kernels rely on: they only get addresses."""
    assert values.dtype in DTYPES and message.dtype == torch.uint8, (values.dtype, message.dtype)
    for tensor in (values, message) if old is None else (values, message, old):
        assert tensor.is_contiguous() and tensor.device == values.device, (tensor.stride(), tensor.device)
    assert old is None or (old.dtype == values.dtype and old.numel() == values.numel()), (old.dtype, old.shape)


def encode(
    old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor, kernels: HostKernels | None = None
) -> int | None:
    """Encode the change from `old` to `values`, or `values` for receivers that hold nothing.

    Args:
        old: The values that every receiver holds, or None.
        values: As many values of the same dtype. Both are contiguous.
        out: `message_bound` bytes (uint8), or more. All of them may be written. On a GPU they start at a multiple of
            8 bytes.
        kernels: By default, those of the device.

    Returns:
        The bytes of the message on a CPU. None on a GPU, where `message_bytes` reads them.
    """
    check_arguments(values, old, out)
    assert out.numel() >= message_bound(values.numel(), values.dtype), (out.shape, values.shape)
    if kernels is None and values.device.type == "cuda":
        return _gpu().encode(old, values, out)
    kernels = kernels or _host(values.device.type)
    end = HEADER_BYTES + kernels.encode(old, values, out[HEADER_BYTES:])
    nbytes = -(-end // 8) * 8
    out[end:nbytes] = 0
    first, elements = header_words(values.numel(), values.dtype, old is not None)
    relative_to = 0 if old is None else kernels.digest(old, 0)
    out[:_CHECKSUM_AT] = _octets(first, elements, nbytes, relative_to)
    out[_CHECKSUM_AT:HEADER_BYTES] = _octets(_checksum(kernels, out[:nbytes]))
    return nbytes


def decode(
    message: torch.Tensor, values: torch.Tensor, difference: bool, kernels: HostKernels | None = None
) -> torch.Tensor | None:
    """Decode a message into `values`.

    Args:
        message: The bytes that arrived. There may be more of them than the message has.
        values: The old values, which become the new ones.
        difference: Whether the message has differences, relative to what `values` hold.
        kernels: By default, those of the device.

    Returns:
        None on a CPU. On a GPU, the outcome for `raise_failed`. After a failed check `values` are as before, unless a
        correct checksum had impossible content.

    Raises:
        MessageError: On a CPU, if the message is damaged or too short, or if it is relative to other values.
    """
    check_arguments(values, None, message)
    if kernels is None and values.device.type == "cuda":
        return _gpu().decode(message, values, difference)
    kernels = kernels or _host(values.device.type)
    elements, dtype = values.numel(), values.dtype
    if len(message) < HEADER_BYTES:
        raise MessageError(f"got {len(message)} bytes: {Problem.SHORT.text}")
    first, count, nbytes, relative_to, checksum = struct.unpack("<5Q", bytes(message[:HEADER_BYTES].tolist()))
    if (first, count) != header_words(elements, dtype, difference):
        kind = "differences" if difference else "values"
        raise MessageError(
            f"got a header {first:#018x} of {count} elements instead of {kind} of {elements} elements of "
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


def decode_slices(encoded: torch.Tensor, slices: torch.Tensor, own: int, difference: bool) -> torch.Tensor:
    """Decode the messages of all members on a GPU, with as many launches as for one message.

    Args:
        encoded: One message in each row, which starts at a multiple of 8 bytes.
        slices: The slice of each message in a row of its own. With `difference`, it has the old values.
        own: The row that is already as it should be.
        difference: Whether the messages have differences.

    Returns:
        The outcome of each row: a `Problem`, or 0. No value of such a row has
        changed, unless a correct checksum had impossible content (`Problem.INVALID`).
    """
    return _gpu().decode_slices(encoded, slices, own, difference)


def message_bytes(encoded: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes of messages as their headers state them. All sizes are read with one wait for the GPU."""
    if not encoded:
        return []
    return torch.stack([message[16:24].view(torch.int64) for message in encoded]).flatten().tolist()


def is_difference(message: torch.Tensor) -> bool:
    """Return whether a message on the CPU has differences."""
    return bool(message[4])


def raise_failed(outcomes: Sequence[torch.Tensor | None]) -> None:
    """Raise `MessageError` if one of the outcomes of decoding is a failure. It waits for the GPU once."""
    on_device = [outcome for outcome in outcomes if outcome is not None]
    if on_device:
        for index, code in enumerate(torch.stack(on_device).flatten().tolist()):
            if code:
                raise MessageError(f"message {index} of {len(on_device)}: {Problem(code).text}")


def _octets(*words: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}Q", *words)), dtype=torch.uint8)


def _checksum(kernels: HostKernels, whole: torch.Tensor) -> int:
    words = _CHECKSUM_AT // 8
    return (kernels.digest(whole[:_CHECKSUM_AT], 0) + kernels.digest(whole[HEADER_BYTES:], words + 1)) % 2**64


@cache
def _host(device_type: str) -> HostKernels:
    """Return the kernels whose results the host sees at once. The log says why they are slow, if they are."""
    if kernels_for(torch.device(device_type)).name != "cpp_codecs":
        return specification
    from towpath.codecs.kernels import cpp_codecs

    return cpp_codecs.ExactKernels(cpp_codecs.LEVELS[0])


@cache
def _gpu() -> ModuleType:
    from towpath.codecs.exact import triton_kernels

    return triton_kernels
