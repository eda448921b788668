"""The examination: what the leader asks the others, in which order, and again where something looks wrong.

    facts        each machine says what it has
    compute      all ranks at the same time
    reach        every machine tries to connect to every address of every other
    measure      pairs of machines, in rounds in which no machine is in two pairs
    ways         where a machine has a second interface to the other: is it faster?

What disturbs a measurement makes it worse, never better. So what looks wrong is measured once more, and the better value
counts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from towpath.doctor.compute import compute, load
from towpath.doctor.findings import Finding
from towpath.doctor.interfaces import interfaces, is_usable, plain
from towpath.doctor.judge import judge
from towpath.doctor.machine import has_gpus, machine_facts
from towpath.doctor.meeting import Leader, Place
from towpath.doctor.paths import Peer, measure, other_ways, rates, reach
from towpath.doctor.services import Services

Facts = dict[str, Any]

VERSION = 1
_COMPUTE_SECONDS, _LOOPBACK_SECONDS, _WAY_SECONDS = 1.0, 0.3, 0.4
# Each rate is measured for so long, so that all rounds together take less than half a minute.
_RATE_SECONDS, _ROUNDS_SECONDS = 1.0, 5.0
_ASK_SECONDS, _LOAD_SECONDS, _MEASURE_SECONDS = 15.0, 45.0, 40.0
_CONFIRM_UNTIL_SECONDS = 38.0  # of the examination: later, what looks wrong is not measured again
_MOST_ADDRESSES = 12


class Member:
    """What one process does in an examination. Only the first process of a machine measures paths."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._services: Services | None = None
        self.hello = {"machine": place.machine, "local": place.local, "host": socket.gethostname()}

    def perform(self, question: Any) -> Any:
        """Answer a question of the leader."""
        match question["do"]:
            case "facts":
                self._services = Services(question["address"])
                services = {"port": self._services.port, "token": self._services.token}
                return machine_facts(has_gpus()) | {"services": services}
            case "load":
                return load()
            case "compute":
                return compute(question["seconds"], None if self._place.hosts else self._place.local)
            case "clock":
                return time.time()
            case "loopback":
                assert self._services is not None
                peer = Peer(question["address"], self._services.port, self._services.token)
                return sum(rate["rate"] for rate in rates(peer, ("out", "back"), question["seconds"]).values())
            case "reach":
                return reach([Peer(*peer) for peer in question["peers"]], interfaces())
            case "measure":
                return measure(Peer(*question["peer"]), question["mtu"], question["seconds"])
            case "ways":
                return [rates(Peer(*each), ("out",), question["seconds"])["out"]["rate"] for each in question["ways"]]
            case other:
                return f"unknown question: {other}"


class Examination:
    """An examination, on the leader.

    Args:
        leader: The connections to the others.
        say: Shows what is done now.
    """

    def __init__(self, leader: Leader, say: Callable[[str], object]) -> None:
        self._leader, self._say = leader, say
        self._began = time.monotonic()
        # The processes of each machine, the first of them first.
        by_machine: dict[str, list[int]] = {}
        for number in sorted(leader.hellos, key=lambda number: (leader.hellos[number]["local"], number)):
            by_machine.setdefault(leader.hellos[number]["machine"], []).append(number)
        self._groups = sorted(by_machine.values())
        self._machines: list[Facts] = []
        self._pairs: dict[tuple[int, int], Facts] = {}

    def run(self) -> tuple[Facts, list[Finding]]:
        """Examine everything. Return all facts, and what is wrong."""
        self._ask_facts()
        self._ask_compute()
        self._ask_loopback()
        numbers = range(len(self._machines))
        self._measure([(a, b) for a in numbers for b in numbers if a < b])
        found = judge(self.facts())
        suspects = sorted({pair for finding in found for pair in finding.pairs})
        slow_ranks = any(finding.flops is not None for finding in found)
        if (suspects or slow_ranks) and time.monotonic() - self._began < _CONFIRM_UNTIL_SECONDS:
            self._say("measuring again what looks wrong")
            if slow_ranks:
                self._ask_compute()
            self._measure(suspects)
            found = judge(self.facts())
        return self.facts(), found

    def facts(self) -> Facts:
        """Return everything that is known, as JSON."""
        missing = [number for number in range(self._leader.place.world) if number not in self._leader.hellos]
        return {
            "version": VERSION,
            "seconds": round(time.monotonic() - self._began, 1),
            "machines": self._machines,
            "pairs": [self._pairs[pair] for pair in sorted(self._pairs)],
            "absent": [
                {
                    "name": self._leader.place.hosts[number] if self._leader.place.hosts else f"rank {number}",
                    "state": self._leader.states.get(number, "did not come"),
                }
                for number in missing
            ],
            "lost": [{"rank": number, "asked": what} for number, what in sorted(self._leader.lost.items())],
        }

    # One machine or rank alone ----------------------------------------------------------------------------------------

    def _ask_facts(self) -> None:
        self._say("interfaces, versions, variables")
        leader = self._leader
        # An address by which the others know each machine: that of its connection here, and here, of the first of them.
        ends = [link.connection.getsockname()[0].removeprefix("::ffff:") for link in leader.links.values()]
        addresses = {number: link.address for number, link in leader.links.items()} | {0: (ends or ["127.0.0.1"])[0]}
        firsts = [group[0] for group in self._groups]
        told = leader.ask({n: {"do": "facts", "address": addresses[n]} for n in firsts}, _ASK_SECONDS)
        hosts = [leader.hellos[n]["host"] for n in firsts]
        for group in self._groups:
            first = group[0]
            if first not in told:
                continue
            host = leader.hellos[first]["host"]
            self._machines.append(
                told[first]
                | {
                    "name": host if hosts.count(host) == 1 else f"{host} ({addresses[first]})",
                    "host": host,
                    "address": addresses[first],
                    "first": first,
                    "ranks": [{"rank": number} for number in group],
                    "clock": self._clock(first),
                }
            )

    def _clock(self, number: int) -> float:
        """Return by how many seconds the clock of a machine is ahead of this one."""
        began, told = time.time(), self._leader.ask({number: {"do": "clock"}}, _ASK_SECONDS)
        return round(told[number] - (began + time.time()) / 2, 3) if number in told else 0.0

    def _ask_compute(self) -> None:
        everyone = [number for group in self._groups for number in group]
        self._say("loading torch")
        versions = self._leader.ask({number: {"do": "load"} for number in everyone}, _LOAD_SECONDS)
        self._say("matrix products and copies")
        question = {"do": "compute", "seconds": _COMPUTE_SECONDS}
        told = self._leader.ask(dict.fromkeys(versions, question), _LOAD_SECONDS)
        for machine in self._machines:
            for rank in machine["ranks"]:
                number = rank["rank"]
                before = {each["device"]: each for each in rank.get("devices", [])}
                rank |= {"torch": versions.get(number), "devices": _better_devices(before, told.get(number, []))}

    def _ask_loopback(self) -> None:
        """Measure what sockets of each machine can send at all, while all of them do."""
        self._say("what sockets can send")
        question = {"do": "loopback", "seconds": _LOOPBACK_SECONDS}
        local = {machine["first"]: "::1" if ":" in machine["address"] else "127.0.0.1" for machine in self._machines}
        told = self._leader.ask({n: question | {"address": address} for n, address in local.items()}, _ASK_SECONDS)
        for machine in self._machines:
            machine["loopback"] = told.get(machine["first"], 0.0)

    # Pairs ------------------------------------------------------------------------------------------------------------

    def _measure(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._say("who reaches whom")
        reached = self._reach(pairs)
        rounds = [[pair for pair in each if pair in pairs] for each in tournament(len(self._machines))]
        rounds = [each for each in rounds if each]
        seconds = min(_RATE_SECONDS, _ROUNDS_SECONDS / max(1, len(rounds)))
        for number, each in enumerate(rounds, 1):
            names = ", ".join(f"{self._machines[a]['name']} – {self._machines[b]['name']}" for a, b in each)
            self._say(f"round {number} of {len(rounds)}: {names}")
            self._measure_round(each, reached, seconds)

    def _reach(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[Facts]]:
        """Return for each direction how each address of the other machine was reached, the one for training first."""
        ways = [way for a, b in pairs for way in ((a, b), (b, a))]
        targets: dict[int, list[tuple[int, list[Any]]]] = {}
        for a, b in ways:
            for address in self._addresses(b):
                targets.setdefault(a, []).append((b, self._peer(b, address)))
        questions = {
            self._machines[a]["first"]: {"do": "reach", "peers": [peer for _, peer in peers]}
            for a, peers in targets.items()
        }
        told = self._leader.ask(questions, _ASK_SECONDS)
        found: dict[tuple[int, int], list[Facts]] = {way: [] for way in ways}
        for a, peers in targets.items():
            for (b, _), answer in zip(peers, told.get(self._machines[a]["first"], []), strict=False):
                found[a, b].append(answer)
        return found

    def _addresses(self, machine: int) -> list[str]:
        """Return where others may find a machine: first where training does, then where it was found, then all."""
        of = self._machines[machine]
        training = [of["training"]["address"]] if of["training"]["address"] else []
        others = [plain(address) for each in of["interfaces"] for address in each["addresses"] if is_usable(address)]
        return list(dict.fromkeys([*training, of["address"], *others]))[:_MOST_ADDRESSES]

    def _peer(self, machine: int, address: str, interface: str | None = None) -> list[Any]:
        services = self._machines[machine]["services"]
        return [address, services["port"], services["token"], interface]

    def _measure_round(
        self, pairs: Sequence[tuple[int, int]], reached: dict[tuple[int, int], list[Facts]], seconds: float
    ) -> None:
        """Measure pairs that share no machine, all at the same time."""
        questions: dict[int, Any] = {}
        active: dict[int, tuple[tuple[int, int], bool, str]] = {}
        for a, b in pairs:
            before = self._pairs.get((a, b))
            new: Facts = {"machines": [a, b], "out": {}, "back": {}}
            new |= {"reach": [reached[a, b], reached[b, a]], "ways": []}
            self._pairs[a, b] = new if before is None else new | {"before": before}
            for one, other, turned in ((a, b, False), (b, a, True)):
                way = next((each for each in reached[one, other] if each["state"] == "open"), None)
                if way is not None:
                    mtu = min(self._mtu(one, way["interface"]), self._mtu_at(other, way["address"]))
                    first = self._machines[one]["first"]
                    peer = self._peer(other, way["address"])
                    questions[first] = {"do": "measure", "peer": peer, "mtu": mtu, "seconds": seconds}
                    active[first] = ((a, b), turned, way["address"])
                    break
        told = self._leader.ask(questions, _MEASURE_SECONDS)
        for first, answer in told.items():
            pair, turned, address = active[first]
            out, back = ("back", "out") if turned else ("out", "back")
            found = {"latency": answer["latency"], out: answer["out"], back: answer["back"], "turned": turned}
            self._pairs[pair] |= found | {"address": address}
        for turned in (False, True):
            self._measure_ways([(b, a) if turned else (a, b) for a, b in pairs])
        for pair in pairs:
            self._pairs[pair] = _better(self._pairs[pair])

    def _measure_ways(self, ways: Sequence[tuple[int, int]]) -> None:
        """Measure what leaves the first machine of each pair over other interfaces than that for training."""
        questions: dict[int, Any] = {}
        asked: dict[int, tuple[tuple[int, int], list[list[Any]]]] = {}
        for a, b in ways:
            found = self._pairs[min(a, b), max(a, b)]
            reached = found["reach"][a > b]
            used = next((each for each in reached if each["state"] == "open"), None)
            if used is None:
                continue
            own = [each for each in self._machines[a]["interfaces"] if not each["loopback"] and each["carrier"]]
            addresses = [each["address"] for each in reached if each["state"] == "open"]
            others = other_ways(addresses, own, (used["interface"], used["address"]))
            if others:
                tried = [[used["interface"], used["address"]], *map(list, others)]
                peers = [self._peer(b, used["address"]), *(self._peer(b, at, name) for name, at in others)]
                first = self._machines[a]["first"]
                questions[first] = {"do": "ways", "ways": peers, "seconds": _WAY_SECONDS}
                asked[first] = ((a, b), tried)
        for first, told in self._leader.ask(questions, _MEASURE_SECONDS).items():
            (a, b), tried = asked[first]
            self._pairs[min(a, b), max(a, b)]["ways"] += [
                {"from": a, "to": b, "interface": name, "address": address, "rate": rate}
                for (name, address), rate in zip(tried, told, strict=True)
            ]

    def _mtu(self, machine: int, name: str | None) -> int:
        named = [each["mtu"] for each in self._machines[machine]["interfaces"] if each["name"] == name]
        return (named or [1500])[0]

    def _mtu_at(self, machine: int, address: str) -> int:
        interfaces_of = self._machines[machine]["interfaces"]
        here = [each["name"] for each in interfaces_of if address in map(plain, each["addresses"])]
        return self._mtu(machine, (here or [None])[0])


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of `count` meets every other once, and nobody is in two pairs of a round."""
    players = [*range(count), *([-1] if count % 2 else [])]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _better_devices(before: dict[str, Facts], now: Sequence[Facts]) -> list[Facts]:
    """Return devices with the better of two measurements."""
    best = {"flops", "copied"}
    return [
        each | {key: max(each[key], before[each["device"]][key]) for key in best if each["device"] in before}
        for each in now
    ] or list(before.values())


def _better(pair: Facts) -> Facts:
    """Return a pair with the better of two measurements, if it was measured before."""
    before = pair.pop("before", None)
    if before is None:
        return pair
    better: dict[str, Callable[..., Any]] = {"loss": min, "again": min, "stalls": min}
    for way in ("out", "back"):
        old, new = before[way], pair[way]
        joined = {**old, **new}
        for key in set(old) & set(new):
            values = [value for value in (old[key], new[key]) if value is not None]
            joined[key] = better.get(key, max)(values) if values else None
        pair[way] = joined
    if before.get("latency") is not None:
        pair["latency"] = min(before["latency"], pair.get("latency", before["latency"]))
    pair["reach"] = [
        [new if new["state"] == "open" or old["state"] != "open" else old for old, new in zip(olds, news, strict=False)]
        for olds, news in zip(before["reach"], pair["reach"], strict=True)
    ]
    pair["ways"] = pair["ways"] or before["ways"]
    return {**before, **pair}
