"""`towpath bench`: our strategies against PyTorch's DDP, HSDP and FSDP2. `benchmarks/` uses its peers and interval.

Every candidate trains the same GPT on random tokens. A round measures each once, with one model in memory at a time.
The order changes from round to round, and a machine whose speed drifts favors none of them.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import comb
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

import towpath
from towpath.core.formats import Codec, item_bytes
from towpath.core.presets import parse_strategy
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.errors import ConfigError, StepError, TowpathError
from towpath.plan.cluster_probe import device_of_job
from towpath.topology.cluster import Topology
from towpath.topology.init import first_line
from towpath.topology.store import StatusStore
from towpath.train.models import GPT, Shape

CONFIDENCE, TIMED_STEPS = 0.95, 5
STRATEGIES = ("zero3", "mics", "paro-iig", "zero++")
PEERS = ("fsdp2", "fsdp2 reshard=no", "hsdp", "hsdp reshard=no", "torch-ddp")
# Width, blocks and vocabulary by name.
MODELS = {"tiny": (192, 6, 2048), "125m": (768, 12, 32_768), "1b": (2048, 16, 32_768), "7b": (4096, 32, 32_768)}
# How long a rank waits at the store for the results of others. One that has failed does not wait long: they may be in a
# collective that waits for it.
_REPORT_SECONDS, _GRACE_SECONDS = 60.0, 5.0

# (the model, whether this micro-step is the last) -> the context of the micro-step
MicroStepContext = Callable[[Any, bool], AbstractContextManager[Any]]


class ConfidenceInterval(NamedTuple):
    """An interval that contains a median with probability `coverage`, for any distribution of the rounds."""

    low: float
    high: float
    coverage: float


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> ConfidenceInterval:
    """Return the sign test's interval of the median: the narrowest one that reaches `confidence`.

    No interval of fewer than six values reaches 95 %. The result is then that of the smallest and the largest value.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # the probability that the median is below the value of this rank
    chosen = ConfidenceInterval(ordered[0], ordered[-1], 1 - 2 * 0.5**count)
    for rank in range(count // 2):
        outside += comb(count, rank) * 0.5**count
        if 1 - 2 * outside < confidence:
            break
        chosen = ConfidenceInterval(ordered[rank], ordered[-1 - rank], 1 - 2 * outside)
    return chosen


def interleave(candidates: Sequence[str], round_number: int) -> list[str]:
    """Return the order of a round. In an even number of rounds, every candidate has the same place on average."""
    shift = round_number // 2 % len(candidates)
    forward = [*candidates[shift:], *candidates[:shift]]
    return forward[::-1] if round_number % 2 else forward


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The work of every candidate: a model of `MODELS`, and `batch` sequences of `length` tokens in a micro-step."""

    model: str
    length: int
    batch: int
    micro_steps: int
    dtype: torch.dtype


def is_lossless(strategy: Strategy, dtype: str) -> bool:
    """Return whether a strategy sends every value in at least the precision of `dtype`."""
    codecs = [strategy.transport(kind).codec for kind in WITH_TRANSPORT if getattr(strategy.moves, kind.value)]
    # A codec with scales rounds every value, whatever its width.
    return all(
        codec == "none"
        or (isinstance(codec, Codec) and codec.largest is None and codec.encoded_bytes(1) >= item_bytes(dtype))
        for codec in (*codecs, strategy.frozen_codec)
    )


def check_candidates(strategies: Sequence[str], peers: Sequence[str], topology: Topology, dtype: str) -> dict[str, str]:
    """Return the kind of each candidate: "ours", "ours, lossy" or "peer". Raise `ConfigError` for an unknown one."""
    kinds: dict[str, str] = {}
    for text in strategies:
        try:
            kinds[text] = "ours" if is_lossless(parse_strategy(text, topology), dtype) else "ours, lossy"
        except (TowpathError, TypeError, ValueError) as error:
            raise ConfigError(f"strategy {text!r}: {error}") from None
    if unknown := [text for text in peers if text not in PEERS]:
        raise ConfigError(f"--peers: there is no peer {unknown[0]!r}, only {', '.join(PEERS)}.")
    return kinds | dict.fromkeys(peers, "peer")


def fully_shard_blocks(
    model: Any, topology: Topology, dtype: torch.dtype, hsdp: bool = False, reshard: bool | int | None = None
) -> MicroStepContext:
    """Shard a model with blocks by FSDP2, or by HSDP: over the ranks of a node, with a copy on each node.

    `reshard` is FSDP2's `reshard_after_forward`. In the returned context, HSDP all-reduces and `reshard=False` releases
    the weights only in the last micro-step.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (topology.nodes, topology.ranks_per_node) if hsdp else (topology.world,)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, dtype)
    for module in (*_blocks(model), model):
        fully_shard(module, mesh=_mesh(device_of_job().type, shape), mp_policy=policy, reshard_after_forward=reshard)

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        if hsdp:
            model.set_requires_all_reduce(last)
        if reshard is False:
            model.set_reshard_after_backward(last)
        return nullcontext()

    return context


def _blocks(model: torch.nn.Module) -> list[Any]:
    return [*next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))]


@cache
def _mesh(device: str, shape: tuple[int, ...]) -> Any:
    """Return a mesh that all rounds share: process groups keep threads and connections until the job ends."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def prefetch_next_block(model: Any) -> None:
    """Let FSDP2 start each block's all-gather while the block before it computes, in both directions."""
    blocks = _blocks(model)
    # On gloo, FSDP2 waits for a prefetched all-gather at once, unless it is asynchronous. On a GPU, asynchronous
    # all-gathers would be slower: their casts and copies no longer overlap. No public setter exists.
    if device_of_job().type == "cpu":
        model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:1])
    model.set_modules_to_backward_prefetch(blocks[-1:])
    for before, after in pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def register_bf16_hook(model: Any) -> None:
    """Let DDP send its gradients in bf16, also on gloo, where DDP refuses PyTorch's hook under its own name."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))  # pyright: ignore[reportUnknownLambdaType]


def _build(candidate: str, setup: TrainingSetup, topology: Topology) -> tuple[Any, MicroStepContext]:
    torch.manual_seed(0)
    width, depth, vocabulary = MODELS[setup.model]
    heads, hidden, dtype = width // 64, 8 * width // 3, setup.dtype
    sizes = {"width": width, "depth": depth, "vocabulary": vocabulary, "hidden": hidden, "heads": heads}
    model: Any = GPT(Shape(**sizes, tied=False)).to(device_of_job())
    if candidate.startswith(("fsdp2", "hsdp")):
        reshard = False if "reshard=no" in candidate else None
        context = fully_shard_blocks(model, topology, dtype, candidate.startswith("hsdp"), reshard)
        prefetch_next_block(model)
        return model, context
    if candidate == "torch-ddp":
        made = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if dtype == torch.bfloat16:
            register_bf16_hook(made)
    else:
        precision = towpath.Precision() if dtype == torch.float32 else towpath.Precision(dtype, dtype)
        made = towpath.shard(model, parse_strategy(candidate, topology), precision=precision)
    return made, lambda model, last: nullcontext() if last else model.no_sync()


class Sample(NamedTuple):
    """One candidate in one round: the seconds of a step, and the most GPU memory of a rank."""

    seconds: float
    memory_bytes: int = 0


def measure(rank: int, candidate: str, setup: TrainingSetup, topology: Topology) -> Sample:
    """Train a candidate for a few steps and return this rank's sample. Every rank must call it."""
    device = device_of_job()
    on_gpu, is_ddp = device.type == "cuda", candidate == "torch-ddp" and setup.dtype != torch.float32
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model, context = _build(candidate, setup, topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(rank)
    size, vocabulary = (setup.batch, setup.length + 1), MODELS[setup.model][2]

    def step() -> None:
        for micro in range(setup.micro_steps):
            tokens = torch.randint(vocabulary, size, device=device, generator=generator)
            # DDP's parameters stay in fp32. Other candidates cast theirs.
            with (
                context(model, micro == setup.micro_steps - 1),
                torch.autocast(device.type, setup.dtype, enabled=is_ddp),
            ):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss / setup.micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def seconds_of(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - began

    seconds_of(2)  # to record the order and to allocate
    return Sample(seconds_of(TIMED_STEPS) / TIMED_STEPS, torch.cuda.max_memory_allocated() if on_gpu else 0)


def measure_together(
    status: StatusStore, setup: TrainingSetup, topology: Topology, number: int, candidate: str
) -> Sample | str:
    """Return the sample of a candidate in a round, or why it failed on all ranks.

    If it failed on some ranks, others may wait for them. The process has to end then, with the StepError.
    """
    sample, failure = Sample(0.0), ""
    try:
        sample = measure(status.rank, candidate, setup, topology)
    except Exception as error:
        # The last lines of an error's text are often general advice, as with CUDA.
        failure = f"{type(error).__name__}: {first_line(error)}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    word, seconds = json.dumps([failure, *sample]), _GRACE_SECONDS if failure else _REPORT_SECONDS
    words = status.exchange(f"round {number}: {candidate}", word, seconds)
    answers = {rank: json.loads(words[rank]) for rank in sorted(words)}
    failures = [f"rank {rank}: {answer[0].rstrip('.')}" for rank, answer in answers.items() if answer[0]]
    if len(words) < status.world or 0 < len(failures) < status.world:
        raise StepError(
            f"{candidate}: {'; '.join(failures) or 'a rank is gone'}. Other ranks waited there, so the comparison "
            "ends. Fix it, or leave the candidate out."
        )
    return failures[0] if failures else Sample(answers[0][1], max(answer[2] for answer in answers.values()))


class Comparison:
    """The samples of every candidate by round, and why some candidates were left out."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = kinds
        self.samples: dict[str, list[Sample]] = {}
        self.failures: dict[str, str] = {}

    def run(self, rounds: int, measure: Callable[[int, str], Sample | str], say: Callable[[str], None]) -> None:
        """Measure every candidate once in each round, and `say` so. One that fails is left out from then on."""
        names, began = [*self.kinds], time.monotonic()
        for number in range(rounds):
            order = interleave(names, number) if names else []
            for place, name in enumerate(order, start=1):
                sample = measure(number, name)
                if isinstance(sample, str):
                    self.failures[name] = sample
                    self.samples.pop(name, None)
                    names.remove(name)
                    continue
                self.samples.setdefault(name, []).append(sample)
                left = (time.monotonic() - began) * (rounds / (number + place / len(order)) - 1)
                say(f"round {number + 1} of {rounds}: {name}: {sample.seconds:.4g} s a step; about {left:.0f} s to go")

    def step(self, candidate: str) -> float:
        return median(sample.seconds for sample in self.samples[candidate])

    def fastest(self, *kinds: str) -> str | None:
        """Return the fastest candidate of some kinds, or None if none of them ran."""
        return min((name for name in self.samples if self.kinds.get(name) in kinds), key=self.step, default=None)

    def speedup(self, candidate: str, over: str) -> tuple[float, ConfidenceInterval]:
        """Return a ratio of medians, above 1 where `candidate` is faster, and the interval of the ratio in a round."""
        # A comparison that ended early lacks samples of its last round.
        ratios = [a.seconds / b.seconds for a, b in zip(self.samples[over], self.samples[candidate], strict=False)]
        return self.step(over) / self.step(candidate), interval_of_median(ratios)
