"""`towpath bench planner`, under the name it had before: the same cases, the same file of results."""

from __future__ import annotations

from towpath.bench.suites.planner import SUITE

if __name__ == "__main__":
    SUITE.main()
