"""The checkpoints of a training run: where it resumes, when it saves, and what it prints about both."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from towpath import checkpoint
from towpath.checkpoint import folders
from towpath.errors import CheckpointError, ConfigError, StepError

if TYPE_CHECKING:
    from towpath.train.trainer import TrainingRun

# Options of the optimizer for which the current configuration counts, and not the one of the checkpoint.
_CONFIGURED_OPTIONS = ("betas", "eps", "weight_decay", "momentum")

_SECONDS_BETWEEN = 600.0  # if checkpoint.every does not say how many steps
_STEPS_LATE = 2  # from the step after which a rank sets a flag to the one in which islands have counted it
# If the run fails, seconds to wait for the checkpoint that is being written. It needs no other rank.
_PATIENCE_SECONDS = 60.0


@dataclass(slots=True)
class TrainState:
    """The position of a run: what a checkpoint holds in addition to the model and the optimizer."""

    order: dict[str, Any]  # everything that decides which sample has which number
    step: int = 0  # optimizer steps so far
    samples: int = 0  # samples that all ranks together have read
    reordered: tuple[str, ...] = ()  # the entries of `order` that differ from those of the checkpoint
    stopped_by: int = 0  # the signal by which a rank was stopped, or 0. All ranks have the same value
    save_wanted: bool = False  # whether the clock of this rank says that it is time to save
    save_due: bool = False  # whether that was so on any rank before this step. All ranks have the same value

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"steps": self.step, "samples": self.samples, "order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position from a checkpoint, and find what of the order has changed."""
        counts = [state_dict[key] for key in ("steps", "samples")]
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"steps and samples are {counts}; expected counts")
        self.step, self.samples = counts
        self.reordered = tuple(what for what, value in self.order.items() if state_dict["order"].get(what) != value)


class CheckpointManager:
    """Resumes a run, and saves it. Use it as a context around the steps, which also saves the last state.

    Every rank must create it and make the same calls.
    """

    def __init__(self, trainer: TrainingRun) -> None:
        config, resume = trainer.config, trainer.config.checkpoint.resume
        self._folder = Path(config.log.folder, folders.IN_RUN)
        # The folder or checkpoint to resume from. The run's own folder has one spelling only.
        source = None if resume == "off" else self._folder if resume == "auto" else folders.search_folder(Path(resume))
        self._source = self._folder if source and source.resolve() == self._folder.resolve() else source
        self._every, self._steps = config.checkpoint.every, config.train.steps
        self._job, self._state, self._optimizer = trainer.job, trainer.state, trainer.optimizer
        self._settle, self._islands = trainer.settle, trainer.strategy.islands
        about = trainer.bundle.config_json
        self._contents = checkpoint.State(trainer.model, trainer.optimizer, config=about, training=trainer.state)
        self._saver = checkpoint.Saver(self._folder, self._contents, keep_last=config.checkpoint.keep or None)
        self._saved: int | None = None  # the step that is saved, or being saved
        self._saving: checkpoint.Saving | None = None
        self._since = monotonic()  # the time of the last save, or of the beginning

    def __enter__(self) -> CheckpointManager:
        if self._source is not None:
            self._resume(self._source)
        # Only a run that begins may move checkpoints. With a wrong checkpoint.resume, it has raised before.
        if self._source != self._folder:
            inside = self._source and self._source.parent.resolve() == self._folder.resolve()
            self._set_aside(folders.step_of(self._source) if self._source and inside else -1)
        self._protect()  # also what a lost node had: its place has been taken by one that keeps no copies
        return self

    def joined(self, step: int) -> None:
        """Note that the run goes on with the weights of other islands, after their step `step`."""
        self._saved = None
        self._set_aside(step)

    def _resume(self, source: Path) -> None:
        groups, state = self._optimizer.param_groups, self._state
        configured = [{key: group[key] for key in _CONFIGURED_OPTIONS if key in group} for group in groups]
        loaded = checkpoint.load(source, self._contents)
        for group, options in zip(groups, configured, strict=True):
            group.update(options)
        if loaded is None:
            if source != self._folder:
                raise ConfigError(f"checkpoint.resume = '{source}': expected a checkpoint, or a folder of some.")
            return
        for note in loaded.notes:
            self._job.print_once(f"note: {note}")
        if changed := " and ".join(state.reordered):
            self._job.print_once(
                f"note: {changed} changed since the checkpoint was written: the numbers of samples go on, but they are "
                "other samples, and some may come again"
            )
        left = self._steps - state.step
        todo = f"{left} to go" if left > 0 else f"none is left of train.steps = {self._steps}"
        self._job.print_once(f"resumed from {loaded.path}: {state.step} steps are done, {todo}")
        if source == self._folder and self._contents.snapshot is None:  # a snapshot ends with the run
            self._saved = loaded.step

    def _set_aside(self, begin: int) -> None:
        """Move away the checkpoints after step `begin`, where this run begins. A later "auto" would take them."""
        with self._job.together():
            others = [path for path in folders.checkpoints(self._folder) if folders.step_of(path) > begin]
            if self._job.rank or not others:
                return
            candidates = (self._folder.with_name(f"{self._folder.name}.{n}") for n in itertools.count(1))
            target = next(path for path in candidates if not path.exists())
            try:
                target.mkdir()
                for path in others:
                    path.rename(target / path.name)
            except OSError as error:
                raise ConfigError(
                    f"cannot move {self._folder} aside: {error.strerror}. Name another log.folder."
                ) from None
        self._job.print_once(
            f"note: moved step {', '.join(str(folders.step_of(path)) for path in others)} from {self._folder} to "
            f"{target}, because this run does not resume from there"
        )

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        state = self._state
        if self._every:
            return state.step % self._every == 0
        # Islands count flags a step late: some of those that are under way were set before the last save.
        is_new = self._islands == 1 or self._saved is None or state.step - self._saved > _STEPS_LATE
        return state.save_due and is_new

    def save_if_due(self) -> None:
        """Save, if it is time to. Call it after each step."""
        state = self._state
        self._protect()
        if self.is_due:
            self._save()
        # The clocks of the ranks differ. They exchange this flag in the next step, and all save after it.
        state.save_wanted = monotonic() - self._since >= _SECONDS_BETWEEN

    def _protect(self) -> None:
        if (protect := self._contents.protect) is None:
            return
        if self._state.step % protect.interval == 0:
            self._settle()  # a snapshot of a loss that is not finite would bring it back
        try:
            self._saver.protect(self._state.step)
        except CheckpointError as error:
            raise StepError(str(error)) from None

    def _save(self) -> None:
        self._settle()  # a loss that is not finite raises
        try:
            self._saving = self._saver.save(self._state.step)
        except CheckpointError as error:  # another job writes to the folder
            raise StepError(str(error)) from None
        self._saved = self._state.step
        self._since = monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        step = self._state.step
        if error is not None:
            if isinstance(error, Exception) and self._saving is not None:  # and not a second signal
                self._saving.wait(_PATIENCE_SECONDS)  # the thread that writes it would end with the process
            # Saving needs all ranks. Each prints this, because it is not known which ranks are alive.
            if self._saved != step:
                sys.stderr.write(f"rank {self._job.rank}: step {step} was not saved; {self._newest()}.\n")
            return
        if self._saved != step:
            self._save()
        outcome = self._saver.close()
        if outcome is not None and not outcome.ok:
            raise StepError(f"the state after step {step} was not saved; {self._newest()}.")
        if outcome is not None:
            self._job.print_once(f"checkpoint: {outcome.path}")
        if self._state.stopped_by and step < self._steps:
            self._job.print_once(f"stopped after step {step}. The same command goes on from there.")

    def _newest(self) -> str:
        try:
            newest = checkpoint.latest(self._folder)
        except (OSError, CheckpointError) as error:  # it must not hide why the run ends
            return f"its checkpoints cannot be read ({error})"
        return "there is no checkpoint of this run" if newest is None else f"the same command goes on from {newest}"
