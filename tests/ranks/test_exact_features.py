"""Exact transports next to what else changes a step: training equals that without them to the bit.

A case trains twice: once with exact transports, and once on the routes that these take. Functions whose names begin
with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.forms import in_form
from tests.ranks import test_frozen
from tests.ranks.models import DEVICE, LOUDNESS, MODELS
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.test_exact import PRECISIONS, _bits, _by_messages
from tests.ranks.test_pipeline import BATCH, WIDTH, Block, Plain
from towpath import Strategy, Topology, checkpoint
from towpath.collectives import exact as exact_collectives
from towpath.core.routes import Form
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport

Loss = Callable[[nn.Module, int, int], Tensor]

SHAPE, HALF = Topology(2, 2), Topology(2, 1)


@dataclass
class Training:
    """One of the two trainings of a case, and what is compared: `kept`."""

    exactly: bool
    form: Form
    label: str
    precision: str
    steps: int
    models: list[Any] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision][0]

    def strategy(self, topology: Topology = SHAPE, **options: Any) -> Strategy:
        made = replace(strategy_of(self.label, topology), **options)
        if self.exactly:
            return made.with_exact_transports()
        return _by_messages(made) if self.form is Form.MESSAGES else made

    def shard(self, model: nn.Module, strategy: Strategy | None = None, **options: Any) -> Any:
        made: Any = towpath.shard(
            model.to(DEVICE), strategy or self.strategy(), precision=PRECISIONS[self.precision][1], **options
        )
        self.models.append(made)
        return made

    def gpt(self, strategy: Strategy | None = None, **options: Any) -> tuple[Any, optim.Optimizer]:
        return _with_adamw(self.shard(MODELS["gpt"].make(self.dtype), strategy, **options))

    def loss(self, model: nn.Module, micro: int, step: int) -> Tensor:
        entry = MODELS["gpt"]
        return LOUDNESS[step % len(LOUDNESS)] * entry.loss(
            model, *entry.micro_batch(dist.get_rank(), micro, step, self.dtype)
        )

    def keep(self, name: str, values: Any) -> None:
        assert name not in self.kept
        self.kept[name] = getattr(values, "local", torch.as_tensor(values)).detach().clone()

    def backward(self, model: Any, step: int, loss: Loss | None = None, micro_steps: int = 1) -> None:
        """One accumulation, of which losses and gradients are kept, and then clipped."""
        for micro in range(micro_steps):
            with nullcontext() if micro == micro_steps - 1 else model.no_sync():
                found = (loss or self.loss)(model, micro, step)
                (found / micro_steps).backward()
            self.keep(f"{len(self.models)}: loss {step}.{micro}", found)
        self.keep_gradients(model, step)

    def keep_gradients(self, model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.keep(f"{len(self.models)}: {name}.grad {step}", parameter.grad)
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)

    def train(
        self, model: Any, optimizer: optim.Optimizer, steps: Sequence[int] | None = None, loss: Loss | None = None
    ) -> None:
        for step in range(self.steps) if steps is None else steps:
            self.backward(model, step, loss, micro_steps=1 + step % 2)
            optimizer.step()
            optimizer.zero_grad()

    def end(self, model: Any, optimizer: optim.Optimizer) -> None:
        prefix = f"{len(self.kept)}: "
        for name, parameter in model.named_parameters():
            self.keep(prefix + name, parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                self.keep(f"{prefix}{name}.{key}", value)


def _with_adamw(model: Any) -> tuple[Any, optim.Optimizer]:
    return model, optim.AdamW(model.parameters(), lr=1e-3)


# --- cases ------------------------------------------------------------------------------------------------------------


def _skipped_steps(run: Training) -> None:
    """Gradients without a step, forwards between steps, and a comparison of parameters at each boundary."""
    model, optimizer = run.gpt(check_every=1)
    for step in range(run.steps):
        run.backward(model, step)
        if step % 3 != 1:
            optimizer.step()
        if step % 3:
            optimizer.zero_grad()
        with torch.no_grad():
            run.keep(f"evaluated {step}", run.loss(model, 5, step))
    run.end(model, optimizer)


def _square(dtype: torch.dtype) -> Loss:
    def loss(model: nn.Module, micro: int, step: int) -> Tensor:
        x, y = _rows(dist.get_rank() // 2, micro, step, dtype)
        return (model(x) - y).square().mean()

    return loss


def _rows(replica: int, micro: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(replica + 10 * micro + 100 * step)
    return torch.randn(2, BATCH, WIDTH, generator=generator).to(dtype)


def _tensor_parallelism(run: Training) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = parallelize_module(Plain(0, run.dtype), mesh["tp"], plan)
    model, optimizer = _with_adamw(run.shard(model, run.strategy(HALF), group=mesh["dp"].get_group(), units=[Block]))
    run.train(model, optimizer, loss=_square(run.dtype))
    run.end(model, optimizer)


def _user_writes(run: Training) -> None:
    """Inside full_parameters() and to the parameters themselves, alike on every rank."""
    model, optimizer = run.gpt()
    for step in range(run.steps):
        run.train(model, optimizer, [step])
        if step % 4 in (1, 3):
            with towpath.full_parameters(model), torch.no_grad():
                model.blocks[0].qkv.weight.mul_(0.5)
                model.tokens.weight.fill_diagonal_(step)
        with torch.no_grad():
            if step % 4 in (2, 3):
                model.blocks[1].widen.weight.clamp_(-0.1, 0.1)
            if step % 4 == 0:
                model.norm.weight.copy_(torch.linspace(-step, step, 12).to(run.dtype))
    run.end(model, optimizer)


def _frozen_parameters(run: Training) -> None:
    """Frozen like the trainable ones, and written."""
    torch.manual_seed(0)
    model = test_frozen.Model().to(run.dtype)
    model, optimizer = _with_adamw(run.shard(model, run.strategy(frozen="as-trained"), units=[test_frozen.Adapted]))

    def loss(model: nn.Module, micro: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank() + 10 * micro + 100 * step)
        return model(torch.randn(3, test_frozen.WIDTH, generator=generator).to(DEVICE, run.dtype)).square().mean()

    for step in range(run.steps):
        run.train(model, optimizer, [step], loss)
        if step == 1:  # nothing is kept of what is frozen
            schedule, memory = towpath.schedule(model.towpath_engine.strategy, model), towpath.stats(model).memory_bytes
            planned = schedule.memory_bytes() | schedule.buffer_bytes()
            assert {kind: memory.get(kind, 0) for kind in planned} == planned
        with torch.no_grad():
            if step % 3 == 1:
                model.blocks[step % 2].base.weight.clamp_(-0.3 / step, 0.3 / step)
            if step % 3 == 2:
                with towpath.full_parameters(model):
                    model.embed.weight.mul_(0.9)
    run.end(model, optimizer)


def _codecs_that_come_and_go(run: Training) -> None:
    """Weights are encoded until step 2, and gradients from step 3 on."""
    gradients = {kind: Transport("one-hop", "int8:64", after=3) for kind in ("reduce", "grad_sync")}
    strategy = run.strategy(**gradients, param_sync=Transport("flat", "int8:64", until=2))
    model, optimizer = run.gpt(strategy)
    run.train(model, optimizer)
    run.end(model, optimizer)


CASES: dict[str, Callable[[Training], None]] = {
    case.__name__.removeprefix("_"): case
    for case in (*(_skipped_steps, _tensor_parallelism, _user_writes, _frozen_parameters, _codecs_that_come_and_go),)
}
SYNCED = ("zero1", "paro-iig", "paro-nig", "zero2")  # with a parameter sync between nodes
QUICK = ("tensor_parallelism", "user_writes", "frozen_parameters", "codecs_that_come_and_go")


@pytest.mark.parametrize("form", [Form.MESSAGES, seldom(Form.COLLECTIVES)])
@pytest.mark.parametrize("name", [name if name in QUICK else seldom(name) for name in CASES])
@in_turn(list(product(SYNCED, PRECISIONS)), 1, "kind")
def test_training_is_the_same_to_the_bit(
    world: Worlds, form: Form, name: str, kind: tuple[str, str], whole_product: bool
) -> None:
    world(4).run(_compare, form, name, *kind, 20 if whole_product else 5)


def _compare(form: Form, name: str, label: str, precision: str, steps: int) -> None:
    plain, found = runs = [Training(exactly, form, label, precision, steps) for exactly in (False, True)]
    with pytest.MonkeyPatch.context() as patch, in_form(form):
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        syncs = _note_syncs(patch)
        for run in runs:
            CASES[name](run)
        assert plain.kept.keys() == found.kept.keys() and any(".grad" in key for key in plain.kept)
        for key, expected in plain.kept.items():
            assert torch.equal(_bits(found.kept[key]), _bits(expected)), key
        assert not any(t.transfer.coding for model in plain.models for t in towpath.stats(model).transfers)
        sent = [t for model in found.models for t in towpath.stats(model).transfers if t.transfer.coding]
        for kind in {each.transfer.kind for each in sent}:
            mine = [each for each in sent if each.transfer.kind is kind]
            # Of this size, encoded messages have another length than their values.
            assert sum(t.inter_bytes for t in mine) != sum(t.calls * t.transfer.inter_bytes for t in mine), kind
        assert sent and any(syncs) == any(each.transfer.kind is TransferKind.PARAM_SYNC for each in sent)


def _note_syncs(patch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each slice of an exact parameter sync: whether it has differences."""
    syncs: list[bool] = []
    encode = exact_collectives.encode

    def noting(old: Any, *args: Any) -> Any:
        syncs.append(old is not None)
        return encode(old, *args)

    patch.setattr(exact_collectives, "encode", noting)
    return syncs


# --- loads ------------------------------------------------------------------------------------------------------------


def _load_folder(model: Any, optimizer: optim.Optimizer, folder: Path, values: dict[str, Tensor]) -> None:
    loaded = checkpoint.load(folder, checkpoint.State(model, optimizer))
    assert loaded is not None


def _load_state_dict(model: Any, optimizer: optim.Optimizer, folder: Path, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def _set_model_state_dict(model: Any, optimizer: optim.Optimizer, folder: Path, values: dict[str, Tensor]) -> None:
    checkpoint.set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))


def _load_with_dcp(model: Any, optimizer: optim.Optimizer, folder: Path, values: dict[str, Tensor]) -> None:
    dcp.load(model.state_dict(), checkpoint_id=folder / "dcp")


def _copy_each(model: Any, optimizer: optim.Optimizer, folder: Path, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = values[name]


LOADS = (_load_folder, _load_state_dict, _set_model_state_dict, _load_with_dcp, _copy_each)


@pytest.mark.parametrize("form", [Form.MESSAGES, seldom(Form.COLLECTIVES)])
@in_turn(list(PRECISIONS), 1, "precision")
@on_ranks(2)
def test_a_load_repairs_replicas_that_have_diverged(precision: str, form: Form, tmp_path: Path) -> None:
    """What is sent after a load does not depend on what receivers hold. What is sent later does."""
    folder = tmp_path
    run = Training(True, form, "zero1", precision, 0)
    with pytest.MonkeyPatch.context() as patch, in_form(form):
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        model, optimizer = run.gpt(run.strategy(HALF))
        run.train(model, optimizer, [0, 1])
        values = checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert checkpoint.save(folder, 1, checkpoint.State(model, optimizer)).ok
        dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
        syncs = _note_syncs(patch)
        for number, load in enumerate(LOADS):
            for bucket in (bucket for unit in model.towpath_engine.units for bucket in unit.buckets):
                if dist.get_rank() == 0:
                    bucket.shard.view(torch.uint8).bitwise_xor_(1)
            with torch.no_grad():
                load(model, optimizer, folder, values)
            before = len(syncs)
            run.train(model, optimizer, [10 * number + 2])
            # Collectives are encoded once more, when the optimizer has stepped a unit. Then all hold the same again.
            units = len(model.towpath_engine.units)
            assert syncs[before : before + units] == [False] * units and all(syncs[before + units :]), load
            before = len(syncs)
            run.train(model, optimizer, [10 * number + 3])
            assert before < len(syncs) and all(syncs[before:]), load
