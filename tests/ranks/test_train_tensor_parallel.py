"""`towpath train` with parallel.tensor: the same training on ranks that share each layer, saved and gone on with
anywhere.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.ranks.server import World, Worlds
from tests.ranks.strategies import in_turn
from tests.ranks.test_train import ROUNDED, STEPS, _train, _with, config, rows_of, tokens
from tests.ranks.test_train_stages import NO_NODES, _refused, _some_steps
from towpath.errors import ConfigError, StepError
from towpath.observe.totals import Totals
from towpath.train.config import Config
from towpath.train.job import init_distributed
from towpath.train.metrics import MetricsLogger
from towpath.train.tensor_parallel import COLUMNS, EACH_HEAD, TensorPlan, plan_for, share_layers
from towpath.train.trainer import TrainingRun

__all__ = ["config", "tokens"]  # fixtures


def _as_without(ranks: World, whole: Config, folder: Path, parallel: dict[str, Any], **others: dict[str, Any]) -> None:
    """A step with whole layers, two with shared ones, two with whole ones again: the losses of a run without."""
    ranks.run(_train, whole)
    found: list[float] = []
    before = "off"
    for steps, layout in ((1, {}), (3, parallel), (STEPS, {})):
        log = {"folder": str(folder / str(steps))}
        part = _with(whole, parallel=layout, log=log, checkpoint={"resume": before}, **(others if layout else {}))
        before = log["folder"]
        ranks.run(_some_steps, part, steps)
        found += [row["loss"] for row in rows_of(part)]
    assert found == pytest.approx([row["loss"] for row in rows_of(whole)], abs=ROUNDED)
    norms = [row["gradient_norm"] for row in rows_of(whole)]
    again = [row["gradient_norm"] for steps in (1, 3, STEPS) for row in _rows(folder / str(steps))]
    assert again == pytest.approx(norms, rel=1e-3)


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


LAYOUTS = [
    ({"tensor": 2}, "zero3"),
    ({"tensor": 2, "pipeline": 2}, "zero1"),
    ({"tensor": 2, "pipeline": 2, "schedule": "Interleaved1F1B"}, "ddp"),
    ({"tensor": 2, "pipeline": 2}, "mics"),
    ({"tensor": 4}, "zero3"),
]


@in_turn(LAYOUTS, 1, "layout")
@pytest.mark.parity
def test_a_run_goes_on_with_shared_layers_as_without(
    world: Worlds, config: Callable[..., Config], tmp_path: Path, layout: Any
) -> None:
    parallel, strategy = layout
    train = {"steps": STEPS, "checkpointing": strategy != "ddp"}
    whole = config(model={"depth": 4, "heads": 4}, train=train, strategy={"name": "zero1", **NO_NODES})
    _as_without(world(4), whole, tmp_path / "parts", parallel, strategy={"name": strategy})


def _hugging_face(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0 if kind == "llama, padded" else None,
    }
    match kind:
        case "qwen3":
            return transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True)
        case "gpt-neox":
            return transformers.GPTNeoXConfig(**sizes, is_decoder=True)
        case "gpt2":
            return transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=258)
        case "mixtral":
            return transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
        case _:
            return transformers.LlamaConfig(**sizes, num_key_value_heads=2)


@in_turn(["llama", "qwen3", "gpt-neox", "llama, padded"], 1, "kind")
def test_hugging_face_models_share_what_their_configuration_says(
    world: Worlds, config: Callable[..., Config], tmp_path: Path, kind: str
) -> None:
    _hugging_face(kind).save_pretrained(tmp_path / "model")
    whole = config(
        model={"hf": str(tmp_path / "model")}, train={"steps": STEPS}, strategy={"name": "zero1", **NO_NODES}
    )
    _as_without(world(2), whole, tmp_path / "parts", {"tensor": 2})


def test_shared_layers_take_part_of_the_memory_and_of_the_bytes(world: Worlds, config: Callable[..., Config]) -> None:
    model = {"width": 64, "depth": 4, "heads": 4}
    alone, shared = (
        config(model=model, parallel={"tensor": tensor}, strategy={"name": "ddp", **NO_NODES}) for tensor in (1, 2)
    )
    _, whole, _ = world(2).run(_held_and_sent, alone)[0]
    (first, part, seeds), *others = world(4).run(_held_and_sent, shared)
    norms = 64 * (2 * 4 + 1)  # which every rank has whole
    assert part == (whole - norms) / 2 + norms
    # Both copies of each part sum its gradients. What says which parameters were used goes by unit.
    summed = 2 * towpath.schedule(towpath.strategy("ddp", towpath.Topology(1, 2)), [part]).intra_bytes
    assert first == pytest.approx(summed, rel=1e-3)
    assert [seed - seeds for _, _, seed in others] == [0, 1, 1]


def _totals(training: TrainingRun) -> Totals:
    with MetricsLogger(training) as metrics:
        return metrics._totals_now()


def _held_and_sent(config: Config) -> tuple[int, int, int]:
    """Bytes of a step by all ranks, elements that this rank has, and what its numbers at random begin with."""
    with init_distributed() as job:
        training = TrainingRun(config, job)
        seed = torch.initial_seed()
        before = _totals(training)
        training.train_step()
        sent = _totals(training).since(before)
        held = sum(p.to_local().numel() for p in training.model.parameters())
        total = torch.tensor([sent.intra_bytes])
        dist.broadcast(total, 0)
        assert total.item() == sent.intra_bytes  # told alike on all ranks
        return sent.intra_bytes, held, seed


REFUSED = {
    "heads that do not divide": ({"model": {"heads": 1, "width": 16}}, "a divisor of the model's 1 attention heads"),
    "ranks that do not divide": ({"parallel": {"tensor": 3}}, "expected a divisor of"),
    "a node that has fewer": ({"parallel": {"tensor": 2, "pipeline": 4}}, "expected a divisor of the job's 4 ranks"),
    "codecs": ({"strategy": {"name": "zero++", "nodes": "2x1"}}, "is on a tensor-parallel mesh"),
    "gpt2": ({}, "GPT2LMHeadModel does not say how ranks share its layers"),
    "mixtral": ({}, "which is not supported"),
}


def test_what_cannot_be_shared_is_told_on_every_rank(
    world: Worlds, config: Callable[..., Config], tmp_path: Path
) -> None:
    for case, (sections, words) in REFUSED.items():
        if case in ("gpt2", "mixtral"):
            _hugging_face(case).save_pretrained(tmp_path / case)
            sections = {"model": {"hf": str(tmp_path / case)}}
        mine = config(**({"strategy": {"name": "ddp", **NO_NODES}, "parallel": {"tensor": 2}} | sections))
        for told in world(4).run(_refused, mine):
            assert words in told, case


def test_what_shared_layers_do_not_have_is_refused_at_once(config: Callable[..., Config]) -> None:
    for sections, words in (
        ({"train": {"compile": True}}, "parallel.tensor = 2: expected 1 with train.compile"),
        ({"train": {"optimizer": "muon"}}, "expected 1 with train.optimizer = muon"),
        ({"train": {"offload_activations": True}}, "expected 1 with train.offload_activations"),
        ({"parallel": {"tensor": 0}}, "parallel.tensor = 0: expected more than 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**({"parallel": {"tensor": 2}} | sections))


class _NormOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"query": nn.Linear(8, 8), "norm": nn.RMSNorm(4)})])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[0]
        return block["norm"](block["query"](x).unflatten(-1, (-1, 4)).flatten(0, 1))


def test_a_plan_that_does_not_fit_the_model_is_refused(world: Worlds) -> None:
    plan = TensorPlan({"blocks.*.query": COLUMNS, "blocks.*.norm": EACH_HEAD})
    assert plan_for(_NormOfRows(), plan, 2) == plan
    with pytest.raises(ConfigError, match="or one of other layers"):
        plan_for(_NormOfRows(), TensorPlan({"layers.*.query": COLUMNS}), 2)
    assert all("blocks.0.norm: its input has 3 dimensions" in told for told in world(2).run(_norm_of_rows, plan))


def _norm_of_rows(plan: TensorPlan) -> str:
    model = share_layers(_NormOfRows(), plan, init_device_mesh("cpu", (2,)))
    with pytest.raises(StepError) as told:
        model(torch.ones(1, 2, 8))
    return str(told.value)
