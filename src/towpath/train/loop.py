"""The training loop: one optimizer step after the other, on one rank.

step        micro-steps of forward and backward → global norm → finite on every rank? → optimizer → what was measured
samples     one counter for the whole job; which of them a rank computes follows from it (data.py)
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from towpath.core.strategy import Strategy
from towpath.errors import TrainError
from towpath.train.config import TrainConfig
from towpath.train.config_strategy import ParallelConfig
from towpath.train.data.mixture import Mixture
from towpath.train.data.windows import Windows
from towpath.train.job import Job
from towpath.train.loss_scale import LossScale
from towpath.train.models.from_config import Built
from towpath.train.optimizers import peak_of
from towpath.train.passes import Passes
from towpath.train.stopping import SIGNALS

# So many steps in a row without a finite gradient, and skipping them does not help.
_SKIPPED_AT_MOST = 10


@dataclass(slots=True)
class Clocks:
    """Seconds of the thread that trains, by what it did; what `towpath.stats` counts lies inside `passes`."""

    data: float = 0.0
    passes: float = 0.0  # forward and backward, with what they wait for
    optimizer: float = 0.0
    agreement: float = 0.0  # the mean loss over all ranks, and whether it is finite
    evaluation: float = 0.0

    @property
    def own_seconds(self) -> float:
        """What a step takes beside its passes."""
        return self.data + self.optimizer + self.agreement

    @contextmanager
    def on(self, what: str) -> Generator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step came to, over all ranks."""

    number: int  # counted from 1
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    skipped: bool


@dataclass(slots=True)
class Training:
    """A sharded model in training: what a checkpoint of it holds beside the model and the optimizer is its position."""

    config: TrainConfig
    parallel: ParallelConfig
    strategy: Strategy
    job: Job
    built: Built
    passes: Passes
    scale: LossScale
    optimizer: torch.optim.Optimizer
    windows: Windows | Mixture
    held_out: Windows | Mixture | None
    order: dict[str, Any]  # what decides which sample has which number
    reordered: tuple[str, ...] = ()  # what of it is not as it was when the checkpoint was written
    done: int = 0  # optimizer steps
    samples: int = 0  # read so far, by all ranks together
    skipped: int = 0  # steps in a row whose gradient was not finite
    stopped: int = 0  # the signal by which some rank was told to stop, and now all know
    save_wanted: bool = False  # this rank's clock says that it is time to save
    save_due: bool = False  # some rank's did before this step, and now all know
    clocks: Clocks = field(default_factory=Clocks)

    @property
    def model(self) -> Any:
        """What has the parameters."""
        return self.passes.model

    @property
    def micro_steps(self) -> int:
        return self.config.micro_steps(self.passes.shares)

    @property
    def flops(self) -> float:
        """Of one step, over all ranks, as utilisation counts them."""
        length = self.config.length
        return self.built.flops_per_token(length) * length * self.config.batch

    def state_dict(self) -> dict[str, Any]:
        counts = {"steps": self.done, "samples": self.samples, "skipped": self.skipped}
        return {**counts, "order": self.order, "loss_scale": self.scale.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counts = [state_dict[key] for key in ("steps", "samples", "skipped")]
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"steps, samples and skipped are {counts}; expected counts")
        self.done, self.samples, self.skipped = counts
        self.scale.restore(state_dict.get("loss_scale", self.scale.state()))
        before = state_dict.get("order", self.order)
        self.reordered = tuple(what for what, value in self.order.items() if before.get(what) != value)

    def step(self, stop: int = 0) -> Step:
        """`stop`: the signal by which this rank was told to. After this step all ranks know."""
        began = time.perf_counter()
        rate = learning_rate(self.config, self.done)
        for group in self.optimizer.param_groups:
            # Of Muon's groups in the same proportion of their own peak.
            group["lr"] = rate * (peak_of(group, self.config) / self.config.learning_rate)
        loss = self.passes.step(self._samples, self.micro_steps, self._on)
        with self._on("optimizer"):
            self.scale.unscale(self.model.parameters())
            norm = self.passes.clip(self.config.clip)
        loss, gradient_norm, finite = self._agree(loss, norm, stop)
        if finite:
            with self._on("optimizer"):
                self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.samples += self.config.batch
        overflowed = self.scale.active and math.isfinite(loss) and not finite
        self.scale.update(overflowed)
        if not overflowed:
            self._guard(finite, loss, gradient_norm)
        elif self.scale.value < 1:
            raise TrainError(
                f"step {self.done}: gradients in fp16 overflow whatever the loss is scaled by. Set "
                "train.precision=bf16, or lower train.learning_rate."
            )
        return Step(
            number=self.done,
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=rate,
            seconds=time.perf_counter() - began,
            skipped=not finite,
        )

    def _samples(self, micro_step: int) -> tuple[Tensor, Tensor]:
        passes, at_once = self.passes, self.config.micro_batch
        first = self.samples + (micro_step * passes.shares + passes.share) * at_once
        return self._on_device(self.windows.batch(first, at_once))

    def _on_device(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        device = self.job.device
        if device.type != "cuda":
            return pair
        inputs, targets = (t.pin_memory().to(device, non_blocking=True) for t in pair)
        return inputs, targets

    def _agree(self, loss: Tensor, norm: Tensor, stop: int) -> tuple[float, float, bool]:
        """The job's loss and norm, and whether both are finite: the same answer on every rank, from one all-reduce."""
        with self._on("agreement"):
            flags = loss.new_tensor([self.save_wanted, *(stop == number for number in SIGNALS)], dtype=torch.float64)
            mine = torch.cat([torch.stack([loss.double(), norm.to(loss.device).double()]), flags])
            mean_loss, mean_norm, saving, *stopping = self.job.mean(mine)
        self.stopped = next((number for number, share in zip(SIGNALS, stopping, strict=True) if share > 0), 0)
        self.save_due = saving > 0
        return mean_loss, mean_norm, math.isfinite(mean_loss) and math.isfinite(mean_norm)

    def _guard(self, finite: bool, loss: float, norm: float) -> None:
        self.skipped = 0 if finite else self.skipped + 1
        if finite or (self.config.not_finite == "skip" and self.skipped < _SKIPPED_AT_MOST):
            return
        advice = "lower train.learning_rate, or set train.not_finite=skip to leave out single steps"
        if self.config.not_finite == "skip":
            advice = f"{self.skipped} steps in a row were skipped; lower train.learning_rate"
        raise TrainError(
            f"step {self.done}: the loss is {loss:g} and the norm of its gradient {norm:g}. The weights are those of "
            f"step {self.done - self.skipped}: {advice}."
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, float]:
        """The mean loss of the held-out part, the same windows every time, and the seconds it took."""
        if self.held_out is None:
            return None, 0.0
        before = self.clocks.evaluation
        with self._on("evaluation"):
            self.model.train(False)
            total = torch.zeros((), device=self.job.device, dtype=torch.float64)
            passes, count = self.passes, self.config.evaluate_batches * self.config.batch
            at_once = self.config.micro_batch * passes.together(self.micro_steps)
            turns = count // (at_once * passes.shares)
            for turn in range(turns):
                first = (turn * passes.shares + passes.share) * at_once
                total += passes.loss(*self._on_device(self.held_out.evenly(first, at_once, count)))
            self.model.train()
            loss = self.job.mean(total.view(1))[0] / turns
        return loss, self.clocks.evaluation - before

    @contextmanager
    def _on(self, what: str) -> Generator[None]:
        """Its seconds go to the clock of that name, and to the trace if there is one."""
        trace = self.passes.running_trace()
        # What the passes do is in the trace by itself.
        with self.clocks.on(what), nullcontext() if trace is None or what == "passes" else trace.phase(what):
            yield


def learning_rate(config: TrainConfig, done: int) -> float:
    """After `done` steps: a straight line up to the peak, then a cosine down to its final share."""
    warmup = round(config.warmup * config.steps)
    if done < warmup:
        return config.learning_rate * (done + 1) / warmup
    progress = (done - warmup) / max(1, config.steps - warmup)
    low = config.final_share
    return config.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)
