"""Each of examples/ runs and learns. As `python -m lab run` starts them they are run by tests/unit/test_commands.py.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.documented import ROOT
from tests.ranks.launched import launched
from tests.ranks.server import Worlds

LOSS = re.compile(r"loss ([\d.]+)")

# By ranks; so few steps as show that it learns.
EXAMPLES = {
    "train.py": (2, ("paro-iig", "2")),
    "hugging_face.py": (2, ("mics", "3", "saved")),
    "lora.py": (2, ("3", "saved")),
    "resnet.py": (2, ("zero3", "15")),
    "codec.py": (2, ("40",)),
    "meta_device.py": (2, ("2",)),
    "pipeline.py": (4, ("2",)),
}
# What is smaller here than in the examples.
SMALLER: dict[str, dict[str, int]] = {
    "train.py": {"BATCH": 2},
    "hugging_face.py": {"BATCH": 2, "LENGTH": 64},
    "lora.py": {"BATCH": 2, "LENGTH": 64},
    "meta_device.py": {"WIDTH": 256, "DEPTH": 16},
    "pipeline.py": {"MICRO_BATCHES": 4},
}


def test_no_example_is_left_out() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, "tiny_gpt.py"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_learns(world: Worlds, tmp_path: Path, name: str) -> None:
    size, arguments = EXAMPLES[name]
    (tmp_path / "text.txt").write_text("All day the barge went up the canal, and the towpath with it.\n" * 500)
    said = world(size).run(_printed, name, arguments, tmp_path)[0]
    losses = [float(loss) for loss in LOSS.findall(said)]
    assert len(losses) >= 2 and losses[-1] < losses[0], said
    if name == "hugging_face.py":
        assert (tmp_path / "saved/config.json").is_file() and "it writes:" in said
    if name == "lora.py":
        assert (tmp_path / "saved/adapter_model.safetensors").is_file()
        assert "0 of what is frozen" in said


def _printed(name: str, arguments: tuple[str, ...], folder: Path) -> str:
    with _started_here(folder), launched():
        module = _loaded(ROOT / "examples" / name)
        if name in ("train.py", "pipeline.py"):  # not the whole standard library
            sys.modules["tiny_gpt"].FILES = [folder / "text.txt"]  # pyright: ignore[reportAttributeAccessIssue]
        vars(module).update(SMALLER.get(name, {}))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            module.main(*arguments)
    return out.getvalue()


@contextlib.contextmanager
def _started_here(folder: Path) -> Generator[None]:
    """In a folder of its own, on ranks that have their process group and keep it."""
    at = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}),
            mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]),  # what Python does with a script
            mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
            mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
        ):
            yield
    finally:
        os.chdir(at)


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_function_for_ray_trains_on_its_workers(world: Worlds) -> None:
    for losses in world(2).run(_under_ray):
        assert len(losses) == 20 and losses[-1] < losses[0]


def _under_ray() -> list[float]:
    """With a stand-in for what the file imports of Ray: two workers on one node."""
    reported: list[float] = []
    context = SimpleNamespace(
        get_local_world_size=lambda: 2,
        get_world_size=dist.get_world_size,
        get_world_rank=dist.get_rank,
        get_local_rank=dist.get_rank,
    )
    train: Any = ModuleType("ray.train")
    train.get_context, train.ScalingConfig = lambda: context, dict
    train.report = lambda metrics: reported.append(metrics["loss"])
    torch_train: Any = ModuleType("ray.train.torch")
    torch_train.TorchTrainer = object
    ray: Any = ModuleType("ray")
    ray.train = train
    with mock.patch.dict(sys.modules, {"ray": ray, "ray.train": train, "ray.train.torch": torch_train}):
        module = _loaded(ROOT / "examples" / "clusters" / "ray_train.py")
        module.STEPS = 20  # pyright: ignore[reportAttributeAccessIssue]
        module.train_loop()
    return reported
