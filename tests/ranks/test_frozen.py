"""Frozen parameters with a placement of their own: training, bytes, memory, and what rests encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
from tests.ranks.models import noise
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.twin import TOLERANCE, Twin
from towpath.codecs.kernels import plain
from towpath.core.formats import Codec
from towpath.core.strategy import TransferKind
from towpath.errors import ConfigError, ShardError

SHAPE = towpath.Topology(2, 2)
WIDTH = 64
EXTENTS = ("1x1", "2x1", "2x2", "as-trained")
LABELS = ("zero3", "hpz", "paro-iig", "mics", "ddp")


class Adapted(nn.Module):
    """A frozen matrix and bias, and the two thin matrices of its adapter."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Blocks around which the root has frozen and trainable parameters as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(noise(rank, micro, step, 3, WIDTH)).square().mean()


def _strategy(label: str, frozen: str | None = None, **options: Any) -> towpath.Strategy:
    if frozen is not None:
        options["frozen"] = frozen if frozen == "as-trained" else towpath.Extent(*map(int, frozen.split("x")))
    return towpath.strategy(label, SHAPE, **options)


# Training -------------------------------------------------------------------------------------------------------------


@in_turn((None, *EXTENTS), 1, "frozen")
@pytest.mark.parametrize("label", [n if n in ("zero3", "hpz") else seldom(n) for n in LABELS])
@on_ranks(4)
def test_training_is_the_same_wherever_frozen_parameters_lie(label: str, frozen: str | None) -> None:
    twin = Twin(Model, _loss, f"{label} frozen={frozen}" if frozen else label, SHAPE, units=[Adapted])
    for step in range(3):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        norms = [
            nn.utils.clip_grad_norm_([p for p in m.parameters() if p.requires_grad], 1.0)
            for m in (twin.sharded, twin.plain)
        ]
        assert abs(norms[0].item() - norms[1].item()) <= TOLERANCE
        twin.step()
    twin.check_parameters()
    every = [nn.utils.get_total_norm(m.parameters()).item() for m in (twin.sharded, twin.plain)]
    assert abs(every[0] - every[1]) <= TOLERANCE * every[1]
    for name, parameter in twin.sharded.named_parameters():
        assert torch.allclose(parameter.full_tensor(), twin.plain.get_parameter(name), 0, TOLERANCE), name


@on_ranks(4)
def test_under_zero_plus_plus_frozen_weights_in_the_node_are_not_rounded() -> None:
    """Its int8 is for what crosses nodes: blocks with nothing that trains compute exactly, as in one process."""
    torch.manual_seed(0)
    model: Any = towpath.shard(Model(), _strategy("zero++"), units=[Adapted])
    torch.manual_seed(0)
    plain: Any = Model()
    with towpath.full_parameters(model):
        assert torch.equal(model.embed.weight, plain.embed.weight)
        assert torch.equal(model.blocks[1].base.weight, plain.blocks[1].base.weight)
        assert not torch.equal(model.blocks[1].down.weight, plain.blocks[1].down.weight)


# Bytes and memory -----------------------------------------------------------------------------------------------------


@in_turn(("zero3", "hpz", "paro-igg", "zero++"), 2)
@on_ranks(4)
def test_by_default_no_frozen_byte_crosses_between_nodes(label: str) -> None:
    strategy = _strategy(label)
    model: Any = towpath.shard(Model(), strategy, units=[Adapted])
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule = towpath.schedule(strategy, model, 1)
    frozen = [t for t in schedule.transfers if t.bucket.endswith("frozen")]
    assert frozen and {t.kind for t in frozen} <= {TransferKind.GATHER, TransferKind.BACKWARD_GATHER}
    assert sum(t.inter_bytes for t in frozen) == 0
    assert sum(t.inter_bytes for t in schedule.transfers) > 0
    stats = towpath.stats(model)
    assert sorted(map(str, stats.last_step)) == sorted(map(str, schedule.transfers))
    assert sum(t.inter_bytes for t in stats.last_step) == schedule.inter_bytes
    _check_memory(stats, schedule)


def _check_memory(stats: towpath.Stats, schedule: Any) -> None:
    for kind, expected in (schedule.memory_bytes() | schedule.buffer_bytes()).items():
        assert stats.memory_bytes[kind] == expected, (kind, stats.memory_bytes[kind], expected)


def test_what_memory_does_not_allow_lies_as_what_trains() -> None:
    model, strategy = Model(), _strategy("zero3")

    def frozen(memory: int | None) -> int:
        made = towpath.schedule(strategy, model, 1, units=[Adapted], memory=memory)
        return sum(t.inter_bytes for t in made.transfers if t.bucket.endswith("frozen"))

    inside = towpath.schedule(strategy, model, 1, units=[Adapted])
    needed = sum((inside.memory_bytes() | inside.buffer_bytes()).values())
    states = 2 * sum(4 * b.numel // b.optimizer.count for p in inside.plans for b in p.buckets if b.spec.trainable)
    assert frozen(None) == frozen(2 * (needed + states)) == 0
    assert frozen(2 * (needed + states) - 2) > 0
    as_trained = towpath.schedule(_strategy("zero3", "as-trained"), model, 1, units=[Adapted])
    assert frozen(0) == sum(t.inter_bytes for t in as_trained.transfers if t.bucket.endswith("frozen"))


@on_ranks(4)
def test_the_choice_stands_in_the_strategy() -> None:
    model: Any = towpath.shard(Model(), "zero3", topology=SHAPE)
    inference: Any = towpath.shard(Model().requires_grad_(False), "zero3", topology=SHAPE)
    plain: Any = towpath.shard(nn.Linear(4, 4), "zero3", topology=SHAPE)
    assert model.towpath_engine.strategy.frozen == towpath.Extent(2)
    assert inference.towpath_engine.strategy.frozen == "as-trained"
    assert plain.towpath_engine.strategy == _strategy("zero3")


# At rest in fewer bits ------------------------------------------------------------------------------------------------

CODECS = ("int8", "int4:64", "e4m3:32", "int4:32+hadamard")


def rounded(values: Tensor, codec: Codec) -> Tensor:
    """By the oracle."""
    message = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    plain.encode(codec, values.flatten(), message)
    out = torch.empty(values.numel())
    plain.decode(codec, message, out)
    return out.view(values.shape)


@in_turn(["1x1", "2x1", "2x2"], 1, "frozen")
@on_ranks(4)
def test_what_rests_encoded_is_what_the_oracle_rounds_to(frozen: str, whole_product: bool) -> None:
    codecs = CODECS if whole_product else CODECS[::3]
    for codec in codecs:
        strategy = _strategy("zero3", frozen, frozen_codec=codec)
        torch.manual_seed(0)
        model: Any = towpath.shard(Model(), strategy, units=[Adapted])
        torch.manual_seed(0)
        plain: Any = Model()
        schedule = towpath.schedule(strategy, model, 1)
        blocks = {b.spec.name: b.rests_in for p in schedule.plans for b in p.buckets}
        assert blocks["float32"] is None
        resting = {p.spec.name: b.rests_in for p in schedule.plans for b in p.buckets if not b.spec.trainable}
        for name, parameter in plain.named_parameters():
            if not parameter.requires_grad:
                unit = "" if name.startswith("embed") else next(u for u in resting if u and _inside(name, u))
                found = resting[unit]
                assert found is not None
                with torch.no_grad():
                    parameter.copy_(rounded(parameter, found))
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (codec, name)
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = towpath.stats(model)
        _check_memory(stats, schedule)
        assert sorted(map(str, stats.last_step)) == sorted(map(str, schedule.transfers))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    plain.get_parameter(name).copy_(parameter.full_tensor())
                else:  # not rounded again, however often it was used
                    assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), (codec, name)
            assert torch.equal(model(x), plain(x)), codec


def _inside(name: str, unit: str) -> bool:
    first, _, last = unit.partition("..")
    numbers = [int(u.rpartition(".")[2]) for u in (first, last or first)]
    return numbers[0] <= int(name.split(".")[1]) <= numbers[1]


@pytest.mark.parametrize("codec, bits", [("int8:256", 8 + 32 / 256), ("int4:64", 4 + 32 / 64)])
def test_gathers_and_memory_shrink_as_the_codec_says(codec: str, bits: float) -> None:
    """The matrices fill their blocks: only biases and the padding at the end add to it."""
    wide = nn.Sequential(*(Adapted(512) for _ in range(2)))
    plain, encoded = (
        towpath.schedule(_strategy("zero3", "2x2", **options), wide, 1, units=[Adapted])
        for options in ({}, {"frozen_codec": codec})
    )
    gathered = [sum(t.inter_bytes for t in s.transfers if t.bucket.endswith("frozen")) for s in (plain, encoded)]
    held = [s.memory_bytes()["frozen"] for s in (plain, encoded)]
    assert gathered[1] == pytest.approx(gathered[0] * bits / 32, rel=0.01)
    assert held[1] == pytest.approx(held[0] * bits / 32, rel=0.01)
    assert encoded.memory_bytes()["master"] == 0


@on_ranks(4)
def test_writes_to_what_rests_encoded_encode_or_are_refused() -> None:
    for frozen in ("1x1", "2x1", "2x2"):
        model: Any = towpath.shard(Model(), _strategy("zero3", frozen, frozen_codec="int8:64"), units=[Adapted])
        weight, codec = model.blocks[1].base.weight, Codec.parse("int8:64")
        torch.manual_seed(3)
        values = torch.randn(WIDTH, WIDTH)
        with torch.no_grad():
            weight.copy_(values)
        assert torch.equal(weight.full_tensor(), rounded(values, codec))
        with towpath.full_parameters(model):
            assert torch.equal(model.blocks[1].base.weight, rounded(values, codec))
            model.blocks[1].base.weight.data[0] = 2 * values[0]
        expected = rounded(values, codec)
        expected[0] = rounded(2 * values[0], codec)
        assert torch.equal(weight.full_tensor(), expected), "blocks that were left alone stay as they were"
        before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        model.load_state_dict(before)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name]), name
        for write in (torch.zero_, lambda w: w.add_(1), lambda w: torch._foreach_mul_([w], 2.0)):
            with torch.no_grad(), pytest.raises(ShardError, match="is stored in int8:64"):
                write(weight)
        assert torch.equal(weight.full_tensor(), expected)
        weight.requires_grad_(True)
        with pytest.raises(towpath.errors.StepError, match="was frozen at shard"):
            model(torch.ones(2, WIDTH))


# Checkpoints and state dicts ------------------------------------------------------------------------------------------

SAVED = [("zero3", {"frozen": "2x1"}), ("hpz", {"frozen": "2x2"}), ("ddp", {"frozen": "1x1"})]


@on_ranks(4)
def test_a_checkpoint_goes_on_under_another_placement(tmp_path: Path) -> None:
    folder = str(tmp_path)
    from towpath import checkpoint

    previous: Path | None = None
    whole: dict[str, Tensor] = {}
    for number, (label, options) in enumerate([*SAVED, ("zero3", {"frozen": "2x1", "frozen_codec": "int8:64"})]):
        torch.manual_seed(number)
        model: Any = towpath.shard(Model(), _strategy(label, **options), units=[Adapted])
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
        if previous is not None:
            assert checkpoint.load(previous, checkpoint.State(model, optimizer)) is not None
            for name, parameter in model.named_parameters():
                encoded = "frozen_codec" in options and not parameter.requires_grad
                expected = rounded(whole[name], Codec.parse("int8:64")) if encoded else whole[name]
                assert torch.equal(parameter.full_tensor(), expected), (label, options, name)
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
        found = checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        checkpoint.set_model_state_dict(model, found, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(p.full_tensor(), whole[n]) for n, p in model.named_parameters())
        saved = Path(folder, str(number))
        checkpoint.save(saved, 1, checkpoint.State(model, optimizer))
        previous = saved


# Refused --------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    with pytest.raises(towpath.errors.ConfigError, match="no legal extent"):
        _strategy("zero3", "1x2")
    with pytest.raises(ConfigError, match="frozen is an Extent, 'as-trained', or None"):
        towpath.strategy("zero3", SHAPE, frozen="everywhere")
    for codec in ("int8:whole", "bf16", "int8+stochastic"):
        with pytest.raises(ConfigError, match="are stored in a codec of blocks"):
            towpath.strategy("zero3", SHAPE, frozen_codec=codec)
    with pytest.raises(ConfigError, match="float64"):
        towpath.schedule(_strategy("zero3", "2x1", frozen_codec="int8"), Model().double(), 1)
