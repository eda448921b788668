"""`towpath probe`: what a cluster's links, processors and kernels can do, measured on all its ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.planner.probe_checks import collective_seconds, slowdowns
from towpath.planner.profile import Profile
from towpath.planner.tables import seconds


def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile, for `towpath plan --cluster`.")] = Path(
        "profile.json"
    ),
    budget: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", min=1, help="How long it may take, about.")
    ] = 60.0,
    picture: Annotated[Path | None, typer.Option(help="Draw what was measured and fitted there, as .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile, too.")] = False,
) -> None:
    """Measure the cluster that this runs on: messages, collectives, codecs, memory, matrix products.

    Example: `towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- -m towpath probe -o profile.json`

    On a cluster: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath probe`

    Then: `towpath plan … --cluster profile.json`
    """
    from towpath.topology.groups import launched

    if not launched():
        raise ConfigError(
            "probe measures between ranks, and no launcher has placed this process as one. Start it by torchrun … -m "
            "towpath probe on every node, or by towpath lab run … -- -m towpath probe."
        )
    check_output_file("--output", output)
    check_output_file("--picture", picture)
    profile = _measured(budget)
    if profile is None:
        return
    output.write_text(profile.to_json(), encoding="utf-8")
    if picture is not None:
        from towpath.cli.probe_picture import drawn

        picture.write_text(drawn(profile), encoding="utf-8")
    if as_json:
        sys.stdout.write(profile.to_json())
    else:
        show(profile, output)


def _measured(budget: float) -> Profile | None:
    """By all ranks; rank 0 has it."""
    import torch.distributed as dist

    from towpath.auto.probe import probe as measure
    from towpath.topology.init import init
    from towpath.train.observe.bar import progress_bar

    init()
    try:
        if dist.get_rank():
            measure(budget_seconds=budget)
            return None
        with progress_bar("Probing") as say:
            return measure(budget_seconds=budget, say=say)
    finally:
        dist.destroy_process_group()


def show(profile: Profile, output: Path) -> None:
    console = Console(width=100, highlight=False)
    console.print(f"{profile.topology.nodes} nodes × {profile.topology.ranks_per_node} ranks on {profile.host}")
    table = Table("what", "sizes", "latency", "rate", "error of the fit", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
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
    if profile.routes():
        console.print(_routes(profile))
    if profile.pairs():
        console.print(_pairs(profile))
    if profile.host_points():
        console.print(_host(profile))
    console.print(f"The profile: {output}", soft_wrap=True)


def _pairs(profile: Profile) -> Table:
    table = Table("at the same time", "takes", "foretold", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for slowdown in slowdowns(profile):
        table.add_row(slowdown.what, f"{slowdown.measured:.2f} ×", f"{slowdown.foretold:.2f} ×")
    return table


def _host(profile: Profile) -> str:
    host = profile.cluster().hardware.host
    forward, backward = host.forward, host.backward
    return (
        f"The processor besides: in a forward pass {seconds(forward.unit)} a unit and {seconds(forward.parameter)} a "
        f"parameter, in a backward pass {seconds(backward.unit)} and {seconds(backward.parameter)}; "
        f"{seconds(host.transfer)} a transfer; the optimizer {seconds(host.optimizer)} a parameter."
    )


def _routes(profile: Profile) -> Table:
    """The largest collective of each kind, beside what follows from single messages: by that a plan is priced."""
    table = Table("collective", "bytes", "took", "from its messages", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for what in dict.fromkeys(point.what for point in profile.routes()):
        point = profile.of(what)[-1]
        foretold = collective_seconds(profile, point)
        difference = foretold / point.usual - 1
        table.add_row(what, f"{point.size:,}", seconds(point.usual), f"{seconds(foretold)} ({difference:+.0%})")
    return table
