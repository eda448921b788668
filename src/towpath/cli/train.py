"""`towpath train`: from a TOML file to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towpath.cli.terminal import load_torch
from towpath.errors import ConfigError
from towpath.train.config import Config
from towpath.train.signals import end_with_launcher


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The model, the data, and how to train.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace those of the file."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Start this many ranks on this machine.", show_default="1, or as torchrun started"
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option with its value, and exit.")
    ] = False,
) -> None:
    """Train a model, sharded by the strategy that the file names.

    Example: `towpath train examples/gpt.toml --ranks 2 train.steps=50 strategy.name=paro-iig`

    All options and their meaning: `towpath train CONFIG.toml --print-config`

    Under torchrun: `torchrun --nproc-per-node 4 -m towpath train gpt.toml`

    On an emulated cluster: `python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- -m towpath train gpt.toml`

    Exit code: 0, or 1 if the training failed, or 2 if it could not begin, or 130 or 143 after Ctrl-C or SIGTERM.
    """
    end_with_launcher()
    read = Config.load(config, overrides or ())
    if print_config:
        print(read, end="")
        return
    load_torch()
    from towpath.topology.groups import launched

    if ranks is not None and launched():
        raise ConfigError(
            "--ranks starts ranks, but a launcher has started this process as a rank already. Leave out --ranks, or "
            "start the command without the launcher."
        )
    if ranks is not None and ranks > 1:
        from towpath.train.launch import run_ranks

        read.train.micro_steps(ranks)
        raise typer.Exit(run_ranks(["train", str(config), *(overrides or ())], ranks))
    from towpath.train.trainer import run_training as run

    raise typer.Exit(run(read))
