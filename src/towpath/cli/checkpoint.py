"""`towpath checkpoint`: what lies in a folder of checkpoints, and whether it is still what was written."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from towpath.cli.commands import Commands
from towpath.errors import CheckpointError
from towpath.train.progress import counting_bar, size

app = Commands()

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of checkpoints, or one of them.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.callback()
def group() -> None:
    """Checkpoints of a run: list them, look into one, read every byte again.

    Example: `towpath checkpoint verify runs/a`
    """


@app.command()
def ls(folder: Folder, as_json: AsJson = False) -> None:
    """List the checkpoints in a folder, and say which of them can be used.

    Looks at manifests and at the lengths of files; `towpath checkpoint verify` reads them.

    Example: `towpath checkpoint ls runs/a`

    Exit code: 0; 1 if one is damaged; 2 if there is none.
    """
    from towpath.checkpoint import read_manifest

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
        table = _table("name", "written", "ranks", "tensors", "size", "")
        for row in rows:
            written = datetime.fromtimestamp(row["seconds"]).strftime("%Y-%m-%d %H:%M") if "seconds" in row else ""
            held = size(row["bytes"]) if "bytes" in row else ""
            told = (str(row.get(key, "")) for key in ("ranks", "tensors"))
            table.add_row(row["name"], written, *told, held, row["problem"] or "")
        _console().print(table)
    _leave(any(row["problem"] for row in rows))


@app.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read every byte of one checkpoint, or of all in a folder, and compare it with its checksum.

    Example: `towpath checkpoint verify runs/a/step-000120`

    Exit code: 0; 1 if one is damaged; 2 if there is none.
    """
    from towpath import checkpoint

    paths = _checkpoints(folder)
    with counting_bar("Verifying", sum(map(_bytes, paths))) as progress:
        verdicts = [checkpoint.verify(path, progress) for path in paths]
    if as_json:
        print(json.dumps([{"name": v.path.name, "problem": v.problem} for v in verdicts], indent=2))
    else:
        for verdict in verdicts:
            print(f"{verdict.path.name}: {verdict.problem or 'every byte is what was written'}")
    _leave(not all(verdict.ok for verdict in verdicts))


@app.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: the newest one, if a folder of them is given.

    Example: `towpath checkpoint show runs/a`

    Exit code: 0; 2 if it cannot be read.
    """
    from towpath.checkpoint import latest, read_manifest
    from towpath.checkpoint.safe_open import visible

    found = _checkpoints(folder)
    path = found[0] if found == [folder] else latest(folder) or found[0]
    manifest = read_manifest(path)
    tensors = {n: t for n, t in manifest.tensors.items() if not n.startswith("rank.")}
    if as_json:
        told = {n: {"dtype": t.dtype, "shape": t.shape, "boxes": len(t.boxes)} for n, t in tensors.items()}
        facts: dict[str, Any] = {"step": manifest.step, "ranks": manifest.world, "written_by": manifest.written_by}
        print(
            json.dumps({**facts, "strategy": manifest.strategy, "tensors": told, "values": manifest.values}, indent=2)
        )
        return
    out = _console()
    written_by = visible(manifest.written_by)
    out.print(f"{path.name}: step {manifest.step}, {manifest.world} ranks, {written_by}", style="bold")
    if manifest.strategy is not None:
        out.print(visible(manifest.strategy.splitlines()[0]).replace("name", "strategy"))
    out.print(f"holds {visible(', '.join(manifest.values))}")
    table = _table("tensor", "shape", "dtype", "boxes", "size")
    for name, tensor in tensors.items():
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        table.add_row(visible(name), shape, tensor.dtype, str(len(tensor.boxes)), size(tensor.bytes))
    out.print(table)


def _checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    from towpath.checkpoint import folders

    one = folders.is_checkpoint(folder) and folder.is_dir()
    found = [folder] if one else folders.checkpoints(folders.search_folder(folder))
    if not found:
        raise CheckpointError(f"{folder}: there is no checkpoint (a folder named step-000120, say). Check the path.")
    return found


def _bytes(path: Path) -> int:
    from towpath.checkpoint import read_manifest

    try:
        return read_manifest(path).bytes
    except CheckpointError:
        return 0


def _console() -> Console:
    """What it prints is of others' files, and no markup."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="")
    for heading in headings:
        side = "right" if heading in ("ranks", "tensors", "size", "boxes") else "left"
        table.add_column(heading, justify=side, overflow="fold")
    return table


def _leave(damaged: bool) -> None:
    sys.stdout.flush()
    if damaged:
        raise typer.Exit(1)
