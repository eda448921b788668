"""Islands that come and go: each has a launcher of its own, and the loss of one does not stop the others.

The islands of `Outer(meet=…)` are jobs of their own. Rank 0 of each has a seat at the meeting point (`meeting.py`),
where one island holds the register (`register.py`). An exchange takes four messages and one sum:

    READY      with the digest of the slow weights, and the weight: the steps since the last result, or with shares
               the tokens
    GO         who takes part, each with its weight
    the sum    over gloo, from host memory, between the ranks of equal number in all islands. Groups are formed anew
               after an island came or left, or an exchange failed. No process group of an island is touched.
    VOTE       with the digest of the sum, or why there is none
    OUTCOME    applied, if all that are left have the same sum. Otherwise all of them drop it. At the end of a period,
               it has the numbers of the next data that this island reads

After a dropped exchange nothing changes: the next difference has the steps of this period, too, and weighs as much
more. Islands are thus weighted by tokens. If all weights are equal, the result has the bits of one job with as many
islands. When groups are formed anew, codecs begin without error feedback.

A newcomer takes the slow weights and the outer momentum from one island, whose rank r sends them to its rank r while
training goes on. They are of one moment in the order of exchanges: right after the one that admitted the newcomer. It
takes part in all later ones, with weight 0, and keeps the results. When everything is there, it applies these in their
order, and trains on from the next multiple of `every`. It has no step to make up, and no island waits for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from towpath.collectives.collective import WireBuffers, Workspace
from towpath.collectives.select import group_rank, select
from towpath.core.step_state import ApplyOuter, Task
from towpath.daemons import start_daemon
from towpath.engine.comm import CommContext
from towpath.engine.parameters.checksum import checksum
from towpath.engine.parameters.unit import Unit
from towpath.engine.transfer_queues import RankTransfer, Work
from towpath.errors import StepError, TowpathError
from towpath.logs import logger
from towpath.outer.exchanges import SLOWEST_RATE, OuterPlan, plan_outer
from towpath.outer.meeting import Seat
from towpath.outer.register import Key, Message, key_of
from towpath.outer.sync import FragmentExchange, OuterSync, step_slow_weights
from towpath.topology.between_jobs import group_between_jobs, open_store
from towpath.topology.launcher import meeting_point
from towpath.topology.together import AllRanks, described
from towpath.version import __version__

_LOG = logger("outer")

# Seconds after which an island is lost of which nothing is heard. Every island says once a second that it is there.
SILENCE_SECONDS = 30.0
# Seconds that a message, or the forming of a group, may take on top of what its bytes take on the slowest links.
_SUM_SECONDS = 30.0
# How long the ranks of an island wait for each other. If one ends, its connections do.
_INSIDE = timedelta(days=1)
# Elements that are sent at once of the slow weights. Between two of them, an exchange may begin.
_CHUNK = 1 << 18
_PERIODS_AHEAD = 2  # after the present one, for which an island has data, too
_TRIES = 9  # of the mean of all islands, after the first one was dropped


@dataclass(frozen=True, slots=True)
class Island:
    """This rank's island among those that come and go. `towpath.meet_islands` returns it.

    Attributes:
        number: The number of the island. An island that returns gets another one.
        step: The optimizer steps of the run so far. The next step of this island is this one, counted from 0.
        is_first: Whether this island has begun the run.
    """

    number: int
    step: int
    is_first: bool
    _every: int
    _blocks: Mapping[int, int]

    def position(self, step: int) -> int:
        """Return the position of this island's step in the data, which no other island has: 0, 1, 2 and so on.

        Multiply it by the samples of a step to get the first sample. A position of an island that was lost is read by
        no other one.

        Args:
            step: An optimizer step, counted from 0, of the period that this island trains now, or of the next one.

        Raises:
            StepError: This island has no data for the step.
        """
        periods = list(self._blocks)  # the thread of the exchanges may add one
        if (begins := step - step % self._every) not in periods:
            raise StepError(
                f"island {self.number}: position({step}): expected a step from {min(periods)} to "
                f"{max(periods) + self._every - 1}, which this island has data for. Ask for steps of this period or "
                "the next one."
            )
        return self._blocks[begins] * self._every + step % self._every


@final
class IslandSync(OuterSync):
    """The outer steps of a model on one rank of an island that finds the others by an address."""

    def __init__(self, plan: OuterPlan, units: Sequence[Unit], comm: CommContext) -> None:
        super().__init__(plan, units, comm)
        self._units = units
        self._inside = comm.groups.apart("islands", _INSIDE)  # the thread of the exchanges uses it
        self._on_rank_0 = AllRanks(self._inside, "meeting the other islands", StepError).on_rank_0
        self.facts = _facts(plan, units, comm)  # what must be the same on all islands; callers may add some
        self.say: Callable[[str], object] = _LOG.warning if self._inside.rank == 0 else _LOG.debug
        self.island: Island | None = None  # once this rank has met the others
        self.number = -1
        self.next_block = 0  # the first period's worth of data that no island reads
        slices = max((fragment.rank_bytes for fragment in plan.fragments), default=0) * comm.groups.world
        self._timeout = timedelta(seconds=_SUM_SECONDS + 2 * slices / SLOWEST_RATE)
        self._seat: Seat | None = None
        self._store: Any = None
        self._workspace = Workspace(WireBuffers(torch.device("cpu")))
        self._view = ""  # of the group that is connected
        self._sums: list[list[list[RankTransfer]]] = []  # the transfers of each part of each fragment, in that group
        self._last: dict[int, Key] = {}  # the last exchange of each fragment
        self._void: dict[int, str] = {}  # the fragments whose last exchange was dropped, and why
        # The step of the last exchange of a fragment that counted, and this island's tokens up to it.
        self._since: dict[int, tuple[int, int]] = {}
        self._blocks: dict[int, int] = {}  # the period's worth of data of this island, by the step before it
        # The newcomers that take the slow weights of this island after the next result of a fragment.
        self._donations: dict[int, list[tuple[Message, int]]] = {}
        self._idle = threading.Event()
        self._idle.set()

    # Coming -----------------------------------------------------------------------------------------------------------

    def meet(self, step: int) -> int:
        """Join the other islands, or begin a run after optimizer step `step`. Return the step to go on after."""
        self.begin()
        every, seconds = self.plan.settings.every, self._timeout.total_seconds()

        def join() -> tuple[int, bool]:
            if self._seat is None:
                wait = self._comm.job.timeout.total_seconds()
                self._store, port = open_store()
                self._seat = Seat(self.plan.settings.meet, self.facts, port, SILENCE_SECONDS, 2 * seconds, wait)
            # A founder takes the blocks of its first periods.
            return self._seat.join(self.next_block + 1 + _PERIODS_AHEAD, self.say)

        while self.island is None:
            self.number, is_first = self._on_rank_0(join)
            try:
                if is_first:
                    first, self.next_block = self.next_block, self.next_block + 1 + _PERIODS_AHEAD
                    self._take_blocks(step - step % every, range(first, self.next_block))
                else:
                    step = self._catch_up()
                self.island = Island(self.number, step, is_first, every, self._blocks)
            except StepError as error:  # the island that sent its weights has ended, or the holder
                self.say(f"joining failed, and begins anew: {error}")
                self._on_rank_0(lambda: self._seat and self._seat.leave("it could not join"))
                time.sleep(1)
        self.has_met = True
        return step

    def _catch_up(self) -> int:
        """Take the slow weights of another island, and what changes them meanwhile. Return the step to go on after."""
        outer, message = self.plan.settings, self._ask({})
        donor: int = message["donation"]
        # The sender begins when it has applied a result. The holder tells if it ends.
        connect = partial(self._group, message, f"newcomer {self.number}", 1, 2, _INSIDE)
        arriving = _receive(self._state_of_now(), connect)
        results: list[tuple[Key, list[Tensor]]] = []

        def have_arrived() -> bool:
            ended = arriving.done()
            failure = described(error) if ended and (error := arriving.exception()) else ""
            found = self._inside.all_gather_objects((ended, failure))
            if problem := next((problem for _, problem in found if problem), ""):
                raise StepError(f"the slow weights of island {donor} did not arrive: {problem}")
            return all(ended for ended, _ in found)

        step = -1
        while step not in self._blocks:  # they are given at the end of a period
            ready = {"key": None, "weight": 0, "donor": donor, "arrived": have_arrived()}
            step, fragment, _ = key = self._exchange(ready, trains=have_arrived)
            if fragment not in self._void:
                results.append((key, [part.difference.clone() for part in self._exchanges[fragment].parts]))
        for target, tensor in zip(self._state_of_now(), arriving.result(), strict=True):
            target.copy_(tensor)
        # The others have not applied the last results yet.
        pending = {key: means for key, means in results if key[0] + outer.delay > step}
        for (_, fragment, _), means in results[: len(results) - len(pending)]:
            for part, mean in zip(self._exchanges[fragment].parts, means, strict=True):
                step_slow_weights(part.slow, part.momentum, mean.to(part.slow.device), outer, 1)
        for exchange in self._exchanges:
            for part in exchange.parts:
                part.wait_for_readers()
                part.values.copy_(part.slow)
            self._write(exchange)
        # These come last: `values` above may be the memory of `difference`.
        for (_, fragment, _), means in pending.items():
            for part, mean in zip(self._exchanges[fragment].parts, means, strict=True):
                part.difference.copy_(mean)
        self._since = dict.fromkeys(range(len(self._exchanges)), (step, self.tokens))
        self.resume(step, {fragment: begun for begun, fragment, _ in pending})
        return step

    def _state_of_now(self) -> list[Tensor]:
        """Return the tensors that a newcomer takes."""
        parts = [part for exchange in self._exchanges for part in exchange.parts]
        return [each for part in parts for each in (part.slow, part.momentum) if each is not None]

    # Exchanging -------------------------------------------------------------------------------------------------------

    def _work(self, task: Task) -> Work:
        """Return what exchanges a fragment, in the place of the transfers of a job with several islands."""
        step, fragment, every = self.steps.done, task.unit, self.plan.settings.every
        last, _, tries = self._last.get(fragment, (-1, fragment, 0))
        key = step, fragment, tries + 1 if last == step else 0
        since, before = self._since.get(fragment, (step - every, 0))
        tokens = self.tokens  # training goes on while the exchange waits
        weight = step - since if self.plan.strategy.shares is None else max(1, tokens - before)
        if key[2] or fragment not in self.plan.settings.begun_at(step):
            weight = 1  # of the mean of all islands' weights, which `average_islands` takes at any step
        return lambda _: self._exchange({"key": key, "weight": weight}, tokens)

    def _exchange(self, ready: Message, tokens: int = 0, trains: Callable[[], bool] = lambda: True) -> Key:
        """Exchange a fragment with those that are there. Without a key, watch the next exchange, with weight 0.

        `tokens` are those of this island up to the exchange.
        Return the key. Once the island `trains`, it gets the blocks of data of its next periods.
        """
        digest = None
        if (key := ready["key"]) is not None:
            digest = _combined(self._inside.all_gather_objects(int(self._exchanges[key[1]].digest[0])))
        go = self._ask({"ready": True, "digest": digest} | ready)
        key = key_of(go["go"] if "go" in go else go["outcome"])
        step, fragment, _ = key
        outcome = self._ask(self._take_part(key, go, trains)) if "go" in go else go
        self.next_block = outcome.get("state", {}).get("next_block", self.next_block)
        self._take_blocks(step, outcome.get("blocks", ()))
        for text in outcome.get("said", ()):
            self.say(text)
        self._last[fragment] = key
        if outcome["applied"]:
            self._since[fragment] = step, tokens
            self._void.pop(fragment, None)
        else:
            self._void[fragment] = outcome["why"]
            self._disconnect()
            self.dropped += 1
            self.say(
                f"the exchange of fragment {fragment} after step {step} was dropped, and the next one has these steps, "
                f"too: {outcome['why']}"
            )
        return key

    def _take_part(self, key: Key, go: Message, trains: Callable[[], bool]) -> Message:
        """Take part in an exchange that begins. Return the vote of this island."""
        self.present = len(go["trained"])
        mine = [(go, newcomer) for donor, newcomer in go["donors"] if donor == self.number]
        self._donations.setdefault(key[1], []).extend(mine)
        exchange, sums, problem = self._exchanges[key[1]], 0, ""
        self._idle.clear()
        try:
            self._sum(exchange, key[1], go)
            sums = sum((2 * i + 1) * int(checksum(part.difference)) for i, part in enumerate(exchange.parts))
        except (RuntimeError, ValueError, OSError, TowpathError) as error:
            # PyTorch fails to describe a failure in a group that it has not made itself. The cause is behind that.
            cause = (isinstance(error, ValueError) and error.__context__) or error
            problem = str(cause).partition("\n")[0] or type(cause).__name__  # an empty one is a vote for the sum
            self._disconnect()  # the others must not wait for this one
        finally:
            self._idle.set()
        all_sums = self._inside.all_gather_objects((sums, problem))
        why = next((problem for _, problem in all_sums if problem), "")
        ends_period = key[0] % self.plan.settings.every == 0 and key[1] == len(self._exchanges) - 1
        wanted = len(self._periods_without_data(key[0])) if ends_period and trains() else 0
        digest = _combined([n for n, _ in all_sums])
        return {"vote": True, "key": key, "ok": not why, "digest": digest, "why": why, "blocks": wanted}

    def _periods_without_data(self, step: int) -> list[int]:
        """Return the periods from a step on that have no block of data on this island yet, by the steps before them."""
        every = self.plan.settings.every
        return [each for i in range(1 + _PERIODS_AHEAD) if (each := step + i * every) not in self._blocks]

    def _take_blocks(self, step: int, blocks: Sequence[int]) -> None:
        for period, block in zip(self._periods_without_data(step), blocks, strict=False):
            self._blocks[period] = block
            self._blocks.pop(period - 4 * self.plan.settings.every, None)  # is over

    def _sum(self, exchange: FragmentExchange, fragment: int, go: Message) -> None:
        """Replace the differences by their weighted mean over the islands."""
        weights: list[int] = go["weights"]
        mine, count, total = go["members"].index(self.number), sum(w > 0 for w in weights), sum(weights)
        scale = weights[mine] * count / total  # 1.0 if all weights are equal, which changes no bit
        for part in exchange.parts:
            if not weights[mine]:
                part.difference.zero_()
            elif scale != 1.0:
                part.difference.mul_(scale)
        if len(weights) > 1:
            if self._view != go["view"]:
                self._connect(go, mine)
            for part, transfers in zip(exchange.parts, self._sums[fragment], strict=True):
                for bound in transfers:
                    bound.run(part.difference, part.difference, self._workspace)
        for part in exchange.parts:
            part.difference.div_(count)

    def apply(self, action: ApplyOuter) -> None:
        """Apply the result of an exchange, unless it was dropped. The mean of all islands is tried several times."""
        for _ in range(_TRIES if action.average else 0):
            if action.fragment in self._void:
                self.submit(Task(action.exchange.kind, action.fragment)).wait(on_host=True)
        if action.average and (why := self._void.get(action.fragment)) is not None:
            raise StepError(
                f"rank {self._comm.number}: the islands failed to average their weights {1 + _TRIES} times; at last, "
                f"{why}. They still have weights of their own. Check the network between them, and start them again: "
                "they go on from their checkpoints."
            )
        if action.fragment not in self._void:
            super().apply(action)
        self._donate(action.fragment)

    def wait(self) -> None:
        """Wait for all exchanges under way, and forget those that were dropped."""
        super().wait()
        for fragment in self._void.keys() & self.steps.under_way.keys():
            del self.steps.under_way[fragment]
            self._donate(fragment)
        self._void.clear()

    # Groups -----------------------------------------------------------------------------------------------------------

    def _connect(self, go: Message, mine: int) -> None:
        """Form the group of this rank's slice in all islands, and bind the transfers to it."""
        self._disconnect()
        count, comm = len(go["members"]), self._comm
        group = self._group(go, go["view"], mine, count)
        settings = replace(self.plan.settings, meet="", islands=count)
        strategy = replace(self.plan.strategy, outer=settings, shares=None)
        plan = plan_outer(strategy, [unit.plan for unit in self._units], comm.form)
        assert plan is not None
        rank, cpu = mine * comm.groups.world + comm.rank, torch.device("cpu")

        def bound(transfer: Any) -> RankTransfer:
            members = group_rank(transfer, rank, lambda _ranks, _part: group)
            return RankTransfer([transfer], members, select(transfer, members, cpu), comm.record, lambda _: "")

        self._sums = [[[bound(t) for t in part.exchange] for part in each.parts] for each in plan.fragments]
        self._view = go["view"]

    def _disconnect(self) -> None:
        """Close the connections to the other islands. Those that wait there for this one then fail."""
        self._view, self._sums = "", []

    def _group(self, message: Message, name: str, rank: int, size: int, patience: timedelta | None = None) -> Any:
        """Return a group of the ranks with this one's number in several islands, over the store of the holder."""
        name = f"{name}/{self._comm.rank}"
        return group_between_jobs(message["host"], message["port"], name, rank, size, self._timeout, patience)

    def _donate(self, fragment: int) -> None:
        """Send the slow weights of now to the newcomers that the exchange of a fragment has admitted."""
        for go, newcomer in self._donations.pop(fragment, ()):
            copies = [tensor.to("cpu", copy=True) for tensor in self._state_of_now()]
            start_daemon("towpath-donor", partial(self._send, copies, go, newcomer))

    def _send(self, tensors: Sequence[Tensor], go: Message, newcomer: int) -> None:
        # If it fails, the newcomer has ended, or comes again.
        with suppress(RuntimeError, ValueError, OSError):
            group = self._group(go, f"newcomer {newcomer}", 0, 2)
            for chunk in (chunk for tensor in (*tensors, _digest(tensors)) for chunk in tensor.split(_CHUNK)):
                self._idle.wait()  # exchanges go first
                group.send([chunk], 1, 0).wait()

    # The ranks of the island ------------------------------------------------------------------------------------------

    def _ask(self, message: Message) -> Message:
        """Let rank 0 ask the holder, and return its answer on all ranks."""

        def ask() -> Message:
            assert self._seat is not None
            answer = self._seat.ask(message)
            if answer["host"].startswith("127.") and self.plan.strategy.topology.nodes > 1:
                answer["host"], _ = meeting_point()
            return answer

        return self._on_rank_0(ask)


def _receive(targets: Sequence[Tensor], connect: Callable[[], Any]) -> Future[list[Tensor]]:
    """Receive values for tensors of this rank from an island, on a thread. It fails if they arrive damaged."""
    arriving: Future[list[Tensor]] = Future()

    def receive() -> None:
        tensors, digest = [torch.empty(t.shape, dtype=t.dtype) for t in targets], torch.zeros(1, dtype=torch.int64)
        try:
            group = connect()
            for chunk in (chunk for tensor in (*tensors, digest) for chunk in tensor.split(_CHUNK)):
                group.recv([chunk], 0, 0).wait()
            if not torch.equal(digest, _digest(tensors)):
                raise RuntimeError("what arrived has another digest.")
            arriving.set_result(tensors)
        except Exception as error:  # of any kind, because the newcomer waits for it
            arriving.set_exception(error)

    start_daemon("towpath-newcomer", receive)
    return arriving


def _facts(plan: OuterPlan, units: Sequence[Unit], comm: CommContext) -> dict[str, str]:
    """Return what must be the same on all islands, by name."""
    places = [place for unit in units for bucket in unit.buckets for place in bucket.layout.places]
    model = "\n".join(f"{place.names[0]} {tuple(place.shape)} {place.parameter.dtype}" for place in places)
    facts = {
        "the version of towpath": __version__,
        "the digest of the model's parameters": hashlib.sha256(model.encode()).hexdigest()[:16],
        "the type of the device": comm.device.type,
    }
    # Islands may have other shares, but all of them or none weigh by tokens.
    shares = None if plan.strategy.shares is None else (1,)
    strategy = replace(plan.strategy, outer=replace(plan.settings, meet=""), shares=shares)
    for name, value in tomllib.loads(strategy.to_toml()).items():
        table = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        facts |= {key: str(each) for key, each in table.items()}
    return facts


def _digest(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(2 * i + 1) * checksum(tensor) for i, tensor in enumerate(tensors)]).sum().view(1)


def _combined(digests: Sequence[int]) -> int:
    """Return one number for the digests of all ranks of an island."""
    return sum((2 * i + 1) * digest for i, digest in enumerate(digests)) & (1 << 63) - 1
