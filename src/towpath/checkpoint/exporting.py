"""Convert checkpoints to Hugging Face safetensors or a plain state dict, and safetensors to checkpoints.

This needs no ranks, and at most one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from towpath.checkpoint import folders
from towpath.checkpoint.adapters import VALUE as ADAPTERS
from towpath.checkpoint.folders import claim_of, release
from towpath.checkpoint.islands import islands_of, view_of
from towpath.checkpoint.manifest import (
    TORCH_DTYPES,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    read_manifest,
    write_manifest,
)
from towpath.checkpoint.safe_open import hub_file, is_folder, named_file, read_json, reading, shown
from towpath.checkpoint.safetensors import (
    DTYPES,
    INDEX,
    Entry,
    FileWriter,
    bytes_of,
    check_names,
    checksum,
    full_tensor,
    in_order,
    read_header,
    read_index,
    writing,
)
from towpath.errors import CheckpointError
from towpath.version import __version__

_PREFIX = "model."
_FLOATING = ("F64", "F32", "BF16", "F16")
# The files that Transformers keeps next to a tokenizer.json.
_WITH_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

Progress = Callable[[int], None]  # receives the number of bytes that were converted


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    format: str = "safetensors",
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    adapter: str | None = None,
    island: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model of a checkpoint in a format that other programs read.

    Only the first name of tied parameters is written as a tensor, as Hugging Face does.

    Args:
        checkpoint: The folder of the checkpoint.
        folder: A new or empty folder.
        format: "safetensors", as `from_pretrained` reads it, or "torch", a state dict for
            `torch.load(..., weights_only=True)`.
        max_shard_bytes: The largest size of a safetensors file.
        config: The model's configuration for config.json. By default it is the one in the checkpoint, if any.
        dtype: A floating-point dtype, such as "bfloat16", to convert to. By default tensors keep their dtype.
        tokenizer: A tokenizer.json, or a folder with one, to copy with the files that describe it.
        adapter: The name of an adapter of a PEFT model, "default" unless you chose another. Only this adapter is
            written, in files that `PeftModel.from_pretrained` loads.
        island: The island whose weights are written, for a run with outer steps. By default, the slow weights are.
        progress: Called with the number of bytes of each tensor that was written.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: The checkpoint is damaged, the folder is not empty, or an argument does not fit.
    """
    source, target = Path(checkpoint), Path(folder)
    if adapter is not None and format != "safetensors":
        raise CheckpointError(f"an adapter is written as safetensors, as PEFT loads it; got format={format!r}.")
    if format not in ("safetensors", "torch"):
        raise CheckpointError(f"format is 'safetensors' or 'torch'; got {format!r}.")
    manifest = read_manifest(source)
    manifest.check_sizes(source)
    if island is not None and not 0 <= island < islands_of(manifest):
        raise CheckpointError(f"island {island}: {source} has the islands 0 to {islands_of(manifest) - 1}.")
    manifest = view_of(manifest, island).manifest
    peft = _adapter(manifest, adapter, source) if adapter is not None else None
    tensors = _named_tensors(manifest, peft["tensors"] if peft else None, source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and is not empty: export into a new folder.")
    weights = _Weights(source, tensors, progress, _floating(dtype))
    to_copy = {} if tokenizer is None else _tokenizer_files(Path(tokenizer))
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        if format == "torch":
            written = [_export_torch(weights, manifest, target)]
        elif peft is not None:
            written = [_export_file(weights, target / "adapter_model.safetensors", list(tensors))]
            written.append(_write_config(target / "adapter_config.json", peft["config"]))
        else:
            written = _export_safetensors(weights, target, max_shard_bytes)
            config = config if config is not None else manifest.values.get("config")
            written += [] if config is None else [_write_config(target / "config.json", config, dtype)]
        return written + [Path(shutil.copyfile(path, target / name)) for name, path in to_copy.items()]


def _write_config(path: Path, config: Mapping[str, Any], dtype: str | torch.dtype | None = None) -> Path:
    if dtype is not None:  # Transformers calls it dtype now, and torch_dtype before
        named = str(dtype).removeprefix("torch.")
        config = {k: named if k in ("dtype", "torch_dtype") else v for k, v in config.items()}
    path.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    return path


def _named_tensors(manifest: Manifest, only: Mapping[str, str] | None, source: Path) -> dict[str, StoredTensor]:
    """Return the model's tensors by their names in an export. `only` selects some, and maps their names to PEFT's."""
    held = {n.removeprefix(_PREFIX): t for n, t in manifest.tensors.items() if n.startswith(_PREFIX)}
    if not held:
        raise CheckpointError(f"{source} holds no model.")
    names: dict[str, str] = manifest.values.get("names", {})
    if only is not None:
        if missing := only.keys() - held.keys():
            raise CheckpointError(f"{source}: the adapter's {min(missing)} is not among the model's tensors.")
        names, held = dict(only), {name: held[name] for name in only}
    tensors = {names.get(name, name): stored for name, stored in held.items()}
    if len(tensors) != len(held):
        twice = next(n for n, count in Counter(names.get(name, name) for name in held).items() if count > 1)
        raise CheckpointError(
            f"{source}: two of its tensors would be called {twice!r} by others; see `names` of State."
        )
    return tensors


def _adapter(manifest: Manifest, name: str, source: Path) -> dict[str, Any]:
    """Return the `config` and `tensors` of a PEFT adapter."""
    there: dict[str, dict[str, Any]] = manifest.values.get(ADAPTERS, {})
    if name not in there:
        known = f"it has {', '.join(there)}" if there else "it was of no PEFT model"
        raise CheckpointError(f"{source}: no adapter {name!r} in the checkpoint; {known}.")
    if problem := there[name].get("problem"):
        raise CheckpointError(f"{source}: the adapter {name!r} needs the model: {problem}. Call its save_pretrained().")
    return there[name]


def _floating(dtype: str | torch.dtype | None) -> str | None:
    """Return the name of a dtype in safetensors files, or raise CheckpointError if it is not a floating-point one."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    name = DTYPES.get(found) if isinstance(found, torch.dtype) else None
    if name not in _FLOATING:
        raise CheckpointError(f"dtype: expected float64, float32, bfloat16 or float16; got {dtype}.")
    return name


def _tokenizer_files(source: Path) -> dict[str, Path]:
    """Return the files of a tokenizer by the names of their copies."""
    folder = source if source.is_dir() else source.parent
    first = folder / "tokenizer.json" if source.is_dir() else source
    if not first.is_file():
        raise CheckpointError(f"tokenizer: {first} is not there; expected a tokenizer.json, or a folder with one.")
    others = {name: folder / name for name in _WITH_TOKENIZERS if (folder / name).is_file()}
    return {"tokenizer.json": first, **others}


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors of a checkpoint, converted to a dtype."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    progress: Progress | None
    dtype: str | None  # for floating-point tensors; None keeps their own

    def entry(self, name: str) -> Entry:
        """Return how the tensor is written."""
        stored = self.tensors[name]
        casts = self.dtype is not None and stored.dtype in _FLOATING
        return Entry(name, self.dtype if casts and self.dtype is not None else stored.dtype, stored.shape)

    def read(self, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        """Read and convert a tensor, into `into` if given."""
        stored, dtype = self.tensors[name], TORCH_DTYPES[self.entry(name).dtype]
        casts = dtype != TORCH_DTYPES[stored.dtype]
        tensor = full_tensor(self.folder, name, stored, None if casts else into)
        if casts:
            converted = tensor.to(dtype)
            if not torch.equal(converted.isfinite(), tensor.isfinite()):
                raise CheckpointError(f"{name} has values that {dtype} cannot hold. Export bfloat16 or float32.")
            tensor = converted if into is None else into.copy_(converted)
        if self.progress is not None:
            self.progress(stored.bytes)
        return tensor


def _export_safetensors(weights: _Weights, target: Path, max_shard_bytes: int) -> list[Path]:
    parts: list[list[str]] = [[]]
    filled = total = 0
    for name in weights.tensors:
        count = weights.entry(name).bytes
        if parts[-1] and filled + count > max_shard_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled, total = filled + count, total + count
    if len(parts) == 1:
        return [_export_file(weights, target / "model.safetensors", parts[0])]
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    written = [_export_file(weights, target / name, part) for name, part in zip(names, parts, strict=True)]
    homes = {n: name for name, part in zip(names, parts, strict=True) for n in part}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    written.append(target / INDEX)
    written[-1].write_text(json.dumps(index, indent=2) + "\n")
    return written


def _export_file(weights: _Weights, path: Path, names: list[str]) -> Path:
    entries = in_order(weights.entry(name) for name in names)
    writer = FileWriter(path, entries, {"format": "pt"})
    try:
        for entry in entries:
            writer.write(bytes_of(weights.read(entry.name)))
        writer.close()
    finally:
        writer.abandon()
    return path


def _export_torch(weights: _Weights, manifest: Manifest, target: Path) -> Path:
    # While torch.save reads the tensors they are in mapped files, which the system may drop from memory at any time.
    scratch = target / f".parts-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        state: dict[str, torch.Tensor] = {}
        for number, (name, stored) in enumerate(weights.tensors.items()):
            dtype, count = TORCH_DTYPES[weights.entry(name).dtype], prod(stored.shape)
            if count:
                mapped = torch.from_file(str(scratch / str(number)), shared=True, size=count, dtype=dtype)
                state[name] = weights.read(name, mapped.view(stored.shape))
            else:
                state[name] = torch.empty(stored.shape, dtype=dtype)
        names: dict[str, str] = manifest.values.get("names", {})
        tied = {names.get(alias, alias): names.get(first, first) for alias, first in manifest.aliases.items()}
        state.update({alias: state[first] for alias, first in tied.items() if first in state})
        path = target / "model.pt"
        torch.save(state, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def import_safetensors(
    source: str | Path, root: str | Path, *, config: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Path:
    """Make a checkpoint of step 0, without an optimizer, from safetensors files.

    Args:
        source: A safetensors file, or a folder with some and perhaps an index.
        root: The folder for the checkpoint.
        config: The model's configuration. By default it is the config.json next to the files, if any.
        progress: Called with the number of bytes of each tensor that was copied.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The files are damaged, or `root` has a checkpoint of step 0, or another job uses it.
    """
    source, root = Path(source), Path(root)
    sources = _safetensors_in(source)
    found = (source if is_folder(source) else source.parent) / "config.json"
    if config is None and os.path.lexists(found):
        config = read_config(hub_file(found))
    final = folders.checkpoint_of(root, 0)
    if final.exists():
        raise CheckpointError(f"{final} is there already: import into a new folder.")
    partial = folders.partial_of(root, 0)
    claim = claim_of(root)
    try:
        with writing(root):
            claim.hold()
            partial.mkdir()
        files: dict[str, StoredFile] = {}
        tensors: dict[str, StoredTensor] = {}
        for number, (path, names) in enumerate(sources.items()):
            name = f"rank-{number:05d}.safetensors"
            files[name], held = _copy_file(path, names, partial / name, progress)
            twice = next((n for n in held if n in tensors), None)
            if twice is not None:
                raise CheckpointError(f"{twice.removeprefix(_PREFIX)} is in {path} and in a file before it.")
            tensors.update(held)
        manifest = Manifest(
            step=0,
            written_by=f"towpath {__version__}, imported from {source.name}",
            seconds=time.time(),
            world=1,
            strategy=None,
            files=files,
            tensors=dict(sorted(tensors.items())),
            values={"model": {"aliases": {}}, **({"config": config} if config is not None else {})},
        )
        with writing(root):
            write_manifest(partial, manifest)
            folders.publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        release(claim)
    return final


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a model's config.json, or raise CheckpointError."""
    config: Any = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {shown(config)}; expected an object, as a model's config.json is.")
    return cast(dict[str, Any], config)


def _safetensors_in(source: Path) -> dict[Path, list[str]]:
    """Return the files, and for each the tensors that an index says are in it."""
    if not is_folder(source) and os.path.lexists(source):
        return {named_file(source): []}
    if os.path.lexists(source / INDEX):
        return {source / file: names for file, names in sorted(read_index(source).items())}
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise CheckpointError(
            f"{source}: expected a .safetensors file, or a folder with some; found none. Check the path."
        )
    return {path: [] for path in found}


def _copy_file(
    path: Path, names: list[str], target: Path, progress: Progress | None
) -> tuple[StoredFile, dict[str, StoredTensor]]:
    """Copy one file, with the names that a checkpoint gives to tensors. `names` must be in it."""
    held: dict[str, StoredTensor] = {}
    real = hub_file(path)
    with reading(real) as file:
        there = read_header(file, path)
    check_names(names, there, path)
    entries = in_order(Entry(f"{_PREFIX}{name}", t.dtype, t.shape) for name, t in there.items())
    with writing(target):
        writer = FileWriter(target, entries, {})
        try:
            for entry in entries:
                at, source = writer.at, there[entry.name.removeprefix(_PREFIX)]
                crc = checksum(real, source.start, source.bytes, writer.write)
                box = StoredBox((0,) * len(entry.sizes), entry.sizes, target.name, at, crc)
                held[entry.name] = StoredTensor(entry.dtype, entry.sizes, (box,))
                if progress is not None:
                    progress(entry.bytes)
            return writer.close(), held
        finally:
            writer.abandon()
