"""The step of an optimizer that needs whole matrices: shared out among owners, against every rank doing all of it.

    python benchmarks/muon.py [CASE …] [--rounds 8] [--quick] [--resume]

Two nodes of two ranks, and Muon for the matrices of the model's blocks. `owner_stepped` is ours, under zero3. `naive`
is what people write around FSDP2: each rank gathers the gradient of each matrix (`grad.full_tensor()`), lets the same
Muon step all of them whole, and copies back the slices that it holds. It keeps whole weights and momenta on every rank,
so that it need not gather them: more memory than ours, and fewer bytes than gathering weights as well.

A turn is the optimizer's step alone. Gradients are computed once, before the first turn, and stay: so the seconds, and
the bytes of the interfaces, are the step's. Asked: ≤ 0.6 of the naive seconds. Every run is added to
benchmarks/results/muon.jsonl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from towpath.bench.harness import figures, race
from towpath.bench.harness.contestants import Cluster, Entry
from towpath.bench.harness.pool import started
from towpath.bench.harness.suite import Settings, Suite
from towpath.bench.harness.worker import timed
from towpath.bench.peers import build
from towpath.bench.workload import PLAIN, Workload
from towpath.optim import owner_stepped

ASKED = 0.6
OURS, NAIVE = "owner_stepped", "naive"
MODELS = {OURS: "zero3", NAIVE: "fsdp2"}  # whose model, as towpath.bench.peers names them
LEARNING_RATE = 0.02
WARM_TURNS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """On cables of the rate `inter` (None: unshaped)."""

    name: str
    inter: str | None

    def measure(self, settings: Settings) -> dict[str, Any]:
        workload = PLAIN.quick() if settings.quick else PLAIN
        entries = {
            kind: Entry(Cluster(workload.topology, self.inter), MuonStep, (kind, workload), WARM_TURNS)
            for kind in MODELS
        }
        with started(entries, settings.say) as made:
            run = race.run(made, settings.rounds, settings.say)
            matrices = made[OURS].ask("matrices")[0]
        return {"checks": [figures.ratio(run.seconds, OURS, NAIVE, ASKED)], "matrices": matrices, **run.recorded()}


class MuonStep:
    """The worker: a turn is one step of the optimizer."""

    def __init__(self, rank: int, world: int, kind: str, workload: Workload) -> None:
        model, _ = build(MODELS[kind], workload)
        model(*next(workload.data(rank))).backward()
        self._matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
        if kind == OURS:
            self._step: Callable[[], Any] = owner_stepped(muon_of(self._matrices)).step
        else:
            self._step = NaiveMuon(self._matrices).step

    def turn(self) -> float:
        return timed(self._step)

    def matrices(self) -> int:
        return len(self._matrices)


class NaiveMuon:
    """Of an FSDP2 model's matrices: all of every rank's work is done on every rank."""

    def __init__(self, sharded: list[nn.Parameter]) -> None:
        self._sharded = sharded
        self._wholes = [nn.Parameter(_whole(p.detach()).clone()) for p in sharded]
        self._optimizer = muon_of(self._wholes)

    @torch.no_grad()
    def step(self) -> None:
        for whole, p in zip(self._wholes, self._sharded, strict=True):
            whole.grad = _whole(p.grad)
        self._optimizer.step()
        for whole, p in zip(self._wholes, self._sharded, strict=True):
            _copy_slice(p, whole)


def muon_of(matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=LEARNING_RATE)


def _whole(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor), f"expected a DTensor of FSDP2's, got {type(tensor).__name__}"
    return tensor.full_tensor()


def _copy_slice(sharded: Any, whole: torch.Tensor) -> None:
    """FSDP2 cuts matrices by rows, as torch.chunk does."""
    mesh, local = sharded.device_mesh, sharded.to_local()
    pieces = whole.chunk(mesh.size())
    if local.numel():
        local.copy_(pieces[mesh.get_local_rank()])


SUITE = Suite("muon", __doc__ or "", [Case("200mbit", "200mbit"), Case("unshaped", None)], rounds=8)

if __name__ == "__main__":
    import muon as suite  # ranks find by this name what they are sent

    suite.SUITE.main()
