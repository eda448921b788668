"""Every program in the documentation runs.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.documented import PAGES, ROOT, programs
from tests.ranks.launched import launched
from tests.ranks.server import Worlds
from tests.ranks.test_from_fsdp2 import Block, Net
from towpath import checkpoint

WIDTH = 8  # of the models of test_from_fsdp2.py
# How many ranks a program is for; the others are for any number.
RANKS = {"pipeline": 8, "codec": 2}


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _plain(_: Path) -> dict[str, Any]:
    """What a loop of PyTorch's has around it."""
    import contextlib

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "batches": [torch.ones(2, 3, WIDTH)] * 2,
        "dataset": torch.ones(32, 3, WIDTH),
        "loss_of": _loss_of,
        "contextlib": contextlib,
        "torch": torch,
        "checkpoint": checkpoint,
        "step": 2,
        "optimizer": optimizer,
        "loader": torch.utils.data.DataLoader(torch.ones(8, WIDTH), batch_size=2),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "print": lambda *_: None,
    }


def _for_trainer(folder: Path) -> dict[str, Any]:
    import transformers

    from tests.ranks import test_trainer

    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True
    )
    return {
        "model": test_trainer._model(),
        "model_again": test_trainer._model(),
        "rows": test_trainer._rows(16),
        "args": args,
        "TheirTrainer": transformers.Trainer,
    }


def _for_lightning(_: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    from tests.ranks import test_lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return {
        "lightning": SimpleNamespace(Trainer=pl.Trainer),
        "options": {"accelerator": "cpu", "devices": 2, "enable_checkpointing": False, **quiet},
        "module": test_lightning._module(),
        "module_again": test_lightning._module(),
        "loader": test_lightning._rows(),
        "Block": nn.Linear,
    }


def _for_peft(_: Path) -> dict[str, Any]:
    from tests.ranks import test_trainer

    def train(model: Any) -> None:
        ids = test_trainer._rows(1)[0]["input_ids"][None]
        model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters()).step()

    return {"peft_model": test_trainer._lora(), "train": train}


def _for_data(folder: Path) -> dict[str, Any]:
    from tests.ranks import test_stateful_loader

    around = _plain(folder)
    towpath.shard(around["model"], "zero3")
    around["optimizer"] = torch.optim.AdamW(around["model"].parameters())
    return {**around, "stateful_loader": test_stateful_loader._loader()}


def _for_checkpoints(folder: Path) -> dict[str, Any]:
    around = _plain(folder)
    towpath.shard(around["model"], "zero3")
    around["optimizer"] = torch.optim.AdamW(around["model"].parameters())
    steps = {"steps": 100, "train_one_step": lambda: None, "rank": dist.get_rank(), "model_config": {"width": WIDTH}}
    return {**around, **steps, "loader": around["scheduler"]}  # anything with state_dict() is an extra


def _for_model(folder: Path) -> dict[str, Any]:
    kinds = {
        "DecoderLayer": Block,
        "MixtureOfExperts": nn.Linear,
        "Encoder": Block,
        "loss": lambda x: x.square().mean(),
    }
    return {**_plain(folder), **kinds, "decoder": Net(), "encoder": Net()}


def _for_torchtitan(folder: Path) -> dict[str, Any]:
    model = Net()
    model.layers = nn.ModuleDict({str(i): block for i, block in enumerate(model.blocks)})
    model.tok_embeddings, model.output = nn.Embedding(8, WIDTH), model.head
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {**_plain(folder), "model": model, "dp_mesh": mesh}


def _for_wires(folder: Path) -> dict[str, Any]:
    """Each rank is a node, so that there is something to send."""
    os.environ["GROUP_RANK"] = os.environ["RANK"]
    return _plain(folder)


def _for_planner(folder: Path) -> dict[str, Any]:
    return {**_plain(folder), "ids": torch.ones(2, WIDTH)}


def _for_sharded(folder: Path) -> dict[str, Any]:
    around = _for_model(folder)
    model = towpath.shard(around["model"], "zero3")
    batch = torch.ones(3, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    around |= {"optimizer": optimizer, "batch": batch, "Path": Path}
    return {**around, "train_one_step": lambda: model(batch).sum().backward()}


def _for_pipeline(_: Path) -> dict[str, Any]:
    from towpath.train.models import GPT, Shape

    tokens = torch.zeros(1, 64, dtype=torch.int64)
    batch = torch.zeros(8, 64, dtype=torch.int64)
    shape = Shape(vocabulary=16, width=64, depth=2, heads=2, hidden=64, tied=True)

    def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return {
        "model": GPT(shape),
        "tokens": tokens,
        "batches": [(batch, batch)],
        "mean_cross_entropy": mean_cross_entropy,
        "torch": torch,
    }


def _for_lora(_: Path) -> dict[str, Any]:
    """A node of eight ranks, of which this test has two."""

    class Smaller:
        Extent = staticmethod(lambda local, nodes: towpath.Extent(min(local, 2), nodes))

        def __getattr__(self, name: str) -> Any:
            return getattr(towpath, name)

    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    return {"model": model, "topology": towpath.Topology(1, 2), "towpath": Smaller()}


def _for_large_models(folder: Path) -> dict[str, Any]:
    """A saved model of transformers, in bf16."""
    import lightning.pytorch as pl

    from tests.ranks import test_trainer

    if dist.get_rank() == 0:
        test_trainer._model().to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    rows = test_trainer._rows(16)
    return {
        **_for_lightning(folder),
        "lightning": pl,
        "rows": rows,
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),  # pyright: ignore[reportArgumentType]
    }


def _for_snapshots(folder: Path) -> dict[str, Any]:
    """Two nodes of one rank, each with memory of its own."""
    around, rank = _plain(folder), dist.get_rank()
    memory = folder / f"memory of {rank}"
    memory.mkdir()
    os.environ.update({"GROUP_RANK": str(rank), "TOWPATH_MEMORY": str(memory)})

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in around["batches"]:
            _loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {**around, "train_step": train_step, "steps": 11}


AROUND: dict[str, Callable[[Path], dict[str, Any]]] = {
    "accelerate": _plain,
    "trainer": _for_trainer,
    "lightning": _for_lightning,
    "peft": _for_peft,
    **dict.fromkeys(("large-trainer", "large-accelerate", "large-lightning", "hugging-face"), _for_large_models),
    "data": _for_data,
    "dcp": _for_checkpoints,
    "pipeline": _for_pipeline,
    "docs/start/from-torchtitan.md": _for_torchtitan,
    "docs/guides/checkpoints.md": _for_checkpoints,
    "docs/guides/state-dicts.md": _for_checkpoints,
    "docs/guides/lora.md": _for_lora,
    "docs/guides/wires.md": _for_wires,
    "docs/guides/after-shard.md": _for_model,
    "docs/guides/rules-for-ranks.md": _for_sharded,
    "docs/guides/when-a-node-dies.md": _for_snapshots,
    "docs/guides/auto.md": _for_planner,
    "docs/guides/describe-a-model.md": _for_planner,
    "docs/guides/find-what-is-slow.md": _for_sharded,
    "docs/guides/monitoring.md": _for_sharded,
}
# On the laboratory (tests/lab/test_lab_page.py), without ranks (tests/unit/test_extending.py), or not here.
ELSEWHERE = {"lab", "flats", "nap", "counters", "preset", "route", "unchecked"}
PROGRAMS = [
    (page.relative_to(ROOT).as_posix(), name)
    for page in PAGES
    for name in programs(page.relative_to(ROOT).as_posix())
    if name not in ELSEWHERE
]


@pytest.mark.parametrize(("page", "name"), PROGRAMS)
def test_the_programs_of_a_page_run(world: Worlds, tmp_path: Path, page: str, name: str) -> None:
    world(RANKS.get(name, 2)).run(_run, page, name, tmp_path)


def _run(page: str, name: str, folder: Path) -> None:
    at = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ), launched(), _as_started_here():
            torch.manual_seed(0)
            around = AROUND.get(name) or AROUND.get(page) or _plain
            exec(compile(programs(page)[name], page, "exec"), {"towpath": towpath, "folder": folder, **around(folder)})
    finally:
        os.chdir(at)


@contextmanager
def _as_started_here() -> Generator[None]:
    """These ranks have their process group; and `auto`, which would measure for some seconds, has chosen (test_auto.py
    is its test)."""
    shard = towpath.shard

    def chosen(model: nn.Module, strategy: Any, *, workload: towpath.Workload | None = None, **options: Any) -> Any:
        assert (strategy == "auto") == (workload is not None)
        return shard(model, "zero3" if strategy == "auto" else strategy, **options)

    with (
        mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
        mock.patch.object(torch.distributed, "init_process_group", lambda *_, **__: None),
        mock.patch.object(towpath, "shard", chosen, create=True),
    ):
        yield
