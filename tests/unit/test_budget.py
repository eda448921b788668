"""The counts of tools/budget.py, and the check of their limits."""

from __future__ import annotations

from tools import budget

SOURCE = '''"""A module.

Its docstring has several lines.
"""

# A comment.
LIMIT = 3  # lines with code and a comment count once


def total(
    values: list[int],
) -> int:
    """Return the sum."""
    text = """of
    two lines"""
    return sum(values) + len(text)
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert budget.lines_of_code(SOURCE) == 7
    code, lines = budget.count_lines(
        {"src/pack/a.py": SOURCE, "src/pack/deep/b.py": SOURCE, "c.py": SOURCE}, "src/pack"
    )
    assert code == {"modules": 7, "deep": 7, "total": 14} and lines == 2 * SOURCE.count("\n")


def test_a_count_above_its_limit_or_without_one_is_reported() -> None:
    now = {"code": {"core": 11, "engine": 5}, "options": {"shard": 9}}
    limits = {"code": {"core": 10, "engine": 5}}
    assert [line.split(",")[0].split(" has")[0] for line in budget.excesses(now, limits)] == [
        "code.core = 11",
        "options.shard = 9",
    ]
    assert budget.excesses({"code": {"core": 10}}, limits) == []
