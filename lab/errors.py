"""The lab's own error."""

from towpath.errors import TowpathError


class LabError(TowpathError):
    """A lab that could not start, or that lost one of its nodes."""
