"""What ranks tell one another beside their transfers, through the store at which they met.

Nobody waits here for a peer that does not come: a note is there or it is not. So it says what a peer is doing when the
transfers between the two do not come to an end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

Answer = TypeVar("Answer")

# A store that is there answers in milliseconds.
_PATIENCE_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.1


@final
class StatusStore:
    """The notes of the ranks of one process group. A connection of its own is made when it is first used."""

    def __init__(self, group: str, rank: int, world: int) -> None:
        self._group, self.rank, self.world = group, rank, world
        self._made: Store | None = None

    def post(self, note: str) -> None:
        """In place of this rank's earlier note."""
        self._within_reach(lambda store: store.set(self._key("note", self.rank), note), None)

    def read(self, ranks: Sequence[int]) -> dict[int, str | None]:
        """The notes of `ranks`; None for a rank that has left none, or where the store is out of reach."""
        found = self._read({rank: self._key("note", rank) for rank in ranks})
        return {rank: found.get(rank) for rank in ranks}

    def meet(
        self, event: str, word: str, patience_seconds: float, raise_if_stuck: Callable[[], None] = lambda: None
    ) -> dict[int, str]:
        """Come to `event` with a word for the others, and wait for them: the words of those that came in time.

        `raise_if_stuck` is called again and again meanwhile, and may raise.
        """
        until, pause = time.monotonic() + patience_seconds, _FIRST_PAUSE_SECONDS
        self._within_reach(lambda store: store.set(self._key(event, self.rank), word), None)
        came: dict[int, str] = {self.rank: word}
        while True:
            came |= self._read({rank: self._key(event, rank) for rank in range(self.world) if rank not in came})
            if len(came) == self.world or time.monotonic() > until:
                return came
            raise_if_stuck()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _read(self, keys: Mapping[int, str]) -> dict[int, str]:
        """Of those that are there."""

        def there(store: Store) -> dict[int, str]:
            return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}

        return self._within_reach(there, {})

    def _within_reach(self, work: Callable[[Store], Answer], otherwise: Answer) -> Answer:
        """What the store answers. One that is gone, or behind a link that is, answers nothing: nobody waits for it."""
        answers: list[Answer] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                answers.append(work(self._store()))

        asking = threading.Thread(target=ask, name="towpath-noticeboard", daemon=True)
        asking.start()
        asking.join(_PATIENCE_SECONDS)
        return answers[0] if answers else otherwise

    def _key(self, what: str, rank: int) -> str:
        return f"towpath/{self._group}/{what}/{rank}"

    def _store(self) -> Store:
        if self._made is None:
            # Cloned: one that is used by another thread, which may be waiting for a peer, would have us wait too.
            store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self._made = store.clone()
        assert self._made is not None
        return self._made
