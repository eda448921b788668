"""What the planner says that a rank holds is what it holds: states to the byte, the peak of a step within 5 %.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import towpath
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom
from towpath.core.unit_plan import plan_unit
from towpath.plan.catalog import describe_model
from towpath.plan.live import describe_module
from towpath.plan.model import activation_bytes, engine_bytes
from towpath.plan.request import Optimizer

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


def _foretold_and_held(
    family: str, values: dict[str, Any], strategy: str, precision: towpath.Precision, again: bool
) -> tuple[dict[str, int], int, dict[str, int]]:
    """Foretold by a config.json, by part; activations by the live model; what is held, by part.

    'activations' is what a step has beside all that stays.
    """
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
    held = towpath.stats(model).memory_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(input_ids=ids, labels=ids).loss.backward()
    held |= {"activations": _most_at_once(profiled)}
    return foretold, activation_bytes(live, precision, ids.numel(), again), held


def _most_at_once(profiled: Any) -> int:
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "family, values, strategy, precision, again",
    [
        # Nobody keeps the logits that the loss is made of.
        pytest.param("llama", {"vocab_size": 4096}, "zero3", towpath.Precision(), True, id="llama-zero3-recomputed"),
        # Norms in plain PyTorch keep copies, of which one is in fp32.
        pytest.param("llama", {}, "paro-nig", LOWERED, False, id="llama-paro-nig-bf16"),
        # The end of the root is released when the first block is recomputed.
        pytest.param("llama", {"num_hidden_layers": 8}, "zero2", LOWERED, True, id="llama-zero2-bf16-recomputed"),
        seldom("qwen3", {"head_dim": 32}, "mics", LOWERED, False, id="qwen3-mics-bf16"),
        seldom("mistral", {"num_hidden_layers": 12}, "hpz", towpath.Precision(), True, id="mistral-recomputed"),
    ],
)
def test_a_rank_holds_what_a_config_and_its_live_model_foretell(
    world: Worlds, family: str, values: dict[str, Any], strategy: str, precision: towpath.Precision, again: bool
) -> None:
    for foretold, live, held in world(2).run(_foretold_and_held, family, values, strategy, precision, again):
        activations = held["activations"]
        assert foretold.pop("activations") == pytest.approx(activations, rel=0.02)
        assert live == pytest.approx(activations, rel=0.02)
        assert {part: held.get(part, 0) for part in foretold} == foretold
        assert activations > LEAST_ACTIVATIONS * sum(foretold.values())
