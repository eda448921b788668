"""The step machine under any order of events: what it answers is carried out on a memory of its own, and watched.

Transfers are done as late as their queues let them, or as early, by chance. Nothing may compute with weights that are
not whole and fresh, no slot may have two users, each gradient is reduced exactly once and in one order, nothing waits
in a circle, and after a boundary nothing is left.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towpath.core.queues import QUEUES
from towpath.core.step import StepMachine
from towpath.core.step_state import (
    GRADIENTS_CHANGE,
    UNITS_IN_FLIGHT,
    WEIGHTS_CHANGE,
    Action,
    AgreeOnSizes,
    AssignSlot,
    CheckRanks,
    ForwardPass,
    GradientState,
    InvalidateViews,
    OpenGradients,
    SaveBackwardCopy,
    SetGrads,
    Slot,
    Submit,
    SwapParameters,
    Task,
    UnitState,
    Wait,
    WeightState,
)
from towpath.core.strategy import TransferKind
from towpath.errors import StepError

Content = tuple[int, int]  # the weights of which unit, and of which version


@dataclass(frozen=True)
class Planned:
    """A unit that no strategy need allow."""

    name: str
    root: bool = False
    leaf: bool = False
    lookup: bool = False
    gathers: bool = True
    copies: bool = False
    trains: bool = True
    reduces: bool = True
    has_param_sync: bool = True
    steps_on_host: bool = False
    agrees_on_sizes: bool = False

    @property
    def spec(self) -> Self:
        return self


class Watched:
    """A machine, and one who does what it says."""

    def __init__(self, plans: Sequence[Any], draw: random.Random) -> None:
        self.plans, self.draw = plans, draw
        self.machine = StepMachine(plans)
        self.versions = [0] * len(plans)
        self.published = [0] * len(plans)  # the version that the shards of every rank have
        self.copies: list[int] = [-1] * len(plans)
        self.lives_in: list[Slot | None] = [self.machine.slot_of(i) for i in range(len(plans))]
        self.content: dict[Slot, Content] = {}
        self.shown, self.invalid = [False] * len(plans), [False] * len(plans)
        self.computing: list[int] = []
        self.queues: dict[str, deque[Task]] = defaultdict(deque)
        self.done: set[Task] = set()
        self.after: dict[Task, tuple[Task, ...]] = {}
        self.gradients: dict[int, Slot | None] = {}  # where they arrive
        self.arrived: dict[int, int] = defaultdict(int)  # by unit, in this accumulation
        self.agreed: set[int] = set()  # units whose sizes all ranks know, before their parameter syncs
        self.reduced: list[int] = []  # units, in the order of their reductions in this backward pass
        self.synced: list[int] = []
        self.delivered = 0
        self.random_steps = True

    # What the machine says ------------------------------------------------------------------------------------------

    def execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Submit(task):
                    self.queues[QUEUES[task.kind]].append(task)
                    self.after[task] = task.after
                    if task.kind is TransferKind.GRAD_SYNC:
                        self.synced.append(task.unit)
                    if task.kind is TransferKind.PARAM_SYNC and self.plans[task.unit].agrees_on_sizes:
                        self.agreed.remove(task.unit)
                    if task.kind is TransferKind.REDUCE:
                        assert self.gradients.get(task.unit) is task.slot is not None
                case Wait(task):
                    self.finish(task, ())
                case AgreeOnSizes(units, task):
                    assert units and task.kind is TransferKind.MESSAGE_SIZES
                    assert all(self.plans[i].agrees_on_sizes for i in units)
                    assert all(self.published[i] != self.versions[i] for i in units)
                    self.agreed.update(units)
                case SwapParameters(unit, whole):
                    assert self.shown[unit] != whole
                    self.shown[unit] = whole
                case InvalidateViews(unit, invalid):
                    assert self.invalid[unit] != invalid
                    self.invalid[unit] = invalid
                case AssignSlot(unit, slot):
                    assert unit in slot.fits and unit not in self.computing
                    self.lives_in[unit] = slot
                case SaveBackwardCopy(unit):
                    slot = self.lives_in[unit]
                    assert slot is not None and self.content[slot][0] == unit
                    self.copies[unit] = self.content[slot][1]
                case OpenGradients(unit, slot):
                    readers = [t for t in self.queues["reduce"] if t.slot is slot and slot is not None]
                    assert not readers, f"{unit} writes gradients where {readers} still read"
                    holders = [u for u, s in self.gradients.items() if s is slot and slot is not None]
                    assert not holders, f"{unit} and {holders} collect in one slot"
                    self.gradients[unit] = slot
                case CheckRanks():
                    assert self.machine.boundary
                case SetGrads():
                    assert not self.queues["grad_sync"], "delivered before it was there"
                    self.delivered += 1
            if self.draw.random() < 0.3:  # a queue goes on by itself
                queue = self.draw.choice(list(self.queues.values()) or [deque()])
                if queue and all(t in self.done for t in self.after[queue[0]]):
                    self.complete(queue.popleft())

    def finish(self, task: Task, waiting: tuple[Task, ...]) -> None:
        assert task not in waiting, "waits in a circle"
        if task in self.done:
            return
        queue = self.queues[QUEUES[task.kind]]
        while task not in self.done:
            first = queue[0]
            for other in self.after[first]:
                self.finish(other, (*waiting, task))
            if queue and queue[0] is first:
                self.complete(queue.popleft())

    def complete(self, task: Task) -> None:
        self.done.add(task)
        match task.kind:
            case TransferKind.PARAM_SYNC:
                self.published[task.unit] = self.versions[task.unit]
            case TransferKind.GATHER | TransferKind.BACKWARD_GATHER:
                assert task.slot is not None
                users = [u for u in self.computing if self.lives_in[u] is task.slot]
                assert not users, f"{task} overwrites the weights that unit {users} computes with"
                copies = task.kind is TransferKind.BACKWARD_GATHER and self.plans[task.unit].copies
                version = self.copies[task.unit] if copies else self.published[task.unit]
                self.content[task.slot] = (task.unit, version)
                if task.save_copy and self.plans[task.unit].copies:
                    self.copies[task.unit] = version
            case TransferKind.REDUCE:
                self.reduced.append(task.unit)
                self.gradients[task.unit] = None  # the slot is another's from here on
            case _:
                pass

    def note(self, said: list[Action]) -> None:
        """Every action from now on is added to `said`, too."""
        execute = self.execute

        def noting(actions: Iterable[Action]) -> None:
            actions = list(actions)
            said.extend(actions)
            execute(actions)

        self.execute = noting

    # What happens ---------------------------------------------------------------------------------------------------

    def check_whole(self, unit: int) -> None:
        assert self.shown[unit] and not self.invalid[unit]
        slot = self.lives_in[unit]
        if slot is not None:
            assert self.content.get(slot) == (unit, self.versions[unit]), "not whole, or old"

    def forward(self, unit: int, *, graph: bool) -> ForwardPass | None:
        self.begins(unit, graph=graph)
        return self.ends(unit, graph=graph)

    def begins(self, unit: int, *, graph: bool) -> None:
        self.machine.entered(unit)
        self.execute(self.machine.forward_begins(unit, comes_back=graph))
        self.computing.append(unit)
        self.check_whole(unit)

    def ends(self, unit: int, *, graph: bool) -> ForwardPass | None:
        self.check_whole(unit)
        made = self.machine.graph_made(unit) if graph else None
        if made is not None:  # leaves may get inputs without gradients, such as tokens
            made.inputs = int(not self.plans[unit].leaf or self.draw.random() < 0.5)
        self.computing.remove(unit)
        self.execute(self.machine.forward_ends(unit, graph_follows=graph))
        return made

    def backward(self, passed: ForwardPass) -> None:
        unit = passed.unit
        self.execute(self.machine.backward_begins(passed))
        if not passed.inputs:
            self.gradient(unit)
            return
        self.computing.append(unit)
        self.check_whole(unit)
        self.computing.remove(unit)
        self.gradient(unit)
        self.execute(self.machine.input_gradients_done(passed))
        self.execute(self.machine.weight_gradients_done(passed))

    def gradient(self, unit: int) -> None:
        if self.plans[unit].trains:
            assert not self.machine.is_reduced(unit), "a gradient that comes too late"
            self.execute(self.machine.gradient_arrives(unit))
            assert unit in self.gradients
            if self.draw.random() < 0.8:  # each of its parameters has one
                self.execute(self.machine.gradients_complete(unit))
            self.arrived[unit] += 1

    def forward_of_the_model(self, units: Iterable[int]) -> tuple[ForwardPass, list[ForwardPass]]:
        """The root's, and inside it these units': their passes."""
        self.begins(0, graph=True)
        passes = [self.forward(unit, graph=True) for unit in units]
        root = self.ends(0, graph=True)
        assert root is not None
        return root, [passed for passed in passes if passed is not None]

    def step(self) -> None:
        """Every unit once, and the optimizer."""
        root, passes = self.forward_of_the_model(range(1, len(self.plans)))
        self.execute(self.machine.backward_begins(root))
        for passed in reversed(passes):
            self.backward(passed)
        self.end_backward()
        self.optimizer_step()

    def end_backward(self) -> None:
        self.execute(self.machine.backward_pass_ended())
        if self.machine.staged and self.machine.boundary:
            self.execute(self.machine.end_boundary())
        self.machine.micro_step_ended()
        trained = [u for u in (*reversed(range(1, len(self.plans))), 0) if self.plans[u].trains]
        for task in list(self.queues["reduce"]):
            self.finish(task, ())
        assert self.reduced == [u for u in trained if self.plans[u].reduces], "not once each, in one order"
        assert self.synced == (trained if self.machine.boundary else [])
        self.reduced, self.synced, self.gradients = [], [], {}
        assert not self.agreed, "encoded messages that no forward pass has sent"
        for unit in range(len(self.plans)):
            assert not self.shown[unit]
        assert not any(slot.user is not None for slot in self.machine.weight_slots.all)

    def optimizer_step(self) -> None:
        for unit, plan in enumerate(self.plans):
            if plan.trains:
                self.write(unit)
        if not self.random_steps or self.draw.random() < 0.7:  # otherwise the program steps without an optimizer
            self.execute(self.machine.optimizers_stepped())
            assert all(plan.agrees_on_sizes <= (i in self.agreed or self.sent(i)) for i, plan in self.trained())

    def trained(self) -> list[tuple[int, Any]]:
        return [(unit, plan) for unit, plan in enumerate(self.plans) if plan.trains]

    def sent(self, unit: int) -> bool:
        """Whether the parameter sync of what was written last is submitted."""
        return self.machine._units[unit].synced_version == self.machine._units[unit].version

    def write(self, unit: int) -> None:
        self.versions[unit] += 1
        self.machine.written(unit)
        if not self.plans[unit].has_param_sync:
            self.published[unit] = self.versions[unit]


def plans_of(draw: random.Random, units: int) -> list[Planned]:
    gathers, reduces, has_param_sync = (draw.random() < 0.7 for _ in range(3))
    copies = gathers and draw.random() < 0.4
    leaves = {1, units - 1} - {0} if draw.random() < 0.3 else set()
    agreeing, on_host = has_param_sync and draw.random() < 0.5, draw.random() < 0.3
    return [
        Planned(
            f"u{i}" if i else "",
            root=i == 0,
            gathers=gathers,
            copies=copies and i > 0,
            leaf=i in leaves,
            trains=draw.random() < 0.8,
            reduces=reduces,
            has_param_sync=has_param_sync,
            steps_on_host=on_host,
            agrees_on_sizes=agreeing and draw.random() < 0.8,
        )
        for i in range(units)
    ]


draws = st.integers(0, 2**32).map(random.Random)
thorough = settings(max_examples=200, deadline=None)


@thorough
@given(draws, st.integers(1, 7))
def test_any_order_of_units_with_some_left_out_and_some_twice(draw: random.Random, units: int) -> None:
    watched = Watched(plans_of(draw, units), draw)
    order = list(range(1, units))
    for _ in range(6):
        if draw.random() < 0.3:
            draw.shuffle(order)
        watched.machine.boundary = draw.random() < 0.5
        ran = [u for u in order for _ in range(draw.choice((1, 1, 1, 1, 0, 2)))]
        if draw.random() < 0.2:  # an evaluation between
            watched.begins(0, graph=False)
            for unit in ran:
                watched.forward(unit, graph=False)
            watched.ends(0, graph=False)
        root, passes = watched.forward_of_the_model(ran)
        watched.execute(watched.machine.backward_begins(root))
        for passed in reversed(passes):
            watched.backward(passed)
        watched.gradient(0)
        watched.execute(watched.machine.input_gradients_done(root))
        watched.execute(watched.machine.weight_gradients_done(root))
        watched.end_backward()
        if watched.machine.boundary:
            watched.optimizer_step()
        elif draw.random() < 0.2 and units > 1:
            watched.write(draw.randrange(units))  # at an odd moment


@thorough
@given(draws, st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_passes_that_interleave_as_in_pipelines(
    draw: random.Random, units: int, micro_batches: int, ahead: int
) -> None:
    """1F1B: so many forwards ahead, then one of each."""
    watched = Watched(plans_of(draw, units), draw)
    watched.machine.staged = True
    for _ in range(3):
        alive: deque[tuple[ForwardPass, list[ForwardPass]]] = deque()
        left = micro_batches
        while left or alive:
            if left and len(alive) < ahead:
                left -= 1
                alive.append(watched.forward_of_the_model(range(1, units)))
                continue
            root, passes = alive.popleft()
            watched.machine.boundary = not left and not alive
            watched.execute(watched.machine.backward_begins(root))
            for passed in reversed(passes):
                watched.backward(passed)
            watched.end_backward()
        assert watched.delivered > 0
        watched.optimizer_step()


@thorough
@given(draws, st.integers(2, 6), st.integers(0, 5))
def test_after_a_pass_that_failed_nothing_of_it_is_left(draw: random.Random, units: int, failing: int) -> None:
    watched = Watched(plans_of(draw, units), draw)
    for _ in range(4):
        for broken in (True, False):
            root, passes = watched.forward_of_the_model(range(1, units))
            watched.execute(watched.machine.backward_begins(root))
            for number, passed in enumerate(reversed(passes)):
                if broken and number == failing:
                    watched.execute(watched.machine.backward_begins(passed))
                    watched.gradient(passed.unit)
                    break
                watched.backward(passed)
            if broken:
                watched.execute(watched.machine.backward_pass_failed())
                watched.execute(watched.machine.abandoned())
                watched.reduced, watched.synced, watched.gradients = [], [], {}
                assert not any(watched.shown)
                watched.queues["grad_sync"].clear()
                continue
            watched.end_backward()
            watched.optimizer_step()


@thorough
@given(draws, st.integers(1, 5))
def test_units_kept_unsharded_are_fresh_after_a_write(draw: random.Random, units: int) -> None:
    watched = Watched(plans_of(draw, units), draw)
    for _ in range(3):
        watched.execute(watched.machine.param_sync())
        for unit in range(units):
            watched.execute(watched.machine.keep_unsharded(unit))
            watched.check_whole(unit)
        for unit in range(units):
            watched.check_whole(unit)
        if draw.random() < 0.5:
            watched.optimizer_step()
            watched.begins(0, graph=False)
            for unit in range(1, units):
                watched.forward(unit, graph=False)
            watched.ends(0, graph=False)
        for unit in range(units):
            watched.execute(watched.machine.allow_reshard(unit))
        assert not any(watched.shown)
        watched.begins(0, graph=False)
        for unit in range(1, units):
            watched.forward(unit, graph=False)
        watched.ends(0, graph=False)


def test_the_changes_that_are_drawn_happen_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`weights_become` and `gradients_become` refuse the others, in all of these tests."""
    weights: set[tuple[WeightState, WeightState]] = set()
    gradients: set[tuple[GradientState, GradientState]] = set()
    weights_become, gradients_become = UnitState.weights_become, UnitState.gradients_become

    def note_weights(unit: UnitState, now: WeightState) -> None:
        weights.add((unit.weights, now))
        weights_become(unit, now)

    def note_gradients(unit: UnitState, now: GradientState) -> None:
        gradients.add((unit.gradients, now))
        gradients_become(unit, now)

    monkeypatch.setattr(UnitState, "weights_become", note_weights)
    monkeypatch.setattr(UnitState, "gradients_become", note_gradients)
    for seed in range(30):
        for units in (3, 5):
            draw = random.Random(seed)
            _inner(test_any_order_of_units_with_some_left_out_and_some_twice)(draw, units)
            _inner(test_after_a_pass_that_failed_nothing_of_it_is_left)(draw, units, 1)
            _inner(test_units_kept_unsharded_are_fresh_after_a_write)(draw, units)
    assert {(a, b) for a, b in weights if a is not b} == {(a, b) for a, after in WEIGHTS_CHANGE.items() for b in after}
    assert {(a, b) for a, b in gradients if a is not b} == {
        (a, b) for a, after in GRADIENTS_CHANGE.items() for b in after
    }


def _inner(test: Any) -> Any:
    """What hypothesis draws for."""
    return test.hypothesis.inner_test


def test_what_comes_next_is_prefetched_while_a_unit_computes() -> None:
    """From the second step on: two units are whole, or on their way, beside the root."""
    watched = Watched([Planned("", root=True), *(Planned(f"u{i}") for i in range(1, 6))], random.Random(0))
    watched.step()
    said: list[Action] = []
    watched.note(said)
    watched.step()
    gathered = [a.task.unit for a in said if isinstance(a, Submit) and a.task.kind is TransferKind.GATHER]
    begun = [a.unit for a in said if isinstance(a, SwapParameters) and a.whole][:6]
    assert gathered == begun == [0, 1, 2, 3, 4, 5] and UNITS_IN_FLIGHT == 2
    for unit in range(2, 6):
        asked = next(n for n, a in enumerate(said) if isinstance(a, Submit) and a.task.unit == unit and a.task.slot)
        before = next(n for n, a in enumerate(said) if isinstance(a, SwapParameters) and a.unit == unit - 1)
        assert asked < before, f"unit {unit} is asked for when unit {unit - 1} computes already"


@thorough
@given(draws, st.integers(2, 7))
def test_deferred_syncs_have_one_order_whatever_units_run(draw: random.Random, units: int) -> None:
    """Ranks that share no weights send to each other here, and each may run other units."""
    orders: list[list[int]] = []
    plans = [Planned(f"u{i}" if i else "", root=i == 0, agrees_on_sizes=draw.random() < 0.8) for i in range(units)]
    for _ in range(2):
        watched = Watched(plans, draw)
        watched.random_steps = False
        said: list[Action] = []
        watched.note(said)
        for _ in range(3):
            ran = draw.sample(range(1, units), draw.randint(1, units - 1))
            root, passes = watched.forward_of_the_model(ran)
            watched.execute(watched.machine.backward_begins(root))
            for passed in reversed(passes):
                watched.backward(passed)
            watched.end_backward()
            watched.optimizer_step()
        syncs = [a.task.unit for a in said if isinstance(a, Submit) and a.task.kind is TransferKind.PARAM_SYNC]
        orders.append([unit for unit in syncs if plans[unit].agrees_on_sizes])
    assert orders[0] == orders[1]


def test_no_pass_waits_for_sizes_and_syncs_are_sent_when_they_are_due() -> None:
    """Two for each unit, so that the last ones are sent when half of the units have computed."""
    planned = [Planned(f"u{i}" if i else "", root=i == 0, agrees_on_sizes=True) for i in range(9)]
    watched = Watched(planned, random.Random(3))
    watched.random_steps = False
    for _ in range(3):
        watched.step()
    said: list[Action] = []
    watched.note(said)

    def synced() -> list[int]:
        submitted = [a.task for a in said if isinstance(a, Submit)]
        said.clear()
        return [task.unit for task in submitted if task.kind is TransferKind.PARAM_SYNC]

    watched.begins(0, graph=False)
    found = [synced()]
    for unit in range(1, 9):
        watched.begins(unit, graph=False)
        assert not any(isinstance(action, AgreeOnSizes) for action in said)
        found.append(synced())
        watched.ends(unit, graph=False)
        found[-1] += synced()
    assert found == [[], [2, 3, 4], [5, 6], [7, 8], [], [], [], [], []]


def test_a_transfer_waits_for_nothing_but_what_it_needs() -> None:
    """A gather: for the publication of its unit, and for what its slot was last used for. A sync: for its reduction."""
    watched = Watched([Planned("", root=True), *(Planned(f"u{i}") for i in range(1, 5))], random.Random(1))
    said: list[Action] = []
    watched.note(said)
    for _ in range(3):
        watched.step()
    seen: dict[TransferKind, set[tuple[TransferKind, bool]]] = defaultdict(set)
    for task in (action.task for action in said if isinstance(action, Submit)):
        seen[task.kind] |= {(t.kind, t.unit == task.unit or t.slot is task.slot) for t in task.after}
    gathers = {(TransferKind.GATHER, True), (TransferKind.BACKWARD_GATHER, True)}
    assert (
        seen[TransferKind.GATHER] == seen[TransferKind.BACKWARD_GATHER] == {(TransferKind.PARAM_SYNC, True), *gathers}
    )
    assert seen[TransferKind.GRAD_SYNC] == {(TransferKind.REDUCE, True)}
    assert not seen[TransferKind.REDUCE] and not seen[TransferKind.PARAM_SYNC]


def test_what_was_prefetched_in_vain_is_over_before_the_user_may_write() -> None:
    """It reads the shards that the optimizer writes to."""
    watched = Watched([Planned("", root=True), *(Planned(f"u{i}") for i in range(1, 5))], random.Random(1))
    watched.step()
    said: list[Action] = []
    watched.note(said)
    root, passes = watched.forward_of_the_model([3, 4])  # 1 and 2 are left out: what follows the root is another now
    watched.execute(watched.machine.backward_begins(root))
    for passed in reversed(passes):
        watched.backward(passed)
    watched.end_backward()
    gathered = {
        a.task
        for a in said
        if isinstance(a, Submit) and a.task.kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER)
    }
    assert {task.unit for task in gathered} >= {1}
    assert gathered <= {a.task for a in said if isinstance(a, Wait)}


def test_behind_a_unit_without_a_backward_pass_the_copy_is_kept_all_the_same() -> None:
    """A frozen part runs under no_grad, and prefetches the unit behind it without a copy."""
    plans = [Planned("", root=True), *(Planned(f"u{i}", copies=True) for i in range(1, 5))]
    watched = Watched(plans, random.Random(1))
    said: list[Action] = []
    watched.note(said)
    for _ in range(3):
        watched.begins(0, graph=True)
        for unit in (1, 2):
            watched.forward(unit, graph=False)
        passes = [watched.forward(unit, graph=True) for unit in (3, 4)]
        root = watched.ends(0, graph=True)
        assert root is not None
        said.clear()
        watched.execute(watched.machine.backward_begins(root))
        for passed in reversed(passes):
            assert passed is not None
            watched.backward(passed)
        watched.end_backward()
        gathered = [
            (a.task.kind, a.task.unit) for a in said if isinstance(a, Submit) and a.task.slot in watched.content
        ]
        assert (TransferKind.GATHER, 3) not in gathered and (TransferKind.BACKWARD_GATHER, 3) in gathered
        watched.optimizer_step()


def test_a_unit_is_not_moved_while_a_call_into_it_computes_with_its_weights() -> None:
    watched = Watched([Planned("", root=True), Planned("a")], random.Random(0))
    watched.step()
    watched.begins(0, graph=False)
    with pytest.raises(StepError, match="unit 'root': a call into it is under way"):
        watched.machine.keep_unsharded(0)


def test_gradients_of_older_weights_are_refused() -> None:
    watched = Watched([Planned("", root=True), Planned("a")], random.Random(0))
    passed = watched.forward(1, graph=True)
    assert passed is not None
    watched.write(1)
    with pytest.raises(StepError, match="unit 'a': its parameters were written between"):
        watched.machine.backward_begins(passed)
