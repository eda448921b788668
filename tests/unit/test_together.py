"""What the error about ranks that were given different things quotes: lines that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from towpath.errors import MismatchError
from towpath.topology.together import together


class Told:
    """Two ranks of which the other one says `theirs`."""

    def __init__(self, theirs: Sequence[str]) -> None:
        self.members = [0, 1]
        self._theirs: list[Any] = [("another digest", ""), list(theirs)]

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value, self._theirs.pop(0)]


CASES = [
    (["a = 1", "b = 2", "c = 3"], ["b = 2", "c = 3"], "'a = 1', rank 1 has no such line"),
    (["b = 2", "c = 3"], ["a = 1", "b = 2", "c = 3"], "no such line, rank 1 has 'a = 1'"),
    (["a = 1", "b = 2", "c = 3"], ["b = 4", "c = 3"], "'b = 2', rank 1 has 'b = 4'"),
    (["a = 1", "c = 3"], ["b = 2", "c = 3"], "'a = 1', rank 1 has no such line"),
    (["a = 1", "w: 2 × 3"], ["a = 1"], "'w: 2 × 3', rank 1 has 'nothing more'"),
    (["w: 2 × 3", "v: 4"], ["w: 2 × 2", "v: 4"], "'w: 2 × 3', rank 1 has 'w: 2 × 2'"),
]


def test_lines_are_compared_with_those_in_their_place() -> None:
    for mine, theirs, said in CASES:
        with pytest.raises(MismatchError) as caught, together(Told(theirs)) as lines:
            lines += mine
        assert f"rank 0 has {said}." in str(caught.value), (mine, theirs)
