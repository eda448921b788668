"""`towpath export --adapter`: the files that PEFT itself would write, out of a checkpoint and without the model."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import towpath
from towpath import checkpoint
from towpath.checkpoint import State
from towpath.checkpoint.manifest import read_manifest, write_manifest
from towpath.errors import CheckpointError

ALONE = towpath.Topology(1, 1)
VOCABULARY = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "with a trained head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "with biases": {"target_modules": ["o_proj"], "bias": "lora_only"},
    "of embeddings": {"target_modules": ["embed_tokens"]},
}


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_bias=True, **sizes))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that Transformers gives up


def adapted(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    model = get_peft_model(base(), LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options))
    model.eval()
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_writes_what_peft_writes_and_peft_loads_it(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    model = adapted(**CONFIGS[kind])
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    expected = logits(model)
    towpath.shard(model, "zero3", topology=ALONE)
    assert checkpoint.save(tmp_path / "run", 1, State(model)).ok

    written = checkpoint.export(tmp_path / "run" / "step-000001", tmp_path / "ours", adapter="default")

    assert [path.name for path in written] == ["adapter_model.safetensors", "adapter_config.json"]
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    configs = [json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs")]
    for config in configs:  # a set: in any order
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
    assert configs[0] == configs[1]
    assert torch.equal(logits(PeftModel.from_pretrained(base(), str(tmp_path / "ours")).eval()), expected)


def test_an_adapter_inside_another_module_and_by_its_own_name(tmp_path: Path) -> None:
    from peft import LoraConfig

    model = adapted(target_modules=["q_proj"])
    model.add_adapter("second", LoraConfig(r=3, target_modules=["v_proj"]))
    outer = nn.ModuleDict({"net": model})
    assert checkpoint.save(tmp_path, 1, State(outer)).ok
    folder = tmp_path / "step-000001"
    checkpoint.export(folder, tmp_path / "out", adapter="second", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 4 and all("v_proj.lora_" in name and "second" not in name for name in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match=r"no adapter 'third' in the checkpoint; it has default, second"):
        checkpoint.export(folder, tmp_path / "third", adapter="third")


def test_without_peft_there_is_no_adapter(tmp_path: Path) -> None:
    assert checkpoint.save(tmp_path, 1, State(nn.Linear(2, 2))).ok
    with pytest.raises(CheckpointError, match="no adapter 'default' in the checkpoint; it was of no PEFT model"):
        checkpoint.export(tmp_path / "step-000001", tmp_path / "out", adapter="default")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], r"peft"),
        ({"default": 3}, r"peft\['default'\] is 3"),
        ({"default": {"tensors": {}}}, "has no config or no tensors"),
        ({"default": {"config": {}, "tensors": {"../a": "b"}}}, r"the adapter's \.\./a is not among the model's"),
        ({"default": {"config": {}, "tensors": {"weight": "x", "bias": "x"}}}, "would be called 'x'"),
        ({"default": {"problem": "it is odd"}}, r"it is odd\. Call its save_pretrained"),
    ],
)
def test_a_manifest_that_says_other_things_of_its_adapters_is_refused(tmp_path: Path, said: Any, why: str) -> None:
    assert checkpoint.save(tmp_path, 1, State(nn.Linear(2, 2))).ok
    folder = tmp_path / "step-000001"
    manifest = read_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=why):
        write_manifest(folder, replace(manifest, values={**manifest.values, "peft": said}))
        checkpoint.export(folder, tmp_path / "out", adapter="default")
