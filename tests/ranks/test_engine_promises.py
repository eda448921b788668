"""What the engine promises beyond parity of a plain loop: each test is one promise, kept on real ranks.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.models import MODELS, SEQUENCE, VOCABULARY, GPTBlock, TiedGPT
from tests.ranks.reference import optimizer_for
from tests.ranks.server import World
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.twin import Twin, loss_on, mean_of_all_ranks
from towpath import Extent, Topology, errors
from towpath.engine.executor import engine_of

Worlds = Callable[[int], World]

SHAPE = Topology(2, 2)

# One of each way that gradients and parameters travel: all-reduce, late and early reduction, two hops, gathers.
KINDS = ("ddp", "zero2", "zero3", "hpz", "mics:2x1", "paro-nig", "paro-iig", "lins:1x1|2x1|2x1")
kinds = in_turn(KINDS, 1)

_gpt_loss = loss_on("gpt")


# --- hpz and zero3 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, route",
    [(SHAPE, "flat"), seldom(SHAPE, "ring"), seldom(Topology(4, 2), "flat"), seldom(Topology(4, 2), "ring")],
    ids=str,
)
def test_hpz_equals_zero3_bit_for_bit(world: Worlds, shape: Topology, route: str) -> None:
    for differing in world(shape.world).run(_train_hpz_and_zero3, shape, route):
        assert differing == []


def _train_hpz_and_zero3(topology: Topology, route: str) -> list[str]:
    ends = []
    for name in ("hpz", "zero3"):
        entry = MODELS["gpt"]
        strategy = strategy_of(f"{name}@{route}", topology)
        model: Any = towpath.shard(entry.make(torch.float32), strategy, topology=topology)
        optimizer = optimizer_for(model)
        for step in range(4):
            with model.no_sync():
                entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32)).backward()
            entry.loss(model, *entry.micro_batch(dist.get_rank(), 1, step, torch.float32)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: p.full_tensor().detach() for name, p in model.named_parameters()})
    return [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])]


# --- frozen parameters -----------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen matrix, and two thin ones that train."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


WIDTH = 32


def _lora() -> nn.Module:
    return nn.Sequential(*(LoRALinear(WIDTH) for _ in range(3)))


def _lora_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(_noise(rank, micro, step, WIDTH)).square().mean()


def _noise(rank: int, micro: int, step: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro + 100 * step)
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


@kinds
def test_a_frozen_base_keeps_its_values_and_gets_no_gradient(world: Worlds, label: str) -> None:
    world(4).run(_train_lora, label)


def _train_lora(label: str) -> None:
    twin = Twin(_lora, _lora_loss, label, SHAPE)
    twin.backward(micro_steps=2)
    assert all(p.grad is None for p in twin.sharded.parameters() if not p.requires_grad)
    twin.check_gradients()
    twin.step()
    twin.train(steps=2)
    twin.check_parameters()


@kinds
def test_no_gradient_of_a_frozen_base_is_in_the_schedule(label: str) -> None:
    """Each block has a frozen matrix and bias, and two thin matrices that train: counted one by one."""
    strategy = strategy_of(label, SHAPE)
    plan = towpath.schedule(strategy, _lora(), micro_steps=3)

    frozen, thin = (WIDTH * WIDTH, WIDTH), (2 * WIDTH, 2 * WIDTH)
    blocks = [p for p in plan.plans if p.buckets]
    assert sum(len(p.buckets[0].spec.numels) for p in blocks) == 2 * 3
    for block in blocks:
        count = len(block.buckets[0].spec.numels) // 2  # small neighbours travel as one
        found = {b.spec.trainable: sorted(b.spec.numels) for b in block.buckets}
        assert found == {False: sorted(frozen * count), True: sorted(thin * count)}
        slices = strategy.moves.optimizer.count * 32
        trainable = -(-2 * 2 * WIDTH * count // slices) * slices
        for kind in ("reduce", "grad_sync", "param_sync"):
            moved = [t for t in plan.transfers if t.kind == kind and t.unit == block.spec.name]
            # Each moves all that trains, or the part of it that a group of ranks shares, and nothing else.
            assert all(t.elements * t.move.regions == trainable for t in moved), kind
            assert {t.bucket for t in moved} <= {"float32"}


# --- accumulation ----------------------------------------------------------------------------------------------------


@kinds
def test_gradients_accumulate_over_three_micro_steps(world: Worlds, label: str) -> None:
    world(4).run(_accumulate_micro_steps, label)


def _accumulate_micro_steps(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    for step in range(3):
        twin.backward(step, micro_steps=3)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@kinds
def test_between_micro_steps_grad_stays_untouched(world: Worlds, label: str) -> None:
    world(4).run(_look_at_grad_between_micro_steps, label)


def _look_at_grad_between_micro_steps(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    with twin.sharded.no_sync():
        _gpt_loss(twin.sharded, dist.get_rank(), 0, 0).backward()
    assert all(p.grad is None for p in twin.sharded.parameters())


@kinds
def test_gradients_accumulate_over_two_boundaries_without_zero_grad(world: Worlds, label: str) -> None:
    world(4).run(_accumulate_boundaries, label)


def _accumulate_boundaries(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    for step in (0, 2):
        twin.backward(step)
        twin.backward(step + 1, micro_steps=2)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@kinds
def test_zero_grad_may_set_to_zero_instead_of_none(world: Worlds, label: str) -> None:
    world(4).run(_train_with_zeroed_gradients, label)


def _train_with_zeroed_gradients(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    for step in range(3):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        twin.step(set_to_none=False)
        assert all(not p.grad.full_tensor().any() for p in twin.sharded.parameters())
    twin.check_parameters()


class Normalised(nn.Module):
    """A convolution before a BatchNorm has a bias whose gradient is rounding alone, of which Adam makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.SiLU()) for _ in range(3))
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("label", ["ddp", "zero1", "zero2", "zero3"])
def test_what_is_off_is_the_order_of_the_sums_and_nothing_else(world: Worlds, label: str) -> None:
    """One process that adds the same gradients in the same order ends with the same bits; in another order it does not.

    Where gradients travel in every micro-step, those of the ranks are added first; else those of the micro-steps."""
    for mine, others in world(2).run(_compare_orders, label):
        assert mine == 0.0
        assert others > 1e-12


def _compare_orders(label: str) -> tuple[float, float]:
    ranks_first, micro_steps_first = (_normalised(order) for order in (("ranks", "micro"), ("micro", "ranks")))
    model: Any = towpath.shard(_build_normalised(), label, topology=Topology(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        with model.no_sync():
            _normalised_loss(model, dist.get_rank(), 0, step).backward()
        _normalised_loss(model, dist.get_rank(), 1, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    travels = label in ("zero2", "zero3")
    mine, others = (ranks_first, micro_steps_first) if travels else (micro_steps_first, ranks_first)
    found = [p.full_tensor().detach() for p in model.parameters()]
    off = [max((f - e).abs().max().item() for f, e in zip(found, each, strict=True)) for each in (mine, others)]
    return off[0], off[1]


def _build_normalised() -> nn.Module:
    torch.manual_seed(3)
    return Normalised().double()


def _normalised_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * micro + 100 * step)
    return model(torch.randn(2, 3, 9, 9, generator=generator).double()).square().mean()


def _normalised(order: tuple[str, str]) -> list[Tensor]:
    """Trained in one process by Adam; the gradients of the two ranks' two micro-steps are added in this order."""
    model = _build_normalised()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(4):
        # [rank, micro-step] -> gradients
        each = [
            [torch.autograd.grad(_normalised_loss(model, rank, micro, step), parameters) for micro in range(2)]
            for rank in range(2)
        ]
        for index, parameter in enumerate(parameters):
            (a, b), (c, d) = ((grads[index] for grads in micro_steps) for micro_steps in each)
            total = (a + c) + (b + d) if order[0] == "ranks" else (a + b) + (c + d)
            parameter.grad = total / 2
        optimizer.step()
    return [p.detach() for p in parameters]


# --- parameters that not all use -------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Five branches in one unit, of which each forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(5)})

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        for i in use:
            x = x + torch.tanh(self.branches[str(i)](x))
        return x


class Branching(nn.Module):
    """The root unit has branches too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Branches()
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor, use: tuple[int, ...]) -> Tensor:
        x = self.first(x, use)
        for block in self.blocks:
            x = block(x, use)
        return x


def _branching_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """Branch 0: all ranks; 1: not rank 0; 2: rank 3 alone, in its first micro-step; 3: in odd steps; 4: never."""
    use = [0]
    use += [1] if rank != 0 else []
    use += [2] if rank == 3 and micro == 0 else []
    use += [3] if step % 2 else []
    return model(_noise(rank, micro, step, 6), tuple(use)).square().mean()


@kinds
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_gradient_is_none_only_where_no_rank_used_the_parameter(world: Worlds, label: str, micro_steps: int) -> None:
    world(4).run(_train_branches, label, micro_steps)


def _train_branches(label: str, micro_steps: int) -> None:
    twin = Twin(Branching, _branching_loss, label, SHAPE)
    for step in range(4):
        twin.backward(step, micro_steps)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


class Link(nn.Module):
    """With a spare layer that is never used, its gradients are complete only when those of its inputs are."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class LayerDrop(nn.Module):
    """A chain of blocks, of which each step leaves some out, the same on every rank."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Link(spare) for _ in range(5))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


ORDERS = ((0, 1, 2, 3, 4), (0, 2, 4), (0, 1, 3), (4, 2, 3, 0), (1,), (0, 1, 2, 3, 4))


def _layer_drop_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(_noise(rank, micro, step, 6), ORDERS[step]).square().mean()


@kinds
@pytest.mark.parametrize("spare", [False, True], ids=["complete", "spare"])
def test_whole_units_may_be_left_out_or_swapped_by_all_ranks_alike(world: Worlds, label: str, spare: bool) -> None:
    world(4).run(_train_layer_drop, label, spare)


def _train_layer_drop(label: str, spare: bool) -> None:
    twin = Twin(lambda: LayerDrop(spare), _layer_drop_loss, label, SHAPE)
    for step in range(len(ORDERS)):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


# --- backward(inputs=...) ---------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two chains of blocks that do not feed each other, and a root with parameters before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.left = nn.ModuleList(Link(spare=False) for _ in range(3))
        self.right = nn.ModuleList(Link(spare=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left = right = self.first(x)
        for block in self.left:
            left = torch.tanh(block(left))
        for block in self.right:
            right = torch.tanh(block(right))
        return self.last(left * right)


# Names of parameters, by how they begin: all; those of a unit in the middle; of blocks that wait for one another's
# memory; of the root alone; and others in each of two micro-steps.
CROSSWISE = ("left.2.linear.bias", "right.0", "left.0.linear.weight")
INPUTS = {
    "all": (("",), ("",)),
    "a-unit": (("left.1.",), ("left.1.",)),
    "crosswise": (CROSSWISE, CROSSWISE),
    "root": (("last",), ("last",)),
    "others-later": (("right.2.linear.weight", "first"), ("left.0", "last.bias")),
}


@kinds
@pytest.mark.parametrize(
    "named", [seldom(names) if key in ("a-unit", "root") else names for key, names in INPUTS.items()], ids=INPUTS
)
def test_backward_with_inputs_gives_gradients_to_these_parameters_only(world: Worlds, label: str, named: Any) -> None:
    world(4).run(_backward_with_inputs, label, named)


def _backward_with_inputs(label: str, named: tuple[tuple[str, ...], ...]) -> None:
    """Two micro-steps, each for the parameters whose names begin so; and then a step as usual."""
    twin = Twin(Towers, lambda *_: torch.zeros(()), label, SHAPE, units=[Link])

    def backward(model: nn.Module, micro: int, step: int) -> None:
        loss = model(_noise(dist.get_rank(), micro, step, 6)).square().mean()
        if step == 1:
            loss.backward()
        else:
            loss.backward(inputs=[p for name, p in model.named_parameters() if name.startswith(named[micro])])

    for step in range(3):
        with twin.sharded.no_sync():
            backward(twin.sharded, 0, step)
        backward(twin.sharded, 1, step)
        with mean_of_all_ranks(twin.plain):
            backward(twin.plain, 0, step)
            backward(twin.plain, 1, step)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


@kinds
def test_backward_with_inputs_may_pass_through_another_sharded_model(world: Worlds, label: str) -> None:
    """As a generator is trained by its critic, which gets no gradient then."""
    world(4).run(_backward_through_a_critic, label)


def _backward_through_a_critic(label: str) -> None:
    generator, critic = (Twin(Towers, lambda *_: torch.zeros(()), label, SHAPE, units=[Link]) for _ in range(2))

    def backward(made_by: nn.Module, judged_by: nn.Module, step: int) -> None:
        loss = judged_by(made_by(_noise(dist.get_rank(), 0, step, 6))).square().mean()
        loss.backward(inputs=list((made_by if step % 2 else judged_by).parameters()))

    for step in range(4):
        backward(generator.sharded, critic.sharded, step)
        with mean_of_all_ranks(generator.plain), mean_of_all_ranks(critic.plain):
            backward(generator.plain, critic.plain, step)
        for twin in (generator, critic):
            twin.check_gradients()
            twin.step()
    generator.check_parameters()


# --- models that use their units in other ways -----------------------------------------------------------------------


@kinds
def test_a_deep_model_whose_units_share_memory_trains_exactly(world: Worlds, label: str) -> None:
    world(4).run(_train_deep, label)


def _deep() -> nn.Module:
    return TiedGPT(layers=9)


def _train_deep(label: str) -> None:
    twin = Twin(_deep, _gpt_loss, label, SHAPE)
    twin.train(steps=3, micro_steps=2)
    twin.check_parameters()


class Recurrent(nn.Module):
    """The blocks are run through twice: each is used again before its first use went backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(GPTBlock(8, 2) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@kinds
def test_a_unit_may_run_twice_in_a_forward(world: Worlds, label: str) -> None:
    world(4).run(_train_recurrent, label)


def _train_recurrent(label: str) -> None:
    twin = Twin(Recurrent, _gpt_loss, label, SHAPE)
    twin.train(steps=3, micro_steps=2)
    twin.check_parameters()


def _two_forwards_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return _gpt_loss(model, rank, micro, step) + _gpt_loss(model, rank, micro + 50, step)


@kinds
def test_two_forwards_may_come_before_a_backward(world: Worlds, label: str) -> None:
    world(4).run(_train_two_forwards, label)


def _train_two_forwards(label: str) -> None:
    twin = Twin(TiedGPT, _two_forwards_loss, label, SHAPE)
    twin.train(steps=3)
    twin.check_parameters()


class CheckpointedGPT(TiedGPT):
    def forward(self, ids: Tensor) -> Tensor:
        x: Any = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def _checkpointed() -> nn.Module:
    return CheckpointedGPT(layers=5)


@kinds
def test_activation_checkpointing_changes_nothing(world: Worlds, label: str) -> None:
    world(4).run(_train_checkpointed, label)


def _train_checkpointed(label: str) -> None:
    twin = Twin(_checkpointed, _gpt_loss, label, SHAPE)
    twin.train(steps=3, micro_steps=2)
    twin.check_parameters()


@kinds
def test_evaluation_between_steps_changes_nothing_and_sees_the_newest_parameters(world: Worlds, label: str) -> None:
    world(4).run(_train_and_evaluate, label)


def _train_and_evaluate(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    for step in range(3):
        twin.backward(step, micro_steps=2)
        twin.step()
        with torch.no_grad():
            found = _gpt_loss(twin.sharded, 9, 0, step)
            assert abs(found - _gpt_loss(twin.plain, 9, 0, step)) < 1e-10  # float64, a mean over ten tokens
    twin.check_parameters()


@kinds
def test_full_parameters_gives_the_whole_model(world: Worlds, label: str) -> None:
    world(4).run(_look_at_full_parameters, label)


def _look_at_full_parameters(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    twin.train(steps=1)
    expected = twin.plain.state_dict()
    assert list(twin.sharded.state_dict()) == list(expected)
    with towpath.full_parameters(twin.sharded):
        for name, parameter in twin.sharded.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-10)
    twin.train(steps=1)
    twin.check_parameters()


def test_buffers_are_the_first_ranks_at_the_start(world: Worlds) -> None:
    assert world(4).run(_shard_different_buffers) == [0.0] * 4


def _shard_different_buffers() -> float:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[1].running_mean, float(dist.get_rank()))  # pyright: ignore
    sharded: Any = towpath.shard(model, "zero3", topology=SHAPE)
    return sharded[1].running_mean.max().item()


def test_the_users_own_units_train_exactly(world: Worlds) -> None:
    world(4).run(_train_own_units)


def _train_own_units() -> None:
    twin = Twin(TiedGPT, _gpt_loss, "zero3", SHAPE, units=[nn.LayerNorm, GPTBlock])
    twin.train(steps=3, micro_steps=2)
    twin.check_parameters()


# --- the moment of shard() -------------------------------------------------------------------------------------------


@kinds
def test_an_optimizer_made_before_shard_trains(world: Worlds, label: str) -> None:
    world(4).run(_train_with_an_optimizer_made_before, label)


def _train_with_an_optimizer_made_before(label: str) -> None:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE, optimizer_first=True)
    twin.train(steps=3)
    twin.check_parameters()


FULL = StateDictOptions(full_state_dict=True)
STEPPED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", STEPPED)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_optimizers_that_stepped_before_shard_are_refused(world: Worlds, strategy: str, kind: str) -> None:
    world(2).run(_step_before, strategy, kind)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _step_before(strategy: str, kind: str) -> None:
    model: Any = nn.Linear(5, 3)
    optimizer = STEPPED[kind](model.parameters())
    _stepped(model, optimizer)
    towpath.shard(model, strategy, topology=Topology(2, 1))
    before = [p.full_tensor().clone() for p in model.parameters()]
    model(torch.ones(2, 5)).sum().backward()
    for _ in range(2):
        words = rf"rank {dist.get_rank()}: {kind} has already stepped weight.*make a new optimizer afterwards"
        with pytest.raises(errors.ShardError, match=words):
            optimizer.step()
    with pytest.raises(errors.ShardError, match=f"{kind} has already stepped"):
        towpath.checkpoint.get_optimizer_state_dict(model, optimizer, options=FULL)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    _stepped(model, STEPPED[kind](model.parameters()))


def test_an_optimizer_without_states_may_step_before_shard(world: Worlds) -> None:
    world(2).run(_step_without_states)


def _step_without_states() -> None:
    torch.manual_seed(7)
    plain = nn.Linear(5, 3)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        if step == 1:
            towpath.shard(model, "zero3", topology=Topology(2, 1))
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            _stepped(each, optimizer)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), expected)


def test_two_models_of_one_optimizer_made_before_train(world: Worlds) -> None:
    """The optimizer steps one of them sharded and the other one not yet; then that one is sharded, and is refused."""
    world(2).run(_share_an_optimizer)


def _share_an_optimizer() -> None:
    first, second = nn.Linear(5, 3), nn.Linear(5, 3)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    towpath.shard(first, "zero3", topology=Topology(2, 1))
    _stepped(first, optimizer)  # the second has no gradients, and so no states
    towpath.shard(second, "zero3", topology=Topology(2, 1))
    before = second.weight.full_tensor().clone()
    (first(torch.ones(2, 5)) + second(torch.ones(2, 5))).sum().backward()
    optimizer.step()
    assert not torch.equal(second.weight.full_tensor(), before)
    third = nn.Linear(5, 3)
    optimizer.add_param_group({"params": list(third.parameters())})
    optimizer.zero_grad()
    _stepped(third, optimizer)
    towpath.shard(third, "zero3", topology=Topology(2, 1))
    with pytest.raises(errors.ShardError, match="has already stepped weight"):
        optimizer.step()


class OfOneElement(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_states_of_parameters_with_one_element_are_found(world: Worlds) -> None:
    world(2).run(_step_one_element_before)


def _step_one_element_before() -> None:
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        model: Any = OfOneElement()
        stepped = torch.optim.SGD([model.scale], lr=0.1, momentum=0.9, **how)
        model(torch.ones(2, 5)).sum().backward()
        stepped.step()
        model.zero_grad()
        towpath.shard(model, "zero3", topology=Topology(2, 1))
        model(torch.ones(2, 5)).sum().backward()
        with pytest.raises(errors.ShardError, match="SGD has already stepped scale"):
            stepped.step()
        fresh = torch.optim.NAdam(model.parameters())  # has 0-D states of its own
        fresh.step()
        fresh.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        fresh.step()


def test_peers_are_told_why_a_ranks_step_was_refused() -> None:
    with World(2, group_timeout=3.0) as ranks:
        refused, told = ranks.run(_refuse_and_leave)
    assert "AdamW has already stepped weight" in refused
    assert "rank 0: step 1; AdamW.step() failed" in told and "make a new optimizer afterwards" in told, told


def _refuse_and_leave() -> str:
    model: Any = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        _stepped(model, optimizer)
    towpath.shard(model, "zero3", topology=Topology(2, 1))
    try:
        for _ in range(2):
            _stepped(model, optimizer)
    except errors.ShardError as error:
        for group in [*engine_of(model).comm.groups._made.values()]:
            engine_of(model).comm.groups.leave(group)  # as if the process had ended
        return str(error)
    except errors.StepError as error:
        return str(error)
    raise AssertionError("the step was not refused")


def test_one_rank_that_stepped_before_shard_leaves_none_waiting(world: Worlds) -> None:
    first, second = world(2).run(_step_before_on_rank_0)
    assert "AdamW has already stepped weight" in first[0] and second[0] == ""
    for _, later in (first, second):
        assert "rank 0" in later and "AdamW.step()" in later


def _step_before_on_rank_0() -> tuple[str, str]:
    model: Any = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        _stepped(model, optimizer)
    towpath.shard(model, "zero3", topology=Topology(2, 1))
    model(torch.ones(2, 5)).sum().backward()
    refused = ""
    try:
        optimizer.step()
    except errors.ShardError as error:
        refused = str(error)
    with pytest.raises(errors.TowpathError) as caught:  # rank 0 goes on in vain
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
    return refused, str(caught.value)


def test_a_live_graph_is_refused_with_the_reason(world: Worlds) -> None:
    for message in world(2).run(_shard_under_a_live_graph):
        assert "graph" in message or "backward" in message


def _shard_under_a_live_graph() -> str:
    model: Any = nn.Linear(5, 3)
    loss = model(torch.ones(2, 5)).sum()
    with pytest.raises(errors.ShardError) as caught:
        towpath.shard(model, "zero3", topology=Topology(2, 1))
    assert loss.requires_grad
    return str(caught.value)


def test_ranks_with_different_models_all_fail_with_what_differs(world: Worlds) -> None:
    for message in world(4).run(_shard_different_models):
        assert "head.weight" in message
        assert "rank" in message


def _shard_different_models() -> str:
    class Model(nn.Module):
        def __init__(self, out: int) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, out)

    with pytest.raises(errors.MismatchError) as caught:
        towpath.shard(Model(5 if dist.get_rank() == 2 else 3), "zero3", topology=SHAPE)
    return str(caught.value)


def _register(module: nn.Module, **buffers: Tensor) -> None:
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)


# What rank 1 has in place of a mean of four float32, and then a scale of four; and what the error says of it.
OTHER_BUFFERS: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "names": (lambda: {"average": torch.zeros(4), "scale": torch.ones(4)}, "0.average"),
    "order": (lambda: {"scale": torch.ones(4), "mean": torch.zeros(4)}, "0.scale"),
    "shape": (lambda: {"mean": torch.zeros(2, 2), "scale": torch.ones(4)}, "2×2"),
    "longer": (lambda: {"mean": torch.zeros(400), "scale": torch.ones(4)}, "400"),
    "dtype": (lambda: {"mean": torch.zeros(4).double(), "scale": torch.ones(4)}, "float64"),
    "one more": (lambda: {"mean": torch.zeros(4), "scale": torch.ones(4), "steps": torch.zeros(())}, "0.steps"),
    "one less": (lambda: {"mean": torch.zeros(4)}, "nothing more"),
}


@pytest.mark.parametrize("what", OTHER_BUFFERS)
def test_ranks_with_different_buffers_all_fail_with_what_differs(world: Worlds, what: str) -> None:
    for message in world(2).run(_shard_other_buffers, what):
        assert "rank 1" in message and "buffer" in message
        assert OTHER_BUFFERS[what][1] in message


def _shard_other_buffers(what: str) -> str:
    module = nn.Linear(4, 4)
    _register(
        module, **(OTHER_BUFFERS[what][0]() if dist.get_rank() else {"mean": torch.zeros(4), "scale": torch.ones(4)})
    )
    with pytest.raises(errors.MismatchError) as caught:
        towpath.shard(nn.Sequential(module), "ddp", topology=Topology(2, 1))
    return str(caught.value)


ODD_BUFFERS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense()"),
    "expanded": (lambda: torch.ones(1).expand(4), "contiguous()"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "dequantize()"),
}


@pytest.mark.parametrize("kind", ODD_BUFFERS)
def test_buffers_without_memory_of_their_own_are_refused_by_name(world: Worlds, kind: str) -> None:
    for text in world(2).run(_odd_buffer, kind):
        assert "buffer 'odd'" in text and ODD_BUFFERS[kind][1] in text, text


def _odd_buffer(kind: str) -> str:
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.register_buffer("odd", ODD_BUFFERS[kind][0]())
    with pytest.raises(errors.ShardError) as caught:
        towpath.shard(model, "zero3", topology=towpath.Topology(2, 1))
    return str(caught.value)


def test_a_rank_may_build_its_buffers_on_the_meta_device(world: Worlds) -> None:
    assert world(2).run(_shard_meta_buffers) == [5.0, 5.0]


def _shard_meta_buffers() -> float:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if dist.get_rank() == 0:
        nn.init.constant_(model[1].running_mean, 5.0)
    return towpath.shard(model, "zero3", topology=Topology(2, 1))[1].running_mean.max().item()


def test_ranks_with_different_strategies_all_fail_with_what_differs(world: Worlds) -> None:
    for message in world(4).run(_shard_different_strategies):
        assert "zero2" in message
        assert "zero3" in message


def _shard_different_strategies() -> str:
    with pytest.raises(errors.MismatchError) as caught:
        towpath.shard(nn.Linear(4, 4), "zero2" if dist.get_rank() == 1 else "zero3", topology=SHAPE)
    return str(caught.value)


def test_ranks_with_different_topologies_all_fail_with_what_differs(world: Worlds) -> None:
    world(4).run(_shard_different_topologies)


def _shard_different_topologies() -> None:
    topology = Topology(4, 1) if dist.get_rank() == 3 else SHAPE
    with pytest.raises(errors.MismatchError):
        towpath.shard(nn.Linear(4, 4), "zero3", topology=topology)


def test_outer_steps_on_one_rank_only_are_named(world: Worlds) -> None:
    for message in world(2).run(_shard_with_outer_on_one_rank):
        assert "outer = None" in message
        assert "topology" not in message


def _shard_with_outer_on_one_rank() -> str:
    outer = towpath.Outer(every=2) if dist.get_rank() == 0 else None
    with pytest.raises(errors.MismatchError) as caught:
        towpath.shard(nn.Linear(4, 4), "zero3", topology=Topology(2, 1), outer=outer)
    return str(caught.value)


@pytest.mark.parametrize("shard", [False, True], ids=["strategy", "shard"])
def test_an_unknown_strategy_lists_the_known_ones_and_the_closest(shard: bool) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        if shard:
            towpath.shard(nn.Linear(2, 2), "zreo3")
        else:
            towpath.strategy("zreo3", SHAPE)

    assert "did you mean 'zero3'" in str(caught.value)
    for name in towpath.strategies():
        assert name in str(caught.value)


def test_a_world_that_does_not_fit_the_topology_is_refused(world: Worlds) -> None:
    for message in world(3).run(_shard_uneven):
        assert "3" in message
        assert "4" in message


def _shard_uneven() -> str:
    with pytest.raises(errors.ConfigError) as caught:
        towpath.shard(nn.Linear(4, 4), "zero3", topology=SHAPE)
    return str(caught.value)


def test_without_a_process_group_it_is_a_world_of_one() -> None:
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()

    sharded: Any = towpath.shard(model, "zero3")
    sharded(torch.ones(2, 4)).sum().backward()

    assert sharded is model
    assert torch.equal(sharded.weight.full_tensor(), before)
    assert torch.equal(sharded.bias.grad.full_tensor(), torch.full((3,), 2.0))


# --- ShardTensor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["matmul", "reshape", "index", "numpy"])
def test_an_operation_that_needs_the_whole_tensor_says_how_to_get_it(world: Worlds, operation: str) -> None:
    for message in world(2).run(_use_a_slice, operation):
        assert "full_tensor" in message or "full_parameters" in message


def _use_a_slice(operation: str) -> str:
    model: Any = towpath.shard(nn.Linear(5, 3), "zero3", topology=Topology(2, 1))
    weight = model.weight
    operations: dict[str, Callable[[], object]] = {
        "matmul": lambda: weight @ torch.ones(5),
        "reshape": lambda: weight.detach().reshape(15),
        "index": lambda: weight.detach()[0],
        "numpy": lambda: weight.detach().numpy(),
    }
    with pytest.raises(errors.ShardError) as caught:
        operations[operation]()
    return str(caught.value)


@kinds
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")], ids=str)
def test_the_stock_clip_costs_one_all_reduce_and_returns_the_global_norm(
    world: Worlds, label: str, order: float
) -> None:
    # Where nothing is sharded every rank has the whole: there is nothing to combine.
    expected = 0 if label == "ddp" else 1
    assert world(4).run(_clip, label, order) == [expected] * 4


def _clip(label: str, order: float) -> int:
    twin = Twin(TiedGPT, _gpt_loss, label, SHAPE)
    twin.backward(micro_steps=2)
    calls = 0
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        found = nn.utils.clip_grad_norm_(twin.sharded.parameters(), 0.1, norm_type=order)
    finally:
        dist.all_reduce = all_reduce
    expected = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1, norm_type=order)
    assert abs(float(found) - float(expected)) <= 1e-10 * float(expected)  # float64, sums in another order
    twin.check_gradients()
    return calls


class Scaled(nn.Module):
    """Its gradient is its input: one infinite input makes one infinite element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_every_rank_skips_the_step_when_one_ranks_slice_is_infinite(world: Worlds, foreach: bool) -> None:
    results = world(4).run(_step_with_an_overflow, foreach)

    assert [infinite for infinite, _, _ in results].count(True) == 1  # one rank alone holds it
    assert [scale for _, scale, _ in results] == [512.0] * 4
    assert all(unchanged for _, _, unchanged in results)


def _step_with_an_overflow(foreach: bool) -> tuple[bool, float, bool]:
    model: Any = towpath.shard(Scaled(), "zero3", topology=SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs = torch.ones(16)
    inputs[9] = float("inf") if dist.get_rank() == 1 else 1.0
    scaler.scale(model(inputs)).backward()
    infinite = not model.weight.grad.to_local().isfinite().all().item()
    scaler.step(optimizer)
    scaler.update()
    return infinite, scaler.get_scale(), torch.equal(model.weight.full_tensor(), torch.ones(16))


def test_a_scaled_step_without_overflow_trains(world: Worlds) -> None:
    assert world(4).run(_scaled_step) == [True] * 4


def _scaled_step() -> bool:
    model: Any = towpath.shard(Scaled(), "zero3", topology=SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.ones(16))).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(model.weight.full_tensor(), torch.full((16,), 0.5))


# --- copies ----------------------------------------------------------------------------------------------------------


def test_the_state_of_the_optimizer_is_sharded_too(world: Worlds) -> None:
    # A quarter each on four ranks, and some for padding.
    for share in world(4).run(_share_of_states):
        assert share < 0.35


def _share_of_states() -> float:
    model: Any = towpath.shard(TiedGPT(), "zero3", topology=SHAPE)
    optimizer = optimizer_for(model)
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    model(ids).square().mean().backward()
    optimizer.step()
    held = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    return held / sum(p.numel() for p in model.parameters())


def test_a_strategy_is_a_value() -> None:
    strategy = towpath.strategy("lins", SHAPE, params=Extent(1), grads=Extent(2), optimizer=Extent(2, 2))

    assert copy.deepcopy(strategy) == strategy
    assert towpath.Strategy.from_toml(strategy.to_toml()) == strategy
