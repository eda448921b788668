"""The manifest of a checkpoint, `manifest.json`: where the tensors are, and every value that is not a tensor.

    format, crc32        of the content, so that the manifest detects its own changes
    content
      step, written_by, seconds, world, strategy
      files              name → bytes, CRC-32 of the whole file
      tensors            name → dtype, shape, boxes; each box: offsets, sizes, file
      values             name → everything that is not a tensor (`encode_value`)

The files are safetensors files. Each rank writes the states of the optimizer into one and everything else into another,
so that loading weights computes no checksums of states. A box is called `name@offsets` in its file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, cast

import torch

from towpath.checkpoint import safe_files
from towpath.checkpoint.safe_files import DamagedError, checksum, is_plain, opened, read_object, shown, writing
from towpath.errors import CheckpointError
from towpath.files import sync_folder

NAME = "manifest.json"
FORMAT = "towpath checkpoint 2"
_YEAR_10000 = 253_000_000_000  # the last year that Python's dates can have is 9999
_MOST_CORNERS = 1 << 24  # of boxes: a manifest of MAX_JSON_BYTES has fewer in up to four dimensions
_CHECKPOINT = re.compile(r"step-([0-9]+)")
_PART = re.compile(r"(island\.\d+\.|)(.*)", re.DOTALL)  # the values of an island, and those of the job
_WITHOUT_TENSORS = ("model", "names", "config", "peft")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The size and the checksum of a safetensors file."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A rectangular part of a tensor: `sizes` elements in each dimension, from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str

    def key(self, name: str) -> str:
        """Return the name of the box in its file."""
        return f"{name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, its name in the files, and the boxes that it is stored in."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def bytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return an uninitialized tensor of this shape, or raise DamagedError.

        Sizes are checked against the files, but a file can be sparse and larger than all memory.
        """
        try:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            shape = list(self.shape)
            raise DamagedError(f"{self.name} has shape {shape}, for which there is no memory ({error}).") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    step: int  # how many optimizer steps were done
    written_by: str
    seconds: float  # since 1970
    world: int  # how many ranks wrote it
    strategy: str | None  # in TOML; None if it was imported
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(f.bytes for f in self.files.values())

    @property
    def model(self) -> dict[str, StoredTensor]:
        """The tensors of the model, by their names in it."""
        return {n.removeprefix("model."): t for n, t in self.tensors.items() if n.startswith("model.")}

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters, each with the name that the tensor is stored under."""
        return self.values.get("model", {"aliases": {}})["aliases"]

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor that another part of the checkpoint names."""
        if name not in self.tensors:
            raise DamagedError(f"{name} is missing, which other parts of the checkpoint name.")
        return self.tensors[name]

    def check_sizes(self, folder: Path) -> None:
        """Raise DamagedError unless every file is in `folder` with its size. This reads no file, so it is quick."""
        for name, file in self.files.items():
            with opened(folder / name) as found:
                size = os.fstat(found.fileno()).st_size
            if size != file.bytes:
                what = "truncated" if size < file.bytes else "longer than it was"
                raise DamagedError(f"{folder / name} is {what}: {size:,} bytes, expected {file.bytes:,}.")

    def check_file(self, folder: Path, name: str) -> None:
        """Raise DamagedError unless every byte of a file is what was written."""
        if checksum(folder / name) != (self.files[name].bytes, self.files[name].crc32):
            raise DamagedError(f"{folder / name} is corrupted: its checksum is not that of what was written.")


# --- reading and writing ----------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Manifest, check_room: Callable[[int], object] = lambda _: None) -> None:
    """Write the manifest into `folder`, and wait until it is on the disk. `check_room` gets its bytes before."""
    content: dict[str, Any] = {
        **{name: getattr(manifest, name) for name in _CONTENT},
        "files": {n: [f.bytes, f.crc32] for n, f in manifest.files.items()},
        "tensors": {
            name: [str(t.dtype).removeprefix("torch."), t.shape, [[b.offsets, b.sizes, b.file] for b in t.boxes]]
            for name, t in manifest.tensors.items()
        },
    }
    whole = {"format": FORMAT, "crc32": zlib.crc32(_canonical(content)), "content": content}
    data, path = json.dumps(whole).encode(), folder / NAME
    if len(data) > safe_files.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} would have {len(data):,} bytes, and at most {safe_files.MAX_JSON_BYTES:,} are read. Are there "
            "long lists in the state of an extra? Give them as tensors."
        )
    check_room(len(data))
    with writing(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _canonical(content: Any) -> bytes:
    """Return the bytes that the checksum is of. JSON keeps the order of keys, and floats bit for bit."""
    return json.dumps(content, separators=(",", ":")).encode()


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, or -1 if the name has none."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else -1


def read_manifest(folder: str | Path) -> Manifest:
    """Return the checked manifest of a checkpoint, or raise DamagedError if it is missing or damaged."""
    path = Path(folder) / NAME
    if path.parent.is_symlink():
        raise DamagedError(f"{path.parent} is a symbolic link, which is not followed. Name its target.")
    whole = read_object(path, "a whole manifest")
    if whole.get("format") != FORMAT:
        raise DamagedError(f"{path}: format is {shown(whole.get('format'))}; expected {FORMAT!r}.")
    content, step = whole.get("content"), step_of(path.parent)
    try:
        if zlib.crc32(_canonical(content)) != whole.get("crc32"):
            raise ValueError("its checksum does not match its content: the file was changed.")
        _check(content, _CONTENT, "content")
        manifest = _parsed(cast(dict[str, Any], content))
        if step not in (-1, manifest.step):
            raise ValueError(
                f"it is of step {manifest.step}; expected that of {path.parent.name}. Rename the folder, or copy the "
                "checkpoint anew."
            )
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path}: {error}") from None
    return manifest


def digest_of(folder: Path) -> str | None:
    """Return the digest of a checkpoint's manifest, or None if there is none to read."""
    try:
        with opened(folder / NAME) as file:
            return hashlib.sha256(file.readall()).hexdigest()
    except DamagedError:
        return None


# What the parts of a manifest look like: a type, a list or a dict of members, or one form for all keys.
_COUNT, _POSITIVE = "an integer from 0 to 2^63 - 1", "an integer from 1 to 2^63 - 1"
_CONTENT: dict[Any, Any] = {
    "step": _COUNT,
    "written_by": str,
    "seconds": float,
    "world": _POSITIVE,
    "strategy": str | None,
    "files": {str: [_COUNT]},
    "tensors": {str: list},
    "values": {str: object},
}
_VALUES: dict[Any, Any] = {
    "model": {"aliases": {str: str}},
    "optimizer": {
        "kind": str,
        "states": {str: {"like": [str], "rest": dict}},
        "groups": [{"names": [str], "options": {str: object}}],
    },
    "engine": {"step": _COUNT, "fingerprint": str},
    "rng": {"seed": object},
    "names": {str: str},
    "config": dict,
    "peft": {str: dict},
    "snapshot": {"run": str},
    "islands": {
        "count": _POSITIVE,
        "every": _POSITIVE,
        "fragments": _POSITIVE,
        "done": _COUNT,
        "delay": _COUNT,
        "under_way": {str: _COUNT},
    },
}


def _check(value: Any, form: Any, where: str) -> None:
    """Raise ValueError unless a value has a form."""
    if isinstance(form, dict):
        _check(value, dict, where)
        forms = cast(dict[Any, Any], form)
        for key in value if str in forms else forms:
            if key not in value:
                raise ValueError(f"{where}.{key} is missing.")
            _check(value[key], forms[str] if str in forms else forms[key], f"{where}[{shown(key)}]")
    elif isinstance(form, list):
        _check(value, list, where)
        for number, member in enumerate(value):
            _check(member, form[0], f"{where}[{number}]")
    elif isinstance(form, str):
        if type(value) is not int or not (form == _POSITIVE) <= value < 2**63:
            raise ValueError(f"{where} is {shown(value)}; expected {form}.")
    elif not isinstance(value, form):
        raise ValueError(f"{where} is {shown(value)}; expected {getattr(form, '__name__', form)}.")


def _parsed(content: dict[str, Any]) -> Manifest:
    """Return the manifest, or raise ValueError or TypeError for the first thing in it that does not fit the rest."""
    if any(not is_plain(name) or name == NAME for name in content["files"]):
        raise ValueError(f"files are {shown(list(content['files']))}; expected plain names, other than {NAME}.")
    files = {name: StoredFile(*facts) for name, facts in content["files"].items()}
    tensors = {name: _tensor(name, *facts) for name, facts in content["tensors"].items()}
    room = {name: file.bytes for name, file in files.items()}
    for name, tensor in tensors.items():
        for box in tensor.boxes:
            if box.file not in room:
                raise ValueError(f"tensors[{shown(name)}] names the file {shown(box.file)}; expected one of its files.")
            room[box.file] -= prod(box.sizes) * tensor.dtype.itemsize
    if sum(len(t.boxes) << len(t.shape) for t in tensors.values() if len(t.boxes) > 1) > _MOST_CORNERS:
        raise ValueError("tensors have more boxes than any checkpoint of Towpath.")
    for name, tensor in tensors.items():
        if not _hold_each_element_once(tensor.shape, tuple((box.offsets, box.sizes) for box in tensor.boxes)):
            where = f"tensors[{shown(name)}]"
            raise ValueError(f"the boxes of {where} do not hold each element of {list(tensor.shape)} once.")
    if over := [name for name, left in room.items() if left < 0]:  # so no rank allocates more than the files have
        raise ValueError(f"tensors of {over[0]} are larger than the file.")
    for name, value in content["values"].items():
        prefix, plain = cast(re.Match[str], _PART.fullmatch(name)).groups()
        _check(value, _VALUES.get(plain, object), f"values.{plain}")
        for path in () if plain in _WITHOUT_TENSORS else tensors_in(value):
            if not f"{path}.".startswith(f"{plain}.") or not {path, prefix + path} & tensors.keys():
                raise ValueError(f"values.{plain} refers to {shown(path)}; expected a tensor of {shown(plain)}.")
    if not 0 <= content["seconds"] < _YEAR_10000:
        raise ValueError(f"seconds is {shown(content['seconds'])}; expected a time since 1970.")
    facts: dict[str, Any] = {name: content[name] for name in _CONTENT} | {"files": files, "tensors": tensors}
    return Manifest(**facts)


def _tensor(name: str, dtype: Any, shape: Any, boxes: Any) -> StoredTensor:
    where, found = f"tensors[{shown(name)}]", getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{where} has the dtype {shown(dtype)}; expected one of PyTorch, such as float32.")
    _check(shape, [_COUNT], f"{where}.shape")
    stored = StoredTensor(name, found, tuple(shape), tuple(StoredBox(tuple(o), tuple(n), file) for o, n, file in boxes))
    for box in stored.boxes:
        _check([*box.offsets, *box.sizes], [_COUNT], f"{where}.boxes")
    return stored


@lru_cache(1024)  # the layers of a model have tensors of the same shapes, cut in the same way
def _hold_each_element_once(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    """Return whether boxes, given as offsets and sizes, hold each element of a tensor, and no two the same."""
    whole = (0,) * len(shape), shape
    if len(boxes) < 2:
        return boxes == (whole,)
    # The corners of each box are counted with alternating signs. Where boxes adjoin, they cancel. Only the corners of
    # the whole tensor are left if each element is in one box, and otherwise others are.
    corners, signs = Counter[tuple[int, ...]](), [1]
    for _ in shape:
        signs = [factor * sign for sign in signs for factor in (1, -1)]
    for sign, (offsets, sizes) in ((-1, whole), *((1, box) for box in boxes)):
        ends = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        for corner, factor in zip(itertools.product(*ends), signs, strict=True):
            corners[corner] += sign * factor
    return not any(corners.values())


def box_in(held: Mapping[str, torch.Tensor], stored: StoredTensor, box: StoredBox) -> torch.Tensor:
    """Return a box of a tensor from those that its file holds."""
    found = held.get(box.key(stored.name))
    if found is None or tuple(found.shape) != box.sizes or found.dtype != stored.dtype:
        raise DamagedError(f"{box.file}: {box.key(stored.name)} is not in it as the manifest says.")
    return found


# --- values -----------------------------------------------------------------------------------------------------------
#
# Values are JSON, which runs no code, unlike a pickle. Tuples stay tuples, and keys that are not strings keep their
# type.

_TUPLE, _ITEMS, _TENSOR_AT, _BYTES = "(tuple)", "(items)", "(tensor)", "(bytes)"
_TAGS = (_TUPLE, _ITEMS, _TENSOR_AT, _BYTES)
_MOST_LEVELS, _MOST_BITS = 100, 4096


def encode_value(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Return `value` as JSON. Its tensors are added to `tensors`, by names that begin with `path` and are new there."""
    if depth > _MOST_LEVELS:
        first = ".".join(path.split(".")[:4])
        raise CheckpointError(
            f"{first}… has more than {_MOST_LEVELS} levels, or contains itself. Let state_dict() return a flat dict."
        )
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{path} is a number of {value.bit_length():,} bits, and a checkpoint holds up to {_MOST_BITS:,}. Let its "
            "state_dict() return bytes."
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {_TENSOR_AT: _add_tensor(path, value, tensors)}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, (list, tuple)):
        items = [encode_value(v, f"{path}.{i}", tensors, depth + 1) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        pairs = [(k, encode_value(v, f"{path}.{k}", tensors, depth + 1)) for k, v in value.items()]
        if all(isinstance(k, str) for k, _ in pairs) and not any(k in _TAGS for k, _ in pairs):
            return dict(pairs)
        return {_ITEMS: [[encode_value(k, f"{path} (key)", tensors, depth + 1), v] for k, v in pairs]}
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        return value.item()  # a NumPy scalar
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: expected tensors, None, numbers, "
        "strings, bytes, and lists, tuples and dicts of them. Let its state_dict() return such."
    )


def _add_tensor(path: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor to `tensors`, and return its name there. It is `path`, or `path~2` if another one is called so."""
    if tensor.is_meta:
        raise CheckpointError(f"{path} is a tensor on the meta device, which has no values to save.")
    # Keys may contain dots, and 0 and "0" look the same: {"a.b": x, "a": {"b": y}}.
    names = itertools.chain([path], (f"{path}~{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in tensors)
    tensors[name] = tensor
    return name


def decode_value(value: Any, tensors: Callable[[str], Any]) -> Any:
    """Return what `encode_value` was given. Raise ValueError or TypeError. `tensors` returns the tensor of a path."""
    if isinstance(value, list):
        return [decode_value(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, inside)] = value.items()
        if tag == _TENSOR_AT:
            return tensors(inside)
        if tag == _BYTES:
            return bytes.fromhex(inside)
        if tag == _TUPLE:
            return tuple(decode_value(v, tensors) for v in inside)
        if tag == _ITEMS:
            return {decode_value(k, tensors): decode_value(v, tensors) for k, v in inside}
    return {k: decode_value(v, tensors) for k, v in value.items()}


def tensors_in(value: Any) -> list[str]:
    """Return the paths of the tensors that belong into a value from `encode_value`."""
    found: list[str] = []
    decode_value(value, lambda path: found.append(path) or object())
    return found
