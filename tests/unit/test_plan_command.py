"""`towpath plan`, as people and machines call it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from towpath.cli import main
from towpath.core.strategy import Strategy
from towpath.train.config import Config

MODEL = str(Path(__file__).with_name("six-layers") / "config.json")  # few layers are quickly planned
PLAN = ("plan", MODEL, "--cluster", "ethernet-10g", "--batch", "32", "--top", "3", "--length", "1024")
SIDES = ("plan", "bert-10b", "--cluster", "p3dn", "--batch", "2048", "--micro-batch", "8", "--checkpointing")
SMALL = ("plan", "gpt-2.5b", "--cluster", "ethernet-10g", "--nodes", "2", "--batch", "32", "--micro-batch", "2")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments))


def told(*arguments: str) -> str:
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    assert all(len(line) <= 100 for line in found.stdout.splitlines()), found.stdout
    return found.stdout  # progress goes to stderr, where a machine is slow enough for it


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `plan` prints, and the file of its strategy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plan"))
        return told_wide(*PLAN, "-o", "plan.toml"), Path("plan.toml").absolute()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The same for machines."""
    return json.loads(told_wide(*PLAN, "--json"))


def test_a_table_ranks_what_fits_and_says_how_much_was_looked_at(written: tuple[str, Path]) -> None:
    output, _ = written

    assert all(len(line) <= 100 for line in output.splitlines() if "towpath train" not in line), output
    rows = [line.split() for line in output.splitlines() if re.match(r"\d ", line)]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert "were considered" in output and "fit into 22.0 GiB" in output and "six-layers: 1.48 billion" in output


def test_for_machines_all_of_it_is_json(found: dict[str, Any]) -> None:
    seconds = [each["seconds"] for each in found["plans"]]
    assert seconds == sorted(seconds) and len(seconds) == 3
    first = found["plans"][0]
    assert first["margin_bytes"] >= 0
    assert first["peak_bytes"] == sum(first["memory_bytes"].values())
    assert 0 < first["mfu"] < 1
    assert Strategy.from_toml(first["toml"]).name == first["strategy"]


def test_each_strategy_says_whether_it_survives_a_lost_node(found: dict[str, Any], written: tuple[str, Path]) -> None:
    output, _ = written
    known = {each["survives"] for each in found["plans"]}
    assert known <= {"yes", "with buddies"}
    for number, each in enumerate(found["plans"], 1):
        assert re.search(rf"Survives a lost node: .*{number}[\d, ]* {each['survives']}", output)
    first = found["plans"][0]["protection"]
    assert first["every"] == 10 and first["host_memory_bytes_per_node"] > 0 and first["heal_seconds"] > 20
    assert "With protect=10" in output
    assert all("survives" not in each for each in found["pytorch"])


def test_a_protected_step_pays_for_what_the_link_cannot_hide() -> None:
    plain, often, seldom = ("zero3", "zero3 protect=1", "zero3 protect=10")
    arguments = [part for each in (plain, often, seldom) for part in ("--strategy", each)]
    found = json.loads(told_wide(*SMALL, *arguments, "--json"))["strategies"]
    plain, often, seldom = found
    for each, every in ((often, 1), (seldom, 10)):
        added = each["expected_inter_bytes"] - plain["expected_inter_bytes"]
        assert added == pytest.approx(2 * each["protection"]["buddy_bytes_per_step"], abs=2)
        assert each["protection"]["every"] == every
        of_node = each["protection"]["host_memory_bytes_per_node"]  # of 4 ranks
        assert 4 * each["host_memory_bytes"]["snapshots"] == pytest.approx(of_node, abs=4)
        late = each["seconds"] - plain["seconds"]
        assert each["exposed_seconds"].get("buddy", 0.0) == pytest.approx(late)
    # Training waits for each snapshot at once, so no idle time of the link hides it.
    assert often["exposed_seconds"]["buddy"] == often["in_flight_seconds"]["buddy"]
    assert often["seconds"] > seldom["seconds"] >= plain["seconds"]


def test_below_the_ranking_is_what_pytorch_would_take(found: dict[str, Any], written: tuple[str, Path]) -> None:
    steps = {each["strategy"]: each for each in found["pytorch"]}
    assert [*steps] == ["FSDP2", "FSDP2 with wires", "HSDP", "DDP", "DDP with wires"]
    assert steps["FSDP2 with wires"]["expected_inter_bytes"] < steps["FSDP2"]["expected_inter_bytes"]
    rows = {line.split("  ")[0]: line for line in written[0].splitlines()}
    for name, step in steps.items():
        fits = step["margin_bytes"] >= 0
        assert (name in rows) == fits and (f"{name}, does not fit" in rows) != fits


def told_wide(*arguments: str) -> str:
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_what_it_writes_is_a_strategy_that_train_takes(
    written: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, file = written
    monkeypatch.chdir(file.parent)

    overrides = re.search(r"CONFIG\.toml (.*)", output)
    assert overrides is not None
    config = tmp_path / "config.toml"
    config.write_text("[train]\nbatch = 32\n")
    made = Config.load(config, overrides[1].split())
    assert made.strategy.file == Path(file.name)
    made.strategy.build(Strategy.from_toml(file.read_text()).topology)


def test_a_strategy_alone_stands_next_to_the_best_one(found: dict[str, Any], written: tuple[str, Path]) -> None:
    output = told(*PLAN, "--strategy", "zero3")
    assert re.search(r"one optimizer step +zero3 +" + found["plans"][0]["strategy"], output)
    assert "times as fast: it waits" in output
    alone = json.loads(told_wide(*PLAN, "--strategy", str(written[1]), "--json"))
    assert [each["seconds"] for each in alone["strategies"]] == [found["plans"][0]["seconds"]]
    assert re.search("waits|same time", alone["conclusions"][0])


def test_the_batching_of_a_given_strategy_is_the_fastest_that_fits() -> None:
    chosen = json.loads(told_wide(*SMALL[:-2], "--strategy", "zero1", "--strategy", "zero3", "--json"))["strategies"]
    assert all(step["margin_bytes"] >= 0 for step in chosen)
    for size in ("1", "2", "4"):
        others = json.loads(told_wide(*SMALL[:-1], size, "--strategy", "zero1", "--strategy", "zero3", "--json"))
        for step, other in zip(chosen, others["strategies"], strict=True):
            assert step["seconds"] <= other["seconds"] or other["margin_bytes"] < 0


def test_a_strategy_that_does_not_fit_is_told_the_offload_with_which_it_would() -> None:
    """A larger one, if the strategy offloads already."""
    small = ("llama-7b", "--cluster", "p4d", "--nodes", "1", "--memory", "30", "--no-checkpointing")
    large = ("llama-13b", "--cluster", "a100-40-25g", "--nodes", "1x2", "--checkpointing", "--offload", "optimizer")
    for options in (small, large):
        asked = ("plan", *options, "--batch", "8", "--micro-batch", "1", "--strategy", "zero3")
        suggested = re.search(r"With --offload (\S+) it would fit", " ".join(told(*asked).split()))
        assert suggested is not None
        assert "does not fit" not in told(*asked, "--offload", suggested[1])


@pytest.mark.parametrize("case", [("llama-65b", "two-desktops", "1"), ("llama-13b", "ethernet-25g", "2")])
def test_where_nothing_fits_the_message_names_parts_and_what_helps(
    case: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest parts come first. An offload is suggested if the model fits with it, and only then."""
    model, cluster, nodes = case
    arguments = ["plan", model, "--cluster", cluster, "--nodes", nodes, "--batch", "64"]
    assert main._run(arguments) == 1
    message = capsys.readouterr().err
    needed = float(re.search(r"with ([\d.]+) GiB", message)[1])  # type: ignore[index]
    sizes = [float(size) for size in re.findall(r"([\d.]+) GiB for", message)]
    assert sizes == sorted(sizes, reverse=True)
    assert needed / 2 < sum(sizes) <= needed + 0.1
    assert re.search(r"--nodes \d+", message)
    suggested = re.search(r"--offload (\S+), with which it fits", message)
    assert (suggested is not None) == (model == "llama-13b")
    if suggested is not None:
        assert main._run([*arguments, "--offload", suggested[1]]) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("plan", "llama-8b", "--cluster", "p4d", "--batch", "64"), "model 'llama-8b': expected a name"),
        (("plan", "llama-7b", "--cluster", "p5d", "--batch", "64"), "cluster 'p5d': expected a .toml file"),
        (("plan", "llama-7b", "--cluster", "p4d", "--batch", "63"), "batch = 63 sequences cannot be shared out"),
        (("plan", "llama-7b"), "Missing option '--cluster'. Example: towpath plan llama-7b --cluster"),
        ((*PLAN, "--allow", "int7"), "unknown codec 'int7'"),
        ((*PLAN, "-o", "/nowhere/plan.toml"), "--output /nowhere/plan.toml: there is no folder /nowhere"),
        ((*PLAN, "-o", "/tmp"), "--output /tmp: that is a folder. Name a file in it."),
        ((*PLAN, "--strategy", "zero3", "--report", "page.html"), "leave out --strategy, or --report"),
        ((*PLAN, "--strategy", "zero4"), "unknown strategy 'zero4'; did you mean"),
        ((*PLAN, "--strategy", "missing.toml"), "cannot read missing.toml"),
        ((*PLAN[:5], "1600000", "--micro-batch", "1", "--strategy", "zero3", "--trace", "t.json"), "at most 1,000"),
        ((*PLAN, "--memory", "nan"), "'--memory': got nan; expected a number above 0, up to 1,000,000"),
        ((*PLAN, "--batch", "1000000000000"), "'--batch': got 1000000000000; expected a whole number from 1 to"),
        ((*PLAN, "--nodes", "1000000000000"), "'--nodes': got 1000000000000; expected 4, or 4x8 with the ranks"),
        ((*PLAN, "--pipeline", "1"), "'--pipeline': got 1; expected at least 2 ranks"),
        ((*PLAN, "--pipeline", "2:1f1b"), "got 2:1f1b; expected a schedule of GPipe, 1F1B"),
        (("lab", "run"), "Run `python -m lab`, in a clone"),
        (("demo", "run"), "Run `python -m lab demo`, in a clone"),
        (("explain", "zero3", "mics"), "is gone. Run `towpath plan MODEL"),
        (("simulate", "--help"), "Run `towpath plan MODEL --cluster NAME --batch N --strategy STRATEGY`."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_simulated_step_is_a_trace_like_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "step.json"

    told_wide(*SIDES, "--strategy", "zero3", "--strategy", "ddp", "--trace", str(file))

    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "waiting", "between nodes"} <= rows
    assert {"gather of blocks.0", "forward of blocks.0", "backward of blocks.0"} <= {e["name"] for e in events}


def test_each_phase_of_codecs_that_change_is_simulated() -> None:
    found = json.loads(told_wide(*SMALL, "--strategy", "zero++ gradients_until=4", "--json"))
    first, second = found["strategies"]
    assert (first["first_step"], second["first_step"]) == (0, 4)
    assert first["inter_bytes"] < second["inter_bytes"]
    output = told(*SMALL, "--strategy", "zero++ gradients_until=4")
    assert re.search(r"zero\+\+ int8 int4, from step 0 +zero\+\+ int8, from step 4", output)


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_report_shows_which_strategy_when_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    output = told(*PLAN, "--top", "2", "--micro-batch", "2", "--report", str(page))

    written = page.read_text()
    assert f"Plots: {page}" in output and written.count("<svg") == 5
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)([^"']*)|url\((?!#)([^)]*)\)|@import|<script""", written) == []
    for words in ("Gbit/s between nodes", "GiB of a rank", "zero3", "computing", "Pareto"):
        assert words in written
    # Reports of other models have other titles, and no two rows of a picture have one name.
    assert "<title>Which strategy for six-layers on ethernet-10g?</title>" in written
    timelines = written[written.index("One step, from inside") :]
    assert re.findall(r">(best: [^<]*|zero3)</text>", timelines) == ["best: custom exact", "zero3"]
