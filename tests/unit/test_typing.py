"""What a user's program says of types: pyright, in strict mode, passes what is right and finds what is wrong.

One run judges the programs of README.md and docs/start/from-fsdp2.md, and what a user may type. `make check` judges
the examples, which import frameworks.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

import towpath
from tests.documented import ROOT, programs
from towpath.core.presets import Preset

# What the pages' programs take for granted.
IMPORTS = """
import contextlib

import torch
import towpath
"""
AROUND = """
from collections.abc import Sequence

from torch import Tensor, nn

def build() -> nn.Module:
    raise NotImplementedError

def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)

def loss(output: Tensor) -> Tensor:
    return output.mean()

model = build()
batches: Sequence[Sequence[Tensor]] = []
loader = batches
"""

# Each line with `# wrong` must be an error, and no other line.
TYPED = """
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import towpath

class GPT(nn.Module):
    def generate(self) -> int:
        return 1

four = towpath.Topology(2, 2)
model = towpath.shard(GPT(), "zero3", precision="bf16")
assert_type(model, GPT)  # the user's own class, with its own methods
assert_type(model.generate(), int)
assert_type(towpath.shard(GPT(), "auto", workload=towpath.Workload(tokens=8)), GPT)
weight = next(model.parameters())
with towpath.no_sync(model):
    model(1)
for batch in towpath.join(model, [torch.ones(1)]):
    assert_type(batch, Tensor)
towpath.broadcast_buffers(model)
assert_type(towpath.full_tensor(weight), Tensor)
assert_type(towpath.strategy("mics", four, gradients="int4:64", feedback="both", route="two-hop"), towpath.Strategy)
towpath.shard(GPT(), towpath.strategy("zero3", exact=True, offload="optimizer", frozen="as-trained"))
whole = four.whole
assert_type(towpath.strategy(towpath.Placement(whole, whole, whole), four), towpath.Strategy)
towpath.optim.owner_stepped(torch.optim.Muon([weight]))
towpath.checkpoint.State(model, torch.optim.AdamW([weight]))

def named_at_run_time(strategy: str) -> GPT:
    return towpath.shard(GPT(), strategy)

towpath.shard(GPT(), "zero3", precision=torch.bfloat16)
towpath.shard(GPT(), "zero3", precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
towpath.shard(GPT(), "zero3", precision=towpath.Precision("bf16", torch.float32, keep=nn.LayerNorm))

towpath.strategy("zero3", offload="optimizr")  # wrong
towpath.shard(GPT(), "zero3", exact=True)  # wrong
towpath.shard(GPT(), 3)  # wrong
towpath.shard(GPT(), "zero3", precision="bf17")  # wrong
towpath.shard(GPT(), "zero3", precision=16)  # wrong
towpath.Precision(params="bf17")  # wrong
towpath.Precision(reduce=32)  # wrong
towpath.strategy("mics", four, feedback="bothh")  # wrong
towpath.strategy("mics", four, route="two-hops")  # wrong
towpath.strategy("mics", four, ofload="optimizer")  # wrong
towpath.Transport("two-hops")  # wrong
towpath.Transport("two-hop", "int8", feedback="bothh")  # wrong
towpath.Workload(tokens=8, optimizer="adamm")  # wrong
towpath.no_sync("model")  # wrong
towpath.full_tensor(model)  # wrong
model.generat()  # wrong
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Of each file, by its name, what pyright says, by the number of the line."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install --group check")
    folder = tmp_path_factory.mktemp("typed")
    for page in ("README.md", "start/from-fsdp2.md"):
        for name, program in programs(page).items():
            if name in ("dcp", "unchecked"):  # to type checkers, PyTorch exports none of DCP's functions
                continue
            whole = re.search(r"^import .*\btowpath$", program, re.MULTILINE)
            file = f"{Path(page).stem}{name}.py".replace("-", "_")
            (folder / file).write_text(program if whole else IMPORTS + AROUND + program)
    (folder / "typed.py").write_text(TYPED)
    files = list(folder.glob("*.py"))
    ours: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    settings = {key: value for key, value in ours.items() if key not in ("include", "venvPath", "venv")}
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, "extraPaths": [str(ROOT / "src")]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(folder)]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True)
    told: Any = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(files), done.stdout
    by_file: dict[str, dict[int, str]] = {file.name: {} for file in files}
    for each in told["generalDiagnostics"]:
        by_file[Path(each["file"]).name][each["range"]["start"]["line"] + 1] = each["message"]
    return by_file


def test_the_programs_of_the_pages_are_right(found: dict[str, dict[int, str]]) -> None:
    assert all(any(file.startswith(page) for file in found) for page in ("README", "from_fsdp2"))
    assert not {file: lines for file, lines in found.items() if lines and file != "typed.py"}


def test_what_is_wrong_is_found_and_what_is_right_is_not(found: dict[str, dict[int, str]]) -> None:
    wrong = {number for number, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# wrong")}
    assert found["typed.py"].keys() == wrong, found["typed.py"]


def test_the_types_name_every_preset() -> None:
    assert sorted(get_args(Preset)) == sorted(towpath.strategies())
