"""What could be wrong in silence is right, or an error: each test is something a user did to break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import towpath
from tests.ranks.models import noise
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.twin import Twin
from towpath.errors import ShardError, StepError

SHAPE = towpath.Topology(2, 1)
LABELS = in_turn(["zero3", "zero1"], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    return model(noise(rank, micro, step)).square().mean()


def _twin(label: str, build: Callable[[], nn.Module] = Net, loss: Any = _loss) -> Twin:
    return Twin(build, loss, label, SHAPE)


def _refused(error: type[Exception], action: Callable[[], Any], words: str) -> None:
    with pytest.raises(error, match=words):
        action()


# --- parameters written, replaced, frozen, hooked --------------------------------------------------------------------


@LABELS
@on_ranks(2)
def test_assigning_data_writes_the_values(label: str) -> None:
    twin = _twin(label)
    for model in (twin.plain, twin.sharded):
        for p in model.parameters():
            p.data = p.data * 0.5
    twin.train(2)
    twin.check_parameters()


@LABELS
@on_ranks(2)
def test_a_replaced_parameter_is_refused_at_the_next_forward(label: str) -> None:
    twin = _twin(label)
    whole = {name: p.detach() for name, p in twin.plain.named_parameters()}
    batch = noise(0, 0, 0)
    words = "was replaced by another tensor"
    _refused(StepError, lambda: torch.func.functional_call(twin.sharded, whole, batch), words)
    twin.sharded.load_state_dict(whole, assign=True)
    _refused(StepError, lambda: twin.sharded(batch), words)


@LABELS
@on_ranks(2)
def test_freezing_after_shard_is_followed_and_thawing_what_was_frozen_refused(label: str) -> None:
    twin = _twin(label)
    for step, frozen in enumerate((False, True, False)):
        for model in (twin.plain, twin.sharded):
            model.blocks[1].a.requires_grad_(not frozen)  # type: ignore[union-attr]
        twin.backward(step)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()
    model = Net()
    model.first.requires_grad_(False)
    towpath.shard(model, label, topology=SHAPE)
    model.first.requires_grad_(True)
    _refused(StepError, lambda: model(torch.randn(3, 6)), "was frozen at shard")


@on_ranks(2)
def test_casts_hooks_and_copies_after_shard_are_refused_with_a_way_out() -> None:
    import copy
    import pickle

    twin = _twin("zero3")
    parameter = next(twin.sharded.parameters())
    _refused(ShardError, twin.sharded.float, "cannot be cast or moved. Do it before shard")
    _refused(ShardError, lambda: parameter.register_hook(print), "would never run")
    _refused(ShardError, lambda: copy.deepcopy(twin.sharded), "_foreach_lerp_")
    for part in (twin.sharded, twin.sharded.first, twin.sharded.blocks[0]):
        _refused(ShardError, lambda part=part: pickle.dumps(part), "neither copied nor pickled")


# --- the whole parameters --------------------------------------------------------------------------------------------


@LABELS
@on_ranks(2)
def test_a_step_inside_full_parameters_is_kept_and_contexts_nest(label: str) -> None:
    twin = _twin(label)
    twin.backward()
    with towpath.full_parameters(twin.sharded):
        twin.step()
    twin.check_parameters()
    with towpath.full_parameters(twin.sharded):
        with towpath.full_parameters(twin.sharded):
            pass
        for p in twin.sharded.parameters():
            p.data.mul_(0.5)
    for p in twin.plain.parameters():
        p.data.mul_(0.5)
    twin.check_parameters()
    twin.train(2)
    twin.check_parameters()


# --- norms and sums of which each rank has a part --------------------------------------------------------------------


@on_ranks(2)
def test_norms_and_sums_print_and_convert_as_those_of_whole_tensors() -> None:
    twin = _twin("zero3")
    twin.backward()
    for found, expected in zip(twin.sharded.parameters(), twin.plain.parameters(), strict=True):
        for mine, whole in ((found.detach(), expected.detach()), (found.grad, expected.grad)):
            for norm, value in ((mine.norm(), whole.norm()), (mine.sum(), whole.sum())):
                assert f"{norm:.4f}" == f"{value:.4f}" and f"{norm:10.2e}" == f"{value:10.2e}"
                assert float(norm) == pytest.approx(value.item(), abs=1e-12)
                assert round(norm, 3) == round(value.item(), 3) and round(norm) == round(value.item())
                assert norm.tolist() == pytest.approx(value.item(), abs=1e-12)
                assert norm.cpu().numpy() == pytest.approx(value.numpy(), abs=1e-12)


@on_ranks(2)
def test_writes_to_norms_and_sums_are_kept() -> None:
    twin = _twin("zero3")
    twin.backward()
    for found, expected in zip(twin.sharded.parameters(), twin.plain.parameters(), strict=True):
        ways: list[Callable[[Tensor], Tensor]] = [
            lambda g: g.square().mean().sqrt_().clamp_(min=1e-3).mul_(2),
            lambda g: torch.sqrt(g.norm().mul_(3).add_(g.sum())).square(),
            lambda g: g.norm().float().pow_(2).double(),
            lambda g: torch.stack([g.norm(), g.norm()]).mul_(2).sum(),
            lambda g: g.norm().clone().zero_() + g.norm(),
            lambda g: (torch.stack([g.norm(), g.norm()]) + torch.ones(2)).sum(),
        ]
        for number, way in enumerate(ways):
            mine, whole = way(found.grad), way(expected.grad)
            assert mine.item() == pytest.approx(whole.item(), rel=1e-6, nan_ok=True), number
        norms, others = [found.grad.norm()], [expected.grad.norm()]
        for each in (norms, others):
            torch._foreach_mul_(each, 5.0)
        copied = norms[0].clone()
        copied.mul_(2)
        norms[0].detach().add_(1.0)
        assert norms[0].item() == pytest.approx(others[0].item() + 1.0)
        assert copied.item() == pytest.approx(2 * others[0].item())


# --- what units do with their inputs and outputs ---------------------------------------------------------------------


class Collecting(Block):
    """Adds to a list of its caller's."""

    def forward(self, x: Tensor, extra: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        if extra is not None:
            extra.append(x.square().mean())
        return x


def _collected_loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
    extra: list[Tensor] = []
    return model(noise(rank, micro, step), extra).square().mean() + torch.stack(extra).sum()


class CollectingNet(Net):
    def __init__(self) -> None:
        super().__init__(Collecting)

    def forward(self, x: Tensor, extra: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks:
            x = block(x, extra)
        return x


@LABELS
@on_ranks(2)
def test_a_list_that_units_add_to_is_the_callers(label: str) -> None:
    _train(label, CollectingNet, _collected_loss)


def _train(label: str, build: Callable[[], nn.Module], loss: Any) -> None:
    twin = _twin(label, build, loss)
    twin.train(3, micro_steps=2)
    twin.check_parameters()


class Skipping(Block):
    """Returns its very input."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 3 else super().forward(x)


@LABELS
@on_ranks(2)
def test_a_unit_may_return_its_input_unchanged(label: str) -> None:
    _train(label, lambda: Net(Skipping), _loss)


class Leaking(Block):
    """Leaves a tensor where nobody watches."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aside = self.b(torch.tanh(self.a(out))).square().mean()
        return out


@on_ranks(2)
def test_a_tensor_that_left_a_unit_unwatched_never_meets_other_weights() -> None:
    model: Any = towpath.shard(Net(Leaking), "zero3", topology=SHAPE)
    loss = model(torch.randn(3, 6)).square().mean() + sum(b.aside for b in model.blocks)
    _refused(RuntimeError, loss.backward, "modified by an inplace operation")


class Returning(Block):
    """Returns a weight of its own besides, in some way."""

    way = ""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), RETURNED[self.way](self.a.weight)


RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "detached": lambda weight: weight.detach()[2:],
    "cloned": lambda weight: weight.clone(),
}


class ReturningNet(Net):
    """The root returns a parameter of its own, too."""

    def __init__(self, way: str) -> None:
        super().__init__(Returning)
        self.scale = nn.Parameter(torch.ones(()))
        for block in self.blocks:
            block.way = way  # type: ignore[assignment]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weights: list[Tensor] = []
        x = self.first(x)
        for block in self.blocks:
            x, weight = block(x)
            weights.append(weight)
        return x + sum(weight.square().mean() for weight in weights), self.scale


def _scaled_loss(model: Any, rank: int, micro: int, step: int) -> Tensor:
    x, scale = model(noise(rank, micro, step))
    return (x * scale).square().mean()


@LABELS
@on_ranks(2)
def test_a_weight_that_a_unit_returns_is_whole_or_refused_by_name(label: str) -> None:
    for way in RETURNED:
        twin = _twin(label, lambda way=way: ReturningNet(way), _scaled_loss)
        if label == "zero3" and way != "cloned":
            words = "unit 'blocks.0' returns the memory of its own parameter 'blocks.0.a.weight'.*clone"
            _refused(StepError, lambda t=twin: t.sharded(noise(0, 0, 0)), words)
            with torch.no_grad():
                _refused(StepError, lambda t=twin: t.sharded(noise(0, 0, 0)), words)
        else:
            twin.train(3, micro_steps=2)
            twin.check_parameters()


@LABELS
@on_ranks(2)
def test_a_checkpoint_around_several_units_is_exact_or_says_what_to_wrap(label: str) -> None:
    def loss(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
        whole: Any = checkpoint(model, noise(rank, micro, step), use_reentrant=False)
        return whole.square().mean()

    twin = _twin(label, loss=loss)
    if label == "zero3":
        _refused(StepError, twin.backward, "torch.utils.checkpoint around several units.*[Cc]heckpoint each block")
    else:
        twin.train(2)
        twin.check_parameters()


@LABELS
@on_ranks(2)
def test_torch_func_is_refused_with_what_to_call(label: str) -> None:
    twin = _twin(label)
    model, x = twin.sharded, noise(0, 0, 0)

    def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
        whole: Any = torch.func.functional_call(model, parameters, (x,))
        return whole.square().mean()

    gradient = torch.func.grad(of_parameters)
    words = r"torch.func.*'first.weight'.*loss.backward\(\)"
    _refused(StepError, lambda: gradient({name: p.detach() for name, p in twin.plain.named_parameters()}), words)
    _refused(StepError, lambda: gradient(dict(model.named_parameters())), words)
    of_input = torch.func.grad(lambda x: model(x).square().mean())
    _refused(StepError, lambda: of_input(x), r"torch.func.*torch.autograd.grad")
    twin.train(1)
    twin.check_parameters()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0][0]


@LABELS
@on_ranks(2)
def test_recurrent_modules_compute_with_the_weights_of_the_moment(label: str) -> None:
    _train(label, lambda: Net(Recurrent), _loss)


# --- loops -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_one_rank_keeps_alive_changes_nothing() -> None:
    """A rank that logs outputs keeps their graph: the order of its transfers must be the others' all the same."""
    twin = _twin("zero3", lambda: Net(depth=6))
    kept: list[Tensor] = []
    for step in range(4):
        output = twin.sharded(noise(dist.get_rank(), 7, step))
        if dist.get_rank() == 0:
            kept.append(output)
        del output
        twin.backward(step)
        twin.step()
    twin.check_parameters()


@LABELS
@on_ranks(2)
def test_zero_grad_of_the_model_drops_the_micro_steps_so_far(label: str) -> None:
    twin = _twin(label)
    with twin.sharded.no_sync():
        (100 * _loss(twin.sharded, dist.get_rank(), 5, 5)).backward()
    twin.sharded.zero_grad()
    twin.train(2)
    twin.check_parameters()
