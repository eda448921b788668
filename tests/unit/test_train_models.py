"""What `towpath train` makes of [model], and what it refuses, each in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from towpath.checkpoint.safe_files import INDEX, Safetensors
from towpath.errors import CheckpointError, ConfigError, TowpathError
from towpath.train import models
from towpath.train.config import ModelConfig
from towpath.train.models import GPT, Shape, build_model, llama_config, rotary_tables

SMALL: dict[str, Any] = {"width": 16, "depth": 2, "heads": 4}
VOCABULARY = 40


def _refused(config: ModelConfig, kind: type[TowpathError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        build_model(config, VOCABULARY)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- our own ---------------------------------------------------------------------------------------------------------


def test_a_model_is_built_without_memory_and_tells_its_size() -> None:
    built = build_model(ModelConfig(**SMALL), VOCABULARY)

    assert all(p.device.type == "meta" and p.dtype == torch.float32 for p in built.model.parameters())
    assert [type(b).__name__ for b in built.blocks] == ["Block", "Block"]
    # A tied embedding counts once, and multiplies.
    assert built.multiplied == 2 * (4 * 16 * 16 + 3 * 16 * 64) + 16 * VOCABULARY
    assert built.parameters == built.multiplied + 5 * 16
    assert built.flops_per_token(10) == 6 * built.multiplied + 12 * 2 * 16 * 10


@pytest.mark.parametrize("tied", [True, False])
def test_ours_is_a_llama(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Shape(vocabulary=VOCABULARY, width=16, depth=2, heads=4, hidden=24, tied=tied)
    torch.manual_seed(0)
    ours = GPT(shape)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in llama_config(shape).items() if k != "model_type"}))
    theirs.load_state_dict(ours.state_dict())  # all names and shapes
    ids = torch.randint(VOCABULARY, (2, 9))

    # The same sums in fp32, some in another order: roundings of 6e-8 in logits of some tens.
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-4)


def test_rotary_tables_are_made_in_fp32_whatever_the_model_computes_in() -> None:
    cos, sin = rotary_tables(5000, 8, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[4999, 0].item() == pytest.approx(torch.tensor(4999.0, dtype=torch.float64).cos().item(), abs=1e-3)


def test_a_loss_in_pieces_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    built = build_model(ModelConfig(**SMALL), VOCABULARY)
    assert isinstance(built.model, GPT)
    model = GPT(built.model.shape).double()
    rows = torch.randint(VOCABULARY, (3, 8))
    results: list[list[torch.Tensor]] = []
    for at_once in (1 << 24, 5 * VOCABULARY):
        monkeypatch.setattr(models, "_LOGITS_AT_ONCE", at_once)
        model.zero_grad()
        loss = models.next_token_loss(model, rows[:, :-1], rows[:, 1:])
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    expected = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    torch.testing.assert_close(results[0][0], expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-14)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "nowhere" in _refused(ModelConfig(hf=str(tmp_path / "nowhere")))
    assert "config.json" in _refused(ModelConfig(hf=str(tmp_path)))


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "not a valid JSON"),
        ("{}", "model_type"),
        ('{"model_type": "nonsense"}', "nonsense"),
        ('{"model_type": "t5"}', "T5Config"),
        ('{"model_type": "bert"}', "encoder"),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}}', "custom code"),
    ],
)
def test_a_configuration_that_makes_no_causal_model_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert told in _refused(ModelConfig(hf=str(tmp_path)))


def test_a_model_of_fewer_tokens_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_llama() | {"vocab_size": 39}))
    message = _refused(ModelConfig(hf=str(tmp_path / "config.json")))
    assert "39" in message and "40" in message


def test_without_transformers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'towpath[hf]'" in _refused(ModelConfig(hf=str(tmp_path)))


def test_masters_are_fp32_whatever_the_file_says_the_weights_were_kept_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_llama() | {"dtype": "bfloat16"}))
    built = build_model(ModelConfig(hf=str(tmp_path)), VOCABULARY)
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    assert built.config_json["architectures"] == ["LlamaForCausalLM"]
    assert built.attention_width == 2 * 16 and len(built.blocks) == 2


def _llama() -> dict[str, Any]:
    return build_model(ModelConfig(**SMALL), VOCABULARY).config_json


# --- weights ---------------------------------------------------------------------------------------------------------


def _state() -> dict[str, torch.Tensor]:
    built = build_model(ModelConfig(**SMALL), VOCABULARY)
    return {name: torch.zeros(p.shape) for name, p in built.model.named_parameters()}


def _with(folder: Path, state: dict[str, torch.Tensor]) -> ModelConfig:
    save_file(state, folder / "model.safetensors")
    return ModelConfig(**SMALL, weights=str(folder))


def test_any_range_of_any_dtype_is_read_as_it_is_stored(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(7, dtype=torch.float16),
        "c": torch.randn(2, 2, 2, dtype=torch.float64),
        "d": torch.tensor(3),
    }
    save_file(state, tmp_path / "x.safetensors")
    read = Safetensors(tmp_path / "x.safetensors")

    assert read.shapes == {name: tuple(t.shape) for name, t in state.items()}
    for name, tensor in state.items():
        for start in range(tensor.numel() + 1):
            for end in range(start, tensor.numel() + 1):
                assert torch.equal(read.values(name, start, end), tensor.reshape(-1)[start:end])
    with pytest.raises(KeyError):
        read.values("e", 0, 1)
    with pytest.raises(ConfigError):
        read.values("a", 0, 16)


def test_a_missing_name_is_told(tmp_path: Path) -> None:
    state = _state()
    del state["model.layers.1.mlp.up_proj.weight"]
    assert "model.layers.1.mlp.up_proj.weight" in _refused(_with(tmp_path, state))


def test_a_prefix_is_not_guessed(tmp_path: Path) -> None:
    message = _refused(_with(tmp_path, {name.removeprefix("model."): t for name, t in _state().items()}))
    assert "model.embed_tokens.weight or lm_head.weight" in message


def test_another_shape_is_told(tmp_path: Path) -> None:
    message = _refused(_with(tmp_path, _state() | {"model.norm.weight": torch.zeros(17)}))
    assert "model.norm.weight" in message and "17" in message and "16" in message


def test_weights_of_a_deeper_model_are_refused(tmp_path: Path) -> None:
    message = _refused(_with(tmp_path, _state() | {"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 16)}))
    assert "model.layers.2.mlp.up_proj.weight" in message


def test_a_tied_alias_may_be_there_and_old_rotary_buffers_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_llama()))
    state = _state() | {"lm_head.weight": torch.zeros(VOCABULARY, 16), "model.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(state, tmp_path / "model.safetensors")
    assert build_model(ModelConfig(hf=str(tmp_path), weights=str(tmp_path)), VOCABULARY).values is not None


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    assert "model.safetensors" in _refused(ModelConfig(**SMALL, weights=str(tmp_path)))
    assert "nowhere" in _refused(ModelConfig(**SMALL, weights=str(tmp_path / "nowhere")))
    config = _with(tmp_path, _state())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert "not a whole safetensors file" in _refused(config, CheckpointError)


@pytest.mark.parametrize(
    "index, told",
    [
        ("[]", "not an index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "in its folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"a": "one.safetensors"}}', "does not hold"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_told(tmp_path: Path, index: str, told: str) -> None:
    save_file({"b": torch.zeros(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(index)
    assert told in _refused(ModelConfig(**SMALL, weights=str(tmp_path)), CheckpointError)
