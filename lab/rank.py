"""`python lab/rank.py SCRIPT [ARGS]`: run a script, -m MODULE or -c CODE as Python would, as a rank of a lab.

bash runs a script whose name ends in .sh.

If the script ends with a TowpathError, the rank prints one line instead of a traceback, because many ranks print at the
same time. `import lab` works in the script.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import traceback
from itertools import takewhile
from pathlib import Path
from types import TracebackType

_HERE = Path(__file__)


def main() -> None:
    """Run the script that the command line names."""
    kind, *rest = sys.argv[1:]
    if kind.endswith(".sh"):
        os.execvp("bash", ["bash", kind, *rest])
    # Python has put this file's folder first. A script needs its own folder there, and -c and -m the current one.
    first = "" if kind in ("-c", "-m") else str(Path(kind).resolve().parent)
    sys.path[:] = [first, *(each for each in sys.path if each != str(_HERE.parent)), str(_HERE.parents[1])]
    sys.excepthook = _report
    if kind == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    errors = sys.modules.get("towpath.errors")
    if errors is None or not issubclass(kind, errors.TowpathError):
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
        return
    ours = str(Path(str(errors.__file__)).parent)
    frames = (frame for frame in traceback.extract_tb(trace) if frame.filename != contextlib.__file__)  # of decorators
    theirs = [*takewhile(lambda frame: not frame.filename.startswith(ours), frames)]
    where = f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}: " if theirs else ""
    # torch.distributed wraps the hook, and collects what it writes to sys.stderr until it returns.
    stderr = sys.__stderr__ or sys.stderr
    stderr.write(f"towpath: rank {os.environ.get('RANK', '?')}: {where}{' '.join(str(error).split())}\n")
    # If other ranks have ended already, gloo's threads would abort this process during a normal exit, with several
    # lines of output.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
