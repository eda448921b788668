"""How our best stands beside the best lossless peer, at a glance."""

from __future__ import annotations

from typing import Any

import pytest

from towpath.bench import standings
from towpath.bench.selection import OUR_LOSSLESS, OUR_LOSSY


def race(name: str, found: float, **changed: Any) -> dict[str, Any]:
    """Of `mics` and a lossy `zero++` against `torch-ddp`: as lines of results are."""
    nodes, ranks = int(name[0]), int(name[2])
    topology, micro_steps = {"nodes": nodes, "ranks_per_node": ranks}, int(name.partition("-micro")[2][0])
    usual, in_step, _ = name.partition("-in-step")
    _, waits, seconds = usual.partition("-waiting")
    wait = float(seconds or 0.0046 * nodes * ranks) if waits else None
    line: dict[str, Any] = {
        "suite": "strategies",
        "host": {"cores": 2},
        "case": {
            "name": name,
            "workload": {
                "topology": topology,
                "micro_steps": micro_steps,
                "wait_seconds": wait,
                "in_step": bool(in_step),
            },
        },
        "checks": [
            {"what": "lossless: mics against torch-ddp, times as fast", "found": found, "at_least": 0.97, "met": True},
            {"what": "lossy against lossless: zero++ against torch-ddp, times as fast", "found": 2 * found},
        ],
        "communication_share": {"mics": 0.1, "zero++": 0.1, "torch-ddp": 0.3},
        "contestants": {
            "mics": {"lossless": True, "ours": True},
            "zero++": {"lossless": False, "ours": True},
            "torch-ddp": {"lossless": True, "ours": False},
        },
        "median_seconds": {"mics": 3.6 / found, "zero++": 1.8 / found, "torch-ddp": 3.6},
        "floor_seconds": {"mics": 2.7, "zero++": 1.0},
        "optimizer_seconds": {"mics": 0.3, "zero++": 0.2, "torch-ddp": 0.2},
    }
    return line | changed


def cells(lines: list[dict[str, Any]], what: str = OUR_LOSSLESS) -> list[dict[str, str]]:
    return [dict(zip(standings.HEADINGS, row, strict=True)) for row in standings.rows(lines, what)]


def test_a_row_is_of_a_cluster_and_its_columns_are_regimes_with_what_perfect_overlap_would_give() -> None:
    [row] = cells([race("2x2-regime4-micro1", 1.1), race("2x2-unshaped-micro1", 1.0, floor_seconds={})])
    assert row["nodes × ranks"] == "2 × 2" and row["a block"] == "computes"
    assert row["4"] == "1.10 of 1.20"
    assert row["unshaped"] == "1.00"  # no floor: nothing says what it could be
    assert row["8"] == ""


def test_unshaped_cables_say_which_regime_they_came_to() -> None:
    came_to = {"regime": {"found in the race": 0.531}}
    [row] = cells([race("4x2-unshaped-micro4", 1.0, **came_to), race("4x2-regime0.5-micro4", 1.1, **came_to)])
    assert row["unshaped"] == "1.00 of 1.20 at 0.53"
    assert row["0.5"] == "1.10 of 1.20"  # the column says it


def test_a_race_whose_regime_was_another_than_asked_says_so() -> None:
    [row] = cells([race("2x2-regime1-micro1", 1.1, regime={"found in the race": 1.43})])
    assert row["1"] == "1.10 of 1.20 at 1.4"


def test_what_no_cable_here_reaches_is_told_from_what_nobody_tried() -> None:
    failed = race("2x2-regime0.5-micro1", 1.0, checks=[], failed="no cable here is so fast")
    [row] = cells([race("2x2-regime1-micro1", 1.1), failed])
    assert (row["0.5"], row["2"]) == ("–", "")


def test_a_mean_takes_what_its_row_has_not_from_blocks_that_wait_longest_and_says_so() -> None:
    short = [race(f"2x2-regime{regime}-micro1-waiting", 2.0) for regime in (8, 4, 2)]
    longer = [race("2x2-regime1-micro1-waiting0.05", 9.0), race("2x2-regime1-micro1-waiting0.1", 1.0)]
    computing = race("2x2-regime1-micro1", 9.0)
    found = {row["a block"]: row[standings.MEAN] for row in cells([*short, *longer, computing])}
    assert found["waits 0.018 s"] == "1.68 of 1.20 †"
    assert found["waits 0.1 s"] == ""  # three of four would be another's
    assert found["computes"] == ""


def test_the_mean_is_geometric_and_stands_only_where_all_its_regimes_were_raced() -> None:
    raced = [race(f"2x2-regime{regime}-micro1", found) for regime, found in ((8, 2.0), (4, 2.0), (2, 1.0))]
    assert cells(raced)[0][standings.MEAN] == ""
    [row] = cells([*raced, race("2x2-regime1-micro1", 1.0), race("2x2-regime0.5-micro1", 9.0)])
    assert row[standings.MEAN] == "1.41 of 1.20"


def test_clusters_micro_steps_and_waits_have_rows_of_their_own_in_order() -> None:
    names = ["4x2-regime4-micro1", "2x2-regime4-micro4", "2x2-regime4-micro1-waiting0.05", "2x2-regime4-micro1"]
    names += ["2x2-regime2-micro1-waiting", "2x2-regime4-micro4-in-step"]
    found = cells([race(name, 1.1) for name in names])
    told = [(row["nodes × ranks"], row["micro-steps"], row["a block"]) for row in found]
    assert told == [
        ("2 × 2", "1", "computes"),
        ("2 × 2", "1", "waits 0.018 s"),
        ("2 × 2", "1", "waits 0.05 s"),
        ("2 × 2", "4", "computes"),
        ("2 × 2", "4", "computes, in step"),
        ("4 × 2", "1", "computes"),
    ]


def test_codecs_have_their_own_figure_and_a_missed_one_is_marked() -> None:
    line = race("2x2-regime4-micro1", 1.0)
    line["checks"][1]["met"] = False
    assert cells([line], OUR_LOSSY)[0]["4"] == "2.00 of 3.00, missed"


@pytest.mark.parametrize(
    "name",
    ["2x2-200mbit-micro1", "2x2-regime4-micro1-fp32", "2x2-regime4-micro1-width192", "2x2-cluster-micro1"],
)
def test_what_is_not_of_a_regime_or_of_another_model_is_left_out(name: str) -> None:
    assert not cells([race(name, 1.1)])


def test_a_race_without_that_kind_is_left_out() -> None:
    assert not cells([race("2x2-regime4-micro1", 1.1, checks=[])])


def test_a_mark_stands_beside_the_figure_of_its_race() -> None:
    raced = [race(f"2x2-regime{regime}-micro1", 1.1) for regime in (8, 4, 2, 1)]
    [row] = standings.rows(raced, OUR_LOSSLESS, lambda line: " *" * (line is raced[1]))
    plain = "1.10 of 1.20"
    assert row[3:-1] == (plain, f"{plain} *", plain, plain, "", "", f"{plain}, missed ‡ *")  # 1.25 is asked of the mean
    assert row[-1] == ""  # of such a race nobody knows what its cables carried


def test_a_mean_whose_limit_is_less_than_what_is_asked_is_told_from_one_that_is_only_missed() -> None:
    """Asked with four micro-steps is 1.15; with perfect overlap it is 1.20, and by messages of 3.2 s, and the optimizer
    of 0.2 s, beside 3.0 s of ours 1.13."""
    cabled = {"inter": "100mbit", "bytes_between_nodes": {"torch-ddp": 80e6}}
    raced = [race(f"2x2-regime{regime}-micro4", 1.1, **cabled) for regime in (8, 4, 2, 1)]
    assert cells(raced)[0][standings.MEAN] == "1.10 of 1.20, missed"  # nobody knows what a step computes
    for line in raced:
        line["median_seconds"]["compute"] = 0.0
    assert cells(raced)[0][standings.MEAN] == "1.10 of 1.20, missed ‡"


def test_beside_the_mean_stands_what_it_would_be_with_a_peer_that_computes_and_then_sends() -> None:
    """On two nodes 50 MB of 100 go through each cable: 4 s at 100 mbit. Four micro-steps of 0.8 s, and 0.2 s more, are
    7.4 s, beside 3.0 s of ours. Of peers the one counts that sends the least, which need not be the quickest."""
    cabled = {"inter": "100mbit", "bytes_between_nodes": {"torch-ddp": 100e6, "mics": 1e6, "hsdp": 200e6}}
    raced = [race(f"2x2-regime{regime}-micro4", 1.2, **cabled) for regime in (8, 4, 2, 1)]
    for line in raced:
        line["contestants"]["hsdp"] = {"lossless": True, "ours": False}
        line["median_seconds"]["compute"] = 0.8
    [row] = cells(raced)
    assert row[standings.MEAN] == "1.20 of 1.20" and row[standings.BY_MESSAGES] == "2.467"
    del raced[2]["inter"]  # cables that nobody shaped
    [row] = cells(raced)
    assert row[standings.MEAN] == "1.20 of 1.20" and row[standings.BY_MESSAGES] == ""


def test_the_headline_names_the_race_that_won_least_as_well_as_the_one_that_won_most() -> None:
    raced = [race("2x2-regime8-micro1", 1.5), race("2x2-regime4-micro1", 1.1), race("2x2-regime1-micro1", 0.98)]
    raced += [race("4x2-regime4-micro4-waiting", 1.2)]
    raced[0]["contestants"]["fsdp2 tuned"] = {"lossless": True, "ours": False}
    said = standings.headline(raced)
    assert "one machine of 2 cores" in said
    assert "best lossless peer, DDP or FSDP2 (in 1 of 4 races), as experts tune them" in said  # whoever took part
    assert "**1.10 to 1.50** times as fast without codecs and **2.20 to 3.00** times with them; with blocks" in said
    assert "device of their own, **1.20 to 1.20**" in said
    assert "as long as it computes, 0.98 to 0.98 times as fast without codecs and 1.96 to 1.96 times" in said


def test_the_headline_sets_a_lossy_peer_beside_what_is_lossy() -> None:
    line = race("2x2-regime4-micro1", 1.1)
    line["contestants"]["torch-ddp powersgd=4"] = {"lossless": False, "ours": False}
    line["communication_share"]["torch-ddp powersgd=4"] = 0.1
    line["median_seconds"] |= {"torch-ddp powersgd=4": 2.5, "zero++": 2.0}
    assert standings.headline([line]).endswith("our best with codecs was 1.25 to 1.25 times as fast.")


def test_the_headline_tells_how_many_races_are_of_before_the_code_changed() -> None:
    old, new = race("2x2-regime4-micro1", 1.1), race("2x2-regime8-micro1", 1.5)
    said = standings.headline([old, new], lambda line: line is old)
    assert said.endswith("Of these 2 races 1 were run before the code changed; the tables mark them.")
    assert "before the code" not in standings.headline([old, new])


def test_the_headline_is_of_ranks_as_they_come() -> None:
    usual = [race("2x2-regime4-micro4", 1.1)]
    assert standings.headline([*usual, race("2x2-regime4-micro4-in-step", 1.9)]) == standings.headline(usual)
