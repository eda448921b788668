"""The register of the islands that are there. It decides who takes part in an exchange, and whether its result counts.

One island holds the register (`meeting.py`), and all of them send it messages. This module decides the answers. It
needs neither sockets nor a clock of its own.

    READY   an island has reached an exchange. When all of them have, each gets GO, with the members and their weights.
    VOTE    an island has the sum, with its digest, or not. When all that are left have voted, each gets the OUTCOME,
            and the blocks of data that it wants.

A result is applied if every island that is left has the same sum. Otherwise all of them drop it. An island that has
voted never decides by itself. If the holder ends, the next one collects what each island waits for, and which outcome
it got last. If one of them knows the outcome, it holds for all. If none does, those that are left vote again: the
island that has ended may have applied the result, but it takes part in nothing any more.

Newcomers are admitted by a GO. They take part in all later exchanges with weight 0, so that they know what happens to
the slow weights, which an island sends them meanwhile (`islands.py`). They are ready for any exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towpath.json_connection import Message

# What helps an island that is late at every exchange.
_SLOWER = " If its machine is always slower, start all islands as one job, with shares=."

# An optimizer step, a fragment, and how often islands have tried to exchange it at that step.
Key = tuple[int, int, int]


@dataclass(slots=True)
class Member:
    """An island in the register."""

    number: int
    address: str  # where it listens, and would hold the register
    port: int  # of its store, over which groups are formed
    heard: float  # when it sent something last
    told: Message = field(default_factory=dict[str, Any])  # what it waits for an answer to: READY or VOTE
    since: float = 0.0  # when it sent that
    admitted: bool = True  # whether it takes part in exchanges
    donor: int = -1  # the island whose slow weights it takes

    @property
    def key(self) -> Key | None:
        """The exchange that it waits in. None if it is ready for any."""
        written = self.told.get("key")
        return None if written is None else key_of(written)


def key_of(written: Sequence[int]) -> Key:
    """Return a key that JSON has as a list."""
    return written[0], written[1], written[2]


class Register:
    """The islands of a run, as their holder knows them.

    Args:
        number: The number of the island that holds it.
        state: What all islands know of the run: the `next_number` of an island, the `next_block` of data, the last
            `step`, the last outcome (`last`), and the `patience`: how long a late island is awaited.
        expected: The islands that have to come before an exchange begins, the holder's own too: addresses, by number.
        silence: Seconds after which an island that sends nothing is lost.
        late: Seconds that an island may be late at an exchange, at least.
    """

    def __init__(
        self, number: int, state: Message, expected: Mapping[int, str], silence: float, late: float, now: float
    ) -> None:
        self.number, self.silence = number, silence
        self._state: Message = {"step": 0, "patience": late, "last": None} | state
        self.members: dict[int, Member] = {}
        self.expected = {n: Member(n, address, 0, now) for n, address in expected.items()}
        self.answers: list[tuple[int, Message]] = []  # to send, each to the island with this number
        self._said: list[str] = []
        self._late = late
        self._began: dict[int, float] = {}  # when each fragment was exchanged last
        self._view: tuple[int, ...] = ()  # the members of the last exchange
        self._views = 0

    # What islands do --------------------------------------------------------------------------------------------------

    def arrive(self, hello: Message, address: str, now: float) -> int:
        """Add an island, and return its number. One that was in the register before has a number already."""
        number, last = hello["number"], hello["last"]
        if is_new := number is None:
            number = self._state["next_number"]
            self._state["next_number"] += 1
        else:  # the holder before may have told this island alone what it did last
            self._state["next_block"] = max(self._state["next_block"], hello.get("next_block", 0))
            if last is not None and (self._last is None or key_of(last[0]) > self._last[0]):
                self._state["last"] = last
        self.expected.pop(number, None)
        self.members[number] = Member(number, address, hello["store"], now, admitted=not is_new)
        return number

    def hear(self, number: int, message: Message, now: float) -> None:
        """Take a message of an island."""
        member = self.members.get(number)
        if member is None:
            return
        member.heard = now
        if "ping" not in message:
            member.told, member.since = message, now
            member.donor = message.get("donor", member.donor)
            self._settle(now)
        elif member.told or not member.admitted:  # it waits, and must know that this one is there
            self.answers.append((number, {"pong": True}))

    def leave(self, number: int, why: str, now: float) -> None:
        """Remove an island. The others go on without it."""
        self._remove(number, why)
        self._settle(now)

    def _remove(self, number: int, why: str) -> None:
        gone = self.members.pop(number, None) or self.expected.pop(number, None)
        if gone is not None and gone.admitted:
            left, step = len(self._those_there) + len(self.expected), self._state["step"]
            self._said.append(f"island {number} of {left + 1} left after step {step}: {why}; {left} go on")

    def _dismiss(self, number: int, why: str, advice: str = "") -> None:
        text = f"the other islands go on without this one: {why}. Start it again, and it joins them with their weights."
        self.answers.append((number, {"end": text + advice}))
        self._remove(number, why)

    def tick(self, now: float) -> None:
        """Remove islands that are silent or late."""
        for member in [*self.members.values(), *self.expected.values()]:
            if now - member.heard > self.silence:
                self._dismiss(member.number, f"nothing was heard of it for {self.silence:.0f} s")
        # Newcomers are ready for any exchange. Nobody is late for them.
        waiting, patience = [(m.key, m.since) for m in self._those_there if m.key is not None], self._state["patience"]
        if waiting and now - min(since for _, since in waiting) > patience:
            first = min(key for key, _ in waiting)
            for member in self._those_there:
                if not member.told or member.key not in (None, first):
                    self._dismiss(member.number, f"the others waited {patience:.0f} s for it", _SLOWER)
        self._settle(now)

    @property
    def _those_there(self) -> list[Member]:
        return [m for _, m in sorted(self.members.items()) if m.admitted]

    @property
    def _last(self) -> tuple[Key, bool] | None:
        """The last exchange whose outcome is known, and whether it counts."""
        last = self._state["last"]
        return None if last is None else (key_of(last[0]), last[1])

    # What follows -----------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Answer if no island has to be awaited."""
        for member in list(self.members.values()):
            awaits_weights = not member.told.get("arrived", True)
            if awaits_weights and member.donor not in self.members.keys() | self.expected.keys():
                self._dismiss(member.number, f"island {member.donor} ended while it sent its weights")
        there = self._those_there
        # After a change of the holder, an island may wait for an outcome that another one knows.
        for member in there:
            if member.told and self._last is not None and member.key == self._last[0]:
                self._answer(member, {"outcome": member.key, "applied": self._last[1], "why": "its holder has ended"})
        # After the island of this register has left, the next holder answers.
        if self.number not in self.members or self.expected or not all(m.told for m in there):
            return
        voted = [m for m in there if "vote" in m.told]
        keys = {m.key for m in there} - {None}
        if voted:
            self._decide([m for m in there if m.key == voted[0].key])
        elif len(keys) == 1:
            self._go(there, now)

    def _decide(self, members: list[Member]) -> None:
        """Send the outcome of an exchange. One that is still READY for it has not got the GO of a holder that ended."""
        key = members[0].key
        assert key is not None
        problems = [f"island {m.number}: {m.told.get('why') or 'not begun'}" for m in members if not m.told.get("ok")]
        if not problems and len({m.told["digest"] for m in members}) > 1:
            sums = ", ".join(f"{m.told['digest'] & 0xFFFFFFFF:08x} on island {m.number}" for m in members)
            problems.append(f"different sums: {sums}")
        self._state["last"] = [key, not problems]
        if problems:
            self._view = ()  # groups whose exchange failed are not used again
        joined = [m.number for m in members if m.donor >= 0 and m.told.get("blocks")]  # they have the slow weights
        blocks = [self._blocks_of(member, key) for member in members]
        said, self._said = self._said, []
        outcome: Message = {"outcome": key, "applied": not problems, "why": "; ".join(problems), "said": said}
        outcome |= {"state": dict(self._state), "joined": joined}
        for member, each in zip(members, blocks, strict=True):
            self._answer(member, outcome | {"blocks": each})
        for member in self.members.values():
            member.admitted |= member.donor >= 0

    def _go(self, members: list[Member], now: float) -> None:
        """Let an exchange begin."""
        trained = [m for m in members if m.key is not None]
        if self._end_those_that_differ(trained):
            self._settle(now)
            return
        key = trained[0].key
        assert key is not None
        self._state["step"] = key[0]
        if key[2] == 0:  # the first try at this step
            if key[1] in self._began:  # twice as long as this period took
                self._state["patience"] = max(self._late, 2 * (now - self._began[key[1]]))
            self._began[key[1]] = now
        numbers = tuple(m.number for m in members)
        if numbers != self._view:
            self._view, self._views = numbers, self._views + 1
        newcomers = [m for m in self.members.values() if not m.admitted]
        for i, member in enumerate(newcomers):
            member.donor = trained[-1 - i % len(trained)].number
        go = {
            "go": key,
            "addresses": {m.number: m.address for m in members},
            "port": self.members[self.number].port,
            "members": numbers,
            "weights": [m.told["weight"] for m in members],
            "view": f"{self.number}.{self._views}",
            "trained": [m.number for m in trained],
            "holder": self.number,
            "state": dict(self._state),
            "donors": [[m.donor, m.number] for m in newcomers],
        }
        for member in members:
            self._answer(member, go)
        for member in newcomers:
            self.answers.append((member.number, go | {"donation": member.donor}))

    def _blocks_of(self, member: Member, key: Key) -> list[int]:
        """Return the next blocks of data for an island that has voted, as many as it wants."""
        first, wanted = self._state["next_block"], member.told.get("blocks", 0)
        self._state["next_block"] += wanted
        if wanted and member.donor >= 0:
            whose = f"with the slow weights of island {member.donor}"
            self._said.append(f"island {member.number} joined at step {key[0]} {whose}")
            member.donor = -1
        return list(range(first, first + wanted))

    def _end_those_that_differ(self, trained: list[Member]) -> bool:
        """End islands whose slow weights differ from those of most, and all if no value has most. Return if any do."""
        (most, count), *others = Counter(m.told["digest"] for m in trained).most_common()
        for member in trained if others else ():
            if member.told["digest"] != most or others[0][1] == count:
                found = ", ".join(f"{m.told['digest'] & 0xFFFFFFFF:08x} on island {m.number}" for m in trained)
                self._dismiss(member.number, f"its slow weights differ, whose digests are {found}")
        return bool(others)

    def _answer(self, member: Member, answer: Message) -> None:
        member.told = {}
        self.answers.append((member.number, answer))
