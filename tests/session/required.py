"""What a run cannot do without. Where CI=true, all of it; elsewhere what `--require` names.

A test that skips because its machine lacks something proves nothing: where continuous integration lacks it, the session
ends before its first test, with the reason. `--may-miss lab` names what may be missing all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable

import pytest


def reasons_against(config: pytest.Config) -> list[str]:
    """Why this session may not begin: one line for each thing that is required and missing."""
    may_miss = _names(config.getoption("--may-miss"))
    required = _names(config.getoption("--require"))
    if os.environ.get("CI", "").lower() in ("1", "true"):
        required |= REQUIREMENTS.keys()
    found = {name: REQUIREMENTS[name]() for name in sorted(required - may_miss)}
    return [f"{name} is required and missing: {reason} (--may-miss {name})" for name, reason in found.items() if reason]


def _names(option: str) -> set[str]:
    names = {name.strip() for name in option.split(",") if name.strip()}
    unknown = names - REQUIREMENTS.keys()
    if unknown:
        raise pytest.UsageError(f"expected some of {', '.join(REQUIREMENTS)}, got {', '.join(sorted(unknown))}")
    return names


def _native() -> str | None:
    try:
        importlib.import_module("towpath.codecs.kernels.cpp_codecs")
    except ImportError as error:
        return f"the C++ extension was not built: {error}"
    return None


def _lab() -> str | None:
    from lab import available

    return available()


def _triton() -> str | None:
    """Its interpreter needs no GPU."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


REQUIREMENTS: dict[str, Callable[[], str | None]] = {"native": _native, "lab": _lab, "triton": _triton}
