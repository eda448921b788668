"""A run on a lab, from its start to the death of its last process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from towpath.errors import LabError
from towpath.lab.counters import LinkBytes
from towpath.lab.line import Line, pair
from towpath.lab.messages import End, Member, Start

# How long processes have to end by themselves once another node has failed; then they are killed.
_GRACE_SECONDS = 3.0
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run came to. `returncode` is the first that was not zero, negative for a signal; `links` is by node."""

    returncode: int
    output: str | None
    seconds: float
    links: tuple[LinkBytes, ...]


class Members:
    """Processes that were started together and end together, at the latest when this is closed."""

    def __init__(self, line: Line, members: Sequence[Member], output: tuple[int, int], results: Sequence[int]) -> None:
        self.channel, theirs = pair()
        try:
            identifier = line.ask(Start(tuple(members)), (theirs, *output, *results))
        except BaseException:
            self.channel.close()
            raise
        finally:
            os.close(theirs)
        assert isinstance(identifier, int), identifier
        self._line = line
        self._identifier: int | None = identifier

    def signal(self, number: int) -> None:
        with suppress(BrokenPipeError, OSError):
            self.channel.send(number)

    def next_exit(self, deadline: float | None) -> tuple[int, int] | None:
        """(member, return code) of the next to end; None if that has not come by the deadline."""
        wait_seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self.channel.poll(wait_seconds):
            return None
        try:
            member, status = self.channel.recv()
        except (EOFError, ConnectionResetError):
            raise LabError("the lab lost its processes: something killed them from outside.") from None
        return member, os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Kill what is left; when this returns, no process of it exists."""
        identifier, self._identifier = self._identifier, None
        if identifier is not None:
            with suppress(LabError):  # no keeper, no processes
                self._line.ask(End(identifier))
            self.channel.close()


class Run:
    """A script at work on the nodes; `wait()` for it, or leave the `with` block to end it."""

    def __init__(
        self, line: Line, members: Sequence[Member], count: Callable[[], tuple[LinkBytes, ...]], capture: bool
    ) -> None:
        self._count = count
        self._before = count()
        self._began = time.monotonic()
        self._running = len(members)
        self._result: Result | None = None
        self._output = _Output() if capture else None
        descriptor = self._output.descriptor if self._output else None
        try:
            # The process's own 1 and 2, not sys.stdout: a test runner may have put something else there.
            self._members = Members(line, members, (1, 2) if descriptor is None else (descriptor, descriptor), ())
        finally:
            if self._output:
                self._output.started()

    @property
    def running(self) -> bool:
        return self._result is None

    def signal(self, number: int) -> None:
        """Send every process that was started (under torchrun: each torchrun) and its process group a signal."""
        self._members.signal(number)

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """What the run came to. If one node fails the others are ended; on a timeout all are, and a LabError tells."""
        if self._result is not None:
            return self._result
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            returncode = self._until_all_ended(deadline)
        except BaseException:
            self._abandon()
            raise
        if returncode is None:
            output = self.kill().output
            tail = f" Its last output:\n{output[-_TAIL_CHARACTERS:]}" if output else ""
            raise LabError(f"the run was ended: it took more than {timeout_seconds:g} s.{tail}")
        return self._finish(returncode)

    def kill(self) -> Result:
        """End every process at once."""
        return self._result or self._finish(-signal.SIGKILL)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.kill()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """End every process, on the way out of an error that must not be hidden by another."""
        with suppress(LabError):
            self.kill()

    def _until_all_ended(self, deadline: float | None) -> int | None:
        """The first return code that is not zero, or 0; None when time ran out."""
        failure = 0
        while self._running:
            ended = self._members.next_exit(deadline)
            if ended is None:
                return failure or None
            self._running -= 1
            if ended[1] != 0 and failure == 0:
                failure = ended[1]
                self.signal(signal.SIGTERM)
                deadline = time.monotonic() + _GRACE_SECONDS
        return failure

    def _finish(self, returncode: int) -> Result:
        self._members.close()
        self._result = Result(
            returncode=returncode,
            output=self._output.text() if self._output else None,
            seconds=time.monotonic() - self._began,
            links=tuple(after - before for after, before in zip(self._count(), self._before, strict=True)),
        )
        return self._result


class _Output:
    """What the processes write, kept as it comes: a pipe that nobody reads would stop them."""

    def __init__(self) -> None:
        self._reader, self.descriptor = os.pipe()
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def started(self) -> None:
        """The processes hold the pipe now (or none ever will): when the last of them ends, so does the text."""
        os.close(self.descriptor)
        self._thread.start()

    def _drain(self) -> None:
        with open(self._reader, "rb", buffering=0) as pipe:  # noqa: PTH123 (a descriptor)
            while chunk := pipe.read(1 << 16):
                self._chunks.append(chunk)

    def text(self) -> str:
        self._thread.join()
        return b"".join(self._chunks).decode(errors="replace")


def describe(returncode: int) -> str:
    """How a process ended, for people."""
    if returncode >= 0:
        return f"exit code {returncode}"
    hint = "; was memory short?" if returncode == -signal.SIGKILL else ""
    return f"killed by signal {-returncode} ({signal.strsignal(-returncode)}{hint})"
