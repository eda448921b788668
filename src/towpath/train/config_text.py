"""Sections of a configuration as TOML: read into frozen dataclasses, typed and with the closest known name, and written
with what each key means."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from towpath.core.strategy import written
from towpath.errors import ConfigError


def section_of(kind: type[Any], keys: Mapping[str, Any]) -> Any:
    types = get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in known:
            raise ConfigError(f"unknown key {kind.NAME}.{key}; {closest(key, known)}")
        values[key] = _typed(types[key], value, f"{kind.NAME}.{key}")
    _refuse_decided(kind, values)
    return kind(**values)


def _refuse_decided(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse keys that another given key decides: they would be ignored."""
    decided: dict[str, list[str]] = {}
    for f in fields(kind):
        if f.name in values and values.get(f.metadata["unless"]):
            decided.setdefault(f.metadata["unless"], []).append(f"{kind.NAME}.{f.name}")
    for other, keys in decided.items():
        one = len(keys) == 1
        raise ConfigError(
            f"{', '.join(keys)} {'is' if one else 'are'} given beside {kind.NAME}.{other} = {values[other]!r}, which "
            f"decides {'it' if one else 'them'}: expected one of the two. Leave out {'it' if one else 'them'}, or "
            f"{kind.NAME}.{other}."
        )


def _typed(kind: Any, value: Any, key: str) -> Any:
    """`value` as a key of type `kind` holds it, if it is one."""
    if get_origin(kind) is tuple:
        inner = [a for a in get_args(kind) if a is not Ellipsis]
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if value == "":  # `data.text=` on the command line: none
            values = []
        if len(inner) == len(values) or Ellipsis in get_args(kind):
            return tuple(_typed(inner[0], v, key) for v in values)
        raise ConfigError(f"{key} = {value!r}: expected {len(inner)} values.")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{key} = {json.dumps(value, default=str)}: expected {names[kind]}.")
    if kind is str and not _is_unicode(value):
        raise ConfigError(f"{key} = {value!a}: expected Unicode text; the bytes of a name must be UTF-8.")
    return value


def _is_unicode(text: str) -> bool:
    """Not, if Python has put bytes that are no UTF-8 into it, as lone surrogates: a file's name may hold them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def put_override(table: dict[str, Any], text: str) -> None:
    """`section.key=value`, the value as in TOML; what is none there is text."""
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"{text!r} is not an override; expected section.key=value, such as train.steps=20.")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    keys = table.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigError(f"{section} = {keys!r}: expected a section [{section}] with keys of its own.")
    keys[key] = parsed


def closest(name: str, known: Any) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"did you mean {close!r}? Known: {', '.join(names)}."


def written_section(section: Any) -> str:
    """As TOML, each key with what it means, but for those that another one decides."""
    own = [f for f in fields(section) if not getattr(section, f.metadata["unless"], None)]
    pairs = [(f, f"{f.name} = {written(getattr(section, f.name))}") for f in own]
    assert all(f.default is not MISSING for f, _ in pairs)
    lines = [f"{text:<32} # {f.metadata['about']}" for f, text in pairs]
    return "\n".join([f"[{section.NAME}]", *lines, ""])


def reason_of(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else f"it is not text ({error})"
