"""Limits on the memory of ranks, by the kernel's control groups: who asks for more is killed, as on a full machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from towpath.errors import LabError

# Where the memory controller is, by version of control groups: files of the limit, of the peak, and of what was killed.
_CONTROLLERS = {
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.peak", "memory.events"),
}
# Besides: what would swap instead is killed, too.
_NO_SWAP = {"memory.memsw.limit_in_bytes": "{}", "memory.swap.max": "0"}
_EMPTY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """For one process and what it starts. Memory that it had before it joined does not count."""

    folder: Path
    peak_file: str
    killed_file: str

    def join(self) -> None:
        """This process, from now on."""
        (self.folder / "cgroup.procs").write_text("0")

    @property
    def peak_bytes(self) -> int:
        return int((self.folder / self.peak_file).read_text())

    @property
    def killed(self) -> int:
        """How many processes the kernel has ended for want of memory."""
        words = (self.folder / self.killed_file).read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextmanager
def memory_groups(count: int, limit_bytes: int | None) -> Generator[list[MemoryGroup]]:
    """`limit_bytes`: of each; None: as much as there is."""
    found = next((each for each in _CONTROLLERS.items() if _serves(*each)), None)
    if found is None:
        raise LabError(
            "memory cannot be limited here: that needs root, and the memory controller of control groups under "
            f"{' or '.join(map(str, _CONTROLLERS))}."
        )
    root, (limit_file, peak_file, killed_file) = found
    made: list[MemoryGroup] = []
    try:
        for number in range(count):
            folder = Path(tempfile.mkdtemp(prefix=f"towpath-{os.getpid()}-{number}-", dir=root))
            made.append(MemoryGroup(folder, peak_file, killed_file))
            if limit_bytes is not None:
                (folder / limit_file).write_text(str(limit_bytes))
                for name, text in _NO_SWAP.items():  # where there is none
                    with suppress(OSError):
                        (folder / name).write_text(text.format(limit_bytes))
        yield made
    finally:
        for each in made:
            _remove(each.folder)


def _serves(root: Path, files: tuple[str, ...]) -> bool:
    """Whether groups can be made there that have all these files."""
    try:
        probe = Path(tempfile.mkdtemp(prefix="towpath-", dir=root))
    except OSError:
        return False
    try:
        return all((probe / name).exists() for name in files)
    finally:
        probe.rmdir()


def _remove(folder: Path) -> None:
    """Processes that were just killed may be in it for a moment."""
    until = time.monotonic() + _EMPTY_SECONDS
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
