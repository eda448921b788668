"""What a change of the engine costs or saves: steps of another commit against those of this tree, in turns.

    python benchmarks/checkouts.py COMMIT [LABEL …] [--pairs 25]

Each side has ranks of its own on this machine's loopback, its code from a checkout of its own. The model is small, so
that a step is the engine's own time. A pair is some steps of one and as many of the other, A B and then B A; the ratio
is old seconds / new seconds, above 1 where this tree is faster. Runs are added to results/checkouts.jsonl.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import figures, results, stamp, turns

ROOT = Path(__file__).parents[1]
RESULTS = results.file_of("checkouts")
# Strategy, nodes, ranks per node.
LABELS = {
    "zero3": ("zero3", 2, 2),
    "mics": ("mics", 2, 2),
    "paro-iig": ("paro-iig", 2, 2),
    "zero++": ("zero++", 2, 2),
    "one rank": ("zero3", 1, 1),
}
STEPS, WARM_UP = 8, 5
AT_LEAST = 0.98


# --- one side --------------------------------------------------------------------------------------------------------


def serve(tree: str, store: str, rank: int, world: int, nodes: int, name: str) -> None:
    """A rank: for each line that rank 0 reads, some steps; rank 0 answers with the median of their seconds."""
    sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # the editable install
    sys.path[:0] = [f"{tree}/src", f"{tree}/benchmarks"]
    import time

    import torch
    import torch.distributed as dist

    import gpt
    import towpath

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


class Side:
    """The ranks of one checkout."""

    def __init__(self, tree: Path, label: str, stack: ExitStack) -> None:
        name, nodes, ranks = LABELS[label]
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="towpath-checkouts-")) + "/store"
        command = [sys.executable, __file__, "--serve", str(tree), store]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [*command, *map(str, (rank, nodes * ranks, nodes)), name],
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(nodes * ranks)
        ]
        for process in self._ranks:
            stack.enter_context(process)
            stack.callback(process.kill)

    def steps(self, count: int) -> float:
        first = self._ranks[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(f"{count}\n")
        first.stdin.flush()
        answer = first.stdout.readline()
        if not answer:
            raise SystemExit("a rank has ended; its error stands above")
        return float(answer)


# --- the race --------------------------------------------------------------------------------------------------------


@contextmanager
def checkout(commit: str) -> Generator[Path]:
    """With the native extension that is installed here."""
    from towpath.codecs.kernels import _native

    with tempfile.TemporaryDirectory(prefix="towpath-checkout-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--force", str(tree), commit], check=True, capture_output=True)
        try:
            extension = Path(str(_native.__file__))
            (tree / "src" / "towpath" / "codecs" / "kernels" / extension.name).write_bytes(extension.read_bytes())
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True, capture_output=True)


def race(old: Path, new: Path, label: str, pairs: int, commit: str) -> dict[str, Any]:
    line: dict[str, Any] = {
        "suite": "checkouts",
        "harness": results.HARNESS,
        "case": {"name": label, "old": commit},
        **stamp.stamp(),
    }
    line["load_before"] = stamp.wait_for_quiet(60)
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    order: list[list[str]] = []
    with ExitStack() as stack:
        sides = {"old": Side(old, label, stack), "new": Side(new, label, stack)}
        for side in sides.values():
            side.steps(WARM_UP)
        for pair in range(pairs):
            order.append(turns.order(["old", "new"], pair))
            for name in order[-1]:
                seconds[name].append(sides[name].steps(STEPS))
    check = figures.ratio(seconds, "old", "new")
    check = figures.Check(check.what, check.found, at_least=AT_LEAST, interval=check.interval)
    line |= {"load_after": stamp.load(), "rounds": pairs, "order": order, "seconds": seconds}
    line |= {"medians": figures.medians(seconds), "checks": [check.recorded()]}
    line["warnings"] = stamp.warnings(line["load_before"], line["clean"])
    return line


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        tree, store, rank, world, nodes, name = sys.argv[2:]
        serve(tree, store, int(rank), int(world), int(nodes), name)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the other side")
    parser.add_argument("labels", nargs="*", choices=[*LABELS, []], default=list(LABELS), metavar="LABEL")
    parser.add_argument("--pairs", type=int, default=25)
    arguments = parser.parse_args()
    # Both from checkouts: the extension is in neither's tree otherwise.
    with checkout(arguments.commit) as old, checkout("HEAD") as new:
        for label in arguments.labels:
            line = race(old, new, label, arguments.pairs, arguments.commit)
            results.append(RESULTS, line)
            print(f"{label}: {figures.verdict(line['checks'][0])}", *line["warnings"], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
