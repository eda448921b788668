"""Print one table of benchmarks/comparisons/papers.md."""

from __future__ import annotations

import sys

from tools.docs.papers import Writer, tables

if __name__ == "__main__":
    names = sys.argv[1:]
    if not names or (unknown := set(names) - set(tables())):
        raise SystemExit("\n".join(["python -m tools.docs.papers TABLE …; the tables are", *tables()]))
    for name in names:
        print(Writer(slow=True).text(name, tables()[name]), end="\n\n")
