"""LoRA: PEFT's adapters train as in one process, and frozen parameters cross nodes only where a strategy needs it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import towpath
from tests.ranks.models import DEVICE
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.twin import TOLERANCE, Twin
from towpath import checkpoint

SHAPE = towpath.Topology(2, 2)
LABELS = ("zero3", "hpz", "mics", "paro-iig", "paro-igg offload=params")
VOCABULARY = 32


def _adapted(zeros: bool = False) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=zeros)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that Transformers gives up
        return get_peft_model(model, lora)


def _loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro + 100 * step)
    ids = torch.randint(VOCABULARY, (2, 8), generator=generator).to(DEVICE)
    return model(input_ids=ids, labels=ids).loss


@in_turn(LABELS, 1)
@pytest.mark.parametrize("units", [None, [nn.Linear]], ids=["blocks", "every linear layer"])
def test_adapters_of_peft_train_as_in_one_process(world: Worlds, label: str, units: Any) -> None:
    """The first layer's inputs want no gradient: only their own gradients tell when small units are through."""
    world(4).run(_train, label, units)


def _train(label: str, units: Any = None) -> None:
    twin = Twin(_adapted, _loss, label, SHAPE, units=units)
    frozen = {n: p.detach().clone() for n, p in twin.plain.named_parameters() if not p.requires_grad}
    assert frozen
    for step in range(2):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        models = (twin.sharded, twin.plain)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-2).item() for m in models]
        assert norms[1] > 1e-2 and abs(norms[0] - norms[1]) <= TOLERANCE
        twin.step()
    twin.check_parameters()
    for name, value in frozen.items():
        assert torch.equal(twin.sharded.get_parameter(name).full_tensor(), value), name


@on_ranks(2)
def test_adapters_on_the_meta_device_are_refused_on_all_ranks() -> None:
    """Their modules would initialize them with random values, where PEFT begins at zero."""
    with torch.device("meta"):
        model = _adapted()
    with pytest.raises(towpath.errors.ShardError, match=r"(?s)lora_A.*PEFT"):
        towpath.shard(model, "zero3", topology=towpath.Topology(1, 2))


@on_ranks(4)
def test_what_is_frozen_is_not_laid_out_for_the_codecs_of_gradients() -> None:
    torch.manual_seed(0)
    model: Any = towpath.shard(_adapted(), towpath.strategy("qgz", SHAPE, frozen="as-trained"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    _loss(model, dist.get_rank(), 0, 0).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]) == (not parameter.requires_grad), name


def test_an_adapter_is_exported_from_a_checkpoint_of_several_ranks(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_both, tmp_path)
    checkpoint.export(tmp_path / "run" / "step-000001", tmp_path / "ours", adapter="default")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _save_both(folder: Path) -> None:
    torch.manual_seed(2)
    model: Any = towpath.shard(_adapted(), "zero3", topology=towpath.Topology(2, 1))
    model.save_pretrained(folder / "theirs", save_embedding_layers=False)
    assert checkpoint.save(folder / "run", 1, checkpoint.State(model)).ok
