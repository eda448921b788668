"""Published models by name, however the name is spelled. The data is in `models.toml`, beside this file."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from towpath.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Published:
    """A published model. `fields`: those of the planner's `Transformer`."""

    name: str
    length: int
    fields: Mapping[str, Any]


def published_names() -> list[str]:
    return [name for entry in _data()["model"] for name in entry["names"]]


def published(what: str) -> Published | None:
    """Return the published model that `what` names: "llama-3.1-8b", "Llama3.1-8B" or "meta-llama/Llama-3.1-8B".

    Raises:
        ConfigError: If it is a mixture of experts, which the planner does not know.
    """
    words = words_of(what)
    for start, family in _data()["experts"].items():
        begins = words_of(start)
        if words[: len(begins)] == begins:
            raise ConfigError(
                f"model {what!r}: {family} is a mixture of experts, and the planner knows only dense models, in which "
                f"every token meets every parameter. Expected one such as {nearest(what, published_names())}."
            )
    for entry in _data()["model"]:
        for name in entry["names"]:
            if words == words_of(name):
                own = {key: value for key, value in entry.items() if key not in ("names", "length")}
                return Published(name, entry["length"], {**_data()["all"], **own})
    return None


def words_of(name: str) -> list[str]:
    """Return the words and numbers of a model's name, so that spellings of one name are equal.

    The owner ("meta-llama/") and what does not change the shape ("-Instruct") are left out.
    """
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])
    return [word for word in words if word not in _data()["ignored"]]


def nearest(what: str, known: Iterable[str]) -> str:
    """Return the known name that is most like `what`."""
    spelled = {" ".join(words_of(name)): name for name in known}
    return spelled[difflib.get_close_matches(" ".join(words_of(what)), list(spelled), n=1, cutoff=0.0)[0]]


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("towpath.planner").joinpath("models.toml").read_text(encoding="utf-8"))
