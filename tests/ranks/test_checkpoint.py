"""Checkpoints on real ranks: what one strategy saves any other resumes from, and no failure takes the others along.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from math import prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.ranks.checkpoints import Content, Run, content, differing, rank
from tests.ranks.models import MODELS
from tests.ranks.server import World, Worlds
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.ranks.test_tensor_parallel_checkpoints import _one_model
from towpath import Topology, checkpoint
from towpath.checkpoint import folders, storage
from towpath.checkpoint.manifest import Manifest, read_manifest
from towpath.checkpoint.staging import Snapshot
from towpath.core.strategy import TransferKind
from towpath.errors import CheckpointError

SHAPE = Topology(2, 2)


# --- across strategies and worlds ------------------------------------------------------------------------------------


# Each goes on from what the one before saved, the first from zero3 on 2 × 2.
CHAIN = [
    ("mics:1x2", Topology(4, 1)),
    ("zero++", SHAPE),
    ("ddp", Topology(1, 1)),
    ("paro-iig", Topology(3, 1)),
    ("zero1", SHAPE),
]
LONG_CHAIN = [
    *CHAIN,
    ("hpz", SHAPE),
    ("zero2", Topology(2, 1)),
    ("mics:2x1", SHAPE),
    ("zero3", Topology(1, 1)),
    ("paro-nig", SHAPE),
    ("ddp", Topology(4, 1)),
    ("qgz", SHAPE),
    ("zero3", Topology(3, 1)),
]


@pytest.mark.parametrize("chain", [pytest.param(CHAIN, id="5"), seldom(LONG_CHAIN, id="13")])
def test_what_any_strategy_saves_any_other_loads_bit_for_bit_on_any_number_of_ranks(
    world: Worlds, tmp_path: Path, chain: list[tuple[str, Topology]]
) -> None:
    """Each loads what the one before saved, and saves it anew; in the end all is as it was at first."""
    expected = world(4).run(_train_and_save, tmp_path, "zero3", SHAPE)[0]
    for step, (label, shape) in enumerate(chain, 3):
        for wrong in world(shape.world).run(_load_and_save, tmp_path, label, shape, step, expected):
            assert wrong == [], f"step {step}: {label} on {shape}"


def _train_and_save(root: Path, label: str, shape: Topology) -> Content:
    run = Run.of(label, shape)
    run.train(range(2))
    assert checkpoint.save(root, 2, run.state()).ok
    return run.content()


def _load_and_save(root: Path, label: str, shape: Topology, step: int, expected: Content) -> list[str]:
    run = Run.of(label, shape).spoil()
    loaded = checkpoint.load(root, run.state())
    assert loaded is not None and loaded.step == step - 1
    wrong = differing(run.content(), expected)
    saver = checkpoint.Saver(root, run.state())
    saver.save(step)
    outcome = saver.close()
    assert outcome is not None and outcome.ok, outcome
    return wrong


def test_masters_are_saved_whatever_computes(world: Worlds, tmp_path: Path) -> None:
    world(4).run(_other_precision, tmp_path)


def _other_precision(root: Path) -> None:
    low = towpath.Precision(params=torch.bfloat16, reduce=torch.float32)
    run = Run.of("zero3", SHAPE, precision=low)
    run.train(range(2))
    checkpoint.save(root, 2, run.state())
    for options in ({"precision": low}, {}):
        resumed = Run.of("paro-iig", SHAPE, **options).spoil()
        checkpoint.load(root, resumed.state())
        assert differing(resumed.content(), run.content()) == []
        resumed.train([2])


# --- what codecs carry -----------------------------------------------------------------------------------------------


CODED = [
    seldom("mics:2x1 gradients=int4:32 feedback=both"),
    seldom("qgz gradients=int8:32+stochastic feedback=first"),
    "zero++",
    seldom("zero1 gradients=low-rank:2"),
]


@pytest.mark.parametrize("label", CODED)
def test_what_codecs_carry_goes_on_bit_for_bit_and_elsewhere_begins_at_zero(
    world: Worlds, tmp_path: Path, label: str
) -> None:
    world(4).run(_carry, tmp_path, label)


def _carry(root: Path, label: str) -> None:
    run = Run.of(label, SHAPE)
    run.train(range(2))
    checkpoint.save(root, 2, run.state())
    expected = run.train(range(2, 4))
    # Neither racks nor a switch at another step change what a rank keeps.
    resumed = Run.of(f"{label} gradients_until=9", replace(SHAPE, nodes_per_rack=1)).spoil()
    loaded = checkpoint.load(root, resumed.state())
    assert loaded is not None and loaded.notes == ()
    assert resumed.train(range(2, 4)) == expected
    assert differing(resumed.content(), run.content()) == []
    other = Run.of("mics:2x1 gradients=int8:32 feedback=both", SHAPE)
    other.train(range(1))  # it has something to forget
    loaded = checkpoint.load(root, other.state())
    assert loaded is not None and re.search("feedback starts at zero.* To carry it over, resume with", loaded.notes[0])
    kept = [t for t in towpath.stats(other.model).memory_bytes.items() if t[0] == "feedback"]
    assert kept[0][1] > 0
    units = other.model.towpath_engine.units
    transfers = [bound for u in units for b in u.buckets for each in b.transfers.values() for bound in each]
    assert not any(kept.any() for bound in transfers for kept in bound.collective.state)


def test_an_interleaved_run_goes_on_before_and_after_the_switch(world: Worlds, tmp_path: Path) -> None:
    assert world(4).run(_interleaved, tmp_path) == [[True, False, False]] * 4


def _interleaved(root: Path) -> list[bool]:
    """Whether gradients are encoded, in the last step from each checkpoint. A run from either ends as the whole run."""
    strategy = towpath.strategy("zero++", SHAPE, gradients_until=2)

    def made() -> Run:
        model: Any = towpath.shard(MODELS["gpt"].make(torch.float32), strategy, topology=SHAPE)
        return Run(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def encodes(run: Run) -> bool:
        reduces = [t for t in towpath.stats(run.model).last_step if t.kind is TransferKind.REDUCE]
        return any(t.transport.encoding is not None for t in reduces)

    whole, found = made(), list[bool]()
    for step in range(4):
        whole.train([step])
        if step in (0, 2):
            checkpoint.save(root, step + 1, whole.state())
    for step in (1, 3):
        run = made().spoil()
        checkpoint.load(root / f"step-{step:06}", run.state())
        run.train([step])
        found.append(encodes(run))
        run.train(range(step + 1, 4))
        assert differing(run.content(), whole.content()) == []
    return [*found, encodes(whole)]


# --- written once, checked once --------------------------------------------------------------------------------------


@in_turn(["ddp", "mics:2x1", "zero3"], 1)
def test_replicas_are_written_once_by_all_and_only_files_that_are_read_are_checked_each_by_one_rank(
    world: Worlds, tmp_path: Path, label: str
) -> None:
    ranks = world(4).run(_count, tmp_path, label)
    manifest = read_manifest(tmp_path / "step-000001")
    for is_optimizer in (False, True):
        sizes = [f.bytes for name, f in manifest.files.items() if ("optimizer" in name) is is_optimizer]
        assert len(sizes) == 4 and max(sizes) < 1.1 * min(sizes)
    boxes = [(t, b) for t in manifest.tensors.values() for b in t.boxes]
    assert sum(prod(b.sizes) * t.dtype.itemsize for t, b in boxes) == sum(t.bytes for t in manifest.tensors.values())
    everything, weights = ([name for checks in ranks for name in checks[i]] for i in (0, 1))
    assert sorted(everything) == sorted(manifest.files)
    assert sorted(weights) == sorted(name for name in manifest.files if "optimizer" not in name)


def _count(root: Path, label: str) -> list[list[str]]:
    """Return the files that this rank has checked to load everything, and to load only the model."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 511), nn.Linear(511, 300))
    model = towpath.shard(model, strategy_of(label, SHAPE), topology=SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 300)).sum().backward()
    optimizer.step()
    checkpoint.save(root, 1, checkpoint.State(model, optimizer))
    expected = content(model, optimizer)
    checked: list[str] = []
    real = Manifest.check_file

    def counting(self: Manifest, folder: Path, name: str) -> None:
        checked.append(name)
        real(self, folder, name)

    found: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "check_file", counting)
        for state in (checkpoint.State(model, optimizer), checkpoint.State(model)):
            with torch.no_grad():
                model[0].weight.zero_()
            checkpoint.load(root, state)
            found.append(checked.copy())
            checked.clear()
            assert differing(content(model, optimizer), expected) == []
    return found


# --- in the background -----------------------------------------------------------------------------------------------


def test_what_is_saved_in_the_background_is_what_it_was_when_asked_for(world: Worlds, tmp_path: Path) -> None:
    world(4).run(_train_while_saving, tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step-{step:06d}" for step in (2, 4, 5)]
    assert all(checkpoint.verify(p) is None for p in tmp_path.iterdir())


def _train_while_saving(root: Path) -> None:
    run = Run.of("paro-iig", SHAPE)
    run.train(range(2))
    saver = checkpoint.Saver(root, run.state())
    trained = threading.Event()
    real = storage.write_tensors

    def patient(*args: Any) -> Any:
        assert trained.wait(30)
        return real(*args)

    late = _copy_as_late_as_can_be()
    storage.write_tensors = patient
    try:
        expected = run.content()
        saving = saver.save(2)
        run.train(range(2, 4))
        assert not saving.done and not (root / "step-000002").exists()
        trained.set()
        assert saving.outcome().ok
        memory = saver._memory._memory.data_ptr()
        saving = saver.save(4)
        saver.settle()
        assert saving.outcome().ok and saver._memory._memory.data_ptr() == memory
        late.undo()
        trained.clear()
        saving = saver.save(5)
        with towpath.full_parameters(run.model):
            expected_5 = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        trained.set()
        assert saving.outcome().ok
        late = _copy_as_late_as_can_be()
        saving = saver.save(6)
        with torch.no_grad():
            next(run.model.parameters()).mul_(1.0)  # nobody asked
        saver.settle()
        assert "written other than by the optimizer's step" in str(saving.outcome().failure)
    finally:
        storage.write_tensors = real
        late.undo()
    resumed = Run.of("zero3", SHAPE)
    checkpoint.load(root / "step-000002", resumed.state())
    assert differing(resumed.content(), expected) == []
    checkpoint.load(root / "step-000004", resumed.state())
    after = resumed.content()
    assert differing({n: after[n] for n in expected_5}, expected_5) == []


def _copy_as_late_as_can_be() -> pytest.MonkeyPatch:
    """Only when the next step of the optimizer is waiting for it."""
    waiting, patch = threading.Event(), pytest.MonkeyPatch()
    real_copy, real_wait = Snapshot._copy, Snapshot.before_step

    def copy(self: Snapshot) -> None:
        assert waiting.wait(30)
        waiting.clear()
        real_copy(self)

    def before_step(self: Snapshot) -> None:
        waiting.set()
        real_wait(self)

    patch.setattr(Snapshot, "_copy", copy)
    patch.setattr(Snapshot, "before_step", before_step)
    return patch


def test_savers_of_one_job_save_one_after_another(world: Worlds, tmp_path: Path) -> None:
    world(2).run(_save_with_two, tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("step-*")}
    assert names == {"recent/step-000009", "recent/step-000011", "best/step-000012", "recent/step-000013"}
    assert all(checkpoint.verify(path) is None for path in tmp_path.rglob("step-*"))


def _save_with_two(root: Path) -> None:
    run = Run.of("zero3", Topology(2, 1))
    state = run.state()
    recent = checkpoint.Saver(root / "recent", state, keep_last=2)
    best = checkpoint.Saver(root / "best", state, keep_last=1)
    with pytest.raises(CheckpointError, match="another Saver of this job"):
        checkpoint.Saver(root / ".." / root.name / "best", state)
    for step in range(1, 13, 2):
        run.train([step])
        recent.save(step)
        best.save(step + 1)
    for outcome in (recent.wait(), best.close()):
        assert outcome is not None and outcome.ok
    assert checkpoint.save(root / "recent", 13, state).ok  # while its saver is open
    groups = len(state.local.groups._made)
    checkpoint.Saver(root / "best", state).close()
    assert len(state.local.groups._made) == groups
    recent.close()


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_to_write_is_every_ranks_outcome_and_ends_nothing(world: Worlds, tmp_path: Path) -> None:
    for background in (True, False):
        root = tmp_path / str(background)
        outcomes = world(4).run(_fail_to_write, root, background)
        assert all(of_rank == outcomes[0] for of_rank in outcomes)
        full, vanished, denied, no_folder, no_room, bad = outcomes[0]
        assert "rank 2: " in full and "cannot be written (No space left on device)" in full
        assert "is not there" in vanished or "No such file or directory" in vanished
        assert "cannot be written (Permission denied)" in denied
        assert "cannot be written (File exists)" in no_folder
        assert "bytes are free, and a checkpoint of step 6 takes" in no_room
        assert "rank 1: data.loader is a" in bad
        assert sorted(p.name for p in root.iterdir()) == ["step-000001", "step-000008"]
        assert all(checkpoint.verify(p) is None for p in root.iterdir())


def _fail_to_write(root: Path, background: bool) -> list[str | None]:
    run = Run.of("zero3", SHAPE)
    run.train([0])
    saver = checkpoint.Saver(root, run.state(), background=background)
    assert saver.save(1).outcome().ok
    outcomes: list[Any] = []

    def attempt(step: int, saver: checkpoint.Saver = saver) -> None:
        outcomes.append(saver.save(step).outcome().failure)
        dist.barrier()

    real_write, real_free = storage.write_tensors, storage.free_bytes

    def full(*args: Any) -> Any:
        if rank() == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(*args)

    def vanishing(*args: Any) -> Any:
        if rank() == 0:
            for path in root.glob("*.partial-*"):
                path.rename(root.parent / f"gone-{path.name}")
        return real_write(*args)

    storage.write_tensors = full
    attempt(2)
    storage.write_tensors = vanishing
    attempt(3)
    storage.write_tensors = real_write
    read_only = root.parent / f"read-only-{background}"
    if rank() == 0:
        (root.parent / f"file-{background}").write_text("no folder")
        read_only.mkdir(mode=0o555)
    refused = checkpoint.Saver(read_only, run.state(), background=background)
    superuser = os.geteuid() == 0  # for whom nothing is read-only
    if superuser:
        os.seteuid(65534)
    attempt(4, refused)
    if superuser:
        os.seteuid(0)
    dist.barrier()
    attempt(5, checkpoint.Saver(root.parent / f"file-{background}", run.state(), background=background))
    storage.free_bytes = lambda folder: 5000
    attempt(6)
    storage.free_bytes = real_free
    bad = {"loader": object()} if rank() == 1 else {}
    other = checkpoint.Saver(root.parent / f"bad-{background}", run.state(data=_Extra(bad)), background=background)
    attempt(7, other)
    run.train([1])
    assert saver.save(8).outcome().ok
    for each in (other, saver):  # its thread may still use one that nothing else refers to
        each.close()
    return outcomes


def test_arguments_that_differ_between_ranks_are_refused(world: Worlds, tmp_path: Path) -> None:
    answers = world(2).run(_pass_different_arguments, tmp_path)
    assert answers[0] == answers[1]
    step, folder, keep, extra, names, long, next_save, sound = answers[0]
    assert "rank 0 has 'step = 3', rank 1 has 'step = 4'. Pass the same on every rank." in step
    assert "rank 0 has 'root = " in folder and "rank 0 has 'keep_last = 1', rank 1 has 'keep_last = 2'" in keep
    assert (
        """rank 0 has 'the state of 'data' = {"epoch": 0}', rank 1 has 'the state of 'data' = {"epoch": 1}'""" in extra
    )
    assert "rank 0 has 'the state of 'data0' = {}', rank 1 has 'nothing more'" in names, names
    assert "the state of 'data' = a text of CRC-32" in long and len(long) < 240, long
    assert "rank 0 has 'step = 8', rank 1 has 'step = 9'" in next_save
    assert sound == ""
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-000005"]


def _pass_different_arguments(root: Path) -> list[str]:
    run, mine = Run.of("zero3", Topology(2, 1)), rank()

    def answer(work: Callable[[], object]) -> str:
        try:
            work()
        except CheckpointError as error:
            return str(error)
        return ""

    def saved(state: dict[str, Any]) -> str:
        return answer(lambda: checkpoint.save(root, 3, run.state(data=_Extra(state))))

    answers = [answer(lambda: checkpoint.save(root, 3 + mine, run.state()))]
    answers.append(answer(lambda: checkpoint.save(root / str(mine), 3, run.state())))
    answers.append(answer(lambda: checkpoint.Saver(root, run.state(), keep_last=1 + mine)))
    answers.append(saved({"epoch": mine}))
    answers.append(answer(lambda: checkpoint.save(root, 3, run.state(**{f"data{mine}": _Extra({})}))))
    answers.append(saved({"seen": list(range(mine, 200))}))
    saver = checkpoint.Saver(root, run.state())
    assert not saver.save(8 + mine).outcome().ok
    answers.append(answer(lambda: saver.save(10)))
    saver.close()
    tensors = _Extra({"position": torch.tensor(mine), 3: float("nan")})  # whose values are rank 0's
    return [*answers, answer(lambda: checkpoint.save(root, 5, run.state(data=tensors)))]


class _Extra:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@pytest.mark.parametrize("doomed", [0, seldom(2)])
def test_a_rank_that_dies_while_saving_leaves_the_others_with_a_reason_and_nothing_published_is_touched(
    tmp_path: Path, doomed: int
) -> None:
    with World(4, group_timeout=10.0) as ranks:
        for connection in ranks._connections:
            connection.send((_die_while_saving, (tmp_path, doomed), 40.0))
        survivors = [c for r, c in enumerate(ranks._connections) if r != doomed]
        for connection in survivors:
            assert connection.poll(40.0), "a survivor hangs"
            ok, failure = connection.recv()
            assert ok, failure
            assert failure is not None
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000001"
    assert checkpoint.verify(tmp_path / "step-000001") is None


def _die_while_saving(root: Path, doomed: int) -> str | None:
    run = Run.of("zero3", SHAPE)
    run.train([0])
    saver = checkpoint.Saver(root, run.state())
    assert saver.save(1).outcome().ok
    dist.barrier()
    if rank() == doomed:
        storage.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
    return saver.save(2).outcome().failure


def test_a_rank_that_loses_the_others_while_saving_lets_them_know(tmp_path: Path) -> None:
    """Not only its death does: one that goes on, and waits for them elsewhere, would have them wait for it."""
    with World(3) as ranks:
        for failure in ranks.run(_lose_the_others, tmp_path, timeout=50.0):
            assert failure[0] is not None and all("the ranks have lost each other" in (f or "") for f in failure[1:])


def _lose_the_others(root: Path) -> list[str | None]:
    run = Run.of("zero3", Topology(3, 1))
    run.train([0])
    saver = checkpoint.Saver(root, run.state())
    if rank() == 1:
        storage.write_files = lambda *_: _Unpicklable()  # pyright: ignore
    failures = [saver.save(step).outcome().failure for step in (1, 2)]
    run.train([1])
    saver.close()
    with pytest.raises(CheckpointError) as refused:
        checkpoint.Saver(root, run.state())
    return [*failures, str(refused.value)]


class _Unpicklable:
    """Breaks on its way to the others, as a message over a dead connection does."""

    def __reduce__(self) -> Any:
        raise RuntimeError("Connection closed by peer")


# --- loading what is damaged -----------------------------------------------------------------------------------------


def test_every_rank_passes_over_what_any_rank_finds_damaged(world: Worlds, tmp_path: Path) -> None:
    world(4).run(_save_three, tmp_path)
    third, second = tmp_path / "step-000003", tmp_path / "step-000002"
    (third / "rank-00001.safetensors").unlink()
    damaged = second / "rank-00002-optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 4
    damaged.write_bytes(content)
    for step, notes, refusal in world(4).run(_load_the_sound_one, tmp_path):
        assert step == 1
        assert "rank-00001.safetensors is missing" in notes[0]
        assert "rank-00002-optimizer.safetensors is corrupted" in notes[1]
        assert "rank-00002-optimizer.safetensors is corrupted" in refusal


def test_a_folder_may_be_on_the_disk_of_one_node_and_each_rank_names_the_same(world: Worlds, tmp_path: Path) -> None:
    for step, texts in world(4).run(_on_disks_of_their_own, tmp_path):
        assert step == [2, 1, 3] and "rank 0 has 'the folder to load = run'" in texts
    assert sorted(path.name for path in tmp_path.glob("?/run/*")) == ["step-000001", "step-000002", "step-000003"]


def _on_disks_of_their_own(root: Path) -> tuple[list[int], str]:
    """Save on one node, lose a checkpoint there, load on others, and save where rank 0 is then."""
    run, found, before = Run.of("paro-iig", SHAPE), list[int](), Path.cwd()
    node = root / str(rank() // 2)
    (node / "run").mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    try:
        content = {0: run.content()}
        for step in (1, 2):
            run.train([step])
            assert checkpoint.save("run", step, run.state()).ok
            content[step] = run.content()

        def load() -> None:
            loaded = checkpoint.load("run", run.spoil().state())
            assert loaded is not None and differing(run.content(), content[loaded.step]) == []
            found.append(loaded.step)

        load()
        dist.barrier()
        os.chdir(root / str(1 - rank() // 2))  # the nodes change places: rank 0 does not see them
        if rank() == 2:
            next(Path("run/step-000002").glob("*-optimizer*")).unlink()
        dist.barrier()
        load()
        run.train([3])
        content[3] = run.content()
        (Path("run") / f"step-000002.partial-0123_{rank()}").mkdir(exist_ok=True)  # a rank was killed as it saved
        assert checkpoint.save("run", 3, run.state()).ok
        load()
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load("run" if rank() < 2 else "ran", run.state())
    finally:
        os.chdir(before)
    return found, str(refused.value)


def _save_three(root: Path) -> None:
    run = Run.of("zero3", SHAPE)
    for step in (1, 2, 3):
        run.train([step])
        checkpoint.save(root, step, run.state())


def _load_the_sound_one(root: Path) -> tuple[int, tuple[str, ...], str]:
    run = Run.of("mics:2x1", SHAPE)
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.load(root / "step-000002", run.state())
    loaded = checkpoint.load(root, run.state())
    assert loaded is not None
    return loaded.step, loaded.notes, str(refusal.value)


# --- random numbers, and PyTorch's own checkpoints --------------------------------------------------------------------


def test_each_rank_goes_on_with_its_own_random_numbers_and_new_ranks_get_some(world: Worlds, tmp_path: Path) -> None:
    world(4).run(_random_numbers, tmp_path)
    drawn = world(3).run(_other_random_numbers, tmp_path)
    assert len(set(drawn)) == 3 and world(3).run(_other_random_numbers, tmp_path) == drawn


def _random_numbers(root: Path) -> None:
    run = Run.of("zero3", SHAPE)
    torch.manual_seed(100 + rank())
    checkpoint.save(root, 1, run.state())
    expected = torch.rand(3)
    torch.manual_seed(0)
    checkpoint.load(root, run.state())
    assert torch.equal(torch.rand(3), expected)


def _other_random_numbers(root: Path) -> float:
    run = Run.of("zero3", Topology(3, 1))
    loaded = checkpoint.load(root, run.state())
    assert loaded is not None and "random numbers begin anew" in loaded.notes[0]
    return torch.rand(()).item()


def test_pytorchs_own_checkpoints_hold_a_sharded_model_and_its_optimizer(world: Worlds, tmp_path: Path) -> None:
    expected = world(4).run(_save_by_pytorch, tmp_path)[0]
    for label, shape in (("paro-iig", SHAPE), ("mics:1x1", Topology(2, 1))):
        for wrong in world(shape.world).run(_load_by_pytorch, tmp_path, label, shape, expected):
            assert wrong == []


def _by_name(run: Run) -> dict[str, Any]:
    names = {p: n for n, p in run.model.named_parameters()}
    return {f"{names[p]}.{key}": value for p, s in run.optimizer.state.items() for key, value in s.items()}


def _save_by_pytorch(root: Path) -> Content:
    import torch.distributed.checkpoint as dcp

    run = Run.of("zero3", SHAPE)
    run.train(range(2))
    dcp.save({"model": run.model.state_dict(), "optimizer": _by_name(run)}, checkpoint_id=root)
    return run.content()


def _load_by_pytorch(root: Path, label: str, shape: Topology, expected: Content) -> list[str]:
    import torch.distributed.checkpoint as dcp

    run = Run.of(label, shape)
    run.train([0])
    dcp.load({"model": run.model.state_dict(), "optimizer": _by_name(run)}, checkpoint_id=root)
    wrong = differing(run.content(), expected)
    run.train([0])  # the weights that were loaded are published
    return wrong


def _stagers() -> dict[str, Any]:
    """PyTorch's: what `async_save` takes by itself, with a writer and without; with a thread; with kept memory."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

    in_a_thread = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
    return {
        "the writer": None,
        "default": DefaultStager(StagingOptions(False, False, False, False)),
        "in a thread": DefaultStager(in_a_thread),
        "blocking": BlockingAsyncStager(cache_staged_state_dict=True),
    }


@pytest.mark.parametrize("label", ["zero3", seldom("mics"), seldom("ddp"), seldom("paro-iig")])
@pytest.mark.parity
def test_pytorchs_async_save_writes_the_values_of_its_call_while_training_goes_on(
    world: Worlds, tmp_path: Path, label: str
) -> None:
    """And another strategy loads them, bit for bit as from `dcp.save`."""
    expected = world(4).run(_save_by_pytorch_beside_training, tmp_path, label)[0]
    folders = sorted(folder.name for folder in tmp_path.iterdir())
    assert folders == ["at once", "blocking", "default", "in a thread", "sent", "the writer"]
    for name in folders:
        for wrong in world(3).run(_load_by_pytorch, tmp_path / name, "paro-iig", Topology(3, 1), expected):
            assert wrong == [], name


def _save_by_pytorch_beside_training(root: Path, label: str) -> Content:
    import torch.distributed.checkpoint as dcp

    trained = threading.Event()

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            assert trained.wait(60)
            return super().write_data(plan, planner)

    run, group = Run.of(label, SHAPE), dist.new_group(backend="gloo")
    run.train(range(2))
    expected, state = run.content(), {"model": run.model.state_dict(), "optimizer": _by_name(run)}
    dcp.save(state, checkpoint_id=root / "at once")
    dcp.save(ForkingPickler.loads(ForkingPickler.dumps(state)), checkpoint_id=root / "sent")
    for name, stager in _stagers().items():
        dcp.load(state, checkpoint_id=root / "at once")
        trained.clear()
        saving: Any = dcp.async_save(
            state, storage_writer=Writer(root / name), process_group=group, async_stager=stager
        )
        if name == "in a thread":  # as PyTorch has it, before the next step
            saving.staging_completion.result(60)
            saving = saving.upload_completion
        run.train([2])
        trained.set()
        saving.result(60)
        if stager is not None:
            stager.close()
    return expected


def test_what_rests_encoded_or_lies_on_a_mesh_is_staged_as_it_is_saved(world: Worlds) -> None:
    for alike in world(4).run(_staged_boxes):
        assert alike == [True, True]


def _staged_boxes() -> list[bool]:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    encoded = towpath.shard(Adapted(), towpath.strategy("zero3", SHAPE, frozen_codec="int8:64"), topology=SHAPE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: list[bool] = []
    for model in (encoded, _one_model(mesh, "zero3")):
        state = model.state_dict()
        staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        written = [_written(name, tensor) for name, tensor in state.items()]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(123.0)
        found.append(written == [_written(name, staged[name]) for name in state])
    return found


class Adapted(nn.Sequential):
    """A frozen layer and one that is trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Linear(64, 8))
        self[0].requires_grad_(False)


def _written(name: str, tensor: Any) -> list[Any]:
    """What torch.distributed.checkpoint writes of it: indices, shapes and values."""
    items = tensor.__create_write_items__(name, tensor)
    return [(i.index, i.tensor_data, tensor.__get_tensor_shard__(i.index).tolist()) for i in items]


def test_only_pytorchs_checkpoints_are_told_that_a_shard_has_no_address(world: Worlds) -> None:
    """To others a 0 would be wrong without a word, and what was sent to another process is not a whole tensor there."""
    for told in world(2).run(_refusals):
        assert "holds a slice" in told[0] and "holds the elements" in told[1] and "can only be saved there" in told[2]


def _refusals() -> list[str]:
    parameter = next(Run.of("zero3", Topology(2, 1)).model.parameters())
    sent = ForkingPickler.loads(ForkingPickler.dumps(parameter))
    told: list[str] = []
    for refused in (parameter.data_ptr, lambda: parameter.new_empty(3), sent.sum):
        with pytest.raises(towpath.errors.ShardError) as error:
            refused()
        told.append(str(error.value))
    return told


# --- one job at a time ------------------------------------------------------------------------------------------------


def test_a_second_job_in_a_folder_is_refused_by_name_on_every_rank(world: Worlds, tmp_path: Path) -> None:
    first = checkpoint.Saver(tmp_path, checkpoint.State(nn.Linear(2, 2)))
    for told in world(2).run(_second_job, tmp_path):
        assert told is not None and f"process {os.getpid()} on host" in told and "since" in told
    assert first.save(1).outcome().ok
    first.close()
    assert world(2).run(_second_job, tmp_path) == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def _second_job(root: Path) -> str | None:
    run = Run.of("zero3", Topology(2, 1))
    try:
        saver = checkpoint.Saver(root, run.state())
    except CheckpointError as error:
        return str(error)
    assert saver.save(2).outcome().ok
    return None


def test_of_jobs_that_lock_a_folder_at_the_same_instant_one_gets_it(world: Worlds, tmp_path: Path) -> None:
    """Each rank is a job of its own here. At first the folder is free, then a dead job has left its lock."""
    for held in zip(*world(4).run(_contend, tmp_path), strict=True):
        assert sorted(held) == [False, False, False, True]


def _contend(root: Path) -> list[bool]:
    held: list[bool] = []
    for number in range(20):
        folder = root / f"{number // 2}"
        mine = folders.Lock(folder)
        dist.barrier()
        try:
            mine.hold()
            held.append(True)
        except CheckpointError:
            held.append(False)
        dist.barrier()
        if held[-1]:  # as one that has died
            [path] = folder.iterdir()
            path.write_text(path.read_text().replace('"started": ', '"started": 1'))
    return held


def test_a_job_that_loses_its_folder_saves_no_more_and_says_so_on_every_rank(world: Worlds, tmp_path: Path) -> None:
    first = checkpoint.Saver(tmp_path / "first", checkpoint.State(nn.Linear(2, 2)))  # the lock of a job that lives
    for background in (True, False):
        root = tmp_path / str(background)
        for refusal in world(2).run(_lose_the_folder, root, background):
            assert f"was removed or replaced while this job held it by process {os.getpid()} on host" in refusal
        assert sorted(path.name for path in root.iterdir()) == ["lock.json", "step-000001"]
    first.close()


def _lose_the_folder(root: Path, background: bool) -> str:
    saver = checkpoint.Saver(root, Run.of("zero3", Topology(2, 1)).state(), background=background)
    assert saver.save(1).outcome().ok
    if rank() == 0:
        shutil.copyfile(root.parent / "first" / "lock.json", root / "lock.json")
    dist.barrier()
    with pytest.raises(CheckpointError) as refused:
        saver.save(2)
        saver.save(3)
    return str(refused.value)
