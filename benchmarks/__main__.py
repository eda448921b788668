"""The command line of the benchmarks: `python -m benchmarks SUITE [CASE …]` and `python -m benchmarks report`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.suite import Parser, Suite
from towpath.errors import ConfigError

# By suite, the module that has it and what it measures.
SUITES = {
    "strategies": ("strategies", "steps of every strategy against tuned DDP, FSDP2, HSDP and DeepSpeed"),
    "scaling": ("strategies", "steps on 1, 2, 4 and 8 nodes, with constant work per rank, and in total"),
    "overhead": ("overhead", "one rank against the bare module, and the engine's time on the host"),
    "step_check": ("overhead", "the time that ranks need to compare what they did in a step"),
    "host": ("host", "the time on the host of one rank among 64, per unit"),
    "gpu": ("gpu", "what one GPU can show: calls, the host's time, a step, bytes"),
    "checkouts": ("overhead", "steps of another commit against steps of this one"),
    "ablations": ("ablations", "one part at a time: kernels, message sizes, routes, group sizes, placements"),
    "muon": ("ablations", "optimizer.step() of Muon on matrix owners, against every rank doing all of it"),
    "lora": ("ablations", "steps in which only PEFT's adapters train"),
    "engine": ("overlap", "a step against its own parts, and memory over many steps"),
    "timeline": ("overlap", "the share of communication that runs while the device computes"),
    "collectives": ("collectives", "our routes against the flat one"),
    "kernels": ("kernels", "the codecs' kernels against a copy of memory and the reference implementation"),
    "exact": ("exact", "steps with exact transport against the best peers, and against those without it"),
    "exact_bytes": ("exact_bytes", "what exact transport sends when a GPT trains on text"),
    "wires": ("wires", "bytes and steps of FSDP2, HSDP and DDP with towpath.wires, against the same without"),
    "exact_kernels": ("exact_kernels", "the exact codecs against a copy of memory and zstd"),
    "memory": ("memory", "peak memory of starting a model of a billion parameters, and of a memory limit"),
    "loading": ("loading", "peak memory of ranks that load a Hugging Face model, against FSDP2"),
    "planner": ("planner", "predicted against measured steps, and the cost of the planner's choice"),
    "pipeline_planner": ("pipeline_planner", "predicted against measured steps of pipelines"),
    "pipeline": ("pipeline", "pipelines against PyTorch's with DDP stages, and what compression wins"),
    "quality": ("quality", "what codecs cost in validation loss"),
    "quality_pipeline": ("quality_pipeline", "what the compression of pipelines costs in perplexity"),
    "propagation": ("propagation", "what lazy error propagation does to gradients and to training"),
    "shares": ("shares", "steps of ranks of unequal speed, with equal batches and with shares"),
    "outer_bytes": ("outer", "what islands with outer steps send between nodes, by the kernel's counters"),
    "outer_overlap": ("outer", "steps with an exchange between islands under way, against steps without"),
    "outer_simulator": ("outer", "predicted against measured steps of islands, over a period of outer steps"),
    "outer_time": ("outer_time", "the time until training reaches a loss, with outer steps and without"),
    "outer_quality": ("outer_quality", "what outer steps cost in validation loss at equal tokens"),
    "train": ("trainer", "towpath train against a hand-written loop"),
    "checkpoints": ("trainer", "how long a checkpoint stops training, in the background and in the foreground"),
    "protect": ("protect", "what protection from lost nodes costs while none is lost: steps, and bytes"),
    "healing": ("healing", "a run that loses one node of three, with its memory and disk, and heals"),
    "islands": ("islands", "islands that are killed and return over 10 Mbit/s, while the others train on"),
    "recovery": ("recovery", "the seconds from a loss to the next step, and where they go"),
    "doctor": ("doctor", "what towpath doctor and accelerate test find in labs with one fault, and in labs without"),
    "soak": ("soak", "a run whose ranks are killed and restarted again and again"),
}
_HELP = """Usage: python -m benchmarks SUITE [CASE ...] [--quick] [--resume] [-o FILE] ...
       python -m benchmarks report [SUITE [CASE]]

`python -m benchmarks SUITE --help` lists the cases and options of a suite.
Example: python -m benchmarks strategies --quick
"""


def suite_of(name: str) -> Suite:
    """Return a suite by name. Its module loads torch."""
    if name not in SUITES:
        raise ConfigError(f"there is no suite {name!r}, only {', '.join(SUITES)}; and report.")
    module = importlib.import_module(f"benchmarks.suites.{SUITES[name][0]}")
    return next(suite for suite in module.SUITES if suite.name == name)


def report(arguments: Sequence[str]) -> None:
    """Print every file of results, the last run of each case of a suite, or all runs of a case."""
    from benchmarks import report as tables
    from benchmarks.harness import results

    parser = Parser(prog="python -m benchmarks report", description=report.__doc__)
    parser.add_argument("suite", nargs="?", help="a suite, or a file of results")
    parser.add_argument("case", nargs="?")
    options = parser.parse_args(arguments)
    if options.suite is None:
        print(tables.overview())
        return
    path = Path(options.suite) if options.suite.endswith(".jsonl") else results.file_of(options.suite)
    if not path.exists():
        there = ", ".join(path.stem for path in sorted(results.FOLDER.glob("*.jsonl")))
        raise ConfigError(f"no results of {options.suite!r}; there are {there}")
    if options.case is not None:
        print(tables.history_of(path, options.case))
        return
    print(tables.last_runs(path))
    if options.suite in SUITES and (summary := suite_of(options.suite).summary) is not None:
        print(f"\n{summary()}")


def main(arguments: Sequence[str]) -> None:
    """Run a command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        suites = "\n".join(f"  {name:<17} {what}" for name, (_, what) in SUITES.items())
        print(f"{_HELP}\n{suites}")
    elif arguments[0] == "report":
        report(arguments[1:])
    else:
        suite_of(arguments[0]).run(arguments[1:])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, ValueError) as error:  # a ValueError names the line of a damaged file
        raise SystemExit(f"benchmarks: {error}") from None
