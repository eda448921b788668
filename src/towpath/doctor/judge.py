"""From the facts of an examination to what is wrong. A pure function: facts of another day give the same answer.

A cable is judged against the rate that it says itself, where it says one, else against the other machines, and with two
machines against the other direction. What one finding explains is not found again: a path that loses packets is slow, but
not because of its cable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from towpath.doctor.findings import Finding, Severity
from towpath.doctor.interfaces import is_usable, plain

Direction = tuple[int, int]

_PAYLOAD = 0.94  # of the rate of a cable, after the headers of Ethernet, IP and TCP
_SLOW, _SLOW_RANK, _FASTER_WAY = 0.75, 0.7, 1.4
_HALF_DUPLEX = 0.7  # of what both directions carry alone, while both are in use
# Sockets of Python reach so much of what they reach on a loopback. Faster cables are not tested to their limit.
_OF_LOOPBACK = 0.4
_LOST, _LOST_SHARE = 4, 0.003
_CLOCK_SECONDS = 2.0
_SLOW_COPIES = 0.5
# By the beginning of its name, what a difference in a version does.
_VERSIONS = {"towpath": Severity.BLOCKS, "torch": Severity.BLOCKS, "nvidia-nccl": Severity.BLOCKS, "driver": Severity.RISK}
_SHARED_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_OWN_VARIABLES = ("IFNAME", "HCA", "HOSTID", "TOPO", "GRAPH", "DEBUG")


def judge(facts: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong, what ends training first, and of what slows it the slowest cable first."""
    case = _Case(facts)
    checks: Sequence[Callable[[_Case], Iterator[Finding]]] = (
        _absent,
        _names,
        _unreachable,
        _shared_addresses,
        _packets,
        _losses,
        _interfaces,
        _cables,
        _duplex,
        _ranks,
        _versions,
        _variables,
        _clocks,
    )
    found = [finding for check in checks for finding in check(case)]
    order = list(Severity)
    return sorted(found, key=lambda each: (order.index(each.severity), each.rate or 0.0))


def per_second(rate: float) -> str:
    """Return a rate in bytes per second as text in bits."""
    return f"{rate * 8 / 1e9:.3g} Gbit/s" if rate >= 1.25e8 else f"{rate * 8 / 1e6:.3g} Mbit/s"


@dataclass(frozen=True)
class _Blame:
    """Who is behind some directions: a machine that sends, receives, or both, or else a pair of machines."""

    machines: tuple[int, ...]
    directions: frozenset[Direction]

    @property
    def both_ways(self) -> bool:
        """Whether directions are bad both from and to the machines."""
        return any((b, a) in self.directions for a, b in self.directions)

    @property
    def sends(self) -> bool:
        """Whether the first machine is the one that sends."""
        return all(a == self.machines[0] for a, _ in self.directions)


class _Case:
    """The facts, by machine, direction and pair."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.machines: list[dict[str, Any]] = facts["machines"]
        self.names = [machine["name"] for machine in self.machines]
        self.ways: dict[Direction, dict[str, Any]] = {}
        self.reach: dict[Direction, list[dict[str, Any]]] = {}
        for pair in facts["pairs"]:
            a, b = pair["machines"]
            self.reach[a, b], self.reach[b, a] = pair["reach"]
            for way, told in (((a, b), pair["out"]), ((b, a), pair["back"])):
                if told:
                    self.ways[way] = told
        self.explained: set[Direction] = set()  # directions that a finding has explained
        self.expected = self._expected()

    def text(self, way: Direction) -> str:
        """Return a direction with the interfaces at both ends, such as "node0 eth0 → node1 eth0"."""
        ends = [self.interface(way[0], way[1]), self.interface(way[1], way[0])]
        return " → ".join(f"{self.names[at]} {of['name']}" if of else self.names[at] for at, of in zip(way, ends))

    def interface(self, machine: int, other: int) -> dict[str, Any] | None:
        """Return the interface over which a machine reaches another one."""
        used = next((each for each in self.reach.get((machine, other), []) if each["state"] == "open"), None)
        if used is None:  # only the other one connects: the interface with the address that it found
            found = next((each for each in self.reach.get((other, machine), []) if each["state"] == "open"), None)
            return None if found is None else self.with_address(machine, found["address"])
        return next((each for each in self.machines[machine]["interfaces"] if each["name"] == used["interface"]), None)

    def with_address(self, machine: int, address: str | None) -> dict[str, Any] | None:
        """Return the interface of a machine that has an address."""
        interfaces = self.machines[machine]["interfaces"]
        return next((each for each in interfaces if address in map(plain, each["addresses"])), None)

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
        for a, b in sorted({(min(way), max(way)) for way in left}):
            ways = frozenset(way for way in left if set(way) == {a, b})
            found.append(_Blame((a, b) if len(ways) > 1 else next(iter(ways)), ways))
        return found

    def named(self, blame: _Blame) -> tuple[str, ...]:
        """Return the names of who is to blame. Of two machines, it is the one that says so itself."""
        machines = blame.machines
        if len(machines) == 2:
            hints = [self.hints(machine, other) for machine, other in (machines, machines[::-1])]
            if bool(hints[0]) != bool(hints[1]):
                machines = (machines[0],) if hints[0] else (machines[1],)
        return tuple(self.names[machine] for machine in machines)

    def hints(self, machine: int, other: int) -> list[str]:
        """Return what a machine itself says that is wrong with its end of a cable."""
        mine, theirs = self.interface(machine, other), self.interface(other, machine)
        if mine is None:
            return []
        name, found = f"{self.names[machine]}: {mine['name']}", list[str]()
        if mine["megabits"] and theirs and theirs["megabits"] and mine["megabits"] < theirs["megabits"]:
            found.append(f"{name} runs at {mine['megabits']} Mbit/s, and {theirs['name']} at {theirs['megabits']}")
        if mine["duplex"] == "half":
            found.append(f"{name} is at half duplex")
        own = self.machines[machine]["shapers"].get(mine["name"])
        its = self.machines[other]["shapers"].get(theirs["name"]) if theirs else None
        if own and (its is None or own < _SLOW * its):
            found.append(f"{name} has a queue that limits what it sends to {per_second(own)} (tc qdisc)")
        if mine["wireless"] and not (theirs and theirs["wireless"]):
            found.append(f"{name} is Wi-Fi")
        bad = {what: count for what, count in mine["counters"].items() if "errors" in what or what == "collisions"}
        if bad and not (theirs and set(bad) & set(theirs["counters"])):
            found.append(f"{name} counts {', '.join(f'{count} {what}' for what, count in bad.items())}")
        return found

    def evidence(self, blame: _Blame) -> list[str]:
        """Return the rates of the directions, and what the machines say themselves."""
        found = [
            f"{self.text(way)}: {per_second(self.ways[way].get('alone') or 0)}, expected {per_second(self.expected[way])}"
            for way in sorted(blame.directions)
            if self.expected.get(way)
        ]
        ends = {end for way in blame.directions for end in (way, way[::-1])} if len(blame.machines) > 1 else {
            (blame.machines[0], other) for way in blame.directions for other in way if other != blame.machines[0]
        }
        return [*found, *dict.fromkeys(hint for end in sorted(ends) for hint in self.hints(*end))]

    def limit(self, way: Direction) -> float:
        """Return the bytes per second up to which a direction is tested."""
        return _OF_LOOPBACK * min(self.machines[end]["loopback"] for end in way)

    def _expected(self) -> dict[Direction, float]:
        """Return the bytes per second that each direction should carry, as far as there is something to compare with."""
        alone = {way: told.get("alone") or 0.0 for way, told in self.ways.items()}
        ends = range(len(self.machines))
        best = sorted(
            max((rate for way, rate in alone.items() if way[end] == machine), default=0.0)
            for machine in ends
            for end in (0, 1)
        )
        found: dict[Direction, float] = {}
        for way in self.ways:
            sides = [(way[0], self.interface(*way)), (way[1], self.interface(*way[::-1]))]
            speeds = [of["megabits"] for _, of in sides if of is not None and of["megabits"]]
            shapers = [self.machines[at]["shapers"].get(of["name"]) for at, of in sides if of is not None]
            if len(speeds) == 2:
                rate = _PAYLOAD * min(speeds) * 1e6 / 8
            elif len(self.machines) == 2 and len(shapers) == 2 and all(shapers):
                rate = _PAYLOAD * max(each for each in shapers if each)
            else:
                rate = best[len(best) // 2]
            found[way] = min(rate, self.limit(way))
        return found


# Who is there ---------------------------------------------------------------------------------------------------------


def _absent(case: _Case) -> Iterator[Finding]:
    reasons = {
        "refused": "it answers, but nothing listens at the port. Start the same command there, with the same hosts",
        "silent": "it does not answer: it is off, its cable is unplugged, or a firewall drops packets",
        "no answer from the host": "no machine with this address is in the network of this one",
        "no route": "there is no route to it. Connect both to one network",
    }
    for each in case.facts["absent"]:
        yield Finding(
            cause="absent",
            severity=Severity.BLOCKS,
            machines=(each["name"],),
            where=each["name"],
            summary=f"{each['name']} did not come",
            evidence=(f"connecting to it from {case.names[0]}: {each['state']}",),
            remedy=(f"{each['name']}: {reasons.get(each['state'], 'see what it printed')}",),
        )
    for each in case.facts["lost"]:
        of = next((m["name"] for m in case.machines if each["rank"] in [r["rank"] for r in m["ranks"]]), "?")
        yield Finding(
            cause="lost",
            severity=Severity.BLOCKS,
            machines=(of,),
            where=f"rank {each['rank']} on {of}",
            summary=f"rank {each['rank']} on {of} came, and then stopped answering",
            evidence=(f"it was asked for: {each['asked']}",),
            remedy=(f"See what it printed. If it runs, the path to {case.names[0]} breaks under load",),
        )


def _is_loopback(address: str | None) -> bool:
    return address is not None and ip_address(address).is_loopback


def _exports(case: _Case, machine: int, name: str | None = None) -> str:
    """Return the line that names the interface of a machine: `name`, or that with which it is reached."""
    others = (case.interface(machine, other) for other in range(len(case.machines)) if other != machine)
    name = name or next((of["name"] for of in others if of and not of["loopback"]), "eth0")
    return f"{case.names[machine]}: export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"


def _names(case: _Case) -> Iterator[Finding]:
    """Find machines whose gloo listens where no other machine reaches it, because of their name or a variable."""
    if len(case.machines) < 2:
        return
    for machine, told in enumerate(case.machines):
        name, host, gloo = case.names[machine], told["host"], told["gloo"]
        by_name = gloo["why"].startswith("the host name")
        stands_for = ", ".join(told["names"]) or "no address"
        if (by_name and _is_loopback(gloo["address"])) or (told["names"] and _is_loopback(told["names"][0])):
            yield Finding(
                cause="hosts entry",
                severity=Severity.BLOCKS if by_name else Severity.RISK,
                machines=(name,),
                where=f"/etc/hosts of {name}",
                summary=f"{name}'s own name stands for {stands_for}, where no other machine reaches it",
                evidence=(
                    f"gloo listens at {gloo['address']}, by {gloo['why']}",
                    *([] if by_name else ["torchrun with --rdzv-endpoint announces the name to the others"]),
                ),
                remedy=(
                    f"{name}: sudo sed -i 's/^127\\.0\\.[01]\\.1.*{host}.*/{told['address']} {host}/' /etc/hosts",
                    f"or {_exports(case, machine)}",
                ),
            )
        for library in ("gloo", "nccl") if told["on_gpus"] else ("gloo",):
            if told[library]["address"] is None:
                there = ", ".join(each["name"] for each in told["interfaces"])
                yield Finding(
                    cause="variable",
                    severity=Severity.BLOCKS,
                    machines=(name,),
                    where=f"{told[library]['why']} on {name}",
                    summary=f"{told[library]['why']} names no interface of {name} with an address",
                    evidence=(f"it has {there}",),
                    remedy=(_exports(case, machine),),
                )


def _unreachable(case: _Case) -> Iterator[Finding]:
    """Find directions in which no connection is made at all, and addresses for training that others do not reach."""
    dead = {way for way, tried in case.reach.items() if tried and all(each["state"] != "open" for each in tried)}
    for blame in case.blame(dead, case.reach):
        way = sorted(blame.directions)[0]
        states = Counter(each["state"] for at in blame.directions for each in case.reach[at] if each["state"] != "own")
        state = states.most_common(1)[0][0] if states else "own"
        here = state in ("forbidden here", "no route")
        both = blame.both_ways
        if len(blame.machines) == 1:
            machines = (blame.machines[0],)
        else:  # the one that takes no connections comes first, unless the other does not even send
            machines = way if here or both else way[::-1]
        guilty, other = machines[0], way[0] if way[0] != machines[0] else way[1]
        address = case.machines[way[0]]["address"]
        how = "neither can connect to the other" if both else f"only {case.names[way[1]]} can connect to the other"
        if here:
            remedy = f"{case.names[guilty]}: see `ip route get {case.machines[other]['address']}`, and `ip rule`"
        else:
            allowed = f"sudo ufw allow from {address}`, or `sudo iptables -I INPUT -s {address} -j ACCEPT"
            remedy = f"{case.names[guilty]}: `{allowed}`. Training needs all ports"
        yield Finding(
            cause="firewall",
            severity=Severity.BLOCKS,
            machines=tuple(case.names[machine] for machine in (machines if both or len(machines) == 1 else machines[:1])),
            where=" and ".join(f"{case.names[a]} → {case.names[b]}" for a, b in sorted(blame.directions)),
            summary=f"{case.names[way[1]]} takes no connections of {case.names[way[0]]}: {state}; {how}",
            evidence=tuple(f"{case.names[way[0]]} → {each['address']}: {each['state']}" for each in case.reach[way]),
            remedy=(remedy,),
            pairs=tuple(sorted({(min(at), max(at)) for at in blame.directions})),
        )
        case.explained |= blame.directions | {at[::-1] for at in blame.directions}
    for machine, told in enumerate(case.machines):
        address = told["training"]["address"]
        tried = {at[0]: case.reach[at][0] for at in case.reach if at[1] == machine and case.reach[at] and at not in dead}
        failed = {other: each["state"] for other, each in tried.items() if each["state"] != "open"}
        if not failed or address is None or _is_loopback(address) or "own" in failed.values():
            continue
        name = case.names[machine]
        yield Finding(
            cause="interface",
            severity=Severity.BLOCKS,
            machines=(name,),
            where=f"{name} {told['training']['interface']}",
            summary=f"training would use {address} of {name}, which others do not reach",
            evidence=(
                f"{name} chooses it by {told['training']['why']}",
                *(f"{case.names[other]} → {address}: {state}" for other, state in failed.items()),
            ),
            remedy=(_exports(case, machine),),
            pairs=tuple(sorted((min(machine, other), max(machine, other)) for other in failed)),
        )


def _shared_addresses(case: _Case) -> Iterator[Finding]:
    """Find addresses that several machines have, as those of container bridges."""
    owners: dict[str, list[tuple[int, str]]] = {}
    for machine, told in enumerate(case.machines):
        for each in told["interfaces"]:
            for address in map(plain, each["addresses"]):
                if is_usable(address):
                    owners.setdefault(address, []).append((machine, each["name"]))
    for address, shared in owners.items():
        if len({machine for machine, _ in shared}) < 2:
            continue
        users = [machine for machine, _ in shared if case.machines[machine]["training"]["address"] == address]
        variables = ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if case.machines[0]["on_gpus"] else []))
        named = all(case.machines[m]["environment"].get(each) for m, _ in shared for each in variables)
        if named and not users:
            continue
        names = tuple(case.names[machine] for machine, _ in shared)
        yield Finding(
            cause="shared address",
            severity=Severity.BLOCKS if users else Severity.RISK,
            machines=names,
            where=", ".join(f"{case.names[machine]} {interface}" for machine, interface in shared),
            summary=f"{' and '.join(names)} both have the address {address}, so what is sent there never leaves them",
            evidence=tuple(
                f"training would use it on {case.names[machine]}, by {case.machines[machine]['training']['why']}"
                for machine in users
            )
            or ("it is a bridge of containers, or an address that was copied; training does not choose it now",),
            remedy=tuple(_exports(case, machine) for machine, _ in shared),
        )


# What paths carry -----------------------------------------------------------------------------------------------------


def _pairs_of(blame: _Blame) -> tuple[Direction, ...]:
    return tuple(sorted({(min(way), max(way)) for way in blame.directions}))


def _place(case: _Case, blame: _Blame) -> str:
    """Return the words for where directions are bad."""
    if len(blame.machines) == 1:
        machine = blame.machines[0]
        other = next(end for way in blame.directions for end in way if end != machine)
        of = case.interface(machine, other)
        what = "" if blame.both_ways else "what it sends, " if blame.sends else "what it receives, "
        return f"{what}the cable of {case.names[machine]}" + (f" ({of['name']})" if of else "")
    text = case.text(sorted(blame.directions)[0])
    return text.replace("→", "↔") if blame.both_ways else text


def _slowest(case: _Case, blame: _Blame) -> float:
    told = [case.ways[way] for way in blame.directions]
    return min(each.get("together") or each.get("alone") or 0.0 for each in told)


def _packets(case: _Case) -> Iterator[Finding]:
    """Find paths that lose large packets without a word, and MTUs that differ."""
    holes = {
        way
        for way, told in case.ways.items()
        if told.get("stalls") and (told.get("packet") is None or told["packet"] < told["mtu"])
    }
    for blame in case.blame(holes):
        way = sorted(blame.directions)[0]
        sizes = [case.ways[at]["packet"] for at in blame.directions if case.ways[at].get("packet")]
        mtu, passes = case.ways[way]["mtu"], min(sizes, default=None)
        of = case.interface(*way)
        place, device = _place(case, blame), of["name"] if of else "eth0"
        yield Finding(
            cause="mtu",
            severity=Severity.BLOCKS,
            machines=case.named(blame),
            where=place,
            summary=f"{place} loses packets above {passes or '?'} bytes, and the interfaces send {mtu}",
            evidence=tuple(
                f"{case.text(at)}: small messages pass, 96 KiB at once do not; largest packet {case.ways[at]['packet']}"
                for at in sorted(blame.directions)
            ),
            remedy=(f"on all machines: sudo ip link set {device} mtu {passes or 1280}",),
            pairs=_pairs_of(blame),
            repaired=_slowest(case, blame) or None,
        )
        case.explained |= {at for way in blame.directions for at in (way, way[::-1])}
    used = {
        machine: of
        for machine in range(len(case.machines))
        for other in range(len(case.machines))
        if other != machine and (of := case.interface(machine, other)) is not None
    }
    usual = _usual([of["mtu"] for of in used.values()])
    odd = [machine for machine, of in used.items() if of["mtu"] != usual]
    if odd and not holes:
        yield Finding(
            cause="mtu",
            severity=Severity.RISK,
            machines=tuple(case.names[machine] for machine in odd),
            where=", ".join(f"{case.names[machine]} {used[machine]['name']}" for machine in odd),
            summary="the MTU of the interfaces differs: TCP adapts, and RDMA fails or hangs",
            evidence=tuple(f"{case.names[machine]} {of['name']}: {of['mtu']} bytes" for machine, of in used.items()),
            remedy=tuple(
                f"{case.names[machine]}: sudo ip link set {used[machine]['name']} mtu {usual}" for machine in odd
            ),
        )


def _usual(values: Sequence[Any]) -> Any:
    """Return the most frequent value. Of equally frequent ones, it is the first."""
    return Counter(values).most_common(1)[0][0] if values else None


def _losses(case: _Case) -> Iterator[Finding]:
    """Find paths that lose packets while they are almost idle."""
    bad = {
        way
        for way, told in case.ways.items()
        if (told.get("loss") or 0.0) >= _LOST_SHARE and told["loss"] * told["datagrams"] >= _LOST
    }
    for blame in case.blame(bad):
        share = max(case.ways[way]["loss"] for way in blame.directions)
        healthy = [case.ways[way]["together"] for way in case.ways if way not in bad and case.ways[way].get("together")]
        place = _place(case, blame)
        yield Finding(
            cause="loss",
            severity=Severity.SLOWS,
            machines=case.named(blame),
            where=place,
            summary=f"{place} loses {share:.1%} of packets",
            evidence=(
                *(
                    f"{case.text(way)}: {told['loss']:.2%} of {told['datagrams']} small datagrams lost; TCP carries "
                    f"{per_second(told.get('alone') or 0)}"
                    for way in sorted(blame.directions)
                    if (told := case.ways[way])
                ),
                *(hint for way in blame.directions for hint in case.hints(*way)),
            ),
            remedy=(
                "Replace the cable or the transceiver, or try another port of the switch; over Wi-Fi, use a cable",
                f"{case.names[blame.machines[0]]}: `ip -s link` shows which counter of errors grows",
            ),
            pairs=_pairs_of(blame),
            rate=_slowest(case, blame),
            repaired=max(healthy, default=None),
        )
        case.explained |= {at for way in blame.directions for at in (way, way[::-1])}


def _interfaces(case: _Case) -> Iterator[Finding]:
    """Find machines that have a faster interface than the one that training uses."""
    better: dict[int, tuple[str, str, float, float, Direction]] = {}
    for pair in case.facts["pairs"]:
        for a, b in (tuple(pair["machines"]), tuple(pair["machines"][::-1])):
            tried = [each for each in pair["ways"] if (each["from"], each["to"]) == (a, b)]
            if not tried or (a, b) in case.explained:
                continue
            used, best = tried[0], max(tried, key=lambda each: each["rate"])
            if best["rate"] < _FASTER_WAY * used["rate"] or used["rate"] > case.limit((a, b)):
                continue
            # What is sent follows the address. So it is that of the receiver which is wrong, or else the sender's route.
            guilty = b if best["address"] != used["address"] else a
            of = case.with_address(b, best["address"])
            now = case.machines[b]["training"]["interface"] if guilty == b else used["interface"]
            name = best["interface"] if guilty == a else of["name"] if of else "?"
            better[guilty] = (now, name, used["rate"], best["rate"], (a, b))
            case.explained |= {(a, b), (b, a)}
    for machine, (now, name, slow, fast, way) in better.items():
        told, routed = case.machines[machine], machine == way[0]
        why = "the route" if routed else told["training"]["why"]
        yield Finding(
            cause="interface",
            severity=Severity.SLOWS,
            machines=(case.names[machine],),
            where=f"{case.names[machine]} {now}",
            summary=f"{case.names[machine]} uses {now}, and {name} is {fast / max(slow, 1.0):.1f} times as fast",
            evidence=(
                f"{case.names[way[0]]} → {case.names[way[1]]}: {per_second(slow)} over {now}, {per_second(fast)} over {name}",
                f"{now} is chosen by {why}",
            ),
            remedy=(
                f"{case.names[machine]}: sudo ip route replace {case.machines[way[1]]['address']} dev {name}"
                if routed
                else _exports(case, machine, name),
            ),
            pairs=((min(way), max(way)),),
            rate=slow,
            repaired=fast,
        )


def _cables(case: _Case) -> Iterator[Finding]:
    """Find cables, directions and pairs that carry less than they should."""
    alone = {way: told.get("alone") or 0.0 for way, told in case.ways.items() if way not in case.explained}
    expected = dict(case.expected)
    if len(case.machines) == 2 and len(alone) == 2:  # there is only the other direction
        expected = {way: min(max(expected[way], *alone.values()), case.limit(way)) for way in alone}
    bad = {way for way, rate in alone.items() if rate < _SLOW * expected[way]}
    for blame in case.blame(bad):
        two, one = len(case.machines) == 2, len(blame.machines) == 1
        cause = "slow cable" if blame.both_ways else "asymmetric rate"
        if not (two or one):
            cause = "slow pair"
        place = _place(case, blame)
        slow, usual = min(alone[way] for way in blame.directions), min(expected[way] for way in blame.directions)
        words = {
            "slow cable": f"{place} carries {per_second(slow)}, and should carry {per_second(usual)}",
            "asymmetric rate": f"{place}: {per_second(slow)}, and the other direction reaches {per_second(usual)}",
            "slow pair": f"{place} carries {per_second(slow)}, and the same machines reach {per_second(usual)} with others",
        }
        names = case.named(blame)
        case.expected = expected
        yield Finding(
            cause=cause,
            severity=Severity.SLOWS,
            machines=names,
            where=place,
            summary=words[cause],
            evidence=tuple(case.evidence(blame)),
            remedy=tuple(_cable_remedies(case, blame, cause)),
            pairs=_pairs_of(blame),
            rate=_slowest(case, blame),
            repaired=usual,
        )
        case.explained |= {at for way in blame.directions for at in (way, way[::-1])}


def _cable_remedies(case: _Case, blame: _Blame, cause: str) -> Iterator[str]:
    for machine in blame.machines:
        other = next(end for way in blame.directions for end in way if end != machine)
        of = case.interface(machine, other)
        if of is None:
            continue
        if case.machines[machine]["shapers"].get(of["name"]) and any("queue" in h for h in case.hints(machine, other)):
            yield f"{case.names[machine]}: sudo tc qdisc del dev {of['name']} root"
        yield f"{case.names[machine]}: `ethtool {of['name']}` shows the speed and duplex that were agreed on"
    if cause == "slow pair":
        yield "Others of these machines are fast, so look between the two: the ports of the switch, an uplink, a route"
    else:
        yield "Try another cable (category 5e or better for 1 Gbit/s), another port of the switch, another adapter"


def _duplex(case: _Case) -> Iterator[Finding]:
    """Find pairs whose directions share what one of them carries alone."""
    bad: set[Direction] = set()
    for a, b in {(min(way), max(way)) for way in case.ways}:
        both = [case.ways.get(way, {}) for way in ((a, b), (b, a))]
        alone, together = (sum(each.get(kind) or 0.0 for each in both) for kind in ("alone", "together"))
        tested = alone < 2 * case.limit((a, b))
        if not {(a, b), (b, a)} & case.explained and tested and together < _HALF_DUPLEX * alone:
            bad |= {(a, b), (b, a)}
    for blame in case.blame(bad):
        place = _place(case, blame)
        one = min(case.ways[way]["alone"] for way in blame.directions)
        yield Finding(
            cause="half duplex",
            severity=Severity.SLOWS,
            machines=case.named(blame),
            where=place,
            summary=f"{place} carries no more in both directions together than in one of them",
            evidence=(
                *(
                    f"{case.text(way)}: {per_second(case.ways[way]['alone'])} alone, "
                    f"{per_second(case.ways[way]['together'])} with the other direction"
                    for way in sorted(blame.directions)
                ),
                *dict.fromkeys(hint for way in sorted(blame.directions) for hint in case.hints(*way)),
            ),
            remedy=(
                "Set both ends to automatic negotiation: sudo ethtool -s INTERFACE autoneg on, and the switch too",
                "Wi-Fi and hubs are half duplex by nature: use a cable and a switch",
            ),
            pairs=_pairs_of(blame),
            rate=_slowest(case, blame),
            repaired=one,
        )


# Machines and ranks ---------------------------------------------------------------------------------------------------


def _ranks(case: _Case) -> Iterator[Finding]:
    """Find ranks that compute or copy slower than the others."""
    ranks = [
        (machine, rank["rank"], device)
        for machine, told in enumerate(case.machines)
        for rank in told["ranks"]
        for device in rank.get("devices", [])
    ]
    for machine, told in enumerate(case.machines):
        if mute := [rank["rank"] for rank in told["ranks"] if not rank.get("devices")]:
            yield Finding(
                cause="torch",
                severity=Severity.BLOCKS,
                machines=(case.names[machine],),
                where=f"rank {mute[0]} on {case.names[machine]}",
                summary=f"rank {mute[0]} on {case.names[machine]} did not compute",
                remedy=(f"{case.names[machine]}: python -c 'import torch; print(torch.ones(1) + 1)'",),
            )
    if len(ranks) < 2:
        return
    usual = {key: sorted(device[key] for *_, device in ranks)[len(ranks) // 2] for key in ("flops", "copied")}
    slow = [
        (machine, rank, device)
        for machine, rank, device in ranks
        if device["flops"] < _SLOW_RANK * usual["flops"] or device["copied"] < _SLOW_COPIES * usual["copied"]
    ]
    for machine in sorted({machine for machine, *_ in slow}):
        mine, told = [each for each in slow if each[0] == machine], case.machines[machine]
        numbers = ", ".join(str(rank) for _, rank, _ in mine)
        flops = min(device["flops"] for *_, device in mine)
        copied = min(device["copied"] for *_, device in mine)
        yield Finding(
            cause="slow rank",
            severity=Severity.SLOWS,
            machines=(case.names[machine],),
            where=f"rank {numbers} on {case.names[machine]}",
            summary=f"rank {numbers} on {case.names[machine]} computes at {flops / usual['flops']:.0%} of the others",
            evidence=(
                f"{flops / 1e9:.4g} GFLOP/s, others {usual['flops'] / 1e9:.4g}; copies {copied / 1e9:.3g} GB/s, others "
                f"{usual['copied'] / 1e9:.3g}",
                f"{mine[0][2]['device']}, {mine[0][2]['threads']} threads, {told['cores']} cores, load {told['load']:.1f}",
            ),
            remedy=(
                f"{case.names[machine]}: `top` (or `nvidia-smi`) shows other programs, heat and a limit of power",
                f"{case.names[machine]}: OMP_NUM_THREADS, and the limits of its container (cpu.max), as on the others",
            ),
            flops=flops,
        )


def _odd(case: _Case, values: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the machines that differ from most, or from the first if there is no majority."""
    usual = _usual(list(values.values()))
    return tuple(case.names[machine] for machine, value in values.items() if value != usual)


def _imported(machine: Mapping[str, Any]) -> dict[str, str]:
    found = sorted({rank["torch"] for rank in machine["ranks"] if rank.get("torch")})
    return {"torch, imported": ", ".join(found)} if found else {}


def _versions(case: _Case) -> Iterator[Finding]:
    told = [machine["versions"] | _imported(machine) for machine in case.machines]
    seen: set[tuple[str, ...]] = set()
    for package in sorted({package for each in told for package in each}, key=lambda name: (name.count(","), name)):
        severity = next((of for name, of in _VERSIONS.items() if package.startswith(name)), None)
        values = {machine: each.get(package) for machine, each in enumerate(told)}
        if severity is None or len(set(values.values())) < 2 or (odd := (package[:5], *_odd(case, values))) in seen:
            continue
        seen.add(odd)
        yield Finding(
            cause="version",
            severity=severity,
            machines=odd[1:],
            where=f"{package} on {', '.join(odd[1:])}",
            summary=f"{', '.join(odd[1:])} has another version of {package} than the others",
            evidence=tuple(f"{case.names[machine]}: {version}" for machine, version in values.items()),
            remedy=(f"Install one version on all machines: pip install '{package.split(',')[0]}=={values[0]}'",),
        )


def _variables(case: _Case) -> Iterator[Finding]:
    told = [machine["environment"] for machine in case.machines]
    for name in sorted({name for each in told for name in each}):
        values = {machine: each.get(name) for machine, each in enumerate(told)}
        own = any(word in name for word in _OWN_VARIABLES) and None not in values.values()
        if not name.startswith(_SHARED_VARIABLES) or own or len(set(values.values())) < 2:
            continue
        odd = _odd(case, values)
        yield Finding(
            cause="environment",
            severity=Severity.RISK,
            machines=odd,
            where=f"{name} on {', '.join(odd)}",
            summary=f"{name} is not the same on all machines",
            evidence=tuple(f"{case.names[machine]}: {value or 'not set'}" for machine, value in values.items()),
            remedy=(f"Set {name} to the same value on all machines, or on none",),
        )


def _clocks(case: _Case) -> Iterator[Finding]:
    for machine in case.machines:
        if abs(machine["clock"]) > _CLOCK_SECONDS:
            yield Finding(
                cause="clock",
                severity=Severity.RISK,
                machines=(machine["name"],),
                where=f"the clock of {machine['name']}",
                summary=f"the clock of {machine['name']} is {machine['clock']:+.1f} s from that of {case.names[0]}",
                remedy=(f"{machine['name']}: sudo timedatectl set-ntp true",),
            )
