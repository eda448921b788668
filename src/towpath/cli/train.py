"""`towpath train`: from a TOML file to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towpath.errors import ConfigError
from towpath.train.config import Config


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, and how.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="In place of what the file says.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Start this many ranks here. Default: one, or as torchrun placed them.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write the whole configuration, defaults and all, and leave.")
    ] = False,
) -> None:
    """Train a model, sharded by the strategy that the file names.

    Example: `towpath train examples/gpt.toml --ranks 2 train.steps=50 strategy.name=paro-iig`

    Keys, with what they mean: `towpath train CONFIG.toml --print-config`

    The same under torchrun: `torchrun --nproc-per-node 4 -m towpath train gpt.toml`; and on a shaped cluster:
    `towpath lab run --nodes 2 --ranks 2 --inter 200mbit -- -m towpath train gpt.toml`

    Exit code: 0; 1 if the training failed; 2 if it could not begin; 130 or 143 if Ctrl-C or SIGTERM ended it.
    """
    read = Config.load(config, overrides or ())
    if print_config:
        print(read, end="")
        return
    # Not before: they load torch, which takes seconds.
    from towpath.topology.groups import launched

    if ranks is not None and launched():
        raise ConfigError("--ranks starts ranks, but a launcher has placed this one already. Leave one of them out.")
    if ranks is not None and ranks > 1:
        from towpath.train.launch import run_ranks

        read.train.micro_steps(ranks)
        raise typer.Exit(run_ranks(["train", str(config), *(overrides or ())], ranks))
    from towpath.train.trainer import train as run

    raise typer.Exit(run(read))
