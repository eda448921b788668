"""What ends a case and not the suite."""

from __future__ import annotations


class CaseError(Exception):
    """The case has no figures; the text, which is kept among the results, says why."""


def reason(error: Exception) -> str:
    """The last line of what a rank said: of a traceback that is the error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
