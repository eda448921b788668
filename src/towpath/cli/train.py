"""`towpath train`: from a TOML file to a trained model. `towpath data prepare`: the tokens that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towpath.cli.terminal import CommandGroup, load_torch
from towpath.progress import format_bytes, show_progress
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


data = CommandGroup()


@data.callback()
def group() -> None:
    """Prepare tokens for training once. Each run then maps them into memory.

    Example: `towpath data prepare books/*.txt -o tokens --tokenizer tokenizer.json`
    """


@data.command("prepare")
def prepare_command(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Text files, or a dataset.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for the tokens.")],
    tokenizer: Annotated[str, typer.Option(metavar="bytes|FILE", help="bytes, or a tokenizer.json.")] = "bytes",
    column: Annotated[str, typer.Option(metavar="NAME", help="The column of a dataset with the text.")] = "text",
    split: Annotated[str, typer.Option(metavar="NAME", help="The split of a dataset.")] = "train",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The configuration of a dataset.")] = None,
) -> None:
    """Turn text into a folder of tokens, for `tokens = "FOLDER"` in a configuration's [data].

    Example: `towpath data prepare books/*.txt -o tokens --tokenizer tokenizer.json`

    Each text file is a document. A dataset is what `datasets` loads (`pip install 'towpath[hf]'`), and each of its
    rows is a document: .jsonl, .parquet or .csv files, a folder, or a name on the Hugging Face Hub.

    The folder appears when it is complete. Exit code: 0, or 2 if the folder could not be made.
    """
    from towpath.train.data import prepare

    with show_progress("Tokens") as say:
        made = prepare(
            sources,
            output,
            tokenizer,
            column=column,
            split=split,
            name=name,
            progress=lambda count: say(f"{count:,} tokens"),
        )
    bytes_of_file = (output.expanduser() / "tokens.bin").stat().st_size
    Console(highlight=False, soft_wrap=True).print(
        f"{output}: {made.tokens:,} tokens of {made.documents:,} documents, vocabulary {made.vocabulary:,}, "
        f"{format_bytes(bytes_of_file)} of {made.dtype}",
        markup=False,
    )
