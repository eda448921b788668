"""Hugging Face's Trainer on real ranks, with a strategy: trained, cut off, resumed, exported, with PEFT and without.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adafactor

import towpath
from tests.ranks.launched import assert_alike, launched
from tests.ranks.models import VOCABULARY, llama_config
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom
from tests.ranks.test_entry_points import _t5
from towpath.errors import ConfigError, ShardError
from towpath.integrations import Sharding
from towpath.optim import owner_stepped

LENGTH, STEPS = 8, 10


def _model() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(LENGTH)).double()


def _rows(count: int = 96) -> list[dict[str, Tensor]]:
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def _trainer(
    strategy: Any,
    folder: Path,
    model: Any = None,
    steps: int = STEPS,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **arguments: Any,
) -> Any:
    """Ours, or, without a strategy, the one that wraps the model in DistributedDataParallel."""
    import transformers

    from towpath.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": steps,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "optim": "adamw_torch",
            **arguments,
        }
    )
    kind, options = (transformers.Trainer, {}) if strategy is None else (Trainer, {"strategy": strategy})
    model = _model() if model is None else model
    if optimizer is not None:
        options["optimizers"] = (optimizer(model), None)
    trainer = kind(model, args, train_dataset=_rows(), eval_dataset=_rows(8), **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _logged(trainer: Any) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]


def _whole(trainer: Any) -> dict[str, Tensor]:
    found = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name.removeprefix("module."): value.clone() for name, value in found.items()}


# --- training, saving, resuming ---------------------------------------------------------------------------------------


def _check(ours: Any, plain: Any, limit: float = 1e-9) -> None:
    found, expected = _whole(ours), _whole(plain)
    if dist.get_rank() == 0:
        assert_alike(found, expected, limit)


@on_ranks(2)
def test_ten_steps_are_those_of_ddp(tmp_path: Path) -> None:
    with launched():
        plain, ours = _trainer(None, tmp_path), _trainer("paro-nig", tmp_path)
        before = ours.evaluate()["eval_loss"]  # an evaluation before training changes nothing
        for trainer in (plain, ours):
            trainer.train()
        assert ours.model is ours.model_wrapped
        for found, expected in zip(_logged(ours), _logged(plain), strict=True):
            assert found == pytest.approx(expected, rel=1e-5)  # the log rounds
        assert len(_logged(ours)) == STEPS
        assert before > ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
        _check(ours, plain)


@on_ranks(2)
def test_islands_that_synchronize_now_and_then_end_with_equal_weights(tmp_path: Path) -> None:
    islands = towpath.strategy("zero1", outer=towpath.Outer(every=3))
    with launched():
        apart = _trainer(Sharding(islands, topology=towpath.Topology(2, 1)), tmp_path, steps=5)
        apart.train()
        own = torch.cat([p.full_tensor().detach().flatten() for p in apart.model.parameters()])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        assert torch.equal(*both)


@pytest.mark.parametrize("by_name", [False, seldom(True)])
@on_ranks(2)
def test_it_steps_whole_matrices_and_resumes(tmp_path: Path, by_name: bool) -> None:
    """By the name of an optimizer, as Trainer makes it: transformers' own, with groups with and without decay."""

    def trainer(strategy: str | None, **more: Any) -> Any:
        options = {"lr_scheduler_type": "constant", **more}
        if by_name:
            return _trainer(strategy, tmp_path, optim="adafactor", weight_decay=0.1, **options)
        wrapped = owner_stepped if strategy else lambda optimizer: optimizer
        return _trainer(strategy, tmp_path, optimizer=lambda m: wrapped(Adafactor(m.parameters(), lr=1e-2)), **options)

    with launched():
        plain, first = trainer(None), trainer("zero3", steps=6, save_strategy="steps", save_steps=6)
        for each in (plain, first):
            each.train()
        again = trainer("mics")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        _check(again, plain)


@on_ranks(2)
def test_optimizers_that_cannot_step_slices_are_refused_by_name_at_construction(tmp_path: Path) -> None:
    from transformers.optimization import Adafactor as Theirs

    with launched():
        trainer = _trainer("zero3", tmp_path, optimizer=lambda model: Theirs(model.parameters()))
        with pytest.raises(ShardError, match=r"Pass towpath.optim.owner_stepped\(Adafactor\(…\)\) instead"):
            trainer.train()
        for name in ("adamw_bnb_8bit", "paged_lion_8bit", "galore_adamw", "lomo", "adamw_torch_8bit"):
            with pytest.raises(ShardError, match=rf'optim="{name}".*Trainer\(optimizers=\(.*, None\)\)'):
                _trainer("zero3", tmp_path, optim=name)
        made = _trainer("zero3", tmp_path, optim="adamw_bnb_8bit", optimizer=lambda m: torch.optim.SGD(m.parameters()))
        assert type(made.optimizer) is torch.optim.SGD


def test_a_run_that_ended_goes_on_under_another_strategy_and_its_checkpoints_are_pretrained_models(
    world: Worlds, tmp_path: Path
) -> None:
    world(2).run(_cut_off, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run" / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "config.json", "towpath", "scheduler.pt", "trainer_state.json"} <= names
    assert "optimizer.pt" not in names
    world(2).run(_resumed, tmp_path / "run")


def _cut_off(folder: Path) -> None:
    import transformers

    class Stop(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 7:
                raise KeyboardInterrupt

    with launched():
        trainer = _trainer("mics", folder, save_strategy="steps", save_steps=3)
        trainer.add_callback(Stop())
        with pytest.raises(KeyboardInterrupt):
            trainer.train()


def _resumed(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    with launched() as rank:
        plain = _trainer(None, folder / "plain")
        plain.train()
        ours = _trainer("zero3", folder, save_strategy="steps", save_steps=5)
        ours.train(resume_from_checkpoint=True)
        for found, expected in zip(_logged(ours)[-4:], _logged(plain)[-4:], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        exported = LlamaForCausalLM.from_pretrained(folder / "checkpoint-10", dtype=torch.float64)
        found = _whole(ours)
        if rank == 0:
            assert_alike(found, {k: v for k, v in exported.state_dict().items() if k in found}, 0.0)
        _check(ours, plain)


@on_ranks(2)
def test_it_resumes_what_a_trainer_without_us_has_saved(tmp_path: Path) -> None:
    with launched():
        plain = _trainer(None, tmp_path, save_strategy="steps", save_steps=6)
        plain.train()
        ours = _trainer("hpz", tmp_path)
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        _check(ours, plain)


@on_ranks(2)
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    with launched() as rank:
        options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = _trainer(
            "zero3",
            tmp_path,
            steps=4,
            load_best_model_at_end=True,
            greater_is_better=True,
            save_total_limit=1,
            **options,
        )
        trainer.train()  # the loss falls: the best by the greatest is the first
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
        found = _whole(trainer)
        if rank == 0:
            expected = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
            assert_alike(found, expected, 0.0)


# --- PEFT -------------------------------------------------------------------------------------------------------------


def _lora() -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(_model(), config)


@on_ranks(2)
def test_adapters_are_trained_saved_loaded_and_merged(tmp_path: Path) -> None:
    import peft

    with launched():
        plain, ours = (
            _trainer(None, tmp_path, _lora()),
            _trainer("zero3", tmp_path / "ours", _lora(), save_strategy="steps", save_steps=10),
        )
        for trainer in (plain, ours):
            trainer.train()
        _check(ours, plain)
        saved = tmp_path / "ours" / "checkpoint-10"
        assert json.loads((saved / "adapter_config.json").read_text())["r"] == 2
        assert not (saved / "model.safetensors").exists()
        loaded = peft.PeftModel.from_pretrained(_model(), saved)
        ids = _rows(1)[0]["input_ids"][None]
        plain.model.eval(), loaded.eval(), ours.model.eval()
        with torch.no_grad():
            logits = plain.model(ids).logits
            assert (loaded(ids).logits - logits).abs().max() <= 1e-9
            with towpath.full_parameters(ours.model):
                ours.model.merge_adapter()
            assert (ours.model(ids).logits - logits).abs().max() <= 1e-9
            merged = loaded.merge_and_unload()
            assert (merged(ids).logits - logits).abs().max() <= 1e-9


# --- generating, and what cannot be -----------------------------------------------------------------------------------


@on_ranks(2)
def test_seq2seq_generates_on_all_ranks_until_the_last_is_through(tmp_path: Path) -> None:
    import transformers

    from towpath.integrations.transformers import Seq2SeqTrainer

    with launched():
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=2,
            per_device_train_batch_size=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            predict_with_generate=True,
            generation_max_length=12,
        )
        predicted: list[Any] = []
        for kind, options in ((transformers.Seq2SeqTrainer, {}), (Seq2SeqTrainer, {"strategy": "zero3"})):
            torch.manual_seed(0)
            model = _t5().double()
            trainer = kind(model, args, train_dataset=_rows(8), eval_dataset=_rows(6), **options)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            with mock.patch.object(model, "generate", wraps=model.generate) as generate:
                predicted.append(trainer.predict(trainer.eval_dataset).predictions)
            assert generate.call_args.kwargs["synced_gpus"] == bool(options)
        assert (predicted[0] == predicted[1]).all()


@on_ranks(2)
def test_what_it_cannot_do_it_says_when_it_is_made(tmp_path: Path) -> None:
    with launched():
        made = _trainer("mics", tmp_path)
        made.args.fsdp = ["full_shard"]
        with pytest.raises(ShardError, match="leave them out"):
            type(made)(_model(), made.args, strategy="mics")
    with launched(ACCELERATE_USE_CPU="false"), pytest.raises(ConfigError, match=r"1 process.*2 ranks.*use_cpu=True"):
        _trainer("mics", tmp_path, use_cpu=False)


@on_ranks(2)
def test_a_trainer_of_transformers_refuses_a_sharded_model_and_names_the_integration(tmp_path: Path) -> None:
    for use_cpu in (True, False):
        with launched(ACCELERATE_USE_CPU="false"):
            trainer = _trainer(None, tmp_path, towpath.shard(_model(), "zero3"), use_cpu=use_cpu)
            for work in (trainer.train, trainer.evaluate):
                with pytest.raises(ShardError, match=r"towpath\.integrations\.transformers\.Trainer\(…, strategy="):
                    work()


# --- large models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rank 0", "folder"])
@on_ranks(2)
def test_a_model_on_the_meta_device_trains_as_a_loaded_one(tmp_path: Path, how: str) -> None:
    """With tied weights, and with rotary frequencies that no file has. A model in bf16 files has fp32 masters."""
    from transformers import AutoModelForCausalLM

    def load(device: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, device_map=device)

    with launched() as rank:
        if rank == 0:
            config = _model().config
            config.tie_word_embeddings = True
            type(_model())(config).to(torch.bfloat16).save_pretrained(tmp_path / "saved", max_shard_size="2KB")
        dist.barrier()
        plain = _trainer(None, tmp_path, load("cpu"), steps=2)
        sharding = Sharding("zero3", values=tmp_path / "saved") if how == "folder" else "zero3"
        ours = _trainer(sharding, tmp_path, load("meta" if rank or how == "folder" else "cpu"), steps=2)
        for trainer in (plain, ours):
            trainer.train()
        assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight
        assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
        for name, buffer in ours.model.named_buffers():
            assert torch.equal(buffer, plain.model.get_buffer(name)), name
        _check(ours, plain, 1e-5)


@on_ranks(2)
def test_values_and_another_folder_to_resume_from_are_refused(tmp_path: Path) -> None:
    with launched():
        plain = _trainer(None, tmp_path, steps=1, save_strategy="steps", save_steps=1)
        plain.train()
        dist.barrier()
        ours = _trainer(Sharding("zero3", values=tmp_path), tmp_path)
        with pytest.raises(ShardError, match="checkpoint-1"):
            ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
