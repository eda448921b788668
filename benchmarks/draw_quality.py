"""What benchmarks/quality.py found, judged and drawn: the last run of each variant and seed.

python benchmarks/draw_quality.py [-o benchmarks/results/quality.svg]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality import VARIANTS
from towpath.bench.harness import results


def judged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By variant: its final loss over zero3's with the same seed, less one; in the mean, and by seed."""
    final = {(r["case"]["variant"], r["case"]["seed"]): r["final"] for r in runs}
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        shares = [f / final["zero3", s] - 1 for (name, s), f in final.items() if name == variant.name]
        if shares and variant.name != "zero3":
            rows.append(
                {"variant": variant.name, "mean": statistics.mean(shares), "each": shares, "most": variant.most}
            )
    return rows


def plot(runs: list[dict[str, Any]], variants: Sequence[str], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for variant in variants:
        curves = [r["curve"] for r in runs if r["case"]["variant"] == variant]
        if not curves:
            continue
        steps = [step for step, _ in curves[0]]
        means = [statistics.mean(curve[i][1] for curve in curves) for i in range(len(steps))]
        for axes, first in ((whole, 0), (end, len(steps) // 2)):
            axes.plot(steps[first:], means[first:], label=variant, linewidth=1.4)
    for axes in (whole, end):
        axes.set_xlabel("optimizer steps")
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_ylabel("validation loss (nats a byte), mean of the seeds")
    whole.legend(frameon=False)
    end.set_title("the second half, enlarged", fontsize=10)
    figure.tight_layout()
    matplotlib.rcParams["svg.hashsalt"] = "towpath"
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=results.FOLDER / "quality.svg")
    options = parser.parse_args()
    runs = list(results.last(results.read(results.file_of("quality"))).values())
    for row in judged(runs):
        asked = "worse is expected" if row["most"] is None else f"asked ≤ {row['most']:.1%}"
        each = ", ".join(f"{share:+.2%}" for share in row["each"])
        print(f"{row['variant']}: {row['mean']:+.2%} of zero3's loss ({asked}); by seed {each}")
    plot(runs, [variant.name for variant in VARIANTS], options.output)


if __name__ == "__main__":
    main()
