"""A model cut into stages: which parameters each has, and that one after the other they compute what it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from towpath.errors import ShardError
from towpath.pipeline import split
from towpath.train.models import GPT, Shape

IDS = torch.randint(24, (2, 6), generator=torch.Generator().manual_seed(1))


def gpt(depth: int = 5, tied: bool = False) -> GPT:
    torch.manual_seed(5)
    return GPT(Shape(vocabulary=24, width=16, depth=depth, heads=2, hidden=24, tied=tied))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_compute_what_the_model_does(count: int) -> None:
    model = gpt()
    stages = split(model, count, IDS)
    x = IDS
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(IDS))
    x.sum().backward()
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    mine = dict(model.named_parameters())
    assert all(p is mine[name] and p.grad is not None for stage in stages for name, p in stage.named_parameters())


def test_the_ends_weigh_too() -> None:
    """A head as large as two blocks: the last stage has fewer of them."""
    model = gpt(depth=6)
    model.lm_head = nn.Linear(16, 24 * 16)  # pyright: ignore[reportAttributeAccessIssue]
    counts = [len({n.split(".")[2] for n, _ in s.named_parameters() if ".layers." in n}) for s in split(model, 3, IDS)]
    assert sum(counts) == 6 and counts[-1] < counts[0]


def test_a_model_on_the_meta_device_is_cut_without_memory() -> None:
    with torch.device("meta"):
        stages = split(gpt(), 2, IDS)
    assert all(p.device.type == "meta" for stage in stages for p in stage.parameters())


def test_ends_that_share_a_parameter_say_so() -> None:
    first, middle, last = split(gpt(tied=True), 3, IDS)
    assert (first.tied, middle.tied, last.tied) == ("model.embed_tokens", "", "lm_head")
    assert first.get_submodule("model.embed_tokens").weight is last.get_submodule("lm_head").weight


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ShardError, match="6 stages of a model that has 5 blocks"):
        split(gpt(), 6, IDS)
    with pytest.raises(ShardError, match="no ModuleList or Sequential of like blocks"):
        split(nn.Linear(3, 3), 1, torch.empty(2, 3))


def test_lists_in_lists_are_not_cut_between_their_modules() -> None:
    """What a layer computes between two of them, as a residual here, would be lost."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                for module in layer:
                    x = x + module(x)
            return x

    with pytest.raises(ShardError, match="no ModuleList or Sequential of like blocks"):
        split(Lists(), 2, torch.empty(2, 3))
