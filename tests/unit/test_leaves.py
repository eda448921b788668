"""Large embeddings and output layers of the root are units of their own: which, and in which order they are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import towpath
from towpath.api import blocks_of
from towpath.core.schedule import buffer_bytes, steady_tasks
from towpath.core.strategy import TransferKind
from towpath.core.units import LARGE_LEAF
from towpath.engine.layout import lay_out
from towpath.plan.model import Transformer
from towpath.topology.cluster import Topology

WIDTH = 64
WORDS = LARGE_LEAF // WIDTH
SHAPE = Topology(2, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1 << 15)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sum()


class GPT(nn.Module):
    def __init__(self, words: int = WORDS, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class SharedEmbedding(nn.Module):
    """As T5: one embedding under several names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        for stack in (self.encoder, self.decoder):
            stack.embed = self.shared if not tied else nn.Embedding(WORDS, WIDTH)
            stack.embed.weight = self.shared.weight
            stack.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)


class OwnForward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return self.weight[: input.shape[1]]


class Positions(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.positions = OwnForward(WORDS, WIDTH)


class Wrapped(nn.Module):
    """As PEFT wraps an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Module()
        self.head.base_layer = nn.Linear(WIDTH, WORDS).requires_grad_(False)
        self.head.lora_A, self.head.lora_B = nn.Linear(WIDTH, 4), nn.Linear(4, WORDS)


class TwoHeads(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WORDS)


def _hooked(library: str) -> nn.Module:
    def hook(*_: object) -> None: ...

    hook.__module__ = library
    model = GPT()
    model.embed.register_forward_hook(hook)
    model.head.register_forward_pre_hook(hook)
    return model


def _tiny(model: nn.Module) -> nn.Module:
    model.tiny = nn.Linear(WIDTH, 8)
    return model


@pytest.mark.parametrize(
    "build, leaves",
    [
        (GPT, ["embed", "head"]),
        (lambda: GPT(tied=True), []),
        (lambda: GPT(words=WORDS - 1), []),
        (lambda: _tiny(GPT()), ["embed", "head"]),
        (lambda: SharedEmbedding(tied=False), ["shared", "head"]),
        (lambda: SharedEmbedding(tied=True), ["head"]),
        (Positions, ["embed", "head"]),  # what has a forward of its own may return its weights
        (Wrapped, ["head.base_layer"]),
        (TwoHeads, ["embed", "second"]),
        (lambda: nn.ModuleDict({"a": nn.Linear(WIDTH, WORDS)}), []),  # without blocks
        (lambda: _hooked("users"), []),
        (lambda: _hooked("torch.distributed.tensor._api"), ["embed", "head"]),
    ],
)
def test_large_untied_leaves_of_the_root_are_units(build: Callable[[], nn.Module], leaves: list[str]) -> None:
    with torch.device("meta"):
        model = build()
    layouts = lay_out(model)
    assert [unit.name for unit in layouts if unit.spec.leaf] == leaves
    assert all(unit.spec.lookup == isinstance(unit.modules[0], nn.Embedding) for unit in layouts if unit.spec.leaf)
    assert not {id(module) for module in blocks_of(model)} & {id(u.modules[0]) for u in layouts if u.spec.leaf}
    own = [place.names[0] for unit in layouts for bucket in unit.buckets for place in bucket.places]
    assert sorted(own) == sorted(name for name, _ in model.named_parameters())


def test_with_units_given_no_leaf_is_added() -> None:
    with torch.device("meta"):
        model = GPT()
    assert [unit.name for unit in lay_out(model, [Block])] == ["", *(f"blocks.{i}" for i in range(3))]


def test_the_planner_describes_the_leaves_of_the_live_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Transformer(WORDS, WIDTH, 2, 4, 128, tied=False, gated=True, biases=False, norm_copies=True)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, tie_word_embeddings=False, **sizes))
    described, live = shape.model("", 32).units, lay_out(model)
    ends = [
        sorted((b.numels, u.leaf, u.lookup) for u in units for b in u.buckets if u.root or u.leaf)
        for units in ([u.spec for u in described], [u.spec for u in live])
    ]
    assert ends[0] == ends[1]
    (embedding, *_, head), (first, *_, last) = described[1:], live[1:]
    assert (embedding.spec.lookup, head.spec.lookup) == (first.spec.lookup, last.spec.lookup) == (True, False)


@pytest.mark.parametrize("name", ["zero3", "paro-nig", "zero++"])
def test_the_head_is_prefetched_and_reduced_first(name: str) -> None:
    with torch.device("meta"):
        model = GPT()
    plans = towpath.schedule(towpath.strategy(name, SHAPE), model).plans
    tasks = [(task.kind, plans[task.unit].spec.name) for _, task in steady_tasks(plans, 1)]
    gathers = [unit for kind, unit in tasks if kind is TransferKind.GATHER]
    again = [unit for kind, unit in tasks if kind is TransferKind.BACKWARD_GATHER]
    reduced = [unit for kind, unit in tasks if kind is TransferKind.REDUCE]
    blocks = [f"blocks.{i}" for i in range(3)]
    if gathers:
        # The head is kept from its forward to its backward, and an embedding's backward does not read the weights.
        assert gathers == ["", "embed", *blocks, "head"] and again == blocks[::-1]
    if reduced:
        assert reduced == ["head", *blocks[::-1], "embed", ""]


def test_leaves_take_turns_in_one_slot_of_their_own() -> None:
    with torch.device("meta"):
        model = GPT(words=4 * WORDS)
    whole = towpath.schedule(towpath.strategy("zero3", SHAPE), model)
    block = towpath.schedule(towpath.strategy("zero3", SHAPE), model.blocks).buffer_bytes()
    head = 4 * 4 * WORDS * WIDTH
    norms = 2 * WIDTH * 4
    for part in ("weight slots", "gradient slots"):
        assert block[part] + head <= buffer_bytes(whole.plans)[part] <= block[part] + head + 2 * norms


@pytest.mark.parametrize(("keys", "units"), [("0 1 2", 3), ("first second third", 0)])
def test_modules_of_a_dict_are_units_if_they_are_numbered(keys: str, units: int) -> None:
    model = nn.Module()
    with torch.device("meta"):
        model.layers, model.norm = nn.ModuleDict({key: Block() for key in keys.split()}), nn.LayerNorm(WIDTH)
    assert [unit.name for unit in lay_out(model)] == ["", *(f"layers.{key}" for key in keys.split()[:units])]


def test_the_units_of_lists_in_lists_are_the_modules_that_run() -> None:
    """One module in all lists is one unit."""

    def names(layers: list[nn.Module]) -> list[str]:
        model = nn.Module()
        model.layers, model.norm = nn.ModuleList(layers), nn.LayerNorm(WIDTH)
        return [unit.name for unit in lay_out(model)]

    def wide() -> nn.Module:
        return nn.Linear(WIDTH, 8 * WIDTH)

    both = names([nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"last": wide()})]) for _ in range(3)])
    assert both == ["", *(f"layers.{i}.{name}" for i in range(3) for name in ("0.0", "1.last"))]
    shared = wide()
    found = names([nn.ModuleList([shared, Block()]) for _ in range(3)])
    assert found == ["", "layers.0.0", "layers.0.1", "layers.1.1", "layers.2.1"]
