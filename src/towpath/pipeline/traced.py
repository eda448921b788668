"""What a traced pipeline shows beside its engines: its passes, and the messages between stages.

A message begins where this end lets it move, and ends where its end is waited for: what is received then when it is
needed, what is sent when the schedule looks after it. Outside its passes a rank waits for its neighbours. On a backend
that batches messages, as NCCL, they are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from towpath.engine.executor import Engine
from towpath.engine.streams.record import BETWEEN, INSIDE, Trace
from towpath.observing import traced
from towpath.topology.groups import Groups

NEIGHBOURS = "for neighbours"


class TracedStages:
    """Of one rank. `crosses`: whether what a stage of that number exchanges with the next one leaves its node."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._crosses: Callable[[int], bool] = lambda stage: True

    @contextmanager
    def recording(
        self, engines: Sequence[Engine], meshes: Sequence[Groups], crosses: Callable[[int], bool]
    ) -> Generator[Trace]:
        """Every rank must trace the same steps. `meshes`: through which all ranks of the pipeline meet."""
        with traced(engines, meshes) as trace:
            self.trace, self._crosses = trace, crosses
            try:
                yield trace
            finally:
                self.trace = None

    @contextmanager
    def walking(self) -> Generator[None]:
        """Around the whole schedule."""
        if self.trace is None:
            yield
            return
        with self.trace.phase(NEIGHBOURS, waiting=True):
            yield

    @contextmanager
    def computing(self, work: str, stage: int, micro_batch: int) -> Generator[None]:
        if self.trace is None:
            yield
            return
        with self.trace.phase(f"{work} of stage {stage}, micro-batch {micro_batch}"):
            yield

    def messages(self, operations: list[dist.P2POp], kind: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
        """The same, but seen. `stage`: the one before the link that they take."""
        if self.trace is not None:
            track = BETWEEN if self._crosses(stage) else INSIDE
            for each in operations:
                word = "sent" if each.op is dist.isend else "received"
                name = f"{kind}, micro-batch {micro_batch}, {word}"
                each.op = _Seen(each.op, self.trace, track, name, each.tensor.nbytes, micro_batch)
        return operations


class _Seen:
    """Posts a message as `post` does."""

    def __init__(
        self, post: Callable[..., Any], trace: Trace, track: str, name: str, nbytes: int, micro_batch: int
    ) -> None:
        self._post, self._trace, self._track, self._name = post, trace, track, name
        self._args: dict[str, str | int] = {"bytes": nbytes, "micro_step": micro_batch}

    def __call__(self, *args: Any, group_src: int | None = None, group_dst: int | None = None, **others: Any) -> Any:
        # PyTorch knows a send by its function, and so takes this one for a receive.
        peer = group_dst if group_dst is not None else group_src
        end = {"group_dst" if self._post is dist.isend else "group_src": peer}
        began = self._trace.mark()
        work = self._post(*args, **end, **others)
        return None if work is None else _SeenWork(work, lambda: self._ended(began))

    def _ended(self, began: Any) -> None:
        self._trace.add(self._track, self._name, began, self._trace.mark(), self._args)


class _SeenWork:
    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        found = self._work.wait(*args, **kwargs)
        self._ended()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
