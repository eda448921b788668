"""A gather of encoded slices: each member encodes its own, unless it rests so already, and decodes all, its own too, so
that all are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch

from towpath.codecs.kernels.dispatch import kernels_for
from towpath.codecs.packing import Draws
from towpath.codecs.watched import watched
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.workspace import Workspace
from towpath.core.formats import Codec
from towpath.core.routes import encoded_slice


@final
class EncodedAllGather(Collective):
    """`inner` gathers the bytes: bound to what `encoded_binding` says."""

    def __init__(
        self, codec: Codec, binding: Binding, members: Members, inner: Collective, device: torch.device
    ) -> None:
        self._codec, self._members, self._inner, self._rests = codec, members, inner, binding.encoded
        self._kernels = kernels_for(device)
        count = len(members.group.ranks)
        self._bytes = encoded_slice(codec, binding.elements, count)
        self._bounds = [binding.bounds(members, slot) for slot in range(count)]
        self._draws = Draws(members.slot)
        self._begun: torch.Tensor | None = None  # the messages, this member's encoded

    @property
    def draws(self) -> tuple[Draws, ...]:
        return () if self._rests else (self._draws,)

    def begin(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        messages = self._begun = self._encoded(shard, workspace)
        self._inner.begin(messages, self._mine(messages), workspace)

    def _encoded(self, shard: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        messages = workspace.take(self._bytes * len(self._bounds), torch.uint8)
        if self._rests:
            self._mine(messages)[: shard.numel()].copy_(shard)
        elif shard.numel():
            place = self._mine(messages)[: self._codec.encoded_bytes(shard.numel())]
            watched(self._kernels, workspace.watch).encode(self._codec, shard, place, self._draws.next())
        return messages

    def _mine(self, messages: torch.Tensor) -> torch.Tensor:
        return messages.view(len(self._bounds), -1)[self._members.slot]

    def run(self, region: torch.Tensor, shard: torch.Tensor, workspace: Workspace) -> None:
        messages, self._begun = self._encoded(shard, workspace) if self._begun is None else self._begun, None
        self._inner.run(messages, self._mine(messages), workspace)
        kernels = watched(self._kernels, workspace.watch)
        each = messages.view(len(self._bounds), -1)
        for message, (start, end) in zip(each, self._bounds, strict=True):
            if start < end:
                kernels.decode(self._codec, message[: self._codec.encoded_bytes(end - start)], region[start:end])


def encoded_binding(codec: Codec, binding: Binding, members: Members) -> Binding:
    count = len(members.group.ranks)
    elements = count * encoded_slice(codec, binding.elements, count)
    return replace(binding, elements=elements, dtype=torch.uint8, codec=None, encoded=False)
