"""Messages between the ranks of a pipeline, while they are under way."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from towpath.core.pipeline import Message
from towpath.core.strategy import TransferKind
from towpath.core.transfer import Transfer
from towpath.sim.engine import started
from towpath.sim.fluid import BandwidthModel, Demand
from towpath.sim.loads import PhaseCost
from towpath.sim.timeline import Event, Timeline


def kind_of(message: Message) -> TransferKind:
    return TransferKind.ACTIVATION_GRADIENT if message.backward else TransferKind.ACTIVATION


def called(message: Message) -> str:
    what = "gradient" if message.backward else "output"
    return f"{what} of stage {message.source}, micro-batch {message.micro_batch}"


@dataclass(slots=True, eq=False)
class InFlight:
    """A message. `between`: from which rank of the pipeline to which. `posted`: ends that let it move; `behind`: what
    has to be through before."""

    message: Message
    between: tuple[int, int]
    transfers: Sequence[Transfer]
    loads: deque[PhaseCost]
    timeline: Timeline
    posted: int = 0
    behind: InFlight | None = None
    began: float | None = None
    ended: bool = False

    @property
    def crosses(self) -> bool:
        return any(transfer.inter_bytes for transfer in self.transfers)

    @property
    def may_move(self) -> bool:
        return self.behind is None or self.behind.ended


class Links:
    """Messages from one rank to another move one after the other, in the order in which they were sent.

    `by_sockets`: as gloo does it, the receiver tells by the same connection that it is ready; so before a message
    moves, what moves the other way at that time is through.
    """

    def __init__(self, fluid: BandwidthModel, by_sockets: bool) -> None:
        self._fluid, self._by_sockets = fluid, by_sockets
        self._made: dict[Message, InFlight] = {}
        self._queues: dict[tuple[int, int], deque[InFlight]] = defaultdict(deque)
        self._moving: dict[Demand, InFlight] = {}

    def of(self, message: Message) -> InFlight | None:
        return self._made.get(message)

    def add(self, made: InFlight) -> InFlight:
        self._made[made.message] = made
        return made

    def post(self, message: InFlight, sends: bool) -> None:
        message.posted += 1
        if sends:
            self._queues[message.between].append(message)
        elif self._by_sockets:
            source, target = message.between
            back = self._queues[target, source]
            moving = list(takewhile(lambda other: other.posted == 2 and other.may_move, back))
            message.behind = moving[-1] if moving else None

    def start_what_may(self) -> None:
        moving = set(map(id, self._moving.values()))
        for queue in self._queues.values():
            while queue and queue[0].posted == 2 and queue[0].may_move and id(queue[0]) not in moving:
                message = queue[0]
                if message.began is None:
                    message.began = self._fluid.now
                if not message.loads:
                    self._end(queue.popleft())
                    continue
                self._moving[started(self._fluid, message.loads.popleft())] = message
                break

    def ends(self, flow: Demand) -> bool:
        message = self._moving.pop(flow, None)
        if message is None:
            return False
        if not message.loads:
            self._end(self._queues[message.between].popleft())
        return True

    def _end(self, message: InFlight) -> None:
        assert message.began is not None
        message.ended = True
        of, now = message.message, self._fluid.now
        name, unit = called(of), f"stage {of.source}"
        message.timeline.sent(
            Event("messages", name, message.began, now, kind_of(of), unit, of.micro_batch, message.crosses)
        )
