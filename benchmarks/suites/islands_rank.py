"""A rank of an island in the drill of islands: `towpath train`, with hooks that note what counts, and kill it.

    python -m benchmarks.suites.islands_rank FOLDER SECONDS train FILE [OPTION …]

Each step takes SECONDS at least, as on an accelerator that the islands do not share. FOLDER is on the host:

    NODE/                 the log.folder of the island on this node
    events/NODE.jsonl     one line each: the rank could train, made a step, took part in an exchange, is killed
    orders/NODE.json      a phase, and after how many seconds of it this rank kills itself

The hooks wrap functions of the product, in this process only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EVALUATED_BATCHES = 64  # the loss of a few windows would depend on chance


class Drill:
    """The notes of a rank, and its end if that was ordered."""

    def __init__(self, folder: Path, seconds: float) -> None:
        node = os.uname().nodename
        self._order, self._seconds = folder / "orders" / f"{node}.json", seconds
        self._events = (folder / "events" / f"{node}.jsonl").open("a")

    def note(self, what: str, **more: Any) -> None:
        """Write an event."""
        line = {"time": time.time(), "life": os.getpid(), "what": what, **more}
        print(json.dumps(line), file=self._events, flush=True)

    def install(self) -> None:
        """Wrap the functions."""
        from towpath.outer.islands import IslandSync
        from towpath.train import trainer

        setattr(trainer, "_EVALUATED_BATCHES", _EVALUATED_BATCHES)  # noqa: B010 (it is private)
        _wrap(trainer.TrainingRun, "_met", self._met)
        _wrap(trainer.TrainingRun, "train_step", self._train_step)
        _wrap(trainer.TrainingRun, "_accumulate_gradients", self._passes)
        _wrap(IslandSync, "_exchange", self._exchange)

    def _met(self, meet: Callable[..., Any], trainer: Any, *rest: Any) -> Any:
        self.note("able")
        return meet(trainer, *rest)

    def _train_step(self, step: Callable[..., Any], trainer: Any) -> Any:
        position = trainer._island.position(trainer.state.step)
        result = step(trainer)
        self.note("step", step=result.step, position=position)
        return result

    def _passes(self, passes: Callable[..., Any], trainer: Any) -> Any:
        self._obey("step")
        until = time.monotonic() + self._seconds
        loss = passes(trainer)
        time.sleep(max(0.0, until - time.monotonic()))
        return loss

    def _exchange(self, exchange: Callable[..., Any], sync: Any, ready: Any, *rest: Any) -> Any:
        if ready["key"] is not None:
            self._obey("exchange")
        key = exchange(sync, ready, *rest)
        counts = key[1] not in sync._void
        more = {"weight": ready["weight"], "islands": sync.present, "watches": ready["key"] is None}
        self.note("exchange", step=key[0], counts=counts, **more)
        return key

    def _obey(self, phase: str) -> None:
        """Let this process be killed soon if the order names this phase."""
        try:
            order = json.loads(self._order.read_text())
        except FileNotFoundError:
            return
        if order["phase"] == phase:
            self._order.unlink()
            threading.Timer(order["seconds"], self._end).start()

    def _end(self) -> None:
        self.note("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper` be called with the wrapped method first."""
    wrapped = getattr(owner, name)

    def called(*arguments: Any) -> Any:
        return wrapper(wrapped, *arguments)

    setattr(owner, name, called)


def main() -> None:
    """Run `towpath` with hooks."""
    folder = Path(sys.argv[1])
    drill = Drill(folder, float(sys.argv[2]))
    drill.note("started")
    from towpath.cli.main import main as towpath

    drill.install()  # it imports torch
    sys.argv = ["towpath", *sys.argv[3:], f"log.folder={folder / os.uname().nodename}"]
    towpath()


if __name__ == "__main__":
    main()
