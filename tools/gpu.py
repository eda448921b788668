"""Try Towpath on one GPU, and measure it there. Needs nothing but PyTorch 2.11 or newer: no network, git or pytest.

    python3 tools/gpu.py --out DIR [--device cuda|cpu] [--part proof|figures] [--limit SECONDS]

The cases are in tests/gpu/cases.py. Those with ranks run one after the other: most of them on four ranks that share the
device and stay for the next case. If a case hangs or ends a rank, new ranks take the next one. Cases without ranks run
next to them, one for each of the other cores, and twelve at most.

DIR gets three files, which are true at any moment, also if the run is killed:

    table.md            by feature: passed, failed, skipped, not reached; then each failure and figure
    cases.jsonl         one line for each case that ended
    environment.json    versions, device, driver, cores, commit

With --device cpu everything runs over gloo. What needs a GPU is skipped, and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# For this process, and for all that it starts.
for _folder in (str(ROOT), str(ROOT / "src")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys((str(ROOT / "src"), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
)

PARTS = {"proof": 450.0, "figures": 270.0}  # seconds
# A world whose ranks have more threads than this is replaced: process groups end with the processes that made them.
THREADS = {"cpu": 80, "cuda": 400}
CORES_FOR_RANKS = 4
WORKERS = 12
PATIENCE = 60.0  # seconds after its time is over that a part waits for what it has ended
WIDTH = 100
# Loaded by the server of ranks. Others load what they need.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.utils", "towpath", "tests.ranks.twin"]
_OUTCOMES = ("passed", "failed", "skipped", "not reached")

_PROBE = """
import json, torch
found = {"cuda": torch.version.cuda, "available": torch.cuda.is_available()}
if found["available"]:
    torch.zeros(1, device="cuda").add_(1).item()
    found["device"] = torch.cuda.get_device_name()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


class Report:
    """The outcome of each case so far, in the files of a folder."""

    def __init__(self, folder: Path, cases: Sequence[Any], environment: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._cases, self._environment = folder, cases, environment
        self._lock = threading.RLock()
        self._ended: dict[str, dict[str, Any]] = {}
        self.closed = False
        self._began = time.monotonic()
        (folder / "cases.jsonl").write_text("")
        self.add({})

    def add(self, found: dict[str, Any]) -> None:
        """Note what else is known of the device and the machine."""
        with self._lock:
            self._environment |= found
            (self._folder / "environment.json").write_text(json.dumps(self._environment, indent=2) + "\n")
            self._write()

    def end(
        self,
        case: Any,
        outcome: str,
        seconds: float = 0.0,
        error: str = "",
        figures: dict[str, Any] | None = None,
    ) -> None:
        """Note how a case ended, once. Not after the report is closed: what ends then was ended."""
        line = {
            "case": case.name,
            "feature": case.feature,
            "part": case.part,
            "outcome": outcome,
            "seconds": round(seconds, 2),
            "error": error,
            "figures": figures or {},
        }
        with self._lock:
            if self.closed or self.has(case):
                return
            self._ended[case.name] = line
            with (self._folder / "cases.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._write()
        if outcome != "not reached":
            _say(f"{time.monotonic() - self._began:6.1f} s  {outcome:11}  {case.name}")

    def close(self) -> None:
        """Note the cases that were not reached. Let nothing change the report any more."""
        with self._lock:
            for case in self._cases:
                self.end(case, "not reached")
            self.closed = True

    def has(self, case: Any) -> bool:
        """Return whether the case has ended."""
        return case.name in self._ended

    @property
    def failed(self) -> bool:
        """Whether a case failed or hung."""
        return any(line["outcome"] in ("failed", "hung") for line in self._ended.values())

    def _write(self) -> None:
        partial = self._folder / "table.partial"
        partial.write_text("\n".join(self._lines()) + "\n")
        partial.replace(self._folder / "table.md")

    def _lines(self) -> Iterable[str]:
        environment = self._environment
        yield "# What ran on " + (environment.get("device") or "this CPU")
        yield ""
        yield f"{environment['date']}, torch {environment['torch']}, commit {str(environment['commit'])[:12]}, " + (
            f"{time.monotonic() - self._began:.0f} s"
        )
        yield ""
        columns = [45, *(len(outcome) for outcome in _OUTCOMES)]
        yield _row(columns, "feature", *_OUTCOMES)
        yield _row(columns, *("-" * width for width in columns))
        counts: dict[str, Counter[str]] = {}
        for case in self._cases:
            outcome = self._ended[case.name]["outcome"] if case.name in self._ended else "not reached"
            counts.setdefault(case.feature, Counter())["failed" if outcome == "hung" else outcome] += 1
        for feature, found in counts.items():
            yield _row(columns, feature, *(found[outcome] for outcome in _OUTCOMES))
        total: Counter[str] = sum(counts.values(), Counter())
        yield _row(columns, "all", *(total[outcome] for outcome in _OUTCOMES))
        ended = list(self._ended.values())
        for title, chosen in (
            ("Failed", [line for line in ended if line["outcome"] in ("failed", "hung")]),
            ("Figures", [line for line in ended if line["part"] == "figures" and line["figures"]]),
        ):
            if chosen:
                yield from ("", f"## {title}", "")
            for line in chosen:
                said = _figures(line["figures"]) if title == "Figures" else f"{line['outcome']}: {_last(line['error'])}"
                yield f"- {line['case']}: {said}"[:WIDTH]
        skipped = Counter(line["error"] for line in ended if line["outcome"] == "skipped")
        if skipped:
            yield from ("", "## Skipped", "")
            yield from (f"- {count}: {reason}"[:WIDTH] for reason, count in skipped.most_common())


def _row(columns: Sequence[int], first: str, *others: object) -> str:
    cells = [
        first.ljust(columns[0]),
        *(str(each).rjust(width) for each, width in zip(others, columns[1:], strict=True)),
    ]
    return f"| {' | '.join(cells)} |"


def _figures(figures: dict[str, Any]) -> str:
    return ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in figures.items())


def _last(error: str) -> str:
    """The line of a traceback that says most."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("File ", "[rank", "^", "~", "Thread", "Current thread"))]
    return (said or lines or [""])[-1]


def _say(text: str) -> None:
    """Print, if somebody still reads it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class CommunicatorSharing:
    """Runs the cases of a part: those with ranks one after the other, and those without next to them."""

    def __init__(self, report: Report, device: str, mps: Mps | None) -> None:
        self._report, self._device, self._mps = report, device, mps
        self._deadline = 0.0
        self._threads: list[threading.Thread] = []
        self._restarting = threading.Lock()
        self._children = _children_of(os.getpid())  # the server of ranks, and what it needs

    def run(self, cases: Sequence[Any], workers: int, seconds: float) -> None:
        """Return when all cases have ended, or the time is over. Without workers, no two cases run at a time."""
        self._deadline = time.monotonic() + seconds
        for case in cases:
            if reason := case.missing(self._device):
                self._report.end(case, "skipped", error=reason)
        left = [case for case in cases if not self._report.has(case)]
        together = [case for case in left if case.ranks is not None or not workers]
        queue = iter([case for case in left if case not in together])
        lock = threading.Lock()

        def following() -> Any:
            with lock:
                return next(queue, None)

        def work() -> None:
            self._take(iter(following, None))

        targets = [*[work] * workers, lambda: self._take(iter(together))]
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()
        for thread in self._threads:  # a process that cannot be ended holds its own
            thread.join(max(0.0, self._deadline + PATIENCE - time.monotonic()))

    def end(self) -> None:
        """End every process below this one. The report is closed."""
        _end_children(all_but_mps=True)  # clients of MPS come before MPS
        if self._mps:
            self._mps.stop()
        for thread in self._threads:
            thread.join(1.0)  # it may be about to start a process
        _end_children()

    def _take(self, cases: Iterable[Any]) -> None:
        """Run cases. The ranks of a case stay for the next one, if it wants as many."""
        world: Any = None
        deadline = self._deadline
        for case in cases:
            if self._report.closed or time.monotonic() >= deadline:
                break
            began = time.monotonic()
            try:
                world = self._run_one(case, world)
            except Exception as error:  # the case cannot be sent, or its ranks cannot be started
                self._report.end(case, "failed", time.monotonic() - began, repr(error))
                if world is not None:
                    world.close()
                world = None
        if world is not None:
            world.close()

    def _run_one(self, case: Any, world: Any) -> Any:
        """Run a case in this world, in a new one, or in processes of its own. Return the world that is there now."""
        if case.alone:
            self._run_alone(case)
            return world
        if world is not None and (world.size != (case.ranks or 1) or not self._is_fit(world)):
            world.close()
            world = None
        world = world or self._new_world(case)
        self._run_in(world, case)
        return world

    def _new_world(self, case: Any) -> Any:
        from tests.ranks.server import World

        with _starting:
            return World(
                case.ranks or 1, environment={} if case.ranks is None or not self._mps else self._mps.variables
            )

    def _is_fit(self, world: Any) -> bool:
        try:
            return world.alive and world.threads <= THREADS[self._device]
        except OSError:  # a rank has ended
            return False

    def _limit(self, case: Any) -> float:
        return max(1.0, min(case.limit, self._deadline - time.monotonic()))

    def _run_in(self, world: Any, case: Any) -> None:
        from tests.gpu.case import is_sound, perform
        from tests.ranks.server import RankError

        limit, began = self._limit(case), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="towpath-gpu-", ignore_cleanup_errors=True) as folder:
            try:
                answers = world.run(perform, case, folder, timeout=limit, survives_failures=True)
            except RankError as error:
                self._failed(case, error.hung, time.monotonic() - began, str(error), limit)
                if error.hung:
                    world.close()
                    self._after_hanging(used_mps=case.ranks is not None)
                if world.alive:
                    with contextlib.suppress(RankError):  # which ends the world
                        world.run(is_sound, timeout=10.0)
            else:
                self._answered(case, answers, time.monotonic() - began)

    def _run_alone(self, case: Any) -> None:
        from tests.gpu.case import perform_alone
        from tests.ranks.server import run_commands

        limit, began = self._limit(case), time.monotonic()
        # Without MPS: what is aborted there takes the other clients with it.
        ranks = [{"RANK": str(rank), "WORLD_SIZE": str(case.ranks)} for rank in range(case.ranks)]
        with tempfile.TemporaryDirectory(prefix="towpath-gpu-", ignore_cleanup_errors=True) as folder:
            found = run_commands(perform_alone, ranks, case, folder, limit, timeout=limit + 5)
        seconds, answers = time.monotonic() - began, [_answer(out) for _, out, _ in found]
        wrong = [(rank, *each) for rank, each in enumerate(found) if each[0] or answers[rank] is None]
        if not wrong:
            self._answered(case, [answer for answer in answers if answer is not None], seconds)
            return
        # One that raised says more than those that then waited for it.
        hung = all("Timeout (" in err or code == -signal.SIGKILL for _, code, _, err in wrong)
        rank, code, out, err = min(wrong, key=lambda each: "Timeout (" in each[3])
        said = f"exit code {code}" if code else "ended without an answer"
        self._failed(case, hung, seconds, f"[rank {rank} of {case.ranks}] {said}\n{out}{err}", limit)
        if hung:
            self._after_hanging(used_mps=False)

    def _after_hanging(self, used_mps: bool) -> None:
        """End what a case has started and left behind, whose ranks have ended."""
        with self._restarting:
            orphans = {pid for pid in _children_of(os.getpid()) - self._children if not _is_mps(pid)}
            _kill(orphans | _below(orphans))
            if used_mps and self._mps:
                self._mps.restart()  # a client that is killed in a kernel may have broken it
                self._report.add({"mps": bool(self._mps.variables)})

    def _answered(self, case: Any, answers: Sequence[dict[str, Any]], seconds: float) -> None:
        reason = next((each["skipped"] for each in answers if "skipped" in each), None)
        if reason is not None:
            self._report.end(case, "skipped", seconds, reason)
            return
        figures: dict[str, Any] = {}
        for answer in reversed(answers):  # of rank 0 what is not a number
            for name, value in answer.items():
                is_number = isinstance(value, int | float) and isinstance(figures.get(name), int | float)
                figures[name] = max(value, figures[name]) if is_number else value
        self._report.end(case, "passed", seconds, figures=figures)

    def _failed(self, case: Any, hung: bool, seconds: float, error: str, limit: float) -> None:
        if hung and limit < case.limit:
            return  # its own limit was not over: the part's was, and the case was not reached
        self._report.end(case, "hung" if hung else "failed", seconds, error[-6000:])


_starting = threading.Lock()


def _answer(out: str) -> dict[str, Any] | None:
    """Return the answer that a rank printed at its end, if it got that far."""
    try:
        found = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Mps:
    """NVIDIA's Multi-Process Service, with folders of its own: kernels of several ranks run at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        # Of its clients. None where it does not run.
        self.variables: dict[str, str] = dict.fromkeys(names, str(folder))

    def start(self) -> None:
        """Start it. If no program computes under it then, go on without."""
        try:
            self._control("-d")
            _probe(self.variables, seconds=25)
        except (OSError, subprocess.SubprocessError):
            self.stop()
            self.variables = {}

    def restart(self) -> None:
        """Replace it, once its clients have ended."""
        if self.variables:
            self.stop()
            self.start()

    def stop(self) -> None:
        """End it."""
        if self.variables:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self._control(given="quit\n")

    def _control(self, *arguments: str, given: str = "") -> None:
        environment = {**os.environ, **self.variables}
        command = ["nvidia-cuda-mps-control", *arguments]
        subprocess.run(
            command, input=given, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=10, text=True
        )


def _probe(variables: dict[str, str] | None = None, seconds: float = 90.0) -> dict[str, Any]:
    """Ask PyTorch about the device in a process that ends. This one must not touch it."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, check=True, capture_output=True, timeout=seconds, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _output(*command: str) -> str | None:
    """The first line of what a program says, if it is there and does not fail."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def environment_of() -> dict[str, Any]:
    """Versions and machine."""
    import importlib.metadata

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "numpy", "pytest", "transformers", "peft")},
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def _parents() -> dict[int, int]:
    """The parent of each process. Not of Python's trackers: they tidy up, and end by themselves."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if b"multiprocessing.resource_tracker" in stat.with_name("cmdline").read_bytes():
                continue
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def _children_of(pid: int) -> set[int]:
    return {child for child, parent in _parents().items() if parent == pid}


def _below(roots: set[int]) -> set[int]:
    """Every process that one of these has started, and so on."""
    parents, found = _parents(), set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - roots


def _is_mps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("nvidia-cuda-mps")
    except OSError:
        return False


def _kill(pids: set[int]) -> None:
    """Kill processes, and wait half a second for those that are this process's own."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 0.5
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < until:
                time.sleep(0.01)


def _end_children(all_but_mps: bool = False) -> None:
    """Kill every process below this one. Those whose parent has ended belong to this process, see `main`."""
    for _ in range(10):
        below = {pid for pid in _below({os.getpid()}) if not (all_but_mps and _is_mps(pid))}
        if not below:
            return
        _kill(below)


def main(arguments: Sequence[str]) -> int:
    """Run the cases, and return 1 if one failed or hung, or 2 if they cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--part", choices=tuple(PARTS), help="one of the two parts; by default both")
    parser.add_argument("--limit", type=float, help=f"seconds, for all parts together; by default {PARTS}")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose names hold the text")
    parser.add_argument("--cases", default="tests.gpu.cases", metavar="MODULE", help="where the list CASES is")
    chosen = parser.parse_args(arguments)
    found = importlib.util.find_spec("towpath")
    if found is None or not Path(found.origin or "").resolve().is_relative_to(ROOT):
        parser.exit(
            2,
            f"tools/gpu.py: Python imports Towpath from {found and found.origin}, and not from {ROOT}. "
            "Uninstall that one, or use a Python without it\n",
        )
    os.environ["TOWPATH_TEST_DEVICE"] = chosen.device
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else products on several streams may differ in the last bit
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a killed rank has started can be ended
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # some programs close all numbers that they may have
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
    server = importlib.import_module("tests.ranks.server")
    # Kernels are compiled once for all runs. All other files that cases leave behind go with these folders.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    folders = [Path(tempfile.mkdtemp(prefix="towpath-gpu-", dir=place)) for place in (None, server.SCRATCH)]
    os.environ["TMPDIR"] = tempfile.tempdir = str(folders[0])
    server.SCRATCH = folders[1]
    report: Report | None = None
    lanes: CommunicatorSharing | None = None

    def ignore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def stop(number: int, frame: Any) -> None:
        ignore()
        raise SystemExit(128 + number)

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # in the server, and so in all ranks: Ctrl-C is for this process
        server.PRELOAD[:] = PRELOAD
        server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        parts = [chosen.part] if chosen.part else list(PARTS)
        cases = [
            case
            for case in importlib.import_module(chosen.cases).CASES
            if case.part in parts and (not chosen.only or any(text in case.name for text in chosen.only))
        ]
        if not cases:
            raise SystemExit(f"no case is named like {chosen.only}; give --only a part of a name that is in tests/gpu")
        environment = environment_of()
        try:
            report = Report(chosen.out, cases, environment)
        except OSError as error:
            raise SystemExit(f"cannot write to the folder of --out: {error}") from None
        mps: Mps | None = None
        if chosen.device == "cuda":
            try:
                report.add(_probe())
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or ""
                raise SystemExit(f"the device does not work: {_last(str(said)) or error}") from None
            if not environment["available"]:
                raise SystemExit("PyTorch sees no CUDA device here: use --device cpu")
            if shutil.which("nvidia-cuda-mps-control"):
                mps = Mps(folders[0] / "mps")
        lanes = CommunicatorSharing(report, chosen.device, mps)
        if mps:
            mps.start()
        report.add({"mps": bool(mps and mps.variables)})
        whole = sum(PARTS[part] for part in parts)
        for part in parts:
            seconds = PARTS[part] * (chosen.limit / whole if chosen.limit else 1.0)
            workers = max(1, min(WORKERS, environment["cores"] - CORES_FOR_RANKS)) if part == "proof" else 0
            lanes.run([case for case in cases if case.part == part], workers, seconds)
        code = int(report.failed)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 2
        if code == 2:
            print(f"tools/gpu.py: {stopped.code}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        code = 2
    ignore()
    if report:
        report.close()
    if lanes:
        lanes.end()
    _end_children()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if lanes:
        _say(f"\n{(chosen.out / 'table.md').read_text()}")
    os._exit(code)  # lanes may still wait for what has been killed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
