"""Defects that nobody chose: 60 drawn, with a fixed seed, of all that cosmic-ray can put into the heart of the package.

    python -m pip install cosmic-ray
    python tests/mutants/drawn.py [NUMBER …]    those numbers of the draw; all, if none is given

A place is drawn first, then what to make of it. Annotations are left out: nothing evaluates them. A defect is killed,
or it changes nothing that could be noticed: equivalent.toml says of each such why. Everything else is a survivor: the
exit status is then 1. Outcomes are kept in drawn.jsonl, by number and change, and written to tests/mutants-drawn.md.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants.trial import ROOT, Outcome, commit, tried

FOLDERS = ("core", "engine", "collectives", "codecs")
SEED, COUNT = 22, 60
RESULT = ROOT / "tests" / "mutants-drawn.md"
KEPT = Path(__file__).with_name("drawn.jsonl")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
AT_ONCE = 2

# What has to do with the four folders, the quickest first. Command lines, data and the lab come to know of a defect in
# them only through what these tests ask of them directly.
UNIT = [
    f"tests/unit/test_{name}.py"
    for name in (
        *("routes", "schedule", "strategies", "transitions", "units", "placement", "blocks", "encoded_wires"),
        *("codecs", "journal", "native_codecs", "streams", "in_place", "meeting", "activity", "public", "checkpoint"),
        *("checkpoint_parts", "triton_codecs"),
    )
]
RANKS = [
    f"tests/ranks/test_{name}.py"
    for name in (
        *("engine_promises", "routes", "codecs", "schedule_is_executed", "encoded_training", "never_silent", "values"),
        *("precision", "uneven", "divergence", "entry_points", "around_the_loop", "optimizers", "every_model"),
        *("steady", "checkpoint", "parity", "trace"),
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    number: int
    file: str
    line: int
    operator: str
    mutated: str  # the whole file

    def put_into(self, root: Path) -> None:
        (root / self.file).write_text(self.mutated, encoding="utf-8")

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.file, *self.change)

    @property
    def change(self) -> tuple[str, str]:
        """The lines that go, and those that come."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = list(difflib.unified_diff(before, self.mutated.splitlines(), n=0, lineterm=""))[2:]
        gone, come = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
        return " ".join(gone), " ".join(come)


def draw() -> list[Drawn]:
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    chosen = random.Random(SEED)
    places: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / "src" / "towpath" / folder).rglob("*.py")):
            for operator, occurrence, start in _possible(path):
                places[str(path.relative_to(ROOT)), start].append((operator, occurrence))
    drawn: list[Drawn] = []
    for number, place in enumerate(chosen.sample(sorted(places), COUNT), 1):
        file, (line, _) = place
        operator, occurrence = chosen.choice(sorted(places[place]))
        source = (ROOT / file).read_text(encoding="utf-8")
        mutated = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
        assert mutated is not None
        drawn.append(Drawn(number=number, file=file, line=line, operator=operator.split("/")[1], mutated=mutated))
    return drawn


def _possible(path: Path) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Each operator of cosmic-ray that needs no argument, its occurrences in the file, and where they are."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    nodes, annotations = list(ast_nodes(get_ast_from_path(path))), _annotations(path)
    for name in sorted(cosmic_ray.plugins.operator_names()):
        operator: Any = cosmic_ray.plugins.get_operator(name)
        if operator.arguments():
            continue
        positions = (position for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(begin <= start < end for begin, end in annotations):
                yield name, occurrence, start


def _annotations(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, (ast.AnnAssign, ast.arg)):
            found.append(node.annotation)
    return [
        ((e.lineno, e.col_offset), (e.end_lineno or e.lineno, e.end_col_offset or e.col_offset)) for e in found if e
    ]


# --- outcomes --------------------------------------------------------------------------------------------------------


def kept() -> dict[tuple[int, str, str, str], str]:
    """By number, file and change: who killed it, the newest outcome."""
    rows = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines()) if KEPT.exists() else ()
    return {(row["number"], row["file"], row["old"], row["new"]): row["killer"] for row in rows}


def keep(drawn: Drawn, outcome: Outcome) -> None:
    old, new = drawn.change
    row = {"number": drawn.number, "file": drawn.file, "old": old, "new": new, "killer": outcome.killer}
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "commit": commit(), "seconds": round(outcome.seconds)}) + "\n")


def reasons() -> dict[tuple[str, str, str], str]:
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", []) if EQUIVALENT.exists() else []
    return {(e["file"], e["old"], e["new"]): e["reason"] for e in entries}


def table(draw: list[Drawn]) -> tuple[str, int]:
    """And how many survive."""
    outcomes, why = kept(), reasons()
    rows: list[str] = []
    counts = dict.fromkeys(("killed", "equivalent", "survived", "not run"), 0)
    for drawn in draw:
        old, new = drawn.change
        killer, reason = outcomes.get((drawn.number, drawn.file, old, new)), why.get((drawn.file, old, new))
        kind = "killed" if killer else "equivalent" if reason else "not run" if killer is None else "survived"
        counts[kind] += 1
        told = killer or (f"equivalent: {reason}" if reason else f"**{kind}**")
        cells = (f"`{drawn.file}:{drawn.line}`", *(f"`{text}`" for text in (old, new)), told)
        rows.append(f"| {drawn.number} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines = [
        "# Defects drawn at random",
        "",
        f"{COUNT} drawn by cosmic-ray's operators with seed {SEED} over {', '.join(FOLDERS)}; written by",
        f"`python tests/mutants/drawn.py` at {commit()}, {time.strftime('%Y-%m-%d')}: "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        + ".",
        "",
        "| | where | from | to | caught by |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]
    return "\n".join(lines), counts["survived"] + counts["not run"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--list", action="store_true", help="only say what is drawn")
    arguments = parser.parse_args()
    everything = draw()
    known = reasons()
    chosen = [d for d in everything if not arguments.numbers or d.number in arguments.numbers]
    if arguments.list:
        for drawn in chosen:
            print(f"{drawn.number} {drawn.file}:{drawn.line} {drawn.operator}")
            print("  - {}\n  + {}".format(*drawn.change))
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trials = {
            pool.submit(tried, drawn.put_into, (UNIT, RANKS)): drawn for drawn in chosen if drawn.key not in known
        }
        for trial in as_completed(trials):
            drawn, outcome = trials[trial], trial.result()
            keep(drawn, outcome)
            told = outcome.killer or "SURVIVED"
            print(f"{drawn.number} {drawn.file}:{drawn.line}: {told} ({outcome.seconds:.0f} s)", flush=True)
    text, surviving = table(everything)
    RESULT.write_text(text, encoding="utf-8")
    sys.exit(surviving > 0)


if __name__ == "__main__":
    main()
