"""Islands that come and go: each is a world of ranks of its own here, and they find each other by an address.

Functions whose names begin with an underscore run on every rank of an island.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import towpath
from tests.ranks.checkpoints import content, differing
from tests.ranks.models import MODELS
from tests.ranks.server import RankError, World, Worlds
from tests.ranks.strategies import seldom
from tests.ranks.test_outer import TOLERANCE
from tests.ranks.test_train import TINY, _weights, rows_of, tokens
from towpath import Outer, Topology, Transport
from towpath.errors import ConfigError, StepError
from towpath.outer import islands, meeting
from towpath.train.config import Config
from towpath.train.job import init_distributed
from towpath.train.trainer import TrainingRun

__all__ = ["tokens"]  # a fixture

EVERY = 4
GPT = MODELS["gpt"]
STREAMING = Outer(every=EVERY, fragments=2, delay=1, blend=0.25)
PLAIN = Outer(every=EVERY)
ROUNDED = Outer(every=EVERY, transport=Transport("flat", "int4", feedback="all"))


@contextlib.contextmanager
def free_address() -> Generator[str]:
    """An address that is free, and that the system gives to nobody else."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))  # bound, and not listening: an island may listen there
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def meet() -> Generator[str]:
    with free_address() as address:
        yield address


class Jobs:
    """Islands: worlds of ranks, each with a process group of its own, that run at the same time."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks, self._pool = ranks, ThreadPoolExecutor(8)
        self.worlds: list[World] = []

    def start(self, fn: Callable[..., Any], *args: Any, group_timeout: float = 60.0) -> Future[list[Any]]:
        """`fn(*args)` on each rank of a new island."""
        world = World(self._ranks, group_timeout)
        self.worlds.append(world)
        return self._pool.submit(world.run, fn, *args)

    def close(self) -> None:
        for world in self.worlds:
            world.close()
        self._pool.shutdown()


@pytest.fixture
def jobs() -> Generator[Jobs]:
    made = Jobs()
    yield made
    made.close()


@pytest.fixture
def pairs() -> Generator[Jobs]:
    """Islands of two ranks."""
    made = Jobs(2)
    yield made
    made.close()


class _Training:
    """An island's training on a rank. Until `count` islands train, its weights do not change."""

    def __init__(self, outer: Outer | None, label: str, dtype: torch.dtype = torch.float64, shares: Any = None) -> None:
        _without_delays()
        world = dist.get_world_size()
        self.dtype, self.said = dtype, list[str]()
        strategy = towpath.strategy(label, Topology(1, world), outer=outer, shares=shares)
        self.model: Any = towpath.shard(GPT.make(dtype), strategy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sync: Any = self.model.towpath_engine.outer
        if outer is not None and outer.meet:
            self.sync.say = self.said.append

    def step(self, number: int, step: int, lr: float = 0.05) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        rank = number * dist.get_world_size() + dist.get_rank()
        _loss(self.model, rank, step, self.dtype).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gather(self, count: int) -> int:
        """Meet the others. Return the step after which `count` islands train, a multiple of the period."""
        island = towpath.meet_islands(self.model)
        step = island.step
        _await_others(self.sync, count)
        while self.sync.present < count or step % EVERY:
            self.step(island.number, step, lr=0.0)
            step += 1
            self.model.towpath_engine.sync_islands()
            self.sync.wait()
        return step

    def stay_until_joined(self, number: int, step: int) -> None:
        """Change nothing until another island has joined."""
        while not any(f"island {number} joined" in text for text in self.said):
            self.step(self.sync.number, step, lr=0.0)
            step += 1
            self.model.towpath_engine.sync_islands()

    def train(self, first: int, steps: int) -> None:
        """Train so many steps, on the batches of this island's number."""
        for step in range(steps):
            self.step(self.sync.number, first + step)

    def content(self) -> Any:
        self.model.towpath_engine.sync_islands()
        return content(self.model, self.optimizer)


def _loss(model: Any, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """With shares, each rank has another number of tokens."""
    loss = GPT.loss(model, *GPT.micro_batch(rank, 0, step, dtype))
    return loss if model.towpath_engine.shares is None else towpath.weigh(model, loss, 10 + 7 * rank)


def _train(outer: Outer, label: str, count: int, steps: int, shares: Any = None) -> Any:
    run = _Training(outer, label, torch.float32, shares)
    run.gather(count)
    run.train(0, steps)
    return run.sync.number, run.content(), run.said, run.sync.dropped


_receive = islands._receive  # pyright: ignore[reportPrivateUsage]


def _receive_at_once(*args: Any) -> Any:
    """Receive slow weights before the newcomer takes part in an exchange."""
    arriving = _receive(*args)
    arriving.exception()
    return arriving


def _without_delays() -> None:
    """Let this island begin a run soon, and join in the second exchange after it has come."""
    meeting._ALONE_SECONDS, meeting._LOOK_SECONDS = 0.3, 0.1  # pyright: ignore[reportPrivateUsage]
    meeting._PING_SECONDS = 0.1  # pyright: ignore[reportPrivateUsage]
    islands._receive = _receive_at_once  # pyright: ignore[reportPrivateUsage]


def _await_others(sync: Any, count: int) -> None:
    """Let the first island begin its first exchange when `count` islands have come."""
    if sync.island.is_first and sync._seat is not None:
        while len(sync._seat._listener.register.members) < count:
            time.sleep(0.01)


def _train_as_one_job(outer: Outer, label: str, count: int, steps: int, shares: Any = None) -> Any:
    """What islands of one job come to. As those that meet, they begin with a period in which nothing changes."""
    topology, rank = Topology(count, dist.get_world_size() // count), dist.get_rank()
    strategy = towpath.strategy(label, topology, outer=outer, shares=shares and shares * count)
    model: Any = towpath.shard(GPT.make(torch.float32), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(-EVERY, steps):
        optimizer.param_groups[0]["lr"] = 0.05 if step >= 0 else 0.0
        _loss(model, rank, max(step, 0), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.towpath_engine.sync_islands()
    return content(model, optimizer)


def at(outer: Outer, meet: str) -> Outer:
    return Outer(outer.every, outer.fragments, outer.delay, blend=outer.blend, transport=outer.transport, meet=meet)


@pytest.mark.parametrize(
    ("outer", "shares"),
    [(PLAIN, None), seldom(STREAMING, None), (ROUNDED, None), (STREAMING, (1,))],
    ids=["plain", "streaming", "int4", "by tokens"],
)
def test_islands_that_are_all_there_have_the_bits_of_one_job(
    world: Worlds, jobs: Jobs, meet: str, outer: Outer, shares: Any
) -> None:
    steps = 2 * EVERY + 2
    expected = world(3).run(_train_as_one_job, outer, "zero3", 3, steps, shares)
    started = [jobs.start(_train, at(outer, meet), "zero3", 3, steps, shares) for _ in "abc"]
    found = [each.result()[0] for each in started]
    for number, weights, said, dropped in found:
        assert differing(weights, expected[number]) == []
        assert dropped == 0 and sum("joined at step" in text for text in said) >= 1


@pytest.mark.parametrize("label", ["paro-iig", seldom("ddp")])
def test_islands_of_two_ranks_have_the_bits_of_one_job(world: Worlds, pairs: Jobs, meet: str, label: str) -> None:
    expected = world(4).run(_train_as_one_job, STREAMING, label, 2, 2 * EVERY + 2)
    for each in [pairs.start(_train, at(STREAMING, meet), label, 2, 2 * EVERY + 2) for _ in "ab"]:
        for rank, (number, weights, _, _) in enumerate(each.result()):
            assert differing(weights, expected[2 * number + rank]) == []


# --- islands that end -------------------------------------------------------------------------------------------------

# The moment of an exchange at which an island is killed, and whether the others apply its result.
MOMENTS = {
    "before it is ready": True,
    "before the sum": False,
    "before its vote": True,
    "after its vote": True,
    "as one was told": True,  # of the holder
}


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _end_at(moment: str, sync: Any) -> None:
    """Let this process be killed at a moment of the next exchange."""
    total, seat = sync._sum, sync._seat
    listener: Any = seat._listener
    ask, tell = seat.ask, listener._send_answers

    def die_when_all_may_begin(*_: Any) -> None:
        with listener._lock:  # a holder has sent each GO then
            _kill()

    def sum_and_die(*args: Any) -> None:
        total(*args)
        _kill()

    def ask_and_die(message: Any) -> Any:
        if "vote" not in message:
            return ask(message)
        seat._wire.send(message)
        return _kill()

    def tell_one_and_die() -> None:
        outcomes = [each for each in listener.register.answers if "outcome" in each[1] and each[0] != sync.number]
        if outcomes:
            listener.register.answers[:] = outcomes[:1]
        tell()
        if outcomes:
            _kill()

    if moment == "before it is ready":
        sync._exchange = _kill
    elif moment == "before the sum":
        sync._sum = die_when_all_may_begin
    elif moment == "before its vote":
        sync._sum = sum_and_die
    elif moment == "after its vote":
        seat.ask = ask_and_die
    else:
        listener._send_answers = tell_one_and_die


def _train_until_killed(outer: Outer, label: str, count: int, steps: int, victim: int, moment: str) -> Any:
    """Train. The island with the number `victim` is killed in its second exchange."""
    run = _Training(outer, label)
    run.gather(count)
    run.train(0, EVERY + 1)
    if run.sync.number == victim and dist.get_rank() == 0:
        _end_at(moment, run.sync)
    run.train(EVERY + 1, steps - EVERY - 1)
    return run.sync.number, run.content(), run.said, run.sync.dropped


def _descend(copies: dict[int, nn.Module], steps: Sequence[int], ranks: int = 1) -> None:
    """Train each island on the batches of its number."""
    for step in steps:
        for number, model in copies.items():
            for rank in range(number * ranks, (number + 1) * ranks):
                (GPT.loss(model, *GPT.micro_batch(rank, 0, step, torch.float64)) / ranks).backward()
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.05 * p.grad
                    p.grad = None


def _simulated(
    ranks: int, numbers: Sequence[int], steps: int, left: Sequence[int], counts: bool, takes_part: bool = True
) -> Any:
    """The weights of plain outer steps in one process, if only some islands are left after the second exchange.

    `counts`: Whether its result is applied. `takes_part`: Whether the island that ends is part of it.
    """
    start = GPT.make(torch.float64)
    copies = {n: GPT.make(torch.float64) for n in numbers}
    slow = {name: p.detach().clone() for name, p in start.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in slow.items()}
    for step in range(steps):
        _descend(copies, [step], ranks)
        exchange = (step + 1) // EVERY if (step + 1) % EVERY == 0 else 0
        if exchange == 2 and not takes_part:
            copies = {n: copies[n] for n in left}
        if exchange and (exchange != 2 or counts):
            _outer_step(copies, slow, momentum)
        if exchange == 2:
            copies = {n: copies[n] for n in left}
    return {name: p.detach() for name, p in copies[left[0]].named_parameters()}


@torch.no_grad()
def _outer_step(copies: dict[int, nn.Module], slow: Any, momentum: Any, weights: dict[int, int] | None = None) -> None:
    share = {n: (weights or dict.fromkeys(copies, 1))[n] for n in copies}
    for name in slow:
        moved = [share[n] * (slow[name] - dict(each.named_parameters())[name]) for n, each in copies.items()]
        mean = sum(moved) / sum(share.values())
        momentum[name] = 0.9 * momentum[name] + mean
        slow[name] -= 0.7 * (mean + 0.9 * momentum[name])
        for each in copies.values():
            dict(each.named_parameters())[name].copy_(slow[name])


def survivors(started: Sequence[Future[list[Any]]]) -> list[Any]:
    """What the islands that are left returned on each rank. One island was killed."""
    found: list[Any] = []
    for each in started:
        try:
            found += each.result()
        except RankError as error:
            assert "exit code -9" in str(error), error
    return found


# Each moment once, and the holder and another in turn. "As one was told" is of the holder.
KILLED = [
    *((moment, n) if n == i % 2 else seldom(moment, n) for i, moment in enumerate(list(MOMENTS)[:-1]) for n in (0, 1)),
    ("as one was told", 0),
]


@pytest.mark.parametrize(("moment", "victim"), KILLED)
def test_an_island_is_killed_and_the_others_go_on_with_all_their_steps(
    jobs: Jobs, meet: str, moment: str, victim: int
) -> None:
    counts, steps, left = MOMENTS[moment], 4 * EVERY, [n for n in range(3) if n != victim]
    outer = at(PLAIN, meet)
    found = survivors([jobs.start(_train_until_killed, outer, "zero3", 3, steps, victim, moment) for _ in "abc"])
    takes_part = moment != "before it is ready"
    expected = _simulated(1, range(3), steps, left, counts, takes_part)
    assert sorted(number for number, *_ in found) == left
    for _, weights, said, dropped in found:
        assert dropped == (not counts)
        assert differing(weights, found[0][1]) == []
        assert any(f"island {victim} of 3 left" in text and "2 go on" in text for text in said), said
        assert max((weights[n] - p).abs().max().item() for n, p in expected.items()) <= TOLERANCE


@pytest.mark.parametrize("victim", [0, 1], ids=["the holder", "another"])
def test_one_island_of_two_goes_on(pairs: Jobs, meet: str, victim: int) -> None:
    """Islands of two ranks. All ranks of the one that is left know that the exchange was dropped."""
    outer, steps = at(PLAIN, meet), 4 * EVERY
    started = [pairs.start(_train_until_killed, outer, "paro-iig", 2, steps, victim, "before the sum") for _ in "ab"]
    found = survivors(started)
    expected = _simulated(2, range(2), steps, [1 - victim], counts=False)
    assert [dropped for *_, dropped in found] == [1, 1]
    for _, weights, _, _ in found:
        assert max((weights[n] - p).abs().max().item() for n, p in expected.items()) <= TOLERANCE


# --- towpath train ----------------------------------------------------------------------------------------------------


def _config(meet: str, folder: Path, tokens: Path, **sections: dict[str, Any]) -> Config:
    table = {"data": {"tokens": str(tokens)}, "log": {"folder": str(folder)}} | TINY
    made: dict[str, Any] = {
        name: table.get(name, {}) | sections.get(name, {}) for name in table.keys() | sections.keys()
    }
    return Config.from_dict(made | {"strategy": {"name": "zero3", "outer": {"every": EVERY, "meet": meet}}})


def _run_train(config: Config) -> tuple[int, list[int], dict[str, bytes], str]:
    """The number of the island, the first samples of its steps, its weights, and what it said."""
    _without_delays()
    err, read = io.StringIO(), list[int]()
    with init_distributed() as job, contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        training = TrainingRun(config, job)
        windows, batch = training.tokens.train, training.tokens.train.batch
        windows.batch = lambda first, count: (read.append(first), batch(first, count))[1]  # type: ignore[method-assign]
        step = training.train_step

        def first_step() -> Any:
            _await_others(training._islands, 2)
            training.train_step = step  # type: ignore[method-assign]
            return step()

        training.train_step = first_step  # type: ignore[method-assign]
        assert training.train() == 0
        weights = {name: each.numpy().tobytes() for name, each in _weights(training).items()}
        return training._islands.number, read, weights, err.getvalue()  # type: ignore[union-attr]


def test_islands_of_towpath_train_read_other_samples_and_go_on_from_their_checkpoints(
    jobs: Jobs, meet: str, tokens: Path, tmp_path: Path
) -> None:
    """All of them end, and are started again. One resumes, and the other one joins it."""
    read: set[int] = set()
    for steps in (8 * EVERY, 16 * EVERY):
        configs = [_config(meet, tmp_path / name, tokens, train={"steps": steps}) for name in "ab"]
        found = [each.result()[0] for each in [jobs.start(_run_train, config) for config in configs]]
        assert found[0][2] == found[1][2], "they end with the same weights"
        for number, samples, _, said in found:
            assert not read & set(samples) and len(set(samples)) == len(samples)
            read |= set(samples)
            assert "island 1 joined at step" in said
            assert ("resumed from" in said) == (steps > 8 * EVERY)
            assert (f"after step {steps - 8 * EVERY}\n" in said) == (number == 0)
        for config in configs:
            row = rows_of(config)[-1]
            assert (row["step"], row["islands"], row["exchanges_dropped"]) == (steps, 2, 0)
        for job in jobs.worlds:
            job.close()


# --- newcomers --------------------------------------------------------------------------------------------------------


def _train_while_another_joins(outer: Outer) -> Any:
    """Train twelve steps. Another island joins after the eighth, whose exchange is dropped."""
    run = _Training(outer, "zero3")
    island, sync = towpath.meet_islands(run.model), run.sync
    _await_others(sync, 2)
    total = sync._sum

    def fail_once(exchange: Any, fragment: int, go: Any) -> None:
        total(exchange, fragment, go)
        if go["go"][0] == 2 * EVERY:
            raise RuntimeError("no sum")

    if island.is_first:
        sync._sum = fail_once
    for step in range(island.step, 3 * EVERY):
        run.step(island.number, step)
    return island.number, island.step, run.content(), sync.dropped


def test_islands_weigh_as_much_as_the_steps_since_their_last_result(jobs: Jobs, meet: str) -> None:
    found = [each.result()[0] for each in [jobs.start(_train_while_another_joins, at(PLAIN, meet)) for _ in "ab"]]
    assert sorted((number, step, dropped) for number, step, _, dropped in found) == [(0, 0, 1), (1, 2 * EVERY, 1)]
    model = GPT.make(torch.float64)
    first = {0: model}
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in slow.items()}
    _descend(first, range(EVERY))
    _outer_step(first, slow, momentum)
    second = {1: copy.deepcopy(model)}  # it has the slow weights of the last result
    _descend(first, range(EVERY, 3 * EVERY))
    _descend(second, range(2 * EVERY, 3 * EVERY))
    _outer_step(first | second, slow, momentum, {0: 2 * EVERY, 1: EVERY})
    for _, _, weights, _ in found:
        assert max((weights[n] - p).abs().max().item() for n, p in slow.items()) <= TOLERANCE


def _join(outer: Outer, damages: bool = False) -> Any:
    """Begin with another island. It does not get the slow weights at first, and then the first one damages them."""
    run = _Training(outer, "zero3")
    receive = islands._receive  # pyright: ignore[reportPrivateUsage]

    def time_out_once(*_: Any) -> Any:
        islands._receive = receive  # pyright: ignore[reportPrivateUsage]
        arriving: Future[list[torch.Tensor]] = Future()
        arriving.set_exception(TimeoutError())  # has no text
        return arriving

    if damages:
        islands._receive = time_out_once  # pyright: ignore[reportPrivateUsage]
    towpath.meet_islands(run.model)
    make, damaged = run.sync._group, list[bool]()

    def damage_once(go: Any, name: str, *args: Any) -> Any:
        group = make(go, name, *args)
        if damaged or not name.startswith("newcomer"):
            return group
        damaged.append(True)

        def send(chunks: Sequence[torch.Tensor], *to: int) -> Any:
            return group.send([chunk + 1 for chunk in chunks], *to)

        return SimpleNamespace(send=send)

    if damages and run.sync.island.is_first:
        run.sync._group = damage_once
    run.gather(2)
    run.train(0, EVERY)
    return run.sync.number, run.content(), run.said, run.sync.dropped


def test_slow_weights_that_arrive_damaged_are_not_taken(jobs: Jobs, meet: str) -> None:
    found = [each.result()[0] for each in [jobs.start(_join, at(PLAIN, meet), True) for _ in "ab"]]
    assert sorted(number for number, *_ in found) == [0, 3], "it came again, twice"
    assert differing(found[0][1], found[1][1]) == []
    for reason in ("TimeoutError", "another digest"):
        assert any(reason in text for *_, said, _ in found for text in said)


def _train_until_joined(outer: Outer, folder: Path) -> Any:
    """Two islands train. When a third one comes, the second is killed while it sends its weights."""
    run = _Training(outer, "zero3")
    islands._receive = _receive  # pyright: ignore[reportPrivateUsage]
    step = run.gather(2)
    if run.sync.number == 1:
        run.sync._send = _kill
    else:
        (folder / "two").touch()
        _await_others(run.sync, 3)
    run.stay_until_joined(3, step)
    run.train(0, EVERY)
    return run.content(), run.said


def _join_when_there_are_two(outer: Outer, folder: Path) -> Any:
    while not (folder / "two").exists():
        time.sleep(0.01)
    run = _Training(outer, "zero3")
    islands._receive = _receive  # pyright: ignore[reportPrivateUsage]
    towpath.meet_islands(run.model)
    run.train(0, EVERY)
    return run.content(), run.said


def test_if_the_island_that_sends_its_weights_is_killed_another_one_sends_them(
    jobs: Jobs, meet: str, tmp_path: Path
) -> None:
    outer = at(PLAIN, meet)
    started = [jobs.start(_train_until_joined, outer, tmp_path) for _ in "ab"]
    (first, said), (last, also_said) = survivors([*started, jobs.start(_join_when_there_are_two, outer, tmp_path)])
    assert differing(first, last) == []
    assert any("island 1 of " in text and "left" in text for text in said)
    assert any("joining failed, and begins anew" in text for text in also_said)


def _killed_as_donor(outer: Outer) -> Any:
    run = _Training(outer, "zero3")
    islands._receive = _receive  # pyright: ignore[reportPrivateUsage]
    island = towpath.meet_islands(run.model)
    if not (island.is_first and any("joining failed" in text for text in run.said)):
        run.sync._send = _kill
    _await_others(run.sync, 2 if not run.said else 1)
    run.train(island.step, EVERY + 1)
    return island.number, run.said


def test_if_no_island_has_the_weights_any_more_a_newcomer_begins_a_run(jobs: Jobs, meet: str) -> None:
    ((number, said),) = survivors([jobs.start(_killed_as_donor, at(PLAIN, meet)) for _ in "ab"])
    assert number == 0
    assert any("joining failed, and begins anew" in text for text in said)


def _refused(outer: Outer, label: str = "zero3") -> str:
    run = _Training(outer, label)
    try:
        towpath.meet_islands(run.model)
    except ConfigError as error:
        return str(error)
    return ""


def test_islands_with_other_settings_are_refused_with_both_values(jobs: Jobs, meet: str) -> None:
    assert jobs.start(_refused, Outer(every=EVERY, meet=meet)).result() == [""]
    (told,) = jobs.start(_refused, Outer(every=2 * EVERY, meet=meet)).result()
    assert "cannot join" in told and f"outer.every is {2 * EVERY} here, and {EVERY} on the islands" in told


def test_an_island_that_finds_nobody_says_where_it_looked(pairs: Jobs) -> None:
    """On all of its ranks. It cannot begin a run, since the address is of no machine of its own."""
    for told in pairs.start(_refused, Outer(every=EVERY, meet="192.0.2.1:29600"), "zero3", group_timeout=3.0).result():
        assert "no island was found at 192.0.2.1:29600 in 3 s" in told


def _average_in_vain(outer: Outer) -> tuple[str, list[str]]:
    run = _Training(outer, "zero3")
    towpath.meet_islands(run.model)
    run.train(0, 1)

    errors = itertools.cycle([ValueError(), TimeoutError(), RuntimeError("no sum")])  # some have no text

    def no_sum(*_: object) -> None:
        raise next(errors)

    run.sync._sum = no_sum
    try:
        towpath.average_islands(run.model)
    except StepError as error:
        return str(error), run.said
    return "", run.said


def test_islands_that_cannot_average_their_weights_say_so(jobs: Jobs, meet: str) -> None:
    ((told, said),) = jobs.start(_average_in_vain, at(PLAIN, meet)).result()
    assert "failed to average their weights" in told and "island 0: ValueError" in told
    for reason in ("TimeoutError", "no sum"):
        assert any(f"island 0: {reason}" in text for text in said)


def _join_as_weights_arrive_in_an_exchange(outer: Outer) -> Any:
    """The slow weights arrive after the newcomer was ready, and before it votes."""
    run, arrive = _Training(outer, "zero3"), list[Callable[[], object]]()

    def receive(*args: Any) -> Any:
        arriving = _receive(*args)
        later: Future[list[torch.Tensor]] = Future()
        arrive.append(lambda: later.set_result(arriving.result()))
        return later

    islands._receive = receive  # pyright: ignore[reportPrivateUsage]
    total = run.sync._sum

    def sum_and_arrive(*args: Any) -> None:
        total(*args)
        while arrive:
            arrive.pop()()

    run.sync._sum = sum_and_arrive
    island = towpath.meet_islands(run.model)
    _await_others(run.sync, 2)
    run.train(island.step, 3 * EVERY - island.step)
    return island.step


def test_a_newcomer_begins_after_one_period_if_it_has_the_slow_weights_then(jobs: Jobs, meet: str) -> None:
    found = [
        each.result()[0] for each in [jobs.start(_join_as_weights_arrive_in_an_exchange, at(PLAIN, meet)) for _ in "ab"]
    ]
    assert sorted(found) == [0, 2 * EVERY]


# --- islands that stall -----------------------------------------------------------------------------------------------


def _stall(outer: Outer, victim: int) -> Any:
    """Train. One island is stopped in its second exchange, and goes on when the other one has ended."""
    islands.SILENCE_SECONDS = islands._SUM_SECONDS = 10.0  # pyright: ignore[reportPrivateUsage]
    run = _Training(outer, "zero3")
    run.gather(2)
    run.train(0, EVERY + 1)
    mine = run.sync.number == victim
    if mine:
        run.sync._sum = _stop
    try:
        run.train(EVERY + 1, 10_000 if mine else 3 * EVERY)
    except StepError as error:
        return run.sync.number, str(error), run.said
    return run.sync.number, "", run.said


@pytest.mark.parametrize("victim", [seldom(0), seldom(1)])
def test_an_island_that_stalls_is_left_behind_and_ends_when_it_goes_on(jobs: Jobs, meet: str, victim: int) -> None:
    started = [jobs.start(_stall, at(PLAIN, meet), victim) for _ in "ab"]
    done, (late,) = wait(started, return_when=FIRST_COMPLETED)
    ((number, told, said),) = done.pop().result()
    assert (number, told) == (1 - victim, "") and any(f"island {victim} of 2 left" in text for text in said)
    for world in jobs.worlds:
        os.kill(world._processes[0].pid, signal.SIGCONT)  # pyright: ignore[reportPrivateUsage]
    ((number, told, _),) = late.result()
    assert number == victim and "Start" in told


# --- several meeting points -------------------------------------------------------------------------------------------


def _hold_elsewhere(outer: Outer, folder: Path) -> Any:
    """Two islands train. The one at the address is killed, and the other one cannot listen there."""
    run = _Training(outer, "zero3")
    step = run.gather(2)
    if run.sync.number == 0:
        _kill()
    listener = run.sync._seat._listener
    listener.listen = lambda: None
    (folder / "one").touch()
    while listener.register is None or len(listener.register.members) < 2:
        time.sleep(0.01)
    run.stay_until_joined(2, step)
    run.train(0, EVERY)
    return run.content()


def _return(outer: Outer, folder: Path) -> Any:
    while not (folder / "one").exists():
        time.sleep(0.01)
    run = _Training(outer, "zero3")
    meeting._ALONE_SECONDS = 30.0  # pyright: ignore[reportPrivateUsage]
    towpath.meet_islands(run.model)
    run.train(0, EVERY)
    return run.content()


def test_an_island_that_returns_to_the_address_is_told_where_the_others_are(
    jobs: Jobs, meet: str, tmp_path: Path
) -> None:
    started = [jobs.start(_hold_elsewhere, at(PLAIN, meet), tmp_path) for _ in "ab"]
    first, last = survivors([*started, jobs.start(_return, at(PLAIN, meet), tmp_path)])
    assert differing(first, last) == []


def _begin_apart(outer: Outer, other: str, folder: Path, name: str) -> Any:
    """Begin a run at an address of its own. Reach the other run later, as after the network was cut."""
    run = _Training(outer, "zero3")
    island = towpath.meet_islands(run.model)
    (folder / name).touch()
    while not all((folder / each).exists() for each in "ab"):
        time.sleep(0.01)
    run.sync._seat._listener._meet.append(other)
    try:
        for step in range(island.step, 10_000):
            run.step(0, step)
            if (folder / "ended").exists():
                break
    except StepError as error:
        (folder / "ended").touch()
        return str(error)
    return ""


def test_of_two_halves_that_reach_each_other_again_one_ends(jobs: Jobs, tmp_path: Path) -> None:
    with free_address() as a, free_address() as b:
        pairs = [("a", a, b), ("b", b, a)]
        started = [jobs.start(_begin_apart, at(PLAIN, mine), other, tmp_path, name) for name, mine, other in pairs]
        found = sorted(each.result()[0] for each in started)
    assert found[0] == "" and "islands of another run are at" in found[1]
