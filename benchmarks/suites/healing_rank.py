"""A rank of the healing drill: `towpath train`, with hooks that note what happens, and stop the rank where it is lost.

    python -m benchmarks.suites.healing_rank FOLDER train FILE [OPTION …]

FOLDER is on the host, outside of what the drill destroys:

    events/rank-R.jsonl    one line for each start, join, load, step and end of rank R: when, and what
    order.json             the rank that is to be lost, where in a step, and after how many steps
    hit-N                  rank of order N has come there. It waits for its end
    final/                 a checkpoint of the last state, which all ranks write

The hooks wrap functions of the product by name, in this process only.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# By phase, the functions at whose begin a rank can be lost. The first call is in the training thread, those of the
# exchange and of publishing in the thread of a snapshot. Moves are what a rebuilt node gets from its buddy.
POINTS: dict[str, tuple[str, ...]] = {
    "snapshot": ("towpath.protect.snapshots:Snapshots._begin",),
    "exchange": ("towpath.protect.buddies:BuddyExchange.run",),
    "publishing": ("towpath.protect.snapshots:Snapshots._publish",),
    "starting": ("towpath.train.job:init",),
    "healing": ("towpath.protect.healing:move", "towpath.checkpoint:load"),
}


class Drill:
    """The notes of a rank of the drill, and the places where it stops."""

    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.step = 0  # that is under way, counted from 1
        self._folder, self._has_raised = folder, False
        self._events = (folder / "events" / f"rank-{self.rank}.jsonl").open("a")

    def note(self, what: str, **more: Any) -> None:
        """Write an event."""
        print(json.dumps({"time": time.time(), "what": what, **more}), file=self._events, flush=True)

    def point(self, phase: str, *_: Any) -> None:
        """Stop here for ever if the order says so."""
        try:
            order = json.loads((self._folder / "order.json").read_text())
        except FileNotFoundError:
            return
        if (order["rank"], order["phase"]) != (self.rank, phase) or self.step < order["step"]:
            return
        try:
            (self._folder / f"hit-{order['number']}").touch(exist_ok=False)
        except FileExistsError:
            return
        threading.Event().wait()

    def install(self) -> None:
        """Wrap the functions of the trainer and of the product."""
        for phase, names in POINTS.items():
            for name in names:
                self._wrap(name, before=functools.partial(self.point, phase))
        self._wrap("towpath.checkpoint:load", after=lambda *_: self.note("loaded"))
        self._wrap("towpath.train.job:init", after=lambda *_: self.note("joined"))
        self._wrap("towpath.train.trainer:TrainingRun.__init__", after=self._built)
        self._wrap("towpath.train.trainer:TrainingRun.train_step", before=self._begin_step, after=self._end_step)
        self._wrap("towpath.train.trainer:TrainingRun.evaluate", after=self._evaluated)
        self._wrap("towpath.train.trainer:TrainingRun.train", after=self._trained)

    def _wrap(
        self, name: str, before: Callable[..., None] = lambda *_: None, after: Callable[..., None] = lambda *_: None
    ) -> None:
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        wrapped = getattr(owner, attribute)

        @functools.wraps(wrapped)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            before(*arguments)
            try:
                result = wrapped(*arguments, **options)
            except BaseException as error:
                if not self._has_raised and threading.current_thread() is threading.main_thread():
                    self._has_raised = True  # wrapped functions call each other
                    self.note("raised", text=f"{type(error).__name__}: {error}"[:200])
                raise
            after(result, *arguments)
            return result

        setattr(owner, attribute, wrapper)

    def _built(self, _: None, trainer: Any, *__: Any) -> None:
        self.note("built")
        blocks = [module for name, module in trainer.bundle.model.named_modules() if name.split(".")[-1] == "1"]

        def in_backward(_: Any) -> None:
            self.point("backward")

        def in_optimizer(*_: Any) -> None:
            self.point("optimizer")

        def in_forward(_: Any, __: Any, output: Any) -> None:
            self.point("forward")
            if output.requires_grad:
                output.register_hook(in_backward)

        blocks[0].register_forward_hook(in_forward)
        trainer.optimizer.register_step_pre_hook(in_optimizer)

    def _begin_step(self, trainer: Any) -> None:
        self.step = trainer.state.step + 1

    def _end_step(self, result: Any, trainer: Any) -> None:
        loss, norm = (float(value).hex() for value in result.means())
        self.note("step", step=result.step, loss=loss, norm=norm)

    def _evaluated(self, result: tuple[float, float], trainer: Any) -> None:
        self.note("evaluated", step=trainer.state.step, loss=float(result[0]).hex())

    def _trained(self, _: int, trainer: Any) -> None:
        from towpath import checkpoint

        if trainer.state.step < trainer.config.train.steps:  # a signal has stopped it
            return
        state = checkpoint.State(trainer.model, trainer.optimizer, training=trainer.state)
        problem = checkpoint.save(self._folder / "final", trainer.state.step, state)
        self.note("final", outcome=str(problem))


def main() -> None:
    """Run `towpath` with hooks."""
    drill = Drill(Path(sys.argv[1]))
    drill.note("started")
    from towpath.cli.main import main as towpath

    drill.install()  # it imports torch
    drill.note("imported")
    sys.argv = ["towpath", *sys.argv[2:]]
    try:
        towpath()
    except SystemExit as end:
        if end.code:
            drill.note("error", code=end.code)
        raise
    except BaseException as error:
        drill.note("error", code=1, text=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
