"""How the processes of an examination find one another, and how the first of them asks the others.

There is no process group. A launcher's processes take the address of its first machine, and machines without a
launcher a list of hosts. The first process leads: it asks, and the others answer. With a list, each of the two sides
tries to connect to the other, so a firewall on one side does not end the examination. Segments are short, because a
path may lose long ones. A process that does not come in time is left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from towpath.doctor.channels import SHORT_BYTES, Channel, listen, state_of
from towpath.doctor.findings import Finding, finding
from towpath.doctor.interfaces import interface_of, interfaces, is_usable, resolved, source_towards
from towpath.errors import ConfigError

PORT = 29511

Perform = Callable[[Any], Any]

_GREET_SECONDS, _PAUSE_SECONDS = 5.0, 0.2
_SILENT_SECONDS = 90.0  # no question takes longer
_KEY = "towpath/doctor/"


def is_launched() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those that take part.

    Attributes:
        number: Its number. 0 leads.
        world: How many take part.
        leader: The host name or address of the leader.
        port: The port at which the leader listens, and with `hosts` all others, too.
        hosts: The addresses of all, if there is no launcher.
        local: Its number on its machine.
        machine: A name of its machine that is no other machine's.
        key: A text that only processes of this examination have.
    """

    number: int
    world: int
    leader: str
    port: int
    hosts: tuple[str, ...] = ()
    local: int = 0
    machine: str = ""
    key: str = _KEY

    @staticmethod
    def of_launcher(port: int) -> Place:
        """Return the place that the launcher gave this process in its environment."""
        leader, rank = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["RANK"])
        return Place(
            number=rank,
            world=int(os.environ["WORLD_SIZE"]),
            leader=leader,
            port=port,
            local=int(os.environ.get("LOCAL_RANK", "0")),
            machine=os.environ.get("GROUP_RANK") or socket.gethostname(),
            key=f"{_KEY}{leader}:{os.environ.get('MASTER_PORT')} of {os.environ['WORLD_SIZE']}",
        )

    @staticmethod
    def of_hosts(hosts: tuple[str, ...], port: int) -> Place:
        """Return the place of this machine in a list of hosts, which is the same on all of them.

        Raises:
            ConfigError: None of them is this machine, or several are.
        """
        found, own = {host: resolved(host) for host in hosts}, interfaces()
        here = [host == socket.gethostname() or any(interface_of(a, own) for a in found[host]) for host in hosts]
        if sum(here) != 1 or len(set(hosts)) < len(hosts):
            there = ", ".join(address for each in own for address in each["addresses"])
            told = "; ".join(f"{host} is {', '.join(addresses) or 'unknown'}" for host, addresses in found.items())
            raise ConfigError(
                f"--hosts: expected one address of this machine and one of each other; {sum(here)} are of this "
                f"machine, which has {there}. Here {told}. Give the same addresses on all machines."
            )
        number, key = here.index(True), _KEY + ",".join(hosts)
        return Place(
            number=number, world=len(hosts), leader=hosts[0], port=port, hosts=hosts, machine=str(number), key=key
        )


def _connected(host: str, port: int) -> Channel:
    """Connect to a host, at all its addresses in turn. Segments are short in both directions."""
    error = OSError(errno.ENETUNREACH, "no address")
    for address in resolved(host):
        try:
            return Channel.to(address, port, SHORT_BYTES)
        except OSError as found:
            error = found
    raise error


class _ChannelListener:
    """Calls a function with each connection that comes, in a thread of its own, until it is closed."""

    def __init__(self, place: Place, greet: Callable[[Channel], None]) -> None:
        self._greet = greet
        try:
            self._socket = listen(place.port)
        except OSError as error:
            raise ConfigError(
                f"port {place.port} of this machine cannot be used ({error.strerror}). End the program that listens "
                "there, or pass another --port on all machines."
            ) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SHORT_BYTES)
        _in_background(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                _in_background(self._greet, Channel(self._socket.accept()[0]))

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        self._socket.close()


def _in_background(work: Callable[..., object], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name="towpath-doctor-meets", daemon=True).start()


class Leader:
    """The first process. It has a connection to each of the others that came."""

    def __init__(self, place: Place, perform: Perform, hello: Any) -> None:
        self.place, self._perform = place, perform
        self.links: dict[int, Channel] = {}
        self.hellos: dict[int, Any] = {0: hello}
        # Of those that did not come, how it ended to connect to them; and of those that do not answer, the question.
        self.states: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self._changed = threading.Condition()
        self._listener = _ChannelListener(place, self._greet)

    def gather(self, seconds: float, say: Callable[[str], object]) -> None:
        """Wait until all have come, or the time is over."""
        until = time.monotonic() + seconds
        for number in range(1, len(self.place.hosts)):
            _in_background(self._dial, number, until)
        with self._changed:
            while len(self.links) < self.place.world - 1 and (left := until - time.monotonic()) > 0:
                say(f"waiting for {self.place.world - 1 - len(self.links)} of {self.place.world} processes")
                self._changed.wait(min(left, 1.0))
        self._listener.close()

    def _dial(self, number: int, until: float) -> None:
        while time.monotonic() < until and number not in self.links:
            try:
                self._greet(_connected(self.place.hosts[number], self.place.port))
            except OSError as error:
                self.states[number] = state_of(error)
            time.sleep(_PAUSE_SECONDS)

    def _greet(self, link: Channel) -> None:
        """Welcome the process at the other end, if it belongs here and has no connection yet."""
        try:
            hello = link.receive(_GREET_SECONDS)
            if hello["key"] != self.place.key:
                link.send({"refused": self.place.key.removeprefix(_KEY)})
            with self._changed:
                if hello["key"] == self.place.key and hello["number"] not in self.links:
                    link.send({"welcome": True})
                    self.links[hello["number"]], self.hellos[hello["number"]] = link, hello
                    self._changed.notify()
                    return
        except (OSError, KeyError, TypeError):
            pass
        link.close()

    def ask(self, questions: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Ask several at the same time, this process too. Return the answers that came in time.

        One that does not answer is lost, and is not asked again. One that fails is lost for this question.
        """
        until, answers = time.monotonic() + seconds, dict[int, Any]()
        with ThreadPoolExecutor(1) as own:
            mine = own.submit(self._perform, questions[0]) if 0 in questions else None
            for receives in (False, True):
                for number in [each for each in questions if each in self.links]:
                    try:
                        if receives:
                            answers[number] = self.links[number].receive(until - time.monotonic())
                        else:
                            self.links[number].send(questions[number])
                    except OSError:
                        self.lost[number] = questions[number]["do"]
                        self.links.pop(number).close()
            if mine is not None:
                answers[0] = mine.result()
        self.lost |= {
            at: f"{questions[at]['do']}: {told['failed']}" for at, told in answers.items() if "failed" in told
        }
        return {number: told["answer"] for number, told in answers.items() if "answer" in told}

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
        OSError: The leader could not be reached, or the connection broke. `why_unreachable` says more.
    """
    link = _find(place, {"key": place.key, "number": place.number, **hello}, time.monotonic() + seconds)
    with link:
        while (question := link.receive(_SILENT_SECONDS))["do"] != "end":
            link.send(perform(question), _SILENT_SECONDS)
    return question["text"], question["status"]


def _find(place: Place, hello: Any, until: float) -> Channel:
    """Return a connection over which the leader has welcomed this process, whichever of the two made it."""
    found: list[Channel] = []
    refused: list[str] = []
    lock = threading.Lock()

    def introduce(link: Channel) -> None:
        with contextlib.suppress(OSError, AttributeError):
            link.send(hello)
            answer = link.receive(_GREET_SECONDS)
            refused.extend(answer[key] for key in ("refused",) if key in answer)
            with lock:
                if answer.get("welcome") and not found:
                    found.append(link)
                    return
        link.close()

    listener = _ChannelListener(place, introduce) if place.hosts else None
    error: OSError | None = None
    while time.monotonic() < until and not found and not refused:
        try:
            introduce(_connected(place.leader, place.port))
        except OSError as failed:  # a leader that has given up refuses, which is not the reason
            error = failed if error is None or state_of(failed) != "refused" else error
        if not found:
            time.sleep(_PAUSE_SECONDS)
    if listener is not None:
        listener.close()
    if found:
        return found[0]
    if refused:
        mine = place.key.removeprefix(_KEY)
        raise ConfigError(
            f"the first machine examines {refused[0]}, and this one {mine}. Start the same command on both."
        )
    raise error or TimeoutError()


def why_unreachable(place: Place, error: OSError) -> Finding:
    """Return why this process does not reach the leader, as far as it can be seen from here alone."""
    addresses, here, own, state = resolved(place.leader), socket.gethostname(), interfaces(), state_of(error)
    if not addresses:
        state = "no address"
    elif not any(map(is_usable, addresses)) or interface_of(addresses[0], own) is not None:
        state = "it is this machine itself"
    source = source_towards(addresses[0]) if addresses else None
    of = interface_of(source, own) if source else None
    evidence = [
        f"{place.leader} stands for {', '.join(addresses) or 'no address'} on {here}",
        f"packets to it leave over {of['name']} ({source})" if of else "there is no route to it",
    ]
    words = {"leader": place.leader, "port": place.port, "address": (addresses or ["ADDRESS"])[0], "source": source}
    return finding(f"unreachable, {state}", [here, place.leader], f"{here} → {place.leader}", evidence, **words)
