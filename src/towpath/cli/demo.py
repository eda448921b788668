"""`towpath demo`: what strategies do to a narrow network, seen on this machine in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from towpath import lab
from towpath.files import check_output_file


def demo(
    inter: Annotated[str, typer.Option(metavar="RATE", help="Rate of each node's cable, each way.")] = "200mbit",
    steps: Annotated[int, typer.Option(min=3, help="Optimizer steps under each strategy.")] = 16,
    output: Annotated[Path, typer.Option("-o", "--output", help="The report.")] = Path("report.html"),
    strategies: Annotated[
        list[str] | None, typer.Argument(metavar="[STRATEGY ...]", help="In place of the usual seven.")
    ] = None,
) -> None:
    """Train a small GPT on a shaped cluster of this machine, under one strategy after the other, and compare them.

    Example: `towpath demo --inter 100mbit zero3 mics zero++`

    Two nodes of two ranks: Linux network namespaces, joined by cables of the given rate, and taken down at the end.
    `auto` measures that cluster first, for some fifteen seconds, and trains with what the planner then ranks first.
    Where this machine allows no namespaces, the ranks share its loopback, and the demo says so. Writes a report with
    plots, which a browser opens without a network.
    """
    from towpath.train import demo as story
    from towpath.train.observe.report import HEADINGS, MARKS, fastest_first, rows_of, wins, write_report

    check_output_file("--output", output)
    names = strategies or list(story.STRATEGIES)
    configurations = [story.configuration(name, steps) for name in names]
    console = Console(width=100, highlight=False)
    rate, reason = lab.Rate.parse(inter), lab.available()
    where = f"2 nodes × 2 ranks, their cables {rate}" if reason is None else "4 ranks on one loopback, unshaped"
    if reason is not None:
        console.print(f"No shaped cluster here ({reason})")
    console.print(f"{where}; a small GPT learns the Python standard library's sources, {steps} steps a strategy.")
    outcomes: list[story.Outcome] = []
    with story.cluster(inter, reason) as launch:
        for number, config in enumerate(configurations, 1):
            console.print(f"  {number}/{len(names)} {config.strategy.name} …", style="dim")
            outcomes.append(launch(story.trained, config, reason is None)[0])
    table = Table(*HEADINGS, title="One optimizer step of each", title_justify="left", box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for outcome, row in zip(fastest_first(outcomes), rows_of(outcomes), strict=True):
        table.add_row(*row, style="bold" if wins(outcome, outcomes) else None)
    console.print(table)
    console.print(MARKS)
    console.print(
        "MB: what left one node over its cable, as the kernel counted it and as towpath.schedule() foretold it. "
        "Lossless strategies reach the same loss: they change what travels, not what is learned."
    )
    about = f"{where}. A GPT of our own on the Python standard library's sources, {steps} optimizer steps."
    write_report(output, "The same training, by strategy", about, outcomes)
    console.print(f"Plots: {output}")
