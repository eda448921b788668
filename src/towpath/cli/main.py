"""The root of the command: its groups, exit codes, and error messages.

Exit codes:

    0         success
    1         the program that was run failed
    2         a mistake of the user: one line on stderr, without a traceback
    130, 143  ended by Ctrl-C or SIGTERM, after everything was taken down

A pipe whose reader has left (`| head`) changes none of them.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
from typing import Annotated, Any

import typer

import towpath
from towpath.cli import checkpoint
from towpath.cli.benchmark import bench
from towpath.cli.doctor import doctor
from towpath.cli.plan import plan
from towpath.cli.probe import probe
from towpath.cli.terminal import CommandGroup, survive_closed_pipes
from towpath.cli.train import data, train
from towpath.daemons import note_error
from towpath.errors import PlanError, StepError, TowpathError

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM

# Former commands, and what to run instead.
_REPLACED = {
    "demo": "`python -m lab demo`, in a clone of Towpath's repository",
    "lab": "`python -m lab`, in a clone of Towpath's repository",
    "explain": "`towpath plan MODEL --cluster NAME --batch N --strategy A --strategy B`",
    "simulate": "`towpath plan MODEL --cluster NAME --batch N --strategy STRATEGY`",
}

# typer has a private copy of click. This is the base class of click's errors about a command line.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = CommandGroup(name="towpath")
app.command()(train)
app.command()(plan)
app.command()(probe)
app.command()(bench)
app.command()(doctor)
app.add_typer(data, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("export")(checkpoint.export)
app.command("import")(checkpoint.import_)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Train large PyTorch models across machines joined by slow links.

    Example: `torchrun --nproc-per-node 2 -m towpath train examples/gpt.toml`
    """
    if version:
        print(f"towpath {towpath.__version__}")
    elif context.invoked_subcommand is None:
        context.get_help()
        raise typer.Exit(_USAGE)


def main(commands: CommandGroup = app, name: str = "towpath") -> None:
    """Run a command: `towpath`, the installed program, or another group of `commands` with its `name`."""
    signal.signal(signal.SIGTERM, _terminate)
    survive_closed_pipes()
    try:
        status = _run(sys.argv[1:], commands, name)
    finally:
        # Everything is taken down. A signal ends the process now, without an exception in Python's own shutdown.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # Python's last garbage collection would visit all of torch, which takes a second in each rank, and longer where
        # ranks share cores. A user who pressed Ctrl-C would wait for it.
        gc.freeze()
    sys.exit(status)


def _run(arguments: list[str], commands: CommandGroup = app, name: str = "towpath") -> int:
    if commands is app and (instead := _REPLACED.get(arguments[0] if arguments else "")):
        return _complain(f"`towpath {arguments[0]}` is gone. Run {instead}.")
    try:
        status: Any = commands(arguments, prog_name=name, standalone_mode=False)
    except (StepError, PlanError) as error:
        note_error()
        return _complain(str(error), _FAILED)
    except TowpathError as error:
        return _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        print("towpath: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if not isinstance(error, _CommandLineError):
            raise
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else name
        message: str = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        found = re.search(r"Example: `([^`]*)`", getattr(getattr(context, "command", None), "help", None) or "")
        example = f" Example: {found[1]}." if found is not None and message.startswith("Missing") else ""
        return _complain(f"{message.rstrip('.')}.{example} See {path} --help.")
    return status if isinstance(status, int) else 0


def _complain(message: str, status: int = _USAGE) -> int:
    # The line is written at once, because other ranks write to the same terminal.
    sys.stderr.write(f"towpath: {' '.join(message.split())}\n")
    sys.stderr.flush()
    return status


def _terminate(*_: object) -> None:
    """Raise SystemExit, so that every `with` block takes down what it started."""
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
