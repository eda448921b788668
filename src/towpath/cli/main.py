"""The command's root: the groups of commands, and what every command owes its user when something goes wrong.

Exit codes: 0 success, 1 what was run failed (or its result could not be printed: a full disk), 2 a user's mistake (one
line on stderr, no traceback), 130 and 143 ended by Ctrl-C and SIGTERM, after everything has been taken down. That a
pipe's reader has left (`| head`) changes none of them.
"""

from __future__ import annotations

import gc
import re
import signal
import sys
from typing import Annotated, Any

import typer

import towpath
from towpath.cli import checkpoint, data, export, lab
from towpath.cli.bench import bench
from towpath.cli.commands import Commands
from towpath.cli.demo import demo
from towpath.cli.output import Output
from towpath.cli.plan import explain, plan, simulate
from towpath.cli.probe import probe
from towpath.cli.train import train
from towpath.errors import PlanError, TowpathError, TrainError

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM

# typer keeps its click to itself; this is the class of everything click has to say about a command line.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

app = Commands(
    name="towpath",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(demo)
app.command()(train)
app.command()(plan)
app.command()(explain)
app.command()(simulate)
app.command()(probe)
app.command()(bench)
app.add_typer(data.app, name="data")
app.add_typer(lab.app, name="lab")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("export")(export.export)
app.command("import")(export.import_)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show it and leave.")] = False
) -> None:
    """Train large PyTorch models across nodes whose link to each other is narrow.

    Example: `towpath demo`, and then `towpath train examples/gpt.toml --ranks 2`
    """
    if version:
        print(f"towpath {towpath.__version__}")
    elif context.invoked_subcommand is None:
        context.get_help()
        raise typer.Exit(_USAGE)


def main() -> None:
    """The console's entry point."""
    signal.signal(signal.SIGTERM, _terminate)
    output = Output()
    try:
        status = _delivered(_run(sys.argv[1:]), output)
    finally:
        # All is taken down: what comes now ends the process, and must be no exception in what Python does at its end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # Python's last collection would go through all of torch: a second of computing in each rank, and as many times
        # that as the machine has more to do than cores, for one who waits for his Ctrl-C to be done.
        gc.freeze()
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    try:
        status: Any = app(arguments, standalone_mode=False)
    except (TrainError, PlanError) as error:
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
        path = context.command_path if context is not None else "towpath"
        message: str = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        return _complain(f"{message.rstrip('.')}.{_example(context, error)} See {path} --help.")
    return status if isinstance(status, int) else 0


def _example(context: Any, error: Exception) -> str:
    """Return the example in a command's help, if something is missing from its command line."""
    if type(error).__name__ != "MissingParameter":
        return ""
    found = re.search(r"Example: `([^`]*)`", getattr(getattr(context, "command", None), "help", None) or "")
    return "" if found is None else f" Example: {found[1]}."


def _delivered(status: int, output: Output) -> int:
    lost = output.lost()
    if lost is None:
        return status
    return _complain(f"stdout cannot be written: {lost.strerror}. What was printed there is lost.", status or _FAILED)


def _complain(message: str, status: int = _USAGE) -> int:
    # In one piece: other ranks write to the same place.
    sys.stderr.write(f"towpath: {' '.join(message.split())}\n")
    sys.stderr.flush()
    return status


def _terminate(*_: object) -> None:
    """Leave as an exception, so that every `with` block takes down what it raised."""
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    main()
