"""The candidates by name: our strategies, and DDP, FSDP2 and HSDP of PyTorch, plain and as experts tune them.

    fsdp2 · hsdp      every block is a unit, gathered again for the backward pass; HSDP all-reduces at the boundary
      tuned           asynchronous unshard, and prefetching of the next block's all-gather in both directions
      reshard=no      weights stay gathered between the passes and between micro-steps: the memory of ZeRO-2
      reshard=2       the backward pass gathers in groups of two ranks (hpZ of ZeRO++); reshard=node: in a node
      ring            the reduce-scatter is our ring, because gloo's sends twice the bytes
      sync=last       gradients stay unsharded, and are reduced at the boundary only: the memory of DDP's gradients
    torch-ddp         DistributedDataParallel with its defaults, which reduces in every micro-step
      tuned           gradients are views of buckets of 8 MiB; a static graph; reductions at the boundary only
      bf16            gradients are sent in bf16 (DDP's own hook)
      powersgd=4      its PowerSGD hook of rank 4, from the third step on, with error feedback and a warm start
    fsdp2 · hsdp · torch-ddp
      wires           `towpath.wires`: our transfers under the same program; wires=int8 encodes gradients between nodes
    deepspeed         DeepSpeed's ZeRO, stage=1, 2 or 3; hpz, quantized, tuned (`deepspeed_peer`)
    auto              our planner's choice; allow=int8,int4:64 also allows these codecs between nodes
    bare · compute    the module alone with its optimizer; only its forward and backward pass in the workload's dtype
      barrier         all ranks wait for each other before the optimizer's step
    fsdp2 silent      FSDP2 with nothing computed: its communication alone

All of them run on a CPU with gloo (torch 2.13), and train identically. Some options do less there:

- FSDP2 has no streams on a CPU. Without the asynchronous unshard, it waits for a prefetched all-gather at once. It
  always waits for reductions, so `set_reduce_scatter_max_input_buffers` would change nothing.
- A static graph of DDP fails if its first micro-step does not reduce ("expect_autograd_hooks_ INTERNAL ASSERT FAILED").
- The PowerSGD hook starts its second and third collective from callbacks, in another order on another rank. With
several
  buckets, gloo aborts ("Is there a distributed collective mismatch in your code?"). So it gets one bucket.
- DDP refuses its bf16 hook except on NCCL, though gloo can sum bf16. So it is registered under another name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# FSDP2's documentation names this module as the home of the interface; it is exported nowhere else (torch 2.13).
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

import towpath
from benchmarks import deepspeed_peer
from benchmarks.harness.candidates import give_freed_memory_back, timed
from benchmarks.workload import LEARNING_RATE, Workload
from towpath.collectives.collective import Collective, GroupRank, WireBuffers, Workspace
from towpath.collectives.select import select
from towpath.comparison import MicroStepContext as Context
from towpath.comparison import fully_shard_blocks, prefetch_next_block, register_bf16_hook
from towpath.core.formats import item_bytes
from towpath.core.placement import GroupCollective
from towpath.core.presets import parse_strategy
from towpath.core.routes import Group, Op
from towpath.core.strategy import EXACT_KINDS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import Transport
from towpath.core.units import Range
from towpath.plan.cluster_probe import device_of_job
from towpath.topology.cluster import Topology

BUCKET_MEBIBYTES = 8
AUTO, DEEPSPEED = "auto", "deepspeed"
POWERSGD_FROM_STEP = 2  # the first that PowerSGD accepts with error feedback and a warm start
# Options that replace the same transfers as the wires.
_WITHOUT_WIRES = ("ring", "bf16", "powersgd")
OPTIONS = {
    "fsdp2": ("tuned", "reshard", "sync", "silent", "ring", "wires"),
    "hsdp": ("tuned", "reshard", "sync", "ring", "wires"),
    "torch-ddp": ("tuned", "bf16", "powersgd", "wires"),
    DEEPSPEED: deepspeed_peer.OPTIONS,
    "bare": ("barrier",),
    "compute": (),
}


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """The parsed name of a candidate: 'fsdp2 tuned reshard=no', 'zero3 route=hierarchical'."""

    text: str
    name: str
    options: dict[str, str]

    @staticmethod
    def parse(text: str) -> CandidateSpec:
        """Parse a name. Raise `ValueError` for one that does not exist."""
        name, *words = text.split()
        options = {option: value for option, _, value in (word.partition("=") for word in words)}
        if name in OPTIONS and (unknown := options.keys() - set(OPTIONS[name])):
            raise ValueError(
                f"candidate {text!r}: {name} has no option {', '.join(sorted(unknown))}; "
                f"there are {', '.join(OPTIONS[name]) or 'none'}."
            )
        if name not in OPTIONS and name not in (AUTO, *towpath.strategies()):
            there = ", ".join((*OPTIONS, AUTO, *towpath.strategies()))
            raise ValueError(f"candidate {text!r}: there is neither a peer nor a strategy {name!r}, only {there}.")
        if name == DEEPSPEED:
            deepspeed_peer.check_options(options)
        if "wires" in options and (others := options.keys() & set(_WITHOUT_WIRES)):
            raise ValueError(
                f"candidate {text!r}: wires replaces the same transfers as {', '.join(others)}. Leave one of them out."
            )
        return CandidateSpec(text, name, options)

    @property
    def foreign(self) -> bool:
        """Whether the candidate is not one of our strategies."""
        return self.name in OPTIONS

    @property
    def ours(self) -> bool:
        """Whether the transfers are ours: those of our strategies, or wires under a peer."""
        return not self.foreign or self.has("wires")

    def has(self, option: str) -> bool:
        """Return whether the name has an option."""
        return option in self.options

    def strategy(self, topology: Topology) -> Strategy:
        """Return the strategy of a candidate of ours."""
        return parse_strategy(self.text, topology)


def build(text: str, workload: Workload) -> tuple[Any, Context]:
    """Return the model of a candidate under its own engine, and the context of its micro-steps."""
    spec = CandidateSpec.parse(text)
    match spec.name:
        case "bare":
            return workload.model(), _barrier_after_the_last if spec.has("barrier") else _nothing
        case "compute":
            return workload.model().to(workload.torch_dtype), _nothing
        case "fsdp2" | "hsdp":
            return _fsdp(spec, workload)
        case "torch-ddp":
            return _ddp(spec, workload)
        case "deepspeed":
            return deepspeed_peer.build(spec.options, workload), _nothing
        case _:
            return _ours(spec, workload)


def _nothing(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def _barrier_after_the_last(model: Any, last: bool) -> Generator[None]:
    yield
    if last:
        dist.barrier()


def _ours(spec: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    precision = workload.precision
    if spec.name == AUTO:
        allowed = tuple(spec.options["allow"].split(",")) if spec.has("allow") else ()
        tokens, inputs = workload.batch * workload.length, next(workload.data(0))
        planned = towpath.Workload(tokens, workload.micro_steps, allow=allowed, inputs=inputs)
        made = towpath.shard(workload.model(), AUTO, precision=precision, workload=planned)
    else:
        made = towpath.shard(workload.model(), spec.strategy(workload.topology), precision=precision)
    return made, no_sync


def no_sync(model: Any, last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-step of our strategies: all but the last send no gradients at the boundary."""
    return nullcontext() if last else model.no_sync()


def autocast_of(workload: Workload) -> Context:
    """Return the context of models whose parameters stay in fp32: their users compute in 16 bits with autocast."""

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        if workload.computes_narrow:
            return torch.autocast(device_of_job().type, workload.torch_dtype)
        return nullcontext()

    return context


def _fsdp(spec: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    reshard: bool | int | None = None
    if spec.has("reshard"):
        group = spec.options["reshard"]
        reshard = False if group == "no" else workload.topology.ranks_per_node if group == "node" else int(group)
    made: Any = workload.silent_model() if spec.has("silent") else workload.model()
    context = fully_shard_blocks(made, workload.topology, workload.torch_dtype, spec.name == "hsdp", reshard)
    if spec.has("tuned"):
        prefetch_next_block(made)
    if spec.has("ring"):
        use_ring(made, workload.topology)
    _wire(spec, made, workload)

    def at_the_boundary(model: Any, last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last)
        if reshard is False:
            model.set_reshard_after_backward(last)
        return nullcontext()

    return made, at_the_boundary if spec.has("sync") else context


def _wire(spec: CandidateSpec, model: nn.Module, workload: Workload) -> None:
    if spec.has("wires"):
        towpath.wires(model, gradients=spec.options["wires"] or None, topology=workload.topology)


def _ddp(spec: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = workload.model()
    how: dict[str, Any] = {}
    if spec.has("tuned"):
        how = {"bucket_cap_mb": BUCKET_MEBIBYTES, "gradient_as_bucket_view": True, "static_graph": True}
    if spec.has("powersgd") and dist.get_backend() == "gloo":
        how["bucket_cap_mb"] = ceil(sum(p.nbytes for p in model.parameters()) / 2**20)
    made = DistributedDataParallel(model, **how)
    if spec.has("bf16"):
        register_bf16_hook(made)
    if spec.has("powersgd"):
        rank = int(spec.options["powersgd"])
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=POWERSGD_FROM_STEP)
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _wire(spec, made, workload)
    recorded, autocast = False, autocast_of(workload)

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        nonlocal recorded
        stack = ExitStack()
        # DDP records a static graph in the first micro-step, which has to reduce. Otherwise an assertion in DDP fails.
        if spec.has("tuned") and not last and recorded:
            stack.enter_context(model.no_sync())
        recorded = True
        stack.enter_context(autocast(model, last))
        return stack

    return made, context


# Our ring as FSDP2's reduce-scatter -----------------------------------------------------------------------------------


def use_ring(model: FSDPModule, topology: Topology) -> None:
    """Replace the reduce-scatter of every FSDP module, by FSDP2's public `set_custom_reduce_scatter`.

    Gloo's own reduce-scatter is an all-reduce inside, and sends twice the bytes. With our ring, FSDP2 sends what it
    would send on a backend without that flaw.
    """
    ring, root = RingReduceScatter(topology), model
    modules: Any = model
    for module in (root, *(m for m in modules.modules() if m is not root and isinstance(m, FSDPModule))):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        module.set_custom_reduce_scatter(ring)


@final
class RingReduceScatter(ReduceScatter):
    """A reduce-scatter by our ring. Rings of one size, dtype and group share the memory that they receive in."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._rings: dict[tuple[str, int, torch.dtype], tuple[Collective, Workspace]] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum. The sum is complete on return, or on a GPU, in the order of its stream."""
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        ring, workspace = self._ring(group, input_tensor)
        ring.run(input_tensor, output_tensor, workspace)

    def _ring(self, group: dist.ProcessGroup, region: torch.Tensor) -> tuple[Collective, Workspace]:
        key = (group.group_name, region.numel(), region.dtype)
        if key not in self._rings:
            ranks = tuple(dist.get_process_group_ranks(group))
            members = GroupRank(
                group,
                Group(ranks, tuple(range(len(ranks)))),
                dist.get_rank(group),
                tuple(map(self._topology.node_of, ranks)),
            )
            collective = GroupCollective(Op.REDUCE_SCATTER, 1, (members.group,))
            payload = Range("", "FSDP2", region.numel(), str(region.dtype).removeprefix("torch."))
            transfer = Transfer(TransferKind.REDUCE, payload, collective, Transport("ring"), self._topology)
            ring = select(transfer, members, region.device)
            self._rings[key] = ring, Workspace(WireBuffers(region.device))
        return self._rings[key]


# One optimizer step as a sample ---------------------------------------------------------------------------------------

_STATUS = Path("/proc/self/status")

Period = tuple[float, float]  # when something began, and when it ended


class TrainStep:
    """A worker that takes optimizer steps. The candidates `compute` and `silent` take a part of one."""

    def __init__(self, rank: int, world: int, candidate: str, workload: Workload) -> None:
        spec = CandidateSpec.parse(candidate)
        self._bytes_before = held_bytes()
        self._optimizing: list[Period] = []  # by sample: to clip, to step and to zero
        self._model, context = build(candidate, workload)
        data = workload.data(rank)
        if spec.name == "compute" or spec.has("silent"):
            self._work = forward_and_backward(self._model, data)
        elif spec.name == DEEPSPEED:
            self._work = deepspeed_peer.stepper(self._model, data, workload.micro_steps)
        else:
            self._work = stepper(
                self._model,
                context,
                data,
                workload.micro_steps,
                self._optimizing.append,
                workload.learning_rate,
            )
        self._ours = spec.ours
        self._processor_seconds: list[float] = []  # by sample
        self._exposed_seconds: list[float] = []
        self.forget()

    def forget(self) -> None:
        """Discard what has been recorded of the samples so far."""
        self._seconds = self._host_seconds = 0.0
        for kept in (self._processor_seconds, self._exposed_seconds, self._optimizing):
            kept.clear()
        self._forgotten = towpath.stats(self._model) if self._ours else None

    def sample(self) -> float:
        """Take a step and return its seconds."""
        before = towpath.stats(self._model) if self._ours else None
        processor = time.process_time()
        seconds = timed(self._work)
        self._processor_seconds.append(time.process_time() - processor)
        self._seconds += seconds
        if before is not None:
            after = towpath.stats(self._model)
            self._host_seconds += after.seconds_host - before.seconds_host
            self._exposed_seconds.append(after.seconds_exposed - before.seconds_exposed)
        return seconds

    def facts(self) -> dict[str, Any]:
        """Return what this rank recorded.

        Figures are medians over the samples, because a first sample also imports modules and makes buffers.
        `memory_bytes` is what the process holds in addition to what it held before the model was made. `optimizing` has
        the begin and the end of the optimizer's work in each sample, by this machine's clock.
        """
        found: dict[str, Any] = {
            "processor_seconds": median(self._processor_seconds),
            "memory_bytes": max(0, held_bytes() - self._bytes_before),
        }
        if self._optimizing:
            found["optimizing"] = list(self._optimizing)
        if self._forgotten is None:
            return found
        stats = towpath.stats(self._model)
        found |= {
            "host_share": self._host_seconds / self._seconds,
            "bits_between_nodes": bits_between_nodes(stats.since(self._forgotten)),
            "stats": str(stats),
        }
        engine = getattr(self._model, "towpath_engine", None)
        if engine is None:  # under wires, FSDP2 or DDP waits for transfers
            return found
        return found | {"exposed_seconds": median(self._exposed_seconds), "strategy": str(engine.strategy)}


def bits_between_nodes(stats: towpath.Stats) -> dict[str, float]:
    """Return the bits of an element between nodes, by kind of transfer, for kinds that are sent exactly."""
    bits: dict[str, float] = {}
    for kind in EXACT_KINDS:
        crossing = [t for t in stats.transfers if t.transfer.kind is kind and t.transfer.inter_bytes]
        elements = sum(t.calls * t.transfer.inter_bytes / item_bytes(t.transfer.dtype) for t in crossing)
        if any(t.transfer.coding for t in crossing):
            bits[kind.value] = round(8 * sum(t.inter_bytes for t in crossing) / elements, 3)
    return bits


def held_bytes() -> int:
    """Return the peak of tensors on the GPU, or the private memory of this process. Without a figure, return 0."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    if not _STATUS.exists():
        return 0
    give_freed_memory_back()
    with _STATUS.open() as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def stepper(
    model: Any,
    context: Context,
    data: Any,
    micro_steps: int,
    optimized: Callable[[Period], None] = lambda period: None,
    learning_rate: float = LEARNING_RATE,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:
    """Return a function that takes one optimizer step, by default with AdamW.

    `optimized` receives when the optimizer worked.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

    def step() -> None:
        for micro in range(micro_steps):
            with context(model, micro == micro_steps - 1):
                (model(*next(data)) / micro_steps).backward()
        began = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimized((began, time.perf_counter()))

    return step


def forward_and_backward(model: nn.Module, data: Any) -> Callable[[], None]:
    """Return a function that computes gradients once."""

    def step() -> None:
        model(*next(data)).backward()
        model.zero_grad()

    return step
