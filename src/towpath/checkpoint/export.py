"""Leaving and arriving without ranks: Hugging Face's safetensors, or a plain state dict, and back.

Tensor by tensor: the largest one is all that is ever in memory.
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
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from towpath.checkpoint.disk import files, folders
from towpath.checkpoint.disk.claim import claim_of, release
from towpath.checkpoint.disk.headers import INDEX, check_names, read_header, read_index
from towpath.checkpoint.disk.manifest import Manifest, read_manifest, write_manifest
from towpath.checkpoint.disk.safe_open import hub_file, is_folder, named_file, read_json, reading, shown
from towpath.checkpoint.disk.stored import File, Stored, StoredBox
from towpath.checkpoint.disk.whole_tensors import whole_tensor
from towpath.checkpoint.memory.adapters import VALUE as ADAPTERS
from towpath.errors import CheckpointError

_PREFIX = "model."
_FLOATING = ("F64", "F32", "BF16", "F16")
# What Transformers keeps beside a tokenizer.json.
_WITH_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

Progress = Callable[[int], None]  # told how many bytes were done


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
    progress: Progress | None = None,
) -> list[Path]:
    """Write the model of a checkpoint into a new or empty folder; what was written.

    `format`: 'safetensors', as `from_pretrained` reads it (with config.json, if the checkpoint holds the model's
    configuration or `config` is given), or 'torch', a state dict for `torch.load(..., weights_only=True)`.
    Of tied parameters only the first name is written, as Hugging Face does it. `dtype`: of floating-point tensors, in
    place of the masters' own. `tokenizer`: a tokenizer.json, or a folder with one, which is copied beside the model
    together with what describes it. `adapter`: only this adapter of a PEFT model, 'default' unless it has another name,
    in files that `PeftModel.from_pretrained` loads.
    """
    source, target = Path(checkpoint), Path(folder)
    if adapter is not None and format != "safetensors":
        raise CheckpointError(f"an adapter is written as safetensors, as PEFT loads it; got format={format!r}.")
    if format not in ("safetensors", "torch"):
        raise CheckpointError(f"format is 'safetensors' or 'torch'; got {format!r}.")
    manifest = read_manifest(source)
    manifest.check_sizes(source)
    described = _adapter(manifest, adapter, source) if adapter is not None else None
    tensors = _named_tensors(manifest, described["tensors"] if described else None, source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and is not empty: export into a new folder.")
    reading = _Source(source, tensors, progress or _silent, _wanted(dtype))
    tokenizer_files = [] if tokenizer is None else _tokenizer_files(Path(tokenizer))
    with files.writing(target):
        target.mkdir(parents=True, exist_ok=True)
        if format == "torch":
            return [_export_torch(reading, manifest, target), *_copied(tokenizer_files, target)]
        if described is not None:
            written = [_export_one(reading, target / "adapter_model.safetensors", list(tensors))]
            written.append(target / "adapter_config.json")
            written[-1].write_text(json.dumps(described["config"], indent=2, sort_keys=True) + "\n")
            return [*written, *_copied(tokenizer_files, target)]
        written = _export_safetensors(reading, target, max_shard_bytes)
        config = config if config is not None else manifest.values.get("config")
        if config is not None:
            told = dict(config)
            for key in ("dtype", "torch_dtype") if dtype is not None else ():  # as Transformers calls it, and did
                if key in told:
                    told[key] = str(dtype).removeprefix("torch.")
            written.append(target / "config.json")
            written[-1].write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
        return [*written, *_copied(tokenizer_files, target)]


def _named_tensors(manifest: Manifest, only: Mapping[str, str] | None, source: Path) -> dict[str, Stored]:
    """The model's, as others call them. `only`: these, by their names in the model."""
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
    """What the checkpoint says of a PEFT adapter: its `config`, and what its `tensors` are called."""
    there: dict[str, dict[str, Any]] = manifest.values.get(ADAPTERS, {})
    if name not in there:
        known = f"it has {', '.join(there)}" if there else "it was of no PEFT model"
        raise CheckpointError(f"{source}: no adapter {name!r} in the checkpoint; {known}.")
    if problem := there[name].get("problem"):
        raise CheckpointError(f"{source}: the adapter {name!r} needs the model: {problem}. Call its save_pretrained().")
    return there[name]


def _wanted(dtype: str | torch.dtype | None) -> str | None:
    """As safetensors call it."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    name = files.DTYPES.get(found) if isinstance(found, torch.dtype) else None
    if name not in _FLOATING:
        raise CheckpointError(f"dtype: expected float64, float32, bfloat16 or float16; got {dtype}.")
    return name


def _tokenizer_files(source: Path) -> list[Path]:
    folder = source if source.is_dir() else source.parent
    first = folder / "tokenizer.json" if source.is_dir() else source
    if not first.is_file():
        raise CheckpointError(f"tokenizer: {first} is not there; expected a tokenizer.json, or a folder with one.")
    return [first, *(folder / name for name in _WITH_TOKENIZERS if (folder / name).is_file())]


def _copied(found: list[Path], target: Path) -> list[Path]:
    copies = [target / (path.name if number else "tokenizer.json") for number, path in enumerate(found)]
    for path, copy in zip(found, copies, strict=True):
        shutil.copyfile(path, copy)
    return copies


@dataclass(frozen=True, slots=True)
class _Source:
    folder: Path
    tensors: Mapping[str, Stored]
    progress: Progress
    dtype: str | None  # of floating-point tensors, unless their own

    def entry(self, name: str) -> files.Entry:
        """As which it is written."""
        stored = self.tensors[name]
        casts = self.dtype is not None and stored.dtype in _FLOATING
        return files.Entry(name, self.dtype if casts and self.dtype is not None else stored.dtype, stored.shape)

    def read(self, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        stored, dtype = self.tensors[name], files.TORCH_DTYPES[self.entry(name).dtype]
        casts = dtype != files.TORCH_DTYPES[stored.dtype]
        tensor = whole_tensor(self.folder, name, stored, None if casts else into)
        if casts:
            cast_ = tensor.to(dtype)
            if not torch.equal(cast_.isfinite(), tensor.isfinite()):
                raise CheckpointError(f"{name} has values that {dtype} cannot hold. Export bfloat16 or float32.")
            tensor = cast_ if into is None else into.copy_(cast_)
        self.progress(stored.bytes)
        return tensor


def _export_safetensors(source: _Source, target: Path, max_shard_bytes: int) -> list[Path]:
    parts = _parts({name: source.entry(name).bytes for name in source.tensors}, max_shard_bytes)
    names = (
        ["model.safetensors"]
        if len(parts) == 1
        else [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    )
    written = [_export_one(source, target / name, part) for name, part in zip(names, parts, strict=True)]
    if len(parts) > 1:
        total = sum(source.entry(name).bytes for name in source.tensors)
        homes = {n: name for name, part in zip(names, parts, strict=True) for n in part}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
        written.append(target / INDEX)
        written[-1].write_text(json.dumps(index, indent=2) + "\n")
    return written


def _export_one(source: _Source, path: Path, names: list[str]) -> Path:
    entries = files.in_order(source.entry(name) for name in names)
    writer = files.FileWriter(path, entries, {"format": "pt"})
    try:
        for entry in entries:
            writer.write(files.bytes_of(source.read(entry.name)))
        writer.close()
    finally:
        writer.abandon()
    return path


def _parts(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    filled = 0
    for name, count in sizes.items():
        if parts[-1] and filled + count > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += count
    return parts


def _export_torch(source: _Source, manifest: Manifest, target: Path) -> Path:
    """The tensors lie in files while torch.save goes through them: the system may drop them from memory at any time."""
    scratch = target / f".parts-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        state: dict[str, torch.Tensor] = {}
        for number, (name, stored) in enumerate(source.tensors.items()):
            dtype, count = files.TORCH_DTYPES[source.entry(name).dtype], prod(stored.shape)
            if count:
                mapped = torch.from_file(str(scratch / str(number)), shared=True, size=count, dtype=dtype)
                state[name] = source.read(name, mapped.view(stored.shape))
            else:
                state[name] = torch.empty(stored.shape, dtype=dtype)
        aliases: dict[str, str] = manifest.values.get("model", {}).get("aliases", {})
        names: dict[str, str] = manifest.values.get("names", {})
        state.update({names.get(a, a): state[names.get(f, f)] for a, f in aliases.items() if names.get(f, f) in state})
        path = target / "model.pt"
        torch.save(state, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def import_safetensors(
    source: str | Path, root: str | Path, *, config: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Path:
    """Make a checkpoint of step 0, without an optimizer, from a safetensors file or a folder of them; its path.

    `config`: the model's configuration; that of the folder's config.json, unless given.
    """
    source, root = Path(source), Path(root)
    sources = _safetensors_in(source)
    found = (source if is_folder(source) else source.parent) / "config.json"
    if config is None and os.path.lexists(found):
        config = read_config(hub_file(found))
    final = folders.checkpoint_of(root, 0)
    if final.exists():
        raise CheckpointError(f"{final} is there already: import into a new folder.")
    partial = folders.partial_of(root, 0, uuid.uuid4().hex[:8])
    claim = claim_of(root)
    try:
        with files.writing(root):
            claim.hold()
            partial.mkdir()
        facts: dict[str, File] = {}
        tensors: dict[str, Stored] = {}
        for number, (path, names) in enumerate(sources.items()):
            name = f"rank-{number:05d}.safetensors"
            facts[name], held = _take_over(path, names, partial / name, progress or _silent)
            twice = next((n for n in held if n in tensors), None)
            if twice is not None:
                raise CheckpointError(f"{twice.removeprefix(_PREFIX)} is in {path} and in a file before it.")
            tensors.update(held)
        manifest = Manifest(
            step=0,
            written_by=f"towpath {version('towpath')}, imported from {source.name}",
            seconds=time.time(),
            world=1,
            strategy=None,
            files=facts,
            tensors=dict(sorted(tensors.items())),
            values={"model": {"aliases": {}}, **({"config": config} if config is not None else {})},
        )
        with files.writing(root):
            write_manifest(partial, manifest)
            folders.param_sync(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        release(claim)
    return final


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json."""
    config: Any = read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {shown(config)}; expected an object, as a model's config.json is.")
    return cast(dict[str, Any], config)


def _safetensors_in(source: Path) -> dict[Path, list[str]]:
    """The files, and the names that an index says are in them."""
    if not is_folder(source) and os.path.lexists(source):
        return {named_file(source): []}
    if os.path.lexists(source / INDEX):
        return {source / file: names for file, names in sorted(read_index(source).items())}
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{source}: expected a .safetensors file, or a folder with some; found none.")
    return {path: [] for path in found}


def _take_over(path: Path, names: list[str], target: Path, progress: Progress) -> tuple[File, dict[str, Stored]]:
    """Copy one file, under the names that a checkpoint's tensors have."""
    held: dict[str, Stored] = {}
    real = hub_file(path)
    with reading(real) as file:
        there = read_header(file, path)
    check_names(names, there, path)
    entries = files.in_order(files.Entry(f"{_PREFIX}{name}", t.dtype, t.shape) for name, t in there.items())
    with files.writing(target):
        writer = files.FileWriter(target, entries, {})
        try:
            for entry in entries:
                at, source = writer.at, there[entry.name.removeprefix(_PREFIX)]
                crc = files.checksum(real, source.start, source.bytes, writer.write)
                box = StoredBox((0,) * len(entry.sizes), entry.sizes, target.name, at, crc)
                held[entry.name] = Stored(entry.dtype, entry.sizes, (box,))
                progress(entry.bytes)
            return writer.close(), held
        finally:
            writer.abandon()


def _silent(_: int) -> None:
    """Nobody watches."""
