"""Exchanges through the store of the launcher: the rendezvous of the ranks, and their status notes.

torchrun keeps one store for all its restarts. Killed ranks leave the addresses there at which they listened. New ranks
that took these for their peers' addresses would hang, or fail to connect. torchrun's count of restarts does not help:
each node's agent counts on its own, and does not count a change of nodes. So the ranks agree on a prefix of the store
that is new.

    rank r    sets hello/r to a random word, waits for an answer to this word, and confirms the answer
    rank 0    answers every word that it finds, those of dead ranks too, until all ranks have confirmed

`StatusStore` holds short notes of the ranks. Reading one never waits for another rank, so a rank can look up what a
peer is doing when a transfer between the two does not end.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from towpath.daemons import start_daemon
from towpath.errors import ConfigError

Answer = TypeVar("Answer")

DEFAULT_TIMEOUT = timedelta(minutes=10)
_PAUSE_SECONDS = 0.005
# A store that is reachable answers in milliseconds.
_REACH_SECONDS = 2.0
# A store that has not answered may be gone with rank 0. Notes can do without it for this long.
_PATIENCE_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.1


def join_store(timeout: timedelta | None = None) -> tuple[Store, int, int]:
    """Return a store of these ranks alone, this rank, and the number of ranks that the launcher started."""
    timeout = timeout or DEFAULT_TIMEOUT
    store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    return PrefixStore(f"towpath/{agree_on_name(store, rank, world, timeout)}", store), rank, world


def agree_on_name(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return a name that is the same on all ranks, and was never used before in this store.

    It polls, so that Python can handle signals in the meantime.
    """
    until = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    store.set(f"towpath/hello/{rank}", word)
    if rank == 0:
        _answer_all(store, word, world, until)
        return word
    answer = f"towpath/answer/{word}"
    while not store.check([answer]):
        _pause(until, "rank 0")
    name = store.get(answer).decode()
    store.set(f"towpath/understood/{name}/{rank}", "")
    return name


def _answer_all(store: Store, name: str, world: int, until: float) -> None:
    missing = set(range(1, world))
    answered: set[str] = set()
    while missing:
        for rank in sorted(missing):
            hello = f"towpath/hello/{rank}"
            word = store.get(hello).decode() if store.check([hello]) else None
            if word is not None and word not in answered:
                store.set(f"towpath/answer/{word}", name)
                answered.add(word)
            if store.check([f"towpath/understood/{name}/{rank}"]):
                missing.remove(rank)
        _pause(until, f"ranks {sorted(missing)}")


def _pause(until: float, missing: str) -> None:
    if time.monotonic() > until:
        raise ConfigError(f"{missing} did not come to where the ranks meet. See what the launcher says of them.")
    time.sleep(_PAUSE_SECONDS)


def gather_through_store(store: Store, name: str, rank: int, world: int, value: Any, timeout: timedelta) -> list[Any]:
    """Return the JSON value of every rank, by rank. Only the store carries them. `name` must be new in it."""
    keys = [f"towpath/gathered/{name}/{each}" for each in range(world)]
    try:
        store.set(keys[rank], json.dumps(value))
        store.wait(keys, timeout)
    except RuntimeError as error:
        who = "the process that holds the store, which is rank 0 or its launcher, has ended"
        with contextlib.suppress(RuntimeError):
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            who = f"ranks {missing} of the process group did not come here in {timeout.total_seconds():.0f} s"
        raise ConfigError(
            f"rank {rank}: {who}. Every rank must make the same calls: see what these printed."
        ) from error
    return [json.loads(text) for text in store.multi_get(keys)]


@final
class StatusStore:
    """The status notes of the ranks of one process group.

    It makes a connection of its own to the store when it is first used.
    """

    def __init__(self, group: str, rank: int, world: int) -> None:
        self._group, self.rank, self.world = group, rank, world
        self._connection: Store | None = None
        self._silent_until = 0.0

    def post(self, note: Any) -> None:
        """Replace this rank's note. None removes it."""
        if note is None or time.monotonic() >= self._silent_until:
            self._set("note", note)

    def read(self, ranks: Sequence[int], event: str = "note") -> dict[int, Any]:
        """Return the notes of those of `ranks` that have one. If the store cannot be reached, none has."""
        keys = {rank: self._key(event, rank) for rank in ranks}
        if event == "note" and time.monotonic() < self._silent_until:
            return {}

        def existing(store: Store) -> dict[int, bytes]:
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        notes = {rank: pickle.loads(note) for rank, note in self._ask(existing, {}).items()}
        return {rank: note for rank, note in notes.items() if note is not None}

    def exchange(
        self, event: str, word: Any, timeout_seconds: float, raise_if_stuck: Callable[[], None] = lambda: None
    ) -> dict[int, Any]:
        """Post a word for `event`, and return the words of the ranks that posted theirs in time.

        Args:
            event: A name that every rank uses once.
            raise_if_stuck: A function that is called repeatedly while this rank waits, and may raise.
        """
        until, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
        self._set(event, word)
        words: dict[int, Any] = {self.rank: word}
        while True:
            words |= self.read([rank for rank in range(self.world) if rank not in words], event)
            if len(words) == self.world or time.monotonic() > until:
                return words
            raise_if_stuck()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _set(self, what: str, value: Any) -> None:
        note: Any = pickle.dumps(value)
        self._ask(lambda store: store.set(self._key(what, self.rank), note), None)

    def _ask(self, work: Callable[[Store], Answer], otherwise: Answer) -> Answer:
        """Return what `work` returns, or `otherwise` if the store does not answer in two seconds.

        The work runs in a daemon thread, because a call to a store behind a broken link would block.
        """
        answers: list[Answer] = []

        def ask() -> None:
            # A ValueError means that the process group was destroyed meanwhile.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                answers.append(work(self._store()))

        asking = start_daemon("towpath-status-store", ask)
        asking.join(_REACH_SECONDS)
        if not answers:
            self._silent_until = time.monotonic() + _PATIENCE_SECONDS
        return answers[0] if answers else otherwise

    def _key(self, what: str, rank: int) -> str:
        return f"towpath/{self._group}/{what}/{rank}"

    def _store(self) -> Store:
        if self._connection is None:
            # The clone has a connection of its own. Another thread may be waiting for a peer on the default store's
            # connection, and a call there would wait for that thread.
            store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self._connection = store.clone()
        assert self._connection is not None
        return self._connection
