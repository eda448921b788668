"""Models from the meta device are initialized by their modules, unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import towpath
from tests.ranks.reference import optimizer_for
from tests.ranks.server import on_ranks
from tests.ranks.strategies import strategy_of
from tests.ranks.test_every_model import SHAPE, WIDTH, Chain, _loss, labels
from tests.ranks.twin import TOLERANCE, distance
from towpath import errors
from towpath.topology.groups import Groups


class Deterministic(nn.Module):
    """Its values are known without drawing any; so are its buffers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
            self.scale.copy_(torch.linspace(1.0, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


class Tables(nn.Module):
    """Its buffer is random, and drawn anew whenever its parameter is."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * self.weight


class MetaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Deterministic()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(self.gain(x))))


def _meta_model(blocks: int = 3) -> nn.Module:
    with torch.device("meta"):
        return Chain([MetaBlock() for _ in range(blocks)]).double()


@on_ranks(4)
def test_a_random_buffer_from_the_meta_device_is_the_first_ranks() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Tables(), Tables())
    torch.manual_seed(dist.get_rank())
    sharded: Any = towpath.shard(model, "zero3", topology=SHAPE)
    for module in sharded:
        tables = [torch.empty(WIDTH) for _ in range(4)]
        dist.all_gather(tables, module.table)
        assert all(torch.equal(table, tables[0]) for table in tables)


@labels
@pytest.mark.parametrize("how", ["frozen", "shared"])
@on_ranks(4)
def test_a_module_on_the_meta_device_may_have_its_parameters_in_different_buffers(how: str, label: str) -> None:
    """A matrix that does not train, and a bias that does; a matrix that another unit has too, and a bias of its own."""
    model: Any = _meta_model()
    if how == "frozen":
        for block in model.blocks:
            block.linear.weight.requires_grad_(False)
    else:
        model.blocks[2].linear.weight = model.blocks[0].linear.weight
    sharded: Any = towpath.shard(model, strategy_of(label, SHAPE), topology=SHAPE)
    for block in sharded.blocks:
        for parameter in block.linear.parameters():
            assert 0 < parameter.full_tensor().abs().max() <= WIDTH**-0.5  # Linear's own initialisation
    _loss(sharded, dist.get_rank(), 0, 0).backward()


@labels
@on_ranks(4)
def test_a_model_on_the_meta_device_is_initialised_by_its_modules_and_trains_exactly(label: str) -> None:
    torch.manual_seed(dist.get_rank())  # each rank draws other values; the first rank's count
    sharded: Any = towpath.shard(_meta_model(), strategy_of(label, SHAPE), topology=SHAPE)
    plain: Any = Chain([MetaBlock() for _ in range(3)]).double()
    drawn = {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "gain" in name or "norm" in name:
                torch.testing.assert_close(drawn[name], parameter.detach(), rtol=0, atol=1e-15)
            else:  # Linear's: uniform within the root of 1 / WIDTH
                assert 0 < drawn[name].abs().max() <= WIDTH**-0.5
            parameter.copy_(drawn[name])
    assert len({d.abs().max().item() for n, d in drawn.items() if n.endswith("linear.weight")}) == 3
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(sharded.get_buffer(name), buffer, rtol=0, atol=1e-15)
    optimizers = [optimizer_for(sharded), optimizer_for(plain)]
    for step in range(3):
        _loss(sharded, dist.get_rank(), 0, step).backward()
        for rank in range(4):
            (_loss(plain, rank, 0, step) / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), expected in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert distance(found, expected[1].detach()) <= TOLERANCE, name


@on_ranks(4)
def test_a_module_that_cannot_initialise_itself_is_named() -> None:
    model: Any = _meta_model()
    with torch.device("meta"):
        model.blocks[1].bare = nn.ParameterList([torch.empty(3, dtype=torch.float64)])
    with pytest.raises(errors.ShardError, match=r"blocks.1.*reset_parameters"):
        towpath.shard(model, "zero3", topology=SHAPE)


@pytest.mark.parametrize("differing", [False, True])
@pytest.mark.parametrize("where", ["meta", "cpu"])
@on_ranks(4)
def test_values_are_broadcast_only_where_a_rank_has_others(where: str, differing: bool) -> None:
    if where == "meta":
        model = _meta_model()
        torch.manual_seed(0)
    else:
        torch.manual_seed(0)
        model = Chain([MetaBlock() for _ in range(3)]).double()
    if differing and dist.get_rank() == 3:
        torch.manual_seed(1)
        for parameter in model.parameters() if where == "cpu" else ():
            nn.init.normal_(parameter)
    sent: list[int] = []
    broadcast = Groups.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Groups, "broadcast", lambda self, values: (sent.append(values.numel()), broadcast(self, values)))
        sharded: Any = towpath.shard(model, "zero3", topology=SHAPE)
    assert (max(sent) > WIDTH * WIDTH) == differing  # a matrix, or only buffers
    values = torch.cat([parameter.full_tensor().detach().flatten() for parameter in sharded.parameters()])
    everywhere = [torch.empty_like(values) for _ in range(4)]
    dist.all_gather(everywhere, values)
    assert all(torch.equal(each, values) for each in everywhere)
