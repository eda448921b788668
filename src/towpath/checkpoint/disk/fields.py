"""Values from files that somebody else may have made, one by one: each is of its type and in its range, or named."""

from __future__ import annotations

from typing import Any, cast

from towpath.checkpoint.disk.safe_open import DamagedError, shown

MAX_INT = 2**63 - 1
MAX_DIMS = 64  # PyTorch's


class WrongFieldError(Exception):
    """Caught by whoever knows what the field is part of, and at last the file."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def inside(self, outer: str) -> WrongFieldError:
        inner = self.field if not self.field or self.field.startswith("[") else f".{self.field}"
        return WrongFieldError(f"{outer}{inner}", self.problem)

    def of(self, where: str) -> DamagedError:
        return DamagedError(f"{where}: {self.field} {self.problem}")


def wrong(field: str, got: object, expected: str) -> WrongFieldError:
    return WrongFieldError(field, f"is {shown(got)}; expected {expected}.")


def integer(value: object, field: str, low: int = 0, high: int = MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is an int, too
        raise wrong(field, value, f"an integer from {low} to {high}")
    return value


def text(value: object, field: str) -> str:
    """Of a name. Lone surrogates are no text that anybody could write."""
    if not isinstance(value, str) or not _encodable(value):
        raise wrong(field, value, "a text")
    return value


def _encodable(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def table(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(field, value, "an object")
    return cast(dict[str, Any], value)


def items(value: object, field: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(field, value, "a list" if length is None else f"a list of {length}")
    found = cast(list[Any], value)
    if length is not None and len(found) != length:
        raise wrong(field, found, f"a list of {length}")
    return found


def integers(value: object, field: str, length: int | None = None) -> tuple[int, ...]:
    """Of a shape, or of a place in one."""
    found = items(value, field, length)
    if len(found) > MAX_DIMS:
        raise wrong(field, found, f"at most {MAX_DIMS} dimensions")
    for number, entry in enumerate(found):
        if type(entry) is not int or not 0 <= entry <= MAX_INT:
            raise wrong(f"{field}[{number}]", entry, f"an integer from 0 to {MAX_INT}")
    return tuple(found)


def member(of: dict[str, Any], key: str) -> Any:
    if key not in of:
        raise WrongFieldError(key, "is missing.")
    return of[key]
