"""How the processes of an examination find one another, and how the first of them asks the others.

There is no process group. A launcher's processes take the address of its first machine, and machines without a
launcher a list of hosts. The first process leads: the others connect to it, it asks, and they answer. Segments are
short, because a path may lose long ones. A process that does not come in time is left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from towpath.doctor.channels import accepted, connect, listen, state_of
from towpath.doctor.findings import Finding, finding
from towpath.doctor.interfaces import interface_of, interfaces, is_usable, resolved, source_towards
from towpath.errors import ConfigError
from towpath.json_connection import SHORT_BYTES, JsonConnection
from towpath.topology.launcher import local_rank, meeting_point, node_name

PORT = 29511

Perform = Callable[[Any], Any]

_GREET_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
# A leader that ends closes the connection, so this only bounds the wait for one that falls silent. It has to be longer
# than all measurements between machines, during which most ranks are asked nothing.
_SILENT_SECONDS = 300.0


class LeaderLostError(OSError):
    """A connection to the leader that broke, or fell silent, after the leader had welcomed this process."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those that take part.

    Attributes:
        number: Its number. 0 leads.
        world: How many take part.
        leader: The host name or address of the leader.
        port: The port at which the leader listens.
        machine: A name of its machine that is no other machine's.
        key: A text that only processes of this examination have.
        hosts: The addresses of all, if there is no launcher.
        local: Its number on its machine.
    """

    number: int
    world: int
    leader: str
    port: int
    machine: str
    key: str
    hosts: tuple[str, ...] = ()
    local: int = 0

    @staticmethod
    def of_launcher(port: int) -> Place:
        """Return the place that the launcher gave this process in its environment."""
        (leader, store_port), world = meeting_point(), int(os.environ["WORLD_SIZE"])
        return Place(
            number=int(os.environ["RANK"]),
            world=world,
            leader=leader,
            port=port,
            local=local_rank(),
            machine=node_name(),
            key=f"{leader}:{store_port} of {world}",
        )

    @staticmethod
    def of_hosts(hosts: tuple[str, ...], port: int) -> Place:
        """Return the place of this machine in a list of hosts, which is the same on all of them.

        Raises:
            ConfigError: None of them is this machine, or several are. Or this is not the machine's first process.
        """
        if local_rank():
            raise ConfigError(
                "--hosts: one process of each machine takes part, and a launcher has started more (this one has "
                f"LOCAL_RANK={local_rank()}). Start one on each machine, or leave out --hosts: the launcher knows them."
            )
        found, own = {host: resolved(host) for host in hosts}, interfaces()
        here = [host == socket.gethostname() or any(interface_of(a, own) for a in found[host]) for host in hosts]
        if sum(here) != 1 or len(set(hosts)) < len(hosts):
            there = ", ".join(address for each in own for address in each["addresses"])
            told = "; ".join(f"{host} is {', '.join(addresses) or 'unknown'}" for host, addresses in found.items())
            raise ConfigError(
                f"--hosts: expected one address of this machine and one of each other; {sum(here)} are of this "
                f"machine, which has {there}. Here {told}. Give the same addresses on all machines."
            )
        number, key = here.index(True), ",".join(hosts)
        return Place(
            number=number, world=len(hosts), leader=hosts[0], port=port, hosts=hosts, machine=str(number), key=key
        )


def _connected(host: str, port: int) -> JsonConnection:
    """Connect to a host, at all its addresses in turn. Segments are short in both directions."""
    error = OSError(errno.ENETUNREACH, "no address")
    for address in resolved(host):
        try:
            return connect(address, port, SHORT_BYTES)
        except OSError as found:
            error = found
    raise error


class Leader:
    """The first process. It has a connection to each of the others that came."""

    def __init__(self, place: Place, perform: Perform, hello: Any) -> None:
        self.place, self._perform = place, perform
        self.links: dict[int, JsonConnection] = {}
        self.hellos: dict[int, Any] = {0: hello}
        self.states: dict[int, str] = {}  # how an attempt to connect to an absent host ended
        self.lost: dict[int, str] = {}  # the question that a process did not answer
        try:
            self._listener = listen(place.port)
        except OSError as error:
            raise ConfigError(
                f"port {place.port} of this machine cannot be used ({error.strerror}). End the program that listens "
                "there, or pass another --port on all machines."
            ) from None
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SHORT_BYTES)

    def gather(self, seconds: float, say: Callable[[str], object]) -> None:
        """Wait until all have come, or the time is over. Of hosts that have not come, find out how they answer."""
        until = time.monotonic() + seconds
        others = range(1, len(self.place.hosts))
        with ThreadPoolExecutor(max(1, len(others))) as pool, self._listener:
            checks = [pool.submit(self._check_follows, number) for number in others]
            while len(self.links) < self.place.world - 1 and (left := until - time.monotonic()) > 0:
                say(f"waiting for {self.place.world - 1 - len(self.links)} of {self.place.world} processes")
                self._listener.settimeout(min(left, 1.0))
                with contextlib.suppress(OSError):
                    self._greet(accepted(self._listener.accept()[0]))
                for check in checks:
                    if check.done():
                        check.result()
        missing = [number for number in range(1, len(self.place.hosts)) if number not in self.links]
        with ThreadPoolExecutor(max(1, len(missing))) as pool:
            self.states = dict(zip(missing, pool.map(self._state, missing), strict=True))

    def _greet(self, link: JsonConnection) -> None:
        """Welcome the process at the other end, if it belongs here. One that comes again has given up before."""
        with contextlib.suppress(OSError, KeyError):
            hello = link.receive()
            link.send({"key": self.place.key})
            if hello["number"] == 0:
                link.close()
                raise self._another_leader(link.there, hello["key"])
            if hello["key"] == self.place.key:
                self.links[hello["number"]], self.hellos[hello["number"]] = link, hello
                return
        link.close()

    def _check_follows(self, number: int) -> None:
        """Raise ConfigError if a host leads, too. Only leaders listen at the port."""
        host = self.place.hosts[number]
        with contextlib.suppress(OSError, KeyError), _connected(host, self.place.port) as link:
            raise self._another_leader(host, link.ask({"key": self.place.key, "number": 0})["key"])

    def _another_leader(self, host: str, key: str) -> ConfigError:
        return ConfigError(
            f"{host} leads, too: it examines {key}, and this machine {self.place.key}. The first of --hosts leads. "
            "Give the same addresses on all machines, in the same order."
        )

    def _state(self, number: int) -> str:
        try:
            with _connected(self.place.hosts[number], self.place.port):
                return "something else answers"
        except OSError as error:
            return state_of(error) if resolved(self.place.hosts[number]) else "no address"

    def ask(self, questions: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Ask several at the same time, this process too. Return the answers that came in time.

        One that does not answer is lost, and is not asked again. One that fails is lost for this question.
        """

        def answer(number: int) -> Any:
            if number == 0:
                return self._perform(questions[0])
            self.links[number].send(questions[number])
            return self.links[number].receive(seconds)

        answers: dict[int, Any] = {}
        with ThreadPoolExecutor(max(1, len(questions))) as pool:
            asked = {number: pool.submit(answer, number) for number in questions if number in (0, *self.links)}
        for number, told in asked.items():
            try:
                answers[number] = told.result()["answer"]
            except KeyError:
                self.lost[number] = f"{questions[number]['do']}: {told.result()['failed']}"
            except OSError:
                self.lost[number] = questions[number]["do"]
                self.links.pop(number).close()
        return answers

    def dismiss(self, text: str, status: int) -> None:
        """Tell the others how it ended."""
        for link in self.links.values():
            with contextlib.suppress(OSError), link:
                link.send({"do": "end", "text": text, "status": status})


def follow(place: Place, perform: Perform, hello: Any, seconds: float) -> tuple[str, int]:
    """Find the leader, and answer its questions until it dismisses this process.

    Returns:
        The text and the exit code with which the leader ended.

    Raises:
        LeaderLostError: The connection broke while the leader examined. `why_unreachable` says more, too.
        OSError: The leader could not be reached. `why_unreachable` says more.
    """
    with _welcomed(place, {"key": place.key, "number": place.number, **hello}, time.monotonic() + seconds) as link:
        try:
            # The leader may wait as long for others to come before it asks this process anything.
            while (question := link.receive(seconds + _SILENT_SECONDS))["do"] != "end":
                link.send(perform(question), _SILENT_SECONDS)
        except OSError as error:
            raise LeaderLostError(*error.args) from error
    return question["text"], question["status"]


def _welcomed(place: Place, hello: Any, until: float) -> JsonConnection:
    """Return a connection over which the leader has welcomed this process."""
    error: OSError | None = None
    while True:
        try:
            with contextlib.ExitStack() as closing:
                link = closing.enter_context(_connected(place.leader, place.port))
                link.send(hello)
                if (key := link.receive(_GREET_SECONDS)["key"]) != place.key:
                    raise ConfigError(
                        f"the first machine examines {key}, and this one {place.key}. Start the same command on both."
                    )
                closing.pop_all()
                return link
        except OSError as failed:
            if error is None or state_of(failed) != "refused":  # as a leader does that has given up
                error = failed
            if time.monotonic() > until:
                raise error from None
        time.sleep(_PAUSE_SECONDS)


def why_unreachable(place: Place, error: OSError) -> Finding:
    """Return why this process does not reach the leader, or no longer, as far as it can be seen from here alone."""
    addresses, here, state = resolved(place.leader), socket.gethostname(), state_of(error)
    if isinstance(error, LeaderLostError):
        state = "lost"
    elif not addresses:
        state = "no address"
    elif not any(map(is_usable, addresses)) or interface_of(addresses[0], interfaces()):
        state = "it is this machine itself"
    source = source_towards(addresses[0]) if addresses else None
    evidence = [
        f"{place.leader} stands for {', '.join(addresses) or 'no address'} on {here}",
        f"packets to it leave from {source}" if source else "there is no route to it",
    ]
    words = {"leader": place.leader, "port": place.port, "address": (addresses or ["ADDRESS"])[0], "source": source}
    return finding(f"unreachable, {state}", [here, place.leader], f"{here} → {place.leader}", evidence, **words)
