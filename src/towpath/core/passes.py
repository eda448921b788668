"""The order of passes and messages in a pipeline's step, as data, and the codecs of those messages.

A pass is the forward or the backward of one stage over one micro-batch. Between neighboring stages on different ranks,
each forward sends its output on and each backward sends its input's gradient back. A sent gradient is *exposed* if its
sender has no forward left to compute meanwhile: earlier stages then wait for it alone (the epilogue of Optimus-CC, for
any schedule). Both ranks know the whole order, so messages need no header.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import ceil
from typing import Any

from towpath.core.formats import ENCODED, FLOATING
from towpath.core.placement import GroupCollective, send
from towpath.core.routes import Form, Group, Op
from towpath.core.strategy import GRADIENTS, Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import LOW_RANK, LowRank, Transport
from towpath.core.units import Activation, StageOutput
from towpath.errors import ConfigError
from towpath.topology.cluster import Topology

# Schedules of `torch.distributed.pipelining`, by name, and how many stages each rank holds in them.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}


def asked_of_micro_batches(schedule: str, ranks: int, micro_batches: int) -> str:
    """Return what the schedule requires of the number of micro-batches, or "" if `micro_batches` satisfies it."""
    if schedule == "1F1B" and micro_batches < ranks:
        return "at least as many micro-batches as ranks"
    if schedule == "Interleaved1F1B" and micro_batches % max(1, micro_batches // ranks):
        return "equal rounds of micro-batches, as a multiple of the ranks gives"
    return ""


class PassKind(StrEnum):
    """The kinds of pass, with the letters of `torch.distributed.pipelining` as values."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class StagePass:
    """One pass of one stage over one micro-batch."""

    stage: int
    kind: PassKind
    micro_batch: int


# The passes of each rank of the pipeline, in the order in which it computes them.
Order = Mapping[int, Sequence[StagePass]]


@dataclass(frozen=True, slots=True)
class Message:
    """The tensors that a forward or backward of stage `source` sends to stage `target`, which is on another rank.

    `exposed` is set for a gradient whose sender has no forward left to compute while it is sent.
    """

    source: int
    target: int
    micro_batch: int
    exposed: bool = False

    @property
    def backward(self) -> bool:
        """True if the message carries gradients back to an earlier stage."""
        return self.target < self.source

    @property
    def output_of(self) -> int:
        """The stage whose outputs, or gradients of outputs, the message carries. Both have the same shapes."""
        return min(self.source, self.target)


def owners(order: Order) -> dict[int, int]:
    return {each.stage: rank for rank, passes in order.items() for each in passes}


def messages(order: Order) -> Iterator[Message]:
    """Yield all messages of a step, rank by rank, in the order in which each rank sends them."""
    homes = owners(order)
    for rank, passes in order.items():
        forwards_left = sum(each.kind is PassKind.FORWARD for each in passes)
        for each in passes:
            forwards_left -= each.kind is PassKind.FORWARD
            target = each.stage + (1 if each.kind is PassKind.FORWARD else -1)
            if homes.get(target, rank) != rank:
                exposed = target < each.stage and not forwards_left
                yield Message(each.stage, target, each.micro_batch, exposed)


def gpipe(ranks: int, micro_batches: int) -> Order:
    """Return the order of GPipe: all forwards, then all backwards."""
    return {
        rank: [StagePass(rank, kind, each) for kind in PassKind for each in range(micro_batches)]
        for rank in range(ranks)
    }


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    """Return the order of 1F1B. A rank first runs one forward for its own stage and each later one, then alternates."""
    return {rank: list(_one_forward_one_backward(rank, ranks, micro_batches)) for rank in range(ranks)}


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Iterator[StagePass]:
    ahead = min(micro_batches, ranks - rank)
    for each in range(ahead):
        yield StagePass(rank, PassKind.FORWARD, each)
    for each in range(micro_batches):
        yield StagePass(rank, PassKind.BACKWARD, each)
        if each + ahead < micro_batches:
            yield StagePass(rank, PassKind.FORWARD, each + ahead)


def balanced(weights: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Split `weights` into `count` consecutive parts, so that the heaviest part is as light as possible."""
    # Returned: The start and end index of each part.
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for rows in range(1, count + 1):
        for end in range(rows, len(weights) + 1):
            found = [
                (max(best[rows - 1, start][0], sums[end] - sums[start]), (*best[rows - 1, start][1], end))
                for start in range(rows - 1, end)
                if (rows - 1, start) in best
            ]
            best[rows, end] = min(found)
    ends = best[count, len(weights)][1]
    return list(zip((0, *ends[:-1]), ends, strict=True))


def most_in_flight(passes: Sequence[StagePass]) -> int:
    """Return the largest number of micro-batches whose activations a rank keeps at a time, over all its stages."""
    most = now = 0
    for each in passes:
        now += each.kind is PassKind.FORWARD
        most = max(most, now)
        now -= each.kind is PassKind.BACKWARD
    return most


# The operations of each rank in a pipeline's step: passes to compute, messages to post and messages to wait for. They
# match what `torch.distributed.pipelining` does. A message is sent once both ranks have posted it.


@dataclass(frozen=True, slots=True)
class RunPass:
    """The operation that computes a pass."""

    stage_pass: StagePass


@dataclass(frozen=True, slots=True)
class Post:
    """The operation that posts a send (`sends`) or a receive. The message moves when the other rank posts it, too."""

    message: Message
    sends: bool


@dataclass(frozen=True, slots=True)
class Await:
    """The operation that waits until a message has been sent (`sends`) or received."""

    message: Message
    sends: bool


Operation = RunPass | Post | Await
# The operations of each rank of the pipeline, in order.
Walk = Mapping[int, Sequence[Operation]]


class Messages:
    """The messages of an order, found by the pass that sends them or by the pass that needs them."""

    def __init__(self, order: Order) -> None:
        self._sent: dict[tuple[int, bool, int], Message] = {}
        self._needed: dict[tuple[int, bool, int], Message] = {}
        for each in messages(order):
            self._sent[each.source, each.backward, each.micro_batch] = each
            self._needed[each.target, each.backward, each.micro_batch] = each

    def sent_by(self, each: StagePass) -> Message | None:
        """Return the message that a pass sends, if any."""
        return self._sent.get((each.stage, each.kind is PassKind.BACKWARD, each.micro_batch))

    def needed_by(self, each: StagePass) -> Message | None:
        """Return the message that a pass needs before it starts, if any."""
        return self._needed.get((each.stage, each.kind is PassKind.BACKWARD, each.micro_batch))


def plain_walk(schedule: str, ranks: int, micro_batches: int) -> tuple[Order, Walk]:
    """Return the order and the operations of GPipe or 1F1B, which have one stage on each rank."""
    # PyTorch plans the interleaved schedule (`towpath.pipeline.schedules.walks`).
    make, walk = {"GPipe": (gpipe, _walk_gpipe), "1F1B": (one_forward_one_backward, _walk_1f1b)}[schedule]
    order = make(ranks, micro_batches)
    found = Messages(order)
    return order, {rank: list(walk(passes, found)) for rank, passes in order.items()}


def _walk_gpipe(passes: Sequence[StagePass], found: Messages) -> Iterator[Operation]:
    """Yield the operations of GPipe. A rank waits for its sends after all forwards, and again after all backwards."""
    for forward in (True, False):
        sent: list[Message] = []
        for each in passes:
            if (each.kind is PassKind.FORWARD) is forward:
                yield from _received(found.needed_by(each))
                yield RunPass(each)
                if (message := found.sent_by(each)) is not None:
                    sent.append(message)
                    yield Post(message, sends=True)
        yield from (Await(message, sends=True) for message in sent)


def _walk_1f1b(passes: Sequence[StagePass], found: Messages) -> Iterator[Operation]:
    """Yield the operations of 1F1B."""
    # Before the first backward and after the last forward, a rank waits for a send when it has computed the next pass.
    # In between it waits for each send at once, together with the message that it needs next.
    under_way: Message | None = None
    for index, each in enumerate(passes):
        following = passes[index + 1] if index + 1 < len(passes) else None
        if index == 0:
            yield from _received(found.needed_by(each))
        yield RunPass(each)
        yield from _sent(under_way)
        turns = following is not None and (following.kind is PassKind.FORWARD) is not (each.kind is PassKind.FORWARD)
        message = found.sent_by(each)
        needed = found.needed_by(following) if following is not None else None
        if message is not None:
            yield Post(message, sends=True)
        if needed is not None:
            yield Post(needed, sends=False)
        if turns:
            yield from _sent(message)
        under_way = None if turns else message
        if needed is not None:
            yield Await(needed, sends=False)
    yield from _sent(under_way)


def _received(message: Message | None) -> Iterator[Operation]:
    if message is not None:
        yield Post(message, sends=False)
        yield Await(message, sends=False)


def _sent(message: Message | None) -> Iterator[Operation]:
    if message is not None:
        yield Await(message, sends=True)


@dataclass(frozen=True, slots=True)
class Compression:
    """The codecs of a pipeline: of messages between stages, and of gradients inside stages.

    A codec is given as text or as a `Transport`. `gradients` given as text use error feedback: what one sum loses is
    added to the next. Messages between stages forget what they lose, because the next one has other tokens. Optimus-CC
    adds it there, too, as `Transport(codec="low-rank:16", feedback="first")` does.

    Args:
        activation_gradients: The codec of gradients that stages send back. Only exposed ones use it (`Message`).
        activations: The codec of outputs that stages send on.
        gradients: The low-rank codec of gradients that the data-parallel ranks of a stage reduce. Only the first stages
            use it. The others reduce as their strategy says.
        every_gradient: Encode all gradients that stages send back, not only the exposed ones.
        share_of_stages: The share of all stages that use `gradients`.
        fused_embeddings: Sum the gradients of tied embeddings once, over the ranks of the first and the last stage.
            Otherwise they are summed in each of these stages, and then between the two.
    """

    activation_gradients: Any = "none"
    activations: Any = "none"
    gradients: Any = "none"
    every_gradient: bool = False
    share_of_stages: float = 0.75
    fused_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("activation_gradients", "activations", "gradients"):
            transport = getattr(self, name)
            if not isinstance(transport, Transport):
                keeps = name == "gradients" and str(transport).startswith(LOW_RANK)
                transport = Transport(codec=transport, feedback="first" if keeps else "none")
                object.__setattr__(self, name, transport)
            if name != "gradients":
                transport.check(Op.SEND, f"Compression: {name}")
            elif transport.codec != "none" and not isinstance(transport.codec, LowRank):
                raise ConfigError(
                    f"Compression: gradients takes low rank, such as 'low-rank:4'; got {transport.codec}. Codecs of "
                    "blocks belong to the strategy."
                )
        if not 0 < self.share_of_stages <= 1:
            raise ConfigError(f"Compression: share_of_stages is above 0 and at most 1; got {self.share_of_stages!r}.")

    @property
    def _transports(self) -> dict[str, Transport]:
        return {name: getattr(self, name) for name in ("activation_gradients", "activations", "gradients")}

    @property
    def changes(self) -> set[int]:
        """The optimizer steps at which a codec begins or stops being used."""
        return {step for transport in self._transports.values() for step in transport.changes}

    def at(self, step: int) -> Compression:
        """Return the compression of optimizer step `step`, counted from 0."""
        return (
            replace(self, **{name: transport.at(step) for name, transport in self._transports.items()})
            if self.changes
            else self
        )

    def encodes(self, message: Message) -> bool:
        """Return whether the message uses the codec of its direction. Otherwise it is sent as it is."""
        return not message.backward or message.exposed or self.every_gradient

    def of(self, message: Message) -> Transport:
        """Return the transport of a message."""
        transport: Transport = self.activation_gradients if message.backward else self.activations
        return transport if self.encodes(message) else Transport()

    def strategy_of(self, strategy: Strategy, stage: int, stages: int) -> Strategy:
        """Return the strategy of one stage, with `gradients` as the codec of its reductions if the stage uses it.

        Args:
            strategy: The strategy of the stage without this compression.
            stage: The index of the stage.
            stages: The number of all stages.
        """
        if self.gradients.codec == "none" or stage >= ceil(self.share_of_stages * stages):
            return strategy
        moving = {k.value: strategy.transport(k) for k in GRADIENTS if getattr(strategy.moves, k.value)}
        return replace(
            strategy, **{k: replace(self.gradients, route=own.route, exact=own.exact) for k, own in moving.items()}
        )


def encoded_gradients(order: Order, compression: Compression) -> frozenset[tuple[int, int]]:
    """Return the gradient messages that use a codec, each as its sending stage and its micro-batch."""
    return frozenset((m.source, m.micro_batch) for m in messages(order) if m.backward and compression.encodes(m))


# The three parts of Optimus-CC, with the matrix ranks of its section 9: compressed backpropagation (cb), fused
# embedding synchronization (fe), and selective stage compression (sc). "optimus-cc" also has its error propagation.
_BACKPROPAGATION = Compression("low-rank:16", fused_embeddings=False)
_FUSED = replace(_BACKPROPAGATION, fused_embeddings=True)
_SELECTIVE = replace(_FUSED, gradients="low-rank:128")
COMPRESSIONS = {
    "none": Compression(),
    "optimus-cb": _BACKPROPAGATION,
    "optimus-cb+fe": _FUSED,
    "optimus-cb+fe+sc": _SELECTIVE,
    "optimus-cc": replace(_SELECTIVE, activation_gradients=Transport(codec="low-rank:16", feedback="first")),
}


def compression(name: str, **options: Any) -> Compression:
    """Return a preset of `Compression`.

    Args:
        name: 'none', 'optimus-cb', 'optimus-cb+fe', 'optimus-cb+fe+sc' or 'optimus-cc'.
        options: Fields of `Compression` that replace those of the preset.

    Raises:
        ConfigError: If there is no such preset or option.
    """
    if name not in COMPRESSIONS:
        close = difflib.get_close_matches(str(name), COMPRESSIONS, n=1, cutoff=0.0)[0]
        known = ", ".join(COMPRESSIONS)
        raise ConfigError(f"unknown compression {name!r}; did you mean {close!r}? Known: {known}.")
    known = [field.name for field in fields(Compression)]
    if unknown := set(options) - set(known):
        raise ConfigError(
            f"compression {name!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}."
        )
    return replace(COMPRESSIONS[name], **options)


def message_transfers(
    message: Message,
    pairs: Sequence[tuple[int, int]],
    outputs: Sequence[StageOutput],
    topology: Topology,
    compression: Compression,
    gathering: Sequence[tuple[int, ...]] = (),
    form: Form = Form.MESSAGES,
) -> Iterator[Transfer]:
    """Yield the transfers of one message: for each tensor the message itself, and the gather of its shares."""
    # `pairs`: The sending and the receiving rank of each copy of the pipeline. All of them send at once.
    # `outputs`: The outputs of the stage `message.output_of`.
    # `gathering`: The tensor-parallel ranks of each copy of the receiving stage. `form`: How they gather.
    kind = TransferKind.ACTIVATION_GRADIENT if message.backward else TransferKind.ACTIVATION
    groups = tuple(Group(ranks, tuple(range(len(ranks)))) for ranks in gathering)
    for each in outputs:
        if message.backward and each.dtype not in FLOATING:
            continue  # integers have no gradients
        payload = Activation(message.source, each.sent_shape, each.dtype)
        transport = transport_for(each.dtype, compression.of(message))
        yield Transfer(kind, payload, send(pairs), transport, topology, message.micro_batch)
        if groups and each.shares > 1:
            payload, move = replace(payload, shape=each.shape), GroupCollective(Op.ALL_GATHER, 1, groups)
            yield Transfer(kind, payload, move, Transport(), topology, message.micro_batch, form)


def transport_for(dtype: str, transport: Transport) -> Transport:
    """Return the transport of a tensor that stages exchange. Tensors that are not floats use no codec."""
    if dtype not in FLOATING:
        return Transport()
    if transport.encoding is not None and dtype not in ENCODED:
        raise ConfigError(
            f"stages exchange {dtype}, and the codec {transport.encoding} takes {', '.join(ENCODED)}. Take a "
            "precision, or leave the codec out."
        )
    return transport
