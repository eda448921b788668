"""Simulate rows of the reference table and print them.

python -m tools.docs.papers                          lists the rows
python -m tools.docs.papers "PaRO, Fig" Fig.15       simulates those that contain a text
python -m tools.docs.papers NIG --rate 13            the same, if each node sends 13 GB/s
"""

from __future__ import annotations

import argparse

from tools.docs.papers import Writer, settings, tables

parser = argparse.ArgumentParser(
    prog="python -m tools.docs.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("texts", nargs="*", metavar="TEXT", help="a part of a row as it is listed")
parser.add_argument("--latency", type=float, metavar="µS", help="between nodes, for each step of a ring")
parser.add_argument("--latency-inside", type=float, metavar="µS", help="the same inside nodes")
parser.add_argument("--rate", type=float, metavar="GB/S", help="between two nodes, each way")
parser.add_argument("--reached", type=float, metavar="SHARE", help="of the peak, by matrix products")
options = vars(parser.parse_args())
wanted = options.pop("texts")
settings.CHANGE.update({name: number for name, number in options.items() if number is not None})
for name, table in tables().items():
    for line in table.lines:
        if any(each in line.name for each in wanted):
            print(" | ".join(Writer(slow=True).simulated(name, line)), flush=True)
        elif not wanted:
            print(line.name)
