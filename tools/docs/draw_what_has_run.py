"""The table of docs/reference/what-has-run.md, and README's sentence about the GPU.

CPU tests are the last recorded run (tests/results/cpu.json, by `make parity` or pytest's `--record-to`). Tests on one
GPU are tests/results/gpu/, where the files of a run of `python3 tools/gpu.py --out DIR` are copied to be committed.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tests.features import FEATURES
from tools.docs import figures

RESULTS = figures.ROOT / "tests" / "results"
OUTCOMES = ("passed", "failed", "skipped", "hung", "not reached")
NEVER = "never"
_MENDED = " (mended, not run again)"  # at the end of a case's error, by hand


def table() -> str:
    """Return a row for each feature: how its tests ended on CPUs, and how its cases ended on one GPU."""
    by_file: Mapping[str, Mapping[str, int]] = _read("cpu.json")["files"]
    on_gpu = _on_gpu()
    body: list[figures.Row] = []
    for feature in FEATURES:
        on_cpus = _sum(by_file.get(file, {}) for file in feature.files)
        body.append((feature.name, _in_words(on_cpus), _in_words(on_gpu.get(feature.name, {})), NEVER, NEVER))
    total = _in_words(_sum(by_file.values())), _in_words(_sum(on_gpu.values()))
    body.append(("**all, with tests of tools and pages**", *total, NEVER, NEVER))
    return figures.table(("feature", "CPU tests, gloo", "one GPU, NCCL", "several GPUs", "several machines"), body)


def runs() -> str:
    """Return where and when both runs took place, and why cases failed."""
    cpu, gpu = _read("cpu.json"), _read("gpu/environment.json")
    versions = ", ".join(f"{name} {gpu[name]}" for name in ("torch", "triton", "nccl"))
    command = "make test" if "not parity" in cpu["selected"] else "make parity"
    changed = "" if cpu["clean"] else ", with changes that were not committed"
    where = (
        f"- **CPU tests**: `{command}` on {cpu['date']}, commit {cpu['commit'][:8]}{changed}, {cpu['cores']} cores, "
        f"{cpu['seconds'] / 60:.0f} minutes.",
        f"- **One GPU**: {gpu['date']}, commit {gpu['commit'][:8]}, {gpu['device']}, {versions}. {gpu.get('note', '')}",
    )
    left = f"    - {_not_reached():,} not reached."
    lines = [*where, *(f"    - failed: {reason}." for reason in _reasons()), left]
    return "\n".join(
        textwrap.fill(line, 120, subsequent_indent=" " * (line.index("-") + 2), break_on_hyphens=False)
        for line in lines
    )


def status() -> str:
    """Return README's status."""
    gpu = _read("gpu/environment.json")
    count = Counter(case["outcome"] for case in _cases())
    count["not reached"] = _not_reached()
    found, reasons = count["failed"] + count["hung"], _reasons()
    again = f" All {len(reasons)} causes are mended, and have not been run again." * all(_MENDED in r for r in reasons)
    said = (
        "**Status: beta on CPUs, untested on GPU clusters.** Data has never been sent between two GPUs. On one GPU "
        f"({gpu['device']}, {gpu['date'][:10]}), {count['passed']} tests passed, {count['not reached']} were not "
        f"reached, and {found} failed. Why: {', '.join(reason.removesuffix(_MENDED) for reason in reasons)}.{again} "
        "[What has run where](docs/reference/what-has-run.md)"
    )
    return textwrap.fill(said, 120, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False)


def _reasons() -> list[str]:
    """Return why cases failed, with the number of each reason."""
    why = Counter(case["error"].strip().splitlines()[-1] for case in _cases() if case["outcome"] in ("failed", "hung"))
    return [f"{count:,} because {reason}" for reason, count in why.most_common()]


def _not_reached() -> int:
    # The first run was cut off before it had named all its tests.
    unnamed = sum(_read("gpu/environment.json").get("not_reached", {}).values())
    return unnamed + sum(case["outcome"] == "not reached" for case in _cases())


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / "gpu" / "cases.jsonl").read_text(encoding="utf-8").splitlines()]


def _on_gpu() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for case in _cases():
        found.setdefault(case["feature"], Counter())[case["outcome"]] += 1
    return found


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total


def _in_words(count: Mapping[str, int]) -> str:
    return ", ".join(f"{count[outcome]:,} {outcome}" for outcome in OUTCOMES if count.get(outcome)) or NEVER


TABLES = {"what-has-run": table, "where-it-ran": runs, "status": status}
