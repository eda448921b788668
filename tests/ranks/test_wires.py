"""`towpath.wires`: FSDP2, HSDP and DDP compute with wires what they compute without, and weights cross nodes seldom.

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
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import towpath
from tests.ranks.models import DEVICE, MODELS
from tests.ranks.server import World, Worlds, on_ranks
from tests.ranks.strategies import seldom
from tests.ranks.twin import error_of
from towpath import Topology, tracing
from towpath.core.strategy import TransferKind
from towpath.errors import ConfigError, MismatchError, ShardError, StepError
from towpath.fsdp.fields import comms_of, param_groups, shards_of

GPT = MODELS["gpt"]  # its embedding is tied to its output layer
FLAT, SQUARE = Topology(2, 1), Topology(2, 2)
SHAPES = (FLAT, SQUARE, seldom(Topology(4, 1)), seldom(Topology(3, 2)))
BF16 = MixedPrecisionPolicy(torch.bfloat16)  # gradients are reduced in bf16, too
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
TOLERANCE = 1e-12


class Training:
    """The GPT under FSDP2, with wires if `wired`. `seen` is what programs compute: it must be the same with wires.

    `shard` shards the model, in place of `fully_shard` on each block and the root.
    """

    def __init__(
        self,
        shape: Topology,
        wired: bool,
        dtype: torch.dtype = torch.float64,
        policy: MixedPrecisionPolicy | None = None,
        options: dict[str, Any] | None = None,
        **wires: Any,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        options = dict(options or {})
        self.model: Any = GPT.make(dtype)
        for part in options.pop("frozen", ()):
            self.model.get_submodule(part).requires_grad_(False)
        kind = options.pop("kind", "fsdp2")
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        else:
            options["mesh"] = _mesh(shape, kind)
            together: Any = [self.model.get_submodule(part) for part in options.pop("together", ())]
            for module in (*([together] if together else ()), *self.model.blocks, self.model):
                fully_shard(module, mp_policy=policy or MixedPrecisionPolicy(), **options)
        if wired:
            towpath.wires(self.model, topology=shape, **wires)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]
        self.seen: list[Tensor] = []

    def loss(self, step: int, micro: int = 0) -> Tensor:
        return GPT.loss(self.model, *GPT.micro_batch(dist.get_rank(), micro, step, self.dtype)).float().double()

    def backward(self, step: int, micro: int = 0) -> None:
        loss = self.loss(step, micro)
        loss.backward()
        self.seen.append(loss.detach())

    def step(self) -> None:
        self.seen += [whole(p.grad) for p in self.model.parameters() if p.grad is not None]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, step: int) -> None:
        with torch.no_grad():
            self.seen.append(self.loss(step, 7))
        self.model.reshard()  # after a forward pass alone, the root stays whole

    def calls(self, kind: TransferKind = TransferKind.PARAM_SYNC) -> Counter[str]:
        """The transfers of a kind so far, by unit."""
        found = Counter[str]()
        for comm in self.model.towpath_wires.comms:
            comm.queues.finish()  # what is submitted is counted when it has run
        for stats in towpath.stats(self.model).transfers:
            if stats.transfer.kind is kind:
                found[stats.transfer.payload.unit] += stats.calls  # pyright: ignore
        return found


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def _mesh(shape: Topology, kind: str) -> Any:
    if kind == "hsdp":
        return init_device_mesh(DEVICE.type, (shape.nodes, shape.ranks_per_node), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(DEVICE.type, (shape.world,))


def compare(program: Callable[[Training], None], shape: Topology, tolerance: float, **options: Any) -> Training:
    """Run a program without wires and with them. Return the training with wires."""
    wires = options.pop("wires", {})
    theirs, ours = Training(shape, False, **options), Training(shape, True, **options, **wires)
    for training in (theirs, ours):
        program(training)
        training.seen += [whole(p) for p in training.model.parameters()]
    assert len(theirs.seen) == len(ours.seen)
    for expected, found in zip(theirs.seen, ours.seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    return ours


# --- weights, to the bit ----------------------------------------------------------------------------------------------


class Both:
    """Gathers with wires and with FSDP2's own all-gather, and compares all weights."""

    def __init__(self, wired: Any, counts: Counter[str]) -> None:
        self.wired, self.counts, self.allocate = wired, counts, wired.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        theirs, mine = torch.empty_like(output_tensor), input_tensor.clone()
        work = self.wired(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        self.wired.stock(output_tensor=theirs, input_tensor=mine, group=group)
        assert torch.equal(output_tensor.view(torch.uint8), theirs.view(torch.uint8)), self.wired.unit.name
        self.counts[self.wired.unit.name] += 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gathered_weight_is_fsdp2_s_to_the_bit(world: Worlds, shape: Topology, whole_product: bool) -> None:
    world(shape.world).run(_gather_both, shape, 20 if whole_product else 3)


def _gather_both(shape: Topology, steps: int) -> None:
    for policy in (None, BF16, MIXED):
        training, counts = Training(shape, True, torch.float32, policy), Counter[str]()
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Both(comms_of(module)[0], counts))  # pyright: ignore
        for step in range(steps):
            for micro in range(2):
                training.backward(step, micro)
            training.step()
        assert counts == {"": 2 * steps, "blocks.0": 4 * steps, "blocks.1": 4 * steps}
        # One before the first step, and one after each.
        assert set(training.calls().values()) == {steps + 1}, training.calls()


# --- losses and gradients ---------------------------------------------------------------------------------------------


def _plain(training: Training) -> None:
    for step in range(3):
        training.backward(step)
        training.step()


def _accumulate(training: Training, every: bool = False) -> None:
    for step in range(2):
        for micro in range(3):
            training.model.set_requires_gradient_sync(every or micro == 2)
            training.backward(step, micro)
        training.step()


def _accumulate_with_sync(training: Training) -> None:
    _accumulate(training, every=True)


def _two_optimizers(training: Training) -> None:
    parameters = list(training.model.parameters())
    training.optimizers = [torch.optim.SGD(p, lr=0.1, momentum=0.9) for p in (parameters[::2], parameters[1::2])]
    _plain(training)


def _one_of_two_optimizers(training: Training) -> None:
    """Only the first block is stepped."""
    training.optimizers = [torch.optim.SGD(training.model.blocks[0].parameters(), lr=1e-1)]
    _plain(training)


def _clip(training: Training) -> None:
    for step in range(3):
        training.backward(step)
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 1e-2)
        training.seen.append(whole(norm))
        training.step()


def _scale(training: Training) -> None:
    """GradScaler steps through a hook of the optimizer, and leaves out the step with an infinite gradient."""
    scaler = torch.amp.grad_scaler.GradScaler(DEVICE.type, init_scale=4.0)
    [optimizer] = training.optimizers
    for step in range(3):
        loss = training.loss(step)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        training.seen.append(loss.detach())


def _swap(training: Training, values_of: Callable[[Tensor], Tensor]) -> None:
    """Evaluate with other weights after each step, as those who keep an average of them do."""
    for step in range(2):
        training.backward(step)
        training.step()
        with torch.no_grad():
            kept = [p.detach().clone() for p in training.model.parameters()]
            for p in training.model.parameters():
                values_of(p).mul_(0.5)
            training.evaluate(step)
            for p, k in zip(training.model.parameters(), kept, strict=True):
                values_of(p).copy_(values_of(k))
        training.evaluate(step)


def _swap_in_place(training: Training) -> None:
    _swap(training, lambda p: p)


def _load(training: Training) -> None:
    for step in range(2):
        training.backward(step)
        training.step()
        training.model.load_state_dict({k: v * 0.9 for k, v in training.model.state_dict().items()})
        training.evaluate(step)


def _evaluate(training: Training) -> None:
    for step in range(2):
        training.backward(step)
        training.step()
        training.evaluate(step)
        before = training.calls() if hasattr(training.model, "towpath_wires") else None
        training.evaluate(step)
        if before is not None:
            assert training.calls() == before, "an evaluation changes nothing, and sends no weights"


PROGRAMS: dict[str, tuple[Callable[[Training], None], dict[str, Any]]] = {
    "plain": (_plain, {}),
    "not resharded": (_plain, {"reshard_after_forward": False}),
    "resharded to two": (_plain, {"reshard_after_forward": 2}),
    "offloaded": (_plain, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "frozen": (_plain, {"frozen": ["blocks.0", "tokens", "blocks.1.qkv"]}),
    "accumulate": (_accumulate, {}),
    "accumulate with sync": (_accumulate_with_sync, {}),
    "two optimizers": (_two_optimizers, {}),
    "one of two optimizers": (_one_of_two_optimizers, {}),
    "clip": (_clip, {}),
    "scale": (_scale, {}),
    "swap in place": (_swap_in_place, {}),
    "load": (_load, {}),
    "evaluate": (_evaluate, {}),
}


# Each on one of both shapes in `make test`.
@pytest.mark.parametrize(
    "name, shape",
    [
        (seldom if (number + (shape == FLAT)) % 2 else pytest.param)(name, shape, id=f"{name} {shape}")
        for number, name in enumerate(PROGRAMS)
        for shape in (FLAT, SQUARE)
    ],
)
def test_programs_compute_what_they_compute_without_wires(world: Worlds, name: str, shape: Topology) -> None:
    world(shape.world).run(_compare_program, name, shape)


def _compare_program(name: str, shape: Topology) -> None:
    program, options = PROGRAMS[name]
    # Two numbers have one sum. More have one for each order.
    compare(program, shape, 0.0 if shape == FLAT else TOLERANCE, options=options)


def test_a_dcp_checkpoint_loads_with_wires_and_without(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_and_load, tmp_path)


def _save_and_load(folder: Path) -> None:
    """Each of two trainings loads the other's checkpoint, and goes on as the one that saved it."""
    trainings = [Training(FLAT, wired) for wired in (False, True)]

    def states(training: Training) -> dict[str, Any]:
        model, optimizer = state_dict.get_state_dict(training.model, training.optimizers)
        return {"model": model, "optimizer": optimizer}

    for number, training in enumerate(trainings):
        for step in range(1 + number):
            training.backward(step)
            training.step()
        dcp.save(states(training), checkpoint_id=folder / str(number))  # pyright: ignore
    saved = [[whole(p) for p in training.model.parameters()] for training in trainings]
    for number, training in enumerate(trainings[::-1]):
        loaded = states(training)
        dcp.load(loaded, checkpoint_id=folder / str(number))  # pyright: ignore
        state_dict.set_state_dict(
            training.model,
            training.optimizers,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        for expected, found in zip(saved[number], training.model.parameters(), strict=True):
            assert torch.equal(whole(found), expected)
        training.seen.clear()
        training.backward(5)
        training.step()
        fresh = Training(FLAT, False)
        with torch.no_grad():
            for p, value in zip(fresh.model.parameters(), saved[number], strict=True):
                p.copy_(distribute_tensor(value.detach(), p.device_mesh, p.placements))
        fresh.backward(5)
        fresh.step()
        assert all(map(torch.equal, training.seen, fresh.seen))


@on_ranks(2)
def test_modules_that_are_sharded_together_are_gathered_once() -> None:
    """torchtitan calls `fully_shard([norm, head])`, which makes one group of the parameters of several modules."""

    def program(training: Training) -> None:
        _accumulate_with_sync(training)
        training.evaluate(5)

    ours = compare(program, FLAT, 0.0, options={"together": ["tokens", "norm", "head"]})
    names = "", "tokens", "blocks.0", "blocks.1"
    assert ours.calls() == dict.fromkeys(names, 3)
    assert ours.calls(TransferKind.GRAD_SYNC) == dict.fromkeys(names, 6)
    towpath.wires(ours.model, False)
    assert type(comms_of(ours.model.head)[0]).__module__.startswith("torch.")


# --- reductions -------------------------------------------------------------------------------------------------------


def _gradients(training: Training) -> list[Tensor]:
    training.backward(0)
    return [whole(p.grad) for p in training.model.parameters()]


@on_ranks(4)
def test_gradients_are_averaged_summed_and_scaled() -> None:
    """float64 is summed. float32 is averaged, or summed after a factor, which stock FSDP2 cannot do over gloo."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, TOLERANCE)):
        theirs, ours = (Training(SQUARE, wired, dtype) for wired in (False, True))
        expected = _gradients(theirs)
        for factor in (1.0, 4.0, 6.0):
            for is_sum in (False, True):
                for module in (ours.model, *ours.model.blocks):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(is_sum)
                ours.optimizers[0].zero_grad()
                for mean, found in zip(expected, _gradients(ours), strict=True):
                    torch.testing.assert_close(found, mean * 4 / factor, rtol=tolerance, atol=tolerance)


@on_ranks(2)
def test_a_maximum_of_gradients_is_refused() -> None:
    training = Training(FLAT, True)
    _, reduce = comms_of(training.model)
    with pytest.raises(StepError, match=r"sums, averages, or scales.*MAX"):
        reduce(output_tensor=torch.ones(1), input_tensor=torch.ones(2), group=dist.group.WORLD, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "ddp"])
@on_ranks(4)
def test_codecs_of_gradients_round_and_feed_back(kind: str) -> None:
    """The same gradient again and again: its mean comes closer to the exact one, as feedback makes up for rounding."""
    theirs = Training(SQUARE, False, torch.float32, options={"kind": kind})
    exact = torch.cat([g.flatten() for g in _gradients(theirs)])
    for codec, most in (("int8", 0.02), ("int4:64", 0.3)):
        ours, errors, mean = Training(SQUARE, True, torch.float32, None, {"kind": kind}, gradients=codec), [], 0.0
        for turn in range(1, 9):
            ours.model.zero_grad()
            mean = mean + torch.cat([g.flatten() for g in _gradients(ours)])
            errors.append(float((mean / turn - exact).norm() / exact.norm()))
        assert 0 < errors[0] < most, (codec, errors)
        # What is rounded a second time, as the sum is shared out, is fed back, too.
        assert errors[-1] < errors[0] * 0.25, (codec, errors)
        # What is rounded before each hop, and before sums are shared out, by parameter. Pieces are padded to blocks.
        kept = towpath.stats(ours.model).memory_bytes["feedback"] / len(exact)
        assert 1 <= kept / {"fsdp2": 4 / 2, "hsdp": 4 / 2 + 4 / 4, "ddp": 4 + 4 / 2 + 4 / 4}[kind] < 2, kept


class Adapters(nn.Module):
    """Two layers of one size, of which one is trained at a time: the other one is frozen, or not used."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor, uses_large: bool) -> Tensor:
        return self.large(x).sum() * 1e3 if uses_large else self.small(x).sum() * 1e-3


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
@on_ranks(2)
def test_feedback_is_not_added_to_other_parameters_of_a_module(kind: str) -> None:
    for freezes in (False, True):
        torch.manual_seed(0)
        model: Any = Adapters()
        fully_shard(model, mesh=_mesh(FLAT, kind))
        towpath.wires(model, gradients="int8", topology=FLAT)
        for uses_large in (True, False, True, False):
            model.zero_grad()
            if freezes:
                model.large.requires_grad_(uses_large)
                model.small.requires_grad_(not uses_large)
            model(torch.randn(8, 16), uses_large).backward()
            if not uses_large:
                assert 0 < float(whole(model.small.weight.grad).abs().max()) < 0.1, "not the large one's rounding error"


# --- HSDP and DDP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hsdp", "ddp"])
@on_ranks(4)
def test_replicas_compute_what_they_compute_without_wires(kind: str) -> None:
    _compare_replicas(kind)


def _compare_replicas(kind: str) -> None:
    ours = compare(_accumulate_replicas, SQUARE, TOLERANCE, options={"kind": kind})
    calls = ours.calls(TransferKind.GRAD_SYNC)
    # After the first step, DDP has other buckets.
    assert len(calls) > 2 and max(calls.values()) == calls[next(iter(calls))] == 2, calls
    assert not ours.calls()


def _accumulate_replicas(training: Training) -> None:
    for step in range(2):
        for micro in range(2):
            if isinstance(training.model, DistributedDataParallel):
                training.model.require_backward_grad_sync = bool(micro)  # what `no_sync` sets
            else:
                training.model.set_requires_all_reduce(bool(micro))
            training.backward(step, micro)
        training.step()


@on_ranks(2)
def test_two_replicas_compute_the_same_bits() -> None:
    for kind in ("hsdp", "ddp"):
        compare(_accumulate_replicas, FLAT, 0.0, options={"kind": kind}, dtype=torch.float32)


# --- what crosses, and who knows --------------------------------------------------------------------------------------


@on_ranks(4)
def test_frozen_weights_cross_once_and_others_once_a_step() -> None:
    """Stats count transfers, and a trace has the same ones."""
    training = Training(SQUARE, True, torch.float32, BF16, {"frozen": ["blocks.0"]})
    with tracing.trace(training.model) as trace:
        _accumulate_with_sync(training)
    assert training.calls() == {"": 3, "blocks.0": 1, "blocks.1": 3}
    assert training.calls(TransferKind.GATHER) == {"": 6, "blocks.0": 12, "blocks.1": 12}
    assert training.calls(TransferKind.GRAD_SYNC) == {"": 6, "blocks.1": 6}
    stats = towpath.stats(training.model)
    # In bf16, two bytes for each parameter of one of two columns.
    held = sum(2 * 2 * len(shard) for m in (training.model, *training.model.blocks) for shard in shards_of(m))
    assert held <= stats.memory_bytes["weights of the column"] <= 2 * held
    assert not stats.host_memory_bytes
    assert trace.intervals


@on_ranks(2)
def test_weights_held_on_the_host_train_alike() -> None:
    _compare_held_on_host(FLAT)


def _compare_held_on_host(shape: Topology) -> None:
    compare(_plain, shape, 0.0 if shape == FLAT else TOLERANCE, wires={"hold": "host"})


# --- wires that come and go -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wires_come_go_and_come_again_in_the_middle() -> None:
    for kind in ("fsdp2", "hsdp", "ddp"):
        theirs, ours = (Training(FLAT, wired, options={"kind": kind}) for wired in (False, True))
        stock = comms_of(theirs.model) if kind != "ddp" else None
        for step in range(5):
            if step == 1:  # twice is once
                towpath.wires(ours.model, topology=FLAT)
            if step == 2:
                towpath.wires(ours.model, False)
                assert not hasattr(ours.model, "towpath_wires")
                if stock is not None:
                    assert [type(each) for each in comms_of(ours.model)] == [type(each) for each in stock]
            if step == 4:  # after a step
                towpath.wires(ours.model, topology=FLAT)
            for training in (theirs, ours):
                training.backward(step)
                training.step()
        assert all(map(torch.equal, theirs.seen, ours.seen)), kind
        if kind != "ddp":
            towpath.wires(ours.model, False)
            towpath.wires(ours.model, False)


@on_ranks(2)
def test_two_models_with_wires_train_alternately() -> None:
    expected = Training(FLAT, False)
    _plain(expected)
    both = [Training(FLAT, True), Training(FLAT, True)]
    for step in range(3):
        losses = [training.loss(step) for training in both]
        sum(losses[1:], losses[0]).backward()
        for training, loss in zip(both, losses, strict=True):
            training.seen.append(loss.detach())
            training.step()
    for training in both:
        assert all(map(torch.equal, expected.seen, training.seen))


# --- misuse -----------------------------------------------------------------------------------------------------------


def _write(training: Training) -> None:
    with torch.no_grad():
        training.model.blocks[0].qkv.weight.mul_(1.5)


def _load_state_dict(training: Training) -> None:
    training.model.load_state_dict({k: v * 0.9 for k, v in training.model.state_dict().items()})


def _reorder(training: Training) -> None:
    blocks = training.model.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def _step_an_optimizer(training: Training) -> None:
    for p in training.model.parameters():
        p.grad = torch.zeros_like(p)
    training.optimizers[0].step()


MISUSES = (_write, _step_an_optimizer, _reorder, seldom(_load_state_dict))


@on_ranks(2)
def test_writes_through_data_are_an_error_on_all_ranks() -> None:
    """PyTorch does not count them. One rank may hold all of the values that have changed."""
    for evaluates in (False, True):
        training = Training(FLAT, True)
        training.backward(0)
        training.step()
        if dist.get_rank() == 1:
            training.model.blocks[0].qkv.weight.data.to_local().mul_(1.5)
        with pytest.raises(StepError, match=r"blocks\.0 were written through `\.data`.*p\.mul_\(1\)"):
            training.evaluate(1) if evaluates else (training.backward(1), training.step())


@on_ranks(2)
def test_weights_that_are_touched_after_a_write_through_data_are_sent() -> None:
    def program(training: Training) -> None:
        for step in range(3):
            training.backward(step)
            training.step()
            for p in training.model.parameters():
                p.data.clamp_(-0.1, 0.1)
                with torch.no_grad():
                    p.mul_(1)

    compare(program, FLAT, 0.0)


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__.strip("_"))
def test_what_one_rank_alone_does_is_an_error_on_all(misuse: Callable[[Training], None]) -> None:
    with World(2) as ranks:
        for rank, text in enumerate(ranks.run(_misuse, FLAT, misuse)):
            assert text.startswith(f"rank {rank}: the ranks ran different"), text


@pytest.mark.parametrize("misuse", (_write, seldom(_step_an_optimizer)), ids=lambda misuse: misuse.__name__.strip("_"))
def test_ranks_that_wait_for_one_that_has_failed_learn_the_reason(misuse: Callable[[Training], None]) -> None:
    """A rank of the other node has sent what its peers have sent. It sees no difference itself."""
    with World(4) as ranks:
        for text in ranks.run(_misuse, SQUARE, misuse):
            assert "the ranks ran different" in text, text


def _misuse(shape: Topology, misuse: Callable[[Training], None]) -> str:
    training = Training(shape, True)
    training.backward(0)
    training.optimizers[0].step()
    if dist.get_rank() == 1:
        if misuse is _step_an_optimizer:  # what it steps has no gradient on the other rank
            return error_of(lambda: misuse(training))
        misuse(training)

    def go_on() -> None:
        for step in range(1, 4):
            training.backward(step)
            training.optimizers[0].step()

    return error_of(go_on)


@on_ranks(2)
def test_arguments_that_differ_or_are_unknown_are_refused_on_every_rank() -> None:
    training, rank = Training(FLAT, False), dist.get_rank()
    codecs, holds, shapes = ((None, "int8"), (None, "host"), (FLAT, Topology(1, 2)))
    for different in ({"gradients": codecs[rank]}, {"hold": holds[rank]}, {"topology": shapes[rank]}):
        with pytest.raises(MismatchError, match=r"rank 0 has .*, rank 1 has .*call towpath.wires\(\) alike"):
            towpath.wires(training.model, **({"topology": FLAT} | different))  # pyright: ignore
    for wrong, words in (
        ({"gradients": "int9"}, "unknown codec 'int9'"),
        ({"hold": "disk"}, "hold= is 'device', 'host' or None; got True, 'disk'"),
        ({"exact": "yes"}, "exact= is a bool"),
    ):
        with pytest.raises(ConfigError, match=words):
            towpath.wires(training.model, **({"topology": FLAT} | wrong))  # pyright: ignore
    with pytest.raises(ShardError, match=r"Linear has no module that FSDP2 has sharded.*Call fully_shard\(\) first"):
        towpath.wires(nn.Linear(2, 2))
    for wrong in (None, [training.model]):
        with pytest.raises(ConfigError, match=r"expected one model.*got .*(list|NoneType).*Call it for each"):
            towpath.wires(wrong)  # pyright: ignore
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: bucket)  # pyright: ignore
    with pytest.raises(ShardError, match="has a communication hook"):
        towpath.wires(hooked)
    towpath.wires(training.model, topology=Topology(1, 2))  # of one node: nothing to send
    assert not towpath.stats(training.model).transfers
    _plain(training)


@pytest.mark.skipif(not hasattr(FSDPMeshInfo, "is_spmd_mesh"), reason="a module of this PyTorch has one mesh")
@on_ranks(4)
def test_a_module_over_several_meshes_computes_what_it_computes_without_wires() -> None:
    """torchtitan shards a block's experts over other ranks than the rest of the block."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("a", "b"))
    everyone = init_device_mesh(DEVICE.type, (4,))
    seen: list[list[Tensor]] = []
    for wired in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DEVICE, torch.float64)
        for layer in model:
            meshes = FSDPMeshInfo(mesh["a"], 0), FSDPMeshInfo(everyone, 0)
            placed = {
                p: ShardPlacementResult(Shard(0), info) for p, info in zip(layer.parameters(), meshes, strict=True)
            }
            fully_shard(layer, mesh=everyone, shard_placement_fn=placed.get)
        fully_shard(model, mesh=everyone)
        stock = comms_of(param_groups(model[0])[1])
        if wired:
            towpath.wires(model, topology=SQUARE)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for step in range(4):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(
                DEVICE, torch.float64
            )
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        seen.append(losses)
        if wired:
            stats = towpath.stats(model).transfers
            sent = {s.transfer.payload.unit for s in stats if s.transfer.kind.value == "param_sync"}  # pyright: ignore
            assert sent == {"0", "0 (mesh 2)", "1", "1 (mesh 2)"}
            towpath.wires(model, False)
            assert comms_of(param_groups(model[0])[1]) == stock
    for expected, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
