"""What ends a case and not the suite."""

from __future__ import annotations


class CaseError(Exception):
    """The case has no figures; the text, which is kept among the results, says why."""
