"""`towpath bench`: the suites, each with a command line of its own, and the page of their results."""

from __future__ import annotations

import importlib
from textwrap import fill
from typing import Annotated, Any

import typer

from towpath.bench.harness.help import help_width
from towpath.errors import ConfigError

# By name, what each measures. Their modules load torch, and are not needed for this list.
SUITES = {
    "strategies": "steps of every strategy beside DDP, FSDP2 and HSDP of PyTorch, as their experts tune them",
    "collectives": "our routes beside the flat one",
    "kernels": "the codecs' kernels beside a copy of memory, and beside the oracle",
    "scaling": "steps on 1, 2, 4 and 8 nodes, with the same work for each rank, and with the same work for all",
    "overhead": "one rank beside the bare module, and the engine's own time",
    "planner": "predicted beside measured steps, and what the planner's choice costs",
    "lora": "a step in which only PEFT's adapters train, beside the computation alone, and beside FSDP2",
    "memory": "what a rank needs to start a model of a billion parameters; hpz where mics has no room",
}
_REPORT = "report"

# What the suite's own parser is to see of --help and of its options.
PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
    "allow_interspersed_args": False,
}


def bench(
    suite: Annotated[str | None, typer.Argument(metavar="SUITE", help="Or report: all results as one page.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT ...]")] = None,
) -> None:
    """Measure Towpath beside what people would use instead, each configured as its experts would.

    Example: `towpath bench strategies --quick`, and then `towpath bench report -o bench.html`

    On a cluster of your own: `torchrun --nnodes 2 --nproc-per-node 8 … -m towpath bench strategies`

    `towpath bench SUITE --help` tells a suite's options.

    Exit code: 0; 1 if something could not be measured; 2 if it could not begin.
    """
    if suite is None or suite in ("-h", "--help"):
        print(_listing())
        return
    command = f"towpath bench {suite}"
    if suite == _REPORT:
        from towpath.bench.page import main

        main(arguments or (), command)
        return
    if suite not in SUITES:
        raise ConfigError(f"there is no suite {suite!r}, only {', '.join(SUITES)}; and {_REPORT}.")
    module = importlib.import_module(f"towpath.bench.suites.{suite}")
    module.SUITE.run(arguments or (), command)


def _listing() -> str:
    width = help_width()
    usage = "Usage: towpath bench SUITE [CASE ...] [--quick] [--resume] [-o FILE] …"
    about = "Measure Towpath beside what people would use instead, each configured as its experts would."
    listed = SUITES | {_REPORT: "all results as one HTML page: bench.html, or -o FILE"}
    suites = [fill(f"  {name:<12} {what}", width, subsequent_indent=" " * 15) for name, what in listed.items()]
    example = "Example: towpath bench strategies --quick"
    return "\n\n".join([fill(usage, width), fill(about, width), "\n".join(suites), example])
