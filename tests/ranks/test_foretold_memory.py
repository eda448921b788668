"""What the planner says that a rank holds is what it holds: states to the byte, the peak of a step within 5 %.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.server import World
from tests.ranks.strategies import seldom
from towpath.auto.live import describe_module
from towpath.core.unit_plan import plan_unit
from towpath.engine.layout import lay_out
from towpath.planner.catalog import describe_model
from towpath.planner.model import activation_bytes, engine_bytes
from towpath.planner.request import Optimizer
from towpath.train.models.gpt import GPT, Shape

Worlds = Callable[[int], World]

BATCH, LENGTH = 8, 32
SHAPE = towpath.Topology(2, 1)
LOWERED = towpath.Precision("bfloat16", "bfloat16")
# Activations are to be most of what there is, as in a training: with nothing but states any sum would do.
LEAST_ACTIVATIONS = 0.2


# Of a model of transformers whose steps have more activations than states.
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids)
        logits = out if isinstance(out, Tensor) else out.logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def _made() -> WithLoss:
    torch.manual_seed(0)
    return WithLoss(GPT(Shape(vocabulary=256, width=64, depth=6, heads=4, kv_heads=4, hidden=176, tied=True)))


def _foretold_and_held(
    strategy: str, precision: towpath.Precision, again: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """By part; 'activations' is what a step has beside all that stays."""
    model = _made()
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    made = towpath.strategy(strategy, SHAPE)
    layouts = lay_out(model, None, precision)
    described = describe_module(model, [ids], ids.numel(), length=LENGTH, precision=precision)
    plans = [plan_unit(made, layout.spec, precision) for layout in layouts]
    foretold = engine_bytes(plans, Optimizer.named("adamw"))
    foretold["activations"] = activation_bytes(described, precision, ids.numel(), again)

    if again:
        for block in model.get_submodule("model.blocks").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model = towpath.shard(model, made, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    held = towpath.stats(model).memory_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(ids).backward()
    optimizer.step()
    return foretold, held | {"activations": _most_at_once(profiled)}


def _of_a_config_and_held(
    family: str, values: dict[str, Any], strategy: str, precision: towpath.Precision, again: bool
) -> tuple[dict[str, int], int, int]:
    """Foretold by a config.json, by part; activations by the live model; and what the step has beside what stays."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {**CONFIG, **values}
    config: Any = AutoConfig.for_model(family, use_cache=False, bos_token_id=None, eos_token_id=None, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.zeros(8, sizes["max_position_embeddings"], dtype=torch.long)
    made = towpath.strategy(strategy, SHAPE)

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        described = describe_model(folder)
    plans = [plan_unit(made, unit.spec, precision) for unit in described.units]
    foretold = engine_bytes(plans, Optimizer.named("adamw"))
    foretold["activations"] = activation_bytes(described, precision, ids.numel(), again)
    live = describe_module(WithLoss(model), [ids], ids.numel(), precision=precision)

    if again:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = towpath.shard(model, made, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(input_ids=ids, labels=ids).loss.backward()
    return foretold, activation_bytes(live, precision, ids.numel(), again), _most_at_once(profiled)


def _most_at_once(profiled: Any) -> int:
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "strategy, precision, again",
    [
        seldom("zero3", towpath.Precision(), False),
        seldom("mics", LOWERED, False),
        seldom("zero2", towpath.Precision(), True),
        ("paro-nig", LOWERED, True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_holds_what_was_foretold(
    world: Worlds, strategy: str, precision: towpath.Precision, again: bool
) -> None:
    """Of the trainer's own model. Models of transformers are tested below."""
    for foretold, held in world(2).run(_foretold_and_held, strategy, precision, again):
        states = set(foretold) - {"activations"}
        assert {part: held.get(part, 0) for part in states} == {part: foretold[part] for part in states}
        assert held["activations"] > LEAST_ACTIVATIONS * sum(held.values())
        assert sum(foretold.values()) == pytest.approx(sum(held.values()), rel=0.05)


@pytest.mark.parametrize(
    "family, values, strategy, precision, again",
    [
        # Nobody keeps the logits that the loss is made of.
        pytest.param("llama", {"vocab_size": 4096}, "zero3", towpath.Precision(), True, id="llama-zero3-recomputed"),
        # Norms in plain PyTorch keep copies, of which one is in fp32.
        seldom("llama", {}, "zero1", LOWERED, False, id="llama-zero1-bf16"),
        # The end of the root is released when the first block is recomputed.
        pytest.param("llama", {"num_hidden_layers": 8}, "zero2", LOWERED, True, id="llama-zero2-bf16-recomputed"),
        seldom("qwen3", {"head_dim": 32}, "zero3", LOWERED, False, id="qwen3-zero3-bf16"),
        seldom("mistral", {"num_hidden_layers": 12}, "hpz", towpath.Precision(), True, id="mistral-recomputed"),
    ],
)
def test_activations_of_a_config_and_of_its_live_model_are_what_a_rank_holds(
    world: Worlds, family: str, values: dict[str, Any], strategy: str, precision: towpath.Precision, again: bool
) -> None:
    for foretold, live, held in world(2).run(_of_a_config_and_held, family, values, strategy, precision, again):
        states = sum(foretold.values()) - foretold["activations"]
        assert held > LEAST_ACTIVATIONS * states
        assert foretold["activations"] == pytest.approx(held, rel=0.02)
        assert live == pytest.approx(held, rel=0.02)
