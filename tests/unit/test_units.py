"""Which small units become one."""

from __future__ import annotations

import pytest

from towpath.core.units import SMALL_UNIT, together


@pytest.mark.parametrize(
    "elements, expected",
    [
        ([], []),
        ([5], [[0]]),
        ([4, 4, 4], [[0], [1], [2]]),  # blocks that are alike stay apart: each is as large as the largest
        ([1, 1, 1, 8, 1, 1], [[0, 1, 2], [3], [4, 5]]),
        ([3, 3, 3, 8], [[0, 1], [2], [3]]),  # never more than the largest takes up
        ([SMALL_UNIT, SMALL_UNIT, 9 * SMALL_UNIT], [[0], [1], [2]]),  # nothing is gained by joining large messages
    ],
)
def test_small_neighbours_become_one_unit(elements: list[int], expected: list[list[int]]) -> None:
    assert together(elements) == expected
