"""What ranks tell one another beside their transfers, through the store at which they met.

Nobody waits here for a peer that does not come: a note is there or it is not. So it says what a peer is doing when the
transfers between the two do not come to an end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, final

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.1


@final
class Noticeboard:
    """The notes of the ranks of one process group. A connection of its own is made when it is first used."""

    def __init__(self, group: str, rank: int, world: int) -> None:
        self._group, self.rank, self.world = group, rank, world
        self._made: Store | None = None

    def post(self, note: str) -> None:
        """In place of this rank's earlier note. A store that is gone is no reason to fail."""
        try:
            self._store().set(self._key("note", self.rank), note)
        except (RuntimeError, OSError):
            return

    def read(self, ranks: Sequence[int]) -> dict[int, str | None]:
        """The notes of `ranks`; None for a rank that has left none, or where the store is gone."""
        return {rank: self._read(self._key("note", rank)) for rank in ranks}

    def meet(self, event: str, word: str, patience_seconds: float) -> dict[int, str]:
        """Come to `event` with a word for the others, and wait for them: the words of those that came in time."""
        until, pause = time.monotonic() + patience_seconds, _FIRST_PAUSE_SECONDS
        self._store().set(self._key(event, self.rank), word)
        came: dict[int, str] = {}
        while True:
            for rank in set(range(self.world)) - came.keys():
                said = self._read(self._key(event, rank))
                if said is not None:
                    came[rank] = said
            if len(came) == self.world or time.monotonic() > until:
                return came
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _read(self, key: str) -> str | None:
        try:
            store = self._store()
            return store.get(key).decode() if store.check([key]) else None
        except (RuntimeError, OSError):
            return None

    def _key(self, what: str, rank: int) -> str:
        return f"towpath/{self._group}/{what}/{rank}"

    def _store(self) -> Store:
        if self._made is None:
            # Cloned: one that is used by another thread, which may be waiting for a peer, would have us wait too.
            store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self._made = store.clone()
        assert self._made is not None
        return self._made
