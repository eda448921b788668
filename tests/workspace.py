"""The workspace of a collective that a test runs by itself."""

from __future__ import annotations

import torch

from towpath.collectives.collective import WireBuffers, Workspace


def workspace() -> Workspace:
    return Workspace(WireBuffers(torch.device("cpu")))
