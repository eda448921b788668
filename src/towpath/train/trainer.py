"""The trainer of `towpath train`, from top to bottom.

run_training            one rank's run: signal handlers and process group (job.py), trainer
TrainingRun.__init__        setup: data, model, strategy, sharding, optimizer
TrainingRun.train           the loop: steps, metrics (metrics.py), saving (checkpoints.py), evaluation, signals
TrainingRun.train_step      one step: gradient accumulation, clipping, agreement of the ranks (job.py), optimizer
TrainingRun.settle          the loss and the norm of the step before
TrainingRun.evaluate        the loss of the held-out part
build_optimizer             AdamW for all parameters; or Muon for the matrices of blocks, and AdamW for the others
"""

from __future__ import annotations

import math
import os
import random
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from towpath.api import average_islands, meet_islands, weigh
from towpath.core.strategy import Strategy
from towpath.engine.executor import engine_of
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.engine.saved_activations import offload_activations
from towpath.errors import StepError
from towpath.observe.stats import running_trace
from towpath.optim import chain, owner_stepped
from towpath.outer.islands import Island, IslandSync
from towpath.topology.cluster import counted
from towpath.topology.init import alone
from towpath.train.checkpoints import CheckpointManager, TrainState
from towpath.train.config import Config, TrainConfig
from towpath.train.data import Batch, open_tokens
from towpath.train.job import SIGNALS, Job, StepAgreement, StopRequest, handle_signals, init_distributed
from towpath.train.metrics import JsonLines, MetricsLogger
from towpath.train.models import build_model, checkpoint_blocks, compile_blocks, next_token_loss
from towpath.train.parallel import build_pipeline, choose_strategy, copies_of_model, shard_model, topology_of_copies
from towpath.train.tensor_parallel import plan_for

_EVALUATED_BATCHES = 4  # of train.batch sequences
BETAS = (0.9, 0.95)  # of AdamW, as Llama was trained
FINAL_SHARE = 0.1  # the last learning rate, as a share of the peak


def run_training(config: Config) -> int:
    """Train on this rank. Every rank must call it.

    Return the exit code of the command: 0 after the last step, or 130 or 143 if Ctrl-C or SIGTERM stopped a rank
    before, and the state was saved.
    """
    with handle_signals() as stop, init_distributed() as job, job.as_step_errors():
        if alone():
            job.print_once("one rank; for several: torchrun --nproc-per-node N -m towpath train …")
        return TrainingRun(config, job, stop).train()


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step, over all ranks or those of an island.

    The training loop reads it in the next step (`settled`), so that a GPU always has work. To read the loss before is
    to wait for the device.
    """

    step: int  # counted from 1
    learning_rate: float
    means: Callable[[], list[float]]  # the loss and the norm
    seconds: float = 0.0
    loss_of_islands: float | None = None  # with outer steps: of all islands, in the step before
    settled: bool = False

    @property
    def loss(self) -> float:
        return self.means()[0]

    @property
    def gradient_norm(self) -> float:
        """The global norm before clipping."""
        return self.means()[1]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TrainingRun:
    """A sharded model with its data and optimizer, on one rank. Every rank must make the same calls."""

    # Setup ------------------------------------------------------------------------------------------------------------

    def __init__(self, config: Config, job: Job, stop: StopRequest | None = None) -> None:
        self.job, train, parallel = job, config.train, config.parallel
        # The signal that this rank has received. `state.stopped_by` is the one that all ranks have agreed on.
        self.stop = stop or StopRequest()
        # The cores that this process may use: a container, or a scheduler, may leave it fewer than the node has.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        node = job.topology.node_of(job.rank)
        torch.set_num_threads(train.threads or max(1, cores // job.topology.sizes[node]))

        # Data, and the model on the meta device. Whatever cannot train is refused on all ranks.
        strategy: Strategy | None = None
        with job.together() as lines:
            if job.rank == 0:
                JsonLines(Path(config.log.folder, "metrics.jsonl")).close()  # refuses a folder that it cannot write to
            self.copies = copies_of_model(parallel, job.world)
            if not config.strategy.auto:
                train.micro_steps(self.copies)  # refuses a batch that the copies cannot share
                strategy = config.strategy.build(topology_of_copies(parallel, job.topology))
            leads_node = job.topology.local_of(job.rank) == 0
            self.tokens = open_tokens(config.data, train.length, seed=train.seed, verify=leads_node)
            bundle = build_model(config.model, self.tokens.vocabulary)
            if parallel.tensor > 1:  # refuses layers that these ranks cannot share
                bundle = replace(bundle, tensor_plan=plan_for(bundle.model, bundle.tensor_plan, parallel.tensor))
            # Ranks with other configurations or data would silently train apart.
            sections = tomllib.loads(str(config)).items()
            lines += [f"{section}.{key} = {value}" for section, keys in sections for key, value in keys.items()]
            lines.append(f"the checksum of the data = {self.tokens.fingerprint}")
        self.bundle = bundle
        windows = f"{len(self.tokens.train):,} sequences of {train.length} tokens"
        job.print_once(f"{self.tokens.about}: {windows}, vocabulary {self.tokens.vocabulary:,}")

        # Strategy.
        if strategy is None:
            train, strategy = choose_strategy(config, job, bundle)
        self.config, self.strategy = replace(config, train=train), strategy  # `auto` also chooses the micro-batch
        self.micro_steps = train.micro_steps(self.copies)  # of an optimizer step, on each copy of the model
        self.copy = job.rank // parallel.tensor % self.copies  # the one that this rank holds a part of
        self.pipelined = parallel.pipeline > 1
        ranks = f"{strategy.job.shape} {job.device.type} ranks"
        job.print_once(f"{bundle.parameters / 1e6:.1f} million parameters, {strategy.name} on {ranks}")
        if strategy.outer is not None:
            job.print_once(fill(f"{counted(strategy.islands, 'island')}, synchronized {strategy.outer}", 100))

        # Sharding. Every rank draws the same new weights, and a checkpoint replaces them later.
        if train.checkpointing:
            checkpoint_blocks(bundle)
        if train.compile:
            compile_blocks(bundle)
        torch.manual_seed(train.seed)
        if self.pipelined:
            self.model: Any = build_pipeline(self.config, job, bundle, strategy)  # a `Pipeline`
        else:
            self.model = shard_model(self.config, job, bundle, strategy)
        # Dropout differs between ranks, except between those that compute the same micro-batch.
        own = train.seed + 1 + job.rank // parallel.tensor
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own % (1 << 32))
        self.model.train()
        self.shares = None if self.pipelined else engine_of(self.model).shares
        if self.shares is not None:
            self.shares.say = job.print_once
            self.shares.divide(train.micro_batch)
            job.print_once(f"shares {self.shares.described()} of a micro-batch")

        self.optimizer = build_optimizer(self.model.parameters(), train)
        order = {
            "data": self.tokens.fingerprint,
            "data.held_out": config.data.held_out,
            "train.length": train.length,
            "train.seed": train.seed,
        }
        self.state = TrainState(order)
        self._agreement = StepAgreement(job, engine_of(self.model).comm.groups if strategy.islands > 1 else None)
        if self.shares is not None:
            self._agreement.weight = sum(self.shares.rows) / len(self.shares.rows) / train.micro_batch
        outer = None if self.pipelined else engine_of(self.model).outer
        self._islands = outer if isinstance(outer, IslandSync) else None  # those that come and go
        self._island: Island | None = None  # this one, once it has met the others
        self._failure: StepError | None = None
        self._unsettled: StepResult | None = None  # of the last step, if the host has not read it
        self.timers: dict[str, float] = defaultdict(float)  # the seconds of the training thread

    # The loop ---------------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Train to the last step, or until a signal requests a stop. Return the exit code of the command."""
        config, state = self.config.train, self.state
        self.stop.steps_began = True
        with CheckpointManager(self) as checkpoints, MetricsLogger(self._met(checkpoints)) as metrics:
            while state.step < config.steps and not state.stopped_by:
                with metrics.traced(state.step + 1):
                    result = self.train_step()
                last, every = state.step == config.steps, config.evaluate_every
                evaluates = last or (every and state.step % every == 0)
                # Its row is then written before the checkpoint, and before the row of the evaluation.
                if evaluates or state.stopped_by or checkpoints.is_due:
                    self.settle()
                metrics.log_step(result)
                if last or state.stopped_by:
                    self._end_training()
                checkpoints.save_if_due()
                # After a signal there may be less than 30 seconds left to save.
                if evaluates and not state.stopped_by:
                    metrics.log_evaluation(*self.evaluate())
        metrics.print_summary()
        return 128 + state.stopped_by if state.stopped_by and state.step < config.steps else 0

    def _met(self, checkpoints: CheckpointManager) -> TrainingRun:
        """Join the other islands, if they come and go. Their weights and their step then replace the checkpoint's."""
        state, outer = self.state, self._islands
        if outer is None:
            return self
        # All samples that any island was given count as read.
        self._samples_of_period = self.config.train.batch * outer.plan.settings.every
        outer.next_block = -(-state.samples // self._samples_of_period)
        outer.say = self.job.print_once
        outer.facts |= self._facts()
        self._island = meet_islands(self.model)
        if self._island.is_first:
            self.job.print_once(f"island 0 begins at {outer.plan.settings.meet}, after step {state.step}")
        else:
            state.step = self._island.step
            checkpoints.joined(state.step)
            torch.manual_seed(self.config.train.seed + 1 + self.job.rank + self._island.number * self.job.world)
        return self

    def _facts(self) -> dict[str, str]:
        """Return what the configurations of all islands must say."""
        train = asdict(self.config.train)
        own = ("micro_batch", "checkpointing", "offload_activations", "compile", "evaluate_every", "threads")
        facts = {f"train.{name}": repr(value) for name, value in train.items() if name not in own}
        return facts | {name: repr(value) for name, value in self.state.order.items()}

    # One step ---------------------------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """Do one optimizer step, and settle the one before. On a GPU it returns before the step has ended.

        Afterwards all ranks know of a signal that a rank had received before it.
        """
        config, state, began = self.config.train, self.state, time.perf_counter()
        rate = learning_rate(config, state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._agreement.begin(self._flags())

        # Forward and backward passes of all micro-batches, with gradient accumulation.
        local_loss = self._pipeline_passes() if self.pipelined else self._accumulate_gradients()

        # Gradient clipping. The norm is that of the whole model. It counts as part of the optimizer's time.
        with self._timed("optimizer"):
            norm = self._clip_gradients()

        # The loss and the norm over all ranks. The host reads those of the step before, when this one is enqueued. An
        # island reads its own before it steps: its weights may be saved until the others know of a failure.
        with self._timed("agreement"):
            means = self._agreement.sum(local_loss, norm)
        result, before = StepResult(step=state.step + 1, learning_rate=rate, means=means), self._unsettled
        reads_first = self.strategy.islands > 1
        with self._timed("agreement"):
            steps = not reads_first or result.is_finite
        with self._timed("optimizer"):
            if steps:
                self.optimizer.step()
        self.optimizer.zero_grad()
        if before is not None:
            self._settle(before)
        state.step += 1
        if self._islands is None:
            state.samples += config.batch
        else:
            state.samples = self._islands.next_block * self._samples_of_period
        with self._timed("agreement"):
            self._agreement.end(means, self._flags())
        result.loss_of_islands, self._unsettled = self._agreement.loss_of_islands, result
        if reads_first:
            self.settle()
        self._decide()
        result.seconds = time.perf_counter() - began
        return result

    def settle(self) -> None:
        """Read the result of the last step, if that was not done. Every rank must call it.

        If the loss or the gradient is not finite, it raises StepError, and nothing is saved.
        """
        if self._unsettled is not None:
            result, began, self._unsettled = self._unsettled, time.perf_counter(), None
            self._settle(result)
            result.seconds += time.perf_counter() - began

    def _settle(self, result: StepResult) -> None:
        with self._timed("agreement"):
            finite = result.is_finite
        result.settled = True
        if not finite and self._failure is None:
            self._failure = StepError(
                f"step {result.step}: the loss is {result.loss:g} and the norm of its gradient "
                f"{result.gradient_norm:g}. Lower train.learning_rate: the same command goes on from the newest "
                "checkpoint."
            )
        # An island waits until the others know.
        if self._failure is not None and self.strategy.islands == 1:
            raise self._failure

    def _flags(self) -> list[float]:
        """Return what this rank tells the others: whether to save, that the run has failed, and its signal."""
        told = [self.state.save_wanted, self._failure is not None, *(self.stop.signal == each for each in SIGNALS)]
        return [float(each) for each in told]

    def _decide(self) -> None:
        """Decide with all ranks whether to save, whether to stop, and whether the run has failed."""
        save, failed, *signals = self._agreement.flags
        self.state.save_due = save > 0
        self.state.stopped_by = next((n for n, share in zip(SIGNALS, signals, strict=True) if share > 0), 0)
        if failed and self._failure is None:
            raise StepError(f"step {self.state.step}: a loss of another island was not finite. See what its ranks say.")
        if self._failure is not None and failed:
            raise self._failure

    def _end_training(self) -> None:
        """Agree with all islands for the last time. After the last step, they take the mean of their weights."""
        if self.strategy.outer is None:
            return
        stopped_by = self.state.stopped_by
        if self.strategy.islands > 1:
            self._agreement.finish(self._flags())
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
        # With unequal batches, a loss counts by its rows, next to those of the other ranks.
        rows = () if self.shares is None else self.shares.rows
        share = 1 if self.shares is None else self._span[1] * len(rows) / sum(rows)
        for micro_step in range(micro_steps):
            with self._timed("data"):
                inputs, targets = self._micro_batch(micro_step)
            with self._timed("passes"), nullcontext() if micro_step == micro_steps - 1 else self.model.no_sync():
                with offload_activations(self.model) if offloads else nullcontext():
                    loss = next_token_loss(self.model, inputs, targets)
                weighed = loss / micro_steps if self.shares is None else weigh(self.model, loss, targets.numel())
                weighed.backward()
            total += loss.detach() * share / micro_steps
        return total

    def _pipeline_passes(self) -> Tensor:
        """Compute the gradients of all micro-batches in a pipeline, whose schedule interleaves them."""
        with self._timed("data"):
            batches = [self._micro_batch(micro_step) for micro_step in range(self.micro_steps)]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        with self._timed("passes"):
            return self.model.step(inputs, target=targets)

    def _micro_batch(self, micro_step: int) -> Batch:
        # One counter of samples for the whole job: which of them a rank computes follows from it.
        begin = self.state.samples
        if self._island is not None:
            begin = self._island.position(self.state.step) * self.config.train.batch
        first, rows = self._span
        first += begin + micro_step * self.copies * self.config.train.micro_batch
        return self._to_device(self.tokens.train.batch(first, rows))

    @property
    def _span(self) -> tuple[int, int]:
        """The first row of this rank in a micro-batch of all ranks, and how many it takes."""
        at_once = self.config.train.micro_batch
        return (self.copy * at_once, at_once) if self.shares is None else self.shares.span()

    def _to_device(self, batch: Batch) -> Batch:
        if self.job.device.type != "cuda":
            return batch
        inputs, targets = (t.pin_memory().to(self.job.device, non_blocking=True) for t in batch)
        return inputs, targets

    def _clip_gradients(self) -> Tensor:
        """Scale the gradients down to the largest norm. Return their norm before scaling."""
        clip = self.config.train.clip or math.inf
        if self.pipelined:
            return self.model.clip_grad_norm_(clip)
        return nn.utils.clip_grad_norm_(self.model.parameters(), clip)

    # Evaluation -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, float]:
        """Return the mean loss of the held-out part, and the seconds it took.

        It reads the same windows every time. Without a held-out part the loss is None.
        """
        self.settle()
        if self.tokens.held_out is None:
            return None, 0.0
        config, began = self.config.train, time.perf_counter()
        windows = _EVALUATED_BATCHES * config.batch
        at_once = config.micro_batch * (self.micro_steps if self.pipelined else 1)
        turns = windows // (at_once * self.copies)
        total = torch.zeros(1, device=self.job.device, dtype=torch.float64)
        begin, rows = (self.copy * at_once, at_once) if self.pipelined else self._span
        self.model.train(False)
        with self._timed("passes"):
            for turn in range(turns):
                first = turn * self.copies * at_once + begin
                inputs, targets = self._to_device(self.tokens.held_out.evaluation_batch(first, rows, windows))
                if self.pipelined:
                    total += self.model.evaluate(inputs, target=targets)
                else:
                    total += next_token_loss(self.model, inputs, targets) * (rows / at_once)
        self.model.train()
        return self.job.mean(total)()[0] / turns, time.perf_counter() - began

    @contextmanager
    def _timed(self, what: str) -> Generator[None]:
        """Add the seconds of the context to a timer and, if the step is traced, to the trace."""
        trace, began = running_trace(self.model), time.perf_counter()
        # A trace shows the passes of the model by itself.
        with nullcontext() if trace is None or what == "passes" else trace.phase(what):
            yield
        self.timers[what] += time.perf_counter() - began


# The optimizer --------------------------------------------------------------------------------------------------------


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model. Every rank must call it."""
    trained = [p for p in parameters if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config)
    # Embeddings and the output layer, which Muon is not meant for, are in no block and so in the root unit.
    matrices = [p for p in trained if p.dim() == 2 and isinstance(p, ShardTensor) and p.shard_spec.unit]
    # Scaled so that AdamW's learning rate suits it.
    muon = torch.optim.Muon(
        matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    chosen = {id(p) for p in matrices}
    return chain(owner_stepped(muon), _adamw([p for p in trained if id(p) not in chosen], config))


def _adamw(trained: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    # Matrices decay. Vectors, which are norms and biases, do not.
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=BETAS,
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),
    )


def learning_rate(config: TrainConfig, done: int) -> float:
    """Return the learning rate after `done` steps: a line up to the peak, then a cosine down to its final share."""
    warmup = round(config.warmup * config.steps)
    if done < warmup:
        return config.learning_rate * (done + 1) / warmup
    progress = (done - warmup) / max(1, config.steps - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
