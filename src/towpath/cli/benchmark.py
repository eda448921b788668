"""`towpath bench`: our strategies against DDP, HSDP and FSDP2, on the ranks of this job."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from towpath.cli.terminal import check_launched, load_torch, table_of
from towpath.errors import ConfigError, StepError

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from towpath.comparison import Comparison


def bench(
    strategies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STRATEGY", help="By default zero3, mics, paro-iig and zero++."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="MODEL", help="tiny, 125m, 1b or 7b.")] = "125m",
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences per rank and micro-batch.")] = 4,
    length: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sequence.")] = 1024,
    micro_steps: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches per optimizer step.")] = 1,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Measurements. An interval at 95 % needs six.")] = 6,
    peers: Annotated[
        str, typer.Option(metavar="NAME,…", help="Baselines to compare with.")
    ] = "fsdp2,hsdp,hsdp reshard=no,torch-ddp",
) -> None:
    """Measure which strategy is the fastest on your network, next to FSDP2 and DDP.

    Example: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath bench --model 1b mics "mics gradients=int4:64"`

    All candidates train the same GPT, in bfloat16 on GPUs and in float32 on CPUs. Each round measures every candidate
    once, in a new order, with only one model in memory. A candidate that fails on all ranks is left out. If it fails on
    some, others may wait for them, and the comparison ends.

    Exit code: 0, or 1 if the comparison ended early or lacks all strategies or baselines, or 2 if nothing could start.
    """
    load_torch()
    import torch
    import torch.distributed as dist

    from towpath.comparison import MODELS, STRATEGIES, Comparison, TrainingSetup, check_candidates, measure_together
    from towpath.topology.cluster import Topology
    from towpath.topology.groups import Groups, detect_shape
    from towpath.topology.init import init
    from towpath.topology.store import StatusStore

    check_launched("bench")
    if model not in MODELS:
        raise ConfigError(f"--model {model}: expected {', '.join(MODELS)}.")
    dtype = torch.bfloat16 if init().type == "cuda" else torch.float32
    groups = Groups()
    topology = Topology(*detect_shape(groups))
    topology.check_equal("towpath bench")
    setup = TrainingSetup(model, length, batch, micro_steps, dtype)
    name = str(dtype).removeprefix("torch.")
    kinds = check_candidates(strategies or STRATEGIES, peers.split(",") if peers else (), topology, name)
    progress = Console(stderr=True, highlight=False, markup=False, quiet=groups.rank > 0, style="dim")
    progress.print(f"{topology.words}, {groups.backend(groups.device)}: a GPT ({model}) in {name}")
    status, found = StatusStore(f"{groups.name}/bench", groups.rank, groups.world), Comparison(kinds)
    try:
        found.run(rounds, partial(measure_together, status, setup, topology), progress.print)
    except StepError as error:
        print(f"towpath: {error}", file=sys.stderr, flush=True)
        show(found, quiet=groups.rank > 0)
        os._exit(1)  # to destroy the process group would wait for the collectives of other ranks
    show(found, quiet=groups.rank > 0)
    dist.destroy_process_group()
    if (peers and found.fastest("peer") is None) or found.fastest("ours", "ours, lossy") is None:
        raise typer.Exit(1)


def show(found: Comparison, quiet: bool = False) -> None:
    """Print the table of a comparison in 100 columns, the fastest candidate first."""
    from towpath.comparison import CONFIDENCE
    from towpath.progress import format_bytes

    peer, coverage = found.fastest("peer"), 1.0
    table = table_of("candidate", "", "step", "speed-up", "interval", "GPU memory", numbers=2)
    for name in sorted(found.samples, key=found.step):
        kind, ratio, interval = found.kinds[name], "", ""
        if peer is not None:
            speedup, each = found.speedup(name, peer)
            ratio, coverage = f"{speedup:.2f}", each.coverage
            interval = "" if name == peer else f"{each.low:.2f} – {each.high:.2f}"
        memory = max(sample.memory_bytes for sample in found.samples[name])
        marks = "+" * kind.startswith("ours") + "~" * kind.endswith("lossy")
        table.add_row(name, marks, f"{found.step(name):.4g} s", ratio, interval, format_bytes(memory) if memory else "")
    console = Console(width=100, highlight=False, markup=False, quiet=quiet)
    console.print(table)
    for name, why in found.failures.items():
        console.print(f"{name}: left out: {why}")
    console.print("+: Towpath. ~: lossy, a codec rounds what it sends. Speed-ups are over the fastest peer, with")
    console.print(f"{coverage:.0%} intervals." + " Not conclusive: use --rounds 6 or more." * (coverage < CONFIDENCE))
    sys.stdout.flush()
