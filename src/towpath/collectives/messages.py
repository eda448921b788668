"""Messages between two members: posted in batches, waited for later, and named when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from towpath.collectives.collective import Members
from towpath.errors import StepError


class LostMessageError(StepError, RuntimeError):
    """A message failed midway. Like the backend's own failures a RuntimeError: whoever knows more may add it."""


@dataclass(frozen=True, slots=True)
class Message:
    """To (`leaves`) or from the member at position `peer`."""

    leaves: bool
    peer: int
    content: torch.Tensor


@dataclass(frozen=True, slots=True)
class Posted:
    """A batch under way."""

    works: Sequence[dist.Work]
    messages: Sequence[Message]
    members: Members
    where: str

    def wait(self) -> None:
        # A backend that runs a batch as one has one work for all of it.
        each = [[m] for m in self.messages] if len(self.works) == len(self.messages) else [self.messages]
        for work, messages in zip(self.works, each, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(messages, self.members, self.where, error) from error


def post(messages: Sequence[Message], members: Members, where: str, crossing: bool, tag: int) -> Posted:
    """Send and receive; both ends must post what they exchange under a tag in the same order. `where`: for errors."""
    group = members.between_nodes if crossing else members.process_group
    # Receives first: gloo tells a sender that it may begin through the same connection as the data of the other
    # direction. Behind that data the word comes too late, and the two directions take turns.
    messages = [*(m for m in messages if not m.leaves), *(m for m in messages if m.leaves)]
    try:
        works = _launched(messages, group, tag)
    except RuntimeError as error:
        raise _lost(messages, members, where, error) from error
    return Posted(works, messages, members, where)


def _launched(messages: Sequence[Message], group: dist.ProcessGroup, tag: int) -> Sequence[dist.Work]:
    if group.name() == "gloo":  # has no batches: the function for them takes twice the time of what it calls
        return [
            group.send([m.content], m.peer, tag) if m.leaves else group.recv([m.content], m.peer, tag) for m in messages
        ]
    # Of these backends every transfer posts all its messages before the next one does: they need no tags.
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend if m.leaves else dist.irecv, m.content, group=group, group_peer=m.peer)
            for m in messages
        ]
    )


def _lost(messages: Sequence[Message], members: Members, where: str, error: RuntimeError) -> LostMessageError:
    def ends(message: Message) -> str:
        there, here = members.group.ranks[message.peer], members.rank
        return f"rank {here} to rank {there}" if message.leaves else f"rank {there} to rank {here}"

    lost = ", ".join(dict.fromkeys(map(ends, messages)))
    return LostMessageError(f"{where}: the message from {lost} was lost: {error}")
