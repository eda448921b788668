"""The tables and the picture of docs/guides/when-a-node-dies.md: nodes that were lost in the lab, and what followed."""

from __future__ import annotations

import statistics
from typing import Any

from tools.docs import figures
from towpath.cli.plots import axes_of, color, standalone_svg

PICTURE = figures.PICTURES_FOLDER / "loss-with-lost-nodes.svg"
# As in benchmarks/suites/recovery.py, without loading the lab: what was lost, in words.
_LOST = {
    "node": "a node, which comes back empty",
    "ranks": "the ranks of a node, which fork anew",
    "fewer": "a node, and two go on",
}


def lost_table() -> str:
    """Return how many runs lost a node in each phase, and how many equal the undisturbed run, by strategy."""
    body: list[figures.Row] = []
    for strategy in sorted({_words(run)[0] for run in _kills()}):
        mine = [run for run in _kills() if _words(run)[0] == strategy]
        whole = [run for run in mine if "failed" not in run]
        phases = {loss["phase"] for run in whole for loss in run["losses"]}
        silent = sum(any(loss["silent"] for loss in run["losses"]) for run in whole)
        twice = max(run["steps_twice"] / len(run["losses"]) for run in whole)
        equal = f"{len(whole)} of {len(mine)}"
        body.append((f"`{strategy}`", str(len(mine)), str(len(phases)), str(silent), equal, f"{twice:.0f}"))
    head = ("strategy", "runs", "phases", "cable cut first", "equal to the bit", "most steps again, for a loss")
    return figures.table(head, body)


def seconds_table() -> str:
    """Return where the seconds went after a loss, in the median, for each thing that was lost."""
    runs = [run for run in figures.runs("recovery") if "failed" not in run]
    parts = list(dict.fromkeys(part for run in runs for loss in run["losses"] for part in loss["parts"]))
    body: list[figures.Row] = []
    for run in runs:
        strategy, lost = _words(run)
        losses = run["losses"]
        total = statistics.median(sum(loss["parts"].values()) for loss in losses)
        each = (statistics.median(loss["parts"].get(part, 0.0) for loss in losses) for part in parts)
        body.append((_LOST[lost], f"`{strategy}`", str(len(losses)), f"**{total:.1f}**", *(f"{s:.1f}" for s in each)))
    return figures.table(("lost", "strategy", "losses", "seconds, median", *parts), body)


def picture() -> str:
    """Return the loss of a run that loses three nodes, over time, and of the undisturbed run."""
    return standalone_svg(_draw, next(run for run in figures.runs("healing") if "curve" in run), (8, 3.4))


def _draw(figure: Any, run: dict[str, Any]) -> None:
    axes = axes_of(figure, "minutes of training", "training loss (nats a byte)")
    for number, (name, label) in enumerate((("undisturbed", "no node is lost"), ("curve", "three nodes are lost"))):
        points = run[name]["points"]
        minutes, losses = [seconds / 60 for seconds, _, _ in points], [loss for _, _, loss in points]
        axes.plot(minutes, losses, color=color(number), linewidth=1.4, label=label)
    for number, seconds in enumerate(run["curve"]["lost"]):
        axes.axvline(seconds / 60, color="#888888", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"node lost ({number + 1})", (seconds / 60, 1), xycoords=("data", "axes fraction"), fontsize=8, va="bottom"
        )
    axes.legend(frameon=False, fontsize=8)


def _kills() -> list[Any]:
    return [run for run in figures.runs("healing") if "curve" not in run]


def _words(run: Any) -> list[str]:
    """Return the strategy of a case, and the word after it: the model, or what was lost."""
    return run["case"]["name"].split()[:2]


TABLES = {"lost-in-the-lab": lost_table, "seconds-to-heal": seconds_table}
PICTURES = {PICTURE: picture} if any("curve" in run for run in figures.runs("healing")) else {}
