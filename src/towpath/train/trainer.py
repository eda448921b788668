"""The trainer of `towpath train`, from top to bottom.

run_training            one rank's run: signal handlers (signals.py), process group (job.py), trainer
Trainer.__init__        setup: data, model, strategy, sharding, optimizer
Trainer.train           the loop: steps, metrics (metrics_logger.py), saving (checkpoints.py), evaluation, signals
Trainer.train_step      one step: gradient accumulation, clipping, agreement of the ranks (agreement.py), optimizer
Trainer.evaluate        the loss of the held-out part
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from towpath.api import Values, average_islands
from towpath.checkpoint.weights import Safetensors
from towpath.core.strategy import Strategy
from towpath.engine.executor import engine_of
from towpath.engine.saved_activations import offload_activations
from towpath.errors import ConfigError, StepError
from towpath.observing import running_trace
from towpath.topology.cluster import counted
from towpath.train.agreement import Agreement, Wishes
from towpath.train.checkpoints import CheckpointManager, TrainState, will_resume
from towpath.train.config import Config
from towpath.train.data.loader import Batch, Tokens, open_tokens
from towpath.train.job import Job, init_distributed
from towpath.train.metrics_logger import MetricsLogger, StepTimers, check_log
from towpath.train.models.bundle import (
    ModelBundle,
    build_model,
    checkpoint_blocks,
    compile_blocks,
    next_token_loss,
)
from towpath.train.models.tensor_parallel import plan_for
from towpath.train.optimizers import LossScale, build_optimizer, can_skip_on_device, set_learning_rate, step_if
from towpath.train.parallel import build_pipeline, choose_strategy, copies_of_model, shard_model, topology_of_copies
from towpath.train.progress import progress_bar
from towpath.train.signals import SIGNALS, StopRequest, exit_code, handle_signals

# After this many steps in a row without a finite gradient, skipping steps does not help.
_MAX_SKIPPED = 10


def run_training(config: Config) -> int:
    """Train on this rank. Every rank must call it.

    Returns:
        The exit code of the command, the same on every rank: 0 after the last step, or 130 or 143 if Ctrl-C or SIGTERM
        stopped a rank before, and the state was saved.

    Raises:
        TowpathError: The configuration cannot be trained, or the training failed.
    """
    with handle_signals() as stop, init_distributed() as job, job.as_train_errors():
        with job.fail_together():
            if job.rank == 0:
                check_log(config.log)
        return Trainer(config, job, stop).train()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, over all ranks or those of an island. Its fields are those of `StepRow`."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    skipped: bool
    loss_of_islands: float | None


class Trainer:
    """A sharded model with its data and optimizer, on one rank. Every rank must make the same calls.

    Attributes:
        config: The configuration, with the micro-batch and the checkpointing that the planner may have chosen.
        parallel: The section [parallel], which the planner may have chosen too.
        strategy: The sharding strategy.
        job: The ranks.
        bundle: The model as it was built, and what is known of it.
        model: The sharded model, or with stages the `Pipeline`. It has the parameters.
        optimizer: Its optimizer.
        tokens: The data.
        state: The position of the run, which is part of checkpoints.
        loss_scale: The loss scale of fp16.
        timers: The seconds of this rank's training thread.
        copies: The number of copies of the model, which is the data-parallel degree.
        stop: The signal that this rank has received. `state.stopped_by` is the one that all ranks have agreed on.
    """

    # Setup ------------------------------------------------------------------------------------------------------------

    def __init__(self, config: Config, job: Job, stop: StopRequest | None = None) -> None:
        self.job, self.stop = job, stop or StopRequest()
        # The cores that this process may use: a container, or a scheduler, may leave it fewer than the node has.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.train.threads or max(1, cores // job.topology.ranks_per_node))
        torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")

        # Data, and the model on the meta device. Whatever cannot train is refused on all ranks.
        strategy: Strategy | None = None
        with job.fail_together():
            if config.model.weights:
                Safetensors(config.model.weights)  # refuses files that are missing or damaged, before data is read
            copies = copies_of_model(config.parallel, job.world)
            if not config.strategy.auto:
                config.train.micro_steps(copies)  # refuses a batch that the copies cannot share
                strategy = config.strategy.build(topology_of_copies(config.parallel, job.topology), config.train.steps)
        self.tokens = self._open_tokens(config)
        with job.fail_together():
            bundle = build_model(config.model, self.tokens.vocabulary)
            for ranks in {config.parallel.tensor, *config.strategy.tensors} - {1}:
                plan_for(bundle.model, bundle.tensor_plan, ranks)  # refuses layers that these ranks cannot share
        self._check_same_on_all_ranks(config)

        # Strategy.
        settled = config
        if strategy is None:
            settled, strategy = choose_strategy(config, job, bundle)
        self.config, self.parallel, self.strategy = replace(config, train=settled.train), settled.parallel, strategy
        self.copies = copies_of_model(self.parallel, job.world)
        if self.parallel.tensor > 1:
            with job.fail_together():
                plan = plan_for(bundle.model, bundle.tensor_plan, self.parallel.tensor)
            bundle = replace(bundle, tensor_plan=plan)
        self.bundle = bundle

        # Sharding. Every rank draws the same new weights, and the values of a checkpoint replace them later.
        self.loss_scale = LossScale(config.train.loss_scale, config.train.precision == "fp16")
        self.model = self._shard(settled)
        # Dropout differs between ranks, except between those that compute the same micro-batch.
        seed = config.train.seed + 1 + job.rank // self.parallel.tensor
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self.model.train()

        self.optimizer = build_optimizer(self.model.parameters(), self.config.train)
        order = {
            "data": self.tokens.fingerprint,
            "data.held_out": config.data.held_out,
            "train.length": config.train.length,
            "train.seed": config.train.seed,
        }
        self.state = TrainState(loss_scale=self.loss_scale, order=order)
        self.agreement = Agreement(job, engine_of(self.model).comm.groups if self.strategy.islands > 1 else None)
        self._failure: StepError | None = None
        self.timers = StepTimers()

    def _open_tokens(self, config: Config) -> Tokens:
        job = self.job
        with job.fail_together(), progress_bar("Tokens") if job.rank == 0 else nullcontext() as progress:
            tokens = open_tokens(
                config.data,
                config.train.length,
                seed=config.train.seed,
                first_here=job.leads_node,
                wait=job.groups.barrier,
                progress=progress,
            )
        windows = f"{len(tokens.train):,} sequences of {config.train.length} tokens"
        job.print_once(f"{tokens.about}: {windows}, vocabulary {tokens.vocabulary:,}")
        return tokens

    def _check_same_on_all_ranks(self, config: Config) -> None:
        """Refuse configurations and data that differ between ranks. Such ranks would silently train apart."""
        own = {"configuration": str(config), "data": self.tokens.fingerprint}
        for rank, other in enumerate(self.job.groups.gather_objects(own)):
            for what in own:
                if other[what] != own[what]:
                    raise ConfigError(
                        f"rank {self.job.rank} and rank {rank} differ in their {what}. Give all the same files and "
                        "arguments."
                    )

    def _shard(self, settled: Config) -> Any:
        """Return the sharded model, or the pipeline of its stages."""
        job, bundle, topology = self.job, self.bundle, self.strategy.job
        if settled.train.checkpointing:
            checkpoint_blocks(bundle)
        if settled.train.compile:
            compile_blocks(bundle)
        job.print_once(
            f"{bundle.parameters / 1e6:.1f} million parameters, {self.strategy.name} on {topology.nodes} × "
            f"{topology.ranks_per_node} {job.device.type} ranks"
        )
        if (outer := self.strategy.outer) is not None:
            job.print_once(fill(f"{counted(self.strategy.islands, 'island')}, synchronized {outer}", 100))
        torch.manual_seed(settled.train.seed)
        values = _zeros(bundle) if will_resume(settled, job) else bundle.values
        if self.pipelined:
            return build_pipeline(settled, job, bundle, self.strategy, values, self.loss_scale)
        return shard_model(settled, job, bundle, self.strategy, values)

    @property
    def pipelined(self) -> bool:
        """Whether the model is a pipeline of stages."""
        return self.parallel.pipeline > 1

    @property
    def micro_steps(self) -> int:
        """The micro-steps of an optimizer step, on each copy of the model."""
        return self.config.train.micro_steps(self.copies)

    @property
    def _copy(self) -> int:
        """The number of the copy of the model that this rank holds a part of."""
        return self.job.rank // self.parallel.tensor % self.copies

    def checkpoint_manager(self) -> CheckpointManager:
        """Return the context that resumes and saves this run."""
        return CheckpointManager(self.config, self.job, self.state, self.model, self.optimizer, self.bundle)

    def metrics_logger(self) -> MetricsLogger:
        """Return the context that reports the steps of this run. Create it after the run has resumed."""
        length = self.config.train.length
        step_flops = self.bundle.flops_per_token(length) * length * self.config.train.batch
        return MetricsLogger(self.config, self.parallel, self.job, self.model, self.timers, step_flops, self.state.step)

    # The loop ---------------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Train to the last step, or until a signal requests a stop. Return the exit code of the command."""
        config, state = self.config.train, self.state
        self.stop.steps_began = True
        with self.checkpoint_manager() as checkpoints, self.metrics_logger() as metrics:
            while state.step < config.steps and not state.stopped_by:
                with metrics.traced(state.step + 1):
                    result = self.train_step()
                metrics.log_step(**asdict(result))
                if state.step == config.steps or state.stopped_by:
                    self._end_training()
                checkpoints.save_if_due()
                last, every = state.step == config.steps, config.evaluate_every
                evaluation_due = last or (every and state.step % every == 0)
                # After a signal there may be less than 30 seconds left to save.
                if evaluation_due and not state.stopped_by:
                    metrics.log_evaluation(*self.evaluate())
        metrics.print_summary()
        return exit_code(state.stopped_by) if state.step < config.steps else 0

    # One step ---------------------------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Do one optimizer step. Afterwards all ranks know of a signal that a rank had received during it.

        Raises:
            StepError: The loss or the gradient is not finite, and the step cannot be skipped.
        """
        config, state, began = self.config.train, self.state, time.perf_counter()
        rate = set_learning_rate(self.optimizer, config, state.step)

        # Forward and backward passes of all micro-batches, with gradient accumulation.
        local_loss = self._pipeline_passes() if self.pipelined else self._accumulate_gradients()

        # Gradient clipping. The norm is that of the whole model. It counts as part of the optimizer's time.
        with self._timed("optimizer"):
            self.loss_scale.unscale_gradients(self.model.parameters())
            norm = self._clip_gradients()

        # From here on all ranks that share a gradient decide the same.
        with self._timed("agreement"):
            agreed = self.agreement.begin(local_loss, norm, self._wishes())

        # Optimizer. A step whose gradient is not finite changes no weights. If the optimizer finds that out on the
        # device, the host reads the loss only when the step is enqueued, so that the device always has work.
        on_device = can_skip_on_device(self.optimizer, self.job.device)
        if on_device:
            with self._timed("optimizer"):
                step_if(self.optimizer, agreed.isfinite().all())
        with self._timed("agreement"):
            loss, norm = self.agreement.end()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and not on_device:
            with self._timed("optimizer"):
                self.optimizer.step()
        self.optimizer.zero_grad()
        state.step += 1
        state.samples += config.batch

        self._failure = self._failure or self._after_step(finite, loss, norm)
        self._decide()
        return StepResult(
            step=state.step,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            seconds=time.perf_counter() - began,
            skipped=not finite,
            loss_of_islands=self.agreement.loss_of_islands,
        )

    def _wishes(self) -> Wishes:
        """Return what this rank wants."""
        signals = tuple(float(self.stop.signal == number) for number in SIGNALS)
        return Wishes(float(self.state.save_wanted), signals, float(self._failure is not None))

    def _decide(self) -> None:
        """Decide with all ranks whether to save, whether to stop, and whether the run has failed."""
        wishes, state = self.agreement.wishes, self.state
        state.stopped_by, state.save_due = wishes.stopped_by, wishes.save > 0
        if self.strategy.islands == 1 or wishes.fail:
            failure = self._failure
            if failure is None and wishes.fail:
                failure = StepError(
                    f"step {state.step}: a loss or a gradient of another island was not finite. See what its ranks say."
                )
            if failure is not None:
                raise failure

    def _end_training(self) -> None:
        """Agree with all islands for the last time. After the last step, they take the mean of their weights."""
        if self.strategy.outer is None:
            return
        stopped_by = self.state.stopped_by
        self.agreement.finish(self._wishes())
        self._decide()
        self.state.stopped_by = stopped_by  # all ranks have decided that already
        if self.state.step == self.config.train.steps:
            average_islands(self.model)

    def _accumulate_gradients(self) -> Tensor:
        """Compute the gradients of all micro-batches. Return the mean loss of this rank.

        Inside `no_sync` the engine leaves out the transfers that the strategy needs only once in a step. A strategy
        that shards gradients, such as zero3, still reduces them in each micro-step.
        """
        micro_steps, total = self.micro_steps, torch.zeros((), device=self.job.device)
        offloads = self.config.train.offload_activations
        for micro_step in range(micro_steps):
            with self._timed("data"):
                inputs, targets = self._micro_batch(micro_step)
            with self._timed("passes"), nullcontext() if micro_step == micro_steps - 1 else self.model.no_sync():
                with offload_activations(self.model) if offloads else nullcontext():
                    loss = next_token_loss(self.model, inputs, targets) / micro_steps
                self.loss_scale.scaled(loss).backward()
            total += loss.detach()
        return total

    def _pipeline_passes(self) -> Tensor:
        """Compute the gradients of all micro-batches in a pipeline, whose schedule interleaves them."""
        with self._timed("data"):
            batches = [self._micro_batch(micro_step) for micro_step in range(self.micro_steps)]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        with self._timed("passes"):
            return self.loss_scale.unscaled(self.model.step(inputs, target=targets))

    def _micro_batch(self, micro_step: int) -> Batch:
        # One counter of samples for the whole job: which of them a rank computes follows from it.
        at_once = self.config.train.micro_batch
        first = self.state.samples + (micro_step * self.copies + self._copy) * at_once
        return self._to_device(self.tokens.train.batch(first, at_once))

    def _to_device(self, batch: Batch) -> Batch:
        if self.job.device.type != "cuda":
            return batch
        inputs, targets = (t.pin_memory().to(self.job.device, non_blocking=True) for t in batch)
        return inputs, targets

    def _clip_gradients(self) -> Tensor:
        """Scale the gradients down to the largest norm. Return their norm before scaling."""
        clip = self.config.train.clip
        if self.pipelined:
            return self.model.clip_grad_norm_(clip if clip > 0 else math.inf)
        parameters = list(self.model.parameters())
        if clip > 0:
            return nn.utils.clip_grad_norm_(parameters, clip)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _after_step(self, finite: bool, loss: float, norm: float) -> StepError | None:
        """Adapt the loss scale, or count a skipped step. Return the error if the training cannot go on."""
        state, config = self.state, self.config.train
        overflowed = self.loss_scale.active and math.isfinite(loss) and not finite
        self.loss_scale.update(overflowed)
        if overflowed:
            if self.loss_scale.value < 1:
                return StepError(
                    f"step {state.step}: gradients in fp16 overflow whatever the loss is scaled by. Set "
                    "train.precision=bf16, or lower train.learning_rate."
                )
            return None
        state.skipped = 0 if finite else state.skipped + 1
        if finite or (config.not_finite == "skip" and state.skipped < _MAX_SKIPPED):
            return None
        advice = "lower train.learning_rate, or set train.not_finite=skip to leave out single steps"
        if config.not_finite == "skip":
            advice = f"{state.skipped} steps in a row were skipped; lower train.learning_rate"
        return StepError(
            f"step {state.step}: the loss is {loss:g} and the norm of its gradient {norm:g}. The weights are those of "
            f"step {state.step - state.skipped}: {advice}."
        )

    # Evaluation -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, float]:
        """Return the mean loss of the held-out part, and the seconds it took.

        It reads the same windows every time. Without a held-out part the loss is None.
        """
        if self.tokens.held_out is None:
            return None, 0.0
        config, before = self.config.train, self.timers.evaluation
        with self._timed("evaluation"):
            self.model.train(False)
            total = torch.zeros((), device=self.job.device, dtype=torch.float64)
            windows = config.evaluate_batches * config.batch
            at_once = config.micro_batch * (self.micro_steps if self.pipelined else 1)
            turns = windows // (at_once * self.copies)
            for turn in range(turns):
                first = (turn * self.copies + self._copy) * at_once
                batch = self.tokens.held_out.evaluation_batch(first, at_once, windows)
                inputs, targets = self._to_device(batch)
                if self.pipelined:
                    total += self.loss_scale.unscaled(self.model.evaluate(inputs, target=targets))
                else:
                    total += next_token_loss(self.model, inputs, targets)
            self.model.train()
            loss = self.job.mean(total.view(1))[0] / turns
        return loss, self.timers.evaluation - before

    @contextmanager
    def _timed(self, what: str) -> Generator[None]:
        """Add the seconds of the context to a timer and, if the step is traced, to the trace."""
        trace = running_trace(self.model)
        began = time.perf_counter()
        try:
            # A trace shows the passes of the model by itself.
            with nullcontext() if trace is None or what == "passes" else trace.phase(what):
                yield
        finally:
            setattr(self.timers, what, getattr(self.timers, what) + time.perf_counter() - began)


def _zeros(bundle: ModelBundle) -> Values:
    """Return initial values for parameters that a checkpoint will fill."""
    names = {name for name, _ in bundle.model.named_parameters(remove_duplicate=False)}

    def zeros(name: str, start: int, end: int) -> Tensor:
        if name not in names:
            raise KeyError(name)
        return torch.zeros(end - start)

    return zeros
