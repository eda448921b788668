"""Results in a terminal of a hundred columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from towpath.bench.harness.figures import verdict
from towpath.train.progress import size

WIDTH = 100
_HEADS = ("contestant", "", "step", "interval", "speed", "comm.", "sent", "cpu s", "memory")
_COLUMNS = (29, 2, 8, 15, 6, 5, 9, 7, 9)


def strategies_table(line: dict[str, Any]) -> str:
    """One environment: everybody who raced, the quickest first, whoever loses; then the pairs."""
    head = f"{line['case']['name']}: {_about(line)}"
    if "failed" in line:
        return _fitted([head, *_notes(f"FAILED: {line['failed']}")])
    rows = [_HEADS, *(_row(line, name) for name in _by_speed(line))]
    body = [_aligned(row) for row in rows]
    body += ["marks: + ours, ~ lossy, r a peer with our ring; speed: times as fast as the best lossless peer"]
    pairs = [f"  {text}" for check in line["checks"] for text in _wrapped(verdict(check))]
    notes = [text for name, why in line.get("skipped", {}).items() for text in _notes(f"not measured: {name}: {why}")]
    notes += [text for warning in line["warnings"] for text in _notes(f"warning: {warning}")]
    return _fitted([head, *body, *pairs, *notes])


def _about(line: dict[str, Any]) -> str:
    regime = line.get("regime", {}).get("found in the race")
    told = [] if line.get("inter") is None else [f"cables of {line['inter']}"]
    told += [] if regime is None else [f"communication : compute {regime:.2f}"]
    return ", ".join([*told, f"{line.get('rounds', 0)} rounds"])


def _by_speed(line: dict[str, Any]) -> list[str]:
    return sorted(line["communication_share"], key=lambda name: line["median_seconds"][name])


def best_lossless_peer(line: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step of the fastest lossless peer, or None if none took part."""
    peers = [
        line["median_seconds"][name]
        for name, about in line["contestants"].items()
        if name in line["communication_share"] and not about["ours"] and about["lossless"]
    ]
    return min(peers, default=None)


def marks(about: dict[str, Any]) -> str:
    return "+" * about["ours"] + "~" * (not about["lossless"]) + "r" * about["helped"]


def _row(line: dict[str, Any], name: str) -> tuple[str, ...]:
    seconds, interval, peer = line["median_seconds"][name], line["intervals"][name], best_lossless_peer(line)
    return (
        name,
        marks(line["contestants"][name]),
        f"{seconds:.4g} s",
        f"{interval['low']:.4g}–{interval['high']:.4g}",
        "" if peer is None else f"{peer / seconds:.2f}",
        f"{line['communication_share'][name]:.0%}",
        size(line["bytes_between_nodes"][name]),
        f"{line['processor_seconds'][name]:.4g}",
        size(line["memory_bytes"][name]),
    )


def _aligned(row: Sequence[str]) -> str:
    """Names to the left, figures to the right."""
    cells = [
        text[:width].ljust(width) if column < 2 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, _COLUMNS, strict=True))
    ]
    return " ".join(cells).rstrip()


def _notes(text: str) -> list[str]:
    return [f"  {part}" for part in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Long lines go on in the next, indented."""
    lines, limit = [""], WIDTH - 6
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return lines


def _fitted(lines: Sequence[str]) -> str:
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)
