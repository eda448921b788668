"""The lab: what runs on it, what its links carry and how fast, and how it tells of what fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import Lab, Rate, link_counters
from lab.errors import LabError
from tests.lab import functions
from tests.lab.warm import warm_lab
from tests.ranks.strategies import seldom
from towpath.topology.cluster import Topology

Labs = Callable[..., Lab]

HERE = Path(__file__).parent
MEGABYTE = 1_000_000

# Jumbo frames: 66 bytes of headers on 8948 of payload, and acknowledgements of every second segment the other way.
HEADERS = 0.03
# What the larger of the token buckets lets through at once (shaping.py).
BUCKET_BYTES = 128 << 10
# Nothing takes that long, on whatever machine: what does, hangs.
HANGS_SECONDS = 300
# All that functions.py needs. The rest of what a lab loads by itself takes as long again.
OF_MESSAGES = ("torch",)


def test_ranks_know_their_place_and_get_their_arguments(lab: Labs) -> None:
    answers = lab(2, 2).call(functions.where, "a", 1)
    assert answers == [
        (0, 4, [0, 4, 0, 2, 0], "node0", ("a", 1)),
        (1, 4, [1, 4, 1, 2, 0], "node0", ("a", 1)),
        (2, 4, [2, 4, 0, 2, 1], "node1", ("a", 1)),
        (3, 4, [3, 4, 1, 2, 1], "node1", ("a", 1)),
    ]


def test_a_payload_between_nodes_is_counted_once_on_both_cables_and_nowhere_else(lab: Labs) -> None:
    payload = 4 * MEGABYTE
    node0, _, node1, _ = lab(2, 2).call(functions.counted_send, 1, 2, payload)
    for carried in (node0.sent_bytes, node1.received_bytes):
        assert payload <= carried <= payload * (1 + HEADERS)
    for carried in (node0.received_bytes, node1.sent_bytes, node0.loopback_bytes, node1.loopback_bytes):
        assert carried <= payload * HEADERS


def test_a_payload_inside_a_node_is_counted_once_on_its_loopback(lab: Labs) -> None:
    payload = 4 * MEGABYTE
    node0, _, node1, _ = lab(2, 2).call(functions.counted_send, 0, 1, payload)
    assert payload <= node0.loopback_bytes <= payload * (1 + HEADERS)
    for carried in (node0.sent_bytes, node0.received_bytes, node1.loopback_bytes):
        assert carried <= payload * HEADERS


def span_seconds(shaped: Lab, transfer: Callable[..., tuple[float, float]], payload_bytes: int) -> float:
    """From the first rank's begin to the last one's end."""
    times = shaped.call(transfer, payload_bytes)
    return max(ended for _, ended in times) - min(began for began, _ in times)


@pytest.mark.parametrize(
    ("shape", "passes"),
    [((3, 1, "50mbit", None), 1), seldom((1, 2, None, "50mbit"), 2)],  # both directions share a loopback
    ids=["cable", "loopback"],
)
def test_a_link_holds_its_rate_with_both_directions_busy(lab: Labs, shape: tuple[object, ...], passes: int) -> None:
    payload = 2 * MEGABYTE
    ideal_seconds = (passes * payload - BUCKET_BYTES) / Rate.parse("50mbit").bytes_per_second
    seconds = span_seconds(lab(*shape, preload=OF_MESSAGES), functions.timed_exchange, payload)
    # Never faster than the rate, whatever the machine does. How much slower is the machine's matter: 1.03 on a quiet
    # one, what the headers and the last acknowledgement take.
    assert ideal_seconds <= seconds


def test_links_take_another_rate_while_the_lab_stands() -> None:
    payload = MEGABYTE
    with Lab(Topology(2, 1), inter="4gbit", preload=OF_MESSAGES) as shaped:
        [window] = {window.split()[-1] for window in shaped.call(functions.receive_window)}
        assert int(window) == 4_000_000  # 8 ms
        shaped.shape(inter="50mbit")
        [window] = {window.split()[-1] for window in shaped.call(functions.receive_window)}
        assert int(window) == 512 << 10
        assert {cable.up for cable in shaped.wiring.cables} == {Rate.parse("50mbit")}
        seconds = span_seconds(shaped, functions.timed_exchange, payload)
        assert seconds >= (payload - BUCKET_BYTES) / Rate.parse("50mbit").bytes_per_second
        with pytest.raises(LabError, match="not a rate: 'fast'"):
            shaped.shape(inter="fast")


def test_senders_to_one_node_share_the_rate_of_its_cable(lab: Labs) -> None:
    payload = MEGABYTE
    seconds = span_seconds(lab(3, 1, "50mbit", preload=OF_MESSAGES), functions.timed_convergence, payload)
    assert seconds >= (2 * payload - BUCKET_BYTES) / Rate.parse("50mbit").bytes_per_second


def test_two_labs_of_one_shape_live_side_by_side() -> None:
    """Both new: in one that others have used, the last of their packets may still arrive."""
    shape = Topology(2, 2)
    with warm_lab(shape, preload=OF_MESSAGES) as first, warm_lab(shape, preload=OF_MESSAGES) as second:
        before = first.counters()
        second.call(functions.counted_send, 0, 2, MEGABYTE)
        assert second.counters()[0].sent_bytes >= MEGABYTE
        assert first.counters() == before
        first.call(functions.where)


@pytest.mark.parametrize("launcher", ["torchrun", "direct"])
def test_a_script_runs_on_every_rank(lab: Labs, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "place = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'COLOUR')]\n"
        "line = ' '.join([*place, os.uname().nodename, *sys.argv[1:]]) + '\\n'\n"
        "sys.stdout.write(line)"  # at once: four ranks share the pipe
    )
    result = lab(2, 2).run(
        [str(script), "--deep", "3"],
        env={"COLOUR": "red"},
        launcher=launcher,  # pyright: ignore[reportArgumentType]
        capture=True,
        timeout_seconds=60,
    )
    assert result.returncode == 0, result.output
    assert result.output is not None
    # torchrun complains on some nodes when node 0's leaves first.
    assert sorted(line for line in result.output.splitlines() if line.endswith("--deep 3")) == [
        "0 0 0 red node0 --deep 3",
        "1 1 0 red node0 --deep 3",
        "2 0 1 red node1 --deep 3",
        "3 1 1 red node1 --deep 3",
    ]
    assert len(result.links) == 2


def test_if_one_node_fails_the_others_are_ended_and_the_exit_code_tells(lab: Labs, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1': raise SystemExit(7)\nsignal.pause()")
    assert lab(2, 2).run([str(script)], launcher="direct", timeout_seconds=30).returncode == 7


def test_a_run_takes_signals_and_is_ended_by_a_timeout(lab: Labs, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    with lab(1, 1).start([str(script)], launcher="direct", capture=True) as run:
        ready.read_text()
        run.signal(signal.SIGUSR1)
        with pytest.raises(LabError, match=r"(?s)more than 1 s.*heard"):
            run.wait(timeout_seconds=1)
    assert run.wait().returncode == -signal.SIGKILL


def test_a_lab_does_one_thing_at_a_time(lab: Labs) -> None:
    with lab(1, 1).start([str(HERE / "linger.py"), "busy"], launcher="direct", capture=True):
        with pytest.raises(LabError, match="busy"):
            lab(1, 1).call(functions.where)
        with pytest.raises(LabError, match="busy"):
            lab(1, 1).run(["-c", "pass"])
    assert lab(1, 1).run(["-c", "pass"], launcher="direct").returncode == 0


def test_a_cut_cable_carries_nothing_and_a_mended_one_carries_on(lab: Labs, tmp_path: Path) -> None:
    pipes = [tmp_path / "questions", tmp_path / "answers"]
    for pipe in pipes:
        os.mkfifo(pipe)
    shaped = lab(3, 1, "50mbit", preload=OF_MESSAGES)
    with (
        shaped.start([str(HERE / "talk.py"), *map(str, pipes)], launcher="direct"),
        pipes[0].open("w") as questions,
        pipes[1].open() as answers,
    ):

        def passes(within_seconds: float) -> str:
            print(within_seconds, file=questions, flush=True)
            return answers.readline().strip()

        assert passes(20) == "yes"
        shaped.cut(1)
        assert passes(0.3) == "no"
        shaped.mend(1)
        assert passes(20) == "yes"  # TCP sends again what was lost
    # The cable is shaped as before.
    seconds = span_seconds(shaped, functions.timed_exchange, MEGABYTE)
    assert seconds * Rate.parse("50mbit").bytes_per_second >= MEGABYTE - BUCKET_BYTES


def test_an_exception_arrives_with_its_rank_and_traceback_at_once(lab: Labs) -> None:
    began = time.monotonic()
    with pytest.raises(LabError, match=r"(?s)rank 2 \(node 1\) of 4 failed.*in raise_on.*ValueError: a bad day"):
        lab(2, 2).call(functions.raise_on, 2, timeout_seconds=HANGS_SECONDS)
    assert time.monotonic() - began < HANGS_SECONDS  # the others wait for it as long as that, and are not waited for


@pytest.mark.parametrize(
    ("fn", "seconds", "reason"),
    [
        (functions.die_on, HANGS_SECONDS, r"it ended without an answer \(exit code 3\)"),
        (functions.hang_on, 3, "it hung for 3 s:.*in hang_on"),
    ],
    ids=["dies", "hangs"],
)
def test_a_rank_that_dies_or_hangs_is_told_of(lab: Labs, fn: Callable[..., None], seconds: float, reason: str) -> None:
    with pytest.raises(LabError, match=rf"(?s)rank 2 \(node 1\) of 4 failed:\n{reason}"):
        lab(2, 2).call(fn, 2, timeout_seconds=seconds)


def test_what_does_not_pickle_is_refused_with_the_reason(lab: Labs) -> None:
    with pytest.raises(LabError, match="no lambda"):
        lab(1, 1, preload=OF_MESSAGES).call(lambda rank, world: None)
    with pytest.raises(LabError, match="pickle"):
        lab(1, 1, preload=OF_MESSAGES).call(functions.unpicklable)


def test_mistakes_are_named(lab: Labs) -> None:
    with pytest.raises(LabError, match="not a rate: '200 apples'"):
        Lab(Topology(1, 1), inter="200 apples")
    with pytest.raises(LabError, match=r"no script 'missing\.py'"):
        lab(1, 1).run(["missing.py"])
    with pytest.raises(LabError, match="no node 5"):
        lab(1, 1).cut(5)
    with pytest.raises(LabError, match="not on a node of a lab"):
        link_counters()
    with Lab(Topology(1, 1)) as closed:
        pass
    with pytest.raises(LabError, match="closed"):
        closed.counters()


@pytest.mark.parametrize(
    ("text", "bits"), [("200mbit", 200 * 10**6), ("1.5 Gbit", 1_500_000_000), ("2500kbit", 2_500_000)]
)
def test_a_rate_is_a_number_and_a_unit(text: str, bits: int) -> None:
    assert Rate.parse(text) == Rate(bits)
    assert Rate.parse(str(Rate(bits))) == Rate(bits)


@pytest.mark.parametrize("text", ["", "200", "mbit", "200mbps", "-1mbit", "0mbit", "10kbit"])
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="rate"):
        Rate.parse(text)
