"""What tensor-parallel ranks of a stage all have, each of them sends a share of, and those of the next stage gather.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import towpath
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.test_pipeline import TOKENS, WIDTH, Block, Plain, _loss, _tensor_parallel, train_beside
from tests.ranks.test_pipeline_layouts import _parallel_end, _tied_ends
from towpath.core.routes import Op
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.core.units import StageOutput
from towpath.errors import StepError
from towpath.pipeline import Compression, Pipeline, messages
from towpath.pipeline.messages import Encoding, SendEncoder

MICRO_BATCHES = 4


def _mesh(copies: int = 1) -> DeviceMesh:
    return init_device_mesh("cpu", (2, copies, 2), mesh_dim_names=("pp", "dp", "tp"))


def _made(stages: list[Any], mesh: DeviceMesh, rows: int = TOKENS, **options: Any) -> Pipeline:
    example = torch.empty(rows, WIDTH).double()
    options = {"micro_batches": MICRO_BATCHES, "loss": _loss, "units": [Block], "example": example} | options
    return Pipeline(stages, "ddp", mesh=mesh, **options)


def _rows(count: int = MICRO_BATCHES * TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its target, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def _shares(pipeline: Pipeline) -> list[int]:
    return [tensor.shares for sent in pipeline._sent for tensor in sent]


# --- bytes and collectives -------------------------------------------------------------------------------------------

EVERY = Compression("low-rank:2", Transport(codec="int8", feedback="first"), every_gradient=True)


@pytest.mark.parametrize("packed", [Compression(), EVERY], ids=["plain", "encoded"])
@in_turn(["GPipe", "1F1B", "Interleaved1F1B"], 1, "schedule")
def test_a_message_is_two_shares_and_one_gather(world: Worlds, schedule: str, packed: Compression) -> None:
    found = world(4).run(_counted, schedule, packed)
    assert sum(sent for sent, _, _ in found) == found[0][2]["sent"]
    assert sum(gathered for _, gathered, _ in found) == found[0][2]["gathers"]


def _counted(schedule: str, packed: Compression) -> tuple[int, int, dict[str, int]]:
    """The bytes that this rank sends in the second step, what it gathers, and both for all ranks as planned."""
    mesh = _mesh()
    count = 4 if "Interleaved" in schedule else 2
    stages = [partial(_in_float32, seed, mesh["tp"]) for seed in range(count)]
    options: dict[str, Any] = {"schedule": schedule, "compression": packed, "example": torch.empty(TOKENS, WIDTH)}
    pipeline = _made(stages, mesh, **options)
    sent, gathered, gather = [0], list[int](), messages.all_gather_single
    for stage in pipeline._stages:
        for kind in ("fwd", "bwd"):
            setattr(stage, f"get_{kind}_send_ops", _weighed(getattr(stage, f"get_{kind}_send_ops"), sent))

    def noted(region: torch.Tensor, share: torch.Tensor, group: Any) -> Any:
        gathered.append(region.numel() // share.numel())
        return gather(region, share, group)

    x, y = (each.float() for each in _rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "all_gather_single", noted)
        for _ in range(2):
            sent[0] = 0
            gathered.clear()
            pipeline.step(x, target=y)
    assert set(gathered) == {2}
    kinds = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)
    planned = [t for t in pipeline.schedule(towpath.Topology(2, 2), step=1).transfers if t.kind in kinds]
    sends, gathers = ([t for t in planned if t.move.op is op] for op in (Op.SEND, Op.ALL_GATHER))
    assert all(t.inter_bytes == 0 for t in gathers) and len(sends) == 2 * len(gathers)
    return sent[0], len(gathered), {"sent": sum(t.inter_bytes for t in sends), "gathers": 2 * len(gathers)}


def _in_float32(seed: int, mesh: DeviceMesh) -> nn.Module:
    return _tensor_parallel(seed, mesh).float()


def _weighed(inner: Any, sent: list[int]) -> Any:
    def ops(micro_batch: int) -> Any:
        made = inner(micro_batch)
        sent[0] += sum(op.tensor.nbytes for op in made)
        return made

    return ops


# --- exactness -------------------------------------------------------------------------------------------------------


def test_all_of_optimus_cc_on_shares_is_one_process_if_nothing_is_lost(world: Worlds) -> None:
    """All tokens of a step are the same, so that every gradient has rank one."""
    world(8).run(_all_of_optimus_cc)


def _all_of_optimus_cc() -> None:
    mesh = _mesh(copies=2)
    keeps = Transport(codec="low-rank:1", feedback="first")
    packed = Compression(keeps, gradients=keeps, share_of_stages=0.5, every_gradient=True)
    stages = [partial(_parallel_end, last, mesh["tp"]) for last in (False, True)]
    options: dict[str, Any] = {"example": torch.zeros(2, TOKENS // 2, dtype=torch.int64), "loss": _of_tokens}
    pipeline = _made(stages, mesh, compression=packed, tied=("tokens", "head"), **options)
    assert _shares(pipeline) == [2]
    kept = [tuple(each.shape) for s in pipeline._stages for sender in s.senders.values() for each in sender.state]
    # Of the gradients that the second stage sends: the factor and the error of a share.
    assert kept == ([] if 0 in pipeline.modules else [(WIDTH, 1), (TOKENS // 2, WIDTH)])

    def batch(step: int, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((2 * MICRO_BATCHES, TOKENS // 2), 5 + step)
        return ids, ids + 1

    train_beside(pipeline, _tied_ends(), batch, _of_tokens, 3)


def _of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@on_ranks(4)
def test_gradients_of_a_rank_that_shares_have_too_arrive_exactly() -> None:
    """Each share is factored by itself, so that it needs no higher rank than the whole."""
    mesh = _mesh()
    stages = [partial(_tensor_parallel, seed, mesh["tp"]) for seed in range(2)]
    options = ({}, {"compression": Compression("low-rank:2", every_gradient=True)})
    found = [_made(stages, mesh, loss=_loss_of_two, **each) for each in options]
    x, y = _rows()
    for pipeline in found:
        pipeline.step(x, target=y)
    for (name, mine), (_, theirs) in zip(*(p.named_parameters() for p in found), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=1e-9), name


def _loss_of_two(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of two rows, one in each share."""
    return (output[[0, -1]] - target[[0, -1]]).square().mean()


# --- what is not shared ----------------------------------------------------------------------------------------------


def _of_sequences(seed: int, mesh: DeviceMesh) -> nn.Module:
    """A stage that takes a part of the rows and returns one, as with sequence parallelism."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "blocks.*.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(Plain(seed), mesh, plan)


@on_ranks(4)
def test_parts_of_a_sequence_are_sent_as_they_are() -> None:
    mesh = _mesh()
    pipeline = _made([partial(_of_sequences, seed, mesh["tp"]) for seed in range(2)], mesh, rows=TOKENS // 2)
    assert _shares(pipeline) == [1]
    whole = nn.Sequential(*(Plain(seed) for seed in range(2)))
    x, y = _rows()
    mine = [each.view(MICRO_BATCHES, 2, -1, WIDTH)[:, mesh.get_local_rank("tp")].flatten(0, 1) for each in (x, y)]
    loss = pipeline.step(mine[0], target=mine[1])
    expected = _loss(whole(x), y)
    both = [torch.empty_like(loss) for _ in range(2)]
    dist.all_gather(both, loss, group=mesh["tp"].get_group())
    assert float(sum(both)) / 2 == pytest.approx(expected.item(), rel=1e-9)


class Odd(nn.Module):
    """Hands on a mask of whole numbers, and something that the next stage does not read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.first = seed == 0

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        if self.first:
            return self.linear(x), x[:, :1] > 0, self.linear(x)[:3].T.contiguous().T
        return torch.where(more[0], self.linear(x), 0.0)


@on_ranks(4)
def test_tensors_of_other_kinds_and_sizes_arrive() -> None:
    """Truth values in shares, three rows as they are though not contiguous, and no gradient of the last two."""
    mesh = _mesh()
    pipeline = _made([partial(Odd, seed) for seed in range(2)], mesh, units=None)
    assert _shares(pipeline) == [2, 2, 1]
    whole = nn.ModuleList(Odd(seed) for seed in range(2))
    x, y = _rows()
    sent = [0]
    for stage in pipeline._stages:
        for kind in ("fwd", "bwd"):
            setattr(stage, f"get_{kind}_send_ops", _weighed(getattr(stage, f"get_{kind}_send_ops"), sent))
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(x, target=y)
    kinds = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)
    planned = [
        t for t in pipeline.schedule(towpath.Topology(2, 2)).transfers if t.kind in kinds and t.move.op is Op.SEND
    ]
    total = torch.tensor(sent)
    dist.all_reduce(total)
    assert 2 * sum(t.inter_bytes for t in planned) == int(total)
    expected = _loss(whole[1](*whole[0](x)), y)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-9)
    expected.backward()
    for index, module in pipeline.modules.items():
        for mine, theirs in zip(module.parameters(), whole[index].parameters(), strict=True):
            assert torch.allclose(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-9)  # type: ignore[union-attr]


@on_ranks(2)
def test_ranks_that_have_other_values_than_their_peers_are_told_once() -> None:
    """Up to rounding, which all ranks receive alike. Gradients that are not finite are none of its business."""
    group, (x, _) = dist.group.WORLD, _rows(TOKENS)
    assert group is not None
    encoding = Encoding((TOKENS // 2, WIDTH), x.dtype, Transport(), group)
    sender = SendEncoder([encoding, encoding, encoding], torch.device("cpu"), "outputs of stage 1")
    sent = [x * (1 + dist.get_rank() / 100), torch.full_like(x, torch.nan), None]
    (share, _, zeros) = sender.messages(sent, encoded=False, in_step=True)
    assert share is not None and torch.equal(
        share, (x * (1 + dist.get_rank() / 100)).chunk(2)[dist.get_rank()].flatten()
    )
    assert zeros is not None and zeros.shape == encoding.shape and not zeros.any()
    words = (
        r"outputs of stage 1, tensor 2, differ by \d+% between the tensor-parallel ranks \[0, 1\]; expected the same"
    )
    with pytest.raises(StepError, match=words):
        sender.messages([x, x, x + dist.get_rank()], encoded=False, in_step=True)


@pytest.mark.parametrize("before", ["zeros", "an evaluation"])
@on_ranks(2)
def test_what_says_nothing_of_later_messages_does_not_use_up_the_comparison(before: str) -> None:
    group, (x, _) = dist.group.WORLD, _rows(TOKENS)
    encoding = Encoding((TOKENS // 2, WIDTH), x.dtype, Transport(), group)
    sender = SendEncoder([encoding], torch.device("cpu"), "outputs of stage 1")
    sender.messages([torch.zeros_like(x) if before == "zeros" else x], encoded=False, in_step=before == "zeros")
    with pytest.raises(StepError, match="outputs of stage 1, tensor 0, differ by"):
        sender.messages([x + dist.get_rank()], encoded=False, in_step=True)


@on_ranks(2)
def test_integers_of_peers_have_to_be_equal() -> None:
    positions = torch.arange(1000, 1000 + TOKENS).view(TOKENS, 1)
    encoding = Encoding((TOKENS // 2, 1), positions.dtype, Transport(), dist.group.WORLD)
    sender = SendEncoder([encoding], torch.device("cpu"), "outputs of stage 1")
    with pytest.raises(StepError, match="differ by 100%"):
        sender.messages([positions + dist.get_rank()], encoded=False, in_step=True)


def test_a_share_is_whole_rows_or_everything() -> None:
    for shape, sent, shares in (
        ((4, 6, 8), (12, 8), 2),
        ((3, 5, 8), (3, 5, 8), 1),
        ((8,), (8,), 1),
        ((), (), 1),
    ):
        made = StageOutput.on(2, shape, "float32")
        assert (made.sent_shape, made.shares) == (sent, shares)
