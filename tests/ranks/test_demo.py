"""The demo where the machine allows no lab: it runs on loopback, and says so. Its report is a page of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A smaller model than the demo's own, which takes a minute of two cores.
PROGRAM = """
import sys
from dataclasses import replace
import towpath
import towpath.lab
import towpath.train.demo as story
from towpath.cli import main

def small(strategy, steps, whole=story.configuration):
    config = whole(strategy, steps)
    return replace(
        config,
        model=replace(config.model, width=32, depth=2, heads=2),
        train=replace(config.train, batch=4, micro_batch=1, length=32, evaluate_batches=2),
    )

story.configuration = small
story.TOPOLOGY = towpath.Topology(2, 1)  # two processes start in half the time of four
towpath.lab.available = lambda: "a test forbids it"
if __name__ == "__main__":
    sys.argv = ["towpath", "demo", "--steps", "3", "-o", "report.html", "paro-iig"]
    main.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo has run."""
    made = tmp_path_factory.mktemp("demo")
    (made / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, timeout=600, cwd=made)
    assert done.returncode == 0, done.stderr
    (made / "out").write_text(done.stdout)
    return made


def test_without_a_lab_the_demo_runs_on_loopback_and_says_so(folder: Path) -> None:
    told = (folder / "out").read_text()
    assert "No shaped cluster here (a test forbids it)" in told
    assert "not counted" in told
    assert "paro-iig ★" in told and "★: the fastest" in told
    assert max(map(len, told.splitlines())) <= 100


def test_the_report_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 7
    # Names of XML vocabularies are no addresses to fetch.
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import""", page)
    assert fetched == []
    assert "<script" not in page


def test_a_browser_shows_every_plot(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium here")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    done = subprocess.run(
        [browser, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", str(folder / "report.html")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("</svg>") == 7
    for text in ("Loss against seconds", "exposed communication", "between nodes", "paro-iig"):
        assert text in done.stdout
