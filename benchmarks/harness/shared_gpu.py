"""How several ranks of a job share one GPU, in tests and benchmarks."""

from __future__ import annotations

import os


def share_gpu(rank: int) -> None:
    """Let this process share its GPU with other ranks. Call it before the process group exists.

    NCCL refuses two ranks of one host on one GPU. So each rank poses as a host, and they talk over the loopback. A
    kernel of NCCL waits on the GPU for the kernels of its peers. These have to fit next to it, so each is kept small.

    Args:
        rank: The number of this rank.
    """
    os.environ.update(
        NCCL_HOSTID=f"rank-{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_MAX_CTAS="4",
    )
