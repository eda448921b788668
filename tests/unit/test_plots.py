"""Pictures: the same on every processor, and many on one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from towpath.cli.main import _run
from towpath.cli.plots import svg


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
