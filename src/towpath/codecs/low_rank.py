"""The arithmetic of matrices in low rank (PowerSGD): one step of the power iteration, from a factor that was near."""

from __future__ import annotations

import torch


def first_factor(columns: int, rank: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Where the iteration begins: the same on every rank and device that passes the same `seed`."""
    drawn = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device, dtype)


def columns_of(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """matrix · factor, for a factor of few columns.

    Written as the product of the transposed ones, which takes a CPU's BLAS down to an eighth of the time.
    """
    return (factor.T @ matrix.T).T


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """A basis of what the columns span. Of values that are not finite there is none: it is not finite either."""
    finite = columns.isfinite().all()
    basis = torch.linalg.qr(torch.where(finite, columns, 0.0)).Q
    return torch.where(finite, basis, torch.nan)


def with_unit_columns(factor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """So that products with it keep their order of magnitude. Where a column is zeros, that of `before` stays."""
    norms = factor.norm(dim=0)
    return torch.where(norms > 0, factor / norms, before)
