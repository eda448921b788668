"""The summary of speed-ups, on a few result lines made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report


def line(name: str, **seconds: float) -> dict[str, Any]:
    """Return a result line. Peers are `fsdp2` and `hsdp`; `zero++` and names with `int4` use codecs."""
    names = [each.replace("_", " ") for each in seconds]
    nodes, ranks = int(name[0]), int(name[2])
    return {
        "case": {
            "name": name,
            "workload": {
                "topology": {"nodes": nodes, "ranks_per_node": ranks},
                "micro_steps": int(name.partition("-micro")[2][0]),
                "wait_seconds": 0.1 if "waiting" in name else None,
            },
        },
        "communication_share": dict.fromkeys(names, 0.1),
        "candidates": {
            each: {"ours": each not in ("fsdp2", "hsdp"), "lossless": "int4" not in each and each != "zero++"}
            for each in names
        },
        "median_seconds": dict(zip(names, seconds.values(), strict=True)),
    }


def cells(lines: list[dict[str, Any]], strategies: str, micro_steps: int = 1) -> dict[str, str]:
    [row] = [row for row in report.rows(lines) if row[:2] == (str(micro_steps), strategies)]
    return dict(zip(report.HEADINGS, row, strict=True))


def test_a_speed_up_is_over_the_fastest_lossless_peer() -> None:
    found = report.CaseSpeedups.of(line("2x2-ratio4-micro1", mics=1.0, fsdp2=3.0, hsdp=2.0))
    assert found is not None and found.lossless == {"mics": 2.0} and not found.codecs
    assert (found.comm_ratio, found.nodes, found.ranks_per_node, found.blocks_wait) == ("4", 2, 2, False)


def test_a_cell_has_the_median_the_range_and_the_count() -> None:
    lines = [
        line(f"2x2-ratio8-micro1-waiting{wait}", mics=1.0, fsdp2=peer) for wait, peer in ((1, 2), (2, 1.5), (3, 3))
    ]
    lines.append(line("2x2-unshaped-micro1", mics=1.0, fsdp2=0.9))
    row = cells(lines, "MiCS")
    assert row["8"] == "2.00 (1.50–3.00), n = 3"
    assert row["unshaped"] == "0.90, n = 1"
    assert row["4"] == ""


@pytest.mark.parametrize(
    "name",
    ["2x2-200mbit-micro1", "2x2-ratio4-micro1-fp32", "2x2-ratio4-micro1-width192", "2x2-cluster-micro1"],
)
def test_another_model_precision_or_link_rate_is_left_out(name: str) -> None:
    assert report.speedups_of([line(name, mics=1.0, fsdp2=2.0)]) == []


def test_failed_runs_and_runs_without_a_peer_are_left_out() -> None:
    failed = line("2x2-ratio4-micro1", mics=1.0, fsdp2=2.0) | {"failed": "rank 3 died"}
    assert report.speedups_of([failed, line("2x2-ratio2-micro1", mics=1.0)]) == []


def test_readme_table_has_range_and_median_of_the_fastest() -> None:
    lines = [
        line("2x2-ratio8-micro1", **{"mics": 1.0, "paro-iig": 2.0, "mics_gradients=int4": 0.5, "fsdp2": 1.5}),
        line("4x2-ratio8-micro4", mics=1.0, fsdp2=1.1),
        line("2x2-ratio0.5-micro1", mics=1.0, fsdp2=9.0),
    ]
    rows = {ratio: found for ratio, *found in report.readme_rows(lines)}
    assert list(rows) == ["8", "4", "2", "1"]
    assert rows["8"] == ["2", "1.10× to 1.50×, median 1.30×", "3.00× to 3.00×, median 3.00×"]
    assert rows["1"] == ["0", "not measured", "not measured"]
