"""Freed memory stays with a rank that is timed.

After a backward pass glibc gives the top of its heap back to the system, or not: that depends on what happens to lie
above. Where it does, the next forward takes the pages anew, one fault each, and that is no contestant's doing
(benchmarks/LOG.md, "Overhead on one rank").
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
_LARGEST = 1 << 25  # what glibc takes at most; larger tensors have mappings of their own


def keep_freed_memory() -> None:
    """From here on, in this process, where the C library is glibc."""
    if library := _glibc():
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)


def give_freed_memory_back() -> None:
    """Once, so that what the system counts is what is held."""
    if library := _glibc():
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
