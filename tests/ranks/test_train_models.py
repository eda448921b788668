"""The models of `towpath train`: they train as plain PyTorch does, and start from files as they stand there.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import towpath
from tests.ranks.models import VOCABULARY, gpt2_config, llama_config
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom, strategy_of
from towpath import Topology
from towpath.train import models
from towpath.train.config import ModelConfig
from towpath.train.models import build_model

SHAPE = Topology(2, 2)
LENGTH, STEPS = 8, 30
OURS = ModelConfig(width=16, depth=2, heads=4)


def _config(kind: str) -> Any:
    if kind == "gpt2":
        return gpt2_config(LENGTH, architectures=["GPT2LMHeadModel"])
    return llama_config(LENGTH, bos_token_id=None, eos_token_id=None, architectures=["LlamaForCausalLM"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A config.json of each kind."""
    made: dict[str, Path] = {}
    for kind in ("llama", "gpt2"):
        made[kind] = tmp_path_factory.mktemp(kind)
        _config(kind).save_pretrained(made[kind])
    return made


# --- training --------------------------------------------------------------------------------------------------------


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank + 10 * step)
    rows = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_new_weights_are_drawn_as_transformers_draws_them(world: Worlds, folders: dict[str, Path], kind: str) -> None:
    for spreads in world(4).run(_spreads, str(folders[kind])):
        for name, (found, expected) in spreads.items():
            # Both are standard deviations of at least some hundred draws, or of constants.
            assert found == pytest.approx(expected, rel=0.35), name


def _spreads(folder: str) -> dict[str, tuple[float, float]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(dist.get_rank())
    sharded: Any = towpath.shard(build_model(ModelConfig(hf=folder), VOCABULARY).model, "zero3", topology=SHAPE)
    plain: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, buffer in plain.named_buffers():
        assert torch.equal(sharded.get_buffer(name), buffer), name
    found = {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}
    return {
        name: (found[name].square().mean().sqrt().item(), p.detach().square().mean().sqrt().item())
        for name, p in plain.named_parameters()
    }


# --- checkpointing, compiling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", seldom("ours"), seldom("gpt2")])
def test_checkpointing_changes_no_gradient(world: Worlds, folders: dict[str, Path], kind: str) -> None:
    config = ModelConfig(hf=str(folders[kind])) if kind in folders else OURS
    assert all(world(4).run(_checkpointed_alike, config))


def _checkpointed_alike(config: ModelConfig) -> bool:
    gradients: list[list[Tensor]] = []
    for checkpointed in (False, True):
        built = build_model(config, VOCABULARY)
        if checkpointed:
            models.checkpoint_blocks(built)
        torch.manual_seed(3)
        model: Any = towpath.shard(built.model, "zero3", topology=SHAPE)
        models.next_token_loss(model, *_batch(dist.get_rank(), 0)).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- weights from files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of transformers in one file and in several, in fp32 and in bf16."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(_config("llama"))
    made = {name: tmp_path_factory.mktemp(name) for name in ("one", "several", "bf16")}
    model.save_pretrained(made["one"])
    model.save_pretrained(made["several"], max_shard_size="3KB")
    assert len(list(made["several"].glob("*.safetensors"))) > 2
    model.to(torch.bfloat16).save_pretrained(made["bf16"])
    return made


@in_turn(["zero3", "paro-iig", "mics:2x1", "ddp"], 1)
@pytest.mark.parametrize("stored", [seldom("one"), "several", "bf16"])
def test_what_is_sharded_is_what_the_files_hold(
    world: Worlds, weights: dict[str, Path], stored: str, label: str
) -> None:
    config = ModelConfig(hf=str(weights[stored]), weights=str(weights[stored]))
    params = torch.bfloat16 if stored == "several" else None
    for wrong in world(4).run(_compare_with_files, config, label, params):
        assert not wrong


def _compare_with_files(config: ModelConfig, label: str, params: torch.dtype | None) -> list[str]:
    from transformers import AutoModelForCausalLM

    built = build_model(config, VOCABULARY)
    precision = towpath.Precision(params=params)
    model: Any = towpath.shard(built.model, strategy_of(label, SHAPE), precision=precision, values=built.values)
    stored: Any = AutoModelForCausalLM.from_pretrained(config.weights, dtype=torch.float32)
    (inputs, _), computes = _batch(dist.get_rank(), 0), params or torch.float32
    with torch.no_grad():
        found, expected = models.logits_of(model, inputs), stored.to(computes)(inputs).logits
    # The norms' weights are rounded alike; but the rotary table of a model that was cast as a whole is not ours.
    close = torch.equal(found, expected) if params is None else (found - expected).abs().max().item() < 0.1
    stored = AutoModelForCausalLM.from_pretrained(config.weights, dtype=torch.float32)
    pairs = zip(model.named_parameters(), stored.parameters(), strict=True)
    wrong = [name for (name, p), q in pairs if not torch.equal(p.full_tensor().detach(), q.detach())]
    return wrong if close else [*wrong, "logits"]


def test_ours_loads_what_transformers_saved_and_computes_the_same(world: Worlds, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaConfig(**{k: v for k, v in build_model(OURS, VOCABULARY).config_json.items() if k != "model_type"})
    LlamaForCausalLM(made).save_pretrained(tmp_path)
    for distance in world(4).run(_ours_against_llama, str(tmp_path)):
        # The same sums in fp32, in another order: some ten roundings of 6e-8 of logits of order 1.
        assert distance <= 2e-6


def _ours_against_llama(folder: str) -> float:
    from transformers import AutoModelForCausalLM

    built = build_model(replace(OURS, weights=folder), VOCABULARY)
    model = towpath.shard(built.model, "zero3", topology=SHAPE, values=built.values)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs, _ = _batch(dist.get_rank(), 0)
    with torch.no_grad():
        return (models.logits_of(model, inputs) - models.logits_of(theirs, inputs)).abs().max().item()
