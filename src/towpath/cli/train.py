"""`towpath train`: from a TOML file to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towpath.cli.terminal import load_torch
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

    On an emulated cluster: `python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- -m towpath train gpt.toml`

    Exit code: 0, or 1 if the training failed, or 2 if it could not begin, or 130 or 143 after Ctrl-C or SIGTERM.
    """
    read = Config.load(config, overrides or ())
    if print_config:
        print(read, end="")
        return
    load_torch()
    from towpath.train.trainer import run_training

    raise typer.Exit(run_training(read))
