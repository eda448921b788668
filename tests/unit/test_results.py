"""The last runs of what `make test` leaves out, in tests/results/."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.record import distance_of, line_of


@pytest.mark.parametrize("name", ["parity", "soak"])
def test_the_last_run_is_recorded(name: str, record_property: Callable[[str, object], None]) -> None:
    record_property("says", f"make {name}: {distance_of(name)}")
    assert line_of(name).startswith(f"`make {name}`: ")


def test_a_run_is_told_in_a_line(tmp_path: Path) -> None:
    assert distance_of("parity", tmp_path) == "no run"
    found = {"commit": "0" * 40, "clean": False, "date": "2026-01-31", "passed": 3456, "skipped": 2}
    found |= {"seconds": 7200, "cores": 2, "load_before": 0.1}
    (tmp_path / "parity.json").write_text(json.dumps(found))
    assert line_of("parity", tmp_path) == (
        "`make parity`: 3456 passed, 2 skipped, 120 minutes on 2 cores, 2026-01-31, commit 0000000000, "
        "with changes that were not committed"
    )
    assert distance_of("parity", tmp_path) == "a commit that this history does not hold"
