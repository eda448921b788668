"""Values as TOML writes them; `tomllib` reads them back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Beyond what JSON escapes, TOML wants DEL escaped, and knows no surrogate pairs: other characters stay as they are.
_ESCAPED = re.compile('[\x00-\x1f\x7f"\\\\]')


def written(value: str | bool | int | float | Iterable[Any]) -> str:
    """A scalar, or an array of such. Text with lone surrogates is a ValueError: no file can hold it."""
    if isinstance(value, str):
        value.encode()  # or UnicodeEncodeError, which is a ValueError
        return f'"{_ESCAPED.sub(_escape, value)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return f"[{', '.join(map(written, value))}]"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"
