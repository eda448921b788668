"""Judges the facts of an examination. It is a pure function: facts of another day give the same answer.

A cable is judged against the rate that it says itself, where it says one, else against the other machines, and with
two machines against the other direction. What one finding explains is not found again: a path that loses packets is
slow, but not because of its cable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_high, mode
from typing import Any

from towpath.doctor.findings import Finding, Severity, finding
from towpath.doctor.interfaces import is_loopback, is_usable
from towpath.progress import format_rate

Direction = tuple[int, int]  # the machine that sends, and the one that receives
Pair = tuple[int, int]  # the machine with the smaller number first

_PAYLOAD = 0.94  # of the rate of a cable, after the headers of Ethernet, IP and TCP
_SLOW, _FASTER_WAY, _SLOW_RANK, _SLOW_COPIES = 0.7, 1.4, 0.65, 0.5
_HALF_DUPLEX = 0.65  # of what both directions carry alone, while both are in use
# Sockets of Python reach so much of what they reach on a loopback. Faster cables are not tested to their limit.
OF_LOOPBACK = 0.4
_LOST, _LOST_SHARE = 4, 0.003
_CLOCK_SECONDS = 2.0
_OWN = ("IFNAME", "HCA", "HOSTID", "TOPO", "GRAPH", "DEBUG")  # variables that may differ


def judge(facts: Mapping[str, Any]) -> list[Finding]:
    """Return the findings: first those that stop training, then by the slowest cable."""
    case = _Case(facts)
    # In this order: what an earlier check explains is not looked at by later ones.
    reachable = (_absent, _names, _unreachable, _shared_addresses)
    checks = (*reachable, _packets, _losses, _interfaces, _cables, _duplex, _ranks, _differences, _clocks)
    found = [each for check in checks for each in check(case)]
    return sorted(found, key=lambda each: (list(Severity).index(each.severity), each.rate or 0.0))


def turned(way: Direction) -> Direction:
    """Return the other direction."""
    return way[1], way[0]


def pairs_of(ways: Iterable[Direction]) -> tuple[Pair, ...]:
    """Return the pairs of machines between which these directions are."""
    return tuple(sorted({(min(way), max(way)) for way in ways}))


@dataclass(frozen=True)
class _Blame:
    """The machine behind bad directions, or else the pair, of which the sender is first."""

    machines: tuple[int, ...]
    ways: frozenset[Direction]

    @property
    def both_ways(self) -> bool:
        return any(turned(way) in self.ways for way in self.ways)


class _Case:
    """The facts, by machine, direction and pair."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.machines: list[dict[str, Any]] = facts["machines"]
        self.names: list[str] = [machine["name"] for machine in self.machines]
        every: dict[Direction, dict[str, Any]] = {(each["from"], each["to"]): each for each in facts["ways"]}
        # A machine that has said nothing of its own attempts is gone, so that it takes no connection means nothing.
        there = {way[0] for way, each in every.items() if each["reach"]}
        self.reach: dict[Direction, list[dict[str, Any]]] = {
            way: each["reach"] if way[1] in there else [] for way, each in every.items()
        }
        self.ways = {way: each for way, each in every.items() if "alone" in each}  # those that were measured
        self.explained: set[Direction] = set()  # directions that a finding has explained

    # What is known of a direction -------------------------------------------------------------------------------------

    def interface(self, machine: int, other: int) -> dict[str, Any]:
        """Return the interface over which a machine reaches another one, or is reached by it."""
        names = [each["interface"] for each in self.reach.get((machine, other), []) if each["state"] == "open"]
        addresses = [each["address"] for each in self.reach.get((other, machine), []) if each["state"] == "open"]
        for each in self.machines[machine]["interfaces"]:
            if each["name"] in names[:1] or (not names and {*addresses[:1]} & {*each["addresses"]}):
                return each
        return {"name": "eth0", "mtu": None, "megabits": None, "duplex": None, "wireless": False}

    def text(self, way: Direction) -> str:
        """Return a direction with the interfaces at both ends, such as "node0 eth0 → node1 eth0"."""
        return " → ".join(f"{self.names[at]} {self.interface(at, to)['name']}" for at, to in (way, turned(way)))

    def limit(self, way: Direction) -> float:
        """Return the bytes per second up to which a direction is tested."""
        return OF_LOOPBACK * min(self.machines[end]["loopback"] for end in way)

    def expected(self, way: Direction) -> float:
        """Return the bytes per second that a direction should carry: what adapters say, or else what is usual here."""
        speeds = [self.interface(*end)["megabits"] for end in (way, turned(way))]
        alone = [(each, told["alone"]) for each, told in self.ways.items()]
        ends = [[rate for each, rate in alone if each[end] == at] for at in range(len(self.machines)) for end in (0, 1)]
        usual = median_high(max(rates, default=0.0) for rates in ends)
        return min(_PAYLOAD * min(speeds) * 1e6 / 8 if all(speeds) else usual, self.limit(way))

    # Who is behind it -------------------------------------------------------------------------------------------------

    def blame(self, bad: Collection[Direction], known: Collection[Direction] | None = None) -> list[_Blame]:
        """Return who explains bad directions: a machine if all of its directions are bad, else a pair.

        Args:
            bad: The bad directions.
            known: All directions. By default, those that were measured.
        """
        known, left, found = self.ways if known is None else known, set(bad), list[_Blame]()
        if len(self.machines) > 2:
            mine: dict[int, frozenset[Direction]] = {}
            for machine in range(len(self.machines)):
                both = [{way for way in known if way[end] == machine} for end in (0, 1)]
                mine[machine] = frozenset(way for ways in both if len(ways) > 1 and ways <= left for way in ways)
            for machine in sorted(mine, key=lambda each: -len(mine[each])):
                if mine[machine] and mine[machine] <= left:
                    found.append(_Blame((machine,), mine[machine]))
                    left -= mine[machine]
        for pair in pairs_of(left):
            ways = frozenset(way for way in left if set(way) == set(pair))
            found.append(_Blame(pair if len(ways) > 1 else min(ways), ways))
        return found

    def hints(self, machine: int, other: int) -> list[str]:
        """Return what a machine itself says that is wrong with its end of a cable, and right with the other end."""
        mine, theirs = self.interface(machine, other), self.interface(other, machine)
        found = {
            f"runs at {mine['megabits']} Mbit/s": 0 < (mine["megabits"] or 0) < (theirs["megabits"] or 0),
            "is at half duplex": mine["duplex"] == "half",
            "is Wi-Fi": mine["wireless"] and not theirs["wireless"],
        }
        return [f"{self.names[machine]}: {mine['name']} {text}" for text, holds in found.items() if holds]

    def on_cable(self, key: str, blame: _Blame, repaired: float | None, **words: Any) -> Finding:
        """Return a finding about directions, which it explains. Of a pair, the machine is named that says so itself."""
        self.explained |= {way for at in blame.ways for way in (at, turned(at))}
        ways, first = sorted(blame.ways), min(blame.ways)
        carried = [self.ways[way]["together"] or self.ways[way]["alone"] for way in ways]
        evidence = [
            f"{self.text(way)}: {format_rate(self.ways[way]['alone'])}, expected {format_rate(self.expected(way))}"
            + (f"; {format_rate(rate)} while the other direction is in use" if key == "half duplex" else "")
            for way, rate in zip(ways, carried, strict=True)
        ]
        hints = dict.fromkeys(hint for way in ways for end in (way, turned(way)) for hint in self.hints(*end))
        machine, *others = blame.machines
        device = self.interface(machine, next(end for end in first if end != machine))["name"]
        hinting = [at for at in blame.machines if others and self.hints(at, sum(first) - at)]
        if others:
            where = self.text(first).replace("→", "↔" if blame.both_ways else "→")
        else:
            side = "" if blame.both_ways else "sending " if first[0] == machine else "receiving "
            where = f"the {side}{'side of the ' if side else ''}cable of {self.names[machine]} ({device})"
        words |= {"device": device, "target": self.machines[first[1]]["address"]}
        facts = {"pairs": pairs_of(ways), "rate": min(carried), "repaired": repaired}
        names = [self.names[at] for at in (hinting if len(hinting) == 1 else blame.machines)]
        return finding(key, names, where, [*evidence, *hints], facts=facts, **words)

    def exports(self, machine: int, name: str | None = None) -> str:
        """Return the line that names the interface of a machine: `name`, or that with which it is reached."""
        others = (self.interface(machine, other)["name"] for other in range(len(self.machines)) if other != machine)
        name = name or next((each for each in others if each != "lo"), "eth0")
        return f"{self.names[machine]}: export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"


# Who reaches whom -----------------------------------------------------------------------------------------------------


def _absent(case: _Case) -> Iterator[Finding]:
    for each in case.facts["absent"]:
        if each["state"] is None:  # a launcher has started it, so it does not reach the port of the leader
            where = f"{each['name']} → {case.names[0]}"
            yield finding("firewall, leader", case.names[:1], where, other=each["name"], port=case.facts["port"])
        else:
            key = "absent, no address" if each["state"] == "no address" else "absent"
            yield finding(key, [each["name"]], each["name"], state=each["state"], leader=case.names[0])
    for each in case.facts["lost"]:
        # A machine that was lost at the first question is not among the machines.
        named = (m["name"] for m in case.machines if each["rank"] in [rank["rank"] for rank in m["ranks"]])
        of = next(named, each.get("host", "?"))
        yield finding("lost", [of], f"rank {each['rank']} on {of}", [f"it was asked for: {each['asked']}"])


def _names(case: _Case) -> Iterator[Finding]:
    """Find machines whose gloo listens where no other machine reaches it, because of their name or a variable."""
    for machine, told in enumerate(case.machines if len(case.machines) > 1 else ()):
        name, gloo = case.names[machine], told["gloo"]
        words = {"exports": case.exports(machine), "host": told["host"], "address": told["address"]}
        if gloo["why"].startswith("the host name") and is_loopback(gloo["address"]):
            evidence = [f"gloo listens at {gloo['address']}, by {gloo['why']}"]
            yield finding("hosts entry", [name], f"/etc/hosts of {name}", evidence, listens=gloo["address"], **words)
        if told["training"]["address"] is None:
            there = "it has " + ", ".join(each["name"] for each in told["interfaces"])
            yield finding("variable", [name], f"{told['training']['why']} on {name}", [there], **words)


def _unreachable(case: _Case) -> Iterator[Finding]:
    """Find directions in which no connection is made at all, and addresses for training that others do not reach."""
    dead = {way for way, tried in case.reach.items() if tried and all(each["state"] != "open" for each in tried)}
    for blame in case.blame(dead, case.reach):
        way, both = min(blame.ways), blame.both_ways and len(blame.machines) > 1
        state = mode([each["state"] for each in case.reach[way] if each["state"] != "own"] or ["own"])
        here = state in ("forbidden here", "no route")
        guilty = blame.machines if both or len(blame.machines) == 1 else (way[0] if here else way[1],)
        sender, receiver = (case.names[end] for end in way)
        how = "neither can connect to the other" if both else f"{receiver} can connect to {sender}"
        address, target = (case.machines[end]["address"] for end in way)
        words = {"sender": sender, "receiver": receiver, "state": state, "how": how, "address": address}
        where = ", ".join(f"{case.names[a]} → {case.names[b]}" for a, b in sorted(blame.ways))
        evidence = [f"{sender} → {each['address']}: {each['state']}" for each in case.reach[way]]
        names, key = [case.names[machine] for machine in guilty], "firewall, here" if here else "firewall"
        facts = {"pairs": pairs_of(blame.ways)}
        yield finding(key, names, where, evidence, facts=facts, target=target, **words)
        case.explained |= {at for each in blame.ways for at in (each, turned(each))}
    for machine, told in enumerate(case.machines):
        used, name = told["training"], case.names[machine]
        # The first address is that for training. Nothing was tried if the other machine was lost.
        tried = {way: each[0]["state"] for way, each in case.reach.items() if each and way[1] == machine}
        failed = {way: state for way, state in tried.items() if state != "open" and way not in dead}
        if failed and used["address"] and not is_loopback(used["address"]) and "own" not in failed.values():
            evidence = [
                f"{name} chooses it by {used['why']}",
                *(f"{case.names[a]}: {s}" for (a, _), s in failed.items()),
            ]
            where, facts = f"{name} {used['interface']}", {"pairs": pairs_of(failed)}
            words = {"address": used["address"], "exports": case.exports(machine)}
            yield finding("interface, unreachable", [name], where, evidence, facts=facts, **words)


def _shared_addresses(case: _Case) -> Iterator[Finding]:
    """Find addresses that several machines have, as those of container bridges."""
    owners: dict[str, list[tuple[int, str]]] = {}
    for machine, told in enumerate(case.machines):
        for each in told["interfaces"]:
            for address in filter(is_usable, each["addresses"]):
                owners.setdefault(address, []).append((machine, each["name"]))
    for address, shared in owners.items():
        machines = sorted({machine for machine, _ in shared})
        told = [case.machines[machine] for machine in machines]
        users = [each for each in told if each["training"]["address"] == address]
        named = all("SOCKET_IFNAME" in each["training"]["why"] for each in told)
        if len(machines) > 1 and (users or not named):
            yield finding(
                "shared address" if users else "shared address, unused",
                [case.names[machine] for machine in machines],
                ", ".join(f"{case.names[machine]} {interface}" for machine, interface in shared),
                [f"training would use it on {each['name']}, by {each['training']['why']}" for each in users],
                address=address,
                exports="\n".join(map(case.exports, machines)),
            )


# What paths carry -----------------------------------------------------------------------------------------------------


def _packets(case: _Case) -> Iterator[Finding]:
    """Find paths that lose large packets without a word, and MTUs that differ."""
    holes = [way for way, told in case.ways.items() if told["stalls"]]
    for blame in case.blame(holes):
        sizes = [case.ways[way]["packet"] for way in blame.ways if case.ways[way]["packet"]]
        mtu = case.ways[min(blame.ways)]["mtu"]
        rate = min(case.ways[way]["alone"] for way in blame.ways) or None
        yield case.on_cable("mtu", blame, rate, passes=min(sizes, default=1280), mtu=mtu)
    used = {at: case.interface(at, to) for at, to in case.ways}
    usual = mode([of["mtu"] for of in used.values()] or [None])
    odd = [machine for machine, of in used.items() if of["mtu"] != usual and not holes]
    if odd:
        evidence = [f"{case.names[machine]} {of['name']}: {of['mtu']} bytes" for machine, of in sorted(used.items())]
        where = ", ".join(f"{case.names[machine]} {used[machine]['name']}" for machine in odd)
        names = [case.names[machine] for machine in odd]
        yield finding("mtu, differs", names, where, evidence, device=used[odd[0]]["name"], usual=usual)


def _losses(case: _Case) -> Iterator[Finding]:
    """Find paths that lose packets while they are almost idle."""
    shares = {way: told.get("loss") or 0.0 for way, told in case.ways.items()}
    bad = [
        way for way, share in shares.items() if share >= _LOST_SHARE and share * case.ways[way]["datagrams"] >= _LOST
    ]
    healthy = [case.ways[way]["together"] for way in case.ways if way not in bad]
    for blame in case.blame(bad):
        yield case.on_cable("loss", blame, max(healthy, default=None), share=max(shares[way] for way in blame.ways))


def _interfaces(case: _Case) -> Iterator[Finding]:
    """Find machines that are reached faster over another interface than the one that training uses."""
    # By the interface in use and the faster one: the directions, with both rates.
    better: dict[tuple[str, str], list[tuple[Direction, float, float]]] = {}
    for way, told in case.ways.items():
        if told["others"] and way not in case.explained:
            used, best = told["others"][0], max(told["others"], key=lambda each: each["rate"])
            if used["rate"] <= case.limit(way) and best["rate"] > _FASTER_WAY * used["rate"]:
                key = used["interface"], best["interface"]
                better.setdefault(key, []).append((way, used["rate"], best["rate"]))
    for (now, name), found in better.items():
        case.explained |= {at for way, *_ in found for at in (way, turned(way))}
        machines = sorted({receiver for (_, receiver), *_ in found})
        names, (_, slow, fast) = [case.names[at] for at in machines], min(found, key=lambda each: each[1])
        evidence = [
            *(f"{case.text(way)}: {format_rate(a)} to {now}, {format_rate(b)} to {name}" for way, a, b in found),
            *(f"{now} is chosen by {case.machines[at]['training']['why']}" for at in machines),
        ]
        exports = "\n".join(case.exports(at, name) for at in machines)
        facts = {"pairs": pairs_of(way for way, *_ in found), "rate": slow, "repaired": fast}
        words = {"now": now, "name": name, "times": fast / max(slow, 1.0), "exports": exports}
        yield finding("interface", names, f"{' and '.join(names)} {now}", evidence, facts=facts, **words)


def _cables(case: _Case) -> Iterator[Finding]:
    """Find cables, directions and pairs that carry less than they should."""
    alone = {way: told["alone"] for way, told in case.ways.items() if way not in case.explained}
    for blame in case.blame([way for way, rate in alone.items() if rate < _SLOW * case.expected(way)]):
        key = "slow cable" if blame.both_ways else "asymmetric rate"
        if len(case.machines) > 2 and len(blame.machines) > 1:
            key = "slow pair"
        usual, slow = min(map(case.expected, blame.ways)), min(alone[way] for way in blame.ways)
        yield case.on_cable(key, blame, usual, slow=format_rate(slow), usual=format_rate(usual))


def _duplex(case: _Case) -> Iterator[Finding]:
    """Find pairs whose directions share what one of them carries alone."""
    bad: set[Direction] = set()
    for way in case.ways.keys() - case.explained:
        both = [case.ways[way], case.ways.get(turned(way), case.ways[way])]
        alone, together = (sum(each[kind] for each in both) for kind in ("alone", "together"))
        if together < _HALF_DUPLEX * alone < _HALF_DUPLEX * 2 * case.limit(way):
            bad.add(way)
    for blame in case.blame(bad):
        yield case.on_cable("half duplex", blame, min(case.ways[way]["alone"] for way in blame.ways))


# Machines and ranks ---------------------------------------------------------------------------------------------------


def _ranks(case: _Case) -> Iterator[Finding]:
    """Find ranks that compute or copy slower than the others."""
    every = [
        (machine, rank["rank"], device)
        for machine in case.machines
        for rank in machine["ranks"]
        for device in rank["devices"]
    ]
    usual = {key: median_high(device[key] for *_, device in every) for key in ("flops", "copied") if every}
    slow: dict[str, list[tuple[Any, int, Any]]] = {}
    for machine, rank, device in every:
        if device["flops"] < _SLOW_RANK * usual["flops"] or device["copied"] < _SLOW_COPIES * usual["copied"]:
            slow.setdefault(machine["name"], []).append((machine, rank, device))
    for name, found in slow.items():
        machine, _, worst = min(found, key=lambda each: each[2]["flops"])
        evidence = [
            *(f"{key}: {worst[key] / 1e9:.4g} · 10⁹ a second, others {usual[key] / 1e9:.4g}" for key in usual),
            f"{worst['device']}, {worst['threads']} threads, load {machine['load']:.1f}",
        ]
        where = f"rank {', '.join(str(rank) for _, rank, _ in found)} on {name}"
        facts, share = {"flops": worst["flops"]}, worst["flops"] / usual["flops"]
        yield finding("slow rank", [name], where, evidence, facts=facts, share=share)


def _differences(case: _Case) -> Iterator[Finding]:
    """Find versions and variables that are not the same on all machines."""
    for kind in ("versions", "environment"):
        told = [machine[kind] for machine in case.machines]
        for name in sorted({name for each in told for name in each if not any(word in name for word in _OWN)}):
            values = {machine: each.get(name) for machine, each in zip(case.names, told, strict=True)}
            usual = mode(values.values())
            if odd := [machine for machine, value in values.items() if value != usual]:
                lines = [f"{machine}: {value or 'not there'}" for machine, value in values.items()]
                key = "environment" if kind == "environment" else "version, driver" if name == "driver" else "version"
                yield finding(key, odd, f"{name} on {', '.join(odd)}", lines, name=name, version=usual)


def _clocks(case: _Case) -> Iterator[Finding]:
    for machine in case.machines:
        if abs(machine["clock"]) > _CLOCK_SECONDS:
            yield finding("clock", [machine["name"]], f"the clock of {machine['name']}", ahead=machine["clock"])
