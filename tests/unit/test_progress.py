"""Numbers of bytes as text, and the progress of long operations where there is no terminal."""

from __future__ import annotations

import pytest

from towpath import progress
from towpath.progress import progress_bar, size


def test_sizes_are_decimal() -> None:
    found = [size(count) for count in (0, 999, 1000, 999_600, 1.5e12, 4e15)]
    assert found == ["0 B", "999 B", "1 kB", "1 MB", "1.5 TB", "4000 TB"]


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 1.0, 3.0, 3.0, 4.0])  # at the beginning, then one or two readings for each part
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress_bar("Planning") as say:
        for done in (1, 2, 3):
            say(done, 4)
    assert capsys.readouterr().err == "Planning: 50%\n"
