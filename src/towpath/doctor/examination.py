"""The examination: what the leader asks the others, in which order, and again where something looks wrong.

    facts        each machine says what it has
    compute      all ranks at the same time
    reach        every machine tries to connect to every address of every other
    measure      pairs of machines, in rounds in which no machine is in two pairs
    interfaces   where a machine is reached over a second interface: is it faster?

What disturbs a measurement makes it worse, never better. So what looks wrong is measured again, and the best value
counts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from towpath.doctor.compute import compute
from towpath.doctor.findings import Finding
from towpath.doctor.gathering import Leader, Place
from towpath.doctor.interfaces import interface_of, interfaces, is_usable
from towpath.doctor.judge import Direction, Pair, judge, turned
from towpath.doctor.machine import machine_facts
from towpath.doctor.paths import Peer, measure, rates, reach
from towpath.doctor.services import Services

Facts = dict[str, Any]

_COMPUTE_SECONDS, _LOOPBACK_SECONDS = 1.5, 0.3
# Each rate is measured for so long, so that all rounds together take less than half a minute.
_RATE_SECONDS, _ROUNDS_SECONDS, _INTERFACE_SECONDS = 1.0, 5.0, 0.4
_ASK_SECONDS, _LONG_SECONDS = 15.0, 45.0
# What looks wrong is measured again so often, unless the examination would then take longer than so many seconds.
_MOST_AGAIN, _MOST_SECONDS = 3, 50.0
_MOST_ADDRESSES = 12
# Of two measurements, the smaller of these values counts, and the larger of all others.
_SMALLER = ("loss", "stalls", "latency")


class Examinee:
    """One process of an examination. Only the first process of a machine measures paths."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.hello = {"machine": place.machine, "local": place.local, "host": socket.gethostname()}

    @cached_property
    def _services(self) -> Services:
        """The services that the other machines measure with. Only the first process of a machine opens them."""
        return Services()

    def perform(self, question: Any) -> Any:
        """Answer a question of the leader, or say why that has failed."""
        try:
            return {"answer": self._answer(question)}
        except Exception as error:  # of the network, or a torch that cannot be imported
            return {"failed": f"{type(error).__name__}: {error}"}

    def _answer(self, question: Any) -> Any:
        match question["do"]:
            case "facts":
                return machine_facts() | {"services": [self._services.port, self._services.token]}
            case "load":
                import torch  # takes seconds, which must not fall into what ranks measure together

                return torch.__version__
            case "compute":
                return compute(_COMPUTE_SECONDS, None if self._place.hosts else self._place.local)
            case "loopback":
                itself = Peer("127.0.0.1", self._services.port, self._services.token)
                return sum(rates(itself, ("out", "back"), _LOOPBACK_SECONDS).values())
            case "reach":
                return reach([Peer(*peer) for peer in question["peers"]], interfaces())
            case "measure":
                return measure(Peer(*question["peers"][0]), question["seconds"])
            case "interfaces":
                return [rates(Peer(*peer), ("out",), _INTERFACE_SECONDS)["out"] for peer in question["peers"]]
            case unknown:  # of a leader with another version of Towpath
                raise ValueError(f"{unknown} is no question")


class Examination:
    """An examination, on the leader.

    Args:
        leader: The connections to the others.
        say: Shows what is done now.
    """

    def __init__(self, leader: Leader, say: Callable[[str], object]) -> None:
        self._leader, self._say = leader, say
        self._began = time.monotonic()
        self._machines: list[Facts] = []
        self._ways: dict[Direction, Facts] = {}
        self._longest = 0.0  # seconds of a round

    def run(self) -> tuple[Facts, list[Finding]]:
        """Examine everything. Return all facts, and what is wrong."""
        self._ask_facts()
        self._ask_compute()
        numbers = range(len(self._machines))
        self._measure([(a, b) for a in numbers for b in numbers if a < b])
        for _ in range(_MOST_AGAIN):
            found = judge(self.facts())
            suspects = sorted({pair for each in found for pair in each.pairs})
            slow_ranks = any(each.flops is not None for each in found)
            would_take = time.monotonic() - self._began + len(self._rounds(suspects)) * self._longest
            if not (suspects or slow_ranks) or would_take > _MOST_SECONDS:
                break
            if slow_ranks:
                self._ask_compute()
            if suspects:
                self._measure(suspects)
        return self.facts(), judge(self.facts())

    def facts(self) -> Facts:
        """Return everything that is known, as JSON."""
        place, leader = self._leader.place, self._leader
        missing = [number for number in range(place.world) if number not in leader.hellos]
        names = {number: place.hosts[number] if place.hosts else f"rank {number}" for number in missing}
        return {
            "version": 1,
            "seconds": round(time.monotonic() - self._began, 1),
            "port": place.port,
            "machines": self._machines,
            "ways": [self._ways[way] for way in sorted(self._ways, key=lambda way: (*sorted(way), way))],
            "absent": [{"name": name, "state": leader.states.get(number)} for number, name in names.items()],
            "lost": [
                {"rank": number, "host": leader.hellos[number]["host"], "asked": asked}
                for number, asked in sorted(leader.lost.items())
            ],
        }

    # One machine or rank alone ----------------------------------------------------------------------------------------

    def _ask_facts(self) -> None:
        self._say("interfaces, versions, variables")
        leader, hellos = self._leader, self._leader.hellos
        # An address by which the others know each machine: that of its connection to the leader.
        here = next((link.here for link in leader.links.values()), "127.0.0.1")
        addresses = {number: link.there for number, link in leader.links.items()} | {0: here}
        groups: dict[str, list[int]] = {}
        for number in sorted(hellos, key=lambda number: (hellos[number]["local"], number)):
            groups.setdefault(hellos[number]["machine"], []).append(number)
        firsts = sorted(group[0] for group in groups.values())
        began = time.time()
        told = leader.ask({first: {"do": "facts"} for first in firsts}, _ASK_SECONDS)
        ended = time.time()
        hosts = [hellos[first]["host"] for first in firsts]
        for first in sorted(told):
            host, address = hellos[first]["host"], addresses[first]
            clock = told[first]["clock"]  # as it was answered, so after the leader began to ask, and before it ended
            more = {
                "name": host if hosts.count(host) == 1 else f"{host} ({address})",
                "host": host,
                "address": address,
                "first": first,
                "ranks": [{"rank": number} for number in groups[hellos[first]["machine"]]],
                "clock": round(min(clock - began, 0.0) + max(clock - ended, 0.0), 3),
            }
            self._machines.append(told[first] | more)

    def _ask_compute(self) -> None:
        """Let all ranks compute, and then all machines send to themselves."""
        everyone = [rank["rank"] for machine in self._machines for rank in machine["ranks"]]
        self._say("loading torch")
        loaded = self._leader.ask({number: {"do": "load"} for number in everyone}, _LONG_SECONDS)
        self._say("matrix products and copies")
        told = self._leader.ask({number: {"do": "compute"} for number in loaded}, _LONG_SECONDS)
        sent = self._leader.ask({machine["first"]: {"do": "loopback"} for machine in self._machines}, _ASK_SECONDS)
        for machine in self._machines:
            machine["loopback"] = better(machine.get("loopback"), sent.get(machine["first"], 0.0))
            for rank in machine["ranks"]:
                rank["devices"] = better(rank.get("devices"), told.get(rank["rank"], []))

    # Pairs ------------------------------------------------------------------------------------------------------------

    def _measure(self, pairs: Sequence[Pair]) -> None:
        self._say("who reaches whom")
        reached = self._reach([way for a, b in pairs for way in ((a, b), (b, a))])
        rounds = self._rounds(pairs)
        for number, each in enumerate(rounds, 1):
            began = time.monotonic()
            names = ", ".join(f"{self._machines[a]['name']} – {self._machines[b]['name']}" for a, b in each)
            self._say(f"round {number} of {len(rounds)}: {names}")
            for way, found in self._measured(each, reached, min(_RATE_SECONDS, _ROUNDS_SECONDS / len(rounds))).items():
                self._ways[way] = better(self._ways.get(way), found)
            self._longest = max(self._longest, time.monotonic() - began)

    def _rounds(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Return the rounds in which these pairs are measured."""
        every = tournament(len(self._machines))
        return [found for each in every if (found := [pair for pair in each if pair in pairs])]

    def _reach(self, ways: Sequence[Direction]) -> dict[Direction, list[Facts]]:
        """Return for each direction how each address of the other machine was reached, the one for training first."""
        targets: dict[int, list[tuple[Direction, list[Any]]]] = {}
        for way in ways:
            of = self._machines[way[1]]
            every = (address for each in of["interfaces"] for address in each["addresses"])
            addresses = [of["training"]["address"], of["address"], *filter(is_usable, every)]
            for address in list(dict.fromkeys(filter(None, addresses)))[:_MOST_ADDRESSES]:
                targets.setdefault(way[0], []).append((way, [address, *of["services"]]))
        first = {machine: self._machines[machine]["first"] for machine in targets}
        questions = {first[at]: {"do": "reach", "peers": [peer for _, peer in peers]} for at, peers in targets.items()}
        told = self._leader.ask(questions, _ASK_SECONDS)
        found: dict[Direction, list[Facts]] = {way: [] for way in ways}
        for machine, peers in targets.items():
            for (way, _), answer in zip(peers, told.get(first[machine], []), strict=False):
                found[way].append(answer)
        return found

    def _measured(
        self, pairs: Sequence[Pair], reached: dict[Direction, list[Facts]], seconds: float
    ) -> dict[Direction, Facts]:
        """Measure pairs that share no machine, all at the same time. The one that can connect to the other measures."""
        backward = [turned(way) for way in pairs]
        found = {
            way: {"from": way[0], "to": way[1], "reach": reached[way], "others": []} for way in (*pairs, *backward)
        }
        peers = {way: self._peers(way, reached[way]) for way in found}
        active = [way if peers[way] else turned(way) for way in pairs]
        for way, told in self._ask_paths(active, peers, {"do": "measure", "seconds": seconds}).items():
            found[way] |= told[0]
            found[turned(way)] |= told[1]
        for ways in (pairs, backward):
            several = [way for way in ways if len(peers[way]) > 1]
            for way, told in self._ask_paths(several, peers, {"do": "interfaces"}).items():
                rated = zip(peers[way], told, strict=True)
                found[way]["others"] = [{"interface": interface, "rate": rate} for interface, rate in rated]
        return found

    def _peers(self, way: Direction, tried: Sequence[Facts]) -> dict[str, list[Any]]:
        """Return how the second machine is reached, by its interfaces: the one for training first."""
        of, found = self._machines[way[1]], dict[str, list[Any]]()
        for each in tried:
            if each["state"] == "open":
                interface = interface_of(each["address"], of["interfaces"]) or {"name": each["address"]}
                found.setdefault(interface["name"], [each["address"], *of["services"]])
        return found

    def _ask_paths(
        self, ways: Sequence[Direction], peers: dict[Direction, dict[str, list[Any]]], question: Facts
    ) -> dict[Direction, Any]:
        """Ask the first machine of each direction in which it can connect. Return the answers by direction."""
        asked = {self._machines[way[0]]["first"]: way for way in ways if peers[way]}
        questions = {first: question | {"peers": list(peers[way].values())} for first, way in asked.items()}
        return {asked[first]: told for first, told in self._leader.ask(questions, _LONG_SECONDS).items()}


def tournament(count: int) -> list[list[Pair]]:
    """Return rounds in which each of `count` meets every other once, and no one is in two pairs of a round."""
    players = [*range(count), *([-1] if count % 2 else [])]
    rounds: list[list[Pair]] = []
    for _ in range(len(players) - 1):
        pairs = zip(players[: len(players) // 2], reversed(players[len(players) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def better(before: Any, now: Any, key: str = "") -> Any:
    """Return what counts of two measurements of the same: of each number the better one, and of all else the later."""
    if before is None or now is None:
        return before if now is None else now
    if isinstance(now, dict):
        if before.get("state") == "open":
            return before
        return {**before, **{name: better(before.get(name), now[name], name) for name in now}}
    if isinstance(now, list):
        return [better(*each) for each in zip(before, now, strict=True)] if len(before) == len(now) else now or before
    if isinstance(now, str):
        return now
    return min(before, now) if key in _SMALLER else max(before, now)
