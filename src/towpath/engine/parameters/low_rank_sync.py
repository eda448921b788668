"""The gradient sync in low rank (PowerSGD): all ranks sum two thin factors P and Q of each matrix.

First P = Σ X Q, which each rank then makes orthonormal, and after that Q = Σ Xᵀ P. The sum of the matrices is close to
P Qᵀ. X is a rank's gradient plus the error feedback, the part that its earlier messages left out (`errors`). All ranks
start with the same Q and get the same sums, so P Qᵀ is the same on all ranks. The next step starts with the last Q.
Gradients that are not matrices, or would not get smaller, are sent unchanged in the message of P.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from towpath.codecs.low_rank import first_factor, matmul_thin, orthonormal, with_unit_columns
from towpath.codecs.packing import RoundingSeeds
from towpath.collectives.collective import Workspace
from towpath.core.formats import wide
from towpath.core.strategy import TransferKind
from towpath.core.transport import Factored, FactoredMatrix
from towpath.core.unit_plan import BucketPlan
from towpath.engine.transfer_queues import RankTransfer


class LowRankSync:
    """The low-rank gradient sync of one bucket, and its state between steps. `transfers`: two messages, P first."""

    seeds: tuple[RoundingSeeds, ...] = ()  # it does not round at random

    def __init__(self, plan: BucketPlan, factored: Factored, transfers: Sequence[RankTransfer], device: torch.device):
        self.factored, self._transfers = factored, transfers
        self._dtype: torch.dtype = getattr(torch, wide(plan.accumulate_dtype))
        self._message_dtype: torch.dtype = getattr(torch, transfers[0].transfer.dtype)
        # The first factors need no message: every rank draws the same ones, from the name of the transfer.
        self._seed = crc32(str(transfers[0].transfer).encode())
        self._factors = torch.empty(factored.messages[1], dtype=self._dtype, device=device)
        feedback = plan.transfers[TransferKind.GRAD_SYNC][0].transport.feedback != "none"
        self._errors = torch.empty(factored.elements if feedback else 0, dtype=self._dtype, device=device)
        self.restart()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are kept between steps: the second factors, and with error feedback the errors."""
        return (self._factors, self._errors) if self._errors.numel() else (self._factors,)

    def restart(self) -> None:
        self._errors.zero_()
        for number, q in enumerate(self._q()):
            columns, rank = q.shape
            q.copy_(first_factor(columns, rank, self._seed + number, self._dtype, q.device))

    def _q(self, memory: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the second factor of each matrix as a view of `memory`, by default of the kept factors."""
        shapes = [(matrix.columns, self.factored.codec.rank) for matrix in self.factored.matrices]
        return _cut(self._factors if memory is None else memory, shapes)

    def run(self, region: torch.Tensor, divisor: float, workspace: Workspace) -> None:
        """Replace `region`, this rank's gradients of the full bucket, by their sum over all ranks over `divisor`."""
        first, second = self._messages(workspace)
        rank, matrices = self.factored.codec.rank, self.factored.matrices
        x = [_matrix(region, matrix) for matrix in matrices]
        errors = _cut(self._errors, [each.shape for each in x]) if self._errors.numel() else []
        p, q, sent = _cut(first, [(m.rows, rank) for m in matrices]), self._q(), self._q(second)
        rest = first[rank * sum(m.rows for m in matrices) :]

        # Matrices are large, so operations on an entire matrix work in place.
        for mine, error in zip(x, errors, strict=False):
            mine.add_(error)
        for mine, left, right in zip(x, p, q, strict=True):
            left.copy_(matmul_thin(mine.to(self._dtype), right))
        torch.cat([region[start:end] for start, end in self.factored.plain] or [region[:0]], out=rest)
        self._transfers[0].run(first, first, workspace)

        # All ranks have received the same sums, so they find the same basis without another message.
        bases = orthonormal(p, self._dtype)
        for mine, basis, right in zip(x, bases, sent, strict=True):
            right.copy_(matmul_thin(mine.to(self._dtype).T, basis))
            if errors:
                # What remains in the matrix is the error of this rank's part of the sum.
                _add_product(mine, basis, right.to(self._dtype), -1)
        self._transfers[1].run(second, second, workspace)

        # If a sum is not finite, the kept state stays as it was, because the optimizer will skip this step.
        finite = first.isfinite().all() & second.isfinite().all()
        for mine, error in zip(x, errors, strict=False):
            torch.where(finite, mine, error, out=error)
        for mine, basis, summed, kept in zip(x, bases, sent, q, strict=True):
            factor = summed.to(self._dtype)
            _add_product(mine, basis, factor, 1 / divisor, keep=0)
            # The next step starts with these factors: a power iteration over the steps, which converges while gradients
            # change slowly.
            kept.copy_(torch.where(finite, with_unit_columns(factor, kept), kept))
        sizes = [end - start for start, end in self.factored.plain]
        for (start, end), values in zip(self.factored.plain, rest.split(sizes), strict=True):
            # The division is in the dtype of the sums, which may be wider.
            region[start:end].copy_(values).div_(divisor)

    def _messages(self, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the two messages, from the wire buffer for bytes, which the sums themselves do not use."""
        first, second = self.factored.messages
        # One piece of memory for both: a second `take` would return the same bytes again.
        memory = workspace.take((first + second) * self._message_dtype.itemsize, torch.uint8).view(self._message_dtype)
        return memory[:first], memory[first:]


def _matrix(region: torch.Tensor, matrix: FactoredMatrix) -> torch.Tensor:
    return region[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _add_product(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, times: float, keep: float = 1) -> None:
    """Set `matrix` to keep · matrix + times · left rightᵀ in place, computed in the dtype of the factors."""
    # With `keep` 0 the values of the matrix have no effect, even if they are not finite.
    if matrix.dtype == left.dtype:
        matrix.addmm_(left, right.T, beta=keep, alpha=times)
    else:
        matrix.copy_(torch.addmm(matrix.to(left.dtype), left, right.T, beta=keep, alpha=times))


def _cut(memory: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return views of `memory` with the given shapes, one after the other."""
    sizes = [rows * columns for rows, columns in shapes]
    return [part.view(*shape) for part, shape in zip(memory[: sum(sizes)].split(sizes), shapes, strict=True)]
