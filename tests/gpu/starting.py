"""Cases of how jobs start and end on a GPU. Each has processes of its own, which join by themselves.

Some of them end by an abort, others might hang: none may be where other cases run.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.gpu.case import BOTH, FOLDER, Case, join
from tests.ranks.models import DEVICE
from towpath.errors import ConfigError, StepError, TowpathError
from towpath.pipeline import Compression, Pipeline, split
from towpath.train.models import GPT, Shape

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, VOCABULARY = 2, 6, 24


def raises(kind: type[TowpathError], pattern: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), f"expected {pattern!r} in: {error}"
    else:
        raise AssertionError(f"expected {kind.__name__}: {pattern}")


# --- pipelines --------------------------------------------------------------------------------------------------------


def _token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _tokens(step: int, replica: int, micro_batches: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(VOCABULARY, (micro_batches * BATCH, LENGTH), generator=generator).to(DEVICE)


def pipeline_trains_as_one_process(folder: Path, schedule: str, bound: bool, codec: str = "") -> dict[str, Any]:
    """Three steps next to the whole model. With a codec of messages, gradients are near those of one process.

    1F1B: on three stages. The group of the two ends, which tied weights have, is no matter of the stage between them.
    Interleaved1F1B: two stages on each rank, and two copies.
    """
    join(folder, bound=bound)
    tied = schedule == "1F1B"
    shape, stages, strategy = ((3, 1), 3, "ddp") if tied else ((2, 2), 4, "zero1")
    # int8 moves what a stage receives by half a percent of its block's largest element, and each stage adds to that.
    most, dtype = (0.15, torch.float32) if codec else (1e-9, torch.float64)
    torch.manual_seed(5)
    sizes = Shape(vocabulary=VOCABULARY, width=16, depth=5, heads=2, hidden=24, tied=tied)
    whole = GPT(sizes).to(dtype)
    example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("pp", "dp"))
    pipeline = Pipeline(
        [stage.to(DEVICE) for stage in split(copy.deepcopy(whole), stages, example)],
        strategy,
        mesh=mesh,
        schedule=schedule,
        micro_batches=stages,
        loss=_token_loss,
        example=example,
        compression=Compression(activations=codec) if codec else Compression(),
    )
    whole.to(DEVICE)
    replica, copies = mesh.get_local_rank("dp"), shape[1]
    optimizers = [torch.optim.AdamW(list(m.parameters()), lr=1e-2, eps=1e-5) for m in (pipeline, whole)]
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    worst = 0.0
    for step in range(3):
        batches = [_tokens(step, r, stages) for r in range(copies)]
        loss = float(pipeline.step(batches[replica], target=batches[replica]))
        losses = [_token_loss(whole(each), each) for each in batches]
        (sum(losses[1:], losses[0]) / copies).backward()
        norms = [float(pipeline.clip_grad_norm_(1.0)), float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0))]
        found, right = list[Tensor](), list[Tensor]()
        for module in pipeline.modules.values():
            parameter: Any
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None, name
                found.append(parameter.grad.full_tensor().flatten())
                right.append(theirs[name].grad.flatten())  # pyright: ignore[reportOptionalMemberAccess]
        off = (torch.cat(found) - torch.cat(right)).norm() / torch.cat(right).norm()
        for one, other in ((loss, losses[replica].item()), norms):
            worst = max(worst, off.item(), abs(one - other) / other)
        assert worst <= most, f"{worst:.1e} from one process in step {step}, at most {most:.0e} expected"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"worst": worst}


# --- how a job starts -------------------------------------------------------------------------------------------------


def a_model_in_host_memory_is_moved_unit_by_unit(folder: Path) -> dict[str, Any]:
    """Only rank 0 has it. No rank ever has all of it on its GPU."""
    rank, world = join(folder)
    topology, device = towpath.Topology(1, world), torch.device("cuda", 0)
    with torch.device("meta" if rank else "cpu"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)) for _ in range(32)))
    full_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    towpath.shard(nn.Sequential(nn.Linear(8, 8)), "zero3", topology=topology, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = towpath.shard(model, "zero3", topology=topology, device=device)
    share = (torch.cuda.max_memory_allocated() - before) / full_bytes
    assert share < 1.3, f"{share:.2f} of the model, at most 1.3 expected: shards, their gradients, and a few units"
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {device}
    model(torch.randn(4, 1024, device=device)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    return {"share_of_model": share}


def probes(folder: Path, bound: bool) -> dict[str, Any]:
    """All ranks connect before some of them are probed: "auto" begins with messages between some ranks only."""
    from towpath.plan.cluster_probe import probe

    join(folder, bound=bound)
    found = probe(towpath.Topology(2, 2), 1.0)
    assert found.has("inter, one")
    return {}


def is_refused(folder: Path, backend: str, device: str, own_host: bool, pattern: str) -> None:
    """A model on a device. Without hosts of their own, the ranks share a GPU."""
    join(folder, backend, own_host=own_host)
    raises(ConfigError, pattern, lambda: towpath.shard(nn.Linear(4, 4).to(device), "zero3"))


def host_buffers_are_broadcast(folder: Path) -> None:
    """Where the group has NCCL alone."""
    rank, _ = join(folder, "nccl")
    model: Any = nn.Linear(4, 4).cuda()
    model.register_buffer("on_host", torch.full((3,), rank, dtype=torch.int16))
    model.register_buffer("on_gpu", torch.full((3,), rank, dtype=torch.int16, device="cuda"))
    model = towpath.shard(model, "zero3")
    assert not model.on_host.any() and not model.on_gpu.any()


def example_runs(folder: Path, launcher: tuple[str, ...], *arguments: str) -> None:
    """On one rank: under torchrun, or without a launcher, where `towpath.init()` makes the group."""
    script = (str(ROOT / "examples" / arguments[0]), *arguments[1:])
    hidden = {} if DEVICE.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *launcher, *script],
        env={**environment, "XDG_CACHE_HOME": str(folder), **hidden},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout, done.stdout


# --- ranks that wait in vain ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Runs those that it is told to; they have different sizes, so that other ranks' gathers never match."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Sequential(nn.Linear(8, 8 * (i + 1)), nn.Linear(8 * (i + 1), 8)) for i in range(3))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.all[chosen](x)


def _experts(folder: Path) -> tuple[Any, int, Tensor]:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else the watchdog may end the process before it raises
    rank, world = join(folder)
    torch.manual_seed(0)
    model = towpath.shard(Experts().to(DEVICE), "zero3", topology=towpath.Topology(world, 1), units=[nn.Sequential])
    return model, rank, torch.ones(1, 8, device=DEVICE)


def different_units_are_told(folder: Path) -> None:
    """While the hosts wait for a device that never gets there."""
    model, rank, x = _experts(folder)

    def run() -> None:
        with torch.no_grad():
            y = model(x, rank)
            with suppress(RuntimeError):
                y.sum().item()  # what the abort makes of it is no number to use
            model(x, 0)

    raises(StepError, "the ranks ran different units", run)
    # A rank that leaves breaks the connection on which the other one is being told.
    store = dist.FileStore(str(folder / "told"), 2)
    store.set(str(rank), "")
    store.wait(["0", "1"])
    _leave()


def a_peer_that_has_ended_is_told(folder: Path) -> None:
    model, rank, x = _experts(folder)
    model(x, 0).sum().backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    if rank == 1:
        _leave()

    def run() -> None:
        with torch.no_grad():
            y = model(x, 1)
            with suppress(RuntimeError):
                y.sum().item()
            model(x, 1)

    # gloo fails by itself, before anyone asks who has ended.
    raises(StepError, "the process of rank 1 has ended" if DEVICE.type == "cuda" else "rank 1 .* was lost", run)
    _leave()


def _leave() -> None:
    """What was aborted cannot be destroyed."""
    print("{}", flush=True)
    os._exit(0)


# --- the list ---------------------------------------------------------------------------------------------------------

PIPELINES, ERRORS, AUTO = "pipelines", "start, and errors of dead or diverging ranks", "planner and auto"


def _case(name: str, feature: str, run: Any, *args: Any, ranks: int | None = 2, **options: Any) -> Case:
    given: dict[str, Any] = {"alone": True, "limit": 45.0} | options
    return Case(name=name, feature=feature, run=run, args=(FOLDER, *args), ranks=ranks, **given)


_BOUND = (("no bound device", False, ()), ("bound device", True, ("cuda",)))
_REFUSED = (  # the group's backend, the model's device, whether ranks have hosts of their own, and what is said
    *(
        (f"sharing a GPU is refused, {each}", each, "cuda", False, "ranks 0 and 1 share a GPU")
        for each in (BOTH, "nccl")
    ),
    ("cpu under nccl is refused", "nccl", "cpu", True, r"the model is on .*towpath\.init\(\)"),
    ("cuda under gloo is refused", "gloo", "cuda", True, r"the model is on .*towpath\.init\(\)"),
)
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


def _pipelines(schedule: str, codec: str, **options: Any) -> list[Case]:
    return [
        _case(
            f"{schedule}, {codec or 'lossless'}, {words}",
            PIPELINES,
            pipeline_trains_as_one_process,
            schedule,
            bound,
            codec,
            needs=needs,
            **options,
        )
        for words, bound, needs in _BOUND
    ]


CASES = [
    *_pipelines("1F1B", "", ranks=3),
    _case("different units are told", ERRORS, different_units_are_told),
    _case("a peer that has ended is told", ERRORS, a_peer_that_has_ended_is_told),
    *_pipelines("Interleaved1F1B", "int8", ranks=4, limit=90.0),
    *_pipelines("Interleaved1F1B", "", ranks=4, limit=60.0),
    *(_case(f"probe 2x2, {words}", AUTO, probes, bound, ranks=4, needs=needs) for words, bound, needs in _BOUND),
    *(_case(name, ERRORS, is_refused, *args, needs=("cuda",)) for name, *args in _REFUSED),
    _case("buffers on the host, NCCL alone", ERRORS, host_buffers_are_broadcast, needs=("cuda",)),
    _case(
        "a model in host memory is moved unit by unit",
        "strategies and placements",
        a_model_in_host_memory_is_moved_unit_by_unit,
        needs=("cuda",),
    ),
    *(
        # They start processes of their own, next to other cases.
        _case(
            f"{arguments[0]} {words}", ERRORS, example_runs, launcher, *arguments, ranks=None, alone=False, limit=120.0
        )
        for words, launcher, *arguments in (
            ("without a launcher", (), "train.py", "zero3", "3"),
            ("under torchrun", _TORCHRUN, "train.py", "zero3", "3"),
            ("under torchrun", _TORCHRUN, "codec.py", "10"),
            ("under torchrun", _TORCHRUN, "resnet.py", "paro-iig", "5"),
            ("under torchrun", _TORCHRUN, "meta_device.py", "2"),
        )
    ),
]
