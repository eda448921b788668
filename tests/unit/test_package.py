"""The version of the package."""

from __future__ import annotations

import tomllib

import towpath
from tests.documented import ROOT


def test_version_is_in_pyproject_and_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert towpath.__version__ == version
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
