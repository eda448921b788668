"""Who goes when: A B, B A, … so that nobody always follows the same one, or always comes first."""

from __future__ import annotations

from collections.abc import Sequence


def order(contestants: Sequence[str], turn: int) -> list[str]:
    """Of round `turn`: an odd one is the reverse of the one before, and every second starts with the next contestant.

    In an even number of rounds everyone has the same place on average, so that a machine that slows down steadily
    favours nobody.
    """
    shift = turn // 2 % len(contestants)
    forward = [*contestants[shift:], *contestants[:shift]]
    return forward[::-1] if turn % 2 else forward
