"""Convert checkpoints to Hugging Face safetensors, and safetensors to checkpoints.

This needs no ranks. The tensors of one file are in memory at a time.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from towpath.checkpoint import folders, storage
from towpath.checkpoint.folders import lock_of, release
from towpath.checkpoint.manifest import Manifest, StoredTensor, box_in, read_manifest
from towpath.checkpoint.safe_files import (
    INDEX,
    SINGLE,
    DamagedError,
    hub_file,
    map_tensors,
    read_object,
    weights_at,
    write_tensors,
    writing,
)
from towpath.checkpoint.storage import TensorChunks, WriteItems
from towpath.errors import CheckpointError
from towpath.outer.saved import island_manifest, islands_of

ADAPTERS = "peft"  # the name in a manifest
_PREFIX = "model."
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The files that Transformers keeps next to a tokenizer.json.
_WITH_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    adapter: str | None = None,
    island: int | None = None,
) -> list[Path]:
    """Write the model of a checkpoint as safetensors, as `from_pretrained` of Hugging Face reads them.

    Only the first name of tied parameters is written as a tensor, as Hugging Face does.

    Args:
        checkpoint: The folder of the checkpoint.
        folder: A new or empty folder.
        max_shard_bytes: The largest size of a safetensors file.
        config: The model's configuration for config.json. By default it is the one in the checkpoint, if any.
        dtype: A floating-point dtype, such as "bfloat16", to convert to. By default tensors keep their dtype.
        tokenizer: A tokenizer.json, or a folder with one, to copy with the files that describe it.
        adapter: The name of an adapter of a PEFT model, "default" unless you chose another. Only this adapter is
            written, in files that `PeftModel.from_pretrained` loads.
        island: The island whose weights are written, for a run with outer steps. By default, the slow weights are.

    Returns:
        The files that were written.

    Raises:
        CheckpointError: The checkpoint is damaged, the folder is not empty, or an argument does not fit.
    """
    source, target = Path(checkpoint), Path(folder)
    manifest = read_manifest(source)
    manifest.check_sizes(source)
    if island is not None and not 0 <= island < islands_of(manifest):
        raise CheckpointError(f"island {island}: {source} has the islands 0 to {islands_of(manifest) - 1}.")
    manifest = island_manifest(manifest, island)
    peft = _adapter(manifest, adapter, source) if adapter is not None else None
    names = _names(manifest, peft["tensors"] if peft else None, source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and is not empty: export into a new folder.")
    weights = _Weights(source, manifest, names, _floating(dtype))
    to_copy = {} if tokenizer is None else _tokenizer_files(Path(tokenizer))
    for file in sorted({box.file for name in names for box in weights.stored(name).boxes}):
        manifest.check_file(source, file)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        if peft is not None:
            written = [weights.write(target / "adapter_model.safetensors", list(names))]
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


def _names(manifest: Manifest, only: Mapping[str, str] | None, source: Path) -> dict[str, str]:
    """Return the names of the model's tensors by those in an export. `only` selects some, and gives PEFT's names."""
    held = [*manifest.model]
    if not held:
        raise CheckpointError(f"{source} holds no model.")
    names: Mapping[str, str] = manifest.values.get("names", {})
    if only is not None:
        if missing := only.keys() - {*held}:
            raise CheckpointError(f"{source}: the adapter's {min(missing)} is not among the model's tensors.")
        names, held = only, list(only)
    exported = [names.get(name, name) for name in held]
    for name, count in Counter(exported).items():
        if count > 1:
            raise CheckpointError(
                f"{source}: two of its tensors would be called {name!r} by others; see `names` of State."
            )
    return {name: _PREFIX + mine for name, mine in zip(exported, held, strict=True)}


def _adapter(manifest: Manifest, name: str, source: Path) -> dict[str, Any]:
    """Return the `config` and `tensors` of a PEFT adapter."""
    there: dict[str, dict[str, Any]] = manifest.values.get(ADAPTERS, {})
    if name not in there:
        known = f"it has {', '.join(there)}" if there else "it was of no PEFT model"
        raise CheckpointError(f"{source}: no adapter {name!r} in the checkpoint; {known}.")
    if problem := there[name].get("problem"):
        raise CheckpointError(f"{source}: the adapter {name!r} needs the model: {problem}. Call its save_pretrained().")
    if not {"config", "tensors"} <= there[name].keys():
        raise DamagedError(f"{source}: the adapter {name!r} has no config or no tensors in the manifest.")
    return there[name]


def _floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a floating-point dtype by its name, or raise CheckpointError if it is no such dtype."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _FLOATING:
        raise CheckpointError(f"dtype: expected float64, float32, bfloat16 or float16; got {dtype}.")
    return found


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
    """The tensors of a checkpoint by their names in an export, converted to a dtype."""

    folder: Path
    manifest: Manifest
    names: Mapping[str, str]  # in the manifest
    dtype: torch.dtype | None  # for floating-point tensors; None keeps their own
    _mapped: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])

    def stored(self, name: str) -> StoredTensor:
        """Return where the tensor is."""
        return self.manifest.tensors[self.names[name]]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that the tensor is written in."""
        own = self.stored(name).dtype
        return self.dtype if self.dtype is not None and own in _FLOATING else own

    def bytes_of(self, name: str) -> int:
        """Return the size of the tensor that is written."""
        return prod(self.stored(name).shape) * self.dtype_of(name).itemsize

    def read(self, name: str) -> Tensor:
        """Read and convert a tensor."""
        stored = self.stored(name)
        tensor = stored.empty() if len(stored.boxes) > 1 else None
        for box in stored.boxes:
            if box.file not in self._mapped:
                self._mapped[box.file] = map_tensors(self.folder / box.file)
            part = box_in(self._mapped[box.file], stored, box)
            if tensor is None:
                tensor = part
            else:
                tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = part
        assert tensor is not None
        converted = tensor.to(self.dtype_of(name))
        if converted.dtype != tensor.dtype and not torch.equal(converted.isfinite(), tensor.isfinite()):
            raise CheckpointError(f"{name} has values that {self.dtype} cannot hold. Export bfloat16 or float32.")
        return converted

    def write(self, path: Path, names: list[str]) -> Path:
        """Write a safetensors file with some of the tensors."""
        write_tensors(path, {name: self.read(name) for name in names}, {"format": "pt"})
        return path


def _export_safetensors(weights: _Weights, target: Path, max_shard_bytes: int) -> list[Path]:
    parts: list[list[str]] = [[]]
    filled = 0
    for name in weights.names:
        count = weights.bytes_of(name)
        if parts[-1] and filled + count > max_shard_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += count
    if len(parts) == 1:
        return [weights.write(target / SINGLE, parts[0])]
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    written = [weights.write(target / name, part) for name, part in zip(names, parts, strict=True)]
    homes = {n: name for name, part in zip(names, parts, strict=True) for n in part}
    total = sum(map(weights.bytes_of, weights.names))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
    written.append(target / INDEX)
    written[-1].write_text(json.dumps(index, indent=2) + "\n")
    return written


def import_safetensors(source: str | Path, root: str | Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """Make a checkpoint of step 0, without an optimizer, from safetensors files.

    Args:
        source: A safetensors file, or a folder with some and perhaps an index.
        root: The folder for the checkpoint.
        config: The model's configuration. By default it is the config.json next to the files, if any.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: The files are damaged, or `root` has a checkpoint of step 0, or another job uses it.
    """
    source, root = Path(source), Path(root)
    weights = weights_at(source)
    if not weights:
        raise CheckpointError(
            f"{source}: expected a .safetensors file, or a folder with some; found none. Check the path."
        )
    found = (source if source.is_dir() else source.parent) / "config.json"
    if config is None and os.path.lexists(found):
        config = read_object(hub_file(found), "a model's configuration")
    chunks = {
        _PREFIX + name: TensorChunks(tensor.dtype, tensor.shape, {(0,) * tensor.dim(): tensor})
        for name, tensor in weights.items()
    }
    values = {"model": {"aliases": {}}, **({"config": dict(config)} if config is not None else {})}
    final, lock = folders.checkpoint_of(root, 0), lock_of(root)
    try:
        with writing(root), ExitStack() as stack:
            lock.hold(alone=True)
            if final.exists():  # nobody else can make it from here on
                raise CheckpointError(f"{final} is there already: import into a new folder.")
            partial = stack.enter_context(folders.new_partial(root, 0))
            written = storage.write_files(partial / "rank-00000", WriteItems(pieces=chunks, values=values, same={}))
            storage.complete(partial, 0, [written], None, f"imported from {source.name}")
            folders.publish(partial, final)
    finally:
        release(lock)
    return final


# --- adapters of PEFT -------------------------------------------------------------------------------------------------
#
# A checkpoint has their names and configurations, so that an export needs no model. PEFT is called with placeholders
# instead of tensors. It returns those that it would save, by its own names.


def adapters_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return the adapters of a model by name. The result is empty for a model without adapters.

    Each has its `config`, as PEFT writes it, and PEFT's names of its `tensors` by the model's names. If PEFT computes
    other tensors from those of the model, an adapter has the `problem` instead.
    """
    if "peft" not in sys.modules or not isinstance(model, nn.Module):
        return {}
    from peft import PeftModel

    for prefix, module in model.named_modules():
        if isinstance(module, PeftModel):
            path = f"{prefix}." if prefix else ""
            return {adapter: _described(module, path, adapter) for adapter in module.peft_config}
    return {}


def _described(model: Any, prefix: str, adapter: str) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    placeholders = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    ours = {id(tensor): prefix + name for name, tensor in placeholders.items()}
    try:
        found = get_peft_model_state_dict(model, placeholders, adapter, save_embedding_layers=False)
        tensors = {ours[id(tensor)]: name for name, tensor in found.items()}
        return {"config": _config(model, adapter), "tensors": tensors}
    except Exception as error:  # some adapters compute with the tensors, and fail with placeholders
        return {"problem": f"{model.peft_config[adapter].peft_type} makes its files out of values ({error!r})"}


def _config(model: Any, adapter: str) -> dict[str, Any]:
    """Return the configuration as PEFT's `save_pretrained` writes it."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return json.loads(Path(folder, "adapter_config.json").read_text(encoding="utf-8"))
