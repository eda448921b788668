"""`towpath data prepare`: turn texts into a folder of tokens once, for all later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from towpath.cli.terminal import Commands
from towpath.progress import size, working
from towpath.train.prepare import prepare

app = Commands()


@app.callback()
def group() -> None:
    """Prepare tokens for training once. Each run then maps them into memory.

    Example: `towpath data prepare books/*.txt -o tokens --tokenizer tokenizer.json`
    """


@app.command("prepare")
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
    with working("Tokens") as say:
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
        f"{size(bytes_of_file)} of {made.dtype}",
        markup=False,
    )
