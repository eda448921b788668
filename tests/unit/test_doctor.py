"""`towpath doctor` without a network: from facts to causes, what they cost, and how that is printed."""

from __future__ import annotations

import copy
import errno
import json
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from tests.cases import each
from towpath.cli import main
from towpath.cli.doctor import report
from towpath.doctor import examination
from towpath.doctor.examination import Examination, tournament
from towpath.doctor.findings import Severity
from towpath.doctor.gain import priced
from towpath.doctor.gathering import Leader, Place
from towpath.doctor.judge import judge
from towpath.doctor.services import rate_of
from towpath.errors import ConfigError
from towpath.plan.catalog import describe_model

Facts = dict[str, Any]

RATE = 25e6  # bytes per second of every cable


def cluster(machines: int, ranks: int = 1) -> Facts:
    """What an examination finds where nothing is wrong."""
    return {
        "version": 1,
        "seconds": 9.0,
        "machines": [_machine(number, ranks) for number in range(machines)],
        "ways": [_way(a, b) for a in range(machines) for b in range(machines) if a != b],
        "absent": [],
        "lost": [],
        "port": 29511,
    }


def _machine(number: int, ranks: int) -> Facts:
    address, name = f"10.77.0.{number + 1}", f"node{number}"
    used = {"interface": "eth0", "address": address, "why": f"the host name {name}"}
    return {
        "name": name,
        "host": name,
        "address": address,
        "first": number * ranks,
        "interfaces": [_interface("lo", "127.0.0.1"), _interface("eth0", address)],
        "gloo": used,
        "training": used,
        "versions": {"towpath": "0.2.0", "torch": "2.11.0"},
        "environment": {},
        "load": 0.4,
        "notes": [],
        "clock": 0.001,
        "loopback": 5e9,
        "services": [1, "token"],
        "ranks": [
            {
                "rank": number * ranks + local,
                "devices": [{"device": "cpu", "flops": 5e10, "copied": 4e9, "threads": 1}],
            }
            for local in range(ranks)
        ],
    }


def _interface(name: str, address: str, **more: Any) -> Facts:
    usual = {"mtu": 1500, "megabits": None, "duplex": None, "wireless": False}
    return usual | {"name": name, "addresses": [address]} | more


def _way(sender: int, receiver: int) -> Facts:
    reach = [{"address": f"10.77.0.{receiver + 1}", "interface": "eth0", "state": "open"}]
    way = {"from": sender, "to": receiver, "reach": reach, "others": [], "latency": 2e-4, "datagrams": 2000}
    return way | {
        "stalls": False,
        "packet": 1500,
        "mtu": 1500,
        "loss": 0.0,
        "alone": RATE,
        "together": 0.98 * RATE,
    }


def ways(facts: Facts, sender: int | None = None, receiver: int | None = None) -> list[Facts]:
    """The directions from and to machines, or from and to any."""
    return [way for way in facts["ways"] if sender in (None, way["from"]) and receiver in (None, way["to"])]


def slower(share: float, *of: list[Facts]) -> None:
    for way in (way for listed in of for way in listed):
        way |= {"alone": share * RATE, "together": share * RATE}


def _two_interfaces(facts: Facts) -> None:
    for machine in facts["machines"]:
        number = facts["machines"].index(machine)
        machine["interfaces"].append(_interface("wlan0", f"10.88.0.{number + 1}", wireless=True))
    chosen = {"interface": "wlan0", "address": "10.88.0.2", "why": "the host name node1"}
    facts["machines"][1] |= {"gloo": chosen, "training": chosen}
    slower(0.1, ways(facts))
    (way,) = ways(facts, receiver=1)
    way["reach"].insert(0, {"address": "10.88.0.2", "interface": "wlan0", "state": "open"})
    way["others"] = [{"interface": "wlan0", "rate": 0.1 * RATE}, {"interface": "eth0", "rate": RATE}]


def _firewall(facts: Facts) -> None:
    ways(facts, 0, 1)[0]["reach"][0]["state"] = "silent"


def _no_route(facts: Facts) -> None:
    ways(facts, 0, 1)[0]["reach"][0]["state"] = "forbidden here"


def _firewall_of_three(facts: Facts) -> None:
    for way in ways(facts, receiver=2):
        way["reach"][0]["state"] = "silent"


def _hole(facts: Facts) -> None:
    for way in ways(facts, receiver=1):
        way |= {"stalls": True, "packet": 1400}


def _hole_without_datagrams(facts: Facts) -> None:
    for way in ways(facts):
        way |= {"stalls": True, "packet": None}


def _other_mtu(facts: Facts) -> None:
    facts["machines"][1]["interfaces"][1]["mtu"] = 9000


def _halved(facts: Facts) -> None:
    slower(0.5, ways(facts, sender=2), ways(facts, receiver=2))


def _below_the_link(facts: Facts) -> None:
    for machine in facts["machines"]:
        machine["interfaces"][1]["megabits"] = 1000


def _gigabit_against_less(facts: Facts) -> None:
    facts["machines"][0]["interfaces"][1]["megabits"] = 1000
    facts["machines"][1]["interfaces"][1] |= {"megabits": 1000, "duplex": "half"}


def _asymmetric(facts: Facts) -> None:
    slower(0.4, ways(facts, sender=1))


def _half_duplex(facts: Facts) -> None:
    for way in [*ways(facts, sender=0), *ways(facts, receiver=0)]:
        way["together"] = RATE / 2


def _slow_rank(facts: Facts) -> None:
    facts["machines"][1]["ranks"][1]["devices"][0]["flops"] = 2e10


def _hosts_entry(facts: Facts) -> None:
    told = facts["machines"][1]
    chosen = {"interface": "lo", "address": "127.0.1.1", "why": "the host name node1"}
    told |= {"gloo": chosen, "training": chosen}
    ways(facts, 0, 1)[0]["reach"].insert(0, {"address": "127.0.1.1", "interface": None, "state": "own"})


def _bridge(facts: Facts) -> None:
    for machine in facts["machines"]:
        machine["interfaces"].append(_interface("docker0", "172.17.0.1"))


def _bridge_in_use(facts: Facts) -> None:
    _bridge(facts)
    chosen = {"interface": "docker0", "address": "172.17.0.1", "why": "the host name"}
    for machine in facts["machines"]:
        machine |= {"gloo": chosen, "training": chosen}
    for way in ways(facts):
        way["reach"].insert(0, {"address": "172.17.0.1", "interface": None, "state": "own"})


def _other_version(facts: Facts) -> None:
    facts["machines"][2]["versions"]["towpath"] = "0.1.0"


def _other_torch(facts: Facts) -> None:
    facts["machines"][1]["versions"]["torch"] = "2.12.0"


def _slow_pair(facts: Facts) -> None:
    slower(0.3, ways(facts, 0, 1), ways(facts, 1, 0))


def _loss(facts: Facts) -> None:
    for way in ways(facts, sender=2):
        way |= {"loss": 0.01, "alone": 0.2 * RATE, "together": 0.2 * RATE}


def _loss_of_two(facts: Facts) -> None:
    for way in ways(facts):
        way |= {"loss": 0.012, "alone": 0.2 * RATE, "together": 0.2 * RATE}


def _absent(facts: Facts) -> None:
    facts["absent"] = [{"name": "10.77.0.9", "state": "refused"}]


def _no_address(facts: Facts) -> None:
    facts["absent"] = [{"name": "node9", "state": "no address"}]


def _closed_port(facts: Facts) -> None:
    facts["absent"] = [{"name": "rank 2", "state": None}]


def _wrong_variable(facts: Facts) -> None:
    chosen = {"interface": "eth7", "address": None, "why": "GLOO_SOCKET_IFNAME=eth7"}
    facts["machines"][1] |= {"gloo": chosen, "training": chosen}


def _wrong_clock(facts: Facts) -> None:
    facts["machines"][1]["clock"] = -40.0


def _variable(facts: Facts) -> None:
    facts["machines"][1]["environment"]["NCCL_IB_DISABLE"] = "1"


BLOCKS, SLOWS, RISK = Severity
CASES: list[tuple[int, Callable[[Facts], None], str, Severity, set[str]]] = [
    (2, _two_interfaces, "interface", SLOWS, {"node1"}),
    (2, _firewall, "firewall", BLOCKS, {"node1"}),
    (2, _no_route, "firewall", BLOCKS, {"node0"}),
    (3, _firewall_of_three, "firewall", BLOCKS, {"node2"}),
    (2, _hole, "mtu", BLOCKS, {"node0", "node1"}),
    (3, _hole, "mtu", BLOCKS, {"node1"}),
    (2, _hole_without_datagrams, "mtu", BLOCKS, {"node0", "node1"}),
    (3, _other_mtu, "mtu", RISK, {"node1"}),
    (3, _halved, "slow cable", SLOWS, {"node2"}),
    (4, _halved, "slow cable", SLOWS, {"node2"}),
    (2, _below_the_link, "slow cable", SLOWS, {"node0", "node1"}),
    (2, _gigabit_against_less, "slow cable", SLOWS, {"node1"}),
    (2, _asymmetric, "asymmetric rate", SLOWS, {"node0", "node1"}),
    (3, _asymmetric, "asymmetric rate", SLOWS, {"node1"}),
    (2, _half_duplex, "half duplex", SLOWS, {"node0", "node1"}),
    (4, _half_duplex, "half duplex", SLOWS, {"node0"}),
    (2, _slow_rank, "slow rank", SLOWS, {"node1"}),
    (2, _hosts_entry, "hosts entry", BLOCKS, {"node1"}),
    (2, _bridge, "shared address", RISK, {"node0", "node1"}),
    (2, _bridge_in_use, "shared address", BLOCKS, {"node0", "node1"}),
    (3, _other_version, "version", BLOCKS, {"node2"}),
    (2, _other_torch, "version", BLOCKS, {"node1"}),
    (3, _slow_pair, "slow pair", SLOWS, {"node0", "node1"}),
    (4, _slow_pair, "slow pair", SLOWS, {"node0", "node1"}),
    (3, _loss, "loss", SLOWS, {"node2"}),
    (2, _loss_of_two, "loss", SLOWS, {"node0", "node1"}),
    (2, _absent, "absent", BLOCKS, {"10.77.0.9"}),
    (2, _no_address, "absent", BLOCKS, {"node9"}),
    (2, _closed_port, "firewall", BLOCKS, {"node0"}),
    (2, _wrong_variable, "variable", BLOCKS, {"node1"}),
    (2, _wrong_clock, "clock", RISK, {"node1"}),
    (2, _variable, "environment", RISK, {"node1"}),
]


@each(case=CASES)
def test_each_fault_has_one_cause_and_its_machines(
    case: tuple[int, Callable[[Facts], None], str, Severity, set[str]],
) -> None:
    machines, break_it, cause, severity, names = case
    facts = cluster(machines, ranks=2)
    break_it(facts)
    before = copy.deepcopy(facts)
    found = judge(facts)
    label = f"{break_it.__name__} of {machines}"
    assert [(one.cause, one.severity, set(one.machines)) for one in found] == [(cause, severity, names)], label
    assert all(one.remedy for one in found)
    assert facts == before  # it is a pure function
    assert judge(json.loads(json.dumps(facts))) == found


@each(shape=[(2, 1), (2, 2), (3, 1), (4, 1), (3, 2), (8, 8)])
def test_nothing_is_wrong_with_what_differs_by_chance(shape: tuple[int, int]) -> None:
    machines, ranks = shape
    chance = random.Random(machines)
    for _ in range(5):
        facts = cluster(machines, ranks)
        for way in ways(facts):
            way["alone"] *= chance.uniform(0.85, 1.02)
            way["together"] = way["alone"] * chance.uniform(0.8, 1.0)
            way["loss"] = chance.choice([0.0, 0.0, 0.001])
        for machine in facts["machines"]:
            for rank in machine["ranks"]:
                rank["devices"][0]["flops"] *= chance.uniform(0.85, 1.1)
        assert judge(facts) == []


def test_cables_faster_than_sockets_are_not_judged() -> None:
    facts = cluster(2)
    for machine in facts["machines"]:
        machine["loopback"] = 1.5 * RATE
        machine["interfaces"][1]["megabits"] = 100_000
    for way in ways(facts):
        way["together"] = RATE / 2  # processors, and not the cable
    assert judge(facts) == []
    assert "not tested to its limit" in report(facts, [], "gpt")


def test_a_machine_that_was_lost_is_one_finding() -> None:
    facts = cluster(2)
    facts["lost"] = [{"rank": 1, "asked": "reach"}]
    facts["ways"] = [{"from": a, "to": b, "reach": [], "others": []} for a, b in ((0, 1), (1, 0))]
    assert [(one.cause, one.machines) for one in judge(facts)] == [("lost", ("node1",))]
    assert "LOST" in report(facts, priced(facts, judge(facts), describe_model("gpt-2.5b")))


def test_a_machine_that_was_lost_at_the_first_question_has_a_name() -> None:
    machines = _Machines(3, 1.0)
    machines.lost[2] = "facts"
    facts, found = Examination(cast(Leader, machines), lambda text: None).run()
    (lost,) = (one for one in found if one.cause == "lost")
    assert lost.machines == ("node2",) and lost.where == "rank 2 on node2"
    assert [machine["name"] for machine in facts["machines"]] == ["node0", "node1"]


def test_a_machine_that_ends_midway_has_no_firewall() -> None:
    facts = cluster(3)
    facts["lost"] = [{"rank": 1, "asked": "load"}]
    facts["machines"][1] |= {"loopback": 0.0, "ranks": [{"rank": 1, "devices": []}]}
    for way in ways(facts, 1) + ways(facts, receiver=1):
        for measured in ("alone", "together", "loss", "packet", "mtu", "latency", "stalls", "datagrams"):
            del way[measured]
        way["reach"] = [] if way["from"] == 1 else [way["reach"][0] | {"state": "refused"}]
    found = judge(facts)
    assert [(one.cause, one.machines) for one in found] == [("lost", ("node1",))]
    assert "not tested to its limit" not in report(facts, found)


def test_two_faults_are_two_findings_and_the_costlier_is_first() -> None:
    facts = cluster(4)
    slower(0.6, ways(facts, 0, 1), ways(facts, 1, 0))
    slower(0.2, ways(facts, sender=2), ways(facts, receiver=2))
    found = priced(facts, judge(facts), describe_model("gpt-2.5b"))
    assert [(one.cause, set(one.machines)) for one in found] == [
        ("slow cable", {"node2"}),
        ("slow pair", {"node0", "node1"}),
    ]
    costs = [one.seconds[0] - one.seconds[1] for one in found if one.seconds and one.seconds[0]]
    assert len(costs) == 2 and costs[0] > costs[1] > 0


def test_a_report_names_cause_remedy_and_gain_in_100_columns() -> None:
    facts = cluster(3)
    _halved(facts)
    _other_version(facts)
    found = priced(facts, judge(facts), describe_model("gpt-2.5b"))
    text = report(facts, found, "gpt-2.5b")
    assert max(map(len, text.splitlines())) <= 100
    assert "SLOW CABLE" in text and "VERSION" in text and "step " in text and "node2" in text
    assert text.index("VERSION") < text.index("SLOW CABLE")  # without it there is no step at all
    clean = report(cluster(2), [], "gpt-2.5b")
    assert clean.splitlines()[-1].startswith("Nothing is wrong: 2 machines")


@each(count=range(1, 10))
def test_in_a_round_no_machine_is_in_two_pairs(count: int) -> None:
    rounds = tournament(count)
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert len(rounds) <= count


def test_a_rate_is_that_of_the_path_and_not_of_pauses() -> None:
    assert rate_of([10, 50, *[100] * 8], 0.5) == 2000
    assert rate_of([10, 50, 100, 100, 0, 0, 300, 100, 100, 100], 0.5) == 2000  # a pause, then what queued up
    assert rate_of([10, 50, 0, 0, 0, 0, 0, 400, 0, 400], 0.5) == 2000  # a path that is silent now and then
    assert rate_of([0] * 10, 1.0) == 0.0


@each(arguments=[["doctor"], ["doctor", "--hosts", "203.0.113.1,203.0.113.2"]])
def test_a_mistake_names_the_remedy(arguments: list[str]) -> None:
    found = CliRunner(env={"RANK": None}).invoke(main.app, arguments)
    assert isinstance(found.exception, ConfigError) and "machine" in str(found.exception)


def test_a_second_process_of_a_machine_does_not_take_the_place_of_the_first() -> None:
    found = CliRunner(env={"LOCAL_RANK": "1"}).invoke(main.app, ["doctor", "--hosts", "127.0.0.1,192.0.2.1"])
    assert isinstance(found.exception, ConfigError) and "LOCAL_RANK=1" in str(found.exception)


def test_an_error_of_the_leader_is_not_one_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("towpath.cli.doctor._lead", fails)
    found = CliRunner().invoke(main.app, ["doctor", "--hosts", "127.0.0.1,192.0.2.1"])
    assert isinstance(found.exception, OSError) and "UNREACHABLE" not in found.output


def test_a_report_is_printed_where_its_file_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("towpath.cli.doctor.Leader", Mock())
    monkeypatch.setattr("towpath.cli.doctor.Examination.__init__", Mock(return_value=None))
    monkeypatch.setattr("towpath.cli.doctor.Examination.run", Mock(return_value=(cluster(1), [])))
    found = CliRunner(env={"RANK": None}).invoke(main.app, ["doctor", "--hosts", "127.0.0.1", "--json", "/dev/full"])
    assert isinstance(found.exception, ConfigError) and "Nothing is wrong" in found.stdout


# The time that an examination takes ----------------------------------------------------------------------------------


def _place(number: int, world: int) -> Place:
    return Place(number=number, world=world, leader="10.77.0.1", port=1, machine=str(number), key="key")


class _Machines:
    """Machines of which the second loses large packets, on a clock of their own."""

    states: Mapping[int, str] = {}

    def __init__(self, count: int, round_seconds: float) -> None:
        self.lost: dict[int, str] = {}
        self.place = _place(0, count)
        self.hellos = {n: {"machine": str(n), "local": 0, "host": f"node{n}"} for n in range(count)}
        self.links = {n: SimpleNamespace(here="10.77.0.1", there=f"10.77.0.{n + 1}") for n in range(1, count)}
        self.facts = cluster(count)
        self._takes = {"facts": 1.0, "load": 5.0, "compute": 2.0, "reach": 0.2, "measure": round_seconds}
        self.now, self.rounds = 0.0, 0
        self.compared: set[int] = set()  # those that were asked for the rates to several interfaces

    def ask(self, questions: Mapping[int, Facts], seconds: float) -> dict[int, Any]:
        what = next((question["do"] for question in questions.values()), "")
        self.now += self._takes.get(what, 0.0)
        self.rounds += what == "measure"
        return {
            number: self._answer(number, question) for number, question in questions.items() if number not in self.lost
        }

    def _answer(self, number: int, question: Facts) -> Any:
        machine, peers = self.facts["machines"][number], [peer[0] for peer in question.get("peers", ())]
        match question["do"]:
            case "facts":
                return {key: value for key, value in machine.items() if key not in ("ranks", "loopback")}
            case "compute":
                return machine["ranks"][0]["devices"]
            case "reach":
                return [{"address": peer, "interface": "eth0", "state": "open"} for peer in peers]
            case "measure":
                stalls = "10.77.0.2" in (machine["address"], *peers)
                found = {
                    key: value for key, value in _way(0, 1).items() if key not in ("from", "to", "reach", "others")
                }
                return [found | {"stalls": stalls, "packet": 1400 if stalls else 1500}] * 2
            case "interfaces":
                self.compared.add(number)
                return [RATE] * len(peers)
            case "loopback":
                return 5e9
            case _:
                return []


def test_interfaces_are_compared_only_where_a_machine_is_reached_over_several() -> None:
    machines = _Machines(3, 1.0)
    machines.facts["machines"][1]["interfaces"].append(_interface("wlan0", "10.88.0.2"))
    facts, _ = Examination(cast(Leader, machines), lambda text: None).run()
    assert machines.compared == {0, 2}
    others = [(way["from"], way["to"], *(each["interface"] for each in way["others"])) for way in facts["ways"]]
    assert [way for way in others if len(way) > 2] == [(0, 1, "eth0", "wlan0"), (2, 1, "eth0", "wlan0")]


def test_a_question_of_another_version_fails() -> None:
    member = examination.Examinee(_place(1, 2))
    assert member.perform({"do": "dance"}) == {"failed": "ValueError: dance is no question"}


def test_a_process_opens_ports_only_if_it_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SimpleNamespace] = []
    monkeypatch.setattr(
        examination, "Services", lambda: opened.append(SimpleNamespace(port=7, token="token")) or opened[0]
    )
    member = examination.Examinee(_place(1, 2))
    assert not opened
    assert [member.perform({"do": "facts"})["answer"]["services"] for _ in range(2)] == [[7, "token"]] * 2
    assert len(opened) == 1


@each(case=[(2, 3.0, 4), (2, 13.0, 3), (3, 5.0, 7), (4, 9.0, 3), (4, 4.0, 9)])
def test_an_examination_measures_again_only_while_it_ends_within_a_minute(
    case: tuple[int, float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count, round_seconds, rounds = case
    machines = _Machines(count, round_seconds)
    monkeypatch.setattr(examination, "time", SimpleNamespace(monotonic=lambda: machines.now, time=lambda: 0.0))
    facts, found = Examination(cast(Leader, machines), lambda text: None).run()
    assert found[0].cause == "mtu"
    assert machines.rounds == rounds and facts["seconds"] <= 60
