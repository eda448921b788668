"""The engine keeps its order on a GPU, too: no two accesses to the same bytes that no stream, event or host orders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import towpath
from tests.forms import in_form
from tests.order.checker import (
    Checker,
    LogicalHandle,
    LogicalStream,
    Message,
    RaceError,
    check_communications,
    checking,
)
from tests.ranks.models import MODELS, TiedGPT
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from tests.workspace import workspace
from towpath import Outer, Transport
from towpath.checkpoint import State, load, save
from towpath.codecs import exact as exact_codecs
from towpath.codecs.exact import specification
from towpath.collectives import backend
from towpath.collectives.collective import Workspace
from towpath.core import routes
from towpath.core.buffers import AllToAll
from towpath.core.routes import Form
from towpath.core.step_state import ParamVersion, Submit, Task, Wait
from towpath.core.strategy import TransferKind
from towpath.engine import saved_activations
from towpath.engine.executor import Engine
from towpath.engine.saved_activations import DeviceCopies
from towpath.engine.transfer_queues import Handle, Queues, StreamJob
from towpath.observe.record import TransferWait

SHAPE = towpath.Topology(2, 2)
LABELS = (
    *("ddp", "zero1", "zero2", "zero3", "hpz", "mics", "mics:2x2", "paro-iig", "paro-nig", "paro-ngg"),
    *("zero3@ring", "zero3@hierarchical", "zero3@ho-ring", "zero3@two-hop", "zero3@one-hop", "paro-iig@ring"),
    *("zero++", "qwz", "qgz", "mics gradients=int4:64 feedback=both", "zero3 weights=e4m3 gradients=int8:64+hadamard"),
    *("zero3@hierarchical weights=int8", "paro-iig weights=int8 gradients=int8", "ddp gradients=bf16"),
    *("zero3 offload=optimizer", "paro-iig offload=optimizer", "ddp offload=optimizer", "zero++ offload=optimizer"),
    *("paro-igg offload=params", "hpz offload=params", "zero1 offload=params", "zero++ offload=optimizer+params"),
)


# --- the checker itself ----------------------------------------------------------------------------------------------


def two_streams(checker: Checker) -> tuple[LogicalStream, LogicalStream]:
    return LogicalStream("a", 1, checker), LogicalStream("b", 1, checker)


def job(work: Callable[[], Any]) -> StreamJob:
    def run(_: Workspace) -> None:
        work()

    return StreamJob(workspace(), [run])


def test_two_writes_without_an_edge_are_a_race_that_names_both() -> None:
    with Checker() as checker:
        one, other = two_streams(checker)
        x = torch.zeros(8)
        one.submit(job(lambda: x[:4].fill_(1)))
        other.submit(job(lambda: x[4:].fill_(1)))  # other bytes
        with pytest.raises(RaceError, match=r"aten.fill_.Scalar\) writes bytes 0 to 16 on 'a 0'\n.* 12 to 16 on 'b 0'"):
            other.submit(job(lambda: x[3:4].fill_(2)))


def test_what_is_submitted_after_a_handle_or_waited_for_is_in_order() -> None:
    with Checker() as checker:
        one, other = two_streams(checker)
        x = torch.zeros(8)
        first = one.submit(job(lambda: x.fill_(1)))
        second = other.submit(job(lambda: x.add_(1)), [first])
        with pytest.raises(RaceError):
            x.sum()
        second.wait()
        x.sum()
        one.submit(job(lambda: x.zero_()))  # behind what was computed before


def test_a_read_meets_a_later_write_and_reads_do_not_meet() -> None:
    with Checker() as checker:
        one, other = two_streams(checker)
        x = torch.zeros(8)
        one.submit(job(lambda: x.sum()))
        other.submit(job(lambda: x.sum()))
        with pytest.raises(RaceError):
            x.fill_(1)


def test_what_the_host_has_read_is_over() -> None:
    with Checker() as checker:
        one, other = two_streams(checker)
        x = torch.zeros(1)
        one.submit(job(lambda: x.fill_(1).item()))
        other.submit(job(lambda: x.fill_(2)))


def test_memory_that_is_dropped_while_another_stream_uses_it_is_a_race_unless_the_allocator_was_told() -> None:
    for told in (True, False):
        with Checker() as checker:
            one, _ = two_streams(checker)
            x = torch.zeros(8)
            if told:
                one.uses(0, x)
            one.submit(job(x.sum))
            del x
            with nullcontext() if told else pytest.raises(RaceError, match="dropped, and free for 'computation'"):
                torch.zeros(8)


def test_the_host_works_on_its_memory_in_an_order_of_its_own() -> None:
    with Checker() as checker:
        stream, _ = two_streams(checker)
        device, host = torch.zeros(8), checker.lies_on_host(torch.empty(8))
        host.fill_(1)
        stream.submit(job(lambda: device.copy_(host)))  # behind what the host has done
        with pytest.raises(RaceError, match=r"'a 0'\n.* on 'the host'"):
            host.add_(1)
        checker.done("a 0")
        copied = stream.submit(job(lambda: host.copy_(device)))
        copied.wait()  # by the computation alone
        with pytest.raises(RaceError):
            host.sum()
        copied.wait(on_host=True)
        (host + 1).mul_(host.sum())


# --- the engine ------------------------------------------------------------------------------------------------------


class Deep(TiedGPT):
    """More units than slots."""

    def __init__(self) -> None:
        super().__init__(layers=4)


class TwoDtypes(Deep):
    """Units with a second bucket, whose gathers and reductions are launched with those of the first."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.unused = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))


class Checkpointed(Deep):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i in (1, 2) else block(x)
        return self.head(self.norm(x))


class Reordered(Deep):
    """Its blocks run in another order every time."""

    orders = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1))
    turn = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for number in self.orders[self.turn % len(self.orders)]:
            x = self.blocks[number](x)
        self.turn += 1
        return self.head(self.norm(x))


class PartlyFrozen(Deep):
    """Of each block what has two dims, and of one everything, does not train."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            for p in block.parameters():
                p.requires_grad_(number != 1 and p.dim() != 2)


def train(model: Any, optimizer: Any, steps: int = 2, micro_steps: int = 2) -> None:
    entry = MODELS["gpt"]
    for step in range(steps):
        for micro in range(micro_steps):
            with nullcontext() if micro == micro_steps - 1 else model.no_sync():
                batch = entry.micro_batch(dist.get_rank(), micro, step, torch.float32)
                entry.loss(model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sharded(label: str, build: Callable[[], nn.Module] = Deep, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = towpath.shard(build(), strategy_of(label, SHAPE), topology=SHAPE, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("form", [Form.COLLECTIVES, seldom(Form.MESSAGES)])
@in_turn(LABELS, 1)
@on_ranks(4)
def test_every_strategy_keeps_its_order(label: str, form: Form) -> None:
    _train_and_drop(label, form)


@pytest.mark.parametrize("label", ["paro-iig", seldom("zero3")])
@on_ranks(4)
def test_buckets_that_are_reduced_together_keep_their_order(label: str) -> None:
    _train_and_drop(label, Form.COLLECTIVES, TwoDtypes)


def _train_and_drop(label: str, form: Form, build: Callable[[], nn.Module] = Deep) -> None:
    """The second model takes the memory of the first, which is dropped with transfers under way."""
    with in_form(form, shared=form is Form.COLLECTIVES), checking() as checker:
        for _ in range(2):
            model, optimizer = sharded(label, build)
            train(model, optimizer)
            del model, optimizer
        check_communications(checker.communications)
    assert checker.operations > 1000


def _nothing(_: Any) -> None:
    """In place of a wait."""


ALL_TO_ALL_DEFECTS: dict[str, tuple[type, str, Any, str]] = {
    "none": (AllToAll, "sets", AllToAll.sets, "no race"),
    "stages in flight share their buffers": (AllToAll, "sets", property(lambda _: 1), "in no order"),
    "a hop does not wait for the one before": (Message, "wait", _nothing, "in no order"),
}


@pytest.mark.parametrize("defect", ALL_TO_ALL_DEFECTS)
@in_turn(("qgz", "zero3@two-hop"), 1)
@on_ranks(4)
def test_all_to_alls_in_flight_keep_their_buffers(defect: str, label: str) -> None:
    """NCCL runs them on a stream of its own, until the collective waits for them."""
    owner, name, value, told = ALL_TO_ALL_DEFECTS[defect]
    with pytest.MonkeyPatch.context() as patch, in_form(Form.COLLECTIVES, shared=True):
        patch.setattr(routes, "SMALLEST_PART_BYTES", 32)  # several stages are in flight
        assert told in _told(label, Deep, name, value, owner=owner)


PARTS_DEFECTS: dict[str, Any] = {
    "none": (Message, "wait", Message.wait, "no race"),
    "parts share a bundle": (
        backend,
        "call_parts",
        lambda length, parts: [(0, length // parts)] * parts,
        "in no order",
    ),
    "a row does not wait for its column": (Message, "wait", _nothing, "in no order"),
}


@pytest.mark.parametrize("defect", PARTS_DEFECTS)
@in_turn(("zero3@ho-ring", "paro-nnn@ho-ring", "paro-igg"), 1)
@on_ranks(4)
def test_parts_in_flight_keep_their_buffers(defect: str, label: str) -> None:
    """NCCL runs the calls over columns on a stream of their own, beside those over rows."""
    owner, name, value, told = PARTS_DEFECTS[defect]
    with in_form(Form.COLLECTIVES, shared=True):
        found = _told(label, Deep, name, value, owner=owner)
        assert told in found, found


EXACT = tuple(f"{name} exact=1" for name in ("zero1", "paro-iig", "paro-iig offload=optimizer", "zero3"))


@pytest.mark.parametrize(
    "label, form",
    [
        (label, form) if (label, form) == (EXACT[1], Form.COLLECTIVES) else seldom(label, form)
        for label in EXACT
        for form in Form
    ],
)
@on_ranks(4)
def test_exact_transports_keep_their_order(label: str, form: Form) -> None:
    """In plain torch, because the checker does not see what C++ reads and writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("towpath.core.transport.SMALLEST_BYTES", 1)
        patch.setattr(exact_codecs, "_host", lambda device_type: specification)
        _train_and_drop(label, form)


ISLANDS = ("zero1 offload=optimizer", "zero3", "ddp", "paro-igg", "zero3 offload=params")
OUTER = {
    "float32": Outer(every=2, fragments=2, delay=1, blend=0.5),
    "int4": Outer(every=2, delay=1, transport=Transport("flat", "int4:64", feedback="all")),
}


@pytest.mark.parametrize("form", [Form.COLLECTIVES, seldom(Form.MESSAGES)])
@in_turn([(label, codec) for label in ISLANDS for codec in OUTER], 1, "case")
@on_ranks(4)
def test_exchanges_between_islands_keep_their_order(case: tuple[str, str], form: Form) -> None:
    """Also where all of them are averaged in the middle of an exchange."""
    label, codec = case
    with in_form(form, shared=form is Form.COLLECTIVES), checking() as checker:
        torch.manual_seed(0)
        model: Any = towpath.shard(Deep(), strategy_of(label, SHAPE, outer=OUTER[codec]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, steps=4, micro_steps=1)
        towpath.average_islands(model)
        train(model, optimizer, steps=1, micro_steps=1)
        check_communications(checker.communications)


def _exchange_at_once(self: Queues, kind: TransferKind, *of: Any) -> Handle:
    return _SUBMIT(self, kind, *of[:2]) if kind is TransferKind.OUTER else _SUBMIT(self, kind, *of)


def _apply_at_once(self: Engine, actions: Iterable[Any]) -> None:
    _EXECUTE(self, [a for a in actions if not (isinstance(a, Wait) and a.task.kind is TransferKind.OUTER)])


_SUBMIT, _EXECUTE = Queues.submit, Engine.execute


@pytest.mark.parametrize(
    ("owner", "name", "without"), [(Queues, "submit", _exchange_at_once), (Engine, "execute", _apply_at_once)]
)
@on_ranks(4)
def test_an_exchange_waits_for_its_copy_and_is_waited_for(owner: type, name: str, without: Any) -> None:
    """It is sent from the host's memory, by a thread that no stream orders."""
    with pytest.MonkeyPatch.context() as patch, in_form(Form.COLLECTIVES, shared=True):
        patch.setattr(owner, name, without)
        with pytest.raises(RaceError, match="in no order"), checking():
            model: Any = towpath.shard(Deep(), strategy_of("zero3", SHAPE, outer=OUTER["float32"]))
            train(model, torch.optim.SGD(model.parameters(), lr=1e-3), steps=3, micro_steps=1)


# Sent as it rests, inside the node or across, or decoded in place of a gather.
AT_REST = ("zero3 frozen_codec=int8 frozen=1x1", "zero3 frozen_codec=int4:64 frozen=2x1", "hpz frozen_codec=int8")


@pytest.mark.parametrize("form", [Form.COLLECTIVES, seldom(Form.MESSAGES)])
@in_turn((*AT_REST, "mics frozen_codec=int8 gradients=int4:64", "zero3 frozen=2x1"), 1)
@on_ranks(4)
def test_what_is_frozen_is_decoded_in_order(label: str, form: Form) -> None:
    with in_form(form, shared=form is Form.COLLECTIVES), checking() as checker:
        for _ in range(2):
            model, optimizer = sharded(label, PartlyFrozen)
            train(model, optimizer, micro_steps=1)
            del model, optimizer
        check_communications(checker.communications)


@pytest.mark.parametrize("bf16", [True, seldom(False)], ids=["bf16", "float32"])
@pytest.mark.parametrize("build", [Checkpointed, seldom(Reordered)], ids=["Checkpointed", "Reordered"])
@in_turn(("zero3", "hpz", "paro-iig", "zero++", "ddp"), 1)
@on_ranks(4)
def test_checkpointed_parts_and_changed_orders_keep_theirs(
    build: Callable[[], nn.Module], bf16: bool, label: str
) -> None:
    precision = towpath.Precision(params=torch.bfloat16, reduce=torch.float32) if bf16 else towpath.Precision()
    with checking() as checker:
        train(*sharded(label, build, precision=precision), steps=3, micro_steps=1)
        check_communications(checker.communications)


@in_turn(("zero3", "mics", "paro-iig", "zero++", "mics offload=optimizer", "mics offload=params"), 1)
@on_ranks(4)
def test_what_users_do_between_steps_keeps_its_order(label: str, tmp_path: Path) -> None:
    with checking() as checker:
        model, optimizer = sharded(label)
        step = partial(train, model, optimizer, steps=1, micro_steps=1)
        step()
        with towpath.full_parameters(model), torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        step()
        assert save(tmp_path, 3, State(model, optimizer)).ok
        step()
        assert load(tmp_path, State(model, optimizer)) is not None
        with torch.no_grad():
            MODELS["gpt"].loss(model, *MODELS["gpt"].micro_batch(0, 0, 0, torch.float32))
        step()
        check_communications(checker.communications)


@in_turn(("zero3", "hpz", "paro-iig", "zero2"), 1)
@on_ranks(4)
def test_a_pass_that_fails_leaves_no_race(label: str) -> None:
    with checking():
        model, optimizer = sharded(label)
        train(model, optimizer, steps=1)
        block = model.blocks[2]

        def refuse(*_: Any) -> None:
            raise ConnectionError("on purpose")

        for register in (block.register_forward_pre_hook, block.register_full_backward_pre_hook):
            hook = register(refuse)
            with pytest.raises(ConnectionError):
                train(model, optimizer, steps=1, micro_steps=1)
            hook.remove()
            train(model, optimizer, steps=1, micro_steps=1)


# --- activations on the host -----------------------------------------------------------------------------------------


class Activations(LogicalStream):
    """A stream of copies, for which nobody waits if it is not `waited_for`."""

    def __init__(self, name: str, checker: Checker, waited_for: bool = True) -> None:
        super().__init__(name, 1, checker)
        self.waited_for, self.copies = waited_for, 0

    def submit(self, job: StreamJob, after: Sequence[Handle] = (), waiting: TransferWait | None = None) -> Handle:
        self.copies += 1
        handle = super().submit(job, after, waiting)
        return handle if self.waited_for else LogicalHandle(self._checker, {})


@contextmanager
def copies_on_streams(checker: Checker, ahead: int, without: str = "") -> Generator[Any]:
    """Activations of models on a CPU are copied as on a GPU."""
    streams = (Activations(name, checker, name != without) for name in ("to the host", "to the device"))
    copies = DeviceCopies(torch.device("cpu"), *streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_activations, "_copies_on", lambda device: copies)
        patch.setattr(saved_activations, "_AHEAD_BYTES", ahead)
        patch.setattr(saved_activations, "_BLOCK_BYTES", 1 << 12)
        yield copies


def step_offloaded(model: Any, optimizer: Any, step: int, offload: bool = True) -> None:
    entry = MODELS["gpt"]
    with towpath.offload_activations(model, smallest_bytes=1) if offload else nullcontext():
        loss = entry.loss(model, *entry.micro_batch(dist.get_rank(), 0, step, torch.float32))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("build", [seldom(Deep), Checkpointed])
@in_turn(("zero3", "paro-iig", "ddp"), 1)
@on_ranks(4)
def test_offloaded_activations_keep_their_order(build: type[nn.Module], label: str) -> None:
    expected, optimizer = sharded(label, build)
    for step in range(3):
        step_offloaded(expected, optimizer, step, offload=False)
    for ahead in (1 << 13, 1 << 30):  # some of a pass, and all of it
        with checking() as checker, copies_on_streams(checker, ahead) as copies:
            model, optimizer = sharded(label, build)
            for step in range(3):
                step_offloaded(model, optimizer, step)
            there, back = (stream.copies for stream in (copies.to_host, copies.to_device))
            assert back == 0 if ahead == 1 << 30 else 0 < back <= there  # all of a pass stays
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.local, q.local)


@pytest.mark.parametrize("copy", ["to the host", "to the device"])
@on_ranks(4)
def test_without_a_wait_for_a_copy_there_is_a_race(copy: str) -> None:
    with (
        pytest.raises(RaceError, match=r"in no order|before it was waited for"),
        checking() as checker,
        copies_on_streams(checker, 1 << 12, copy),
    ):
        model, optimizer = sharded("zero3")
        for step in range(2):
            step_offloaded(model, optimizer, step)


# --- every edge is needed --------------------------------------------------------------------------------------------


def _after(kind: TransferKind, before: TransferKind) -> Callable[[Task, Task], bool]:
    return lambda task, other: task.kind is kind and other.kind is before


EDGES: dict[str, tuple[str, type[nn.Module], Callable[[Task, Task], bool]]] = {
    "a gather after the publication of what it brings": (
        "paro-iig",
        Deep,
        _after(TransferKind.GATHER, TransferKind.PARAM_SYNC),
    ),
    "a gather after what was gathered into its slot": (
        "zero3",
        Reordered,
        _after(TransferKind.GATHER, TransferKind.GATHER),
    ),
    "a sync after the reduction before it": ("mics:2x2", Deep, _after(TransferKind.GRAD_SYNC, TransferKind.REDUCE)),
}
WAITS = {
    "the computation waits for a gather": ("zero3", Deep, TransferKind.GATHER),
    "the computation waits for a backward gather": ("zero3", Deep, TransferKind.BACKWARD_GATHER),
    "the computation waits until what rests here is decoded": (
        "ddp frozen_codec=int8 frozen=1x1",
        PartlyFrozen,
        TransferKind.GATHER,
    ),
    "gradients wait until those before them have left their slot": ("zero3", Deep, TransferKind.REDUCE),
    "the boundary waits for its syncs": ("mics", Deep, TransferKind.GRAD_SYNC),
}


@in_turn(list(EDGES), 1, "edge")
@on_ranks(4)
def test_without_an_edge_there_is_a_race(edge: str) -> None:
    label, build, dropped = EDGES[edge]

    def without(self: Engine, actions: Iterable[Any]) -> None:
        actions = list(actions)
        for task in (action.task for action in actions if isinstance(action, Submit)):
            task.after = tuple(t for t in task.after if not dropped(task, t))
        _EXECUTE(self, actions)

    assert "in no order" in _told(label, build, "execute", without)


@in_turn(list(WAITS), 1, "wait")
@on_ranks(4)
def test_without_a_wait_there_is_a_race(wait: str) -> None:
    label, build, kind = WAITS[wait]

    def without(self: Engine, actions: Iterable[Any]) -> None:
        _EXECUTE(self, [a for a in actions if not (isinstance(a, Wait) and a.task.kind is kind)])

    assert "in no order" in _told(label, build, "execute", without)


def _gradients_on_host(self: Engine, actions: Iterable[Any]) -> None:
    syncs = (TransferKind.GRAD_SYNC,)
    _EXECUTE(self, [Wait(a.task) if isinstance(a, Wait) and a.task.kind in syncs else a for a in actions])


HOST_WAITS: dict[str, tuple[type, str, Any]] = {
    "before it reads the mean gradients": (Engine, "execute", _gradients_on_host),
    "before it writes over what is on its way": (ParamVersion, "wait_for_read", lambda _: None),
}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@in_turn(list(HOST_WAITS), 1, "wait")
@on_ranks(4)
def test_without_a_wait_of_the_host_there_is_a_race(wait: str, bf16: bool) -> None:
    """With bf16, the device casts what it gets."""
    owner, name, without = HOST_WAITS[wait]
    label = "paro-iig offload=optimizer" if bf16 else "zero3 offload=optimizer"
    found: list[str] = []
    for value in (getattr(owner, name), without):
        found.append(_told(label, Deep, name, value, written_between_passes, owner, _BF16 if bf16 else None))
    assert found[0] == "no race" and "in no order" in found[1] and "'the host'" in found[1], found


_BF16 = towpath.Precision(params=torch.bfloat16, reduce=torch.float32)


def written_between_passes(model: Any, optimizer: Any) -> None:
    """Nothing but the host's own wait orders one pass's parameter sync before the next write."""
    entry = MODELS["gpt"]
    train(model, optimizer, steps=1)
    with torch.no_grad():
        for _ in range(2):
            for p in model.parameters():
                p.mul_(0.9)
            entry.loss(model, *entry.micro_batch(0, 0, 0, torch.float32))


def four_steps(model: Any, optimizer: Any) -> None:
    train(model, optimizer, steps=4, micro_steps=1)


def _told(
    label: str,
    build: Callable[[], nn.Module],
    name: str,
    value: Any,
    run: Callable[[Any, Any], None] = four_steps,
    owner: Any = Engine,
    precision: towpath.Precision | None = None,
) -> str:
    """Every rank finds it at the same operation, so that none waits for another."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        with checking():
            run(*sharded(label, build, precision=precision or towpath.Precision()))
    except RaceError as error:
        return str(error)
    finally:
        setattr(owner, name, original)
    return "no race"
