"""Unequal batches of a model on one rank: the weight of its gradients, and its rows of each micro-batch.

All ranks make the same transfers in every micro-step. So ranks of unequal speed take equally many micro-batches, of
unequal size. Gradients are weighted by tokens:

    weigh           loss · tokens / scale, where `scale` is one constant of all ranks
    the engine      the mean over the ranks, summed over the micro-steps, as always
    the boundary    every rank learns all numbers of tokens, in the message that compares the ranks
    end_step        mean · ranks · scale / all tokens: the gradient of the mean over all tokens of the step

`scale` is a power of two, so that it changes no bit of the result. It only keeps the numbers that are sent in the range
of ordinary gradients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from towpath.core.queues import LoggedCall
from towpath.core.shares import AUTO, TOLD, Shares, adapted_rows, divided_rows
from towpath.engine.comm import CommContext
from towpath.engine.compute_clock import WARM_UP, ComputeClock
from towpath.errors import ConfigError, StepError
from towpath.logs import logger

_LOG = logger("shares")

_SETTLING = 2  # the first windows, after each of which rows may change without a drift
_PAUSE = 45  # steps between two windows, later
_SHOWN = 16  # ranks whose rows are printed


class Batches:
    """The batches of a model on one rank, as the engine sees them. These are equal: a plain mean weighs them right."""

    weighs = False  # whether `end_step` may return another factor than 1
    tokens = 0  # of all ranks of the island, in all steps. Equal batches are not counted.

    def forward_begins(self) -> None:
        """Note that a forward pass with a graph begins."""

    def check_weighed(self) -> None:
        """Raise StepError if the loss of the backward pass that begins was not weighed."""

    def pass_ended(self, muted: bool) -> None:
        """Count the tokens of a backward pass, unless its gradients count as zero."""

    def abandoned(self) -> None:
        """Drop the passes since the last boundary."""

    def encoded(self) -> bytes:
        """Return what this rank tells at a boundary, in its slot. Other slots are zeros, which the maximum ignores."""
        return b""

    def decode(self, slots: bytes) -> None:
        """Take what all ranks have told."""

    def end_step(self) -> float:
        """Begin the next step. Return the factor of the mean gradients, which is the same on all ranks."""
        return 1.0


@final
class UnequalBatches(Batches):
    """The unequal batches of a model on one rank. The engine holds one if its strategy has shares."""

    weighs = True

    def __init__(self, shares: Shares, comm: CommContext) -> None:
        self._shares, self._comm, self._number = shares, comm, comm.number
        self._first = comm.job.rank // comm.groups.world * comm.groups.world  # the first rank of this island
        self._clock = ComputeClock(comm.record) if shares == AUTO else None
        self.say: Callable[[str], object] = _LOG.info if comm.groups.rank == 0 else _LOG.debug
        self.drawn = 0  # micro-batches that a sampler has taken
        self._scale = 0.0
        self._of_pass: int | None = None  # the tokens of the running backward pass
        self._of_step = 0  # those of the passes since the last boundary, on this rank
        self._has_differed = False  # whether ranks had unequal numbers of tokens in a step
        self._told: Sequence[tuple[int, float, int]] = ()  # what all ranks have told at the last boundary
        # The rows of the island's ranks, each from a number of a micro-batch on.
        self._rows: list[tuple[int, tuple[int, ...]]] = []
        self._before = 0  # rows of the islands before this one
        self._micro_batch = 0  # the rows of the average rank
        self._windows = 0  # those that were measured
        self._seconds: Sequence[float] = ()  # what the rows follow

    # Rows -------------------------------------------------------------------------------------------------------------

    def divide(self, micro_batch: int) -> int:
        """Divide micro-batches with `micro_batch` rows for the average rank. Return the rows of all ranks together."""
        if type(micro_batch) is not int:
            raise ConfigError(f"micro_batch={micro_batch!r}: expected the rows of a micro-batch, as a whole number.")
        job, ranks = self._comm.job.world, self._comm.groups.world
        if not self._rows:
            speeds = (1,) * job if isinstance(self._shares, str) else self._shares  # "auto" begins with equal rows
            of_all = divided_rows(speeds, micro_batch * job)
            self._rows = [(0, of_all[self._first : self._first + ranks])]
            self._before, self._micro_batch = sum(of_all[: self._first]), micro_batch
        elif micro_batch != self._micro_batch:
            raise ConfigError(
                f"micro_batch={micro_batch}: the rows of this model were divided for micro_batch={self._micro_batch}, "
                "and all its samplers take the same. To evaluate, take PyTorch's DistributedSampler."
            )
        return micro_batch * job

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each rank of the island in the micro-batches that are taken from now on."""
        return self._rows[-1][1] if self._rows else ()

    def span(self, number: int | None = None) -> tuple[int, int]:
        """Return the first row of this rank in a micro-batch of all ranks, and how many it takes.

        `number`: The number of the micro-batch as the sampler counts. By default, it is the next one.
        """
        rank = self._comm.groups.rank
        rows = next(rows for first, rows in reversed(self._rows) if number is None or first <= number)
        return self._before + sum(rows[:rank]), rows[rank]

    def described(self) -> str:
        """Return the rows as text."""
        rows = self.rows
        return f"{' '.join(map(str, rows)) if len(rows) <= _SHOWN else f'{min(rows)} to {max(rows)}'} rows"

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        if self._clock is not None:
            self._clock.begin()

    def weigh(self, loss: Tensor, tokens: int) -> Tensor:
        """Return the loss times the weight of its tokens. Its backward pass tells the engine of them."""
        if self._clock is not None:
            self._clock.end()
        if loss.dtype not in (torch.float32, torch.float64):
            raise StepError(
                f"rank {self._number}: weigh() got a loss in {loss.dtype}, which would round its weight. Compute it in "
                "float32, for example from logits.float()."
            )
        try:
            count = operator.index(tokens)
        except TypeError:
            count = -1
        if count < 0:
            raise StepError(
                f"rank {self._number}: weigh() got {tokens} tokens; expected how many the loss is a mean of, as an int."
            )
        if getattr(loss, "towpath_weighed", False):
            raise StepError(
                f"rank {self._number}: weigh() got a loss that has a weight, and would multiply it by another one. If "
                "two models have one loss, pass a module that calls both to towpath.shard()."
            )
        if not self._scale:
            self._scale = self._agreed_scale(count)
        self._of_pass = None  # in case that another backward pass failed before it reached the model
        weighed: Any = loss * (count / self._scale)
        weighed.towpath_weighed = True
        if weighed.requires_grad:
            weighed.register_hook(partial(self._pass_begins, count))
        return weighed

    def _agreed_scale(self, tokens: int) -> float:
        """Return about the mean of all ranks' tokens. Every rank must call it with its first loss."""
        with self._comm.program.shared("weigh()", LoggedCall.PROGRAM):
            found = self._comm.groups.gather_rows(torch.tensor([tokens]), self._comm.program.wait)
        return 2.0 ** round(math.log2(max(1.0, found.double().mean().item())))

    def _pass_begins(self, tokens: int, _: Tensor) -> None:
        if self._of_pass is not None:
            self._of_pass = None
            raise StepError(
                f"rank {self._number}: two losses were weighed for one backward pass. Add them, and weigh the sum."
            )
        self._of_pass = tokens
        if self._clock is not None:
            self._clock.begin()

    def check_weighed(self) -> None:
        if self._of_pass is None:
            raise StepError(
                f"rank {self._number}: the strategy has shares, and the loss of this backward pass has no weight. Call "
                "towpath.weigh(model, loss, tokens).backward() with the tokens or rows that `loss` is the mean of, or "
                "leave shares out."
            )

    def pass_ended(self, muted: bool) -> None:
        if self._clock is not None:
            self._clock.end()
        self._of_step += 0 if muted else self._of_pass or 0
        self._of_pass = None

    def abandoned(self) -> None:
        self._of_pass, self._of_step = None, 0
        if self._clock is not None:
            self._clock.drop_step()

    # The boundary -----------------------------------------------------------------------------------------------------

    def encoded(self) -> bytes:
        slots = bytearray(TOLD.size * self._comm.groups.world)
        seconds = 0.0 if self._clock is None else self._clock.end_step(self._of_step)
        TOLD.pack_into(slots, TOLD.size * self._comm.groups.rank, self._of_step, seconds, self.drawn)
        return bytes(slots)

    def decode(self, slots: bytes) -> None:
        self._told = list(TOLD.iter_unpack(slots))

    def end_step(self) -> float:
        tokens, seconds = [each for each, _, _ in self._told], [each for _, each, _ in self._told]
        total, self._of_step = sum(tokens), 0
        if not total:
            raise StepError(f"rank {self._number}: no rank had a token in this step. Leave such steps out.")
        self._check(tokens)
        if self._clock is not None and all(seconds):
            self._adapt(self._clock, tokens, seconds, max(drawn for *_, drawn in self._told))
        self.tokens += total
        return len(tokens) * self._scale / total

    def _check(self, tokens: Sequence[int]) -> None:
        """Raise StepError if the data was divided evenly, and the shares say otherwise.

        Rows that were divided by the shares may have equally many labels by chance, and so may those of a caller.
        """
        shares = self._shares
        if shares == AUTO or self._rows or self._has_differed:
            return
        self._has_differed = len(set(tokens)) > 1
        if not self._has_differed and len(set(shares[self._first : self._first + len(tokens)])) > 1:
            raise StepError(
                f"rank {self._number}: every rank had {tokens[0]} tokens in this step, and shares={shares} want other "
                "numbers. Take each rank's rows from towpath.ShareSampler(model, …), or leave shares out."
            )

    def _adapt(self, clock: ComputeClock, tokens: Sequence[int], seconds: Sequence[float], drawn: int) -> None:
        """Divide the rows anew, if the speeds that were measured are worth it."""
        if not self._rows:
            raise StepError(
                f"rank {self._number}: shares='auto' has measured the ranks, and nothing takes rows from it. Take the "
                "batches from towpath.ShareSampler(model, …), or leave shares out."
            )
        before, settles = self.rows, self._windows < _SETTLING
        rows = adapted_rows(before, seconds, None if settles else self._seconds)
        self._windows += 1
        clock.restart(WARM_UP if self._windows < _SETTLING else _PAUSE)
        if settles or rows != before:
            self._seconds = seconds
        if rows != before:
            # Samplers may be ahead of each other. All ranks know the first micro-batch that none has taken.
            self._rows.append((drawn, rows))
            steps = [each * count for each, count in zip(seconds, tokens, strict=True)]
            after = max(step * new / old for step, new, old in zip(steps, rows, before, strict=True))
            self.say(f"shares {self.described()}, slowest rank {max(steps):.3g} → {after:.3g} s a step")
