"""What a signal does to a run: before its steps, between them, and where the main thread is stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from towpath.train import launch
from towpath.train.signals import handle_signals


def test_the_first_signal_asks_and_what_was_there_before_comes_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        with handle_signals() as stop:
            stop.steps_began = True
            assert not stop.signal
            signal.raise_signal(number)
            assert stop.signal
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_before_the_first_step_a_signal_is_what_it_was_before_and_the_process_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
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
    for listening in [thread for thread in threading.enumerate() if thread.name == "towpath signals"]:
        listening.join(30)
        assert not listening.is_alive()
    assert ended == []


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


@pytest.mark.parametrize(
    ("codes", "told", "expected", "ends_the_others"),
    [
        ((143, 143), [15], 143, False),
        ((130, 130), [2], 130, False),
        ((143, 1), [15], 1, True),  # it could not save
        ((1, 143), [15], 1, True),
        ((143, 0), [], 143, True),  # something else ended it
        ((0, 0), [15], 0, False),  # they were at their last step
    ],
)
def test_the_launcher_tells_ranks_that_stopped_as_told_from_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], told: list[int], expected: int, ends_the_others: bool
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(launch, "_send_signal", lambda _, number: signalled.append(number))
    ranks = [(rank, subprocess.Popen(["sh", "-c", f"exit {code}"])) for rank, code in enumerate(codes)]
    assert launch._wait_for_all({process.pid: (rank, process) for rank, process in ranks}, told) == expected
    assert bool(signalled) == ends_the_others


STUCK = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from towpath.train import signals
signals._GRACE_SECONDS = 0.1
with signals.handle_signals() as stop:
    stop.steps_began = True
    print("begun", flush=True)
    sleep = ctypes.CDLL(None).sleep  # in C, as a collective: Python's handlers do not run
    while True:
        left = sleep(60)
        while left:
            left = sleep(left)
"""


def test_a_second_signal_ends_a_process_whose_main_thread_is_stuck() -> None:
    import towpath

    source = str(Path(towpath.__file__).parents[1])
    with subprocess.Popen([sys.executable, "-c", STUCK, source], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()


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
