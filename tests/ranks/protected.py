"""Jobs whose nodes are folders: each has a memory that can be lost. Functions here run on every rank."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.checkpoints import Content, content, rank
from tests.ranks.models import noise
from tests.ranks.strategies import strategy_of
from towpath import Topology, checkpoint
from towpath.protect import memory, snapshots
from towpath.protect.memory import NodeMemory, memory_of

SHAPE = Topology(2, 2)
WIDTH = 12
BIG = 300, 511  # a slice of 65,536 elements or more is divided among the ranks of a node


class Layer(nn.Module):
    """A frozen matrix, a thin one that is trained, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.base(x) + self.up(x)))


class Model(nn.Module):
    """What a snapshot may have to hold: trained, frozen and large parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.widen, self.narrow = nn.Linear(WIDTH, BIG[0]), nn.Linear(BIG[1], 1)
        self.big = nn.Linear(*BIG)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.narrow(torch.tanh(self.big(torch.tanh(self.widen(x))))) * self.scale


class Scaler:
    """An extra that changes in every step, with a tensor and a float."""

    def __init__(self) -> None:
        self.scale, self.seen = 65536.0, torch.zeros(3)

    def step(self) -> None:
        self.scale, self.seen = self.scale / 3, self.seen + 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "seen": self.seen}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.scale, self.seen = found["scale"], found["seen"]


class Job:
    """A protected training on this rank, with everything that belongs into a snapshot."""

    def __init__(
        self,
        label: str,
        topology: Topology = SHAPE,
        every: int = 3,  # a snapshot every second step; 0: no protection
        optimizer: Any = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.label = label
        torch.manual_seed(7)
        strategy = strategy_of(label, topology, protect=towpath.Protect(every) if every else None)
        self.model: Any = towpath.shard(Model().to(dtype), strategy, units=[Layer], topology=topology, **options)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-5) if optimizer is None else optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler, self.dtype = Scaler(), dtype
        torch.manual_seed(100 + rank())  # each rank draws its own dropout
        self.state = self.new_state()

    def new_state(self) -> checkpoint.State:
        return checkpoint.State(self.model, self.optimizer, schedule=self.scheduler, scaler=self.scaler)

    def train(self, steps: Iterable[int], saver: checkpoint.Saver | None = None) -> list[float]:
        """Return this rank's losses. With a saver, snapshots are taken, and are complete at the end."""
        losses: list[float] = []
        for step in steps:
            loss = self.model(noise(rank(), 0, step, 3, WIDTH).to(self.dtype)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.scaler.step()
            losses.append(loss.item())
            if saver is not None:
                saver.protect(step)
        if saver is not None and saver._snapshots is not None:
            saver._snapshots.wait()
        return losses

    def spoil(self) -> Job:
        """So that what is right afterwards was loaded."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(123.0)
        torch.manual_seed(0)
        return self

    def content(self) -> Content:
        """Everything that is whole on this rank: weights, states, extras and the next random numbers."""
        found = content(self.model, self.optimizer)
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        found["schedule"] = torch.tensor(self.scheduler.last_epoch)
        found["scaler"] = torch.cat([self.scaler.seen, torch.tensor([self.scaler.scale])])
        found["random numbers"] = torch.get_rng_state()
        return found


def enter(nodes: Path, shape: Topology = SHAPE, order: Sequence[int] | None = None) -> None:
    """Let this rank be on a node of its own memory. `order`: the folder of each node."""
    number = rank() // shape.ranks_per_node
    mine = nodes / str(number if order is None else order[number])
    mine.mkdir(parents=True, exist_ok=True)
    os.environ[memory.VARIABLE] = str(mine)
    snapshots.start_keeper = lambda *_args, **_options: None  # its own tests: tests/unit/test_keeper.py
    dist.barrier()


def on_rank_0(work: Any, *arguments: Any) -> None:
    """Call `work` on one rank, while the others wait."""
    dist.barrier()
    if rank() == 0:
        work(*arguments)
    dist.barrier()


def lose(nodes: Path, *lost: int) -> None:
    """Lose the memory of nodes."""
    on_rank_0(lambda: [shutil.rmtree(nodes / str(each)) for each in lost])


def copied(nodes: Path, name: str) -> Path:
    """Return a copy of all nodes' memory, for one more loss."""
    copy = nodes.with_name(name)
    on_rank_0(lambda: shutil.copytree(nodes, copy, symlinks=True))
    return copy


def memory_in(nodes: Path, node: int, root: Path) -> NodeMemory:
    """Return the memory of a node, as seen from anywhere."""
    return NodeMemory(nodes / str(node) / f"towpath-{os.getuid()}" / memory_of(root).path.name)


@contextmanager
def logged(of: str = "protect", level: int = logging.ERROR) -> Generator[list[str]]:
    """What a logger of Towpath logs from a level on."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, handler = logging.getLogger(f"towpath.{of}"), Keep(level)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
