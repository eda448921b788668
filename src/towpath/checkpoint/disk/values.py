"""What of a checkpoint is no tensor: the parts that Towpath wrote itself are as it wrote them.

Tensors inside stand under their paths (`plain.py`): each is one of the checkpoint's, of the part that names it, and
named once, so that no part reaches into another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from towpath.checkpoint.disk.fields import WrongFieldError, integer, items, member, table, text, wrong
from towpath.checkpoint.disk.plain import from_json
from towpath.checkpoint.disk.safe_open import shown

Shapes = Mapping[str, tuple[int, ...]]


def check_values(values: dict[str, Any], shapes: Shapes) -> None:
    try:
        taken: set[str] = set()
        for name, value in values.items():
            match name:
                case "model":
                    _aliases(value, shapes)
                case "optimizer":
                    _optimizer(value, shapes, taken)
                case "engine":
                    integer(member(table(value, "engine"), "step"), "engine.step")
                    text(member(value, "fingerprint"), "engine.fingerprint")
                case "rng":
                    integer(member(table(value, "rng"), "seed"), "rng.seed", low=-(2**63), high=2**64 - 1)
                case "names":
                    _names(value)
                case "config":
                    table(value, "config")
                case "peft":
                    _adapters(value)
                case _:
                    _tree(value, shown(name), name, shapes, taken)
    except WrongFieldError as error:
        raise error.inside("values") from None


def _aliases(value: Any, shapes: Shapes) -> None:
    for alias, first in table(member(table(value, "model"), "aliases"), "model.aliases").items():
        field = f"model.aliases[{shown(alias)}]"
        if f"model.{text(first, field)}" not in shapes:
            raise wrong(field, first, "a tensor of the model")
        if f"model.{text(alias, field)}" in shapes:
            raise WrongFieldError(field, "is a tensor of its own, too.")


def _names(value: Any) -> None:
    for name, other in table(value, "names").items():
        text(name, "names (a key)")
        text(other, f"names[{shown(name)}]")


def _adapters(value: Any) -> None:
    for name, described in table(value, "peft").items():
        try:
            _adapter(table(described, ""))
        except WrongFieldError as error:
            raise error.inside(f"peft[{shown(name)}]") from None


def _adapter(described: dict[str, Any]) -> None:
    if "problem" in described:
        text(described["problem"], "problem")
        return
    table(member(described, "config"), "config")
    for ours, theirs in table(member(described, "tensors"), "tensors").items():
        text(theirs, f"tensors[{shown(ours)}]")


def _optimizer(value: Any, shapes: Shapes, taken: set[str]) -> None:
    try:
        saved = table(value, "")
        text(member(saved, "kind"), "kind")
        for name, state in table(member(saved, "states"), "states").items():
            try:
                _state(name, table(state, ""), shapes, taken)
            except WrongFieldError as error:
                raise error.inside(f"states[{shown(name)}]") from None
        for number, group in enumerate(items(member(saved, "groups"), "groups")):
            try:
                _group(table(group, ""), shapes, taken)
            except WrongFieldError as error:
                raise error.inside(f"groups[{number}]") from None
    except WrongFieldError as error:
        raise error.inside("optimizer") from None


def _state(name: str, state: dict[str, Any], shapes: Shapes, taken: set[str]) -> None:
    shape = shapes.get(f"model.{name}")
    if shape is None:
        raise WrongFieldError("", "is the state of no parameter in the checkpoint.")
    for number, key in enumerate(items(member(state, "like"), "like")):
        path = _tensor(
            f"optimizer.{name}.{text(key, f'like[{number}]')}", f"like[{number}]", "optimizer", shapes, taken
        )
        if shapes[path] != shape:
            raise WrongFieldError(
                f"like[{number}]", f"has shape {list(shapes[path])}; its parameter has {list(shape)}."
            )
    if not isinstance(_tree(member(state, "rest"), "rest", "optimizer", shapes, taken), dict):
        raise wrong("rest", state["rest"], "an object")


def _group(group: dict[str, Any], shapes: Shapes, taken: set[str]) -> None:
    for number, name in enumerate(items(member(group, "names"), "names")):
        text(name, f"names[{number}]")
    for key, value in table(member(group, "options"), "options").items():
        if key == "params":
            raise WrongFieldError("options.params", "is no option.")
        _tree(value, f"options[{shown(key)}]", "optimizer", shapes, taken)


def _tree(value: Any, field: str, part: str, shapes: Shapes, taken: set[str]) -> Any:
    """As `from_json` makes it, but for its tensors."""
    paths: list[Any] = []
    try:
        made = from_json(value, lambda path: paths.append(path) or object())
    except (ValueError, TypeError) as error:
        raise WrongFieldError(field, f"cannot be what was written ({error}).") from None
    for path in paths:
        _tensor(path, field, part, shapes, taken)
    return made


def _tensor(path: Any, field: str, part: str, shapes: Shapes, taken: set[str]) -> str:
    if not isinstance(path, str) or path not in shapes or not (path == part or path.startswith(f"{part}.")):
        raise wrong(field, path, f"a tensor of {shown(part)} that the checkpoint holds")
    if path in taken:
        raise wrong(field, path, "each tensor once")
    taken.add(path)
    return path
