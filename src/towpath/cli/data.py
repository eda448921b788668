"""`towpath data`: tokens prepared once, for all runs to come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.commands import Commands
from towpath.errors import ConfigError
from towpath.files import check_output_file
from towpath.train.config import DataConfig
from towpath.train.data import corpus
from towpath.train.data.prepare import SHARD_TOKENS, Outcome, Plan, prepare
from towpath.train.data.shards import Manifest
from towpath.train.observe.bar import progress_bar
from towpath.train.observe.progress import size

app = Commands()

_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what it says here, for machines.")]


@app.callback()
def group() -> None:
    """Tokens for training, prepared once and mapped into memory by every run.

    Example: `towpath data prepare books/ -o tokens --tokenizer tokenizer.json`
    """


@app.command("prepare")
def prepare_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="A new folder, for the tokens.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Text files, folders or globs. None: Python's standard library."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(metavar="bytes|FILE", help="'bytes', or a tokenizer.json.")] = "bytes",
    dataset: Annotated[str, typer.Option(metavar="FOLDER", help="A Hugging Face dataset on disk.")] = "",
    column: Annotated[
        str, typer.Option(help="Of a dataset, of .jsonl: where the text is. '': JSON as it is.")
    ] = "text",
    workers: Annotated[int, typer.Option(min=0, help="Processes. 0: one for each core.")] = 0,
    shard_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a file.")] = SHARD_TOKENS,
    json_file: _Json = None,
) -> None:
    """Turn text into a folder of tokens, for `tokens = "FOLDER"` in a configuration's [data].

    Example: `towpath data prepare books/ 'notes/**/*.md' -o tokens --tokenizer tokenizer.json`

    The folder's bytes are the same for any number of workers. It is there when it is whole, and not before.

    Exit code: 0; 2 if it could not be made.
    """
    check_output_file("--json", json_file)
    found = corpus.find(DataConfig(text=tuple(sources or ()), dataset=dataset, column=column, tokenizer=tokenizer))
    with progress_bar("Tokens of " + found.about) as progress:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        plan = Plan(workers=workers or cores, shard_tokens=shard_tokens, progress=progress)
        outcome = prepare(found, tokenizer, output, plan)
    out = Console(highlight=False, soft_wrap=True)
    out.print(_told(outcome.manifest, output), markup=False)
    for line in _left_out(outcome, found.skipped):
        out.print(line, markup=False)
    _write(json_file, outcome.manifest)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `towpath data prepare` made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and compare the checksums.")] = False,
    json_file: _Json = None,
) -> None:
    """Say what a folder of tokens holds.

    Example: `towpath data show tokens --verify`

    Exit code: 0; 2 if something is missing or not as it was written.
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
    _write(json_file, manifest)


def _told(manifest: Manifest, folder: Path) -> str:
    files = "1 file" if len(manifest.shards) == 1 else f"{len(manifest.shards)} files"
    return (
        f"{folder}: {manifest.tokens:,} tokens of {manifest.documents:,} documents, "
        f"vocabulary {manifest.vocabulary:,}, {size(manifest.size_bytes)} in {files} of {manifest.dtype}"
    )


def _left_out(outcome: Outcome, skipped: int) -> Iterator[str]:
    if skipped:
        yield f"Skipped in folders: {skipped} files that are hidden or not text by their names"
    if outcome.binary:
        yield f"Left out: {outcome.binary} files that hold NUL bytes, so are not text"
    if outcome.undecodable:
        yield f"Not UTF-8: {outcome.undecodable} documents or parts of such; U+FFFD is where they are not"


def _write(json_file: Path | None, manifest: Manifest) -> None:
    if json_file is not None:
        try:
            json_file.write_text(str(manifest), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}.") from None
