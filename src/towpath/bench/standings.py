"""How our best stands beside the best peer, in every environment that was raced: what a reader asks first.

A row for each cluster, number of micro-steps and kind of blocks; a column for each regime. Beside the ratio stands what
it would be if our best took what the simulator gives for perfect overlap: where that is near, nothing is left to win.
Beside the mean stands what messages alone would make it: the same, beside a peer that computes, and then sends as few
bytes as any peer, and takes no time for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from towpath.bench.environment import UNSHAPED
from towpath.bench.harness.regime import near
from towpath.bench.selection import OUR_LOSSLESS, OUR_LOSSY
from towpath.lab import Rate

Line = dict[str, Any]

# Columns: regimes, and cables as fast as the machine goes. The mean is of the regimes that targets are set for.
REGIMES, OF_THE_MEAN = (8.0, 4.0, 2.0, 1.0, 0.5), (8.0, 4.0, 2.0, 1.0)
COLUMNS = (*(f"{regime:g}" for regime in REGIMES), UNSHAPED)
MEAN = "mean of 8 to 1"
BY_MESSAGES = "mean by messages alone"
HEADINGS = ("nodes × ranks", "micro-steps", "a block", *COLUMNS, MEAN, BY_MESSAGES)
TITLES: Mapping[str, str] = {
    OUR_LOSSLESS: "Our best lossless strategy, times as fast as the best lossless peer",
    OUR_LOSSY: "Our best strategy with codecs, times as fast as the best lossless peer",
}
# Asked of our best lossless in the mean, by micro-steps of a step.
MEAN_TARGETS: Mapping[int, float] = {1: 1.25, 4: 1.15}
# In a cell: the race failed, as where cables are too slow. In a mean: of rows with other waits; asked was more than one
# of the two limits that stand beside it.
FAILED, OF_SEVERAL, ABOVE_A_LIMIT = "–", " †", " ‡"
# What is not as usual is named in a case's name (`environment.py`).
_USUAL = re.compile(r"\d+x\d+-(regime)?(?P<column>[\w.]+)-micro\d+(-waiting[\d.]*)?(-in-step)?")
_RACED = re.compile(r": .+ against (?P<theirs>.+), times as fast$")
_PEERS = {"torch-ddp": "DDP", "hsdp": "HSDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What a row's races share. `wait_seconds`: of a block's forward pass; 0 where it computes. `in_step`: ranks began
    each micro-step together."""

    nodes: int
    ranks: int
    micro_steps: int
    wait_seconds: float = 0.0
    in_step: bool = False

    @staticmethod
    def of(line: Line) -> Setting:
        workload = line["case"]["workload"]
        topology, waits = workload["topology"], float(f"{workload['wait_seconds'] or 0.0:.2g}")
        in_step = workload.get("in_step", False)  # of older races nobody asked it
        return Setting(topology["nodes"], topology["ranks_per_node"], workload["micro_steps"], waits, in_step)

    @property
    def waits(self) -> bool:
        return self.wait_seconds > 0

    def same_but_for_waits(self, other: Setting) -> bool:
        mine, theirs = [(s.nodes, s.ranks, s.micro_steps, s.waits, s.in_step) for s in (self, other)]
        return mine == theirs and self != other

    def cells(self) -> tuple[str, str, str]:
        block = f"waits {self.wait_seconds:g} s" if self.waits else "computes"
        return f"{self.nodes} × {self.ranks}", str(self.micro_steps), block + ", in step" * self.in_step


@dataclass(frozen=True, slots=True)
class Standing:
    """Times as fast as the best lossless peer; `most`: with perfect overlap, where the race says what that takes.
    `by_messages`: with that, beside a peer without any overlap, whose messages take what the cables need for them.
    `regime`: of the race, where its column does not say it."""

    found: float
    most: float | None
    by_messages: float | None
    missed: bool
    line: Line
    regime: float | None = None

    def __str__(self) -> str:
        at = "" if self.regime is None else f" at {self.regime:.2g}"
        return _shown(self.found, self.most) + at + ", missed" * self.missed


Row = Mapping[str, Standing]


def standings(lines: Iterable[Line], what: str) -> dict[Setting, dict[str, Standing]]:
    """Of the races of bf16 models of the usual size; `what`: OUR_LOSSLESS or OUR_LOSSY. Rows and columns in order."""
    found: dict[Setting, dict[str, Standing]] = {}
    for line in lines:
        column, standing = column_of(line), standing_of(line, what)
        if column is not None and standing is not None:
            found.setdefault(Setting.of(line), {})[column] = standing
    return {setting: found[setting] for setting in sorted(found)}


def column_of(line: Line) -> str | None:
    """None: raced at a rate that somebody named, in another precision or with a model of another size."""
    found = _USUAL.fullmatch(line["case"]["name"])
    return found["column"] if found is not None and found["column"] in COLUMNS else None


def standing_of(line: Line, what: str) -> Standing | None:
    """None where nobody of that kind took part."""
    for check in line["checks"]:
        if check["what"].startswith(f"{what}: ") and (raced := _RACED.search(check["what"])):
            most = by_messages = None
            if (least := _least_seconds(line, lossless=what == OUR_LOSSLESS)) is not None:
                most = line["median_seconds"][raced["theirs"]] / least
                in_turn = _seconds_without_overlap(line)
                by_messages = None if in_turn is None else in_turn / least
            missed, regime = check.get("met") is False, _regime_to_tell(line)
            return Standing(check["found"], most, by_messages, missed, line, regime)
    return None


def _regime_to_tell(line: Line) -> float | None:
    found, column = line.get("regime", {}).get("found in the race"), column_of(line)
    if found is None or (column not in (None, UNSHAPED) and near(found, float(column or 0))):
        return None
    return float(found)


def _least_seconds(line: Line, lossless: bool) -> float | None:
    """Of a step of any of ours with perfect overlap, and then the optimizer."""
    floors, optimizer = line.get("floor_seconds", {}), line.get("optimizer_seconds", {})
    kinds = line["contestants"]
    ours = [name for name in floors if name in optimizer and kinds[name]["lossless"] is lossless]
    return min((floors[name] + optimizer[name] for name in ours), default=None)


def _seconds_without_overlap(line: Line) -> float | None:
    """A step of a peer that computes, then sends what the lossless peer with the fewest bytes sends, over cables that
    are in use all the time, then steps its optimizer. None where cables have no rate, or the race does not say enough.
    """
    rate, computing = line.get("inter"), line["median_seconds"].get("compute")
    kinds = line["contestants"]
    sent = {
        name: count
        for name, count in line.get("bytes_between_nodes", {}).items()
        if name in kinds and kinds[name]["lossless"] and not kinds[name]["ours"]
    }
    if rate is None or computing is None or not sent:
        return None
    workload = line["case"]["workload"]
    fewest = min(sent, key=sent.__getitem__)
    optimizer = line.get("optimizer_seconds", {}).get(fewest)
    if optimizer is None:
        return None
    through_a_cable = sent[fewest] / workload["topology"]["nodes"]  # in each direction: nodes send alike
    sending = through_a_cable / Rate.parse(rate).bytes_per_second
    return computing * workload["micro_steps"] + sending + optimizer


def means_of(row: Row, others: Sequence[Row], asked: float | None, mark: Callable[[Line], str]) -> tuple[str, str]:
    """The geometric ones, as found and by messages alone. What a row has not, it takes of `others`, the first that has
    it; none, where that would be most of it, or nobody has it."""
    columns = [f"{regime:g}" for regime in OF_THE_MEAN]
    own = [column for column in columns if column in row]
    each = [next((r[column] for r in (row, *others) if column in r), None) for column in columns]
    known = [one for one in each if one is not None]
    if len(known) < len(columns) or 2 * len(own) < len(columns):
        return "", ""
    found = geometric_mean([one.found for one in known])
    most = _mean_of_all([one.most for one in known])
    by_messages = _mean_of_all([one.by_messages for one in known])
    several, age = OF_SEVERAL * (len(own) < len(columns)), max(mark(standing.line) for standing in known)
    missed = ""
    if asked is not None and found < asked:
        limited = any(limit is not None and limit < asked for limit in (most, by_messages))
        missed = ", missed" + ABOVE_A_LIMIT * limited
    return (
        _shown(found, most) + several + missed + age,
        "" if by_messages is None else f"{by_messages:.3f}{several}{age}",
    )


def _mean_of_all(each: Sequence[float | None]) -> float | None:
    known = [one for one in each if one is not None]
    return geometric_mean(known) if len(known) == len(each) else None


def _shown(found: float, most: float | None) -> str:
    return f"{found:.2f}" if most is None else f"{found:.2f} of {most:.2f}"


def rows(lines: Iterable[Line], what: str, mark: Callable[[Line], str] = lambda line: "") -> list[Sequence[str]]:
    """Under HEADINGS; `mark`: what is said beside a figure of that race. Of a case that failed, only that it did."""
    lines = list(lines)
    found = standings([line for line in lines if "failed" not in line], what)
    failed = {(Setting.of(line), column_of(line)) for line in lines if "failed" in line and column_of(line)}
    made: list[Sequence[str]] = []
    for setting, row in found.items():
        cells = [
            f"{row[column]}{mark(row[column].line)}" if column in row else FAILED * ((setting, column) in failed)
            for column in COLUMNS
        ]
        # The longest waits first: what the cores take of a step is least there.
        others = [found[other] for other in sorted(found, reverse=True) if setting.same_but_for_waits(other)]
        asked = MEAN_TARGETS.get(setting.micro_steps) if what == OUR_LOSSLESS else None
        made.append((*setting.cells(), *cells, *means_of(row, others, asked, mark)))
    return made


def headline(lines: Sequence[Line], is_old: Callable[[Line], bool] = lambda line: False) -> str:
    """A few sentences: from the race that won us least to the one that won us most. `is_old`: whether the code has
    changed since that race. Races of ranks in step are left out: others are of ranks as they come."""
    lines = [line for line in lines if column_of(line) is not None and not Setting.of(line).in_step]
    old = sum(map(is_old, lines))
    aged = f" Of these {len(lines)} races {old} were run before the code changed; the tables mark them." if old else ""

    def span(what: str, columns: Sequence[str], waits: bool | None = None) -> str:
        return _span(
            row[column].found
            for setting, row in standings(lines, what).items()
            for column in columns
            if column in row and waits in (None, setting.waits)
        )

    def told(columns: Sequence[str], waits: bool | None = None, bold: str = "") -> str:
        lossless, lossy = (f"{bold}{span(what, columns, waits)}{bold}" for what in (OUR_LOSSLESS, OUR_LOSSY))
        return f"{lossless} times as fast without codecs and {lossy} times with them"

    return (
        f"Raced on shaped clusters of two to four nodes, all on one machine of {_cores(lines)} cores (CPUs, gloo, a "
        "GPT of 17 million parameters in bf16), against the best lossless peer, "
        f"{_peers(lines)}, as experts tune them. Where FSDP2 "
        "would communicate four to eight times as long as it computes, our best was "
        f"{told(('8', '4'), False, '**')}; with blocks that wait, as for a device of their own, "
        f"{told(('8', '4'), True, '**')}. Where it communicates as long as it computes, "
        f"{told(('1',))}. Against PyTorch's own lossy peer, DDP with PowerSGD, "
        f"our best with codecs was {_span(_over_lossy_peers(lines))} times as fast.{aged}"
    )


def _span(found: Iterable[float]) -> str:
    each = list(found)
    return f"{min(each):.2f} to {max(each):.2f}" if each else "?"


def _cores(lines: Iterable[Line]) -> str:
    return " or ".join(str(cores) for cores in sorted({line["host"]["cores"] for line in lines})) or "?"


def _peers(lines: Iterable[Line]) -> str:
    """Whose they are, in the races that a row shows; and in how many, where not in all."""
    raced = [{_library(name) for name, about in line["contestants"].items() if not about["ours"]} for line in lines]
    told = [
        name if count == len(raced) else f"{name} (in {count} of {len(raced)} races)"
        for name in _PEERS.values()
        if (count := sum(name in each for each in raced))
    ]
    return " or ".join(told) or "?"


def _library(name: str) -> str | None:
    return _PEERS.get(name.split()[0])


def _over_lossy_peers(lines: Iterable[Line]) -> Iterable[float]:
    """Our best with codecs, times as fast as the best peer with a narrower hook, where one took part."""
    for line in lines:
        kinds, seconds = line["contestants"], line["median_seconds"]
        lossy = [name for name in line["communication_share"] if not kinds[name]["lossless"]]
        ours, theirs = ([seconds[name] for name in lossy if kinds[name]["ours"] is one] for one in (True, False))
        if ours and theirs:
            yield min(theirs) / min(ours)
