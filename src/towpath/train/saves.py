"""A run's checkpoints: where it goes on, when it saves, and what it says of both."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from time import monotonic
from types import TracebackType

from towpath import checkpoint
from towpath.checkpoint.disk import folders
from towpath.checkpoint.disk.manifest import NAME as MANIFEST
from towpath.errors import CheckpointError, ConfigError, TrainError
from towpath.train.config import Config
from towpath.train.job import Job
from towpath.train.loop import Training


def goes_on(config: Config, job: Job) -> bool:
    """Whether there is a checkpoint to resume from: then new values for the model would be drawn and sent in vain."""
    source = _source(config)
    found = source is not None and (checkpoint.latest(source, quiet=True) is not None or (source / MANIFEST).exists())
    return all(job.groups.gather_objects(found))


def _folder(config: Config) -> Path:
    return Path(config.checkpoint.folder or Path(config.log.folder, folders.IN_RUN))


def _source(config: Config) -> Path | None:
    """Its own folder under one name only, however it was spelled: what is elsewhere is another run's."""
    resume, own = config.checkpoint.resume, _folder(config)
    if resume == "off":
        return None
    source = own if resume == "auto" else folders.home(Path(resume))
    return own if _same(source, own) else source


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


# Options of the optimizer that the configuration tells: what it says now counts, not what it said then.
_TOLD = ("betas", "eps", "weight_decay", "momentum")

# When the run fails, for the checkpoint that is being written: it ends by itself, also where a rank is lost.
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.01


class Saves:
    """`with Saves(…) as saves:` around the steps: resumes before the first, keeps the last. Every rank alike."""

    def __init__(self, config: Config, training: Training) -> None:
        told = config.checkpoint
        self._folder, self._source = _folder(config), _source(config)
        self._every, self._steps = told.every, config.train.steps
        self._seconds = 60 * told.every_minutes
        self._training, self._job = training, training.job
        self._rank = training.job.rank  # which a process group that is gone no longer tells
        built = training.built
        self._state = checkpoint.State(
            training.model, training.optimizer, config=built.config_json, names=built.names, training=training
        )
        self._saver = checkpoint.Saver(
            self._folder,
            self._state,
            keep_last=told.keep or None,
            keep_every=told.keep_every or None,
            background=told.background,
        )
        if self._source != self._folder:
            with self._job.alike():
                self._set_aside()
        self._saved: int | None = None  # the step whose state is in the folder, or on its way
        self._saving: checkpoint.Saving | None = None
        self._since = monotonic()  # the last one, or the beginning

    def _set_aside(self) -> None:
        """What this run does not go on from, but a later `auto` would take for a newer state of it."""
        begin = folders.step_of(self._source) if self._source and _same(self._source.parent, self._folder) else -1
        others = [path for path in folders.checkpoints(self._folder) if folders.step_of(path) > begin]
        if self._rank or not others:
            return
        beside = (self._folder.with_name(f"{self._folder.name}.{n}") for n in itertools.count(1))
        target = next(path for path in beside if not path.exists())
        try:
            target.mkdir()
            for path in others:
                path.rename(target / path.name)
        except OSError as error:
            raise ConfigError(f"checkpoint.folder: cannot move {self._folder} aside: {error.strerror}.") from None
        self._job.say(
            f"note: {len(others)} checkpoints of another run were in {self._folder}; they are in {target} now"
        )

    def __enter__(self) -> Saves:
        if self._source is not None:
            self._go_on(self._source)
        return self

    def _go_on(self, source: Path) -> None:
        groups = self._training.optimizer.param_groups
        told = [{key: group[key] for key in _TOLD if key in group} for group in groups]
        loaded = checkpoint.load(source, self._state)
        for group, options in zip(groups, told, strict=True):
            group.update(options)
        if loaded is None:
            if source != self._folder:
                raise ConfigError(f"checkpoint.resume = '{source}': expected a checkpoint, or a folder of some.")
            return
        for note in loaded.notes:
            self._job.say(f"note: {note}")
        if changed := " and ".join(self._training.reordered):
            self._job.say(
                f"note: {changed} changed since the checkpoint was written: the numbers of samples go on, but they are "
                "other samples, and some may come again"
            )
        left = self._steps - self._training.done
        todo = f"{left} to go" if left > 0 else f"none is left of train.steps = {self._steps}"
        self._job.say(f"resumed from {loaded.path}: {self._training.done} steps are done, {todo}")
        if source == self._folder:
            self._saved = loaded.step

    def stepped(self) -> None:
        training = self._training
        if training.done % self._every == 0 if self._every else training.save_due:
            self._save()
        # The ranks' clocks differ: they tell each other in the next step, and all save after it.
        training.save_wanted = 0 < self._seconds <= monotonic() - self._since

    def _save(self) -> None:
        try:
            self._saving = self._saver.save(self._training.done)
        except CheckpointError as error:  # another job has taken the folder
            raise TrainError(str(error)) from None
        self._saved = self._training.done
        self._since = monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            if isinstance(error, Exception):  # not told to end at once
                self._end_saving()
            self._tell_what_is_left()
            return
        if self._saved != self._training.done:
            self._save()
        outcome = self._saver.close()
        if outcome is not None and not outcome.ok:
            raise TrainError(f"the state after step {self._training.done} was not saved; {self._left()}.")
        if outcome is not None:
            self._job.say(f"checkpoint: {outcome.path}")
        if self._training.stopped and self._training.done < self._steps:
            self._job.say(f"stopped after step {self._training.done}. The same command goes on from there.")

    def _end_saving(self) -> None:
        """The thread that writes would end with the process."""
        until = monotonic() + _PATIENCE_SECONDS
        while self._saving is not None and not self._saving.done and monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def _tell_what_is_left(self) -> None:
        """To save, all ranks are needed. Each says so: which of them are alive is not known."""
        done = self._training.done
        if self._saved != done:
            sys.stderr.write(f"rank {self._rank}: step {done} was not saved; {self._left()}.\n")

    def _left(self) -> str:
        newest = checkpoint.latest(self._folder, quiet=True)
        return "there is no checkpoint of this run" if newest is None else f"the same command goes on from {newest}"
