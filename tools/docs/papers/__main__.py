"""Simulate rows of the reference table and print them."""

from __future__ import annotations

import sys

from tools.docs.papers import Writer, tables

(name, table), wanted = next(iter(tables().items())), sys.argv[1:]
for line in table.lines:
    if any(each in line.name for each in wanted):
        print(" | ".join(Writer(slow=True).simulated(name, line)), flush=True)
    elif not wanted:
        print(line.name)
