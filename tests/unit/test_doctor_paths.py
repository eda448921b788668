"""What `towpath doctor` does over sockets, on the loopback of this machine: services, paths, and how processes meet."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import each
from towpath.doctor import gathering, paths
from towpath.doctor.gathering import Leader, LeaderLostError, Place, follow, why_unreachable
from towpath.doctor.interfaces import gloo_choice, interfaces, nccl_choice, resolved
from towpath.doctor.paths import Peer, measure, reach
from towpath.doctor.services import Services
from towpath.errors import ConfigError

LOCAL = "127.0.0.1"


def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server((LOCAL, 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_ECHO_SECONDS", 0.02)
    monkeypatch.setattr(paths, "_DATAGRAMS", 400)


def test_a_path_is_measured_in_both_directions() -> None:
    services = Services()
    found = measure(Peer(LOCAL, services.port, services.token), 0.1)
    assert len(found) == 2
    for told in found:
        assert 0 < told["latency"] < 1
        assert told["packet"] == told["mtu"] > 1500 and not told["stalls"]
        assert told["loss"] == 0 and told["datagrams"] >= 400
        assert told["alone"] > 0 and told["together"] > 0


@each(case=[(1500, 1400), (1380, 1280), (1280, 576), (576, None)])
def test_the_largest_packet_that_passes_is_found(case: tuple[int, int | None]) -> None:
    mtu, largest = case

    def rates(peer: Peer, ways: tuple[str, ...], seconds: float, segment: int = 9000) -> dict[str, float]:
        return dict.fromkeys(ways, 1e6 if segment <= (largest or 0) - 40 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "rates", rates)
        patch.setattr(paths, "_latency", lambda peer: (0.001, mtu))
        patch.setattr(paths, "_losses", lambda peer: [{}, {}])
        out, back = measure(Peer(LOCAL, 1, ""), 1.0)
    assert out == back and out["stalls"] and out["packet"] == largest


def test_what_is_no_name_has_no_address() -> None:
    assert resolved("node..1") == resolved("x" * 300) == []


def test_how_a_connection_fails_is_told_apart() -> None:
    services = Services()
    of_another = Peer(LOCAL, services.port, "0" * 16)
    nobody = Peer(LOCAL, closed_port(), services.token)
    states = [found["state"] for found in reach([Peer(LOCAL, services.port, services.token), of_another, nobody], [])]
    assert states == ["open", "something else answers", "refused"]
    own = [{"name": "lo", "addresses": ["127.0.0.1"]}]
    assert reach([Peer(LOCAL, services.port, services.token)], own)[0]["state"] == "own"


def test_the_interfaces_of_this_machine_have_a_loopback() -> None:
    found = {one["name"]: one for one in interfaces()}
    assert "127.0.0.1" in found["lo"]["addresses"]
    assert found["lo"]["mtu"] >= 1500 and found["lo"]["megabits"] is None


FOUND = [
    {"name": name, "addresses": [address]}
    for name, address in (
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "10.0.0.1"),
        ("ib0", "10.1.0.1"),
    )
]


@each(
    case=[
        ("", "ib0"),
        ("eth", "eth0"),
        ("=eth", ""),
        ("=eth0", "eth0"),
        ("^ib,docker,lo", "eth0"),
    ]
)
def test_the_choice_of_nccl_follows_its_rules(case: tuple[str, str]) -> None:
    variable, name = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", variable)
        found = nccl_choice(FOUND)
    assert found["interface"] == (name or variable)
    assert (found["address"] is None) == (not name)


def test_the_choice_of_gloo_is_the_variable_or_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert gloo_choice(FOUND)["address"] == "10.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert gloo_choice(FOUND)["address"] is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    assert gloo_choice(FOUND)["address"] == "127.0.1.1"


# Meeting --------------------------------------------------------------------------------------------------------------


def place(number: int, world: int, port: int, key: str = "key", hosts: tuple[str, ...] = ()) -> Place:
    return Place(number=number, world=world, leader=LOCAL, port=port, key=key, hosts=hosts, machine=str(number))


class _Followers:
    """Processes that follow a leader, as threads."""

    def __init__(self, *places: Place, seconds: float = 10.0) -> None:
        self.ends: list[Any] = []
        self._threads = [threading.Thread(target=self._follow, args=(each, seconds)) for each in places]
        for thread in self._threads:
            thread.start()

    def _follow(self, place: Place, seconds: float) -> None:
        hello = {"machine": place.machine, "local": 0, "host": "host"}
        try:
            self.ends.append(follow(place, lambda question: {"answer": [place.number, question["do"]]}, hello, seconds))
        except Exception as error:
            self.ends.append(error)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join()
        return self.ends


def test_a_leader_asks_those_that_came() -> None:
    port = closed_port()
    leader = Leader(place(0, 3, port), lambda question: {"answer": "mine"}, {})
    followers = _Followers(place(1, 3, port), place(2, 3, port))
    leader.gather(10, lambda text: None)
    questions = {number: {"do": "x" * (3000 * number)} for number in range(3)}  # of several segments
    assert leader.ask(questions, 10) == {0: "mine", 1: [1, "x" * 3000], 2: [2, "x" * 6000]}
    leader.dismiss("the report", 1)
    assert followers.join() == [("the report", 1)] * 2


def test_a_question_that_fails_is_noted() -> None:
    leader = Leader(place(0, 1, closed_port()), lambda question: {"failed": "OSError: no"}, {})
    leader.gather(0, lambda text: None)
    assert leader.ask({0: {"do": "load"}}, 10) == {}
    assert leader.lost == {0: "load: OSError: no"}


def test_a_follower_that_ends_is_lost_and_the_others_answer() -> None:
    port = closed_port()
    leader = Leader(place(0, 3, port), lambda question: {"answer": "mine"}, {})
    followers = _Followers(place(1, 3, port), place(2, 3, port))
    leader.gather(10, lambda text: None)
    leader.links[1].socket.shutdown(socket.SHUT_RDWR)
    assert leader.ask({1: {"do": "facts"}, 2: {"do": "facts"}}, 10) == {2: [2, "facts"]}
    assert leader.lost == {1: "facts"}
    leader.dismiss("", 0)
    (lost,) = (end for end in followers.join() if isinstance(end, OSError))
    elsewhere = replace(place(1, 2, 1), leader="192.0.2.1")
    assert "lost its connection to the first machine" in why_unreachable(elsewhere, lost).summary


def test_strangers_are_not_let_in() -> None:
    port = closed_port()
    leader = Leader(place(0, 2, port), lambda question: None, {})
    gathering = threading.Thread(target=leader.gather, args=(10, lambda text: None))
    gathering.start()
    with socket.create_connection((LOCAL, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    (refused,) = _Followers(place(1, 2, port, key="towpath/doctor/another list")).join()
    assert isinstance(refused, ConfigError) and "another list" in str(refused)
    assert not leader.links
    followers = _Followers(place(1, 2, port))
    gathering.join()
    assert list(leader.links) == [1]
    leader.dismiss("found", 0)
    assert followers.join() == [("found", 0)]


class _Link:
    """A connection to a leader, on a clock of its own: each message comes after some seconds, or an error instead."""

    def __init__(self, *messages: tuple[float, Any]) -> None:
        self._messages = iter(messages)

    def receive(self, seconds: float) -> Any:
        after, message = next(self._messages)
        if after > seconds:
            raise TimeoutError
        if isinstance(message, OSError):
            raise message
        return message

    def send(self, message: Any, seconds: float) -> None: ...

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def follows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Follow a leader that sends these messages, with a limit for the others to come."""

    def follow_link(seconds: float, *messages: tuple[float, Any]) -> Any:
        monkeypatch.setattr(gathering, "_welcomed", lambda *_: _Link(*messages))
        return follow(place(1, 3, 1), lambda question: {"answer": None}, {}, seconds)

    return follow_link


@each(seconds=[30.0, 300.0, 900.0])
def test_a_machine_that_came_first_stays_until_all_have_come(seconds: float, follows: Callable[..., Any]) -> None:
    end = {"do": "end", "text": "found", "status": 1}
    assert follows(seconds, (seconds, {"do": "load"}), (250.0, end)) == ("found", 1)


@each(
    message=[
        (0.0, ConnectionError("its connection has ended")),
        (0.0, ConnectionResetError(errno.ECONNRESET, "reset")),
        (1e9, None),  # it falls silent
    ]
)
def test_a_leader_that_is_lost_is_neither_another_program_nor_a_firewall(
    message: tuple[float, Any], follows: Callable[..., Any]
) -> None:
    with pytest.raises(LeaderLostError) as caught:
        follows(30.0, (0.0, {"do": "load"}), message)
    found = why_unreachable(place(1, 3, 29511), caught.value)
    assert found.cause == "unreachable" and f"lost its connection to the first machine, {LOCAL}" in found.summary
    assert found.remedy[0].startswith(f"See what {LOCAL} printed")


def test_hosts_in_another_order_make_two_leaders_which_both_end() -> None:
    port = closed_port()
    leaders = [Leader(place(0, 2, port, "A,B"), lambda question: None, {})]
    gathering = threading.Thread(target=lambda: ends.append(error_of(leaders[0])))
    ends: list[str] = []
    gathering.start()
    # The other one, whose list names the first one second. It would listen on another machine.
    leaders.append(Leader(place(0, 2, closed_port(), "B,A"), lambda question: None, {}))
    leaders[1].place = replace(leaders[1].place, port=port, hosts=(LOCAL, LOCAL))
    ends.append(error_of(leaders[1]))
    gathering.join()
    assert len(ends) == 2 and all("leads, too" in end and "same order" in end for end in ends)


def error_of(leader: Leader) -> str:
    with pytest.raises(ConfigError) as caught:
        leader.gather(10, lambda text: None)
    return str(caught.value)


def test_a_host_that_does_not_come_is_asked_why() -> None:
    hosts = (LOCAL, LOCAL, "no-such-host.invalid")
    leader = Leader(place(0, 3, closed_port(), hosts=hosts), lambda question: None, {})
    leader.gather(0, lambda text: None)
    assert leader.states == {1: "refused", 2: "no address"}


def test_a_leader_that_is_not_there_is_diagnosed_from_here() -> None:
    (error,) = _Followers(place(1, 2, closed_port()), seconds=0.1).join()
    elsewhere = replace(place(1, 2, 1), leader="192.0.2.1")
    for leader, words in (
        (replace(elsewhere, leader=LOCAL), "itself"),
        (replace(elsewhere, leader="no-such-host.invalid"), "no address"),
        (elsewhere, "refused"),
    ):
        assert words in why_unreachable(leader, error).summary
    assert "firewall" in why_unreachable(elsewhere, TimeoutError()).remedy[0]
