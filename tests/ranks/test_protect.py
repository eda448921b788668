"""A lost node: what the others hold in memory goes on bit for bit. Functions with an underscore run on every rank."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import towpath
from tests.ranks.checkpoints import Content, differing
from tests.ranks.protected import SHAPE, Job, copied, enter, lose, on_rank_0
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import seldom
from towpath import Topology, checkpoint
from towpath.errors import CheckpointError
from towpath.optim import chain, owner_stepped
from towpath.protect.memory import memory_of


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


def _on_a_mesh() -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return Job("zero1", Topology(2, 1), group=mesh["dp"].get_group())


MADE = {"bf16": _low, "muon": partial(_muon, "paro-iig"), "muon mics": partial(_muon, "mics:2x1"), "mesh": _on_a_mesh}


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
    texts = {text for _, text in found}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text and "no node has a whole copy of rank-00000" in text and str(root) in text, text


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
