"""Which worker runs which file, and in which order.

A file stays whole on one worker: what its fixtures make is made once. (xdist_group would ask for that, but pytest-xdist
3.8 writes the group into a field that pytest 9.2 does not read.) Files of ranks come first, and the longest of them
before the others. The first worker takes them from there. The others first take what is in other folders, from the
other end, so that what one process computes goes beside what four do. When nothing else is left, they take the longest
file of ranks that is left, so that all workers end with short files, at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

# By their processor seconds.
_LONGEST = """
pipeline checkpoint wires_frameworks parity train resume meeting auto engine_promises every_model pages trainer
tensor_parallel_checkpoints encoded_training outer_features protect divergence codecs
"""
LONGEST = [f"test_{name}" for name in _LONGEST.split()]
FOLDERS = ("ranks", "order", "fake_cuda", "lab", "unit")


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    def place(item: pytest.Item) -> tuple[int, int]:
        folder, name = item.path.parent.name, item.path.stem
        return (
            FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS),
            LONGEST.index(name) if folder == "ranks" and name in LONGEST else len(LONGEST),
        )

    return sorted(items, key=place)


class Scheduling:
    """The hook of pytest-xdist; a run without it knows no such hook."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadFileScheduling

        class FromBothEnds(LoadFileScheduling):
            def _assign_work_unit(self, node: Any) -> None:
                last = next(reversed(self.workqueue))
                if node is not self.nodes[0] and not last.startswith("tests/ranks/"):
                    self.workqueue.move_to_end(last, last=False)
                super()._assign_work_unit(node)

        if config.getvalue("dist") != "load":
            return None  # the user's own wish
        config.option.loadscopereorder = False
        return FromBothEnds(config, log)
