"""`towpath probe`: measure the links, processors and kernels of a cluster, on all its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.terminal import check_launched, load_torch, table_of
from towpath.files import check_output_file, write_output_file
from towpath.plan.profile import Profile, collective_seconds
from towpath.plan.tables import seconds
from towpath.progress import working


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
        with working(f"Probing, for about {budget:.0f} s"):
            return measure(budget_seconds=budget)
    finally:
        dist.destroy_process_group()


def show(profile: Profile, output: Path) -> None:
    """Print a profile as tables."""
    console = Console(width=100, highlight=False)
    console.print(f"{profile.topology.words} on {profile.host}")
    table = table_of("what", "sizes", "latency", "rate", "error of the fit", numbers=2)
    for what in dict.fromkeys(point.what for point in profile.singles()):
        points = profile.of(what)
        fit = profile.fit(what)
        sizes = f"{points[0].size:,} to {points[-1].size:,}" if len(points) > 1 else f"{points[0].size:,}"
        unit, scale = ("Gelements/s", 1e9) if "code " in what else ("GB/s", 1e9)
        if what.startswith("matmul"):
            side, usual = points[-1].size, points[-1].usual
            table.add_row(what, sizes, "", f"{2 * side**3 / usual / 1e9:.4g} GFLOP/s", "")
            continue
        table.add_row(what, sizes, f"{fit.latency * 1e6:.0f} µs", f"{fit.rate / scale:.4g} {unit}", f"{fit.error:.0%}")
    console.print(table)
    if profile.collectives():
        console.print(_collectives(profile))
    console.print(f"The profile: {output}", soft_wrap=True)


def _collectives(profile: Profile) -> Table:
    """Compare the largest of each collective with its prediction from single messages."""
    table = table_of("collective", "bytes", "took", "from its messages", numbers=1)
    hardware = profile.cluster(measured_collectives=False).hardware
    for what in dict.fromkeys(point.what for point in profile.collectives()):
        point = profile.of(what)[-1]
        predicted = collective_seconds(point, hardware)
        compared = f"{seconds(predicted)} ({predicted / point.usual - 1:+.0%})"
        table.add_row(what, f"{point.size:,}", seconds(point.usual), compared)
    return table
