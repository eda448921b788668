"""Which small units become one."""

from __future__ import annotations

import pytest

from towpath.core.units import SMALL_UNIT, together


@pytest.mark.parametrize(
    "elements, expected",
    [
        ([], []),
        ([5], [[0]]),
        ([0, 5, 5], [[0, 1], [2]]),
        ([0], [[0]]),
        ([4, 4, 4], [[0], [1], [2]]),  # three are as few as there may be: one computes while others travel
        ([4] * 6, [[0, 1], [2, 3], [4, 5]]),
        ([4] * 20, [[*range(6)], [*range(6, 12)], [*range(12, 18)], [18, 19]]),
        ([1, 1, 1, 8, 1, 1], [[0, 1, 2], [3], [4, 5]]),
        ([3, 3, 3, 8], [[0, 1], [2], [3]]),  # no more than the largest takes up, where that is more than a third
        ([SMALL_UNIT // 2] * 9, [[0, 1], [2, 3], [4, 5], [6, 7], [8]]),
        ([SMALL_UNIT, SMALL_UNIT, 9 * SMALL_UNIT], [[0], [1], [2]]),  # nothing is gained by joining large messages
    ],
)
def test_small_neighbours_become_one_unit(elements: list[int], expected: list[list[int]]) -> None:
    assert together(elements) == expected
