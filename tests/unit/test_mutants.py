"""How tools/mutants finds the place of a defect."""

from __future__ import annotations

import pytest

from tools.mutants.locate import NotFoundError, replaced

SOURCE = """
def double(x):
    return x + x


class Counter:
    def add(self, x):
        def larger(y):
            return y + 1

        self.count += larger(x)

    @property
    def value(self):
        return self.count

    @value.setter
    def value(self, count):
        self.count = 2 * count
"""


@pytest.mark.parametrize(
    ("function", "pattern", "replacement", "gone", "come"),
    [
        ("double", r"(\w) \+ \w$", r"\1", "return x + x", "return x"),
        ("Counter.add.larger", r"\+", "-", "y + 1", "y - 1"),
        ("Counter.value", r"\d \* ", "", "2 * count", "count"),
        ("", "class Counter", "class Other", "class Counter", "class Other"),
    ],
)
def test_only_the_match_in_the_named_function_changes(
    function: str, pattern: str, replacement: str, gone: str, come: str
) -> None:
    assert replaced(SOURCE, function, pattern, replacement) == SOURCE.replace(gone, come)


@pytest.mark.parametrize(
    ("function", "pattern", "replacement", "reason"),
    [
        ("add", r"\+", "-", "no function"),
        ("double", "count", "", "0 times"),
        ("Counter.add", r"\+", "-", "2 times"),
        ("double", "return", "return", "changes nothing"),
    ],
)
def test_a_mutant_without_one_place_is_not_found(function: str, pattern: str, replacement: str, reason: str) -> None:
    with pytest.raises(NotFoundError, match=reason):
        replaced(SOURCE, function, pattern, replacement)
