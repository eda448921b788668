"""`towpath export` and `towpath import`: between checkpoints and the files that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from towpath.errors import CheckpointError
from towpath.train.progress import counting_bar, size

AsJson = Annotated[bool, typer.Option("--json", help="Print what was written, for machines.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The model's config.json; else the one that came with it.")
]


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them: the newest that is sound.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to: a new or empty folder.")],
    format: Annotated[str, typer.Option(help="safetensors (Hugging Face), or torch (one state dict).")] = "safetensors",
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="The largest file, in 10^9 bytes.")] = 5.0,
    config: Config = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16; else as the masters are.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json, or a folder with one, to copy beside it.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this PEFT adapter: default, unless you named it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as Hugging Face safetensors, or as a plain PyTorch state dict.

    Starts no ranks, whatever strategy and however many ranks wrote it; holds one tensor in memory at a time.

    Example: `towpath export runs/a exported/ --dtype bfloat16 --tokenizer tokenizer.json`

    Exit code: 0; 2 if the checkpoint or the folder will not do.
    """
    from towpath import checkpoint as checkpoints
    from towpath.checkpoint import folders

    source = checkpoint if folders.is_checkpoint(checkpoint) else checkpoints.latest(checkpoint)
    if source is None:
        raise CheckpointError(f"{checkpoint}: there is no checkpoint in it that could be exported. Check the path.")
    manifest = checkpoints.read_manifest(source)
    only = manifest.values.get("peft", {}).get(adapter, {}).get("tensors", {})
    total = sum(
        stored.bytes
        for name, stored in manifest.tensors.items()
        if name.startswith("model.") and (adapter is None or name.removeprefix("model.") in only)
    )
    with counting_bar("Exporting", total) as progress:
        written = checkpoints.export(
            source,
            folder,
            format=format,
            max_shard_bytes=int(max_shard_gb * 1e9),
            config=_config(config),
            dtype=dtype,
            tokenizer=tokenizer,
            adapter=adapter,
            progress=progress,
        )
    _tell(written, manifest.step, as_json)


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .safetensors file, or a folder with some.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the checkpoint step-000000 goes.")],
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint, from which any strategy can start, of Hugging Face safetensors.

    Example: `towpath import llama/ runs/fine-tune`

    Exit code: 0; 2 if the source or the folder will not do.
    """
    from towpath import checkpoint as checkpoints

    total = sum(p.stat().st_size for p in (source.glob("*.safetensors") if source.is_dir() else [source]) if p.exists())
    with counting_bar("Importing", total) as progress:
        written = checkpoints.import_safetensors(source, folder, config=_config(config), progress=progress)
    _tell(sorted(written.iterdir()), 0, as_json)


def _config(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from towpath.checkpoint.exporting import read_config
    from towpath.checkpoint.safe_open import named_file

    return read_config(named_file(path))


def _tell(written: list[Path], step: int, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {"step": step, "files": [{"path": str(p), "bytes": p.stat().st_size} for p in written]}, indent=2
            )
        )
        return
    for path in written:
        print(f"{path}  {size(path.stat().st_size)}")
