"""The programs of docs/guides/lab.md, which are about the laboratory itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import Lab
from tests.documented import programs
from tests.lab import functions

Labs = Callable[..., Lab]


@pytest.mark.parity
def test_the_program_of_the_page_raises_a_lab_and_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, sys\nprint(sys.argv)\nif len(sys.argv) == 1:\n    signal.pause()\n"
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    around: dict[str, Any] = {"train": functions.where, "signal": signal}
    exec(compile(programs("guides/lab.md")["lab"], "lab.md", "exec"), around)
    assert around["losses"] and around["result"].returncode != 0  # the last run was ended by a signal
    exec(compile(programs("guides/lab.md")["flats"], "lab.md", "exec"), around)
    assert around["result"].returncode == 0 and around["lab"].wiring.cables[0].loss == 0.01


def test_what_a_region_sends_is_counted_as_the_page_says(lab: Labs) -> None:
    carried = lab(2, 1, preload=("torch",)).call(functions.counted_by, programs("guides/lab.md")["counters"])
    assert all(400_000 <= each.sent_bytes < 480_000 for each in carried), carried
