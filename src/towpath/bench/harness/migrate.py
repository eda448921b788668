"""Results from before the harness, as the first lines of its files; what they said is kept word for word.

    python -m towpath.bench.harness.migrate benchmarks/results/*.json

Each suite had a form of its own for what was asked: `checks` says it in that of the harness besides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NOTE = "before the harness"


def migrated(suite: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"suite": suite, "harness": 1, "note": NOTE, "date": result["environment"].get("date")}
        | {**result, "checks": checks(result)}
        for result in document["results"]
    ]


def checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    if "checks" in result:
        return result["checks"]
    if "ratios" in result:
        return [_check(f"{ours} / {theirs}", found, at_most=most) for ours, theirs, found, most in result["ratios"]]
    if "figures" in result:
        asked = result["asked"]
        return [_check(name, found, at_least=asked.get(name)) for name, found in result["figures"].items()]
    if "ratio" in result:
        return [_check("towpath train / bare loop", result["ratio"], at_most=result["asked"])]
    if "peak_bytes" in result:
        return [_check("peak bytes of a rank", max(result["peak_bytes"]), at_most=result["limit_bytes"])]
    plain = ("background held / at once held", "final", "rows_lost")
    return [_check(name, result[name]) for name in plain if name in result]


def _check(what: str, found: float, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    line: dict[str, Any] = {"what": what, "found": found}
    if at_most is not None:
        return line | {"at_most": at_most, "met": found <= at_most}
    if at_least is not None:
        return line | {"at_least": at_least, "met": found >= at_least}
    return line | {"met": None}


def main() -> None:
    for name in sys.argv[1:]:
        old = Path(name)
        new = old.with_suffix(".jsonl")
        if new.exists():
            raise SystemExit(f"{new} exists: old results can only be its first lines.")
        lines = migrated(old.stem, json.loads(old.read_text(encoding="utf-8")))
        new.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        print(f"{old} -> {new}: {len(lines)} lines")


if __name__ == "__main__":
    main()
