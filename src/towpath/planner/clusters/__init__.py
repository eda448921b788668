"""Clusters by name (the files beside this one), from a file of yours, or as `towpath probe` has measured one."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from towpath.errors import ConfigError
from towpath.planner.cluster import Cluster, from_table
from towpath.planner.profile import Profile


def shipped() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in files(__name__).iterdir() if f.name.endswith(".toml"))


def load(what: str | Path, nodes: int | None = None) -> Cluster:
    """A shipped cluster by its name, one from a file, or what `towpath probe` has measured (.json).

    `nodes`: so many of them, in place of what it says.
    """
    if Path(what).suffix == ".json":
        profile = Profile.load(what)
        if nodes not in (None, profile.topology.nodes):
            raise ConfigError(
                f"profile {what} is of {profile.topology.nodes} nodes, and --nodes asks for {nodes}: what was "
                "measured on one number of nodes does not hold for another. Probe there, or describe it in a .toml."
            )
        return profile.cluster()
    if str(what) in shipped():
        name, text = str(what), files(__name__).joinpath(f"{what}.toml").read_text(encoding="utf-8")
    else:
        path = Path(what)
        if not path.is_file():
            raise ConfigError(f"cluster {str(what)!r}: expected a .toml file, or one of {', '.join(shipped())}.")
        try:
            name, text = path.stem, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cluster: cannot read {path}: {error}.") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"cluster {what}: not TOML: {error}.") from None
    found = from_table(name, table)
    return found if nodes is None else found.on(nodes)
