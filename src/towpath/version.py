"""The version. It is read here and not from the installed package, so that Towpath also runs from its sources."""

__version__ = "0.2.0"
