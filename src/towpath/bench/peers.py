"""What people would use instead of Towpath: FSDP2, HSDP and DDP of PyTorch, and DeepSpeed, plain, and as their experts
tune them.

    fsdp2 · hsdp      each block its own unit, gathered again for the backward pass; HSDP all-reduces at the boundary
      tuned           asynchronous unshard, and the next block's gather begun a block ahead, in both directions
      reshard=no      weights stay gathered between forward and backward, and between micro-steps: the memory of ZeRO-2
      reshard=2       the backward pass gathers inside groups of two ranks (what ZeRO++ calls hpZ); =node: of a node's
      ring            its reduce-scatter is our ring: gloo's own sends twice the bytes (ring_reduce_scatter.py)
      sync=last       gradients stay unsharded and are reduced at the boundary only: the memory of DDP's gradients
    torch-ddp         DistributedDataParallel as it comes, which sums at every micro-step
      tuned           gradients are views of its buckets, of 8 MiB; a static graph; sums at the boundary only
      bf16            its gradients travel in bf16 (its own hook), whatever computes
      powersgd=4      its PowerSGD hook of rank 4, from the third step on, with error feedback and a warm start
    deepspeed         its ZeRO, stage=1, 2 or 3; hpz, quantized, tuned (deepspeed_peer.py)
    auto              our planner's choice; allow=int8,int4:64: these codecs between nodes as well
    bare · compute    the module alone, with its optimizer, or only forward and backward in the dtype of the workload
      barrier         before its optimizer's step the ranks wait for each other, as all do whose gradients are summed
    fsdp2 silent      FSDP2 with nothing computed: its communication alone

All of them work on a CPU with gloo (torch 2.13), and train alike. What does less there, or nothing:
- FSDP2 has no streams: without the asynchronous unshard a gather that is begun ahead is also waited for there and then,
  and reductions always are. So `set_reduce_scatter_max_input_buffers` would change nothing, and is left alone.
- A static graph of DDP fails where its first micro-step does not sum ("expect_autograd_hooks_ INTERNAL ASSERT FAILED").
- The PowerSGD hook begins its second and third collective from callbacks, which come in another order on another rank:
  with several buckets gloo aborts ("Is there a distributed collective mismatch in your code?"). So it gets one bucket.
- DDP refuses its bf16 hook except on NCCL ("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU
  and XCCL"), though gloo sums bf16: here it is registered under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import towpath
from towpath.auto.probe import device_of_job
from towpath.bench import deepspeed_peer
from towpath.bench.ring_reduce_scatter import use_ring
from towpath.bench.workload import Workload
from towpath.core.strategy import Strategy
from towpath.topology.cluster import Extent, Topology

# (the model, whether this micro-step is the last) → the context of a micro-step
Context = Callable[[Any, bool], AbstractContextManager[Any]]

BUCKET_MEBIBYTES = 8
AUTO, DEEPSPEED = "auto", "deepspeed"
POWERSGD_FROM_STEP = 2  # the first that its state takes with error feedback and a warm start
OPTIONS = {
    "fsdp2": ("tuned", "reshard", "sync", "silent", "ring"),
    "hsdp": ("tuned", "reshard", "sync", "ring"),
    "torch-ddp": ("tuned", "bf16", "powersgd"),
    DEEPSPEED: deepspeed_peer.OPTIONS,
    "bare": ("barrier",),
    "compute": (),
}


# What a contestant of ours writes as "2x1": over two ranks of one node.
EXTENTS = frozenset({"frozen", "group", "params", "grads", "optimizer", "backward_params"})


@dataclass(frozen=True, slots=True)
class CandidateSpec:
    """A contestant's text, taken apart: 'fsdp2 tuned reshard=no', 'zero3 route=hierarchical'."""

    name: str
    options: dict[str, str]

    @staticmethod
    def parse(text: str) -> CandidateSpec:
        name, *words = text.split()
        options = {option: value for option, _, value in (word.partition("=") for word in words)}
        if name in OPTIONS and (unknown := options.keys() - set(OPTIONS[name])):
            raise ValueError(
                f"contestant {text!r}: {name} has no option {', '.join(sorted(unknown))}; "
                f"there are {', '.join(OPTIONS[name]) or 'none'}."
            )
        if name not in OPTIONS and name not in (AUTO, *towpath.strategies()):
            there = ", ".join((*OPTIONS, AUTO, *towpath.strategies()))
            raise ValueError(f"contestant {text!r}: there is neither a peer nor a strategy {name!r}, only {there}.")
        if name == DEEPSPEED:
            deepspeed_peer.check_options(options)
        return CandidateSpec(name, options)

    @property
    def foreign(self) -> bool:
        return self.name in OPTIONS

    def has(self, option: str) -> bool:
        return option in self.options

    def strategy(self, topology: Topology) -> Strategy:
        """Of ours: a preset with its options, 'zero3 frozen=1x1'."""
        options: dict[str, Any] = dict(self.options)
        for option in options.keys() & EXTENTS:
            options[option] = Extent(*map(int, options[option].split("x")))
        return towpath.strategy(self.name, topology, **options)


def build(text: str, workload: Workload) -> tuple[Any, Context]:
    """The model of a contestant, by its own engine, and the context of its micro-steps."""
    kind = CandidateSpec.parse(text)
    match kind.name:
        case "bare":
            return workload.model(), _barrier_after_the_last if kind.has("barrier") else _nothing
        case "compute":
            return workload.model().to(workload.torch_dtype), _nothing
        case "fsdp2" | "hsdp":
            return _fsdp(kind, workload)
        case "torch-ddp":
            return _ddp(kind, workload)
        case "deepspeed":
            return deepspeed_peer.build(kind.options, workload), _nothing
        case _:
            return _ours(kind, workload)


def tuned(contestant: str) -> str | None:
    """What a peer is also raced as."""
    kind = CandidateSpec.parse(contestant)
    if not kind.foreign or kind.has("tuned") or "tuned" not in OPTIONS[kind.name]:
        return None
    return " ".join((kind.name, "tuned", *contestant.split()[1:]))


def _nothing(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def _barrier_after_the_last(model: Any, last: bool) -> Generator[None]:
    yield
    if last:
        dist.barrier()


def _ours(kind: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    precision = workload.precision
    if kind.name == AUTO:
        made = towpath.shard(workload.model(), AUTO, precision=precision, workload=_planned(kind, workload))
    else:
        made = towpath.shard(workload.model(), kind.strategy(workload.topology), precision=precision)
    return made, _no_sync_before_the_last


def _no_sync_before_the_last(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else model.no_sync()


def _planned(kind: CandidateSpec, workload: Workload) -> towpath.Workload:
    """What "auto" is told of the training loop."""
    allowed = tuple(kind.options["allow"].split(",")) if kind.has("allow") else ()
    tokens, inputs = workload.batch * workload.length, next(workload.data(0))
    return towpath.Workload(tokens, workload.micro_steps, allow=allowed, inputs=inputs)


def _fsdp(kind: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    narrow = workload.dtype != "float32"
    dtype = workload.torch_dtype
    policy = MixedPrecisionPolicy(dtype, dtype) if narrow else MixedPrecisionPolicy()
    nodes, ranks_per_node = workload.topology.nodes, workload.topology.ranks_per_node
    shape = (workload.topology.world,) if kind.name == "fsdp2" else (nodes, ranks_per_node)
    mesh = init_device_mesh(device_of_job().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    reshard: bool | int | None = None
    if kind.has("reshard"):
        reshard = _reshard(kind.options["reshard"], ranks_per_node)
    made: Any = workload.silent_model() if kind.has("silent") else workload.model()
    for module in (*made.blocks, made):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if kind.has("tuned"):
        _prefetched(made)
    if kind.has("ring"):
        use_ring(made, workload.topology)
    return made, _fsdp_context(kind)


def _reshard(text: str, ranks_per_node: int) -> bool | int:
    if text == "no":
        return False
    return ranks_per_node if text == "node" else int(text)


def _prefetched(made: Any) -> None:
    """Each unit's gather begins while the one before it computes, in both directions."""
    blocks = list(made.blocks)
    made._set_unshard_async_op(True)
    made.set_modules_to_forward_prefetch(blocks[:1])
    made.set_modules_to_backward_prefetch(blocks[-1:])
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _fsdp_context(kind: CandidateSpec) -> Context:
    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        if kind.has("sync"):
            model.set_requires_gradient_sync(last)
        elif kind.name == "hsdp":
            model.set_requires_all_reduce(last)
        if kind.options.get("reshard") == "no":
            model.set_reshard_after_backward(last)
        return nullcontext()

    return context


def _ddp(kind: CandidateSpec, workload: Workload) -> tuple[Any, Context]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = workload.model()
    how: dict[str, Any] = {}
    if kind.has("tuned"):
        how = {"bucket_cap_mb": BUCKET_MEBIBYTES, "gradient_as_bucket_view": True, "static_graph": True}
    if kind.has("powersgd") and dist.get_backend() == "gloo":
        how["bucket_cap_mb"] = ceil(sum(p.nbytes for p in model.parameters()) / 2**20)
    made = DistributedDataParallel(model, **how)
    if kind.has("bf16"):
        made.register_comm_hook(None, _bf16_hook())
    if kind.has("powersgd"):
        rank = int(kind.options["powersgd"])
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=POWERSGD_FROM_STEP)
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    context = _no_sync_after_the_first() if kind.has("tuned") else _nothing
    return made, _in_narrow(context, workload) if workload.computes_narrow else context


def _bf16_hook() -> Callable[..., Any]:
    """PyTorch's own, which is refused under its own name except on NCCL. (Annotated, DDP would compare the types.)"""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return lambda state, bucket: bf16_compress_hook(state, bucket)  # pyright: ignore[reportUnknownLambdaType]


def _in_narrow(context: Context, workload: Workload) -> Context:
    """DDP keeps its parameters in fp32; what computes in the workload's dtype is autocast, as its users have it."""

    def narrow(model: Any, last: bool) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(context(model, last))
        stack.enter_context(torch.autocast(device_of_job().type, workload.torch_dtype))
        return stack

    return narrow


def _no_sync_after_the_first() -> Context:
    """A static graph is recorded in the first micro-step, which has to sum: else an assertion inside DDP fails."""
    recorded = False

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        nonlocal recorded
        recorded, sums = True, last or not recorded
        return nullcontext() if sums else model.no_sync()

    return context
