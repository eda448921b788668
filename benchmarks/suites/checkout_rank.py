"""A rank of the suite `checkouts`, which imports Towpath from the checkout that its first argument names.

Nothing is imported before. The model is that of this file's own checkout, on both sides.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any


def serve(tree: str, store: str, rank: int, world: int, nodes: int, name: str) -> None:
    """Take as many steps as each line says that rank 0 reads. Rank 0 answers with the median of their seconds."""
    sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # the editable install
    sys.path.insert(0, f"{tree}/src")
    import time

    import torch
    import torch.distributed as dist

    import towpath

    spec = importlib.util.spec_from_file_location("gpt", Path(__file__).parents[1] / "gpt.py")
    assert spec is not None and spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)

    assert Path(towpath.__file__).is_relative_to(tree), towpath.__file__
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    topology = towpath.Topology(nodes, world // nodes)
    torch.manual_seed(0)
    model: Any = towpath.shard(gpt.GPT(width=64, depth=8, heads=2, context=32), name, topology=topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = gpt.batches(rank, batch=1, length=32)
    wanted = torch.zeros(1, dtype=torch.int64)
    while True:
        if rank == 0:
            wanted.fill_(int(sys.stdin.readline() or 0))
        dist.broadcast(wanted, 0)
        if not wanted:
            return
        seconds: list[float] = []
        for _ in range(int(wanted)):
            batch = next(data)
            dist.barrier()
            began = time.perf_counter()
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        if rank == 0:
            print(statistics.median(seconds), flush=True)


if __name__ == "__main__":
    its_tree, its_store, its_rank, its_world, its_nodes, its_strategy = sys.argv[1:]
    serve(its_tree, its_store, int(its_rank), int(its_world), int(its_nodes), its_strategy)
