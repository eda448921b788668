"""Real ranks for the tests: processes of one gloo group on loopback, forked from a server that has torch loaded.

    World(4)                    four ranks that wait for work; world.run(fn, *args) calls fn on each of them
    run_ranks(fn, 4, *args)     the same for a single call
    run_commands(fn, [...])     fn as one process each, which has no group and ends with an exit code of its own
    @on_ranks(4)                a test whose body runs on each rank of such a world

Inside, `fn` is an ordinary function of a module: it finds its rank by `torch.distributed`. A rank that fails ends its
world: the first failure is raised here with its rank and traceback, and the other ranks are ended at once. A rank that
hangs says where it stands. No ports (a file store), no sleeps, one torch thread a rank.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.session.collector import rarely_collect

# Shared memory where the machine has it: the store and the references are files, and are read often.
SCRATCH = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())

# How much longer than a rank's own limit the parent waits; only a rank that cannot even be ended makes it matter.
_GRACE_SECONDS = 10.0

# A thread of a pool that waits for work: not what hangs.
_IDLE = re.compile(r'most recent call first\):\n  File "[^"]*concurrent/futures/thread.py"')

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of processes that load torch anew
}

# Loaded by the server before the first rank starts. What is not installed is passed over.
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the optimizers load it at their first step: a second for every rank
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.device_mesh",
    "torch.nn.utils",
    "torch.profiler",
    "functorch.compile",  # and what torch.compile loads when it first compiles
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "towpath",
    "towpath.train.trainer",
    "tests.ranks.twin",
    "towpath.pipeline",
]


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its rank and its traceback."""

    def __init__(self, message: str, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


class World:
    """`size` ranks, alive until `close()` or their first failure."""

    def __init__(self, size: int, group_timeout: float = 60.0, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="towpath-ranks-", dir=SCRATCH)
        self._connections: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        context = server()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, self._folder.name, group_timeout, environment or {}, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def threads(self) -> int:
        """Of the rank that has most."""
        return max(len(list(Path(f"/proc/{process.pid}/task").iterdir())) for process in self._processes)

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, survives_failures: bool = False
    ) -> list[Any]:
        """`fn(*args)` on every rank at once; what each returned, by rank.

        A failure ends the world at once. One that `survives_failures` waits for all ranks, and lives on if all answer.
        """
        assert self.alive, "this world has ended; make another"
        try:
            for connection in self._connections:
                connection.send((fn, args, timeout))
            failure, answers = self._collect(timeout + _GRACE_SECONDS, survives_failures)
        except BaseException:
            self.close()
            raise
        if failure is None:
            return [answers[rank] for rank in range(self.size)]
        if len(answers) < self.size or not survives_failures:
            self.close()
        raise failure

    def _collect(self, seconds: float, to_the_end: bool) -> tuple[RankError | None, dict[int, Any]]:
        """The first failure and the answers until then, or `to_the_end` all failures, as one, and all answers."""
        failure: RankError | None = None
        answers: dict[int, Any] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), seconds)
            if not ready:
                silent = f"[ranks {sorted(waiting.values())} of {self.size}] no answer in {seconds} s"
                return failure or RankError(silent, hung=True), answers
            for connection in ready:
                rank = waiting.pop(connection)  # pyright: ignore[reportArgumentType]
                ok, value, hung = False, "", False
                try:
                    ok, value = connection.recv()  # pyright: ignore[reportAttributeAccessIssue]
                    answers[rank] = value
                except (EOFError, ConnectionResetError):
                    value, hung = self._last_words(rank)
                if ok:
                    continue
                said = f"[rank {rank} of {self.size}]\n{value}"
                if failure is None:
                    failure = RankError(said, hung)
                elif to_the_end:
                    failure = RankError(f"{failure}\n\n{said}", failure.hung or hung)
            if failure and not to_the_end:
                break
        return failure, answers

    def _last_words(self, rank: int) -> tuple[str, bool]:
        """How a rank ended, and whether its limit of time ended it."""
        self._processes[rank].join(_GRACE_SECONDS)
        stack = Path(self._folder.name, f"stack{rank}").read_text()
        busy = [t for t in stack.split("\n\n") if not _IDLE.search(t)]
        code = self._processes[rank].exitcode
        return f"ended without an answer (exit code {code})\n" + "\n\n".join(busy), "Timeout (" in stack

    def close(self) -> None:
        """End every rank. Their group is theirs alone, so there is nobody to take leave of."""
        if not self.alive:
            return
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_GRACE_SECONDS)  # the kernel may hold one that waits for a device
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Worlds = Callable[[int], World]


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`fn(*args)` on `world` new ranks; what each returned, by rank."""
    with World(world) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


def on_ranks(size: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test whose body is to run on each of `size` ranks. Its parameters and fixtures are sent there."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(world: Callable[[int], World], **arguments: Any) -> None:
            world(size).run(_call_body, test.__module__, test.__name__, arguments, timeout=timeout)

        signature = inspect.signature(test)
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        made: Any = run
        made.__signature__ = signature.replace(parameters=[world, *signature.parameters.values()])
        return run

    return mark


def _call_body(module: str, test: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(**arguments)


def run_commands(
    fn: Callable[..., Any], environments: Sequence[dict[str, str]], *args: Any, timeout: float = 120.0
) -> list[tuple[int, str, str]]:
    """`fn(*args)` as a process for each environment: the exit code and the output of each.

    They are forked from the server, which has loaded what a new interpreter would load for seconds.
    """
    with tempfile.TemporaryDirectory(prefix="towpath-commands-", dir=SCRATCH) as folder:
        outputs = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(environments))]
        started = [
            start_command(fn, environment, *files, *args)
            for environment, files in zip(environments, outputs, strict=True)
        ]
        try:
            until = time.monotonic() + timeout
            for process in started:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in started:
                process.kill()
                process.join(_GRACE_SECONDS)
        return [
            (process.exitcode, out.read_text(), err.read_text())
            for process, (out, err) in zip(started, outputs, strict=True)
        ]


def start_command(fn: Callable[..., Any], environment: dict[str, str], out: Path, err: Path, *args: Any) -> Any:
    """`fn(*args)` as a process, which writes to these files."""
    return fork_from_server(_command, fn, args, environment, out, err)


def fork_from_server(fn: Callable[..., None], *args: Any) -> Any:
    """Return a new process of the server that calls `fn(*args)`."""
    process = server().Process(target=fn, args=args)
    process.start()
    return process


def _command(fn: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], out: Path, err: Path) -> None:
    import torch

    os.environ.update(environment)
    _end_with_parent()
    torch.set_num_threads(1)
    rarely_collect()
    for descriptor, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    fn(*args)


def _end_with_parent() -> None:
    """End this process when the one that asked for it is killed. Else it would go on until its own limit."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def start() -> None:
    """Let the server load what it preloads, in the meantime."""
    server()
    multiprocessing.forkserver.ensure_running()


def warnings_are_errors() -> None:
    """What pyproject.toml asks of pytest, asked of a rank. On a GPU, any version of PyTorch may warn."""
    if "TOWPATH_TEST_DEVICE" in os.environ:
        return
    warnings.resetwarnings()
    warnings.simplefilter("error")


def server() -> Any:
    """Return the context of multiprocessing whose processes fork from the server."""
    os.environ.update(_ENVIRONMENT)  # the server's environment is its children's
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _serve(
    rank: int,
    size: int,
    folder: str,
    group_timeout: float,
    environment: dict[str, str],
    calls: multiprocessing.connection.Connection,
) -> None:
    os.environ.update(environment)
    _end_with_parent()
    import torch
    import torch.distributed as dist

    from tests.ranks.models import DEVICE
    from towpath.core import routes

    warnings_are_errors()
    torch.set_num_threads(1)
    # The models here are small: routes are to cut up what they move all the same.
    routes.SMALLEST_PART_BYTES = routes.SMALLEST_PART_BYTES_IN_CALLS = 32
    rarely_collect()  # who asks the collector what there is need not go through what was loaded, either
    store = dist.FileStore(str(Path(folder, "store")), size)
    backend = "gloo" if DEVICE.type == "cpu" else _share_gpu(rank)
    with Path(folder, f"stack{rank}").open("w") as stack:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=group_timeout)
        )
        while True:
            try:
                fn, args, timeout = calls.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(timeout, exit=True, file=stack)
            try:
                answer = (True, fn(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            calls.send(answer)


def _share_gpu(rank: int) -> str:
    """Prepare to share a GPU with the other ranks, and return the backends."""
    import torch

    import towpath
    from benchmarks.harness.shared_gpu import share_gpu

    share_gpu(rank)
    os.environ["NCCL_MAX_NCHANNELS"] = "2"  # several worlds share the GPU
    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False  # tests in float32 judge rounding
    towpath.shard = _on_gpu(towpath.shard)
    return "cpu:gloo,cuda:nccl"


def _on_gpu(shard: Callable[..., Any]) -> Callable[..., Any]:
    """Return `shard` for models and inputs that a test leaves on the host. Else a test would pass on gloo unseen."""
    import torch
    from torch.utils._pytree import tree_map_only

    from tests.ranks.models import DEVICE

    def moved(module: Any, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), (args, kwargs))

    def on_gpu(model: Any, *args: Any, **kwargs: Any) -> Any:
        if all(p.device.type != "meta" for p in model.parameters()):
            model.to(DEVICE)
        made = shard(model, *args, **kwargs)
        made.register_forward_pre_hook(moved, with_kwargs=True)
        return made

    return on_gpu
