"""The sum of gradients over all ranks, matrices by their factors: P = Σ X Q, made orthonormal, and Q = Σ Xᵀ P.

X is what a rank has: its gradient, and what its earlier messages have missed (`errors`). All ranks begin with the same
Q and get the same sums, so P Qᵀ is the same for all; the next time, Q is where they begin. What is no matrix, or would
not get smaller, travels with P as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from towpath.codecs.low_rank import columns_of, first_factor, orthonormal, with_unit_columns
from towpath.codecs.packing import Draws
from towpath.collectives.bound_transfer import RankTransfer
from towpath.collectives.collective import Workspace
from towpath.core.formats import wide
from towpath.core.strategy import Kind
from towpath.core.unit_plan import BucketPlan
from towpath.core.wire import Factored, Matrix


class LowRankSync:
    """Of one bucket. `transfers`: of its two messages."""

    def __init__(self, plan: BucketPlan, factored: Factored, transfers: Sequence[RankTransfer], device: torch.device):
        self.factored, self._transfers = factored, transfers
        self._dtype: torch.dtype = getattr(torch, wide(plan.accumulate_dtype))
        self._message_dtype: torch.dtype = getattr(torch, transfers[0].transfer.dtype)
        self._seed = crc32(str(transfers[0].transfer).encode())
        self._factors = torch.empty(factored.messages[1], dtype=self._dtype, device=device)
        feedback = plan.transfers[Kind.SYNC][0].wire.feedback != "none"
        self._errors = torch.empty(factored.elements if feedback else 0, dtype=self._dtype, device=device)
        self.restart()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """What it keeps from one step to the next."""
        return (self._factors, self._errors) if self._errors.numel() else (self._factors,)

    @property
    def draws(self) -> tuple[Draws, ...]:
        return ()

    def restart(self) -> None:
        """As at the very first step."""
        self._errors.zero_()
        for number, q in enumerate(self._q()):
            columns, rank = q.shape
            q.copy_(first_factor(columns, rank, self._seed + number, self._dtype, q.device))

    def _q(self, memory: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The second factor of every matrix, in `memory`."""
        shapes = [(matrix.columns, self.factored.codec.rank) for matrix in self.factored.matrices]
        return _cut(self._factors if memory is None else memory, shapes)

    def run(self, region: torch.Tensor, divisor: float, workspace: Workspace) -> None:
        """`region`: the bucket's whole gradients on this rank; then, their sum over all, divided by `divisor`."""
        first, second = self._messages(workspace)
        rank, matrices = self.factored.codec.rank, self.factored.matrices
        x = [_matrix(region, matrix) for matrix in matrices]
        errors = _cut(self._errors, [each.shape for each in x]) if self._errors.numel() else []
        p, q, sent = _cut(first, [(m.rows, rank) for m in matrices]), self._q(), self._q(second)
        rest = first[rank * sum(m.rows for m in matrices) :]

        # Matrices are large: what is done with a whole one is done in place.
        for mine, error in zip(x, errors, strict=False):
            mine.add_(error)
        for mine, left, right in zip(x, p, q, strict=True):
            left.copy_(columns_of(mine.to(self._dtype), right))
        torch.cat([region[start:end] for start, end in self.factored.plain] or [region[:0]], out=rest)
        self._transfers[0].run(first, first, workspace)

        bases = [orthonormal(left.to(self._dtype)) for left in p]
        for mine, basis, right in zip(x, bases, sent, strict=True):
            right.copy_(columns_of(mine.to(self._dtype).T, basis))
            if errors:
                _add_product(mine, basis, right.to(self._dtype), -1)  # what this rank's part of the sum misses
        self._transfers[1].run(second, second, workspace)

        # A sum that is not finite leaves what is kept as it was: that step will not be taken.
        finite = first.isfinite().all() & second.isfinite().all()
        for mine, error in zip(x, errors, strict=False):
            torch.where(finite, mine, error, out=error)
        for mine, basis, summed, kept in zip(x, bases, sent, q, strict=True):
            factor = summed.to(self._dtype)
            _add_product(mine, basis, factor, 1 / divisor, keep=0)
            kept.copy_(torch.where(finite, with_unit_columns(factor, kept), kept))
        for (start, end), values in zip(
            self.factored.plain, rest.split([end - start for start, end in self.factored.plain]), strict=True
        ):
            region[start:end].copy_(values).div_(divisor)  # in the dtype of the sums, which may be the wider one

    def _messages(self, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        """In the memory of bytes, which the sums themselves do not use."""
        first, second = self.factored.messages
        memory = workspace.take((first + second) * self._message_dtype.itemsize, torch.uint8).view(self._message_dtype)
        return memory[:first], memory[first:]


def _matrix(region: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return region[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _add_product(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, times: float, keep: float = 1) -> None:
    """In place: keep · matrix + times · left rightᵀ, summed in the dtype of the factors. With `keep` 0, whatever the
    matrix was."""
    if matrix.dtype == left.dtype:
        matrix.addmm_(left, right.T, beta=keep, alpha=times)
    else:
        matrix.copy_(torch.addmm(matrix.to(left.dtype), left, right.T, beta=keep, alpha=times))


def _cut(memory: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """One after the other, from its start on."""
    found: list[torch.Tensor] = []
    start = 0
    for rows, columns in shapes:
        found.append(memory[start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return found
