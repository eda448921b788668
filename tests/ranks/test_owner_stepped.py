"""Optimizers that need whole matrices train a sharded model as they would train it in one process.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.testing._internal.two_tensor import TwoTensor

import towpath
from tests.ranks.models import MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_never_silent import Net, _loss
from tests.ranks.twin import Twin
from towpath import checkpoint
from towpath.collectives import point_to_point as messages
from towpath.core.strategy import TransferKind
from towpath.core.units import Matrices, owner_messages, piece_bytes
from towpath.errors import CheckpointError, ConfigError, MismatchError, ShardError, StepError
from towpath.optim import chain, owner_stepped

SHAPE = towpath.Topology(2, 2)
LABELS = ["zero3", "mics", "paro-iig", "zero1", "ddp", "mics:2x2"]
OWNERS = {TransferKind.MATRIX_GRADIENTS, TransferKind.MATRIX_WEIGHTS, TransferKind.MATRIX_UPDATES}


class Iterated(optim.Optimizer):
    """As Muon, but it iterates in the dtype of its parameters: so parity can be judged in float64."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.mul_(1 - 0.1 * group["lr"]).add_(x, alpha=-group["lr"])


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def _muon(model: nn.Module) -> optim.Optimizer:
    first, *rest = _matrices(model)
    groups = [{"params": [first], "lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}, {"params": rest, "nesterov": False}]
    return optim.Muon(groups, lr=0.02, weight_decay=0.1, momentum=0.9)


MAKE: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "Muon": _muon,
    "Adafactor": lambda model: optim.Adafactor(model.parameters(), lr=0.01, weight_decay=0.1),
}


# --- the same numbers -------------------------------------------------------------------------------------------------


@in_turn([*LABELS, "paro-igg offload=params"], 1)
@pytest.mark.parametrize("name", MAKE)
def test_fed_the_same_gradients_it_leaves_the_bits_of_one_process(world: Worlds, name: str, label: str) -> None:
    world(4).run(_same_bits, name, label)


def _same_bits(name: str, label: str) -> None:
    sharded, plain = _pair(label)
    optimizer, expected = owner_stepped(MAKE[name](sharded)), MAKE[name](plain)
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, expected)]
    for step in range(3):
        _backward(sharded, step)
        unused = "blocks.1.widen.weight" if step == 1 else ""  # as if it had got no gradient
        for (key, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.full_tensor()
            if key == unused:
                p.grad = q.grad = None
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        for (key, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q), (step, key)


def _pair(label: str) -> tuple[Any, nn.Module]:
    sharded = towpath.shard(MODELS["gpt"].make(torch.float32), strategy_of(label, SHAPE))
    return sharded, MODELS["gpt"].make(torch.float32)


def _backward(model: nn.Module, step: int = 0) -> None:
    entry = MODELS["gpt"]
    entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32)).backward()


@on_ranks(4)
def test_in_float64_it_trains_as_one_process_does(whole_product: bool) -> None:
    for label in LABELS if whole_product else LABELS[::3]:
        twin = Twin(Net, _loss, label, SHAPE)
        twin.optimizer = owner_stepped(Iterated(_matrices(twin.sharded)))
        twin.plain_optimizer = Iterated(_matrices(twin.plain))
        for step in range(4):
            twin.backward(step, micro_steps=2)
            for model in (twin.sharded, twin.plain):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            twin.check_gradients()
            twin.step(set_to_none=step % 2 == 0)
        twin.check_parameters()
        # What it counts in its groups it counts once a step, on every rank.
        assert twin.optimizer.param_groups[0]["steps"] == 4


# --- the schedule -----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_its_transfers_are_the_schedules_and_so_is_what_reaches_the_backend(whole_product: bool) -> None:
    labels = LABELS if whole_product else ("ddp", "mics", "paro-iig")
    for label in labels:
        strategy = strategy_of(label, SHAPE)
        model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy)
        names = [name for name, p in model.named_parameters() if p.dim() == 2]
        optimizer = owner_stepped(optim.Muon(_matrices(model), lr=0.02))
        sent: Counter[int] = Counter()  # bytes by peer
        with pytest.MonkeyPatch.context() as patch:
            for step in range(3):
                _backward(model, step)
                if step == 2:
                    patch.setattr(messages, "_launched", _counting(sent, messages._launched))
                optimizer.step()
                patch.undo()
                optimizer.zero_grad()
        schedule = towpath.schedule(strategy, model, 1, owner_stepped=names)
        on_paper = towpath.schedule(strategy, MODELS["gpt"].make(torch.float32), owner_stepped=names)
        assert on_paper.transfers == schedule.transfers, label
        expected = [t for t in schedule.transfers if t.kind in OWNERS]
        found = [t for t in towpath.stats(model).last_step if t.kind in OWNERS]
        assert found == expected, label
        assert bool(expected) == (label != "ddp"), label
        assert sent == _scheduled(expected), label
        if label == "mics":
            assert not sum(t.inter_bytes for t in expected), (
                "where the optimizer's states lie in the node nothing crosses"
            )
        memory = towpath.stats(model).memory_bytes
        assert memory["whole matrices"] == schedule.buffer_bytes()["whole matrices"], label
        assert {k: v for k, v in memory.items() if k in schedule.buffer_bytes()} == schedule.buffer_bytes(), label


def _counting(sent: Counter[int], original: Callable[..., Any]) -> Callable[..., Any]:
    def launched(posted: Any, group: Any, tag: int) -> Any:
        for message in posted:
            if message.leaves:
                sent[dist.get_global_rank(group, message.peer)] += message.content.nbytes
        return original(posted, group, tag)

    return launched


def _scheduled(transfers: list[Any]) -> Counter[int]:
    """By peer, what this rank sends."""
    sent: Counter[int] = Counter()
    for transfer in transfers:
        group, payload = transfer.move.group_of(dist.get_rank()), transfer.payload
        assert isinstance(payload, Matrices)
        for message in owner_messages(transfer.move.op, payload.matrices, group):
            if group.ranks[message.source] == dist.get_rank():
                elements = payload.matrices[message.matrix].pieces[message.slot]
                sent[group.ranks[message.target]] += piece_bytes(elements, 4, transfer.transport.encoding)
    return sent


@on_ranks(4)
def test_gradients_may_travel_in_fewer_bits_and_replicas_stay_alike() -> None:
    sharded, _ = _pair("mics")
    optimizer = owner_stepped(optim.Muon(_matrices(sharded), lr=0.02), gradients="int8:64")
    before = [p.full_tensor() for p in _matrices(sharded)]
    for step in range(2):
        _backward(sharded, step)
        optimizer.step()
        optimizer.zero_grad()
    totals = [t for t in towpath.stats(sharded).transfers if t.transfer.kind is TransferKind.MATRIX_GRADIENTS]
    plain = [t for t in towpath.stats(sharded).transfers if t.transfer.kind is TransferKind.MATRIX_WEIGHTS]
    assert 0 < sum(t.intra_bytes for t in totals) < 0.4 * sum(t.intra_bytes for t in plain)
    for p, old in zip(_matrices(sharded), before, strict=True):
        here = p.full_tensor()
        assert not torch.equal(here, old)
        everywhere = [torch.empty_like(here) for _ in range(SHAPE.world)]
        dist.all_gather(everywhere, here)
        assert all(torch.equal(here, other) for other in everywhere)


# --- what users call --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_closures_and_scalers_work_as_with_any_optimizer() -> None:
    model = towpath.shard(Net(), "zero3", topology=towpath.Topology(2, 1))
    inner, called = optim.Muon(_matrices(model), lr=0.02), []
    inner.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer = owner_stepped(inner)
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert called == ["before", "after"]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.full_tensor() for p in _matrices(model)]
    optimizer.zero_grad()
    scaler.scale(model(torch.full((2, 6), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(_matrices(model), before, strict=True))


@on_ranks(2)
def test_what_cannot_be_is_refused_when_it_is_made() -> None:
    unsharded = owner_stepped(optim.Muon([nn.Parameter(torch.zeros(2, 2))]))
    with pytest.raises(ShardError, match="no parameter of it is one of a sharded model"):
        unsharded.step()
    model: Any = towpath.shard(Net(), "zero3", topology=towpath.Topology(2, 1))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optim.Muon(model.parameters())
    with pytest.raises(ShardError, match="not of a sharded model"):
        owner_stepped(optim.Muon([*_matrices(model), nn.Parameter(torch.zeros(2, 2))]))
    with pytest.raises(ShardError, match="computes with all parameters at once"):
        owner_stepped(optim.LBFGS(model.parameters()))
    with pytest.raises(MismatchError, match=r"rank 0 has .options of group 0"):
        owner_stepped(optim.Muon(_matrices(model), lr=0.1 + dist.get_rank()))
    with pytest.raises(ConfigError, match="codec of blocks"):
        owner_stepped(optim.Muon(_matrices(model)), gradients="low-rank:2")
    with pytest.raises(ConfigError, match="names of the model's trainable parameters"):
        towpath.schedule("zero3", model, owner_stepped=["first.weigh"])
    optimizer = owner_stepped(optim.Muon(_matrices(model)))
    with pytest.raises(ShardError, match="wrapped already"):
        owner_stepped(optimizer)
    assert optimizer.state_dict()["state"] == {}
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(ShardError, match="get_optimizer_state_dict"):
        optimizer.state_dict()
    with pytest.raises(ShardError, match="before it is wrapped"):
        optimizer.add_param_group({"params": _others(model)})


@on_ranks(2)
def test_ranks_that_step_other_matrices_all_learn_it() -> None:
    model: Any = towpath.shard(Net(), "zero3", topology=towpath.Topology(2, 1))
    optimizer = owner_stepped(optim.Muon(_matrices(model)))
    model(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 0:
        model.blocks[1].a.weight.grad = None  # all of it lies on rank 0, and nothing of it would have travelled
    optimizer.step()
    with pytest.raises(StepError) as caught:
        model(torch.ones(2, 6)).sum().backward()
    text = str(caught.value)
    assert "the ranks ran different units" in text and "matrix_gradients of unit" in text, text


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _iterated_and_adamw(model: nn.Module, wrap: Callable[[Any], Any]) -> optim.Optimizer:
    return chain(wrap(Iterated(_matrices(model))), optim.AdamW(_others(model), lr=0.01))


RESUMED: dict[str, Callable[[nn.Module, Callable[[Any], Any]], optim.Optimizer]] = {
    "of its rows and columns": lambda model, wrap: wrap(optim.Adafactor(model.parameters(), lr=0.01)),
    "and elementwise ones beside them": _iterated_and_adamw,
}


def _as_it_is(optimizer: optim.Optimizer) -> optim.Optimizer:
    return optimizer


@pytest.mark.parametrize("states", RESUMED)
@on_ranks(4)
def test_saved_under_one_strategy_it_goes_on_under_another(tmp_path: Path, states: str, whole_product: bool) -> None:
    labels = ["zero3", "mics", "ddp", "paro-iig", "zero3"][slice(None) if whole_product else slice(1, 4)]
    twin = Twin(Net, _loss, labels[0], SHAPE)
    twin.optimizer = RESUMED[states](twin.sharded, owner_stepped)
    twin.plain_optimizer = RESUMED[states](twin.plain, _as_it_is)
    twin.train(2)
    for number, label in enumerate(labels[1:]):
        assert checkpoint.save(tmp_path / str(number), 2 + number, checkpoint.State(twin.sharded, twin.optimizer)).ok
        resumed = Twin(Net, _loss, label, SHAPE)
        resumed.optimizer = RESUMED[states](resumed.sharded, owner_stepped)
        loaded = checkpoint.load(tmp_path / str(number), checkpoint.State(resumed.sharded, resumed.optimizer))
        assert loaded is not None and not loaded.notes
        resumed.plain, resumed.plain_optimizer, twin = twin.plain, twin.plain_optimizer, resumed
        twin.backward(2 + number)
        twin.step()
        twin.check_parameters()


@on_ranks(4)
def test_full_state_dicts_are_those_of_one_process_and_load_again() -> None:
    twin = Twin(Net, _loss, "zero3", SHAPE)
    twin.optimizer, twin.plain_optimizer = (Iterated(_matrices(m)) for m in (twin.sharded, twin.plain))
    twin.optimizer = owner_stepped(twin.optimizer)
    adamw = optim.AdamW(_others(twin.sharded), lr=1e-3)
    twin.backward()
    adamw.step()
    twin.step()
    names = dict(twin.plain.named_parameters())
    for offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found = checkpoint.get_optimizer_state_dict(twin.sharded, [twin.optimizer, adamw], options=options)
        if offload and dist.get_rank():
            assert found == {}
            continue
        for name, p in names.items():
            if p.dim() == 2:
                expected = twin.plain_optimizer.state[p]["momentum_buffer"]
                assert torch.allclose(found["state"][name]["momentum_buffer"], expected, rtol=0, atol=1e-12), name
            else:
                assert found["state"][name]["exp_avg"].shape == p.shape
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    resumed = owner_stepped(Iterated(_matrices(twin.sharded), lr=0.5))
    fresh = optim.AdamW(_others(twin.sharded), lr=1e-3)
    checkpoint.set_optimizer_state_dict(
        twin.sharded, [resumed, fresh], found if dist.get_rank() == 0 else {}, options=options
    )
    assert resumed.param_groups[0]["lr"] == 0.02 and resumed.param_groups[0]["steps"] == 1
    assert resumed.state.keys() == twin.optimizer.state.keys()
    for parameter, state in resumed.state.items():
        assert torch.equal(state["momentum_buffer"], twin.optimizer.state[parameter]["momentum_buffer"])
    assert fresh.state.keys() == adamw.state.keys()


# --- optimizers that couple parameters --------------------------------------------------------------------------------


class OneStepSize(optim.Optimizer):
    """As Prodigy and D-Adaptation: one step size, estimated from all parameters, which it keeps in its groups."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gain, size = 0.0, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                start = state.setdefault("start", p.detach().clone().flatten())
                summed = state.setdefault("summed", torch.zeros_like(start))
                summed.add_(p.grad.flatten(), alpha=group["d"])
                gain += group["d"] * torch.dot(p.grad.flatten(), start - p.flatten()).item()
                size += summed.abs().sum().item()
        for group in self.param_groups:
            group["numerator"] += gain
            group["d"] = max(group["d"], group["numerator"] / size if size else 0.0)
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["d"])


class Elementwise(optim.Optimizer):
    """Would be right, but for what a subclass does besides."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data -= 0.1 * p.grad
        self.besides()

    def besides(self) -> None: ...


def _count_beside_parameters(self: Elementwise) -> None:
    """As MADGRAD."""
    self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[call-overload]


def _count_where_parameters_are(self: Elementwise) -> None:
    for group in (group for group in self.param_groups if group["params"]):
        group["k"] = group.get("k", 0) + 1


class Around(Elementwise):
    """As Lookahead: it steps another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = optim.SGD(self.param_groups, lr=0.1)

    def besides(self) -> None:
        self.inner.step()


def _communicate(self: Elementwise) -> None:
    for p in (p for group in self.param_groups for p in group["params"]):
        dist.all_reduce(p.data)


COUPLED: dict[type[optim.Optimizer], str] = {
    Around: "steps another optimizer, SGD",
    OneStepSize: "what step.. writes into its groups depends on the parameters there: '(d|numerator)'",
    **{
        type(besides.__name__.strip("_"), (Elementwise,), {"besides": besides}): words
        for besides, words in (
            (_count_beside_parameters, "keeps state.'k'., which belongs to no parameter"),
            (_count_where_parameters_are, "other values into its groups where they have no parameters: 'k'"),
            (_communicate, "communicates with other ranks .c10d.allreduce_"),
        )
    },
}


@pytest.mark.parametrize("label", ["zero3", "ddp"])
@on_ranks(2)
def test_optimizers_that_couple_parameters_are_refused_by_name_when_wrapped(label: str) -> None:
    model: Any = towpath.shard(Net(), label, topology=towpath.Topology(2, 1))
    before = [p.full_tensor() for p in model.parameters()]
    for kind, reason in COUPLED.items():
        with pytest.raises(ShardError, match=rf"{kind.__name__} cannot step its parameters one at a time.*{reason}"):
            owner_stepped(kind(model.parameters()))
        with pytest.raises(ShardError, match=kind.__name__):  # before an integration shards the model
            owner_stepped(kind(Net().parameters()))
    assert all(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


class LateStepSize(optim.Optimizer):
    """Its step size depends on gradients from its 20th step on, which no trial at the start can see."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"steps": 0, "d": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            if group["steps"] >= 20:
                group["d"] = sum(p.grad.abs().sum().item() for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["d"])


@on_ranks(2)
def test_an_optimizer_that_couples_parameters_later_is_refused_in_that_step() -> None:
    model: Any = towpath.shard(Net(), "zero3", topology=towpath.Topology(2, 1))
    optimizer = owner_stepped(LateStepSize(_matrices(model)))
    model(torch.ones(2, 6)).sum().backward()
    for _ in range(19):
        optimizer.step()
    with pytest.raises(StepError, match=r"LateStepSize.: step.. wrote values into its groups .* 'd' of group 0"):
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 20


class CountsByItself(Iterated):
    """Right under the wrapper, though it counts in an attribute and makes the states of a parameter anew."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].get("sums", 0) + p.grad @ p.grad.T @ p.grad
                    self.state[p] = {"sums": sums}
                    p.sub_(sums, alpha=0.1 / self.steps)


@on_ranks(2)
def test_counts_in_attributes_and_states_made_anew_are_kept() -> None:
    twin = Twin(Net, _loss, "zero3", towpath.Topology(2, 1))
    twin.optimizer = owner_stepped(CountsByItself(_matrices(twin.sharded)))
    twin.plain_optimizer = CountsByItself(_matrices(twin.plain))
    twin.train(4)
    twin.check_parameters()
    assert twin.optimizer.inner.steps == 4


# --- schedule-free optimizers, and those that compile their step ------------------------------------------------------


class Averaged(Iterated):
    """As a schedule-free optimizer: `z` is trained, gradients are taken between it and its average, and the average is
    what is evaluated. Needs whole matrices, and starts in no mode."""

    def __init__(self, params: Any, whole: bool = True) -> None:
        super().__init__(params)
        self.whole = whole
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, 1 - 0.9)

    def _switch(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    change = p.grad @ p.grad.T @ p.grad if self.whole else p.grad
                    p.lerp_(z, 1 / group["steps"]).sub_(change, alpha=0.1 * (1 - 1 / group["steps"]))
                    z.sub_(change, alpha=0.2)


@on_ranks(4)
def test_schedule_free_optimizers_train_and_evaluate_as_in_one_process() -> None:
    """One of whole matrices, wrapped, and one of the other parameters, as it is."""
    for label in ("zero3", "paro-iig"):
        twin = Twin(Net, _loss, label, SHAPE)
        twin.optimizer, twin.plain_optimizer = (
            chain(wrap(Averaged(_matrices(model))), Averaged(_others(model), whole=False))
            for model, wrap in ((twin.sharded, owner_stepped), (twin.plain, _as_it_is))
        )
        for step in range(4):
            twin.optimizer.train()
            twin.plain_optimizer.train()
            twin.backward(step)
            if step == 3:  # a parameter without a gradient is switched, too
                twin.sharded.blocks[0].a.weight.grad = twin.plain.blocks[0].a.weight.grad = None
            twin.step()
            twin.plain.zero_grad()
            if step % 2:
                twin.optimizer.eval()
                twin.plain_optimizer.eval()
                twin.check_parameters()
                x = torch.ones(2, 6, dtype=torch.float64)
                with torch.no_grad():  # what is evaluated was published
                    assert torch.allclose(twin.sharded(x), twin.plain(x), rtol=0, atol=1e-9), (label, step)


def _momentum(p: Tensor, grad: Tensor, sums: Tensor) -> None:
    sums.copy_(sums + grad.float())
    p.copy_(p - 0.1 * sums)


class Compiled(optim.Optimizer):
    """As torchao's AdamW8bit: its step is compiled, and its states are tensors of a class of their own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        compiled: Any = torch.compile(_momentum, fullgraph=True, dynamic=False, backend="eager")
        with torch._dynamo.utils.disable_cache_limit():
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["sums"] = TwoTensor(torch.zeros(p.shape), torch.zeros(p.shape))
                compiled(p.detach(), p.grad, state["sums"].a)


@on_ranks(2)
def test_an_optimizer_that_compiles_its_step_works_wrapped_and_is_refused_otherwise(tmp_path: Path) -> None:
    root = tmp_path
    sharded: Any = towpath.shard(MODELS["gpt"].make(torch.float32), "zero3", topology=towpath.Topology(2, 1))
    plain = MODELS["gpt"].make(torch.float32)
    _backward(sharded)
    unwrapped = Compiled(sharded.parameters())
    words = rf"rank {dist.get_rank()}: Compiled compiles its step.*Call towpath.optim.owner_stepped.Compiled"
    with pytest.raises(ShardError, match=words):
        unwrapped.step()
    optimizer, expected = owner_stepped(Compiled(sharded.parameters())), Compiled(plain.parameters())
    for step in range(2):
        _backward(sharded, step)
        for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
            q.grad = p.grad.full_tensor()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for (key, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), key
    failure = checkpoint.save(root, 2, checkpoint.State(sharded, optimizer)).failure
    assert failure is not None and "is a TwoTensor, which checkpoints cannot hold" in failure, failure
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(CheckpointError, match="is a TwoTensor, which checkpoints cannot hold"):
        checkpoint.get_optimizer_state_dict(sharded, optimizer, options=options)
