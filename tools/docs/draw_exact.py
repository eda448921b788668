"""The picture and the tables of docs/concepts/exact.md, from the results of the suites `exact` and `exact_kernels`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from towpath.cli.plots import color, standalone_svg

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "exact_bits.svg"
ROWS = {"gradients": "gradients", "1e-03": "weights, lr 1e-3", "1e-04": "weights, lr 1e-4", "1e-05": "weights, lr 1e-5"}
# The bits of an element, and how many of them are the sign and the mantissa.
DTYPES = {"bfloat16": (16, 8), "float16": (16, 11), "float32": (32, 24)}
_COLORS = {"sign and mantissa, sent as they are": color(0), "sent, encoded": color(5), "not sent": "#ced4da"}
_RATIOS = (8, 4, 2, 1)


def _runs(suite: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the last run of each case, by its name."""
    return {run["case"]["name"]: run for run in results.last(results.read(results.file_of(suite))).values()}


def _figure(run: Mapping[str, Any], name: str) -> float:
    return next(check["found"] for check in run["checks"] if check["what"] == name)


def picture() -> str:
    bits = {name: _figure(run, "bits per element") for name, run in _runs("exact_kernels").items()}
    return standalone_svg(_draw, bits, (9.0, 4.6))


def _draw(figure: Any, bits: Mapping[str, float]) -> None:
    for axes, (dtype, (width, kept)) in zip(figure.subplots(len(DTYPES), 1), DTYPES.items(), strict=True):
        for place, name in enumerate(ROWS):
            sent = bits[f"{dtype}-{name}"]
            plain = kept if name == "gradients" else 0
            left = 0.0
            for label, length in zip(_COLORS, (plain, sent - plain, width - sent), strict=True):
                axes.barh(
                    place, length, left=left, color=_COLORS[label], height=0.7, label=label if not place else None
                )
                left += length
            axes.annotate(f"{sent:.1f}", (sent, place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(ROWS)), list(ROWS.values()))
        axes.invert_yaxis()
        axes.set_xlim(0, width)
        axes.set_title(f"{dtype}: bits of an element", loc="left", fontsize=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def speeds() -> str:
    """Return the table of speed and bits of the codecs, next to zstd."""
    wide, narrow = _runs("exact_kernels"), _runs("exact_kernels-avx2")
    lines = ["| elements | bits | bits, zstd | AVX-512 | AVX2 | zstd | commit |", "|---|---|---|---|---|---|---|"]
    for dtype in DTYPES:
        for name, words in ROWS.items():
            run = wide[f"{dtype}-{name}"]
            both = [f"{_figure(each, 'both, GB/s'):.2f}" for each in (run, narrow[f"{dtype}-{name}"])]
            lines.append(
                f"| {dtype} {words} | {_figure(run, 'bits per element'):.1f} | "
                f"{_figure(run, 'zstd-1 bits per element'):.1f} | {' | '.join(both)} | "
                f"{_figure(run, 'zstd-1 both, GB/s'):.2f} | {results.measured_at(run)} |"
            )
    return "\n".join(lines)


def steps() -> str:
    """Return the table of speed-ups over the best lossless peer."""
    runs = _runs("exact")
    heads = " | ".join(f"{ratio} : 1" for ratio in _RATIOS)
    lines = [f"| blocks | micro-steps | strategy | {heads} | mean |", f"|---|---|---|{'---|' * (len(_RATIOS) + 1)}"]
    for blocks, suffix in (("compute", ""), ("wait", "-waiting")):
        for micro_steps in (1, 4):
            found = [runs.get(f"ratio{ratio}-micro{micro_steps}{suffix}") for ratio in _RATIOS]
            for words, is_exact in (("exact", True), ("without", False)):
                figures = [None if run is None else _speedup(run, is_exact) for run in found]
                cells = " | ".join("–" if speed is None else f"{speed:.2f}" for speed in figures)
                known = [speed for speed in figures if speed is not None]
                mean = f"{statistics.fmean(known):.2f}" if len(known) == len(figures) else "–"
                lines.append(f"| {blocks} | {micro_steps} | {words} | {cells} | {mean} |")
    return "\n".join(lines)


def _speedup(run: Mapping[str, Any], is_exact: bool) -> float | None:
    """Return the speed-up of the best strategy with exact transports, or without, over the best peer."""
    found = (
        check["found"]
        for check in run["checks"]
        if " against " in check["what"]
        and not check["what"].startswith("auto ")
        and ("exact=true" in check["what"].partition(" against ")[0]) == is_exact
    )
    return next(found, None)


TABLES = {"exact-speeds": speeds, "exact-steps": steps}
PICTURES = {PICTURE: picture}
