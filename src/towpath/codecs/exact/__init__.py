"""Exact codecs: fewer bytes on the wire, and the same bits after decoding. For bfloat16, float16 and float32.

    message.py    the header of a message, and what is checked     specification.py  plain torch, which all others equal
    cpp.py        C++, on the CPU                                  triton_kernels.py  Triton, on GPUs

Two codecs use what a receiver knows. Every bit pattern is restored, NaN payloads and -0 included.

- **Differences** are for weights whose old value the receiver holds. An optimizer's step is about as large for small
  weights as for large ones, so the old exponent tells how many bits the step takes.
- **Values** are for gradients. In a block of similar magnitude few exponents are common, and they take two bits.

A message has a header, a table with an entry for each block of 512 elements, and the payloads of the blocks
(`specification.py`). All back ends write the same bytes, so that any of them decodes any message. A block that would
not shrink is sent as it is, so a message is never longer than its values, its header and its table.

A message says which values its differences are relative to, and has a checksum. A decoder verifies both before it
changes a value. On a CPU it raises `MessageError`. On a GPU it returns the outcome, a tensor that `raise_failed` reads,
because a host that waited for each message would stall the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch

from towpath.codecs.exact import message as messages
from towpath.codecs.exact import specification
from towpath.codecs.exact.message import MessageError, Problem, message_bound
from towpath.logs import logger

_log = logger("codecs")


def encode(old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> int | None:
    """Encode the change from `old` to `values`, or `values` for receivers that hold nothing.

    Args:
        old: The values that every receiver holds, or None.
        values: As many values of the same dtype. Both are contiguous.
        out: `message_bound` bytes (uint8), or more. All of them may be written. On a GPU they start at a multiple of
            8 bytes.

    Returns:
        The bytes of the message on a CPU. None on a GPU, where `message_bytes` reads them.
    """
    messages.check_arguments(values, old, out)
    assert out.numel() >= message_bound(values.numel(), values.dtype), (out.shape, values.shape)
    if values.device.type == "cuda":
        return _gpu().encode(old, values, out)
    return messages.encode(_host(values.device.type), old, values, out)


def decode(message: torch.Tensor, values: torch.Tensor, difference: bool) -> torch.Tensor | None:
    """Decode a message into `values`.

    Args:
        message: The bytes that arrived. There may be more of them than the message has.
        values: The old values, which become the new ones.
        difference: Whether the message has differences, relative to what `values` hold.

    Returns:
        None on a CPU. On a GPU, the outcome for `raise_failed`. After a failed check `values` are as before, unless a
        correct checksum had impossible content.

    Raises:
        MessageError: On a CPU, if the message is damaged or too short, or if it is relative to other values.
    """
    messages.check_arguments(values, None, message)
    if values.device.type == "cuda":
        return _gpu().decode(message, values, difference)
    return messages.decode(_host(values.device.type), message, values, difference)


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


@cache
def _host(device_type: str) -> messages.HostKernels:
    """Return the kernels whose results the host sees at once."""
    if device_type == "cpu":
        try:
            from towpath.codecs.exact import cpp
        except ImportError as error:
            _log.warning(
                "exact codecs on cpu: plain torch (%s), far slower than C++. With a C++ compiler at hand, install "
                "towpath again.",
                error,
            )
            return specification
        return cpp.best()
    _log.warning("exact codecs on %s: plain torch, because there are no kernels for this device.", device_type)
    return specification


@cache
def _gpu() -> ModuleType:
    from towpath.codecs.exact import triton_kernels

    return triton_kernels
