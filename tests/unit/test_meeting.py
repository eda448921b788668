"""The register of islands: whatever ends when, all that are left apply the same results."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from towpath import json_connection
from towpath.errors import ConfigError, StepError
from towpath.json_connection import JsonConnection, Message
from towpath.outer import meeting
from towpath.outer.islands import Island
from towpath.outer.meeting import Listener, Seat, Wire
from towpath.outer.register import Key, Register

SILENCE, LATE = 30.0, 60.0
EXCHANGES = 6


def register(number: int = 0, **state: Any) -> Register:
    return Register(number, {"next_number": 1, "next_block": 3} | state, {}, SILENCE, LATE, 0.0)


def come(found: Register, number: int | None, now: float = 0.0, last: Any = None) -> int:
    return found.arrive({"number": number, "store": 1, "last": last}, f"host:{number}", now)


def ready(key: Key | None, weight: int = 1, digest: int | None = 7) -> dict[str, Any]:
    return {"ready": True, "key": key, "weight": weight, "digest": digest}


def watches(arrived: bool) -> dict[str, Any]:
    """A newcomer is ready for any exchange."""
    return ready(None, 0, None) | {"donor": 0, "arrived": arrived}


def vote(key: Key, ok: bool = True, digest: int = 1, blocks: int = 0) -> dict[str, Any]:
    return {"vote": True, "key": key, "ok": ok, "digest": digest, "why": "" if ok else "lost", "blocks": blocks}


def answers(found: Register) -> dict[int, Any]:
    taken, found.answers = dict(found.answers), []
    return taken


def three_that_train() -> Register:
    found = register()
    come(found, 0)
    for number in (1, 2):
        come(found, number)
    return found


# --- one exchange after the other -------------------------------------------------------------------------------------


def test_an_exchange_begins_when_all_are_there_and_counts_when_all_have_the_same_sum() -> None:
    found, key = three_that_train(), (4, 0, 0)
    for number in (2, 0):
        found.hear(number, ready(key), 1.0)
    assert answers(found) == {}
    found.hear(1, ready(key, weight=2), 1.0)
    go = answers(found)
    assert [go[n]["members"] for n in range(3)] == [(0, 1, 2)] * 3
    assert go[0]["weights"] == [1, 2, 1]
    for number in range(3):
        found.hear(number, vote(key), 2.0)
    assert {n: each["applied"] for n, each in answers(found).items()} == {0: True, 1: True, 2: True}


@pytest.mark.parametrize("other", [vote((4, 0, 0), ok=False), vote((4, 0, 0), digest=2)], ids=["no sum", "another sum"])
def test_without_the_same_sum_on_all_islands_nobody_applies_it(other: dict[str, Any]) -> None:
    found, key = three_that_train(), (4, 0, 0)
    for number in range(3):
        found.hear(number, ready(key), 1.0)
    view = answers(found)[0]["view"]
    for number, each in enumerate((vote(key), other, vote(key))):
        found.hear(number, each, 2.0)
    assert {n: each["applied"] for n, each in answers(found).items()} == {0: False, 1: False, 2: False}
    for number in range(3):
        found.hear(number, ready((8, 0, 0)), 3.0)
    assert answers(found)[0]["view"] != view, "groups are formed anew after a failure"


def test_those_that_are_left_decide_without_the_one_that_ended() -> None:
    found, key = three_that_train(), (4, 0, 0)
    for number in range(3):
        found.hear(number, ready(key), 1.0)
    answers(found)
    for number in (0, 2):
        found.hear(number, vote(key, ok=False), 2.0)
    assert answers(found) == {}
    found.leave(1, "its connection has ended", 2.0)
    told = answers(found)
    assert {n: each["applied"] for n, each in told.items()} == {0: False, 2: False}
    assert told[2]["said"] == ["island 1 of 3 left after step 4: its connection has ended; 2 go on"]
    for number in (0, 2):
        found.hear(number, ready((8, 0, 0), weight=2), 3.0)
    go = answers(found)
    assert go[0]["members"] == (0, 2) and go[0]["weights"] == [2, 2]


def test_an_island_that_leaves_while_the_others_wait_holds_no_register_any_more() -> None:
    for leaves in (True, False):
        found = three_that_train()
        for number in (1, 2):
            found.hear(number, ready((4, 0, 0)), 1.0)
            found.hear(number, {"ping": True}, LATE)
        found.hear(0, {"ping": True}, LATE)
        found.answers = []
        if leaves:
            found.leave(0, "it has ended", 1.0)
        else:  # the others waited for it
            found.tick(LATE + 2)
        assert found.members.keys() == {1, 2} and not any("go" in each for each in answers(found).values())


def test_a_silent_island_and_a_late_one_are_told_that_the_others_go_on() -> None:
    found, key = three_that_train(), (4, 0, 0)
    for now in (10.0, 40.0, 60.0, 80.0):
        for number in (0, 1):
            found.hear(number, {"ping": True}, now)
        found.tick(now)
    assert list(answers(found)) == [2], "nothing was heard of it for 30 s"
    found.hear(0, ready(key), 80.0)
    for now in (100.0, 120.0, 139.0):
        for number in (0, 1):
            found.hear(number, {"ping": True}, now)
        found.tick(now)
        assert set(answers(found)) <= {0}
    found.tick(141.0)
    told = answers(found)
    assert "waited 60 s" in told[1]["end"] and "shares=" in told[1]["end"] and told[0]["members"] == (0,)


def test_islands_with_other_slow_weights_than_most_end() -> None:
    found, key = three_that_train(), (4, 0, 0)
    for number, digest in enumerate((7, 8, 7)):
        found.hear(number, ready(key, digest=digest), 1.0)
    told = answers(found)
    assert "differ" in told[1]["end"] and told[0]["members"] == (0, 2)
    for number, digest in ((0, 7), (2, 9)):
        found.hear(number, ready((8, 0, 0), digest=digest), 1.0)
    assert all("differ" in each["end"] for each in answers(found).values()), "two cannot tell which of them is right"


def test_a_newcomer_watches_until_it_has_the_slow_weights_and_then_gets_data_of_its_own() -> None:
    found = register()
    come(found, 0)
    new = come(found, None)
    found.hear(0, ready((4, 0, 0)), 1.0)
    told = answers(found)
    assert told[0]["members"] == (0,) and told[0]["donors"] == [[0, 1]] and told[new]["donation"] == 0
    found.hear(new, watches(arrived=False), 1.0)  # the next exchange
    found.hear(0, vote((4, 0, 0), blocks=1), 1.0)
    told = answers(found)
    assert told[0]["applied"] and told[0]["blocks"] == [3]
    for step, wanted, got in ((8, 0, []), (12, 3, [6, 7, 8])):
        found.hear(new, watches(arrived=False), 1.0)
        found.hear(0, ready((step, 0, 0)), 1.0)
        told = answers(found)
        assert told[0]["members"] == (0, 1) and told[0]["weights"] == [1, 0]
        found.hear(0, vote((step, 0, 0), blocks=1), 1.0)
        found.hear(1, vote((step, 0, 0), blocks=wanted), 1.0)
        told = answers(found)
        assert told[1]["blocks"] == got and told[0]["blocks"] not in ([], got)
        assert told[0]["said"] == (["island 1 joined at step 12 with the slow weights of island 0"] if got else [])


def test_a_block_that_a_holder_gave_before_it_ended_is_given_to_no_other_island() -> None:
    """The next holder did not hear of it. The island that has it says so when it comes."""
    found = register(1, next_block=3)
    come(found, 1)
    found.arrive({"number": 2, "store": 1, "last": None, "next_block": 5}, "host:2", 0.0)
    for number in (1, 2):
        found.hear(number, ready((4, 0, 0)), 1.0)
    for number in (1, 2):
        found.hear(number, vote((4, 0, 0), blocks=1), 1.0)
    told = answers(found)
    assert (told[1]["blocks"], told[2]["blocks"]) == ([5], [6])
    assert told[1]["state"]["next_block"] == 7


def newcomer_that_waits() -> Register:
    """Island 0 trains, after an exchange that took 1,000 s. Island 1 waits for the next one, to watch it."""
    found = register()
    come(found, 0)
    for now in (0.0, 1000.0):
        if now:
            come(found, None, now)
        found.hear(0, ready((int(now), 0, 0)), now)
        found.hear(0, vote((int(now), 0, 0)), now)
    found.hear(1, watches(arrived=False), 1000.0)
    answers(found)
    return found


def test_nobody_is_late_for_a_newcomer() -> None:
    found = newcomer_that_waits()
    for now in range(1000, 4000, 20):
        for number in (0, 1):
            found.hear(number, {"ping": True}, now)
        found.tick(now)
    assert found.members.keys() == {0, 1} and set(answers(found)) == {1}


def test_a_new_holder_waits_as_long_for_late_islands_as_the_one_before() -> None:
    found = newcomer_that_waits()
    found.hear(0, ready((2000, 0, 0)), 2000.0)
    found = register(1, **answers(found)[1]["state"])
    for number in (1, 2):
        come(found, number, 2000.0)
    found.hear(1, ready((3000, 0, 0)), 3000.0)
    for now, there in ((4999.0, {1, 2}), (5001.0, {1})):
        for number in (1, 2):
            found.hear(number, {"ping": True}, now)
        found.tick(now)
        assert found.members.keys() == there


def test_a_newcomer_whose_sender_ended_with_the_holder_is_told_so() -> None:
    """The new holder does not know who sends. The newcomer does."""
    found = register(2, last=((4, 0, 0), True))
    for number in (2, 3):
        come(found, number)
    found.hear(3, watches(arrived=False), 1.0)
    assert "island 0 ended while it sent its weights" in answers(found)[3]["end"]
    assert found.members.keys() == {2}


@pytest.mark.parametrize("step", [7, 16])
def test_a_step_without_data_is_named_with_those_that_have_some(step: int) -> None:
    island = Island(2, 8, False, 4, {8: 5, 12: 9})
    assert [island.position(each) for each in (8, 15)] == [20, 39]
    with pytest.raises(StepError, match=rf"island 2: position\({step}\): expected a step from 8 to 15.*Ask for steps"):
        island.position(step)


# --- connections ------------------------------------------------------------------------------------------------------


@pytest.fixture
def seat() -> Generator[Seat]:
    """The seat of an island that has begun a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_ALONE_SECONDS", 0.0)
        patch.setattr(meeting, "_PING_SECONDS", 0.01)
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))  # bound, and not listening: the seat listens there
            made = Seat(f"127.0.0.1:{held.getsockname()[1]}", {"every": "4"}, 1, 3600.0, 3600.0, 60.0)
            with contextlib.closing(made):
                assert made.join(3, print) == (0, True)
                yield made


def listener_of(seat: Seat) -> Listener:
    return seat._listener  # pyright: ignore[reportPrivateUsage]


def test_an_island_says_that_it_is_there_while_it_trains(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than its holder and it would be silent. Nobody asks, and nothing arrives meanwhile."""
    found = listener_of(seat).register
    assert found is not None
    pings = threading.Semaphore(0)

    def hear(number: int, message: Any, now: float) -> None:
        pings.release()

    monkeypatch.setattr(found, "hear", hear)
    assert all(pings.acquire(timeout=30.0) for _ in range(3))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b'{"hello": true}\n',
        b'{"look": 1}\n',
        b"\xff" * (1 << 23),  # no line
    ],
    ids=["http", "list", "nested", "no facts", "no run", "endless"],
)
def test_another_program_that_connects_is_sent_away(seat: Seat, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 3600.0)  # at once, and not because it says nothing
    port = listener_of(seat).port
    with socket.create_connection(("127.0.0.1", port), 30.0) as stranger:
        try:
            stranger.sendall(sent)
            assert stranger.recv(1) == b""
        except ConnectionError:
            pass
    with contextlib.closing(Wire.to(f"127.0.0.1:{port}")) as wire:  # the run goes on
        assert wire.ask({"hello": True, "facts": {"every": "8"}}) == {
            "refused": "every is 8 here, and 4 on the islands of the run."
        }


def test_another_program_that_says_nothing_is_sent_away(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.01)
    with socket.create_connection(("127.0.0.1", listener_of(seat).port), 30.0) as stranger:
        assert stranger.recv(1) == b""


def test_an_address_whose_port_another_program_has_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as other:
        made = Seat(f"127.0.0.1:{other.getsockname()[1]}", {}, 1, 3600.0, 3600.0, 0.0)
        with contextlib.closing(made), pytest.raises(ConfigError, match="another program has the port"):
            made.join(0, print)


NOWHERE = [{"at": "nowhere"}, {"at": "a..b:1"}, {"at": "127.0.0.1:99999"}, {"at": 5}]


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(json.dumps(each).encode(), each) for each in NOWHERE]
    + [(b"HTTP/1.1 400 Bad Request", {}), (b"[1]", {}), (b"[" * 100_000, {}), (b"\xff" * (1 << 23), {})],
    ids=["no port", "no host", "no such port", "no text", "http", "list", "nested", "endless"],
)
def test_another_program_at_an_address_is_not_followed(seat: Seat, sent: bytes, answer: Any) -> None:
    def serve() -> None:
        with contextlib.suppress(ConnectionError), server.accept()[0] as accepted:
            accepted.recv(1 << 16)
            accepted.sendall(sent + b"\n")
            accepted.recv(1)

    seat.leave()
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = threading.Thread(target=serve)
        other.start()
        come_to = seat._come_to  # pyright: ignore[reportPrivateUsage]
        assert come_to(f"127.0.0.1:{server.getsockname()[1]}") == answer
        other.join()


def test_a_newcomer_holds_the_register_if_the_holder_ends_before_their_next_exchange(seat: Seat) -> None:
    port = listener_of(seat).port
    with contextlib.closing(Seat(f"127.0.0.1:{port}", {"every": "4"}, 1, 3600.0, 3600.0, 60.0)) as newcomer:
        assert newcomer.join(0, print) == (1, False)
        for message in (ready((4, 0, 0)), vote((4, 0, 0))):
            seat.ask(message)
        assert newcomer.ask({})["donation"] == 0
        told = threading.Thread(target=lambda: [newcomer.ask(m) for m in (watches(True), vote((8, 0, 0), blocks=3))])
        told.start()
        for message in (ready((8, 0, 0)), vote((8, 0, 0))):
            seat.ask(message)
        told.join()
        seat.close()
        assert newcomer.ask(ready((12, 0, 0)))["trained"] == [1]


def test_a_message_that_arrives_in_pieces_must_be_whole_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits, pieces = iter([10.0, 10.0, 14.0]), list[float](), iter([[], [{"look": {}}]])

    class Pieces(JsonConnection):
        def __init__(self) -> None:
            self.seconds, self._messages = 5.0, []

        def read(self, seconds: float | None = None) -> list[Message]:
            assert seconds is not None
            limits.append(seconds)
            return next(pieces)

    monkeypatch.setattr(json_connection, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert Pieces().receive() == {"look": {}} and limits == [5.0, 1.0]


# --- holders that end at any moment -----------------------------------------------------------------------------------


@dataclass
class Node:
    """An island as the register sees it: what it waits for, what it knows, and what it applied."""

    number: int
    step: int = 1
    told: dict[str, Any] = field(default_factory=dict)  # what it waits for an answer to
    unsent: list[dict[str, Any]] = field(default_factory=list)
    members: tuple[int, ...] = ()
    last: Any = None
    outcomes: dict[Key, bool] = field(default_factory=dict)
    view: str = ""
    sits: bool = True  # whether it has come to the holder

    def tell(self, message: dict[str, Any]) -> None:
        self.told = message
        self.unsent.append(message)


class Net:
    """Islands that exchange, lose each other, and change the holder, in a random order."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.nodes = {n: Node(n, members=tuple(range(count))) for n in range(count)}
        self.holder, self.register = 0, register()
        self.answers: list[tuple[int, Any]] = []
        for n in self.nodes:
            come(self.register, n)
        for node in self.nodes.values():
            node.tell(ready((1, 0, 0)))

    def run(self) -> None:
        kills = len(self.nodes) - 1
        while any(len(node.outcomes) < EXCHANGES for node in self.nodes.values()):
            if kills and self.random.random() < 0.03:
                kills -= 1
                self.kill(self.random.choice(list(self.nodes)))
            self.advance(self.random.choice(list(self.nodes.values())))

    def kill(self, number: int) -> None:
        del self.nodes[number]
        if number != self.holder:
            self.register.leave(number, "ended", 0.0)
            self.collect()
            return
        # What the holder has not sent is lost. The island with the lowest number holds the register next.
        self.answers.clear()
        self.holder = min(self.nodes)
        mine = self.nodes[self.holder]
        state = {"next_number": 9, "next_block": 9, "last": mine.last}
        expected = dict.fromkeys(mine.members, "")
        self.register = Register(self.holder, state, expected, SILENCE, LATE, 0.0)
        for n in set(expected) - set(self.nodes):
            self.register.leave(n, "ended", 0.0)
        for node in self.nodes.values():
            node.sits, node.unsent = False, []

    def advance(self, node: Node) -> None:
        if not node.sits:
            come(self.register, node.number, last=node.last)
            node.sits = True
            node.unsent = [node.told] if node.told else []
        elif node.unsent:
            self.register.hear(node.number, node.unsent.pop(0), 0.0)
        elif mine := [each for each in self.answers if each[0] == node.number]:
            self.answers.remove(mine[0])
            self.take(node, mine[0][1])
        self.collect()

    def collect(self) -> None:
        self.answers += self.register.answers
        self.register.answers = []

    def take(self, node: Node, answer: Any) -> None:
        if "go" in answer:
            key = answer["go"]
            node.members, node.view = answer["members"], answer["view"]
            # A sum needs all members, and may fail on some of them only.
            ok = set(answer["members"]) <= set(self.nodes) and self.random.random() < 0.9
            node.tell(vote(key, ok))
        else:
            key = answer["outcome"]
            node.outcomes[key], node.last = answer["applied"], (key, answer["applied"])
            node.step += 1
            node.tell(ready((node.step, 0, 0)))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_that_are_left_apply_the_same_results_whoever_ends_when(count: int) -> None:
    applied = dropped = 0
    for seed in range(300):
        net = Net(seed, count)
        net.run()
        first, *others = net.nodes.values()
        for other in others:
            for key in first.outcomes.keys() & other.outcomes.keys():
                assert first.outcomes[key] == other.outcomes[key], (seed, key)
        applied += sum(first.outcomes.values())
        dropped += sum(not each for each in first.outcomes.values())
    assert applied > 100 and dropped > 100
