"""Damaged snapshots and messages: what is restored is right to the bit, or all ranks raise.

Functions with an underscore run on every rank. Three nodes of one rank hold the snapshots of steps 2 and 4 of one run.
A seed says what is damaged and where. Then the ranks load, in half of the cases after the loss of another node.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.ranks.checkpoints import Content, differing, rank
from tests.ranks.protected import Job, enter, logged, lose, memory_in, on_rank_0
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom
from towpath import Topology, checkpoint
from towpath.checkpoint.manifest import NAME
from towpath.errors import TowpathError
from towpath.protect.memory import NodeMemory

SHAPE = Topology(3, 1)
LABEL = "paro-iig"

# --- the damage -------------------------------------------------------------------------------------------------------


class Case:
    """What a seed damages. `node` is the damaged one, and `lost` another one, or None."""

    def __init__(self, seed: int) -> None:
        self.kind = list(KINDS)[seed % len(KINDS)]
        self.random = random.Random(seed)
        self.node = self.random.randrange(3)
        self.lost = (self.node + self.random.choice((1, 2))) % 3 if self.random.random() < 0.5 else None
        self.step = self.random.choice((4, 4, 4, 2))
        self.at_a_buddy = self.kind.endswith("_buddy") or self.kind == "stale_base"

    def folder(self, nodes: Path, root: Path, step: int | None = None) -> Path:
        return memory_in(nodes, self.node, root).folder_of(self.step if step is None else step)

    def file(self, nodes: Path, root: Path, names: str = "*") -> Path:
        return self.random.choice(sorted(self.folder(nodes, root).glob(names)))


Damage = Callable[[Case, Path, Path, Path], None]  # of the nodes, of nodes of another job, with this root


def _flip(path: Path, case: Case) -> None:
    data = bytearray(path.read_bytes())
    data[case.random.randrange(len(data))] ^= 1 << case.random.randrange(8)
    path.write_bytes(data)


def flipped_bit(case: Case, nodes: Path, other: Path, root: Path) -> None:
    _flip(case.file(nodes, root), case)


def flipped_bits_on_all_nodes(case: Case, nodes: Path, other: Path, root: Path) -> None:
    for case.node in range(3):
        for path in sorted(case.folder(nodes, root).glob("*optimizer*")):
            _flip(path, case)


def flipped_manifest(case: Case, nodes: Path, other: Path, root: Path) -> None:
    _flip(case.folder(nodes, root) / NAME, case)


def truncated(case: Case, nodes: Path, other: Path, root: Path) -> None:
    path = case.file(nodes, root)
    os.truncate(path, case.random.randrange(path.stat().st_size))


def extended(case: Case, nodes: Path, other: Path, root: Path) -> None:
    with case.file(nodes, root).open("ab") as file:
        file.write(case.random.randbytes(case.random.randrange(1, 5000)))


def stale_under_a_newer_name(case: Case, nodes: Path, other: Path, root: Path) -> None:
    new = case.random.choice((4, 6))  # in place of the newest one, or as one that never was
    shutil.rmtree(case.folder(nodes, root, new), ignore_errors=True)
    shutil.copytree(case.folder(nodes, root, 2), case.folder(nodes, root, new))


def stale_file(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.step = 4
    path = case.file(nodes, root)
    shutil.copy(case.folder(nodes, root, 2) / path.name, path)


def another_jobs_memory(case: Case, nodes: Path, other: Path, root: Path) -> None:
    mine = memory_in(nodes, case.node, root).path
    shutil.rmtree(mine)
    shutil.copytree(memory_in(other, case.node, root).path, mine)
    case.lost = None  # else two nodes are left, with a run each, and all raise


def another_jobs_memory_of_two(case: Case, nodes: Path, other: Path, root: Path) -> None:
    another_jobs_memory(case, nodes, other, root)
    case.lost = (case.node + 1) % 3


def mixed_runs(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.step = 4
    path = case.file(nodes, root)
    shutil.copy(memory_in(other, case.node, root).folder_of(4) / path.name, path)


def swapped(case: Case, nodes: Path, other: Path, root: Path) -> None:
    first, second = case.random.sample(sorted(case.folder(nodes, root).glob("*.safetensors")), 2)
    kept = first.with_name("kept")
    first.rename(kept)
    second.rename(first)
    kept.rename(second)


def link(case: Case, nodes: Path, other: Path, root: Path) -> None:
    path = case.file(nodes, root)
    target = nodes / "elsewhere"
    path.rename(target)
    path.symlink_to(case.random.choice([target, Path("/dev/zero"), Path("nowhere")]))


def pipe(case: Case, nodes: Path, other: Path, root: Path) -> None:
    path = case.file(nodes, root)
    path.unlink()
    os.mkfifo(path)


def folder_in_place_of_a_file(case: Case, nodes: Path, other: Path, root: Path) -> None:
    path = case.file(nodes, root)
    path.unlink()
    path.mkdir()


def half_written(case: Case, nodes: Path, other: Path, root: Path) -> None:
    """A node died as it published: what it wrote has the manifest already, and some files are wrong."""
    folder = case.folder(nodes, root, 4)
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    for path in partial.glob("*.safetensors"):
        if case.random.random() < 0.5:
            path.write_bytes(bytes(path.stat().st_size))


def altered_message(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.lost = case.node  # so there are messages; `_wrong_messages` does the rest


def truncated_message(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.lost = case.node


def altered_message_to_a_buddy(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.lost = None


def truncated_message_to_a_buddy(case: Case, nodes: Path, other: Path, root: Path) -> None:
    case.lost = None


def stale_base(case: Case, nodes: Path, other: Path, root: Path) -> None:
    """The copies that a buddy holds are those of another step, or damaged."""
    case.lost = None
    owner = f"rank-{(case.node - 1) % 3:05d}"
    for path in case.folder(nodes, root, 4).glob(f"{owner}*"):
        if case.random.random() < 0.5:
            shutil.copy(case.folder(nodes, root, 2) / path.name, path)
        else:
            _flip(path, case)


KINDS: dict[str, Damage] = {
    each.__name__: each
    for each in (
        flipped_bit,
        another_jobs_memory,
        stale_under_a_newer_name,
        altered_message_to_a_buddy,
        altered_message,
        pipe,
        stale_base,
        half_written,
        flipped_bits_on_all_nodes,
        flipped_manifest,
        truncated,
        extended,
        stale_file,
        another_jobs_memory_of_two,
        mixed_runs,
        swapped,
        link,
        folder_in_place_of_a_file,
        truncated_message,
        truncated_message_to_a_buddy,
    )
}


@contextmanager
def _wrong_messages(case: Case) -> Generator[None]:
    """Let one of the first messages that this rank receives arrive with a flipped bit, or only in part."""
    original, left, receiver = dist.recv, case.random.randrange(4), case.random.randrange(3)
    sent_again = case.at_a_buddy

    def recv(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal left
        before = tensor.clone()
        done = original(tensor, *args, **options)
        left -= len(tensor) > 1  # which would be a confirmation
        if left < 0 and (not sent_again or left == -1) and len(tensor) > 1:
            bound = int(tensor[16:24].view(torch.int64)) if sent_again else len(tensor)
            if case.kind.startswith("altered"):
                tensor[case.random.randrange(bound)] ^= 1 << case.random.randrange(8)
            else:
                start = case.random.randrange(bound)
                tensor[start:] = before[start:]
        return done

    if not case.kind.partition("_")[2].startswith("message") or (sent_again and rank() != receiver):
        yield
    else:
        with patch.object(dist, "recv", recv):
            yield


# --- the campaign -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(8), seldom(range(100), id="100")], ids=str)
def test_nothing_damaged_is_restored(world: Worlds, tmp_path: Path, seeds: range) -> None:
    outcomes = world(3).run(_campaign, tmp_path, seeds, timeout=60 + 8 * len(seeds))
    ended = Counter[str]()
    for seed, of_ranks in zip(seeds, zip(*outcomes, strict=True), strict=True):
        kind = list(KINDS)[seed % len(KINDS)]
        assert {outcome for outcome, _ in of_ranks} <= {of_ranks[0][0]}, (seed, kind, of_ranks)
        assert of_ranks[0][0] in ("step 6", "step 4", "step 2", "all raise"), (seed, kind, of_ranks)
        assert not any(text.startswith("WRONG") for _, text in of_ranks), (seed, kind, of_ranks)
        ended[f"{kind}: {of_ranks[0][0]}"] += 1
    print(*sorted(f"{count} {what}" for what, count in ended.items()), sep="\n")


def _campaign(folder: Path, seeds: range) -> list[tuple[str, str]]:
    """Return for each seed how it ended on this rank, and the error."""
    root, nodes, other = folder / "root", folder / "nodes", folder / "other"
    with patch.object(NodeMemory, "remove", lambda *_: None):  # all snapshots stay
        _, of_other = _train(other, root, 10, (2, 4, 8))
        job, expected = _train(nodes, root, 0, (2, 4))
    assert differing(of_other[4], expected[4]) != []
    job.train([6])
    expected[6] = job.content()
    found: list[tuple[str, str]] = []
    for seed in seeds:
        case, damaged = Case(seed), folder / f"damaged-{seed}"
        on_rank_0(shutil.copytree, nodes, damaged)
        if rank() == 0:
            KINDS[case.kind](case, damaged, other, root)
        shared = [case]  # the damage may have chosen more
        dist.broadcast_object_list(shared)
        enter(damaged, SHAPE)
        found.append(_outcome(shared[0], damaged, root, job, expected))
    return found


def _train(nodes: Path, root: Path, first: int, snapshots: Sequence[int]) -> tuple[Job, dict[int, Content]]:
    enter(nodes, SHAPE)
    job, expected = Job(LABEL, SHAPE), dict[int, Content]()
    saver = checkpoint.Saver(root, job.state)
    for step in snapshots:
        job.train([first + step])
        saver.protect(step)
        assert saver._snapshots is not None
        saver._snapshots.wait()
        expected[step] = job.content()
    saver._release()
    return job, expected


def _outcome(case: Case, nodes: Path, root: Path, job: Job, expected: dict[int, Content]) -> tuple[str, str]:
    if case.lost is not None:
        lose(nodes, case.lost)
        enter(nodes, SHAPE)
    state = job.new_state()
    try:
        with logged() as told, logged("checkpoint") as of_files:
            if case.at_a_buddy:
                job.spoil()
                loaded = checkpoint.load(root, state)
                assert loaded is not None and loaded.step == 4 and differing(job.content(), expected[4]) == []
                saver = checkpoint.Saver(root, state)
                job.train([6])
                with _wrong_messages(case):
                    saver.protect(6)
                    assert saver._snapshots is not None
                    saver._snapshots.wait()
                saver._release()
                state = job.new_state()
            job.spoil()
            with _wrong_messages(case):
                loaded = checkpoint.load(root, state)
    except TowpathError as error:
        return "all raise", str(error)
    if loaded is None:
        return "nothing is found", ""
    # What all ranks know is said once.
    assert rank() == 0 or not [line for line in (*told, *of_files) if "IS DAMAGED" in line or "ANOTHER RUN" in line]
    wrong = differing(job.content(), expected[loaded.step])
    return f"step {loaded.step}", "" if not wrong else f"WRONG: {wrong}"
