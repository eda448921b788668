"""What a training run did, at its end: where the time went, and what each kind of transfer sent over which link.

All seconds are one rank's, of the thread that trains. Bytes are those of all ranks together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from towpath.observing import Stats, Sums, TransferStats
from towpath.train.observe.progress import size

# Least seconds that have a row of their own, as a share of all.
_WORTH_A_ROW = 0.0005
_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the loop's clocks tell. `passes`: forward and backward, with what they wait for. `others`: by name, what
    else the thread that trains did. `aside`: what the engine counted outside of `passes`, in evaluations."""

    total_seconds: float
    passes_seconds: float
    others: Mapping[str, float]
    aside: Sums = field(default_factory=Sums)


def summary(done: Stats, spent: Spent, steps: int, *, tensor: bool = False) -> str:
    """`done`: of the whole run, `stats(model).since(before)`. A text of 100 columns, for terminals and files.

    `tensor`: whether ranks share layers, and so send each other what PyTorch's DTensor counts nowhere.
    """
    left_out = "\nwithout the sums of tensor-parallel layers, which are counted nowhere" if tensor else ""
    told = Group(
        Text(f"Where the time went ({steps} steps, {spent.total_seconds:.1f} s)"),
        _times_table(done, spent, steps),
        Text(f"\nWhat was sent, by all ranks together (in flight and exposed: this rank's seconds){left_out}"),
        _transfers_table(done, steps),
    )
    out = io.StringIO()
    Console(file=out, width=_COLUMNS, color_system=None, highlight=False).print(told)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def times(done: Stats, spent: Spent) -> dict[str, float]:
    """Seconds by what they went to; all together they are the whole run's."""
    exposed = dict(_exposed(done, spent.aside))
    host = max(0.0, done.seconds_host - spent.aside.host_seconds)
    found = {"compute": max(0.0, spent.passes_seconds - sum(exposed.values()) - host)}
    found.update({f"waiting for {kind}": seconds for kind, seconds in exposed.items()})
    found["the engine's own work"] = host
    found.update(spent.others)
    found["the rest"] = max(0.0, spent.total_seconds - sum(found.values()))
    return found


def _exposed(done: Stats, aside: Sums) -> Iterator[tuple[str, float]]:
    for kind in dict.fromkeys(t.transfer.kind for t in done.transfers):
        whole = sum(t.seconds_exposed for t in done.transfers if t.transfer.kind is kind)
        yield kind.value, max(0.0, whole - aside.exposed_seconds.get(kind, 0.0))


def _times_table(done: Stats, spent: Spent, steps: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="")
    table.add_column("")
    for heading in ("seconds", "a step", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    total = spent.total_seconds
    for name, seconds in times(done, spent).items():
        if seconds >= _WORTH_A_ROW * total:
            table.add_row(name, f"{seconds:.2f}", _each(seconds, steps), f"{seconds / total:.1%}" if total else "")
    table.add_row("all", f"{total:.2f}", _each(total, steps), "")
    return table


def _each(seconds: float, steps: int) -> str:
    return f"{seconds / steps * 1e3:.1f} ms" if steps else ""


def _transfers_table(done: Stats, steps: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="")
    table.add_column("transfer", no_wrap=True)
    table.add_column("by", overflow="fold")
    for heading in ("calls", "in nodes", "a step", "between", "a step", "in flight", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (kind, way), mine in _by_way(done.transfers).items():
        table.add_row(kind, way, *_sums(mine, steps))
    table.add_row("all", "", *_sums(list(done.transfers), steps))
    return table


def _by_way(transfers: tuple[TransferStats, ...]) -> dict[tuple[str, str], list[TransferStats]]:
    """By kind, route and codec: units are alike."""
    found: dict[tuple[str, str], list[TransferStats]] = {}
    for each in transfers:
        transfer = each.transfer
        codec = "" if transfer.transport.encoding is None else f", {transfer.transport.encoding}"
        found.setdefault((transfer.kind.value, f"{transfer.route}{codec}"), []).append(each)
    return found


def _sums(transfers: list[TransferStats], steps: int) -> list[str]:
    inside, between = sum(t.intra_bytes for t in transfers), sum(t.inter_bytes for t in transfers)
    return [
        str(sum(t.calls for t in transfers)),
        size(inside),
        size(inside / steps) if steps else "",
        size(between),
        size(between / steps) if steps else "",
        f"{sum(t.seconds_in_flight for t in transfers):.2f} s",
        f"{sum(t.seconds_exposed for t in transfers):.2f} s",
    ]
