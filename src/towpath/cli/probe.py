"""`towpath probe`: measure the links, processors and kernels of a cluster, on all its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towpath.cli.terminal import check_launched, load_torch, table_of
from towpath.files import check_output_file, write_output_file
from towpath.plan.profile import Profile, collective_seconds
from towpath.plan.tables import seconds
from towpath.progress import show_progress


def probe(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The profile, for `towpath plan --cluster`.")
    ] = Path("profile.json"),
    budget: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1, help="How long it may take, approximately.")
    ] = 60.0,
) -> None:
    """Measure this cluster: messages, collectives, codecs, memory, matrix products.

    Example: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath probe -o profile.json`

    Then: `towpath plan … --cluster profile.json`

    Exit code: 0, or 2 for a mistake.
    """
    load_torch()
    check_launched("probe")
    check_output_file("--output", output)
    profile = _measure(budget)
    if profile is None:
        return
    write_output_file("--output", output, profile.to_json())
    show(profile, output)


def _measure(budget: float) -> Profile | None:
    """Measure on all ranks. Return the profile on rank 0, and None on other ranks."""
    import torch.distributed as dist

    from towpath.plan.cluster_probe import probe as measure
    from towpath.topology.init import init

    init()
    try:
        if dist.get_rank():
            measure(budget_seconds=budget)
            return None
        with show_progress(f"Probing, for about {budget:.0f} s"):
            return measure(budget_seconds=budget)
    finally:
        dist.destroy_process_group()


def show(profile: Profile, output: Path) -> None:
    """Print a profile as a table. Collectives are compared with what single messages predict."""
    console = Console(width=100, highlight=False)
    console.print(f"{profile.topology.words} on {profile.host}")
    table = table_of("what", "largest size", "took", "latency", "rate, or from messages", numbers=1)
    hardware = profile.cluster(measured_collectives=False).hardware
    for what in dict.fromkeys(point.what for point in (*profile.singles(), *profile.collectives())):
        point, fit = profile.of(what)[-1], profile.fit(what)
        latency, rate = f"{fit.latency * 1e6:.0f} µs", f"{fit.rate / 1e9:.4g} GB/s"
        if what.startswith("matmul"):
            latency, rate = "", f"{2 * point.size**3 / point.usual / 1e9:.4g} GFLOP/s"
        elif "code " in what:
            rate = f"{fit.rate / 1e9:.4g} Gelements/s"
        elif point in profile.collectives():
            predicted = collective_seconds(point, hardware)
            latency, rate = "", f"{seconds(predicted)} ({predicted / point.usual - 1:+.0%})"
        table.add_row(what, f"{point.size:,}", seconds(point.usual), latency, rate)
    console.print(table)
    console.print(f"The profile: {output}", soft_wrap=True)
