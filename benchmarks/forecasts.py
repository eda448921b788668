"""Forecasts of published runs (`published.toml`), each from one run of the same group on a single node.

    python -m benchmarks.forecasts [ROW …]            rows of the development half, or those named
    python -m benchmarks.forecasts --write            the forecasts of all rows, without what was printed, to
                                                      benchmarks/results/forecasts.json

The run on one node fixes one number: the share of the peak that matrix products reach. Everything else is a forecast of
the planner: the replay of PyTorch's order of events, on links of the printed rate. What the planner does not know is
here, as numbers with their source. Fitted ones are fitted on the development half alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import published
from benchmarks.published import Published, Run
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.strategy import Strategy, TransferKind
from towpath.plan.catalog import load_cluster
from towpath.plan.hardware import GIB, Cluster
from towpath.plan.model import Model, ModelUnit, Transformer
from towpath.plan.pytorch import Wrapper
from towpath.plan.request import Batching, Prediction, Request
from towpath.plan.solver import Solver
from towpath.topology.cluster import Extent

FILE = Path(__file__).parent / "results" / "forecasts.json"

# The share of a network's rate that collectives reach, as in the shipped clusters.
NETWORK = 0.85
# Bytes a second of one TCP socket, fitted on one run. NCCL opens one for each adapter, and four on Google's (its
# net_socket.cc).
SOCKET, SOCKETS = 1.4e9, {"oumi-polaris": 2, "oumi-gcp": 4, "oumi-gcp-single": 4}
# Attention counts in full. Causal kernels skip half, and reach a lower share of the peak than large matrices.
ATTENTION = 1.5
# What passes read and write in addition to matrix products, over what autograd keeps of a block.
TRAFFIC = 2.0
# How much longer computation takes while a collective runs: it shares the GPU's processors and memory with it.
CONTENTION = 0.3
# By the beginning of a GPU's name: the shipped cluster of that GPU, and bytes a second of its memory over that one's.
_GPUS = {
    "A100-SXM4-40": ("dgx-a100-800g", 0.76),
    "A100": ("dgx-a100-800g", 1.0),
    "H100": ("h100-400g", 1.0),
    "H200": ("h100-400g", 1.43),
}
_DTYPES: dict[str, Any] = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Forecast:
    """The planner's step of a run, and the run that fixed the rate of its GPU."""

    run: Run
    fixed_by: Run
    prediction: Prediction
    reached: float

    @property
    def tokens(self) -> float:
        """Tokens a second of each GPU."""
        return self.run.tokens_per_step / self.prediction.seconds / self.run.gpus

    @property
    def error(self) -> float:
        """How much longer the forecast step takes than the measured one, as a share."""
        return self.run.tokens_per_second_per_gpu / self.tokens - 1

    @property
    def exposed(self) -> float:
        """The share of the step in which communication is not hidden."""
        return self.prediction.waiting / self.prediction.seconds

    def recorded(self) -> dict[str, Any]:
        """Return the forecast as FILE keeps it."""
        figures = {"tokens/s/GPU": round(self.tokens, 1), "GiB": round(self.gib, 1), "exposed": round(self.exposed, 3)}
        return {"fixed by": self.fixed_by.id, "half": self.run.half, **figures}

    @property
    def gib(self) -> float:
        return gib_of(self.run)


def wrapper_of(run: Run) -> tuple[Wrapper, Extent | None]:
    """Return PyTorch's wrapper, and the group of ranks over which one copy of the weights is sharded."""
    each = run.synchronizes != "last"
    match run.parallelism:
        case "full shard":
            return Wrapper("FSDP", "zero3", sums_each=each), None
        case "shard gradients":
            return Wrapper("FSDP, SHARD_GRAD_OP", "zero2", sums_each=each), None
        case "hybrid shard":
            here = run.gpus // run.nodes
            group = Extent(here, run.shard // here) if run.shard > here else Extent(run.shard)
            return Wrapper("HSDP", "mics", kept=TransferKind.REDUCE, sums_each=each), group
        case _:
            return Wrapper("DDP", "ddp", kept=None, sums_each=run.synchronizes == "each"), None


def cluster_of(run: Run, reached: float) -> Cluster:
    """Return the cluster of a run, on as many nodes."""
    given = run.cluster
    base, faster = next(found for start, found in _GPUS.items() if given.gpu.startswith(start))
    here = run.gpus_on_node or given.gpus_per_node
    cluster = load_cluster(base).on(run.nodes, here)
    rate = min(NETWORK * given.node_gbits * 1e9 / 8, SOCKET * SOCKETS.get(given.id, 1 << 10))
    hardware = replace(
        cluster.hardware,
        inter=replace(cluster.hardware.inter, rate=rate),
        memory_rate=cluster.hardware.memory_rate * faster,
    )
    return replace(
        cluster,
        hardware=hardware,
        peak=(("bfloat16", given.bf16_flops),),
        reached=reached,
        memory=round(given.gpu_memory_gb * 1e9),
    )


def shape_of(run: Run) -> Transformer:
    given = run.model
    return Transformer(
        vocabulary=given.vocabulary,
        width=given.width,
        depth=given.layers,
        heads=given.heads,
        hidden=given.ffn,
        kv_heads=given.kv_heads,
        tied=given.tied,
        gated=given.gated,
        biases=False,
        positions=given.positions,
    )


@cache
def model_of(run: Run, bytes_rate: float, flops_rate: float) -> Model:
    """Return the model, whose units count as FLOPs also the time in which passes read and write memory."""
    shape = shape_of(run)
    whole = shape.model(run.model.id, run.sequence)
    attention = (ATTENTION - 1) * shape.attention_flops(run.sequence)
    again = (run.recomputed or 0.0) / 3 + 1 if run.checkpointing == "selective" else 1.0

    def slower(unit: ModelUnit) -> ModelUnit:
        moved = TRAFFIC * (2 * unit.kept + 4 * unit.kept_fp32) / bytes_rate * flops_rate
        scores = attention * unit.modules if unit.spec.name.startswith("block") else 0.0
        return replace(unit, flops=again * (unit.flops + scores + moved))

    return Model(whole.name, whole.length, tuple(map(slower, whole.units)))


@cache
def held_model(run: Run) -> Model:
    """Return the model with the activations that PyTorch keeps."""
    model, given = shape_of(run).model(run.model.id, run.sequence), run.model

    def held(unit: ModelUnit) -> ModelUnit:
        if run.checkpointing == "selective" and unit.kept_input and not unit.spec.leaf:
            # torchtitan keeps the block's input, what attention gives, and every second matrix product.
            keys = given.width * given.kv_heads // given.heads
            unit = replace(unit, kept=unit.modules * (4 * given.width + keys + given.ffn), kept_fp32=0.0)
        buckets = tuple(replace(bucket, dtype=_DTYPES[run.states]) for bucket in unit.spec.buckets)
        unit = replace(unit, spec=replace(unit.spec, buckets=buckets))
        return unit

    return replace(model, units=tuple(map(held, model.units)))


def predicted(run: Run, reached: float) -> Prediction:
    """Return the planner's step of a run, if matrix products reach this share of the peak."""
    cluster = cluster_of(run, reached)
    solver, strategy, batching, wrapper = _job(
        run, cluster, model_of(run, cluster.hardware.memory_rate, cluster.flops_of("bfloat16"))
    )
    found = solver.predict(strategy, batching, partial(wrapper.steps, on_cpus=False))
    hidden = max(0.0, sum(found.in_flight.values()) - sum(found.exposed.values()))
    return replace(found, seconds=found.seconds + CONTENTION * hidden)


def gib_of(run: Run) -> float:
    """Return the memory that PyTorch's allocator gives to a rank at most. NCCL takes its own elsewhere."""
    solver, strategy, batching, _ = _job(run, cluster_of(run, 0.5), held_model(run), _DTYPES[run.states])
    found = solver.predict_memory(strategy, batching) | {"communicators": 0}
    if run.data_ranks > 1 and (run.parallelism == "replicate" or (run.synchronizes == "last" and run.accumulation > 1)):
        # DDP has its own copy in buckets. FSDP keeps whole gradients until the micro-batch that reduces them.
        found["whole gradients"] = 2 * run.model.parameters
    return sum(found.values()) / GIB


def _job(run: Run, cluster: Cluster, model: Model, kept: Any = "float32") -> tuple[Solver, Strategy, Batching, Wrapper]:
    """Return what the planner needs to predict a run. `kept`: the type in which sums of gradients are kept."""
    wrapper, group = wrapper_of(run)
    reduce = "float32" if run.reduce == "fp32" and kept == "float32" else "bfloat16"
    batch = run.micro_batch * run.accumulation * run.data_ranks
    solver = Solver(model, cluster, Request(batch, 1 << 60, Precision("bfloat16", reduce, kept)))
    options: dict[str, Any] = {} if group is None else {"group": group}
    strategy = presets.strategy(wrapper.preset, cluster.topology, route="flat", **options)
    return solver, strategy, Batching(run.micro_batch, run.accumulation, run.checkpointing == "full"), wrapper


@cache
def reached_by(run: Run) -> float:
    """Return the share of the peak with which the prediction of this run is what was printed."""
    reached = 0.5
    for _ in range(8):  # a step is nearly a constant plus what the share divides
        seconds = predicted(run, reached).seconds
        slope = (predicted(run, reached / 1.01).seconds - seconds) / 0.01
        reached /= max(0.2, 1 + (run.seconds - seconds) / slope)
        if abs(seconds / run.seconds - 1) < 1e-4:
            break
    return reached


def fixing(found: Published, run: Run) -> Run | None:
    """Return the run that fixes the rate of `run`'s group, or None.

    Where none was measured on one node, it is one of the development half that sends little between nodes for what it
    computes. Such forecasts are shown apart.
    """
    if (fixed := found.calibrating(run)) is not None:
        return fixed
    group = [each for each in found.across_nodes("development") if each.group == run.group and is_forecast(each)]
    hybrid = [each for each in group if each.parallelism == "hybrid shard"] or group
    return max(hybrid, key=lambda each: (each.micro_batch * each.sequence, -each.nodes, each.id), default=None)


def is_forecast(run: Run) -> bool:
    """Return whether the planner knows this kind of run: it has no tensor parallelism, and trains all weights."""
    return run.tensor * run.pipeline * run.context == 1 and run.trains == "all"


def forecast(found: Published, run: Run) -> Forecast | None:
    """Return the forecast of a run, or None if no other run fixes the rate of its GPU."""
    fixed = fixing(found, run)
    if fixed is None or fixed == run or not is_forecast(run):
        return None
    reached = reached_by(fixed)
    return Forecast(run, fixed, predicted(run, reached), reached)


def lines(forecasts: Iterable[Forecast]) -> Iterable[str]:
    """Yield a line for each forecast, with its error."""
    for each in forecasts:
        run = each.run
        yield (
            f"{run.id:<78} {run.tokens_per_second_per_gpu:>8.0f} {each.tokens:>8.0f} {each.error:>+6.1%} "
            f"exposed {each.exposed:>4.0%} {'bound' if run.bound else ''}"
            + (f" {run.memory_gib:.1f} GiB, forecast {each.gib:.1f}" if run.memory_gib else "")
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = published.load()
    runs = {run.id: run for run in found.runs}
    if unknown := [name for name in options.rows if name not in runs]:
        parser.error(f"no such row: {', '.join(unknown)}. Rows have the ids of benchmarks/published.toml.")
    if options.write and options.rows:
        parser.error("--write writes the forecasts of all rows: leave out the rows.")
    if options.write:
        every = {run.id: forecast(found, run) for run in found.runs}
        text = {name: each.recorded() for name, each in every.items() if each is not None}
        FILE.write_text(json.dumps(text, indent=1) + "\n")
        return
    named = [runs[name] for name in options.rows] or found.across_nodes("development")
    forecasts = {run.id: forecast(found, run) for run in named}
    for name in options.rows:
        if forecasts[name] is None:
            print(
                f"{name}: no forecast. It fixes the rate of its group, or no run does, or the planner lacks its kind."
            )
    made = [each for each in forecasts.values() if each is not None]
    print("\n".join(lines(made)))
    for fixed, about in ((True, "with a run of their group on one node"), (False, "without one")):
        errors = [abs(each.error) for each in made if (found.calibrating(each.run) is not None) is fixed]
        if errors:
            within = sum(error <= 0.15 for error in errors) / len(errors)
            print(f"{len(errors)} rows {about}: mean error {statistics.mean(errors):.1%}, {within:.0%} within 15 %")


if __name__ == "__main__":
    main()
