"""`towpath plan`, `explain` and `simulate`, as people and machines call them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.profiles import made_profile
from tests.ranks.strategies import seldom
from towpath.cli import main, plan_report
from towpath.cli import plan as plan_command
from towpath.cli import probe as probe_command
from towpath.cli import simulate as simulate_command
from towpath.cli.plots import svg
from towpath.core.strategy import Strategy
from towpath.train.config import Config

MODEL = str(Path(__file__).with_name("six-layers") / "config.json")  # few layers are quickly planned
PLAN = ("plan", MODEL, "--cluster", "ethernet-10g", "--batch", "32", "--top", "3", "--length", "1024")
SMALL = ("--model", "gpt-2.5b", "--cluster", "ethernet-10g", "--micro-batch", "2", "--nodes", "2", "--checkpointing")
SIDES = ("--model", "bert-10b", "--cluster", "p3dn", "--micro-batch", "8", "--micro-steps", "4", "--checkpointing")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments))


def told(*arguments: str) -> str:
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    assert all(len(line) <= 100 for line in found.stdout.splitlines()), found.stdout
    return found.stdout  # progress goes to stderr, where a machine is slow enough for it


@pytest.mark.parametrize("command", [seldom("plan"), "explain", seldom("simulate")])
def test_help_has_an_example_that_works(command: str) -> None:
    help_text = re.sub(r"\s+", " ", told(command, "--help"))
    example = re.search(rf"Example: (?:`)?towpath ({command} [^`│]*?)(?:`|(?= (?:It|Exit) ))", help_text)
    assert example is not None, help_text
    arguments = example[1].split()
    assert told(*[a for a in arguments if a not in ("--trace", "step.json")])


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
    assert "were considered" in output and "may fit into 22.0 GiB" in output and "six-layers: 1.48 billion" in output


def test_for_machines_all_of_it_is_json(found: dict[str, Any]) -> None:
    seconds = [each["seconds"] for each in found["plans"]]
    assert seconds == sorted(seconds) and len(seconds) == 3
    first = found["plans"][0]
    assert first["margin_bytes"] >= 0
    assert first["peak_bytes"] == sum(first["memory_bytes"].values())
    assert 0 < first["mfu"] < 1
    assert Strategy.from_toml(first["toml"]).name == first["strategy"]


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
    made.strategy.build(Strategy.from_toml(file.read_text()).topology, 100)


def test_codecs_are_planned_only_where_they_are_allowed(found: dict[str, Any]) -> None:
    allowed = json.loads(told_wide(*PLAN, "--json", "--allow", "int8,int4+hadamard"))
    codecs = [
        any("int" in w for plan in each["plans"] for w in plan["transports"].values()) for each in (found, allowed)
    ]
    assert codecs == [False, True]


def test_two_strategies_are_set_side_by_side_and_one_sentence_says_what_decides() -> None:
    output = told("explain", "zero3", "mics", *SIDES)

    assert re.search(r"mics is 1\.\d+ times as fast: it waits .* less for gather", output)
    assert re.search(r"GB out of a node +2\d\d\.\d +3\d\.\d", output)


def test_one_strategy_alone_is_explained_by_what_it_waits_for() -> None:
    output = told("explain", "zero3", *SIDES)

    assert re.search(r"zero3 waits [\d.]+ m?s of [\d.]+ m?s, the longest for gather", output)
    found = json.loads(told_wide("explain", "zero3", *SIDES, "--json"))
    assert len(found["strategies"]) == 1 and "waits" in found["verdict"]
    assert "ddp does not fit" in told("explain", "ddp", *SIDES)


def test_what_takes_long_tells_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    @contextmanager
    def bar(about: str) -> Generator[Callable[[int, int], None]]:
        yield lambda done, total: said.append(f"{about} {0 <= done <= total}")

    for command in (plan_command, simulate_command):
        monkeypatch.setattr(command, "progress_bar", bar)
    told_wide("simulate", "zero3", *SMALL, "--jitter", "0.1")
    told_wide("explain", "zero3", "mics", *SMALL)
    told_wide(*PLAN)
    assert set(said) == {"Simulating True", "Explaining True", "Planning True"}


def test_what_does_not_fit_is_said_with_its_parts() -> None:
    output = " ".join(told("explain", "ddp", "zero3", *SIDES).split())

    assert re.search(
        r"ddp does not fit: [\d.]+ GiB more than the 31\.0 GiB of a rank\. It needs [\d.]+ GiB for", output
    )


def test_explain_suggests_the_offload_with_which_a_strategy_fits() -> None:
    model = ("--model", "llama-7b", "--cluster", "p4d", "--nodes", "1")
    output = " ".join(told("explain", "zero3", *model, "--memory", "30").split())
    suggested = re.search(r"With --offload (\S+) it would fit", output)
    assert suggested is not None
    offloaded = told("explain", "zero3", *model, "--memory", "30", "--offload", suggested[1])
    assert "does not fit" not in offloaded


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


def test_where_an_offload_does_not_suffice_a_larger_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ("--cluster", "a100-40-25g", "--nodes", "1", "--ranks-per-node", "2")
    arguments = ["plan", "llama-13b", *cluster, "--batch", "32", "--offload"]
    assert main._run([*arguments, "optimizer"]) == 1
    suggested = re.search(r"--offload (\S+), with which it fits", capsys.readouterr().err)
    assert suggested is not None
    assert main._run([*arguments, suggested[1]]) == 0

    options = ("--model", "llama-13b", *cluster, "--checkpointing", "--offload", "optimizer")
    explained = " ".join(told("explain", "zero3", *options).split())
    assert f"With --offload {suggested[1]} it would fit" in explained


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("plan", "llama-8b", "--cluster", "p4d", "--batch", "64"), "model 'llama-8b': expected a name"),
        (("plan", "llama-7b", "--cluster", "p5d", "--batch", "64"), "cluster 'p5d': expected a .toml file"),
        (("plan", "llama-7b", "--cluster", "p4d", "--batch", "63"), "batch = 63 sequences cannot be shared out"),
        ((*PLAN, "--allow", "int7"), "unknown codec 'int7'"),
        ((*PLAN, "--interleaved", "10"), "--interleaved needs codecs of gradients"),
        ((*PLAN, "-o", "/nowhere/plan.toml"), "--output /nowhere/plan.toml: there is no folder /nowhere"),
        ((*PLAN, "-o", "/tmp"), "--output /tmp: that is a folder. Name a file in it."),
        (("simulate", "zero3", *SIDES, "--trace", "/nowhere/t.json"), "there is no folder /nowhere"),
        ((*PLAN, "--optimizer", "muon"), "optimizer 'muon': expected one of adamw"),
        (("simulate", "zero3", *SIDES, "--straggler", "3"), "expected RANK:TIMES"),
        (("simulate", "zero++ gradients_until=5", *SIDES, "--jitter", "0.1"), "Add --step 0 or 5."),
        (("simulate", "zero3", *SIDES, "--straggler", "64:2"), "a rank below 64"),
        (("simulate", "zero4", *SIDES), "unknown strategy 'zero4'; did you mean"),
        (("simulate", "missing.toml", *SIDES), "cannot read missing.toml"),
        ((*PLAN, "--memory", "inf"), "'--memory': got inf; expected a number above 0, up to 1,000,000"),
        ((*PLAN, "--memory", "nan"), "'--memory': got nan"),
        ((*PLAN, "--memory", "0"), "'--memory': got 0"),
        ((*PLAN, "--memory", "-1"), "'--memory': got -1"),
        ((*PLAN, "--memory", "1e12"), "'--memory': got 1e12"),
        ((*PLAN, "--batch", "1000000000000"), "'--batch': got 1000000000000; expected a whole number from 1 to"),
        ((*PLAN, "--batch", "0"), "'--batch': got 0"),
        ((*PLAN, "--nodes", "1000000000000"), "'--nodes': got 1000000000000"),
        ((*PLAN, "--nodes", "-2"), "'--nodes': got -2"),
        ((*PLAN, "--length", "inf"), "'--length': got inf"),
        ((*PLAN, "--micro-batch", "1000000000000"), "'--micro-batch': got 1000000000000"),
        ((*PLAN, "--top", "1000000000000"), "'--top': got 1000000000000"),
        ((*PLAN, "--pipeline", "1"), "'--pipeline': got 1; expected a whole number from 2"),
        ((*PLAN, "--pipeline", "2", "--tensor", "0"), "'--tensor': got 0"),
        (("simulate", "zero3", *SIDES, "--micro-steps", "1000000000000"), "'--micro-steps': got 1000000000000"),
        (("simulate", "zero3", *SIDES, "--micro-steps", "2000", "--jitter", "0.1"), "Expected at most 1,000"),
        (("simulate", "zero3", *SIDES, "--jitter", "nan"), "jitter = nan: expected a share"),
        (("simulate", "zero3", *SIDES, "--jitter", "inf"), "jitter = inf: expected a share"),
        (("simulate", "zero3", *SIDES, "--straggler", "3:inf"), "straggler 3:inf: expected RANK:TIMES"),
        (("simulate", "zero3", *SIDES, "--straggler", "3:nan"), "straggler 3:nan: expected RANK:TIMES"),
        (("explain", "zero3"), "Missing option '--model'. Example: towpath explain zero3 mics --model"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_ranks_that_are_not_alike_take_longer() -> None:
    late = ("--jitter", "0.1", "--straggler", "5:1.5")
    plain, uneven = (json.loads(told_wide("simulate", "zero3", *SMALL, *more, "--json")) for more in ((), late))
    words = told_wide("simulate", "zero3", *SMALL, "--straggler", "5:1.5")

    assert uneven["late_seconds"]["most"] >= uneven["late_seconds"]["mean"] > 0
    assert "late_seconds" not in plain and "With ranks of different speeds:" in words


def test_a_simulated_step_is_a_trace_like_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "step.json"

    told_wide("simulate", "zero3", *SIDES, "--trace", str(file))

    events = json.loads(file.read_text())["traceEvents"]
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "waiting", "between nodes"} <= rows
    assert {"gather of blocks.0", "forward of blocks.0", "backward of blocks.0"} <= {e["name"] for e in events}


def test_each_phase_of_codecs_that_change_is_simulated() -> None:
    recipe = ("simulate", "zero++ gradients_until=4", *SMALL)
    found = json.loads(told_wide(*recipe, "--json"))
    alone = [json.loads(told_wide(*recipe, "--step", step, "--json"))["seconds"] for step in ("0", "4")]
    assert [(each["first_step"], each["seconds"]) for each in found["phases"]] == [(0, alone[0]), (4, alone[1])]
    assert re.search(r"From step 4: [\d,]+ tokens/s", told(*recipe))
    assert "change at step 4. Here all are in use" in told("explain", "zero++ gradients_until=4", *SMALL)


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


def test_a_caption_says_dotted_only_where_something_is() -> None:
    slow, quick = plan_report.Curve("slow", ((1, 5), (4, 4), (16, 4))), plan_report.Curve("quick", ((1, 3), (4, 2)))
    late = plan_report.Curve("late", ((4, 1), (16, 1)))
    assert "dotted" in plan_report.caption([slow, quick, late])
    alone = plan_report.caption([slow, plan_report.Curve("quick", ((1, 3), (4, 2), (16, 2)))])
    assert "otted" not in alone and "quick" in alone and "slow" not in alone
    assert "memory" in plan_report.caption([plan_report.Curve("none fits", ())])


def test_plots_of_what_fits_nowhere_are_drawn_empty() -> None:
    drawn = svg(plan_report.draw_rates, [plan_report.Curve("zero3", ())], (5.2, 3.3))
    assert "seconds of a step" in drawn


def test_a_front_gives_memory_only_for_speed() -> None:
    priced = [SimpleNamespace(seconds=s, peak_bytes=b) for s, b in ((3, 1), (1, 9), (2, 9), (2, 5), (4, 1), (9, 0))]
    found: Any = plan_report.front(priced)  # pyright: ignore[reportArgumentType]
    assert [(p.seconds, p.peak_bytes) for p in found] == [(1, 9), (2, 5), (3, 1), (9, 0)]


def test_a_crossing_is_where_another_one_becomes_the_quickest() -> None:
    slow, quick = plan_report.Curve("a", ((1, 5), (4, 4), (16, 4))), plan_report.Curve("b", ((4, 3), (16, 9)))
    alike = plan_report.Curve("c", ((1, 5), (4, 3.97), (16, 3.99)))
    assert plan_report.crossings([slow, quick]) == [(2, "a", "b"), (8, "b", "a")]
    assert plan_report.crossings([slow, alike]) == []


def test_a_job_of_thousands_is_planned_without_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from towpath.cli import main; "
        "arguments = 'plan llama-13b --cluster a800-4hdr --nodes 512 --batch 4096 --top 1'.split(); "
        "found = CliRunner().invoke(main.app, arguments); print(found.stdout); "
        "sys.exit(found.exit_code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "512 nodes of 8 ranks" in done.stdout


def test_a_profile_is_shown_and_drawn_with_what_its_collectives_took(capsys: pytest.CaptureFixture[str]) -> None:
    probe_command.show(made_profile(), Path("profile.json"))

    out = capsys.readouterr().out
    assert re.search(r"all-gather by ho-ring, 2 × 2 +1,048,576 +\S+ ms +\S+ ms \([+-]\d+%\)", out), out
    assert all(len(line) <= 100 for line in out.splitlines())
    picture = probe_command.draw(made_profile())
    assert picture.startswith("<svg") and "inter, one (within" in picture and "all-gather by ho-ring, 2 × 2" in picture
