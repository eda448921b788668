"""The top-k codec of outer steps: the largest elements of each chunk, in two bits each (SparseLoCo).

A message has one block of bytes for each chunk of 4,096 elements:

    positions   12 bits for each element that is sent
    values      2 bits for each of them: its sign, and which of two magnitudes it has
    magnitudes  two float16 numbers

What is not sent, and what is rounded away, is kept and added the next time. The decay makes what was kept smaller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from towpath.errors import ConfigError

TOP_K = "top-k"
CHUNK = 4096
_MAGNITUDE_BYTES = 4


@dataclass(frozen=True, slots=True)
class TopK:
    """The codec that sends the `keep` largest elements of each chunk of 4,096.

    Attributes:
        keep: The number of elements of each chunk that are sent, a multiple of 4.
        decay: What is kept of the error at each exchange. With 1, nothing is ever lost.
    """

    keep: int
    decay: float = 1.0

    def __post_init__(self) -> None:
        if type(self.keep) is not int or not 0 < self.keep <= CHUNK // 4 or self.keep % 4:
            raise ConfigError(
                f"TopK: keep is how many of {CHUNK} elements are sent: a multiple of 4 up to {CHUNK // 4}; got "
                f"{self.keep!r}."
            )
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"TopK: decay is a number from 0 to 1; got {self.decay!r}.")

    @staticmethod
    def parse(text: str) -> TopK:
        """Return the codec that text such as 'top-k:64+decay:0.95' names. Raise ConfigError for other text."""
        match = re.fullmatch(rf"{TOP_K}:(\d+)(?:\+decay:(\d+(?:\.\d+)?))?", text)
        if match is None:
            raise ConfigError(
                f"not a codec: {text!r}. Write '{TOP_K}:' and how many of {CHUNK} elements are sent, as in "
                f"'{TOP_K}:64', and if need be what is kept of the error, '{TOP_K}:64+decay:0.95'."
            )
        return TopK(int(match[1]), float(match[2] or 1))

    def __str__(self) -> str:
        return f"{TOP_K}:{self.keep}" + (f"+decay:{self.decay:g}" if self.decay != 1 else "")

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions in a chunk."""
        return self.keep * 3 // 2

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of a chunk."""
        return self.keep // 4

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of a message."""
        return self.position_bytes + self.value_bytes + _MAGNITUDE_BYTES

    def encoded_bytes(self, elements: int) -> int:
        """Return how many bytes a message with so many elements has."""
        return -(-elements // CHUNK) * self.chunk_bytes
