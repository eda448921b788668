"""Put small defects (mutants) into the sources, one at a time, and check that a test fails with each.

The mutants are listed in mutants.toml. The sources themselves stay as they are: each mutant gets its own copy.

Examples:
    python tools/mutants/run.py --list                   show all mutants, and whether they fit the sources
    python tools/mutants/run.py prefetch simulated_engine    run those whose name or function contains one of the words
    python tools/mutants/run.py --shard 2/6 --report mutants.md

The exit status is 1 if a mutant survived, was not found, or could not be tested.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.mutants.locate import Mutant, NotFoundError, read
from tools.mutants.trial import BROKEN, CAUGHT, NOT_FOUND, ROOT, SURVIVED, Outcome, tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="choose mutants by name or function (default: all)")
    parser.add_argument("--list", action="store_true", help="show the chosen mutants without running a test")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="run part I of N")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the result to FILE instead of stdout")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="run N mutants at once (default: 2)")
    options = parser.parse_args()

    listed = read(Path(__file__).with_name("mutants.toml"))
    chosen = [m for m in listed if _matches(m, options.words)][options.shard[0] - 1 :: options.shard[1]]
    if not chosen:
        parser.error("no mutant matches; --list shows all of them")
    if options.list:
        sys.exit(not _show(chosen))
    outcomes = _run(chosen, options.workers)
    report = _report(outcomes)
    if options.report is None:
        print(report, end="")
    else:
        options.report.write_text(report, encoding="utf-8")
    sys.exit(any(outcome.status != CAUGHT for _, outcome in outcomes))


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N, such as 2/6")
    return int(part), int(parts)


def _matches(mutant: Mutant, words: Sequence[str]) -> bool:
    text = f"{mutant.name} {mutant.where}".lower()
    return not words or any(word.lower() in text for word in words)


def _show(mutants: Sequence[Mutant]) -> bool:
    """Print each mutant, and to stderr those that do not fit the sources. Return whether all do."""
    missing = 0
    for mutant in mutants:
        where = f"{mutant.name} ({mutant.where})"
        try:
            mutant.mutated(ROOT)
            print(f"{where}: found")
        except NotFoundError as error:
            missing += 1
            print(f"{where}: NOT FOUND, {error}", file=sys.stderr)
    print(f"{len(mutants)} mutants, {missing} not found")
    return not missing


def _run(mutants: Sequence[Mutant], workers: int) -> list[tuple[Mutant, Outcome]]:
    """Try all `mutants`, and print the outcome of each to stderr as soon as it is known."""
    outcomes: list[tuple[Mutant, Outcome]] = []
    with ThreadPoolExecutor(workers) as pool:
        trials = {pool.submit(tried, mutant): mutant for mutant in mutants}
        for trial in as_completed(trials):
            mutant, outcome = trials[trial], trial.result()
            outcomes.append((mutant, outcome))
            status = outcome.status if outcome.status == CAUGHT else outcome.status.upper()
            print(
                f"[{len(outcomes)}/{len(mutants)}] {mutant.name}: {status} {outcome.detail} ({outcome.seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


def _report(outcomes: Sequence[tuple[Mutant, Outcome]]) -> str:
    """Return a Markdown table that begins with the mutants that need work."""
    order = (SURVIVED, NOT_FOUND, BROKEN, CAUGHT)
    count = {status: sum(o.status == status for _, o in outcomes) for status in order}
    described = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = [
        "# Mutants",
        "",
        f"Commit {commit or 'unknown'}, {time.strftime('%Y-%m-%d')}. {len(outcomes)} mutants: "
        + ", ".join(f"{count[status]} {status}" for status in order)
        + ".",
        "",
        "| mutant | where | result |",
        "| --- | --- | --- |",
    ]
    for mutant, outcome in sorted(outcomes, key=lambda pair: (order.index(pair[1].status), pair[0].name)):
        status = outcome.status if outcome.status == CAUGHT else f"**{outcome.status}**"
        detail = outcome.detail.replace("|", "\\|")
        lines.append(f"| {mutant.name} | `{mutant.where}` | {status}{detail and ': ' + detail} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
