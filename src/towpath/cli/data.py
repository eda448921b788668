"""`towpath data`: prepare a folder of tokens once, for all later runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.terminal import Commands
from towpath.files import check_output_file, write_output_file
from towpath.train.config import DataConfig
from towpath.train.data import corpus
from towpath.train.data.prepare import SHARD_TOKENS, prepare
from towpath.train.data.token_files import Manifest
from towpath.train.progress import progress_bar, size

app = Commands()

_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the folder's manifest to this file.")]


@app.callback()
def group() -> None:
    """Prepare tokens for training once. Each run then maps them into memory.

    Example: `towpath data prepare books/ -o tokens --tokenizer tokenizer.json`
    """


@app.command("prepare")
def prepare_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder for the tokens.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE", help="Text files, folders or globs.", show_default="Python's standard library"
        ),
    ] = None,
    tokenizer: Annotated[str, typer.Option(metavar="bytes|FILE", help="bytes, or a tokenizer.json.")] = "bytes",
    dataset: Annotated[str, typer.Option(metavar="FOLDER", help="A Hugging Face dataset on disk.")] = "",
    column: Annotated[
        str,
        typer.Option(metavar="NAME", help="The column with the text. For .jsonl, '' takes lines as they are."),
    ] = "text",
    workers: Annotated[int, typer.Option(metavar="N", min=0, help="Processes. 0 starts one for each core.")] = 0,
    shard_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens in each file.")] = SHARD_TOKENS,
    json_file: _Json = None,
) -> None:
    """Turn text into a folder of tokens, for `tokens = "FOLDER"` in a configuration's [data].

    Example: `towpath data prepare books/ 'notes/**/*.md' -o tokens --tokenizer tokenizer.json`

    The folder has the same bytes for any number of workers. It appears only when it is complete.

    Exit code: 0, or 2 if the folder could not be made.
    """
    check_output_file("--json", json_file)
    found = corpus.find(DataConfig(text=tuple(sources or ()), dataset=dataset, column=column, tokenizer=tokenizer))
    with progress_bar("Tokens of " + found.about) as progress:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        outcome = prepare(
            found, tokenizer, output, workers=workers or cores, shard_tokens=shard_tokens, progress=progress
        )
    out = Console(highlight=False, soft_wrap=True)
    manifest = outcome.manifest
    files = "1 file" if len(manifest.shards) == 1 else f"{len(manifest.shards)} files"
    lines = [
        f"{output}: {manifest.tokens:,} tokens of {manifest.documents:,} documents, "
        f"vocabulary {manifest.vocabulary:,}, {size(manifest.size_bytes)} in {files} of {manifest.dtype}"
    ]
    if found.skipped:
        lines.append(f"Skipped in folders: {found.skipped} files that are hidden or not text by their names")
    if outcome.binary:
        lines.append(f"Left out: {outcome.binary} files that hold NUL bytes, so are not text")
    if outcome.undecodable:
        lines.append(f"Not UTF-8: {outcome.undecodable} documents or parts of such; U+FFFD is where they are not")
    for line in lines:
        out.print(line, markup=False)
    write_output_file("--json", json_file, str(manifest))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder from `towpath data prepare`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all files and compare their checksums.")] = False,
    json_file: _Json = None,
) -> None:
    """Show what a folder of tokens holds.

    Example: `towpath data show tokens --verify`

    Exit code: 0, or 2 if a file is missing or damaged.
    """
    check_output_file("--json", json_file)
    manifest = Manifest.load(folder)
    if verify:
        with progress_bar(f"Verifying {folder}") as progress:
            manifest.verify(folder, progress)
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    rows = {
        "tokens": f"{manifest.tokens:,}",
        "documents": f"{manifest.documents:,}",
        "vocabulary": f"{manifest.vocabulary:,}",
        "tokenizer": f"{manifest.tokenizer} ({manifest.tokenizer_fingerprint[:19]})",
        "files": f"{len(manifest.shards)} of {manifest.dtype}, {size(manifest.size_bytes)}",
        "fingerprint": manifest.fingerprint[:16],
        "checksums": "as they were written" if verify else "not verified (--verify)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)
    write_output_file("--json", json_file, str(manifest))
