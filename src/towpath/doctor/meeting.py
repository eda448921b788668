"""How the processes of an examination find one another, and how the first of them asks the others.

There is no process group. A launcher's processes take the address of its store, and machines without a launcher a list
of hosts. The first process leads: it asks, and the others answer. If one of the two cannot connect to the other, the
other way round is as good, so a firewall on one side does not end the examination. Segments are short, because a path
may lose long ones. Whoever does not come in time is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from towpath.daemons import start_daemon
from towpath.doctor.findings import Finding, Severity
from towpath.doctor.interfaces import family_of, interface_of, interfaces, is_usable, resolved, source_towards
from towpath.doctor.paths import state_of
from towpath.errors import ConfigError

PORT = 29511

Perform = Callable[[Any], Any]
Result = TypeVar("Result")

_LENGTH = struct.Struct("!I")
_SEGMENT_BYTES = 500
_MOST_BYTES = 1 << 26
_CONNECT_SECONDS, _GREET_SECONDS, _PAUSE_SECONDS = 2.0, 5.0, 0.2
_REVERSE_SECONDS = 3.0  # how long the leader waits for the others before it tries to connect to them
_SILENT_SECONDS = 90.0  # no question takes longer


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among those that take part.

    Attributes:
        number: Its number. 0 leads.
        world: How many take part.
        leader: The host name or address of the leader.
        port: The port at which the leader listens. 0: any, which the launcher's store tells the others.
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
    key: str = ""

    @staticmethod
    def of_launcher() -> Place:
        """Return the place that the launcher gave this process in its environment."""
        world, number = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        leader, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
        run = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        return Place(
            number=number,
            world=world,
            leader=leader,
            port=0 if _has_store() else port,
            local=int(os.environ.get("LOCAL_RANK", "0")),
            machine=os.environ.get("GROUP_RANK") or socket.gethostname(),
            key="/".join(["towpath/doctor", leader, str(port), *run]),
        )

    @staticmethod
    def of_hosts(hosts: tuple[str, ...], port: int) -> Place:
        """Return the place of this machine in a list of hosts, which is the same on all of them.

        Raises:
            ConfigError: None of them is this machine, or several are.
        """
        stand_for = {host: resolved(host) for host in hosts}
        own = interfaces()
        mine = [
            number
            for number, host in enumerate(hosts)
            if host == socket.gethostname() or any(interface_of(each, own) is not None for each in stand_for[host])
        ]
        if len(mine) != 1 or len(set(hosts)) < len(hosts):
            there = ", ".join(address for each in own for address in each["addresses"])
            told = "; ".join(f"{host} is {', '.join(found) or 'unknown'}" for host, found in stand_for.items())
            raise ConfigError(
                f"--hosts: expected one address of this machine and one of each other; {len(mine)} are of this "
                f"machine, which has {there}. Here {told}. Give the same addresses on all machines."
            )
        number = mine[0]
        return Place(
            number=number,
            world=len(hosts),
            leader=hosts[0],
            port=port,
            hosts=hosts,
            machine=str(number),
            key="/".join(["towpath/doctor", *hosts]),
        )


def _has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass
class Link:
    """A connection between the leader and another process, for values of JSON."""

    connection: socket.socket
    hello: Any = None
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address = str(self.connection.getpeername()[0]).removeprefix("::ffff:")

    def send(self, value: Any, seconds: float = _GREET_SECONDS) -> None:
        """Send a value, in pieces that are segments of their own."""
        self.connection.settimeout(seconds)
        data = json.dumps(value).encode()
        data = _LENGTH.pack(len(data)) + data
        for at in range(0, len(data), _SEGMENT_BYTES):
            self.connection.sendall(data[at : at + _SEGMENT_BYTES])

    def receive(self, until: float) -> Any:
        """Return the next value, or raise OSError if it does not come in time."""
        count = _LENGTH.unpack(self._exactly(_LENGTH.size, until))[0]
        if count > _MOST_BYTES:
            raise ConnectionError("something else answers")
        try:
            return json.loads(self._exactly(count, until))
        except ValueError:
            raise ConnectionError("something else answers") from None

    def _exactly(self, count: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            if not (new := self.connection.recv(count - len(data))):
                raise ConnectionResetError("the connection has ended")
            data += new
        return bytes(data)


def _connected(host: str, port: int) -> Link:
    """Connect to a host at all its addresses in turn. Segments are short in both directions."""
    error: OSError = ConnectionRefusedError()
    for address in resolved(host):
        connection = socket.socket(family_of(address), socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
            connection.connect((address, port))
            return Link(connection)
        except OSError as found:
            connection.close()
            error = found
    raise error


def _listener(place: Place, port: int) -> socket.socket:
    addresses = resolved(place.leader)
    family = family_of(addresses[0]) if addresses else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, backlog=place.world)
    except OSError as error:
        raise ConfigError(
            f"port {port} of this machine cannot be used ({error.strerror}). Another program listens there: end it, or "
            "pass another port on all machines (--port, or torchrun --master-port)."
        ) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
    return listener


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """Return what a call returns that may block for long. Raise TimeoutError if it takes longer than this."""
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    start_daemon("towpath-doctor-within", run).join(seconds)
    if results:
        return results[0]
    raise TimeoutError(str(errors[0]) if errors else "no answer")


class _Store:
    """The launcher's store, in which processes write where they listen. The values fit into the shortest packet."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: Any = within(_GREET_SECONDS, self._connect)

    def _connect(self) -> Any:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(minutes=5))

    def write(self, address: str, port: int) -> None:
        """Write where this process listens."""
        within(_GREET_SECONDS, lambda: self._store.set(f"{self._place.key}/{self._place.number}", f"{address} {port}"))

    def read(self, number: int, seconds: float) -> tuple[str, int]:
        """Return where another process listens, once it has written that."""
        text: bytes = within(seconds, lambda: self._store.get(f"{self._place.key}/{number}"))
        address, port = text.decode().split()
        return address, int(port)


# The leader -----------------------------------------------------------------------------------------------------------


class Leader:
    """The first process. It has a connection to each of the others that came."""

    def __init__(self, place: Place, perform: Perform, hello: Any) -> None:
        self.place, self._perform = place, perform
        self.links: dict[int, Link] = {}
        self.hellos: dict[int, Any] = {0: hello}
        self.states: dict[int, str] = {}  # of those that did not come: how it ended to connect to them
        self.lost: dict[int, str] = {}  # of those that came, and did not answer: the question
        self._changed = threading.Condition()
        self._store = _Store(place) if place.port == 0 else None
        self._listener = _listener(place, place.port)
        if self._store is not None:
            self._store.write(place.leader, self._listener.getsockname()[1])
        start_daemon("towpath-doctor-meets", self._accept)

    def gather(self, seconds: float, say: Callable[[str], object]) -> None:
        """Wait until all have come, or the time is over."""
        began = time.monotonic()
        dialing: set[int] = set()
        with self._changed:
            while len(self.links) < self.place.world - 1 and (left := began + seconds - time.monotonic()) > 0:
                missing = [n for n in range(1, self.place.world) if n not in self.links]
                say(f"waiting for {len(missing)} of {self.place.world} ({self._name(missing[0])}, …)")
                if time.monotonic() - began > _REVERSE_SECONDS:
                    for number in set(missing) - dialing:
                        start_daemon("towpath-doctor-dials", lambda n=number: self._dial(n, began + seconds))
                        dialing.add(number)
                self._changed.wait(min(left, 1.0))
        self._listener.close()

    def _name(self, number: int) -> str:
        return self.place.hosts[number] if self.place.hosts else f"rank {number}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _dial(self, number: int, until: float) -> None:
        while time.monotonic() < until and number not in self.links:
            try:
                if self.place.hosts:
                    host, port = self.place.hosts[number], self.place.port
                elif self._store is not None:
                    host, port = self._store.read(number, until - time.monotonic())
                else:
                    return
                self._greet(_connected(host, port).connection)
            except OSError as error:
                self.states[number] = state_of(error)
            time.sleep(_PAUSE_SECONDS)

    def _greet(self, connection: socket.socket) -> None:
        """Welcome the process at the other end, if it belongs here and has no connection yet."""
        try:
            link = Link(connection)
            link.hello = hello = link.receive(time.monotonic() + _GREET_SECONDS)
            if not isinstance(hello, dict) or hello.get("key") != self.place.key:
                link.send({"refused": f"the leader examines {self.place.key.removeprefix('towpath/doctor/')}"})
                return
            number = hello["number"]
            with self._changed:
                if number not in self.links:
                    link.send({"welcome": True})
                    self.links[number], self.hellos[number] = link, hello
                    self._changed.notify()
                    return
        except (OSError, KeyError):
            pass
        connection.close()

    def ask(self, questions: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Ask several at the same time, this process too. Return the answers that came in time.

        One that does not answer is lost, and is not asked again.
        """
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(1) as own:
            mine = own.submit(self._perform, questions[0]) if 0 in questions else None
            answers: dict[int, Any] = {}
            asked = [number for number in questions if number in self.links]
            for receives in (False, True):
                for number in [each for each in asked if each in self.links]:
                    try:
                        if receives:
                            answers[number] = self.links[number].receive(until)
                        else:
                            self.links[number].send(questions[number])
                    except OSError:
                        self.lost[number] = questions[number]["do"]
                        self.links.pop(number).connection.close()
            if mine is not None:
                answers[0] = mine.result()
        return answers

    def dismiss(self, text: str, status: int) -> None:
        """Tell the others how it ended."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.send({"do": "end", "text": text, "status": status})


# The others -----------------------------------------------------------------------------------------------------------


def follow(place: Place, perform: Perform, hello: Any, seconds: float) -> tuple[str, int]:
    """Find the leader, and answer its questions until it dismisses this process.

    Returns:
        The text and the exit code with which the leader ended.

    Raises:
        OSError: The leader could not be reached, or the connection broke. `why_unreachable` says more.
    """
    link = _Seeker(place, {"key": place.key, "number": place.number, **hello}).find(time.monotonic() + seconds)
    while True:
        question = link.receive(time.monotonic() + _SILENT_SECONDS)
        if question["do"] == "end":
            return question["text"], question["status"]
        link.send(perform(question), _SILENT_SECONDS)


class _Seeker:
    """Looks for the leader in two ways at once: it connects to it, and lets it connect."""

    def __init__(self, place: Place, hello: Any) -> None:
        self._place, self._hello = place, hello
        self._found: list[Link] = []
        self._refused = ""
        self._lock = threading.Lock()
        self._store = _Store(place) if place.port == 0 else None
        self._listener = _listener(place, place.port if place.hosts else 0)
        start_daemon("towpath-doctor-meets", self._accept)

    def find(self, until: float) -> Link:
        """Return a connection over which the leader has welcomed this process."""
        address = source_towards((resolved(self._place.leader) or ["127.0.0.1"])[0])
        if self._store is not None and address is not None:
            self._store.write(address, self._listener.getsockname()[1])
        error: OSError = TimeoutError()
        host, port = self._place.leader, self._place.port
        try:
            while time.monotonic() < until and not self._found:
                try:
                    if port == 0:
                        assert self._store is not None
                        host, port = self._store.read(0, until - time.monotonic())
                    self._introduce(_connected(host, port).connection)
                except OSError as found:
                    error = found
                if self._refused:
                    raise ConfigError(f"--hosts must be the same everywhere: {self._refused}, and this one {self._place.hosts}.")
                time.sleep(_PAUSE_SECONDS)
        finally:
            self._listener.close()
        if not self._found:
            raise error
        return self._found[0]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._introduce, args=(connection,), daemon=True).start()

    def _introduce(self, connection: socket.socket) -> None:
        try:
            link = Link(connection)
            link.send(self._hello)
            answer = link.receive(time.monotonic() + _GREET_SECONDS)
            with self._lock:
                if answer.get("welcome") and not self._found:
                    self._found.append(link)
                    return
                self._refused = answer.get("refused", "")
        except (OSError, AttributeError):
            pass
        connection.close()


def why_unreachable(place: Place, error: OSError) -> Finding:
    """Return why this process does not reach the leader, as far as it can be seen from here alone."""
    host, port, state = place.leader, place.port, state_of(error)
    addresses, here = resolved(host), socket.gethostname()
    at = f"{host}:{port}" if port else f"{host}, at a port that the system chose"
    own = interfaces()
    source = source_towards(addresses[0]) if addresses else None
    of = interface_of(source, own) if source else None
    by = f"packets to it leave over {of['name']} ({source})" if of else "there is no route to it"
    summary = f"{here} does not reach the first machine, {at}: {state}"
    if not addresses:
        summary = f"{here} finds no address for {host}"
        remedy = f"Give the address of the first machine, or add a line to /etc/hosts: ADDRESS {host}"
    elif not any(map(is_usable, addresses)) or interface_of(addresses[0], own) is not None:
        summary = f"{host} stands for {', '.join(addresses)} on {here}, which is {here} itself"
        remedy = f"Give the address of the first machine, or change the line of {host} in /etc/hosts of {here}"
    elif state == "refused":
        remedy = f"Nothing listens there. Start the same command on {host}, with the same hosts and port"
    elif state == "something else answers":
        remedy = "Another program listens there. Pass another port on all machines (--port)"
    elif of is None or state in ("no route", "forbidden here"):
        remedy = f"See `ip route get {addresses[0]}` on {here}, and connect both machines to one network"
    elif state == "no answer from the host":
        remedy = f"Is {host} on, and its cable plugged in? See `ip neigh show {addresses[0]}` on {here}"
    else:
        remedy = (
            f"A firewall drops packets, or {host} is off. On {host} run `sudo ufw allow from {source}`, or "
            f"`sudo iptables -I INPUT -s {source} -j ACCEPT`; training needs all ports, not only the launcher's"
        )
    return Finding(
        cause="unreachable",
        severity=Severity.BLOCKS,
        machines=(host, here),
        where=f"{here} → {host}",
        summary=summary,
        evidence=(f"{host} is {', '.join(addresses) or 'unknown'} here; {by}",),
        remedy=(remedy,),
    )
