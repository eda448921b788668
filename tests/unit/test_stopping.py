"""What a signal does to a run: before its steps, and between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from towpath.train.job import StopRequest, _end_start, handle_signals


def test_the_first_signal_asks_and_what_was_there_before_comes_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        with handle_signals() as stop:
            stop.steps_began = True
            assert not stop.signal
            signal.raise_signal(number)
            assert stop.signal
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_before_the_first_step_a_signal_is_what_it_was_before_and_the_process_lives_on() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), handle_signals() as stop:
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a job that a shell started in the background
        with handle_signals():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not stop.signal


def test_a_second_signal_does_what_it_did_before() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), handle_signals() as stop:
            stop.steps_began = True
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.signal == signal.SIGTERM


def test_in_another_thread_nothing_is_handled() -> None:
    seen: list[bool] = []

    def work() -> None:
        with handle_signals() as stop:
            seen.append(stop.signal)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False] and signal.getsignal(signal.SIGTERM) == before


AT_THE_END = """
import atexit, gc, sys
from towpath.cli import main
atexit.register(lambda: print(len(gc.get_objects())))
sys.argv = ["towpath", "--version"]
main.main()
"""


def test_the_command_s_end_does_not_wait_for_a_collection_of_all_that_was_imported() -> None:
    """With torch that is a second of computing, of each rank: half a minute for Ctrl-C on a machine under load."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    version, left = done.stdout.splitlines()
    assert version.startswith("towpath ")
    # What the end itself makes; what was imported are 100,000 and more.
    assert int(left) < 1000


@pytest.mark.parametrize("handled", [False, True])
def test_a_rank_that_cannot_handle_a_signal_ends_if_it_has_nothing_to_save(
    monkeypatch: pytest.MonkeyPatch, handled: bool
) -> None:
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("towpath.train.job._HANDLED_SECONDS", 0)
    monkeypatch.setattr(os, "_exit", leave)
    reader, writer = os.pipe()
    os.write(writer, bytes([signal.SIGTERM]))
    if handled:
        os.close(writer)  # the rank leaves `handle_signals`
        _end_start(reader, StopRequest())
        return
    with pytest.raises(SystemExit, match="143"):
        _end_start(reader, StopRequest())
    os.close(writer)
