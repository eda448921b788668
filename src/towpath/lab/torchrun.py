"""torchrun for a node of the lab: what a rank says when it fails is enough, and torchrun adds no traceback of its own.

python -m towpath.lab.torchrun --nnodes 2 …
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from towpath.lab.run import describe


def main() -> None:
    # What it says of ranks that end is said below, or has been said by the rank.
    logging.disable(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:  # it could say nothing any more
            print(f"towpath: rank {rank}: {describe(first.exitcode)}", file=sys.stderr)
        sys.exit(1)
    except SignalException:  # another node has failed, and the lab ends this one
        sys.exit(1)


if __name__ == "__main__":
    main()
