"""What the keys of a section say of themselves, and what they may be; else a ConfigError that names section and key."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from towpath.errors import ConfigError


def option(default: Any, about: str, *, unless: str = "") -> Any:
    """A key of a section, with what the written file says of it.

    `unless`: another key of the section that decides this one. Where that one is set, this one must not be given.
    """
    return field(default=default, metadata={"about": about, "unless": unless})


def refuse(section: Any, key: str, got: Any, expected: str) -> None:
    raise ConfigError(f"{section.NAME}.{key} = {got!r}: expected {expected}.")


def positive(section: Any, *keys: str) -> None:
    for key in keys:
        if not getattr(section, key) > 0:
            refuse(section, key, getattr(section, key), "more than 0")


def not_negative(section: Any, *keys: str) -> None:
    for key in keys:
        if not getattr(section, key) >= 0:
            refuse(section, key, getattr(section, key), "0 or more")


def one_of(section: Any, key: str, *allowed: str) -> None:
    if getattr(section, key) not in allowed:
        refuse(section, key, getattr(section, key), f"one of {', '.join(map(repr, allowed))}")
