"""The meeting point of islands that come and go: how they find each other, and who holds their register.

Each island listens, and one of them holds the register (`register.py`). The others have a connection to it, through
which rank 0 of an island asks for each exchange. Messages are lines of JSON.

    at the start      An island tries the addresses of `meet`. If an island answers, it joins. If none does, and one of
                      the addresses is of this machine, it begins a run after a moment. Else it tries on.
    the holder ends   The connection ends, or is silent. The island with the lowest number holds the register next. It
                      waits for those that it knows of.
    nobody is known   The holder looks at the addresses of `meet` now and then. An island that has begun nothing is told
                      where the run is. Two halves of a run, between which the network was cut, go on apart. When they
                      can reach each other again, the islands of the smaller one end.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import final

from towpath.daemons import start_daemon
from towpath.errors import ConfigError, StepError
from towpath.json_connection import JsonConnection, Message
from towpath.outer.register import Register

_CONNECT_SECONDS = 3.0
_ANSWER_SECONDS = 10.0  # what listens is a thread, and a machine may be busy
_PING_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
# How long an island that begins a run looks for one that is there. It is longer than the pauses between two looks.
_ALONE_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_LOCAL = "127."


def parsed(address: str) -> tuple[str, int]:
    """Return the host and the port of an address."""
    host, _, port = address.rpartition(":")
    return host, int(port)


@final
class Wire(JsonConnection):
    """A connection between two islands."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, _ANSWER_SECONDS)
        self.number = -1  # of the island at the other end, once it has one
        self.began = time.monotonic()

    @staticmethod
    def to(address: str) -> Wire:
        try:
            return Wire(socket.create_connection(parsed(str(address)), _CONNECT_SECONDS))
        except (ValueError, OverflowError) as error:  # another program has named it
            raise ConnectionError(f"{address!r} is no address") from error


@final
class Listener:
    """A server on rank 0 of an island: it holds the register, or says who does. Threads run it.

    Args:
        meet: The addresses at which newcomers look for a run.
        facts: What must be the same on all islands, by name.
        ends: When it is set, the threads end.
    """

    def __init__(self, meet: Sequence[str], facts: Mapping[str, str], ends: threading.Event) -> None:
        self._meet, self._facts, self._ends = meet, facts, ends
        self._select = selectors.DefaultSelector()
        self._wires: dict[int, Wire] = {}  # of islands, by number
        self._lock = threading.Lock()
        self.register: Register | None = None
        self.run = ""  # the name of the run that this island is in
        self.holder = ""  # the address of its holder, if that is another island
        self.invited = ""  # where a run is, which has found this island
        # The first address of `meet` that is this machine's and free, if any is. It is the one that newcomers find.
        self.place, self.port = len(meet), 0
        self.listen()
        start_daemon("towpath-islands", self._serve, ends.set)
        start_daemon("towpath-islands-look", self._look, ends.set)

    def listen(self) -> None:
        """Listen at the first address of `meet` that is free here, or else anywhere."""
        anywhere = () if self.port else (":0",)
        for place, address in enumerate((*self._meet[: self.place], *anywhere)):
            host, port = parsed(address)
            with suppress(OSError):
                socket.create_server((host, 0)).close()  # raises unless the address is this machine's
                server = socket.create_server(("", port), backlog=64)
                server.setblocking(False)
                with self._lock:  # another thread looks through all that is registered
                    self._select.register(server, selectors.EVENT_READ)
                self.place, self.port = place, server.getsockname()[1]
                break

    def hold(self, register: Register, run: str) -> None:
        """Hold the register of a run from now on."""
        self.listen()
        with self._lock:
            self.register, self.run = register, run

    # The threads ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ends.is_set():
            for key, _ in self._select.select(_PAUSE_SECONDS):
                if key.data is None:
                    with suppress(OSError):
                        accepted, _ = key.fileobj.accept()  # pyright: ignore[reportAttributeAccessIssue]
                        self._select.register(accepted, selectors.EVENT_READ, Wire(accepted))
                else:
                    self._hear(key.data)
            now = time.monotonic()
            with self._lock:
                # Islands say at once what they want. Another program must not keep connections for nothing.
                for wire in [key.data for key in self._select.get_map().values() if key.data is not None]:
                    if wire.number < 0 and now - wire.began > _ANSWER_SECONDS:
                        self._close(wire)
                if self.register is not None:
                    self.register.tick(now)
                    self._send_answers()
        for key in list(self._select.get_map().values()):
            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def _hear(self, wire: Wire) -> None:
        with self._lock:
            try:
                for message in wire.read():
                    self._take(wire, message)
            except Exception as error:  # its connection has ended, or it is another program
                self._close(wire)
                if self.register is not None and self._wires.get(wire.number) is wire:
                    del self._wires[wire.number]
                    self.register.leave(wire.number, getattr(error, "strerror", "") or str(error), time.monotonic())
            self._send_answers()

    def _close(self, wire: Wire) -> None:
        with suppress(KeyError, ValueError):  # it is closed
            self._select.unregister(wire.socket)
        wire.close()

    def _take(self, wire: Wire, message: Message) -> None:
        now = time.monotonic()
        if "hello" in message:
            wire.send(self._answer(wire, message, now))
        elif "look" in message:
            self._compare(message["look"])
            wire.send(self._self())
        elif "bye" in message:
            raise ConnectionError(message["bye"])
        elif self.register is not None and self._wires.get(wire.number) is wire:
            self.register.hear(wire.number, message, now)

    def _answer(self, wire: Wire, hello: Message, now: float) -> Message:
        """Return the answer to an island that comes."""
        if self.register is None:
            if not self.run:
                return {"wait": self.place}
            host, _, port = self.holder.rpartition(":")
            return {"at": f"{wire.here if host.startswith(_LOCAL) else host}:{port}"}
        for name, mine in self._facts.items():
            theirs = hello["facts"].get(name)
            if theirs != mine:
                return {"refused": f"{name} is {theirs} here, and {mine} on the islands of the run."}
        number = hello["number"]
        if number is not None and (_name(hello["run"]) != _name(self.run) or number in self._wires):
            return {"unknown": True}
        if number is not None and number not in self.register.expected:
            return {"end": "the other islands went on without this one. Start it again, and it joins them."}
        host = wire.there
        if host.startswith(_LOCAL):  # islands elsewhere reach this machine at the host that they came to
            host = next((each.here for each in self._wires.values() if not each.here.startswith(_LOCAL)), host)
        wire.number = self.register.arrive(hello, f"{host}:{hello['port']}", now)
        self._wires[wire.number] = wire
        return {"welcome": wire.number, "run": self.run}

    def _send_answers(self) -> None:
        register = self.register
        if register is None:
            return
        while register.answers:
            number, answer = register.answers.pop(0)
            if (wire := self._wires.get(number)) is not None:
                with suppress(OSError):  # its end is noticed where it is read
                    wire.send(answer)
                if "end" in answer:
                    del self._wires[number]
        if register.number not in register.members.keys() | register.expected.keys():
            # This island has left. The others notice by their connections that another one holds the register next.
            self.register, self.run = None, ""
            for wire in self._wires.values():
                self._close(wire)
            self._wires.clear()

    def _look(self) -> None:
        """Look at the addresses of `meet`: for islands that have found no run, and for another half of this one."""
        while not self._ends.wait(_LOOK_SECONDS):
            for address in self._meet if self.register is not None else ():
                with suppress(OSError, KeyError), Wire.to(address) as wire:
                    answer = wire.ask({"look": self._self() | {"at": f"{wire.here}:{self.port}"}})
                    with self._lock:
                        self._compare(answer | {"at": address})
                        self._send_answers()

    def _self(self) -> Message:
        """Return what tells this run from another one, and which of two halves counts."""
        register = self.register  # which another thread may remove
        return {"run": self.run, "facts": self._facts, "size": len(register.members) if register else 0}

    def _compare(self, other: Message) -> None:
        """Note where a run is if this island has none. End the islands of this register if the other half is larger."""
        register = self.register
        if not self.run:
            self.invited = other["at"]
        elif register is not None and other["facts"] == self._facts and other["run"] != self.run:
            size = len(register.members)
            if (other["size"], other["run"]) > (size, self.run):
                text = (
                    f"{other['size']} islands of another run are at {other['at']}, and {size} here. Those are more, or "
                    "began later, and count. Start this one again, and it joins them."
                )
                register.answers += [(number, {"end": text}) for number in register.members]
                register.members.clear()


def _name(run: str) -> str:
    """Return the name of a run without the islands that held its register."""
    return run.partition(" ")[0]


@final
class Seat:
    """The seat of an island at the meeting point, on its rank 0: it asks the holder, and finds or becomes the next one.

    Args:
        meet: The addresses at which to look for a run, with commas between.
        facts: What must be the same on all islands, by name.
        store: The port of the store of this island.
        silence: Seconds after which the holder, or an island, that sends nothing is lost.
        late: Seconds that an island may be late at an exchange, at least.
        wait: Seconds after which an island that finds no run, and cannot begin one, fails.
    """

    def __init__(
        self, meet: str, facts: Mapping[str, str], store: int, silence: float, late: float, wait: float
    ) -> None:
        self._store = store
        self._meet = [address.strip() for address in meet.split(",")]
        self._facts, self._silence, self._late, self._wait = dict(facts), silence, late, wait
        self._wire: Wire | None = None
        self._lock = threading.RLock()
        self._ends = threading.Event()
        self._listener = Listener(self._meet, self._facts, self._ends)
        self._number = -1
        self._last: Message = {}  # the GO of the last exchange
        self._state: Message = {"next_number": 0, "next_block": 0}
        self._why = "this island has left the others."
        start_daemon("towpath-islands-ping", self._ping, self.close)

    # Coming and going -------------------------------------------------------------------------------------------------

    def join(self, next_block: int, say: Callable[[str], object]) -> tuple[int, bool]:
        """Join the run that is there, or begin one. Return this island's number, and whether it has begun the run.

        Args:
            next_block: The first block of samples that islands of a new run are given.
        """
        began, listener = time.monotonic(), self._listener
        if listener.place == len(self._meet):
            say(f"looking for an island at {', '.join(self._meet)}")
        while True:
            known = (listener.invited, *self._last.get("addresses", {}).values(), *self._meet)
            found = [self._come_to(address) for address in known]
            if self._wire is not None:
                return self._number, False
            waited = time.monotonic() - began
            # Of several that have found nobody, the one at the first of the addresses begins.
            is_first = listener.place <= min(each.get("wait", len(self._meet) - 1) for each in found)
            if is_first and waited > _ALONE_SECONDS:
                self._state = {"next_number": 1, "next_block": next_block}
                register = Register(0, self._state, {0: ""}, self._silence, self._late, time.monotonic())
                self._hold(register, uuid.uuid4().hex)
                return 0, True
            if waited > self._wait:
                raise ConfigError(
                    f"no island was found at {', '.join(self._meet)} in {self._wait:.0f} s, and this one cannot listen "
                    "there: the addresses are of other machines, or another program has the port. Start an island on "
                    "such a machine, or pass meet= with an address of this machine and a free port, too."
                )
            time.sleep(_PAUSE_SECONDS)
            listener.listen()  # an address may be free by now

    def _come_to(self, address: str, number: int | None = None) -> Message:
        """Say hello at an address, and follow where it leads. Return the answer. It is empty if there is none."""
        answer: Message = {}
        hello = {"hello": True, "facts": self._facts, "port": self._listener.port, "store": self._store}
        hello |= {"number": number, "run": self._listener.run, "last": self._state.get("last")}
        hello["next_block"] = self._state["next_block"]
        for _ in range(3 if self._wire is None else 0):
            try:
                wire = Wire.to(address)
            except OSError:
                break
            with suppress(OSError):
                answer = wire.ask(hello)
            if "welcome" in answer:
                self._number, self._wire = answer["welcome"], wire
                self._listener.run, self._listener.holder = answer["run"], address
                wire.seconds = self._silence
                break
            wire.close()
            if "refused" in answer and number is None:
                raise ConfigError(f"this island cannot join the run at {address}: {answer['refused']}")
            if answer.get("at", address) == address:
                break
            address = answer["at"]
        return answer

    def _hold(self, register: Register, run: str) -> None:
        self._listener.hold(register, run)
        found = self._come_to(f"127.0.0.1:{self._listener.port}", register.number)
        assert self._wire is not None, found

    def leave(self, why: str = "it has ended") -> None:
        """Leave the others, who go on. This island may join again."""
        with self._lock:
            if self._wire is not None:
                with suppress(OSError):
                    self._wire.send({"bye": why})
                self._wire.close()
                self._wire = None

    def close(self) -> None:
        """Leave for good."""
        self._ends.set()
        self.leave()

    # Asking -----------------------------------------------------------------------------------------------------------

    def ask(self, message: Message) -> Message:
        """Send READY or VOTE, and return the answer of the island that holds the register by then.

        An answer with the port of a store has the host of it, too, as this island reaches it.
        """
        while True:
            with self._lock:  # another thread may be looking for the next holder
                wire = self._wire
            if wire is None:
                raise StepError(self._why)
            try:
                if message:
                    wire.send(message)
                # "pong" is but a sign of life.
                answer = next(each for each in iter(wire.receive, None) if "pong" not in each)
            except OSError:
                self._fail_over(wire)
                continue
            if "end" in answer:
                self.leave()
                raise StepError(answer["end"])
            # What this island would need to hold the register.
            self._state |= answer.get("state", {})
            if "addresses" in answer:
                self._last = answer
            if "outcome" in answer:
                self._state["last"] = [answer["outcome"], answer["applied"]]
                self._last["trained"] = [*self._last.get("trained", ()), *answer.get("joined", ())]
            return answer | {"host": wire.there}

    def _ping(self) -> None:
        """Say now and then that this island is there. If that fails, the holder has ended."""
        while not self._ends.wait(_PING_SECONDS):
            if (wire := self._wire) is not None:
                try:
                    wire.send({"ping": True})
                except OSError:
                    with suppress(StepError):  # the next exchange raises it
                        self._fail_over(wire)

    def _fail_over(self, lost: Wire) -> None:
        """Go on with another holder, or become it. `lost`: the connection that has ended."""
        with self._lock:
            if self._wire is not lost:  # another thread has done it, or this island has left
                return
            lost.close()
            self._wire = None
            until = time.monotonic() + self._silence
            known = {int(n): a for n, a in self._last.get("addresses", {}).items()}
            # The next holder is the island with the lowest number that has the slow weights.
            trained = sorted(set(self._last.get("trained", ())) - {self._last.get("holder")})
            before = [known[n] for n in trained if self._number not in trained or n < self._number]
            # If the old holder is there, only the connection to it has ended, and it has noticed.
            asked = [self._listener.holder, *before]
            while not self._ends.is_set():
                answers = [self._come_to(address, self._number) for address in asked]
                if self._wire is not None:
                    return
                if ends := [answer["end"] for answer in answers if "end" in answer]:
                    self._why = ends[0]
                    break
                # An island that has not noticed yet still names the old holder.
                if self._number in trained and not any("at" in answer for answer in answers[1:]):
                    now = time.monotonic()
                    register = Register(self._number, self._state, known, self._silence, self._late, now)
                    register.leave(self._last["holder"], "it held the meeting point, which another one does now", now)
                    self._hold(register, f"{_name(self._listener.run)} {self._number}")
                    return
                if time.monotonic() > until or not trained:
                    self._why = (
                        f"this island lost the others: nobody answers at {', '.join(asked)}. One of them would have to "
                        "hold the meeting point. Start it again, and it looks for them."
                    )
                    break
                self._ends.wait(_PAUSE_SECONDS)
        raise StepError(self._why)
