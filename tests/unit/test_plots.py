"""Pictures: the same on every processor, many on one page; and the page of several strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.report import Outcome, rows_of, write_report
from towpath.cli.main import _run
from towpath.cli.plots import svg
from towpath.engine.streams.trace import COMPUTE, Interval


def _line(figure: Any, last: float) -> None:
    figure.set_layout_engine("none")
    figure.add_axes((0.1, 0.1, 0.8, last)).plot([0, 1])


def test_a_picture_is_the_same_where_numbers_differ_in_their_last_bits() -> None:
    assert svg(_line, 0.8, (2, 2)) == svg(_line, 0.8 + 2**-50, (2, 2))


def test_pictures_on_one_page_do_not_refer_to_each_other() -> None:
    first, second = (svg(_line, height, (2, 2)) for height in (0.8, 0.5))
    for text in (first, second):
        assert set(re.findall(r"url\(#(\w+)\)", text)) <= set(re.findall(r'id="(\w+)"', text))
    clips = [set(re.findall(r"url\(#(\w+)\)", text)) for text in (first, second)]
    assert clips[0] and clips[1] and not clips[0] & clips[1]


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["plan", "llama-7b", "--cluster", "ethernet-10g", "--batch", "64", "--report", "report.html"]
    assert _run(arguments) == 2
    assert "--report report.html: pictures are drawn by matplotlib" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def _computing(start: float, seconds: float) -> Interval:
    return Interval(track=COMPUTE, name="block", start_seconds=start, seconds=seconds, args={})


# --- the page of several strategies ----------------------------------------------------------------------------------


def _outcome(strategy: str, step_seconds: float, lossless: bool = True) -> Outcome:
    return Outcome(
        strategy=strategy,
        losses=(4.0, 3.0),
        ends=(step_seconds, 2 * step_seconds),
        validation=3.0,
        step_seconds=step_seconds,
        exposed_seconds=step_seconds / 2,
        host_seconds=0.1,
        cable_bytes=None,
        scheduled_bytes=10,
        inside_bytes=10.0,
        memory_bytes={"params": 10},
        lossless=lossless,
        timeline=(_computing(0.0, step_seconds),),
    )


OUTCOMES = [_outcome("zero3", 3.0), _outcome("qgz", 2.5, False), _outcome("mics", 2.0), _outcome("zero++", 1.0, False)]


def test_the_table_is_sorted_and_marks_the_fastest_and_the_lossy(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", "A title", "About it.", OUTCOMES)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [row[0] for row in rows_of(OUTCOMES)] == ["zero++ ★~", "mics ★", "qgz ~", "zero3"]
    assert "★: " in page and "~: lossy" in page
