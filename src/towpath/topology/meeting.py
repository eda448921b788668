"""Where the ranks of a launcher meet: at its store, but apart from those that met there before.

torchrun keeps one store for all its restarts. What killed ranks left in it, the addresses they listened at, would be
taken for those of the new ones: they then hang, or fail to connect. (Its count of restarts does not tell the times
apart: each node's agent has its own, and a change of nodes is not counted.) So the ranks agree on a name that is new.

    rank r    hello r = a word of its own     waits for an answer to that very word, and says that it has it
    rank 0    answers every word it sees, dead ranks' too, until each rank has said that it has the answer
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from towpath.errors import TopologyError

PATIENCE = timedelta(minutes=10)
_PAUSE_SECONDS = 0.005


def meet(timeout: timedelta | None = None) -> tuple[Store, int, int]:
    """Return a store of these ranks alone, this rank, and how many ranks the launcher started.

    Wait at most `timeout` for the other ranks, by default ten minutes.
    """
    patience = timeout or PATIENCE
    store, rank, world = next(iter(rendezvous("env://", timeout=patience)))
    return PrefixStore(f"towpath/{agreed_name(store, rank, world, patience)}", store), rank, world


def gather_through(store: Store, name: str, rank: int, world: int, value: Any, patience: timedelta) -> list[Any]:
    """Return the JSON value of every rank, by rank. Only the store carries them. `name` must be new in it."""
    keys = [f"towpath/gathered/{name}/{each}" for each in range(world)]
    store.set(keys[rank], json.dumps(value))
    try:
        store.wait(keys, patience)
    except RuntimeError as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise TopologyError(
            f"rank {rank}: ranks {missing} of the process group did not come here in {patience.total_seconds():.0f} s. "
            "Every rank must make the same calls: see what these printed."
        ) from error
    return [json.loads(told) for told in store.multi_get(keys)]


def agreed_name(store: Store, rank: int, world: int, patience: timedelta) -> str:
    """The same on all ranks, and never used before in this store. Polls, so that signals are heard meanwhile."""
    until = time.monotonic() + patience.total_seconds()
    word = uuid.uuid4().hex
    store.set(f"towpath/hello/{rank}", word)
    if rank == 0:
        _answer(store, word, world, until)
        return word
    _until(store, f"towpath/answer/{word}", until, "rank 0")
    name = store.get(f"towpath/answer/{word}").decode()
    store.set(f"towpath/understood/{name}/{rank}", "")
    return name


def _answer(store: Store, name: str, world: int, until: float) -> None:
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


def _until(store: Store, key: str, until: float, whom: str) -> None:
    while not store.check([key]):
        _pause(until, whom)


def _pause(until: float, whom: str) -> None:
    if time.monotonic() > until:
        raise TopologyError(f"{whom} did not come to where the ranks meet. See what the launcher says of them.")
    time.sleep(_PAUSE_SECONDS)
