"""The arithmetic of low-rank matrices (PowerSGD): one step of the power iteration, from the previous factor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence


def first_factor(columns: int, rank: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the random factor to start from. It is the same on all ranks and devices with the same `seed`."""
    drawn = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device, dtype)


def matmul_thin(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return matrix · factor, for a factor of few columns.

    It is computed as the product of the transposes, which takes a CPU's BLAS down to an eighth of the time.
    """
    return (factor.T @ matrix.T).T


def orthonormal(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return an orthonormal basis, in `dtype`, of the span of the columns of each matrix.

    A column that depends on those before it becomes zero. The basis is NaN if a value is not finite. All matrices take
    as many launches as one, but for a copy each, and the host waits for nothing.
    """
    columns = pad_sequence(list(matrices), batch_first=True).to(torch.float64)
    _, rows, rank = columns.shape
    same = torch.eye(rank, dtype=torch.float64, device=columns.device)
    # More than the rounding errors of a Gram matrix with a diagonal of ones. It stays positive definite where columns
    # depend on each other.
    shift = 1e-14 * rank * rows**0.5
    # The error of a basis from a Gram matrix is the square of the columns' condition number, so there is a second turn.
    # A column that depends on others has lost most of its length in the first one.
    for shortest in (0.0, 0.7):
        gram = columns.mT @ columns
        norms = gram.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
        scales = torch.where(norms <= shortest, 0.0, norms.reciprocal())
        lower, failed = torch.linalg.cholesky_ex(torch.add(scales * gram * scales.mT, same, alpha=shift))
        columns = columns @ torch.linalg.solve_triangular(lower, scales * same, upper=False).mT
        columns = torch.where(failed[:, None, None] == 0, columns, torch.nan)
    columns = columns.to(dtype)
    return [basis[: len(matrix)] for matrix, basis in zip(matrices, columns, strict=True)]


def with_unit_columns(factor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Scale the columns of `factor` to unit norm. Columns of zeros are taken from `before`."""
    norms = factor.norm(dim=0)
    return torch.where(norms > 0, factor / norms, before)
