"""Pipelines of sharded stages: exact against one process, for every schedule and placement.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import schedules

import towpath
from tests.ranks.server import Worlds
from tests.ranks.strategies import in_turn, seldom
from tests.ranks.twin import by_queue
from towpath.core.passes import messages
from towpath.core.strategy import TransferKind
from towpath.core.transport import Transport
from towpath.errors import ConfigError, ShardError, StepError
from towpath.observe.stats import intervals_of_ranks, totals
from towpath.pipeline import Compression, Pipeline, split
from towpath.train.models import GPT, Shape

WIDTH, BATCH = 8, 2
SINGLE = ("GPipe", "1F1B")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "paro-iig", "paro-nig")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stage(nn.Module):
    """Two blocks, of which one is used twice, around a parameter of the root's own."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return first(second(first(x))) * self.scale


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(step: int, replica: int, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    size = (2, micro_batches * BATCH, WIDTH)
    x, y = torch.randn(size, generator=generator, dtype=torch.float64)
    return x, y


def _pipeline(
    ranks: int,
    copies: int,
    schedule: str,
    strategy: str,
    micro_batches: int,
    batch: int = BATCH,
    dtype: torch.dtype = torch.float64,
    stage: type[nn.Module] = Stage,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Any:
    mesh = mesh or init_device_mesh("cpu", (ranks, copies), mesh_dim_names=("pp", "dp"))
    count = ranks if schedule in SINGLE else 2 * ranks
    made = [partial(stage, seed, dtype) for seed in range(count)]
    example = torch.empty(batch, WIDTH, dtype=dtype)
    return Pipeline(
        made,
        strategy,
        mesh=mesh,
        schedule=schedule,
        micro_batches=micro_batches,
        example=example,
        units=[Block],
        **({"loss": _loss} | options),
    )


def train_beside(pipeline: Pipeline, whole: Any, batch: Any, loss_of: Any, steps: int, prefixed: bool = True) -> None:
    """Train both for so many steps: losses, gradients, norms and parameters are the same.

    `batch` returns that of a step and a copy. `prefixed`: the model has the number of the stage before each name.
    """
    copies, replica = pipeline._mesh["dp"].size(), pipeline._mesh.get_local_rank("dp")
    optimizers = [torch.optim.AdamW(list(m.parameters()), lr=1e-2, eps=1e-5) for m in (pipeline, whole)]

    def check(what: Callable[[Any], torch.Tensor], whole_of: Callable[[Any], torch.Tensor]) -> None:
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        for index, module in pipeline.modules.items():
            for name, parameter in module.named_parameters():
                expected = whole_of(theirs[f"{index}.{name}" if prefixed else name])
                assert torch.allclose(what(parameter), expected, rtol=0, atol=1e-9), name

    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [batch(step, copy) for copy in range(copies)]
        x, y = batches[replica]
        loss = pipeline.step(x, target=y)
        outputs = [whole(x) for x, _ in batches]
        expected = [loss_of(getattr(o, "logits", o), y) for o, (_, y) in zip(outputs, batches, strict=True)]
        (sum(expected) / copies).backward()
        assert float(loss) == pytest.approx(expected[replica].item(), rel=1e-9)
        check(lambda p: p.grad.full_tensor(), lambda p: p.grad)
        norms = [float(pipeline.clip_grad_norm_(0.1)), float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))]
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
        for optimizer in optimizers:
            optimizer.step()
    check(lambda p: p.full_tensor(), lambda p: p)


def _tensor_parallel(seed: int, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(Plain(seed), mesh, plan)


def _exact(sizes: tuple[int, ...], schedule: str, strategy: Any, steps: int) -> None:
    """`sizes`: of the pipeline, of copies, and maybe of tensor-parallel layers. Four copies lie on two nodes."""
    count = sizes[0] if schedule in SINGLE else 2 * sizes[0]
    if isinstance(strategy, str):
        strategy = towpath.strategy(strategy, towpath.Topology(sizes[1] // 2, 2))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")[: len(sizes)])
    stage, whole = (partial(_tensor_parallel, mesh=mesh["tp"]), Plain) if len(sizes) == 3 else (Stage, Stage)
    pipeline = Pipeline(
        [partial(stage, seed) for seed in range(count)],
        strategy,
        mesh=mesh,
        schedule=schedule,
        micro_batches=4,
        loss=_loss,
        example=torch.empty(BATCH, WIDTH).double(),
        units=[Block],
    )
    model = nn.Sequential(*(whole(seed) for seed in range(count)))
    train_beside(pipeline, model, lambda step, copy: _batch(step, copy, 4), _loss, steps)


PAIRS = list(product(SCHEDULES, STRATEGIES))


@in_turn(PAIRS, 1, "pair")
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), seldom((2, 4)), (2, 2, 2)], ids=str)
def test_a_pipeline_is_one_process(world: Worlds, sizes: tuple[int, ...], pair: tuple[str, str], steps: int) -> None:
    world(prod(sizes)).run(_exact, sizes, *pair, steps)


@pytest.mark.parametrize("strategy", [["zero3", "ddp"], towpath.strategy("zero1", exact=True)], ids=["own", "named"])
def test_stages_may_have_strategies_of_their_own_or_options(world: Worlds, strategy: Any, steps: int) -> None:
    world(4).run(_exact, (2, 2), "1F1B", strategy, steps)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_messages_of_each_direction_have_a_group_of_their_own(world: Worlds, schedule: str) -> None:
    """NCCL runs those of a group one after the other. PyTorch refuses a batch of two groups."""
    for batches in world(2).run(_groups_of_batches, schedule):
        assert {tuple(batch) for batch in batches} == {("activations",), ("gradients",)}


def _groups_of_batches(schedule: str) -> list[list[str]]:
    """Return the groups of the messages of each batch that is posted."""
    pipeline, found = _pipeline(2, 1, schedule, "zero1", 4), list[list[str]]()
    x, y = _batch(0, 0, 4)
    posted, names = schedules._batch_p2p, {pipeline._group: "activations", pipeline._stages[0]._gradients: "gradients"}

    def note(messages: Any, *of: Any, **named: Any) -> Any:
        found.append(sorted({names[each.group] for each in messages}))
        return posted(messages, *of, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "_batch_p2p", note)
        pipeline.step(x, target=y)
    return [each for each in found if each]


def test_a_trace_has_every_pass_every_message_and_what_was_waited(world: Worlds) -> None:
    for tracks, passes, expected in world(4).run(_traced):
        assert passes == expected
        sent, received = (sum(name.endswith(word) for name in tracks["inside nodes"]) for word in ("sent", "received"))
        assert sent == received == 12
        assert "for neighbors" in tracks["waiting"]
        assert {"grad_sync of root", "grad_sync of blocks.0"} <= set(tracks["inside nodes"])


def _traced() -> tuple[dict[str, list[str]], int, int]:
    """By track what was traced; how many of the passes that this rank computes."""
    pipeline = _pipeline(2, 2, "Interleaved1F1B", "zero1", 4)
    x, y = _batch(0, dist.get_rank() % 2, 4)
    pipeline.step(x, target=y)
    with towpath.tracing.trace(pipeline) as trace:
        pipeline.step(x, target=y)
    assert intervals_of_ranks(pipeline, trace).keys() == (set() if dist.get_rank() else {0, 1, 2, 3})
    tracks: dict[str, list[str]] = {}
    for each in trace.intervals:
        tracks.setdefault(each.track, []).append(each.name)
    own = set(pipeline.modules)
    expected = sum(each.stage in own for passes in pipeline.order.values() for each in passes)
    passes = {name for name in tracks["compute"] if "of stage" in name}
    return tracks, len(passes), expected


# --- gradient accumulation -------------------------------------------------------------------------------------------


@in_turn(list(product(("1F1B", "Interleaved1F1B"), ("zero1", "zero3", "hpz"))), 1, "case")
def test_steps_inside_no_sync_accumulate(world: Worlds, case: tuple[str, str]) -> None:
    world(4).run(_accumulated, *case)


def _accumulated(schedule: str, strategy: str) -> None:
    """Steps of four micro-batches are summed like one of twelve, and send what the schedule says."""
    pipeline = _pipeline(2, 2, schedule, strategy, 4, stage=Plain)
    whole = _pipeline(2, 2, schedule, strategy, 12, stage=Plain, loss=lambda o, target: 3 * _loss(o, target))
    optimizers = [torch.optim.AdamW(list(p.parameters()), lr=1e-2, eps=1e-5) for p in (pipeline, whole)]
    before = towpath.stats(pipeline)
    for step in range(2):
        x, y = _batch(step, dist.get_rank() % 2, 12)
        batches = list(zip(x.chunk(3), y.chunk(3), strict=True))
        # Dropped passes count among the transfers of their step, and those of the last one are compared.
        for _ in range(2 if step == 0 else 1):
            pipeline.zero_grad()  # drops what was accumulated
            with pipeline.no_sync():
                losses = [pipeline.step(x, target=y) for x, y in batches[:2]]
        assert all(p.grad is None for p in pipeline.parameters())
        losses.append(pipeline.step(batches[2][0], target=batches[2][1]))
        whole.zero_grad()
        assert float(whole.step(x, target=y)) == pytest.approx(float(sum(losses)), rel=1e-9)
        for (name, mine), (_, theirs) in zip(pipeline.named_parameters(), whole.named_parameters(), strict=True):
            assert torch.allclose(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=1e-9), name
        for optimizer in optimizers:
            optimizer.step()
    for index, module in pipeline.modules.items():
        planned = pipeline.stage_schedule(index, accumulated=2).transfers
        assert Counter(towpath.stats(module).last_step) == Counter(planned), index
    job = pipeline.schedule(accumulated=2)
    assert totals(pipeline).intra_bytes == 2 * job.intra_bytes
    assert _message_bytes(towpath.stats(pipeline).since(before).transfers) == 2 * _message_bytes(job.transfers)


# --- encoded messages ------------------------------------------------------------------------------------------------

TOKENS = 32  # of a micro-batch, of which the loss reads two: a gradient of rank two


def _loss_of_two(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:2] - target[:2]).square().mean()


@pytest.mark.parametrize("every", [False, True], ids=["exposed", "every"])
@in_turn(list(product(SCHEDULES, [(2, 4), (2, 8), (3, 6), (4, 4), (4, 8)])), 1, "case")
def test_gradients_of_the_rank_that_is_sent_arrive_exactly(world: Worlds, case: Any, every: bool) -> None:
    """The exposed ones are encoded at both ends, or all of them."""
    schedule, sizes = case
    found = world(sizes[0]).run(_low_rank, schedule, *sizes, every)
    sent, received = ({key for rank in found for key in rank[end]} for end in ("sent", "received"))
    assert sent == received == set(found[0]["expected"])
    assert sent, schedule


def _low_rank(schedule: str, ranks: int, micro_batches: int, every: bool) -> dict[str, list[Any]]:
    """Gradients by the stage that sends them and the micro-batch, where a message is as short as the factors."""
    options = {"compression": Compression("low-rank:2", every_gradient=every)}
    made = [_pipeline(ranks, 1, schedule, "ddp", micro_batches, TOKENS, loss=_loss_of_two, **o) for o in ({}, options)]
    found: dict[str, list[Any]] = {"sent": [], "received": []}
    for stage in made[1]._stages:
        for end, name, sender in (("sent", "get_bwd_send_ops", 0), ("received", "get_bwd_recv_ops", 1)):
            short = 2 * (TOKENS + WIDTH)
            setattr(stage, name, _watched(getattr(stage, name), found[end], stage.stage_index + sender, short))
    optimizers = [torch.optim.AdamW(list(p.parameters()), lr=1e-2, eps=1e-5) for p in made]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x, y = torch.randn((2, micro_batches * TOKENS, WIDTH), generator=generator, dtype=torch.float64)
        for pipeline, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            pipeline.step(x, target=y)
        for (name, mine), (_, theirs) in zip(*(p.named_parameters() for p in made), strict=True):
            assert torch.allclose(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=1e-9), name
        for optimizer in optimizers:
            optimizer.step()
    backward = [m for m in messages(made[1].order) if m.backward]
    return found | {"expected": [(m.source, m.micro_batch) for m in backward if m.exposed or every]}


def _watched(inner: Any, found: list[Any], sender: int, short: int) -> Any:
    def ops(micro_batch: int) -> Any:
        made = inner(micro_batch)
        found.extend((sender, micro_batch) for op in made if op.tensor.numel() == short)
        return made

    return ops


WARM_UP = Compression(
    Transport(codec="low-rank:2", feedback="first", after=2),
    Transport(codec="int8+stochastic", feedback="first", after=1, until=3),
)


@in_turn(SCHEDULES, 1, "schedule")
def test_both_ends_of_a_link_switch_their_codecs_in_the_same_step(world: Worlds, schedule: str) -> None:
    found = world(2).run(_warm_up, schedule)
    for losses, exact, ends, planned, counted in found:
        # Step 0 sends all as it is, step 1 outputs in int8, step 2 gradients too, step 3 gradients alone.
        assert exact[0] == losses[0] and exact[1] != losses[1] == pytest.approx(exact[1], rel=0.02)
        assert {end: [sum(rank[2][end][step] for rank in found) for step in range(4)] for end in ends} == {
            "sent": planned,
            "received": planned,
        }
        assert planned[0] > planned[1] > planned[2] < planned[3] < planned[0]
        assert counted == sum(planned)


def _warm_up(schedule: str) -> tuple[list[float], list[float], dict[str, list[int]], list[int], int]:
    """Losses with the warm-up and without compression; the bytes of messages that this rank has sent and received in
    each step, those of all ranks that the schedule has, and those that are counted."""
    made = [_pipeline(2, 1, schedule, "ddp", 4, TOKENS, torch.float32, **o) for o in ({"compression": WARM_UP}, {})]
    losses: list[list[float]] = [[], []]
    ends: dict[str, list[int]] = {"sent": [0] * 4, "received": [0] * 4}
    for stage in made[0]._stages:
        for end, kinds in (("sent", ("fwd_send", "bwd_send")), ("received", ("fwd_recv", "bwd_recv"))):
            for kind in kinds:
                name = f"get_{kind}_ops"
                setattr(stage, name, _weighed(getattr(stage, name), ends[end], stage.engine))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x, y = torch.randn((2, 4 * TOKENS, WIDTH), generator=generator)
        for pipeline, mine in zip(made, losses, strict=True):
            mine.append(float(pipeline.step(x, target=y)))
            pipeline.zero_grad()
    topology = towpath.Topology(2, 1)
    planned = [_message_bytes(made[0].schedule(topology, step=step).transfers) for step in range(4)]
    return losses[0], losses[1], ends, planned, _message_bytes(made[0].stats().transfers)


def _weighed(inner: Any, found: list[int], engine: Any) -> Any:
    def ops(micro_batch: int) -> Any:
        made = inner(micro_batch)
        found[engine.step] += sum(op.tensor.nbytes for op in made)
        return made

    return ops


def _message_bytes(transfers: Iterable[Any]) -> int:
    messages = (TransferKind.ACTIVATION, TransferKind.ACTIVATION_GRADIENT)
    return sum(t.inter_bytes + t.intra_bytes for t in transfers if getattr(t, "transfer", t).kind in messages)


@in_turn(SCHEDULES, 1, "schedule")
def test_evaluation_between_steps_gives_the_loss_and_changes_nothing(world: Worlds, schedule: str) -> None:
    world(4).run(_evaluated, schedule)


def _evaluated(schedule: str) -> None:
    """With encoded messages: an evaluation changes neither what senders have missed, nor the seeds of rounding."""
    packed = Compression(*(Transport(codec=codec, feedback="first") for codec in ("low-rank:2", "int8+stochastic")))
    options = {"compression": packed, "dtype": torch.float32}
    made = [_pipeline(2, 2, schedule, "zero3", 4, TOKENS, **options) for _ in range(2)]
    optimizers = [torch.optim.AdamW(list(p.parameters()), lr=1e-2) for p in made]
    x, y = torch.randn((2, 4 * TOKENS, WIDTH), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        expected = float(made[1].evaluate(x, target=y))
        assert not any(p.grad is not None for p in made[1].parameters())
        assert [float(pipeline.step(x, target=y)) for pipeline in made] == [expected] * 2, step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- models that are cut ---------------------------------------------------------------------------------------------


def _gpt(tied: bool = False) -> nn.Module:
    torch.manual_seed(5)
    shape = Shape(vocabulary=24, width=16, depth=5, heads=2, hidden=24, tied=tied)
    return GPT(shape).double()


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=24, num_key_value_heads=1, **sizes)
    return transformers.LlamaForCausalLM(config).double()


def _gpt2() -> nn.Module:
    """Tied, and of which the positions come before the blocks too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 16}
    pdrop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=24, **sizes, **pdrop)).double()


CUT = {"tied gpt": partial(_gpt, tied=True), "tied gpt2": _gpt2, "llama": _llama}
LENGTH = 6


def _token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("schedule", [seldom("1F1B"), "Interleaved1F1B"])
@pytest.mark.parametrize("name", [name if name == "tied gpt" else seldom(name) for name in CUT])
def test_a_model_that_is_cut_trains_as_one(world: Worlds, name: str, schedule: str) -> None:
    world(4).run(_cut, name, schedule)


def _cut(name: str, schedule: str) -> None:
    stages = split(CUT[name](), 2 if schedule in SINGLE else 4, torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    pipeline = _of_tokens(stages, "zero3", schedule=schedule)
    train_beside(pipeline, CUT[name](), lambda *which: (_tokens(*which),) * 2, _token_loss, 2, prefixed=False)


def _of_tokens(stages: Any, strategy: Any, mesh: DeviceMesh | None = None, **options: Any) -> Pipeline:
    mesh = mesh or init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    options = {"mesh": mesh, "micro_batches": 4, "loss": _token_loss, "example": example} | options
    return Pipeline(stages, strategy, **options)


def _tokens(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(24, (4 * BATCH, LENGTH), generator=generator)


# --- schedules -------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Each block once, as a schedule takes it."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@in_turn(["zero3", "hpz", "paro-iig", "zero2"], 1, "strategy")
@pytest.mark.parametrize("schedule", [seldom("1F1B"), "Interleaved1F1B"])
def test_stages_execute_what_the_jobs_schedule_says(world: Worlds, strategy: str, schedule: str) -> None:
    world(4).run(_executed, strategy, schedule)


def _executed(strategy: str, schedule: str) -> None:
    pipeline = _pipeline(2, 2, schedule, strategy, 4, stage=Plain)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for _ in range(3):
        x, y = _batch(0, 0, 4)
        pipeline.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    for index, module in pipeline.modules.items():
        planned, found = pipeline.stage_schedule(index).transfers, towpath.stats(module).last_step
        assert by_queue(found) == by_queue(planned), index


def test_one_of_two_pipelines_of_a_job_asks_no_rank_of_the_other(world: Worlds) -> None:
    whole, parts = world(2).run(_planned, None)[0], world(4).run(_planned, ("job", "pp", "dp"))
    assert parts[2:] == [whole, whole] and parts[:2] == [None, None]


def _planned(names: tuple[str, ...] | None) -> str | None:
    mesh = None if names is None else init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)["pp", "dp"]
    pipeline = _pipeline(2, 1, "1F1B", "ddp", 4, mesh=mesh)
    x, y = _batch(0, 0, 4)
    pipeline.step(x, target=y)
    if mesh is not None and dist.get_rank() < 2:
        return None
    assert pipeline.stats().transfers
    return repr(pipeline.schedule())


def test_a_norm_of_one_stage_is_not_taken_for_the_models(world: Worlds) -> None:
    world(4).run(_norm_of_a_stage)


def _norm_of_a_stage() -> None:
    pipeline = _pipeline(2, 2, "1F1B", "zero3", 4)
    x, y = _batch(0, 0, 4)
    pipeline.step(x, target=y)
    with pytest.raises(ShardError, match=r"leaves out those of the other stages.*pipeline\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0)
    one = next(pipeline.parameters())
    assert float(one.grad.norm()) == pytest.approx(float(one.grad.full_tensor().norm()), rel=1e-9)
    largest = max(float(p.grad.full_tensor().abs().max()) for p in pipeline.parameters())
    found = pipeline.clip_grad_norm_(1e9, float("inf"))
    assert float(found) >= largest


class _Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}


def test_what_cannot_be_is_refused_before_anything_is_sent(world: Worlds) -> None:
    world(4).run(_refused)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plain = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    flat = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "dp"))
    stages: list[Any] = [partial(Stage, seed) for seed in range(2)]

    def refused(match: str, stages: Any = stages, **options: Any) -> None:
        keywords: dict[str, Any] = {
            "mesh": mesh,
            "micro_batches": 4,
            "loss": _loss,
            "example": torch.empty(2, WIDTH).double(),
        }
        with pytest.raises((ShardError, ConfigError), match=match):
            Pipeline(stages, **({"strategy": "zero1"} | keywords | options))

    refused("a mesh of dimensions 'pp' and 'dp' is needed.*got dp", mesh=plain)
    crossed = DeviceMesh("cpu", torch.tensor([[0, 3], [2, 1]]), mesh_dim_names=("pp", "dp"))
    refused(r"along 'pp' the ranks of the mesh have to ascend.*got \[\[0, 3\], \[2, 1\]\]", mesh=crossed)
    refused("unknown schedule '2F2B'; known are GPipe, 1F1B", schedule="2F2B")
    refused("1 stages for 2 ranks", stages=stages[:1])
    refused("1F1B has one stage on each rank, and there are 4 for 2 ranks", stages=stages * 2)
    refused("3 stages do not divide among 2 ranks", stages=[*stages, stages[0]], schedule="Interleaved1F1B")
    broken = [nn.Linear(WIDTH, 3).double(), nn.Linear(WIDTH, 3).double()]
    refused("stage 1, called with 2×3 float64: .*reduction dim", stages=broken)
    refused("stage 0, .*a stage hands on dict", stages=[_Odd(), nn.Identity()])
    refused("stages exchange float64, and the codec int8:256 takes", compression=Compression(activations="int8"))
    refused("between stages low-rank:4 sends no less.* 2 × 8 .*rank below 2", compression=Compression("low-rank:4"))
    refused("3 strategies for 2 stages", strategy=["ddp"] * 3)
    refused("1F1B of 2 ranks asks for at least as many micro-batches as ranks; got 1", micro_batches=1)
    refused("expected 4 ranks.*group, which has 2", strategy=towpath.strategy("zero3", towpath.Topology(2, 2)))
    refused("embeddings need a module of the first and of the last stage; got 'blocks' and ''", tied=("blocks", ""))
    refused("tied embeddings: stage 1 has no module 'head'", tied=("blocks", "head"))
    refused(
        "asks for equal rounds of micro-batches, as a multiple of the ranks gives; got 5",
        stages=stages * 2,
        schedule="Interleaved1F1B",
        micro_batches=5,
    )
    refused("4 stages for one rank", stages=stages * 2, mesh=flat, schedule="Interleaved1F1B")


class _Failing(Plain):
    """Raises in a forward or backward pass, as `fails` says."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise ValueError("a forward that fails")
        x = super().forward(x)
        if self.fails == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, grad: torch.Tensor) -> None:
        raise ValueError("a backward that fails")


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_no_step_follows_one_that_has_failed(world: Worlds, fails: str) -> None:
    world(2).run(_follow_a_failure, fails)


def _follow_a_failure(fails: str) -> None:
    """Only the first copy fails. The other one has computed its step, and learns of the failure in the next one."""
    pipeline = _pipeline(1, 2, "1F1B", "ddp", 4, stage=_Failing)
    x, y = _batch(0, dist.get_rank(), 4)
    (module,) = pipeline.modules.values()
    with pipeline.no_sync():
        pipeline.step(x, target=y)
        if dist.get_rank() == 0:
            module.fails = fails
            with pytest.raises(StepError, match="step 1 failed in stage 0"):
                pipeline.step(x, target=y)
            module.fails = ""
        else:
            pipeline.step(x, target=y)
    words = r"rank 0: Pipeline.step\(\) inside no_sync\(\) of step 1 has failed, and messages"
    for call in (pipeline.step, pipeline.evaluate):
        with pytest.raises(StepError, match=words):
            call(x, target=y)


def test_a_refused_batch_keeps_what_was_accumulated(world: Worlds) -> None:
    world(2).run(_refused_inside_no_sync)


def _refused_inside_no_sync() -> None:
    pipeline, other = (_pipeline(2, 1, "1F1B", "ddp", 4, stage=Plain) for _ in range(2))
    x, y = _batch(0, 0, 4)
    for each in (pipeline, other):
        with each.no_sync():
            each.step(x, target=y)
            if each is pipeline:
                with pytest.raises(StepError, match="a batch of 4×8: expected 8×8"):
                    each.step(x[:4], target=y)
        each.step(x, target=y)
    for mine, theirs in zip(pipeline.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
