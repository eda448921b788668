"""What the package promises to the outside: its names, and that planning needs no torch."""

import subprocess
import sys
from types import ModuleType

import pytest

import towpath
import towpath.optim


@pytest.mark.parametrize("module", [towpath, towpath.checkpoint, towpath.planning])
def test_the_public_names_are_sorted_and_all_there(module: ModuleType) -> None:
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_planning_plans_and_simulates_without_torch() -> None:
    program = """
import sys
from towpath import planning, strategy
cluster, model = planning.load_cluster("ethernet-10g"), planning.describe_model("gpt-2.5b", length=256)
solver = planning.Solver(model, cluster, planning.Request(batch=16, memory=cluster.memory))
found = solver.solve(best=1, most=1)
assert isinstance(found, planning.Ranking), found
batching = planning.Batching(micro_batch=1, micro_steps=1, checkpointing=True)
steps = [solver.predict(strategy(name, cluster.topology), batching) for name in ("zero3", "mics")]
assert solver.predict_memory(steps[0].strategy, batching) == steps[0].memory
assert solver.timeline(steps[0].strategy, batching).seconds == steps[0].seconds
assert not {"torch", "numpy"} & set(sys.modules), "torch or numpy was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_does_nothing() -> None:
    program = """
import sys
import towpath
assert [m for m in sys.modules if m.startswith("towpath.")] == ["towpath.version"], sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""


def test_nothing_is_imported_before_it_is_used() -> None:
    """DTensor and checkpoints take half a second in each rank that starts, frameworks and pipelining longer."""
    program = """
import sys, towpath
towpath.shard
slow = {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"} & set(sys.modules)
assert not slow, slow
import towpath.integrations, towpath.checkpoint, towpath.pipeline, towpath.train.trainer
theirs = {"accelerate", "transformers", "lightning", "peft", "datasets", "torchdata"} & set(sys.modules)
assert not theirs, theirs
from towpath.pipeline import COMPRESSIONS, SCHEDULES, Compression, compression, split
assert "torch.distributed.pipelining" not in sys.modules
from towpath.pipeline import Pipeline
assert "torch.distributed.pipelining" in sys.modules and callable(split) and callable(towpath.pipeline.split)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("module", [towpath, towpath.planning])
def test_an_unknown_name_says_which_there_are(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=str(module.__all__[0])):
        module.shardd  # noqa: B018


def test_submodules_work_after_a_plain_import() -> None:
    """Errors name these as remedies. Nothing else may have imported their modules, so this needs a fresh process."""
    program = """
import towpath
towpath.checkpoint.get_model_state_dict, towpath.checkpoint.set_optimizer_state_dict, towpath.checkpoint.save
towpath.codecs.register, towpath.errors.ShardError, towpath.pipeline.Compression
towpath.integrations.accelerate.Accelerator
towpath.optim.owner_stepped, towpath.optim.chain
"""
    subprocess.run([sys.executable, "-c", program], check=True)
