"""How the sections of a configuration of `towpath train` are declared, checked, read and written.

A section is a frozen dataclass with a `NAME`, whose fields are made by `option`. A field may itself be a section, such
as [strategy.outer] in [strategy].
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from towpath.core.strategy import written
from towpath.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition on the value of a key, and what an error says that it expects."""

    holds: Callable[[Any], bool]
    expected: str


def one_of(*allowed: str) -> Limit:
    """Return the limit to some values."""
    return Limit(lambda value: value in allowed, f"one of {', '.join(map(repr, allowed))}")


# NaN is outside of all of them.
ABOVE_0 = Limit(lambda value: value > 0, "more than 0")
FROM_0 = Limit(lambda value: value >= 0, "0 or more")
SHARE = Limit(lambda value: 0 <= value <= 1, "a share from 0 to 1")
HELD_OUT = Limit(lambda value: 0 <= value < 1, "a share from 0 up to, not including, 1")
BELOW_ONE = Limit(lambda value: 0 <= value < 1, "a number from 0 up to, not including, 1")
BETAS = Limit(lambda value: all(0 <= beta < 1 for beta in value), "two numbers from 0 up to, not including, 1")
SEED = Limit(lambda value: 0 <= value < 1 << 63, "a whole number from 0 to 2⁶³ − 1")
POWER_OF_TWO = Limit(lambda value: math.frexp(value)[0] == 0.5, "a power of two")


def option(default: Any, about: str, limit: Limit | None = None, *, unless: str = "") -> Any:
    """Declare a key of a section.

    Args:
        default: The value of the key where the file has none.
        about: The description that `str(config)` writes next to the key.
        limit: The condition on its values, if not all are allowed.
        unless: Another key of the section that decides this one. Where that key is set, this one must not be given.
    """
    return field(default=default, metadata={"about": about, "limit": limit, "unless": unless})


def refuse(section: Any, key: str, got: Any, expected: str) -> None:
    """Raise a `ConfigError` that names the section and the key."""
    raise ConfigError(f"{section.NAME}.{key} = {got!r}: expected {expected}.")


def check_limits(section: Any) -> None:
    """Refuse the first value that is outside of the limit of its key."""
    for f in fields(section):
        limit: Limit | None = f.metadata.get("limit")
        if limit is not None and not limit.holds(getattr(section, f.name)):
            refuse(section, f.name, getattr(section, f.name), limit.expected)


def read_section(kind: type[Any], keys: Mapping[str, Any]) -> Any:
    """Return a section of these keys, whose types are checked."""
    types, by_name = get_type_hints(kind), {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    decided: dict[str, list[str]] = {}  # keys that are given, by the key that decides them
    for key, value in keys.items():
        if key not in by_name:
            raise ConfigError(f"unknown key {kind.NAME}.{key}; {closest(key, by_name)}")
        if is_section(types[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{kind.NAME}.{key} = {value!r}: expected a section [{kind.NAME}.{key}].")
            values[key] = read_section(types[key], value)
        else:
            values[key] = typed(types[key], value, f"{kind.NAME}.{key}")
    for name, f in by_name.items():
        if name in values and values.get(f.metadata.get("unless", "")):
            decided.setdefault(f.metadata.get("unless", ""), []).append(f"{kind.NAME}.{name}")
    for other, names in decided.items():
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        raise ConfigError(
            f"{', '.join(names)} {verb} given together with {kind.NAME}.{other} = {values[other]!r}, which decides "
            f"{them}: expected one of the two. Leave out {them}, or {kind.NAME}.{other}."
        )
    return kind(**values)


def typed(kind: Any, value: Any, key: str) -> Any:
    """Return `value` converted to the type of a key, or refuse it."""
    if get_origin(kind) is tuple:
        inner = [a for a in get_args(kind) if a is not Ellipsis]
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if value == "":  # `data.text=` on the command line means none
            values = []
        if len(inner) == len(values) or Ellipsis in get_args(kind):
            return tuple(typed(inner[0], v, key) for v in values)
        raise ConfigError(f"{key} = {value!r}: expected {len(inner)} values.")
    if kind == (bool | None):
        if value == "":
            return None
        kind = bool
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{key} = {json.dumps(value, default=str)}: expected {names[kind]}.")
    if kind is str:
        try:
            # The name of a file may hold bytes that are not UTF-8. Python keeps them as lone surrogates.
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key} = {value!a}: expected Unicode text; the bytes of a name must be UTF-8.") from None
    return value


def is_section(kind: Any) -> bool:
    """Return whether a type of a key is a section of its own."""
    return isinstance(kind, type) and hasattr(kind, "NAME")


def lines_of(section: Any) -> Iterator[str]:
    """Yield the lines of a section in TOML, each key with its description, and then those of the sections in it."""
    yield f"[{section.NAME}]"
    inside: list[Any] = []
    for f in fields(section):
        value = getattr(section, f.name)
        if is_section(type(value)):
            inside.append(value)
        elif not getattr(section, f.metadata.get("unless", ""), None):  # else another key decides this one
            text = f"{f.name} = {written('' if value is None else value)}"
            yield f"{text:<32} # {f.metadata['about']}"
    yield ""
    for each in inside:
        yield from lines_of(each)


def closest(name: str, known: Iterable[str]) -> str:
    """Return which known name is closest to an unknown one, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"did you mean {close!r}? Known: {', '.join(names)}."


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file could not be read, and what to do."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}. Check the path."
    return f"it is not text in UTF-8 ({error}). Save it as such."
