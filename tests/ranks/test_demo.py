"""The demo where the machine allows no lab: it runs on loopback, and says so. Its report is a page of its own."""

from __future__ import annotations

import os
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

import towpath
from lab import command, demo
from tests.ranks.server import run_commands
from towpath.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo has run."""
    made = tmp_path_factory.mktemp("demo")
    ((code, out, error),) = run_commands(_run_demo, [{}], made)
    assert code == 0, error
    (made / "out").write_text(out)
    return made


def _run_demo(folder: Path) -> None:
    """Train a smaller model than the demo's own, which takes a minute of two cores, on two ranks, not four."""
    demo.SHAPE = replace(demo.SHAPE, width=32, depth=2, heads=2, hidden=64)
    demo.MICRO_STEPS, demo.BATCH, demo.LENGTH = 2, 1, 32
    demo.TOPOLOGY = towpath.Topology(2, 1)
    command.available = lambda: "a test forbids it"
    torch.multiprocessing.spawn = _fork
    os.chdir(folder)
    sys.argv[1:] = ["demo", "--steps", "3", "-o", "report.html", "paro-iig"]
    main.main(command.app, "python -m lab")


def _fork(fn: Any, args: tuple[Any, ...], **options: Any) -> Any:
    """Start processes that need not load torch again. What they get could be sent to others."""
    folder, _, *sent = args
    pickle.dumps((fn, folder, sent))
    return torch.multiprocessing.start_processes(fn, args, start_method="fork", **options)


def test_without_a_lab_the_demo_runs_on_loopback_and_says_so(folder: Path) -> None:
    told = (folder / "out").read_text()
    assert "No shaped cluster here (a test forbids it)" in told
    assert "not counted" in told
    assert "paro-iig ★" in told and "★: the fastest" in told
    assert max(map(len, told.splitlines())) <= 100


def test_the_report_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 7
    for text in ("Loss against seconds", "exposed communication", "between nodes", "paro-iig"):
        assert text in page
    # Names of XML vocabularies are no addresses to fetch.
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import""", page)
    assert fetched == []
    assert "<script" not in page
