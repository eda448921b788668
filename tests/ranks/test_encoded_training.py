"""Models trained over codecs: each element of what computes, and of the gradients, is where rounding puts it.

Weights are compared with an oracle to the bit. Gradients are compared with those of the same rounded weights in one
process, which computes every rank's and micro-step's. Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import towpath
from tests.ranks.models import DEVICE, MODELS, GPTBlock
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom
from towpath.codecs.kernels import plain
from towpath.core import routes
from towpath.core.formats import Codec
from towpath.core.routes import Op, hops_of
from towpath.core.strategy import GRADIENTS, TransferKind
from towpath.core.unit_plan import BucketPlan
from towpath.topology.cluster import Extent, Topology

Loss = Callable[[nn.Module, int, int], Tensor]  # of a rank and a micro-step

SQUARE = Topology(2, 2)
MICRO_STEPS = 2

TRAINED: dict[str, dict[str, Any]] = {
    "zero++": {},
    "qwz": {"weights": "int8:32"},
    "qgz": {"gradients": "int8:32+hadamard", "feedback": "both"},
    "mics": {"gradients": "int8:32"},
    "paro-iig": {"gradients": "int8:32", "weights": "int8:32", "feedback": "first"},
    "paro-nig": {"gradients": "int8:32", "weights": "bf16"},
    "ddp": {"gradients": "int8:32+stochastic"},
    "hpz": {"gradients": "int8", "weights": "int8", "group": Extent(1)},
}


class TinyEmbedding(nn.Module):
    """As RWKV begins: an embedding of order 1e-9, and a norm that makes it large at once. Its gradients are of order
    1e9, and all others of order 1; one block of 256 would hold the embedding, the norms, and half a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 12)
        nn.init.uniform_(self.tokens.weight, -1e-9, 1e-9)
        self.norm = nn.LayerNorm(12, eps=1e-24)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(GPTBlock(12, 2) for _ in range(2))
        self.head = nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gain * self.norm(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _tiny() -> nn.Module:
    torch.manual_seed(3)
    return TinyEmbedding()


def _tiny_loss(model: nn.Module, rank: int, micro: int) -> Tensor:
    ids = torch.randint(0, 8, (2, 6), generator=torch.Generator().manual_seed(10 * rank + micro)).to(DEVICE)
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _gpt() -> nn.Module:
    return MODELS["gpt"].make(torch.float32)


def _gpt_loss(model: nn.Module, rank: int, micro: int) -> Tensor:
    return MODELS["gpt"].loss(model, *MODELS["gpt"].micro_batch(rank, micro, 0, torch.float32))


# --- weights ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_weights_that_compute_are_rounded_within_their_own_parameter_alone() -> None:
    for name, options in {
        "zero++": {},
        "qwz": {"weights": "int8:4096+hadamard"},
        "paro-iig": {"weights": "int8"},
    }.items():
        for build in (_tiny, _gpt):
            strategy = towpath.strategy(name, SQUARE, **options)
            model: Any = towpath.shard(build(), strategy)
            assert tuple(u.plan for u in model.towpath_engine.units) == towpath.schedule(strategy, build()).plans
            _write(model)
            codecs, masters = _codecs(model), _masters(model)
            with towpath.full_parameters(model):
                for parameter, found in model.named_parameters():
                    codec, true = codecs[parameter][0], masters[parameter]
                    assert codec is not None
                    assert torch.equal(found, _through(codec, true)), (name, parameter)
                    # Half a code of its own largest value; a rotation makes the largest of 32 up to √32 times as large,
                    # and an error as much larger.
                    most = true.abs().max() * (32 if codec.hadamard else 1) * 0.5 / 127
                    assert (found - true).abs().max() <= most * (1 + 1e-6), (name, parameter)


def _write(model: nn.Module) -> None:
    """As an optimizer does: what is published in a codec is not so before."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)


def _codecs(model: Any) -> dict[str, tuple[Codec | None, Codec | None, BucketPlan]]:
    """By parameter: of its weights, of its gradients, and its plan."""
    found: dict[str, tuple[Codec | None, Codec | None, BucketPlan]] = {}
    for unit in model.towpath_engine.units:
        for bucket in unit.buckets:
            weights = _codec_of(bucket.plan, TransferKind.PARAM_SYNC, TransferKind.GATHER)
            gradients = _codec_of(bucket.plan, *GRADIENTS)
            found |= {place.names[0]: (weights, gradients, bucket.plan) for place in bucket.layout.places}
    return found


def _codec_of(plan: BucketPlan, *kinds: TransferKind) -> Codec | None:
    return next((t.transport.encoding for kind in kinds for t in plan.transfers[kind] if t.transport.encoding), None)


def _masters(model: Any) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def _through(codec: Codec | None, values: Tensor) -> Tensor:
    """A parameter encoded and decoded by itself, with zeros after it."""
    if codec is None:
        return values
    padded = F.pad(values.flatten(), (0, -values.numel() % codec.grain))
    message, found = torch.empty(codec.encoded_bytes(padded.numel()), dtype=torch.uint8), torch.empty_like(padded)
    plain.encode(codec, padded, message)
    plain.decode(codec, message, found)
    return found[: values.numel()].view_as(values)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SQUARE, seldom(Topology(3, 1))], ids=str)
def test_gradients_are_the_true_mean_element_by_element(world: Worlds, shape: Topology, whole_product: bool) -> None:
    world(shape.world).run(_one_step_of_each, shape, whole_product)


def _one_step_of_each(shape: Topology, whole_product: bool) -> None:
    """Biases, norms, matrices and tied embeddings; over micro-steps. Each meets one of the two models in turn, and the
    preset with most codecs both. What other presets have too is left to `make parity`."""
    models = ((_gpt, _gpt_loss), (_tiny, _tiny_loss))
    left_out = () if whole_product else ("qwz", "mics")
    for number, (name, options) in enumerate((n, o) for n, o in TRAINED.items() if n not in left_out):
        both = whole_product or name == "zero++"
        for build, loss in models if both else models[number % 2 :][:1]:
            model: Any = towpath.shard(build(), towpath.strategy(name, shape, **options))
            _check_accumulation(model, build().to(DEVICE), loss, shape)


def _check_accumulation(model: Any, plain: nn.Module, loss: Loss, shape: Topology) -> None:
    """One accumulation of `model`; in `plain`, all ranks' with the weights that compute here.

    The first rank alone judges: that all have the same bits is asked besides.
    """
    _write(model)
    _leave_noise_in_gradient_slots(model)
    codecs, masters = _codecs(model), _masters(model)
    for micro in range(MICRO_STEPS):
        with nullcontext() if micro == MICRO_STEPS - 1 else model.no_sync():
            (loss(model, dist.get_rank(), micro) / MICRO_STEPS).backward()
    judges = dist.get_rank() == 0
    each: dict[str, list[Tensor]] = {}
    if judges:
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(_through(codecs[name][0], masters[name]))
        each = _gradients_of_all(plain, loss, shape)
    for name, parameter in model.named_parameters():
        _, codec, plan = codecs[name]
        found = parameter.grad.full_tensor()
        label = f"{model.towpath_engine.strategy.name} {name}"
        everyones = [torch.empty_like(found) for _ in range(shape.world)]
        dist.all_gather(everyones, found.contiguous())
        assert all(torch.equal(found, other) for other in everyones), label
        if judges:
            _check_gradient(found.flatten().double() * shape.world, each[name], codec, plan, shape, label)


def _gradients_of_all(plain: nn.Module, loss: Loss, shape: Topology) -> dict[str, list[Tensor]]:
    """By parameter: every rank's and micro-step's."""
    each: dict[str, list[Tensor]] = {}
    for rank in range(shape.world):
        for micro in range(MICRO_STEPS):
            plain.zero_grad()
            (loss(plain, rank, micro) / MICRO_STEPS).backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                each.setdefault(name, []).append(parameter.grad.flatten().double())
    return each


def _leave_noise_in_gradient_slots(model: Any) -> None:
    """As another unit's gradients would: what lies between parameters must not share a block with them."""
    engine = model.towpath_engine
    for slot in engine.machine.gradient_slots.all:
        for buffer in engine.gradients.of(slot).values():
            buffer.fill_(1e30)


def _check_gradient(
    found: Tensor, each: list[Tensor], codec: Codec | None, plan: BucketPlan, shape: Topology, label: str
) -> None:
    """`found`: the sum of `each`, in double precision but for what a codec rounds."""
    error, largest = found - sum(each), torch.stack([_largest(g, codec) for g in each])  # [ranks · micro-steps, blocks]
    # Both compute in float32: some hundred terms, in another order; a softmax takes away what nearly cancels.
    arithmetic = 1e-4 * max(g.abs().max().item() for g in each)
    if codec is None:
        assert error.abs().max() <= arithmetic, label
        return
    # A rounding errs by half a code of the block's largest; a whole one where it is random. What is summed and rounded
    # again is at most as large as all together.
    step = (1.0 if codec.stochastic else 0.5) / codec.largest if codec.largest else 2**-8
    error = _in_blocks(error, codec)  # [blocks, block]
    roundings = _roundings(plan)
    most = roundings * step * (1 + step) ** roundings * largest.sum(0) + arithmetic
    assert bool((error.abs().amax(1) <= most).all()), (label, (error.abs().amax(1) / most).max().item())
    # And these errors, spread over ±step, do not all have one sign: a rank's whole gradient is larger than their sum.
    variance = step**2 / 3 * (largest.square().sum(0) + (roundings - 1) * largest.sum(0).square() / shape.nodes)
    limit = 1.25 * (variance.sum() * error.shape[1]).sqrt() + arithmetic * error.numel() ** 0.5
    assert error.norm() <= limit, (label, (error.norm() / limit).item())


def _roundings(plan: BucketPlan) -> int:
    encoded = [t for kind in GRADIENTS for t in plan.transfers[kind] if t.transport.encoding]
    return sum(len(hops_of(t.route, t.grid)) + (t.move.op is Op.ALL_REDUCE) for t in encoded)


def _in_blocks(values: Tensor, codec: Codec) -> Tensor:
    """As the codec sees them: rotated, if it does so. Its scales are of blocks."""
    padded = F.pad(values, (0, -values.numel() % max(codec.grain, 32)))
    return (plain.rotated(padded) if codec.hadamard else padded).view(-1, max(codec.grain, 32))


def _largest(values: Tensor, codec: Codec | None) -> Tensor:
    return values[:0] if codec is None else _in_blocks(values, codec).abs().amax(1)


# --- as it is shipped ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A slice of its matrix, on four ranks, is a mebibyte of int8: as many parts as there can be, of 256 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2048, 2048)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[0](x))


def _wide_loss(model: nn.Module, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    return (model(torch.randn(4, 2048, generator=generator).to(DEVICE)) - 0.5).square().mean()


def test_zero_plus_plus_as_it_is_shipped_trains_on_true_gradients(world: Worlds, whole_product: bool) -> None:
    """Its own blocks of 256, and slices in parts of the size that the routes have by themselves."""
    world(4).run(_train_as_shipped, routes.SMALLEST_PART_BYTES, 2 if whole_product else 1)


def _train_as_shipped(smallest_part_bytes: int, steps: int) -> None:
    before, routes.SMALLEST_PART_BYTES = routes.SMALLEST_PART_BYTES, smallest_part_bytes
    try:
        torch.manual_seed(5)
        plain = Wide().to(DEVICE)
        model: Any = Wide().to(DEVICE)
        model.load_state_dict(plain.state_dict())
        model = towpath.shard(model, towpath.strategy("zero++", SQUARE))
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        for _ in range(steps):
            _check_accumulation(model, plain, _wide_loss, SQUARE)
            optimizer.step()
            optimizer.zero_grad()
        parts = {(t.kind, t.parts, str(t.transport.encoding)) for t in towpath.stats(model).last_step}
        assert {(TransferKind.GATHER, 4, "int8:256"), (TransferKind.REDUCE, 2, "int4:256")} <= parts
    finally:
        routes.SMALLEST_PART_BYTES = before
