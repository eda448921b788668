"""Ranks that run different units, fail alone, or stop early: an error on every rank that names them, never a number.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
from tests.forms import in_form
from tests.ranks.models import noise
from tests.ranks.server import RankError, World, on_ranks, run_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.twin import Twin, error_of
from towpath.core.routes import Form

SHAPE = towpath.Topology(2, 2)
SHARED = ["zero3", "hpz", "mics", "paro-iig", "zero3@ring", "zero3@two-hop", "lins:2x1|2x1|2x2"]


class Expert(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Runs those that it is told to, in that order."""

    def __init__(self, count: int = 4, uneven: bool = False) -> None:
        super().__init__()
        self.all = nn.ModuleList(Expert(6 + i * uneven) for i in range(count))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for i in chosen:
            x = self.all[i](x)
        return x


class Net(nn.Module):
    def __init__(self, count: int = 4, uneven: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.experts = Experts(count, uneven)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return self.last(self.experts(self.first(x), chosen))


def _net(label: str, shape: towpath.Topology, uneven: bool = False) -> Any:
    torch.manual_seed(3)
    return towpath.shard(Net(uneven=uneven).double(), strategy_of(label, shape), topology=shape, units=[Expert])


def _loss(model: nn.Module, chosen: list[int], step: int = 0) -> Tensor:
    return model(noise(dist.get_rank(), 0, step), chosen).square().mean()


# --- different units --------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_as_many_different_units_are_found_at_the_boundary_and_nothing_is_delivered() -> None:
    """In the first step nothing is prefetched: both ranks send as many gathers, of the same size."""
    texts: list[str] = []
    for label in SHARED:
        model = _net(label, SHAPE)
        texts.append(error_of(lambda model=model: _loss(model, [1 + dist.get_rank() % 2]).backward()))
        assert all(isinstance(p, towpath.ShardTensor) and p.grad is None for p in model.parameters()), label
        _loss(model, [1, 2], step=1).backward()  # as if the step before had not been
        assert not any(p.grad is None for p in model.experts.all[1].parameters())
    rank = dist.get_rank()
    for text in texts:
        assert text.startswith(f"rank {rank}: the ranks ran different units: transfer 2 of the step was, on"), text
        assert "on rank 0: gather of unit 'experts.all.1', on rank 1: gather of unit 'experts.all.2'" in text, text
        assert "units=[" in text


class Late(nn.Module):
    """Adds a second input, whose gradient it drops if it is told to. Then its backward ends with that of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: Tensor, drops: bool) -> Tensor:
        return torch.tanh(self.inner(x)) + (other.detach() if drops else other)


class LateNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Late() for _ in range(4))

    def forward(self, x: Tensor, drops: bool) -> Tensor:
        x = other = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, other, drops and number == 2)
        return self.last(x)


@on_ranks(4)
def test_reductions_must_keep_their_place_on_shared_communicators() -> None:
    """The ranks run the same units, and each kind of transfer is in the same order. Only their common order differs."""
    texts: list[str] = []
    for label in ("zero++", "paro-ggg", "zero3@hierarchical", "zero3@two-hop"):
        for form in Form:
            torch.manual_seed(3)
            with in_form(form):
                model: Any = towpath.shard(LateNet(), strategy_of(label, SHAPE), topology=SHAPE, units=[Late])
            for late in (False, True):

                def step(model: Any = model, late: bool = late) -> None:
                    model(torch.randn(3, 6), late and dist.get_rank() == 1).square().mean().backward()

                if late and form is Form.COLLECTIVES:
                    texts.append(error_of(step))
                    assert all(p.grad is None or not p.grad.any() for p in model.parameters()), label
                else:
                    step()  # messages of gathers and reductions have process groups of their own
                    model.zero_grad()
    rank = dist.get_rank()
    for text in texts:
        assert text.startswith(f"rank {rank}: the ranks submitted the transfers of a shared communicator"), text
        assert re.search("on rank 0: .* of unit 'blocks.[0-3]', on rank 1: .* of unit 'blocks.[0-3]'", text), text
        assert "lane 'rows'" in text and "reduce of unit" in text and "units ran" not in text, text


def test_a_rank_that_leaves_shard_is_an_error_with_advice() -> None:
    with pytest.raises(RankError, match=r"ShardError: rank 0: shard\(\) failed: .*Connection"):
        run_ranks(_leave_on_rank_1, 2)


def _leave_on_rank_1() -> None:
    dist.barrier()  # rank 0 is connected, too
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    towpath.shard(Net(), "zero3", topology=towpath.Topology(2, 1))


def test_models_in_another_order_are_found_at_the_boundary() -> None:
    """Their transfers meet, because the models are alike and share process groups. Each log equals its counterpart."""
    for texts in run_ranks(_swap_models, 2):
        for text in texts:
            assert "Let every rank run the forward and backward passes of all models in the same order" in text, text


def _swap_models() -> list[str]:
    shape, rank = towpath.Topology(2, 1), dist.get_rank()
    twins = [Twin(Net, lambda model, _, __, step: _loss(model, [1], step), "zero3", shape) for _ in range(2)]
    one, other = (twin.sharded for twin in twins)
    with torch.no_grad():
        _ = [_loss(model, [0]) for model in ((one, other) if rank == 0 else (other, one))]
    texts = [error_of(_loss(one, [1]).backward)]
    for step in range(2):  # as if the forwards before had not been
        for twin in twins:
            twin.backward(step)
            twin.check_gradients()
            twin.step()
    for label in ("zero3", "zero1", "ddp"):
        one, other = _net(label, shape), _net(label, shape)
        first, second = (one, other) if rank == 0 else (other, one)
        texts.append(error_of((_loss(first, [1]) + _loss(second, [1])).backward))
    return texts


@in_turn(("zero3", "hpz", "mics", "paro-iig"), 1)
@pytest.mark.parametrize("chosen", [([0, 1], [0, 2]), ([1, 2], [2, 1])], ids=str)
def test_ranks_whose_units_never_meet_say_so_long_before_their_patience_ends(label: str, chosen: Any) -> None:
    """What a rank prefetches in vain makes another number of gathers, or other sizes: they wait for each other."""
    with World(4, group_timeout=60.0) as ranks:
        told = ranks.run(_never_meet, label, chosen)
    for rank, text in enumerate(told):
        assert text.startswith(f"rank {rank}: "), text
        assert "the ranks ran different units" in text and "of unit 'experts.all." in text, text


def _never_meet(label: str, chosen: Any) -> str:
    model = _net(label, SHAPE, uneven=True)
    _loss(model, [0, 1, 2]).backward()
    text = error_of(lambda: _loss(model, chosen[dist.get_rank() % 2], step=1).backward())
    assert all(isinstance(p, towpath.ShardTensor) for p in model.parameters())
    return text


@on_ranks(2)
def test_different_units_in_an_evaluation_are_found_at_the_next_boundary() -> None:
    model = _net("zero3", towpath.Topology(2, 1))
    with torch.no_grad():
        _loss(model, [3 * dist.get_rank()])
    text = error_of(lambda: _loss(model, [1]).backward())
    assert "of unit 'experts.all.0'" in text and "of unit 'experts.all.3'" in text


@on_ranks(4)
def test_replicas_may_run_different_units() -> None:
    """Each node of `mics` and `paro-iig` is a replica of the parameters; of `ddp` and `zero1` each rank."""
    for label in ("mics", "paro-iig", "ddp", "zero1"):
        twin = Twin(
            Net, lambda model, rank, micro, step: _loss(model, [rank // 2, 2], step), label, SHAPE, units=[Expert]
        )
        twin.backward()
        twin.check_gradients()


# --- passes that fail -------------------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


class Fails(nn.Module):
    """Fails in its forward or backward, when told to."""

    when = "never"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ArithmeticError("no output today")
        return self.linear(Failing.apply(x) if self.when == "backward" else x)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Fails() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def _fragile_loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(noise(rank, micro, step)).square().mean()


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks(2)
def test_a_pass_that_fails_on_all_ranks_leaves_nothing_behind(when: str) -> None:
    shape = towpath.Topology(2, 1)
    for label in ("zero3", "zero1", "mics", "paro-iig"):
        twin = Twin(Fragile, _fragile_loss, label, shape, units=[Fails])
        twin.backward()
        kept = [p.grad.to_local().clone() for p in twin.sharded.parameters()]
        twin.sharded.blocks[1].when = when
        with pytest.raises(ArithmeticError):
            _fragile_loss(twin.sharded, dist.get_rank(), 0, 1).backward()
        # At once, before any other call: the root was whole from its forward on.
        parameters = list(twin.sharded.parameters())
        assert all(isinstance(p, towpath.ShardTensor) for p in parameters), label
        assert all(torch.equal(p.grad.to_local(), k) for p, k in zip(parameters, kept, strict=True)), label
        del twin.sharded.blocks[1].when
        twin.sharded.zero_grad()
        twin.plain.zero_grad()
        assert all(p.grad is None for p in parameters), label
        twin.backward(2)
        twin.check_gradients()


def test_a_rank_that_fails_alone_and_goes_on_is_told_so_and_its_peers_why() -> None:
    with World(2, group_timeout=3.0) as ranks:
        peer, failed = ranks.run(_fail_alone)
    assert failed.startswith("rank 1: its ") and "was caught here; rank 0 did not fail" in failed, failed
    assert "rank 1: step 1; its " in peer and "and was caught" in peer, peer


def _after_a_step(label: str, topology: towpath.Topology) -> tuple[Any, int]:
    """Return a model after its first pass, and the rank."""
    torch.manual_seed(0)
    model = towpath.shard(Fragile().double(), label, topology=topology, units=[Fails])
    _fragile_loss(model, dist.get_rank(), 0, 0).backward()
    return model, dist.get_rank()


def _fail_alone() -> str:
    model, rank = _after_a_step("zero3", towpath.Topology(2, 1))
    if rank == 1:
        model.blocks[1].when = "backward"
        with pytest.raises(ArithmeticError):
            _fragile_loss(model, rank, 0, 1).backward()
        del model.blocks[1].when
    return error_of(lambda: _fragile_loss(model, rank, 0, 2).backward())


def test_a_rank_that_has_ended_is_told_in_a_call_in_which_it_is_missed() -> None:
    """Where no transfer is under way, whose connections would show it."""
    with World(2) as ranks:
        for connection in ranks._connections:
            connection.send((_meet_alone, (), 60.0))
        assert ranks._connections[0].poll(60.0), "rank 0 hangs"
        ok, text = ranks._connections[0].recv()
    assert ok and text.startswith("rank 0: the process of rank 1 has ended"), text
    assert "in get_model_state_dict()" in text and "left out a call that every rank must make" in text


def _meet_alone() -> str:
    model: Any = towpath.shard(nn.Linear(4, 4), "zero3", topology=towpath.Topology(2, 1))
    if dist.get_rank() == 1:
        os._exit(0)
    full = StateDictOptions(full_state_dict=True)
    return error_of(lambda: towpath.checkpoint.get_model_state_dict(model, options=full))


def test_a_rank_whose_peers_have_lost_another_one_and_live_on_is_told_of_the_loss() -> None:
    """Not that their passes failed and its own did not: no transfer of its own has failed."""
    with World(4) as ranks:
        for connection in ranks._connections:
            connection.send((_lose_rank_3, (), 60.0))
        for rank, connection in enumerate(ranks._connections[:3]):
            assert connection.poll(60.0), f"rank {rank} hangs"
            ok, text = connection.recv()
            assert ok and text.startswith(f"rank {rank}: "), text
            assert re.search(r"the process of rank 3 has ended|failed: .*onnection", text), text
            assert "on every rank" not in text, text


def _lose_rank_3() -> str:
    model, rank = _after_a_step("paro-iig", towpath.Topology(2, 2))
    if rank == 3:
        model.last.register_forward_hook(lambda *_: os._exit(9))
    return error_of(lambda: _fragile_loss(model, rank, 0, 1).backward())


def test_a_step_that_one_rank_leaves_out_is_told_on_both_where_a_norm_meets_a_boundary() -> None:
    """Over gloo, a process ends without a word if two messages of different sizes meet in a group."""
    with World(2, group_timeout=12.0) as ranks:
        texts = ranks.run(_leave_out_a_step)
    assert all("on rank 0: a norm, a sum or an extreme of" in text for text in texts), texts


def _leave_out_a_step() -> str:
    model: Any = towpath.shard(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), "paro-iig", topology=towpath.Topology(2, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(skips: bool) -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        if not skips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()

    step(skips=False)
    return error_of(lambda: [step(skips=dist.get_rank() == 1) for _ in range(2)])
