"""A lost node: what the others hold in memory goes on bit for bit. Functions with an underscore run on every rank."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.ranks import test_tensor_parallel_checkpoints as meshes
from tests.ranks.checkpoints import Content, differing, rank
from tests.ranks.protected import SHAPE, Job, Scaler, copied, enter, logged, lose, on_rank_0
from tests.ranks.server import RankError, World, Worlds, on_ranks
from tests.ranks.strategies import seldom
from tests.ranks.test_checkpoint import _copy_as_late_as_can_be
from towpath import Topology, checkpoint
from towpath.checkpoint import storage
from towpath.checkpoint.manifest import step_of
from towpath.codecs import exact
from towpath.errors import CheckpointError, TowpathError
from towpath.optim import chain, owner_stepped
from towpath.protect import buddies, snapshots, warm
from towpath.protect.memory import NodeMemory, memory_of


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    return tmp_path / "nodes"


# --- all that is survived ---------------------------------------------------------------------------------------------

COMMON = ["mics:2x1", "paro-iig gradients=int4:32 feedback=both", "zero3"]
PRESETS = [
    *("ddp", "zero1", "zero2", "hpz", "zero++", "qwz", "qgz gradients=int8:32+stochastic feedback=first"),
    *("paro-iii", "paro-nii", "paro-nni", "paro-nnn", "paro-ggg", "paro-igg", "paro-ngg", "paro-nig", "paro-nng"),
    *("mics:2x2", "zero3@ring", "zero1 gradients=low-rank:2", "lins:1x1|2x1|2x1", "zero3 frozen=1x1"),
]


@pytest.mark.parametrize("label", [*COMMON, *map(seldom, PRESETS)])
def test_after_the_loss_of_any_node_training_goes_on_bit_for_bit(world: Worlds, nodes: Path, label: str) -> None:
    for wrong in world(4).run(_lose_each, nodes, SHAPE, partial(Job, label)):
        assert wrong == {}


OTHER_SHAPES = [
    ("paro-iig", Topology(3, 1)),
    seldom("zero3", Topology(3, 1)),
    seldom("mics:1x1", Topology(3, 1)),
    seldom("mics:1x2", Topology(4, 1)),
    ("mics:1x2 frozen=1x1", Topology(4, 1)),
    seldom("mics:1x2 frozen=1x4", Topology(4, 1)),
    seldom("paro-iig", Topology(4, 1)),
    seldom("hpz", Topology(3, 2)),
]


@pytest.mark.parametrize(("label", "shape"), OTHER_SHAPES, ids=str)
def test_on_other_nodes_too(world: Worlds, nodes: Path, label: str, shape: Topology) -> None:
    for wrong in world(shape.world).run(_lose_each, nodes, shape, partial(Job, label, shape)):
        assert wrong == {}


def _low() -> Job:
    return Job("paro-iig", precision=towpath.Precision(params=torch.bfloat16, reduce=torch.float32))


def _muon(label: str) -> Job:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() != 2]
        return chain(owner_stepped(torch.optim.Muon(matrices, lr=0.02)), torch.optim.AdamW(others, lr=1e-3))

    return Job(label, optimizer=optimizer)


MADE = {"bf16": _low, "muon": partial(_muon, "paro-iig"), "muon mics": partial(_muon, "mics:2x1")}


@pytest.mark.parametrize("name", ["muon", *map(seldom, [name for name in MADE if name != "muon"])])
def test_whatever_trains(world: Worlds, nodes: Path, name: str) -> None:
    for wrong in world(4).run(_lose_each, nodes, SHAPE, MADE[name]):
        assert wrong == {}


def _lose_each(nodes: Path, shape: Topology, make: Any) -> dict[int, Any]:
    """Return what differs after the loss of each node: of the state, and of two more steps."""
    enter(nodes, shape)
    job, root = make(), nodes.with_name("root")
    saver = checkpoint.Saver(root, job.state)
    job.train(range(1, 5), saver)  # snapshots after steps 2 and 4
    before = job.content()
    expected = job.train(range(5, 7)), job.content()
    wrong: dict[int, Any] = {}
    for lost in range(shape.nodes):
        copy = copied(nodes, f"without-{lost}")
        lose(copy, lost)
        enter(copy, shape)
        again = make().spoil()
        loaded = checkpoint.load(root, again.state)
        assert loaded is not None and loaded.step == 4, loaded
        found = differing(again.content(), before)
        losses = again.train(range(5, 7))
        later = differing(again.content(), expected[1])
        if found or later or losses != expected[0]:
            wrong[lost] = found, losses, expected[0], later
    return wrong


@on_ranks(4)
def test_each_rank_keeps_its_own_buffers(tmp_path: Path) -> None:
    nodes, root = tmp_path / "nodes", tmp_path / "root"
    enter(nodes)
    job = Job("paro-iig")
    job.model.scale.fill_(1.0 + rank())  # as the statistics of a BatchNorm differ
    job.train([1, 2], checkpoint.Saver(root, job.state))
    lose(nodes, 1)
    enter(nodes)
    again = Job("paro-iig")
    assert checkpoint.load(root, again.state)
    assert again.model.scale.item() == 1.0 + rank()


# --- other nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["paro-iig", seldom("mics:2x1"), seldom("zero3")])
def test_with_one_node_fewer_it_continues_as_from_a_checkpoint(world: Worlds, nodes: Path, label: str) -> None:
    expected = world(4).run(_save_and_lose, nodes, label, 0)[0]
    for found in world(2).run(_go_on_alone, nodes, label):
        found = {name: value for name, value in found.items() if name != "random numbers"}
        assert differing(found, {name: value for name, value in expected.items() if name in found}) == []


def _save_and_lose(nodes: Path, label: str, *lost: int) -> Content:
    enter(nodes)
    job = Job(label)
    job.train(range(1, 5), checkpoint.Saver(nodes.with_name("root"), job.state))
    lose(nodes, *lost)
    return job.content()


def _go_on_alone(nodes: Path, label: str) -> Content:
    enter(nodes, Topology(1, 2), order=[1])
    with pytest.warns(UserWarning, match="has no other node"):
        job = Job(label, Topology(1, 2)).spoil()
    loaded = checkpoint.load(nodes.with_name("root"), job.state)
    assert loaded is not None and loaded.step == 4, loaded
    found = job.content()
    job.train([5])
    return found


@pytest.mark.parametrize("label", ["paro-iig", seldom("mics:2x1")])
def test_nodes_may_change_places(world: Worlds, nodes: Path, label: str) -> None:
    expected = world(4).run(_save_and_lose, nodes, label)
    for order in ([1, 0], [1, 2]):  # the second time, a new node takes the first one's place
        for rank_of, found in enumerate(world(4).run(_go_on_in_order, nodes, label, order)):
            assert differing(found, expected[rank_of]) == []


def _go_on_in_order(nodes: Path, label: str, order: list[int]) -> Content:
    enter(nodes, order=order)
    job = Job(label).spoil()
    loaded = checkpoint.load(nodes.with_name("root"), job.state)
    assert loaded is not None and loaded.step == 4, loaded
    return job.content()


# --- snapshots and checkpoints ----------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_newest_of_snapshots_and_checkpoints_is_loaded(tmp_path: Path) -> None:
    nodes, root = tmp_path / "nodes", tmp_path / "root"
    enter(nodes)
    job = Job("paro-iig")
    saver = checkpoint.Saver(root, job.state)
    content = {0: job.content()}
    for step in range(1, 6):  # snapshots after steps 2 and 4, checkpoints after steps 3 and 5
        job.train([step], saver)
        if step in (3, 5):
            assert saver.save(step).outcome().ok
        content[step] = job.content()

    def loaded(where: Path = root) -> int:
        again = Job("paro-iig").spoil()
        found = checkpoint.load(where, again.state)
        if found is None:
            return 0
        assert differing(again.content(), content[found.step]) == []
        return found.step

    copy = copied(nodes, "again")
    on_rank_0(lambda: shutil.copytree(root, tmp_path / "checkpoints"))
    assert loaded() == 5 and not (memory_of(root).snapshots())  # the one of step 4 is of another future now
    enter(copy)
    on_rank_0(lambda: shutil.rmtree(root / "step-000005"))
    assert loaded() == 4
    # The newest snapshot is damaged, then its checkpoint is gone, too.
    on_rank_0(lambda: [path.unlink() for path in copy.glob("*/*/*/step-000004/*optimizer*")])
    assert loaded() == 3


@pytest.mark.parametrize("with_folder", [False, True])
def test_a_node_and_its_buddy_lost_with_the_folder_is_one_error(world: Worlds, nodes: Path, with_folder: bool) -> None:
    root = nodes.with_name("root")
    world(3).run(_train_three, nodes, with_folder)
    shutil.rmtree(nodes / "0")
    shutil.rmtree(nodes / "1")
    found = world(3).run(_load_three, nodes)
    if with_folder:
        assert found == [(1, None)] * 3
        return
    for _, text in found:
        assert text and "no node has a whole copy of rank-00000" in text and f"no checkpoint in {root}" in text, text


def _train_three(nodes: Path, with_folder: bool) -> None:
    enter(nodes, Topology(3, 1))
    job = Job("paro-iig", Topology(3, 1))
    saver = checkpoint.Saver(nodes.with_name("root"), job.state)
    for step in range(1, 5):
        job.train([step], saver)
        if with_folder and step == 1:
            assert saver.save(1).outcome().ok
    if not with_folder:
        saver._release()


def _load_three(nodes: Path) -> tuple[int, str | None]:
    enter(nodes, Topology(3, 1))
    job = Job("paro-iig", Topology(3, 1))
    try:
        loaded = checkpoint.load(nodes.with_name("root"), job.state)
    except CheckpointError as error:
        return -1, str(error)
    assert loaded is not None
    return loaded.step, None


@on_ranks(4)
def test_a_snapshot_of_another_model_is_named_with_its_place(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    job.train([1, 2], checkpoint.Saver(root, job.state))
    other = Job("paro-iig", optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"snapshot of step 2 cannot be loaded.*SGD.*remove towpath-\d+/\w+ in"):
        checkpoint.load(root, other.state)


@on_ranks(4)
def test_a_new_node_without_room_is_named_with_the_remedy(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    job.train([1, 2], checkpoint.Saver(root, job.state))
    lose(tmp_path / "nodes", 1)
    enter(tmp_path / "nodes")
    full = patch.object(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=20))
    with (
        full if rank() > 1 else nullcontext(),
        pytest.raises(CheckpointError, match=r"rank 2.* free of .*a snapshot on this node needs .*--shm-size"),
    ):
        checkpoint.load(root, Job("paro-iig").state)


@on_ranks(4)
def test_the_time_of_a_loss_is_forgotten_if_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    job.train([1, 2], first := checkpoint.Saver(root, job.state))
    memory_of(root).note(snapshots.NOTICED, 1.0)  # by a rank that ends
    first._release()
    assert checkpoint.save(root, 3, job.state).ok
    loaded = checkpoint.load(root, job.state)
    assert loaded is not None and loaded.step == 3
    with closing(checkpoint.Saver(root, job.state)) as saver:
        saver.protect(4)
        assert memory_of(root).noted(snapshots.NOTICED) is None


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["mics:2x1", "paro-iig", seldom("ddp"), seldom("zero3")])
def test_only_what_no_other_node_has_is_sent_and_then_as_differences(world: Worlds, nodes: Path, label: str) -> None:
    for first, second, own in world(4).run(_sent, nodes, label):
        assert 0.75 * own < first < own + 4000  # exact values take about 7/8 of float32
        assert 0 < second < 0.95 * first
        if label in ("mics:2x1", "ddp"):
            assert own < 20_000  # random numbers


def _sent(nodes: Path, label: str) -> tuple[int, int, int]:
    """Return the bytes of the first and of the second snapshot, and those of this rank's own states and numbers."""
    enter(nodes)
    job = Job(label)
    saver = checkpoint.Saver(nodes.with_name("root"), job.state)
    job.train([1, 2], saver)
    assert saver._snapshots is not None
    first = saver._snapshots.sent_bytes
    job.train([3, 4], saver)
    items = job.state.collect([0, 0, 1, 1])
    boxes = [box for each in items.pieces.values() if each.shared_as is None for box in each.boxes.values()]
    return first, saver._snapshots.sent_bytes - first, sum(box.nbytes for box in boxes)


@on_ranks(4)
def test_what_is_sent_waits_for_the_other_ranks_of_the_node(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job = Job("paro-iig")
    job.train([1, 2], saver := checkpoint.Saver(tmp_path / "root", job.state))
    taken = saver._snapshots
    assert taken is not None
    taken._awaited.clear()
    if rank() == 1:
        taken._links.are_used(True)
    dist.barrier()
    assert rank() == 1 or taken._is_turn() == (rank() > 1)
    dist.barrier()
    taken._awaited.set()
    assert taken._is_turn()


# --- what is refused, and what fails ----------------------------------------------------------------------------------


def test_replicas_that_have_diverged_raise_on_all_ranks(world: Worlds, nodes: Path) -> None:
    texts = world(4).run(_diverge, nodes)
    assert len({*texts}) == 1
    assert "rank 1 and rank 3 hold copies of the same slices, which differ" in texts[0]


def _diverge(nodes: Path) -> str:
    enter(nodes)
    job = Job("mics:2x1")
    saver = checkpoint.Saver(nodes.with_name("root"), job.state)
    job.train([1, 2], saver)
    job.train([3])
    with torch.no_grad():
        for parameter in job.model.parameters() if rank() == 3 else ():
            parameter.to_local().add_(1e-3)
    with pytest.raises(CheckpointError) as raised:
        job.train([4], saver)
    return str(raised.value)


def test_memory_that_is_full_raises_first_and_is_logged_later(world: Worlds, nodes: Path) -> None:
    for text, step, log in world(4).run(_fill, nodes):
        assert "free of" in text and "docker run --shm-size" in text and "failed on rank 2" in text
        assert step == 4
        assert log is None or (log.count("NO SNAPSHOT WAS TAKEN") == log.count("docker run --shm-size") == 2), log
        assert log is None or log.count("A lost node now costs the steps since step 4") == 2, log


def _fill(nodes: Path) -> tuple[str, int, str | None]:
    enter(nodes)
    root = nodes.with_name("root")
    full = patch.object(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=20))
    job = Job("paro-iig")
    saver = checkpoint.Saver(root, job.state)
    with full if rank() == 2 else nullcontext(), pytest.raises(CheckpointError) as raised:
        job.train([1, 2], saver)
    saver.close()
    saver = checkpoint.Saver(root, job.state)
    job.train([3, 4], saver)
    free = iter([10_000, 0])  # when the files are written, and then the manifest
    fills = patch.object(os, "statvfs", lambda _: SimpleNamespace(f_bavail=next(free), f_frsize=4096, f_blocks=20_000))
    with logged() as lines:
        with full if rank() == 2 else nullcontext():
            job.train([5, 6], saver)
        found = step_of(memory_of(root).snapshots()[0])
        with fills if rank() == 2 else nullcontext():
            job.train([6], saver)
    with logged() as later:
        job.train([7, 8], saver)
    dist.barrier()
    assert [step_of(path) for path in memory_of(root).snapshots()] == [8] and later == []
    saver.close()
    return str(raised.value), found, "".join(lines) if rank() == 0 else None


def _failing(owner: Any, name: str, error: Exception, after: int = 0) -> Any:
    """Let a call of `owner.name` raise: the first one, or the one after so many."""
    original, calls = getattr(owner, name), count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise error
        return original(*args, **options)

    return patch.object(owner, name, call)


@on_ranks(4)
def test_a_copy_that_is_damaged_in_memory_is_sent_anew_and_is_no_other_replica(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    job.train([1, 2], saver)
    on_rank_0(lambda: [_flip(path) for path in (tmp_path / "nodes/1").glob("*/*/*/rank-0000[01]*optimizer*")])
    with patch.object(buddies, "_shorter", _as_difference), logged() as lines:
        job.train([3, 4], saver)
    assert not lines or ("last copy or the message was damaged" in lines[0] and "replicas" not in lines[0])
    assert bool(lines) is (rank() == 0)
    job.train([5, 6], saver)
    assert step_of(memory_of(root).snapshots()[0]) == 6


def _as_difference(old: Tensor, new: Tensor, memory: Tensor, _: Tensor) -> Tensor:
    return buddies._encoded(old, new, memory)


def _flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 4]))


# Where a rank fails: before all, while it writes, as a sender, as a receiver before a message and after one.
FAULTS: list[tuple[Any, str, Exception, int]] = [
    (Scaler, "state_dict", ValueError("no state today"), 0),
    (storage, "write_tensors", OSError(28, "No space left on device"), 0),
    (exact, "encode", ValueError("cannot encode"), 0),
    (exact, "encode", ValueError("cannot encode more"), 2),
    (os, "posix_fallocate", OSError(28, "No room for a copy"), 0),
    (exact, "decode", ValueError("cannot decode"), 0),
    (exact, "decode", ValueError("cannot decode more"), 2),
    (snapshots, "write_manifest", OSError(5, "Input/output error"), 0),
]


@pytest.mark.parametrize("shape", [SHAPE, seldom(Topology(3, 1))], ids=str)
def test_a_rank_that_fails_in_a_snapshot_keeps_the_one_before(world: Worlds, nodes: Path, shape: Topology) -> None:
    for faults in world(shape.world).run(_fail_in_a_snapshot, nodes, shape, timeout=50):
        for (_, name, error, _), (step, lines) in zip(FAULTS, faults, strict=True):
            assert step == 2 or name == "write_manifest", name  # other nodes may have published it
            assert not lines or (len(lines) == 1 and str(error.args[-1]) in lines[0]), (name, lines)


def _fail_in_a_snapshot(nodes: Path, shape: Topology) -> list[tuple[int, list[str]]]:
    enter(nodes, shape)
    job, root = Job("paro-iig", shape), nodes.with_name("root")
    saver, found = checkpoint.Saver(root, job.state), list[tuple[int, list[str]]]()
    job.train([1, 2], saver)
    for fault in FAULTS:
        # Rank 2 leads a node, so it writes the manifest, too.
        with _failing(*fault) if rank() == min(2, shape.world - 1) else nullcontext(), logged() as lines:
            job.train([4], saver)
        found.append((step_of(memory_of(root).snapshots()[0]), lines))
    job.train([4], saver)
    assert step_of(memory_of(root).snapshots()[0]) == 4
    saver.close()
    return found


@on_ranks(4)
def test_an_old_snapshot_that_cannot_be_removed_stays_until_the_next_one(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    job.train([1, 2], saver)
    fails = _failing(NodeMemory, "remove", OSError(5, "Input/output error"))
    with fails if rank() == 2 else nullcontext(), logged(level=logging.WARNING) as lines:
        job.train([3, 4], saver)
    assert any("rank 2: old snapshots stay" in line for line in lines) is (rank() == 2), lines
    for expected in ([4, 2] if rank() >= 2 else [4], [6]):
        dist.barrier()
        assert [step_of(path) for path in memory_of(root).snapshots()] == expected
        dist.barrier()
        job.train([5, 6], saver)


def test_a_dead_rank_hangs_nobody_whose_snapshot_waits_for_it(nodes: Path) -> None:
    with World(4) as ranks, pytest.raises(RankError, match="rank 3") as raised:
        ranks.run(_die_in_a_snapshot, nodes, survives_failures=True, timeout=40)
    assert not raised.value.hung
    assert sorted(path.name for path in nodes.glob("seen-*")) == ["seen-0", "seen-1", "seen-2"]


def _die_in_a_snapshot(nodes: Path) -> None:
    enter(nodes)
    job = Job("paro-iig")
    saver = checkpoint.Saver(nodes.with_name("root"), job.state)
    job.train([1, 2], saver)
    if rank() == 3:
        snapshots.BuddyExchange.run = lambda *_: os._exit(9)
    job.train([4])
    saver.protect(4)
    with pytest.raises(TowpathError, match=r"lost|onnection|has ended"):  # not after the timeout of the group
        job.train([6], saver)
    left = rf"rank {rank()} has lost a rank while the snapshot of step 4 .* This node holds the snapshot of step 2"
    with pytest.raises(TowpathError, match=left):
        saver.close()
    assert memory_of(nodes.with_name("root")).snapshots()
    (nodes / f"seen-{rank()}").touch()


@on_ranks(4)
def test_a_long_wait_for_a_snapshot_is_told_once(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job = Job("paro-iig")
    saver = checkpoint.Saver(tmp_path / "root", job.state)
    job.train([1, 2])
    saver.protect(2)
    with patch.object(snapshots, "_LONG_WAIT_SECONDS", 0.0), logged(level=logging.WARNING) as lines:
        job.train([3, 4], saver)
    told = [line for line in lines if "training waited" in line]
    assert len(told) == (rank() == 0) and all("snapshot of step 2. protect=6 " in line for line in told), told


# --- savers -----------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_warm_process_is_started_only_if_later_ranks_look_for_one(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, started = Job("paro-iig"), list[bool]()
    for forks in (False, True):  # a loop of one's own, and `towpath train`
        with (
            patch.object(warm, "forks", forks),
            patch.object(snapshots, "start_keeper", lambda _, warm: started.append(warm)),
            closing(checkpoint.Saver(tmp_path / "root", job.state)) as saver,
        ):
            saver.protect(1)
    assert started == ([] if rank() % 2 else [False, True])


@on_ranks(4)
def test_two_savers_of_two_models_do_not_meet(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    jobs = [Job("paro-iig"), Job("mics:2x1")]
    savers = [checkpoint.Saver(tmp_path / str(number), job.state) for number, job in enumerate(jobs)]
    for step in (1, 2, 3, 4):
        for job, saver in zip(jobs, savers, strict=True):
            job.train([step])
            saver.protect(step)
    for number, (job, saver) in enumerate(zip(jobs, savers, strict=True)):
        assert saver._snapshots is not None
        saver._snapshots.wait()
        again = Job(job.label).spoil()
        loaded = checkpoint.load(tmp_path / str(number), again.state)
        assert loaded is not None and loaded.step == 4
        expected = job.content()
        found = again.content()
        del expected["random numbers"], found["random numbers"]  # the other job has drawn some since
        assert differing(found, expected) == []
        saver.close()


@on_ranks(4)
def test_parameters_may_be_written_once_the_saver_has_settled(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, late = Job("paro-iig"), _copy_as_late_as_can_be()
    try:
        job.train([1, 2])
        expected, saver = job.content(), checkpoint.Saver(tmp_path / "root", job.state)
        saver.protect(2)
        saver.settle()
        with torch.no_grad():
            job.model.big.weight.mul_(0.5)
        job.train([3], saver)
    finally:
        late.undo()
    again = Job("paro-iig").spoil()
    assert checkpoint.load(tmp_path / "root", again.state)
    assert differing(again.content(), expected) == []


@on_ranks(4)
def test_a_normal_end_removes_the_memory_and_a_failed_save_keeps_it(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    for waits in (False, True):
        job.train([1, 2], saver)
        with _failing(storage, "write_tensors", OSError(28, "No space left on device")), logged("checkpoint"):
            saver.save(2)
            if waits:
                outcome = saver.wait()
                assert outcome is not None and not outcome.ok
            saver.close()
        assert [step_of(path) for path in memory_of(root).snapshots()] == [2], waits
        job.train([3, 4], saver)
    saver.save(4)
    outcome = saver.close()
    assert outcome is not None and outcome.ok
    dist.barrier()
    assert not memory_of(root).path.exists()


@on_ranks(4)
def test_a_normal_end_removes_the_memory_also_if_no_snapshot_was_taken_since_the_loss(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    job.train([1, 2], saver)
    saver._release()  # this start ends in the midst
    for every in (3, 0):
        enter(copied(tmp_path / "nodes", f"nodes {every}"))
        state = Job("paro-iig", every=every).state
        assert checkpoint.load(root, state) is not None
        with pytest.raises(ValueError, match="no normal end"), closing(checkpoint.Saver(root, state)):
            raise ValueError("no normal end")
        assert checkpoint.save(root, 2, state).ok  # nor the end of a training
        assert memory_of(root).snapshots() != []
        checkpoint.Saver(root, state).close()
        dist.barrier()
        assert not memory_of(root).path.exists()


@pytest.mark.parametrize("sizes", [seldom((2, 2, 1)), seldom((1, 2, 2)), seldom((2, 1, 2))], ids=str)
@pytest.mark.parametrize("label", ["zero3", "ddp", "mics"])
def test_stages_and_split_layers_are_protected_too(
    world: Worlds, nodes: Path, sizes: tuple[int, int, int], label: str
) -> None:
    for wrong in world(4).run(_on_a_mesh, nodes, sizes, label):
        assert wrong == [[], []]


def _on_a_mesh(nodes: Path, sizes: tuple[int, int, int], label: str) -> list[list[str]]:
    enter(nodes)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    copies, found = sizes[1], list[list[str]]()
    root, topology = nodes.with_name("root"), Topology(copies, 1)
    protected = replace(towpath.strategy(label, topology), protect=towpath.Protect(1) if copies > 1 else None)
    make = meshes._pipeline if sizes[0] > 1 else meshes._one_model

    def trained(model: Any, optimizer: Any, step: int) -> Content:
        meshes._train(model, step, mesh.get_local_rank("dp"))
        optimizer.step()
        optimizer.zero_grad()
        return meshes._content(model, optimizer)

    model = make(mesh, protected)
    optimizer = meshes._optimizer(model)
    saver = checkpoint.Saver(root, checkpoint.State(model, optimizer))
    before = trained(model, optimizer, 0)
    saver.protect(1)
    assert (saver._snapshots is None) is (copies == 1)
    if saver._snapshots is None:
        return [[], []]
    saver._snapshots.wait()
    expected = trained(model, optimizer, 1)
    lose(nodes, 1)
    enter(nodes)
    again = make(mesh, protected)
    other = meshes._optimizer(again)
    loaded = checkpoint.load(root, checkpoint.State(again, other))
    assert loaded is not None and loaded.step == 1
    found.append(differing(meshes._content(again, other), before))
    return [*found, differing(trained(again, other, 1), expected)]


@on_ranks(4)
def test_a_saver_that_is_closed_after_an_error_waits_for_nobody(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    job.train([1, 2], saver)
    saver.protect(4)  # this snapshot may wait for other ranks
    if rank() == 1:
        with pytest.raises(ValueError, match="my own error"):
            try:
                raise ValueError("my own error")
            finally:
                saver.close()
    dist.barrier()
    assert memory_of(root).snapshots() != []


@on_ranks(4)
def test_another_job_in_the_memory_of_a_node_is_named_on_all_ranks(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    saver = checkpoint.Saver(root, job.state)
    job.train([1, 2], saver)
    saver._release()  # as if it had a disk of its own
    before = sorted((tmp_path / "nodes").rglob("*"))
    with patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "job2"} if rank() >= 2 else {}):
        for use in (partial(checkpoint.load, root), lambda state: checkpoint.Saver(root, state).protect(2)):
            with pytest.raises(CheckpointError, match=r"failed on rank 2: .* in use by job none, .*TOWPATH_MEMORY"):
                use(Job("paro-iig").state)
    assert sorted((tmp_path / "nodes").rglob("*")) == before
    saver.close()


@on_ranks(4)
def test_a_load_without_a_snapshot_leaves_the_memory_to_another_job(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    for name in ("job1", "job2", "job3"):
        with patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": name}):
            loaded = checkpoint.load(root, job.state)
        assert (loaded is not None) is (name == "job3")
        dist.barrier()
        if name == "job2":
            assert checkpoint.save(root, 1, job.state).ok
    with patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "job4"}):
        assert checkpoint.load(root, job.state) is not None


# --- loads in the midst of a training ---------------------------------------------------------------------------------


@on_ranks(4)
def test_another_state_of_the_model_keeps_the_snapshot_that_was_loaded(tmp_path: Path) -> None:
    enter(tmp_path / "nodes")
    job, root = Job("paro-iig"), tmp_path / "root"
    first = checkpoint.Saver(root, job.state)
    job.train(range(1, 5), first)
    assert first._snapshots is not None
    sent = first._snapshots.sent_bytes
    first._release()
    again = Job("paro-iig")
    assert checkpoint.load(root, again.new_state()) is not None
    saver = checkpoint.Saver(root, again.new_state())
    again.train([5], saver)
    assert {step_of(path) for path in memory_of(root).snapshots()} & {4, 5}  # there always is one
    assert saver._snapshots is not None
    saver._snapshots.wait()  # a new node would have no copies yet, so the first step takes one
    assert 5 in {step_of(path) for path in memory_of(root).snapshots()}
    assert 0 < saver._snapshots.sent_bytes < 0.55 * sent  # as differences
    saver.close()


@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_goes_back_forgets_what_came_after(world: Worlds, nodes: Path, named: bool) -> None:
    for steps in world(4).run(_go_back, nodes, named):
        assert steps == ([[], [6]] if named else [[4], [6]])


def _go_back(nodes: Path, named: bool) -> list[list[int]]:
    """Return the snapshots after a load in the midst of a training, and two steps later."""
    enter(nodes)
    job, root = Job("paro-iig"), nodes.with_name("root")
    saver, found = checkpoint.Saver(root, job.state), list[list[int]]()
    for step in range(1, 5):
        job.train([step], saver)
        if step == 2:
            assert saver.save(2).outcome().ok
            content = job.content()
    loaded = checkpoint.load(root / "step-000002" if named else root, job.state)
    assert loaded is not None
    if named:
        assert differing(job.content(), content) == []
    dist.barrier()
    found.append([step_of(path) for path in memory_of(root).snapshots()])
    with logged() as lines:
        job.train([5, 6], saver)
    assert lines == []
    dist.barrier()
    found.append([step_of(path) for path in memory_of(root).snapshots()])
    expected = job.content()
    again = Job("paro-iig").spoil()
    assert checkpoint.load(root, again.state) is not None
    assert differing(again.content(), expected) == []
    saver.close()
    return found
