"""`towpath train`: from a TOML file to a trained model. `towpath demo`: compare strategies on an emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towpath import lab
from towpath.cli.terminal import load_torch, table_of
from towpath.files import check_output_file
from towpath.train.config import Config


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The model, the data, and how to train.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option with its value, and exit.")
    ] = False,
) -> None:
    """Train a model, sharded by the strategy that the file names.

    Example: `towpath train examples/gpt.toml train.steps=50`

    On several ranks: `torchrun --nproc-per-node 2 -m towpath train examples/gpt.toml strategy.name=paro-iig`

    All options and their meaning: `towpath train CONFIG.toml --print-config`

    Exit code: 0, or 1 if the training failed, or 2 if it could not begin, or 130 or 143 after Ctrl-C or SIGTERM.
    """
    read = Config.load(config, overrides or ())
    if print_config:
        print(read, end="")
        return
    load_torch()
    from towpath.train.trainer import run_training

    raise typer.Exit(run_training(read))


def demo(
    inter: Annotated[str, typer.Option(metavar="RATE", help="The rate of each node's cable, each way.")] = "200mbit",
    steps: Annotated[int, typer.Option(metavar="N", min=3, help="Optimizer steps under each strategy.")] = 16,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The report.")] = Path("report.html"),
    strategies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STRATEGY", help="The strategies to compare.", show_default="seven common ones"),
    ] = None,
) -> None:
    """Train a small GPT on an emulated cluster, under one strategy after the other, and compare them.

    Example: `towpath demo --inter 100mbit zero3 mics zero++`

    The cluster has two nodes with two ranks each. They are Linux network namespaces, joined by cables of the given
    rate. The strategy `auto` first measures this cluster for about 15 seconds, and then trains with the strategy that
    the planner ranks first. If this machine allows no namespaces, the ranks share its loopback, and the demo reports
    it. The report has plots, which a browser shows without a network.
    """
    load_torch()
    from towpath.train import demo as story
    from towpath.train.report import HEADINGS, MARKS, fastest_first, rows_of, wins, write_report

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
    table = table_of(
        *HEADINGS, numbers=1, title="One optimizer step of each", title_justify="left", padding=(0, 1), pad_edge=True
    )
    for outcome, row in zip(fastest_first(outcomes), rows_of(outcomes), strict=True):
        table.add_row(*row, style="bold" if wins(outcome, outcomes) else None)
    console.print(table)
    console.print(MARKS)
    console.print(
        "MB: the bytes that left one node over its cable, as the kernel counted them and as towpath.schedule() "
        "predicted them. Lossless strategies reach the same loss: they change what is sent, not what is learned."
    )
    about = f"{where}. A small GPT on the Python standard library's sources, {steps} optimizer steps."
    write_report(output, "The same training, by strategy", about, outcomes)
    console.print(f"Plots: {output}")
