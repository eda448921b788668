"""What a person sees of a training run: the live line, plain lines where there is no terminal, the summary."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

import towpath
from tests.unit.test_metrics import row_of
from towpath.core.strategy import TransferKind
from towpath.engine.streams.record import Sums, TransferStats
from towpath.observing import Stats
from towpath.train.metrics_logger import StepTimers, summary, times
from towpath.train.progress import StepProgress, duration, size


def _console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, highlight=False)


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_tells_all_and_fits_a_hundred_columns() -> None:
    console = _console(terminal=False)
    with StepProgress(100_000, console=console, every=1) as progress:
        progress.show(row_of(50_000, loss=12.34567, mfu=0.412))
    assert _printed(console) == (
        " 50000/100000  loss 12.346  8.19k tok/s  MFU 41%  inter 48.2 MB  exposed 12%  mem 1.52 GB  ETA 6h56\n"
    )
    assert len(_printed(console)) <= 100 + 1


def test_without_a_terminal_the_first_the_last_and_every_nth_step_have_a_line() -> None:
    console = _console(terminal=False)
    with StepProgress(25, console=console, every=10) as progress:
        for step in range(1, 26):
            progress.show(row_of(step))
            if step == 12:
                progress.note("step 12: validation loss 2.25")
    steps = [line.split()[0] for line in _printed(console).splitlines()]
    assert steps == ["1/25", "10/25", "step", "20/25", "25/25"]
    assert "\x1b" not in _printed(console)


def test_without_a_terminal_and_a_rhythm_lines_are_seconds_apart() -> None:
    console = _console(terminal=False)
    with StepProgress(40, console=console) as progress:
        for step in range(1, 41):
            progress.show(row_of(step))  # half a second each
    steps = [int(line.split()[0].split("/")[0]) for line in _printed(console).splitlines()]
    assert steps == [1, 11, 21, 31, 40]


def test_on_a_terminal_one_line_is_drawn_over_and_notes_stay_above() -> None:
    console = _console(terminal=True)
    with StepProgress(3, console=console) as progress:
        for step in (1, 2, 3):
            progress.show(row_of(step))
            if step == 2:
                progress.note("saving checkpoint")
    drawn = _printed(console)
    assert "saving checkpoint\n" in drawn and "3/3" in drawn
    assert "\x1b[2K" in drawn  # the line before is wiped


def test_the_other_ranks_are_quiet() -> None:
    for terminal in (False, True):
        console = _console(terminal)
        with StepProgress(1, console=console, quiet=True) as progress:
            progress.show(row_of(1))
            progress.note("unheard")
        assert _printed(console) == ""


def test_the_end_is_foretold_by_recent_steps() -> None:
    console = _console(terminal=False)
    with StepProgress(1000, console=console, every=1) as progress:
        progress.show(replace(row_of(1), seconds=600.0))  # the first compiles
        for step in range(2, 31):
            progress.show(row_of(step))
    assert _printed(console).splitlines()[-1].endswith(f"ETA {duration(970 * 0.5)}")


def test_sizes_are_decimal() -> None:
    found = [size(count) for count in (0, 999, 1000, 999_600, 1.5e12, 4e15)]
    assert found == ["0 B", "999 B", "1 kB", "1 MB", "1.5 TB", "4000 TB"]


def test_durations_are_read_like_a_clock() -> None:
    assert [duration(s) for s in (0.4, 59.6, 61, 3600, 90_061)] == ["0:00", "1:00", "1:01", "1h00", "25h01"]


def _stats(calls: int = 10) -> Stats:
    """Of `calls` steps under zero++."""
    topology = towpath.Topology(2, 2)
    made = towpath.schedule(towpath.strategy("zero++", topology), {"block": 4096, "other": 4096})
    transfers = tuple(
        TransferStats(t, calls, calls * t.intra_bytes, calls * t.inter_bytes, 0.2 * calls, 0.1 * calls)
        for t in made.transfers
    )
    return Stats(transfers, made.transfers, {}, 3, 0.05 * calls)


def test_stats_can_be_taken_of_a_part_of_a_run() -> None:
    part = _stats(10).since(_stats(4))
    assert part.inter_bytes == 6 * _stats(1).inter_bytes
    assert {t.calls for t in part.transfers} == {6}
    assert part.seconds_host == pytest.approx(0.3) and part.buffers_made == 0
    assert _stats(4).since(_stats(4)).transfers == ()


def test_the_times_add_up_to_the_run() -> None:
    done = _stats(10)
    aside = Sums(exposed_seconds={TransferKind.GATHER: 1.5}, host_seconds=0.1)
    found = times(done, StepTimers(passes=15.0, optimizer=1.0, evaluation=3.0), 20.0, aside)
    assert sum(found.values()) == pytest.approx(20.0)
    gathers = sum(t.seconds_exposed for t in done.transfers if t.transfer.kind is TransferKind.GATHER)
    assert found["waiting for gather"] == pytest.approx(gathers - 1.5)
    assert found["the engine's own work"] == pytest.approx(0.4)
    assert found["the rest"] == pytest.approx(1.0)
    assert found["compute"] == pytest.approx(15.0 - done.seconds_exposed + 1.5 - 0.4)


def test_the_summary_reads_well_in_a_file() -> None:
    done = _stats(10)
    text = summary(done, times(done, StepTimers(passes=15.0, optimizer=1.0), 20.0, Sums()), 20.0, 10)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and "\x1b" not in text and "…" not in text
    assert lines[0] == "Where the time went (10 steps, 20.0 s)"
    (gather,) = [line for line in lines if line.startswith("gather")]
    mine = [t for t in done.transfers if t.transfer.kind is TransferKind.GATHER]
    assert "int8:256" in gather and size(sum(t.inter_bytes for t in mine)) in gather
    total = [line for line in lines if line.startswith("all")][-1]
    assert size(done.inter_bytes) in total and f"{done.seconds_exposed:.2f} s" in total
