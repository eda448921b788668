"""The comparison behind `towpath bench`: our strategies against PyTorch's DDP, HSDP and FSDP2 on one cluster.

Every candidate trains the same GPT on random tokens. A round measures each candidate once: the ranks build the model,
take warm-up steps, take timed steps, and release everything. So only one model is in memory at a time. The order of the
candidates changes from round to round, and a machine whose speed drifts favors none of them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import comb
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn import functional as F

import lab
import towpath
from towpath.auto.probe import device_of_job
from towpath.core.formats import Codec, item_bytes
from towpath.core.presets import parse_strategy
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.errors import ConfigError, StepError, TowpathError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups
from towpath.topology.init import first_line
from towpath.topology.store import StatusStore
from towpath.train.models.gpt import GPT, Shape

CONFIDENCE = 0.95
COMPUTE = "compute only"
STRATEGIES = ("zero3", "mics", "paro-iig", "zero++")
PEERS = ("fsdp2", "hsdp", "hsdp reshard=no", "torch-ddp")
HEAD_WIDTH = 64
# Width, blocks and vocabulary by name.
MODELS = {
    "tiny": (192, 6, 2048),
    "125m": (768, 12, 32_768),
    "350m": (1024, 24, 32_768),
    "1b": (2048, 16, 32_768),
    "3b": (3072, 24, 32_768),
    "7b": (4096, 32, 32_768),
}
WARM_UP_STEPS = 2
_MEASURE_SECONDS = 1800.0
# How long a rank that has failed waits for the results of the others before it ends the comparison, how long any rank
# waits for those who are not in a collective, and how often a measuring rank looks whether another has ended it.
_GRACE_SECONDS, _REPORT_SECONDS, _WATCH_SECONDS = 5.0, 60.0, 1.0
_ENDING = threading.Lock()

# (the model, whether this micro-step is the last) -> the context of the micro-step
MicroStepContext = Callable[[Any, bool], AbstractContextManager[Any]]


# Statistics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval that contains a median with probability `coverage`, for any distribution of the rounds."""

    low: float
    high: float
    coverage: float


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the sign test's interval of the median: the narrowest one that reaches `confidence`.

    With fewer than six values, no interval reaches 95 %. The result is then the smallest and the largest value, and
    `coverage` says how often that is enough.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0  # the probability that the median is below the value of this rank
    chosen = Interval(ordered[0], ordered[-1], 1 - 2 * 0.5**count)
    for rank in range(count // 2):
        outside += comb(count, rank) * 0.5**count
        if 1 - 2 * outside < confidence:
            break
        chosen = Interval(ordered[rank], ordered[-1 - rank], 1 - 2 * outside)
    return chosen


def interleave(candidates: Sequence[str], round_number: int) -> list[str]:
    """Return the order of one round: odd rounds reverse the round before, and every second round starts one later.

    In an even number of rounds, every candidate has the same place on average.
    """
    shift = round_number // 2 % len(candidates)
    forward = [*candidates[shift:], *candidates[:shift]]
    return forward[::-1] if round_number % 2 else forward


# Candidates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The work of every candidate: a GPT of this size, `batch` sequences of `length` tokens in each micro-step."""

    width: int
    depth: int
    vocabulary: int
    length: int
    batch: int
    micro_steps: int
    dtype: str
    steps: int

    def __str__(self) -> str:
        plural = "s" * (self.micro_steps > 1)
        return (
            f"A GPT of {self.parameters / 1e6:,.0f} million parameters ({self.depth} blocks of width {self.width}) "
            f"in {self.dtype}: {self.batch} sequences of {self.length} tokens per rank, {self.micro_steps} "
            f"micro-step{plural}."
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, without those of norms."""
        return 12 * self.depth * self.width**2 + 2 * self.vocabulary * self.width

    def model(self) -> GPT:
        """Return the model with the same weights on every rank."""
        torch.manual_seed(0)
        heads = self.width // HEAD_WIDTH
        shape = Shape(
            vocabulary=self.vocabulary,
            width=self.width,
            depth=self.depth,
            heads=heads,
            kv_heads=heads,
            hidden=8 * self.width // 3,
            tied=False,
        )
        return GPT(shape)


def parse_model(text: str) -> tuple[int, int, int]:
    """Return width, blocks and vocabulary of a model, by its name in `MODELS` or as "1024x24"."""
    if text in MODELS:
        return MODELS[text]
    width, _, depth = text.partition("x")
    if not (width.isdecimal() and depth.isdecimal()) or int(width) % HEAD_WIDTH or not int(width) or not int(depth):
        raise ConfigError(
            f"--model {text}: expected {', '.join(MODELS)}, or WIDTHxDEPTH with a width that {HEAD_WIDTH} divides."
        )
    return int(width), int(depth), MODELS["125m"][2]


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
    for text in peers:
        if text not in (*PEERS, "fsdp2 reshard=no"):
            raise ConfigError(f"--peers: there is no peer {text!r}, only {', '.join(PEERS)} and fsdp2 reshard=no.")
        kinds[text] = "peer"
    return kinds


def prefetch_next_block(model: Any) -> None:
    """Let FSDP2 start each block's all-gather while the block before it computes, in both directions."""
    blocks = list(model.blocks)
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


@functools.cache
def _mesh(device: str, shape: tuple[int, ...]) -> Any:
    """Return a mesh that all rounds share: process groups keep threads and connections until the job ends."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _fsdp(text: str, model: GPT, setup: TrainingSetup, topology: Topology) -> tuple[Any, MicroStepContext]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    keeps_weights, hsdp = "reshard=no" in text, text.startswith("hsdp")
    shape = (topology.nodes, topology.ranks_per_node) if hsdp else (topology.world,)
    dtype = getattr(torch, setup.dtype)
    policy = MixedPrecisionPolicy() if setup.dtype == "float32" else MixedPrecisionPolicy(dtype, dtype)
    made: Any = model
    for module in (*made.blocks, made):
        fully_shard(
            module,
            mesh=_mesh(device_of_job().type, shape),
            mp_policy=policy,
            reshard_after_forward=False if keeps_weights else None,
        )
    prefetch_next_block(made)

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        if hsdp:
            model.set_requires_all_reduce(last)
        if keeps_weights:
            model.set_reshard_after_backward(last)
        return nullcontext()

    return made, context


def _ddp(model: GPT, setup: TrainingSetup) -> tuple[Any, MicroStepContext]:
    from torch.nn.parallel import DistributedDataParallel

    made = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if setup.dtype == "bfloat16":
        register_bf16_hook(made)

    def context(model: Any, last: bool) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if not last:
            stack.enter_context(model.no_sync())
        if setup.dtype != "float32":
            stack.enter_context(torch.autocast(device_of_job().type, getattr(torch, setup.dtype)))
        return stack

    return made, context


def _build(candidate: str, setup: TrainingSetup, topology: Topology) -> tuple[Any, MicroStepContext]:
    model = setup.model().to(device_of_job())
    if candidate == COMPUTE:
        return model.to(getattr(torch, setup.dtype)), lambda model, last: nullcontext()
    if candidate.startswith(("fsdp2", "hsdp")):
        return _fsdp(candidate, model, setup, topology)
    if candidate == "torch-ddp":
        return _ddp(model, setup)
    dtype = getattr(torch, setup.dtype)
    precision = towpath.Precision() if setup.dtype == "float32" else towpath.Precision(dtype, dtype)
    made = towpath.shard(model, parse_strategy(candidate, topology), precision=precision)
    return made, lambda model, last: nullcontext() if last else model.no_sync()


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One candidate in one round: seconds of a step, and what it sent between nodes and held, where that is known."""

    seconds: float
    sent_bytes: float | None = None
    memory_bytes: int | None = None


def measure(
    rank: int, world: int, candidate: str, setup: TrainingSetup, topology: Topology, in_lab: bool = True
) -> Sample:
    """Train a candidate for a few steps and return this rank's sample. Every rank must call it."""
    device = device_of_job()
    on_gpu = device.type == "cuda"
    if in_lab:
        torch.set_num_threads(1)  # all ranks share the cores of one machine
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model, context = _build(candidate, setup, topology)
    optimizer = None if candidate == COMPUTE else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(rank)

    def step() -> None:
        for micro in range(setup.micro_steps):
            tokens = torch.randint(
                setup.vocabulary, (setup.batch, setup.length + 1), device=device, generator=generator
            )
            with context(model, micro == setup.micro_steps - 1):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss / setup.micro_steps).backward()
        if optimizer is None:
            model.zero_grad()
            return
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def wait_for_all() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        if world > 1:
            dist.barrier()

    for _ in range(WARM_UP_STEPS):
        step()
    wait_for_all()
    sent_before = lab.link_counters().sent_bytes if in_lab else 0
    wait_for_all()  # no rank may send before every rank has read its counter
    began = time.perf_counter()
    for _ in range(setup.steps):
        step()
    wait_for_all()
    seconds = (time.perf_counter() - began) / setup.steps
    sent = (lab.link_counters().sent_bytes - sent_before) / setup.steps if in_lab else None
    return Sample(seconds, sent, torch.cuda.max_memory_allocated() if on_gpu else None)


def measure_in_lab(cluster: lab.Lab, candidate: str, setup: TrainingSetup) -> Sample:
    """Measure a candidate in new processes of an emulated cluster."""
    topology = cluster.topology
    ranks = cluster.call(measure, candidate, setup, topology, timeout_seconds=_MEASURE_SECONDS)
    sent = sum(rank.sent_bytes for rank in ranks[:: topology.ranks_per_node])
    return Sample(ranks[0].seconds, sent)


def measure_in_job(
    groups: Groups, topology: Topology, candidate: str, setup: TrainingSetup, report_end: Callable[[str], None]
) -> Sample:
    """Measure a candidate in the processes of this job. Every rank must call it.

    The ranks compare their results through the store, which needs no process group. If a rank fails while others wait
    for it in a collective, nothing can wake these. Then every rank calls `report_end` with the error, and exits.

    Raises:
        StepError: The candidate failed on some rank, and no rank waits for it. Every rank raises it.
    """
    status = groups.shared("status of bench", lambda: StatusStore(f"{groups.name}/bench", groups.rank, groups.world))
    number: int = next(groups.shared("measurements of bench", count))
    sample, failure, done = Sample(0.0), "", threading.Event()
    watching = partial(_end_if_a_peer_does, status, done, report_end)
    threading.Thread(target=watching, name="towpath-bench-watch", daemon=True).start()
    try:
        sample = measure(groups.rank, groups.world, candidate, setup, topology, in_lab=False)
    except Exception as error:
        # The last lines of an error's text are often general advice, as with CUDA.
        failure = f"{type(error).__name__}: {first_line(error)}"
    done.set()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    word = json.dumps([failure, sample.seconds, sample.memory_bytes])
    words = status.exchange(f"measurement {number}", word, _GRACE_SECONDS if failure else _REPORT_SECONDS)
    answers = {rank: json.loads(words[rank]) for rank in sorted(words)}
    failed = {rank: problem for rank, (problem, _, _) in answers.items() if problem}
    error = _end_of(status) if failed else None  # another rank's process has ended, and this one has noticed
    if error is None and len(words) < groups.world:
        cause = f"rank {min(failed)}: {candidate}: {failed[min(failed)]}" if failed else f"{candidate}: a rank is gone"
        what_to_do = "Other ranks waited there, so the comparison ends. Fix it, or leave the candidate out."
        error = f"{cause.rstrip('.')}. {what_to_do}"
    if error is not None:
        _end(status, error, report_end)
    if failed:
        raise StepError(f"rank {min(failed)}: {failed[min(failed)]}")
    held = [memory for _, _, memory in answers.values() if memory is not None]
    return Sample(answers[0][1], None, max(held, default=None))


def _end_if_a_peer_does(status: StatusStore, done: threading.Event, report_end: Callable[[str], None]) -> None:
    """End this process if another rank ends the comparison, and the main thread is not `done` with its measurement."""
    while not done.wait(_WATCH_SECONDS):
        if (error := _end_of(status)) is not None:
            _end(status, error, report_end)


def _end_of(status: StatusStore) -> str | None:
    """Return the error with which some rank has ended the comparison, or None."""
    return next(filter(None, status.read(range(status.world)).values()), None)


def _end(status: StatusStore, error: str, report_end: Callable[[str], None]) -> NoReturn:
    """End this process once all ranks have reported `error`: a launcher stops all ranks when the first one ends."""
    _ENDING.acquire()  # never released: the other thread of this process waits here until the process ends
    status.post(error)
    try:
        report_end(error)
        status.exchange("end", "", _REPORT_SECONDS)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def reason_of(error: Exception) -> str:
    """Return the last line of an error's text. In the traceback of a rank, that line is the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@dataclass(frozen=True, slots=True)
class Comparison:
    """The samples of every candidate by round, the order of each round, and why some candidates were left out."""

    kinds: Mapping[str, str]
    order: list[list[str]]
    samples: dict[str, list[Sample]]
    failures: dict[str, str]

    def seconds(self, candidate: str) -> list[float]:
        """Return the seconds of a step of a candidate, by round."""
        return [sample.seconds for sample in self.samples[candidate]]

    def step(self, candidate: str) -> float:
        """Return the median of the seconds of a step of a candidate."""
        return median(self.seconds(candidate))

    def fastest(self, *kinds: str) -> str | None:
        """Return the fastest candidate of some kinds, or None if none of them ran."""
        found = [name for name in self.samples if self.kinds.get(name) in kinds]
        return min(found, key=self.step, default=None)

    def speedup(self, candidate: str, over: str) -> tuple[float, Interval]:
        """Return a ratio of medians, above 1 where `candidate` is faster, and the interval of the ratio in a round."""
        # A comparison that ended early lacks samples of some candidates in its last round.
        rounds = zip(self.seconds(over), self.seconds(candidate), strict=False)
        return self.step(over) / self.step(candidate), interval_of_median([slow / fast for slow, fast in rounds])

    def verdicts(self) -> list[str]:
        """Return one sentence on our fastest lossless candidate, one on our fastest lossy one, and what limits them."""
        peer, sentences = self.fastest("peer"), list[str]()
        rounds = min(map(len, self.samples.values()), default=0)
        coverage = 1 - 2 * 0.5**rounds
        for kind in ("ours", "ours, lossy"):
            ours = self.fastest(kind)
            if peer is None or ours is None:
                continue
            ratio, interval = self.speedup(ours, peer)
            bounds = f"({interval.coverage:.0%} interval {interval.low:.2f} to {interval.high:.2f})"
            if rounds == 1:
                text = f"{ours}: {ratio:.2f} times the speed of {peer} in one round."
            elif interval.low <= 1 <= interval.high:
                text = f"No measurable difference: {ours} against {peer}, ratio {ratio:.2f} {bounds}."
            else:
                verb = "is" if coverage >= CONFIDENCE else "was, in these rounds,"
                text = f"{ours} {verb} {ratio:.2f} times as fast as {peer} {bounds}."
            sentences.append(text + " It rounds what it sends." * (kind == "ours, lossy"))
        if rounds and coverage < CONFIDENCE:
            why = f"intervals of {rounds} rounds contain the true ratio in {coverage:.0%} of cases only"
            why = "one round has no interval" if rounds == 1 else why
            sentences.append(f"Not conclusive: {why}. Use --rounds 6 or more.")
        return sentences


def compare(
    kinds: Mapping[str, str],
    rounds: int,
    measure: Callable[[str], Sample],
    say: Callable[[str], None],
    into: Comparison | None = None,
) -> Comparison:
    """Measure every candidate once in each round. A candidate that fails is left out from then on.

    Args:
        kinds: The candidates, with their kinds from `check_candidates`.
        rounds: How often each candidate is measured. An interval at 95 % needs six.
        measure: Returns the sample of a candidate, or raises `TowpathError`.
        say: Receives one line of progress for each sample.
        into: An empty comparison to fill, which another thread may read meanwhile. Default: a new one.
    """
    names = [*kinds, COMPUTE]
    found = into or Comparison(kinds, [], {}, {})
    began, done = time.monotonic(), 0
    for number in range(rounds):
        found.order.append(interleave(names, number))
        for name in found.order[-1]:
            try:
                sample = measure(name)
            except TowpathError as error:
                found.failures[name] = reason_of(error)
                say(f"{name}: left out: {found.failures[name]}")
                names.remove(name)
                found.samples.pop(name, None)
                continue
            found.samples.setdefault(name, []).append(sample)
            done += 1
            left = (time.monotonic() - began) / done * (sum(map(len, found.order)) - done)
            left += (time.monotonic() - began) / done * len(names) * (rounds - number - 1)
            say(f"round {number + 1} of {rounds}: {name}: {sample.seconds:.4g} s a step; about {left:.0f} s to go")
        if not names:
            break
    return found
