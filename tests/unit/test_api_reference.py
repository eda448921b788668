"""The API reference describes every parameter of every name that it lists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest

from tests.documented import ROOT

# Each entry of the page: a dotted name, and the members that are shown (default: all public ones).
PAGE = (ROOT / "docs/reference/api.md").read_text()
_ENTRY = r"^::: (\S+)\n    options: \{heading: [\w.]+(?:, members: (.*?))?(?:, inherited_members: true)?\}\n"
ENTRIES = re.findall(_ENTRY, PAGE, re.MULTILINE)
NAMESPACES = ("", ".optim", ".checkpoint", ".pipeline", ".planning", ".tracing", ".codecs")


def test_every_public_function_and_class_is_listed() -> None:
    headings = re.findall(r"heading: ([\w.]+)", PAGE)
    assert len(headings) == len(ENTRIES) == PAGE.count("\n::: ")
    for namespace in NAMESPACES:
        module = importlib.import_module(f"towpath{namespace}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not (inspect.isclass(value) and issubclass(value, BaseException)):
                assert f"towpath{namespace}.{name}" in headings
    assert all(_load(heading) is _load(name) for heading, (name, _) in zip(headings, ENTRIES, strict=True))


@pytest.mark.parametrize(("name", "shown"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_every_parameter_has_an_entry(name: str, shown: str) -> None:
    owner = _load(name)
    described = [(name, owner)]
    if inspect.isclass(owner) and shown != "false":
        members = re.findall(r"\w+", shown) or [n for n in vars(owner) if not n.startswith("_")]
        found = [(each, inspect.getattr_static(owner, each)) for each in members]
        described += [(each, getattr(f, "__func__", f)) for each, f in found if not isinstance(f, property)]
    missing = {each: _undescribed(value) for each, value in described if callable(value)}
    assert not any(missing.values()), missing


def _load(name: str) -> Any:
    module, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ModuleNotFoundError:  # a method
        return getattr(_load(module), rest)


def _undescribed(value: Any) -> list[str]:
    """Return the parameters, or the fields of a dataclass, without an entry in `Args:` or `Attributes:`."""
    text = inspect.getdoc(value) or ""
    assert text, "no docstring"
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            return []
        documented = [value.__init__, *(base for base in value.__mro__[1:] if dataclasses.is_dataclass(base))]
        text = "\n".join([text, *(inspect.getdoc(each) or "" for each in documented)])
    if dataclasses.is_dataclass(value):
        wanted = [field.name for field in dataclasses.fields(value) if field.init]
    else:
        called = value.__init__ if inspect.isclass(value) else value
        if getattr(called, "__objclass__", value) is not value:  # of a base class in C, and no user calls it
            return []
        wanted = [each for each in inspect.signature(called).parameters if each != "self"]
    sections = re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", text, re.MULTILINE)
    entries = set(re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", "".join(sections), re.MULTILINE))
    return [each for each in wanted if not each.startswith("_") and each not in entries]
