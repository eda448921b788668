"""Values of a checkpoint that are not tensors, as JSON.

Unlike a pickle, JSON runs no code. Tuples stay tuples, and keys that are not strings keep their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from towpath.checkpoint.safe_open import shown
from towpath.errors import CheckpointError

_TUPLE, _ITEMS, _TENSOR_AT, _BYTES = "(tuple)", "(items)", "(tensor)", "(bytes)"
_TAGS = (_TUPLE, _ITEMS, _TENSOR_AT, _BYTES)


def to_json(value: Any, path: str, keep: Callable[[str, torch.Tensor], None]) -> Any:
    """Return `value` as JSON, without its tensors. `keep` receives each tensor and the path that refers to it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise CheckpointError(f"{path} is a tensor on the meta device, which has no values to save.")
        keep(path, value)
        return {_TENSOR_AT: path}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, (list, tuple)):
        items = [to_json(v, f"{path}.{i}", keep) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        pairs = [(k, to_json(v, f"{path}.{k}", keep)) for k, v in value.items()]
        if all(isinstance(k, str) for k, _ in pairs) and not any(k in _TAGS for k, _ in pairs):
            return dict(pairs)
        return {_ITEMS: [[to_json(k, f"{path} (key)", keep), v] for k, v in pairs]}
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        return value.item()  # a NumPy scalar
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: expected tensors, None, numbers, "
        "strings, bytes, and lists, tuples and dicts of them. Let its state_dict() return such."
    )


def from_json(value: Any, tensors: Callable[[str], Any]) -> Any:
    """Return what `to_json` was given. `tensors` returns the tensor of a path.

    Raises:
        ValueError: `to_json` cannot have made the value.
        TypeError: `to_json` cannot have made the value.
    """
    if isinstance(value, list):
        return [from_json(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, inside)] = value.items()
        if tag == _TENSOR_AT:
            return tensors(inside)
        if tag == _BYTES:
            return bytes.fromhex(inside)
        if tag == _TUPLE:
            return tuple(from_json(v, tensors) for v in _list(inside))
        if tag == _ITEMS:
            pairs = [_list(pair, 2) for pair in _list(inside)]
            found = {from_json(k, tensors): from_json(v, tensors) for k, v in pairs}
            if len(found) != len(pairs):
                raise ValueError("a key stands twice")
            return found
    return {k: from_json(v, tensors) for k, v in value.items()}


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(cast(list[Any], value)) != length):
        raise ValueError(f"expected a list{'' if length is None else f' of {length}'}, got {shown(value)}")
    return cast(list[Any], value)


def tensors_in(value: Any) -> list[str]:
    """Return the paths of the tensors that belong into a value from `to_json`."""
    found: list[str] = []
    from_json(value, lambda path: found.append(path) or object())
    return found
