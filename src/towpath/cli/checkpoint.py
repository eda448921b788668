"""`towpath checkpoint`, `export` and `import`: show, verify, and convert checkpoints from and to safetensors."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from towpath.cli.terminal import CommandGroup, load_torch, table_of
from towpath.core.formats import shape_text
from towpath.errors import CheckpointError
from towpath.progress import format_bytes, show_progress
from towpath.topology.cluster import counted

app = CommandGroup()
_LOOK: dict[str, Any] = {"padding": (0, 3, 0, 0), "header_style": ""}

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of checkpoints, or one checkpoint.")]


@app.callback()
def group() -> None:
    """List the checkpoints of a run, show what one holds, and verify their bytes.

    Example: `towpath checkpoint verify runs/a`
    """


@app.command()
def ls(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """List the checkpoints in a folder, and whether each can be used.

    Example: `towpath checkpoint ls runs/a`

    It checks the manifests and the sizes of the files. `towpath checkpoint verify` also reads the files.

    Exit code: 0, or 1 if a checkpoint is damaged, or 2 if there is none.
    """
    load_torch()
    from towpath.checkpoint.manifest import read_manifest

    rows: list[dict[str, Any]] = []
    for path in _checkpoints(folder):
        row: dict[str, Any] = {"name": path.name}
        rows.append(row)
        try:
            manifest = read_manifest(path)
            row |= {"step": manifest.step, "seconds": manifest.seconds, "ranks": manifest.world}
            row |= {"bytes": manifest.bytes, "tensors": len(manifest.tensors), "problem": None}
            manifest.check_sizes(path)
        except CheckpointError as error:
            row["problem"] = str(error)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = table_of("name", "written", "", "ranks", "tensors", "size", numbers=3, **_LOOK)
        for row in rows:
            written = datetime.fromtimestamp(row["seconds"]).strftime("%Y-%m-%d %H:%M") if "seconds" in row else ""
            held = format_bytes(row["bytes"]) if "bytes" in row else ""
            counts = (str(row.get(key, "")) for key in ("ranks", "tensors"))
            table.add_row(row["name"], written, "damaged" if row["problem"] else "", *counts, held)
        _console().print(table)
        for row in rows:
            if row["problem"]:
                print(f"{row['name']}: {row['problem']}")
    _exit(any(row["problem"] for row in rows))


@app.command("verify")
def verify_(folder: Folder) -> None:
    """Read every byte of a checkpoint, or of all in a folder, and compare it with its checksum.

    Example: `towpath checkpoint verify runs/a/step-000120`

    Exit code: 0, or 1 if a checkpoint is damaged, or 2 if there is none.
    """
    load_torch()
    from towpath.checkpoint import verify

    damaged = False
    for path in _checkpoints(folder):
        with show_progress(f"Reading {path}"):
            problem = verify(path)
        print(f"{path.name}: {problem or 'every byte is what was written'}", flush=True)
        damaged = damaged or problem is not None
    _exit(damaged)


@app.command()
def show(folder: Folder) -> None:
    """Show what a checkpoint holds. In a folder of checkpoints, show the newest one.

    Example: `towpath checkpoint show runs/a`

    Its `manifest.json` has the same as JSON. Exit code: 0, or 2 if the checkpoint cannot be read.
    """
    load_torch()
    from towpath.checkpoint import latest
    from towpath.checkpoint.manifest import read_manifest
    from towpath.checkpoint.safe_files import visible

    found = _checkpoints(folder)
    path = found[0] if len(found) == 1 else latest(folder) or found[0]
    manifest = read_manifest(path)
    out = _console()
    written_by = visible(manifest.written_by)
    out.print(f"{path.name}: step {manifest.step}, {counted(manifest.world, 'rank')}, {written_by}", style="bold")
    if manifest.strategy is not None:
        out.print(visible(manifest.strategy.splitlines()[0]).replace("name", "strategy"))
    out.print(f"holds {visible(', '.join(manifest.values))}")
    table = table_of("tensor", "shape", "dtype", "boxes", "size", numbers=3, **_LOOK)
    for name, tensor in manifest.tensors.items():
        if not name.startswith("rank."):
            dtype = str(tensor.dtype).removeprefix("torch.")
            row = shape_text(tensor.shape), dtype, str(len(tensor.boxes)), format_bytes(tensor.bytes)
            table.add_row(visible(name), *row)
    out.print(table)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    from towpath.checkpoint import folders

    one = folders.is_checkpoint(folder) and folder.is_dir()
    found = [folder] if one else folders.checkpoints(folders.search_folder(folder))
    if not found:
        raise CheckpointError(f"{folder}: there is no checkpoint (a folder named step-000120, say). Check the path.")
    return found


def _console() -> Console:
    """Return a console without markup, because it prints text from files of unknown origin."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _exit(damaged: bool) -> None:
    sys.stdout.flush()
    if damaged:
        raise typer.Exit(1)


# --- export and import ------------------------------------------------------------------------------------------------

ConfigFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The model's config.json.", show_default="the one that came with the model"),
]

TokenizerFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A tokenizer.json, or a folder with one, to copy next to the model."),
]
AdapterName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help='Export only this PEFT adapter: "default", unless you named it.', show_default="all"
    ),
]


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them: the newest that is not damaged."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder for the files.")],
    max_shard_gb: Annotated[
        float, typer.Option(metavar="GB", min=0.001, help="The size of the largest file, in 10^9 bytes.")
    ] = 5.0,
    config: ConfigFile = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.", show_default="as in the checkpoint"),
    ] = None,
    tokenizer: TokenizerFile = None,
    adapter: AdapterName = None,
    island: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Of outer steps: an island.", show_default="the slow weights"),
    ] = None,
) -> None:
    """Write the model of a checkpoint as Hugging Face safetensors.

    Example: `towpath export runs/a exported/ --dtype bfloat16 --tokenizer tokenizer.json`

    It starts no ranks, and reads checkpoints of any strategy and number of ranks. It holds the tensors of one file in
    memory at a time.

    Exit code: 0, or 2 if the checkpoint or the folder cannot be used.
    """
    load_torch()
    from towpath import checkpoint as checkpoints
    from towpath.checkpoint.safe_files import DamagedError

    sources = _checkpoints(checkpoint)
    for source in sources:
        try:
            with show_progress(f"Exporting {source}"):
                written = checkpoints.export(
                    source,
                    folder,
                    max_shard_bytes=int(max_shard_gb * 1e9),
                    config=_config(config),
                    dtype=dtype,
                    tokenizer=tokenizer,
                    adapter=adapter,
                    island=island,
                )
        except DamagedError as error:
            if source == sources[-1]:
                raise
            print(f"{source.name} was passed over: {error}", file=sys.stderr)
            continue
        return _print_files(written)


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .safetensors file, or a folder with such files.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder for the checkpoint step-000000.")],
    config: ConfigFile = None,
) -> None:
    """Make a checkpoint of Hugging Face safetensors, from which any strategy can start.

    Example: `towpath import llama/ runs/fine-tune`

    Exit code: 0, or 2 if the source or the folder cannot be used.
    """
    load_torch()
    from towpath import checkpoint as checkpoints

    with show_progress(f"Importing {source}"):
        written = checkpoints.import_safetensors(source, folder, config=_config(config))
    _print_files(sorted(written.iterdir()))


def _config(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from towpath.checkpoint.safe_files import read_object

    return read_object(path.resolve(), "a model's configuration")


def _print_files(written: list[Path]) -> None:
    for path in written:
        print(f"{path}  {format_bytes(path.stat().st_size)}")
