"""Checks, before anything travels, that all members mean the same collective: what they would exchange has to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from towpath.codecs.packing import Draws
from towpath.collectives.collective import Binding, Collective, Members
from towpath.collectives.flat import all_gather_single
from towpath.errors import MismatchError, StepError
from towpath.spec.routes import Op, sends

_SIGNATURE_BYTES = 128


@dataclass(frozen=True, slots=True)
class _Signature:
    op: Op
    route: str
    elements: int
    dtype: str
    codec: str

    @staticmethod
    def of(binding: Binding) -> _Signature:
        dtype, codec = str(binding.dtype).removeprefix("torch."), str(binding.codec or "none")
        return _Signature(binding.op, binding.route, binding.elements, dtype, codec)

    def encoded(self) -> bytes:
        return f"{self.op.value} {self.route} {self.elements} {self.dtype} {self.codec}".encode().ljust(
            _SIGNATURE_BYTES
        )

    @staticmethod
    def decoded(text: bytes) -> _Signature:
        op, route, elements, dtype, codec = text.decode().split()
        return _Signature(Op(op), route, int(elements), dtype, codec)

    def __str__(self) -> str:
        codec = "" if self.codec == "none" else f", as {self.codec}"
        return f"{self.op.value} by {self.route} of {self.elements} elements of {self.dtype}{codec}"


class Agreement:
    """That all members are made for the same: asked of them once, when first needed."""

    def __init__(self, binding: Binding, members: Members) -> None:
        self._binding, self._members = binding, members
        self.reached = False

    def ensure(self, device: torch.device) -> None:
        if not self.reached:
            self._compare(device)
            self.reached = True

    def _compare(self, device: torch.device) -> None:
        mine, members = _Signature.of(self._binding).encoded(), self._members
        ours = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        everyones = torch.empty(len(members.group.ranks) * _SIGNATURE_BYTES, dtype=torch.uint8, device=device)
        all_gather_single(everyones, ours, members.process_group)
        texts = bytes(everyones.tolist())
        each = [texts[i : i + _SIGNATURE_BYTES] for i in range(0, len(texts), _SIGNATURE_BYTES)]
        if any(text != mine for text in each):
            raise MismatchError(self._difference([_Signature.decoded(text) for text in each]))

    def _difference(self, each: list[_Signature]) -> str:
        """Alike on every member: the first message of the first member's plan whose two ends disagree."""
        ranks, plan = self._members.group.ranks, each[0]
        # Whole slices: whose messages do not fit is the same however they would be cut.
        messages = sends(plan.op, plan.route, self._members.group, self._members.nodes, parts=1)
        met = next(s for s in messages if each[s.source] != each[s.target])
        source, target = sorted((met.source, met.target))
        return (
            f"rank {self._members.rank}: {self._binding.label}: its ranks do not mean the same collective. In step "
            f"{met.step} of {plan.op.value} by {plan.route}, rank {ranks[source]} and rank {ranks[target]} would "
            f"exchange what does not fit: rank {ranks[source]} has {each[source]}, rank {ranks[target]} has "
            f"{each[target]}. Give every rank the same strategy, model and precision."
        )


@final
class Verified(Collective):
    """Runs `inner` on tensors that fit its binding, once the members agree on it."""

    def __init__(self, inner: Collective, binding: Binding, members: Members) -> None:
        self._inner, self._binding, self._members = inner, binding, members
        self._agreement = Agreement(binding, members)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return self._inner.state

    @property
    def draws(self) -> tuple[Draws, ...]:
        return self._inner.draws

    def begin(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        if self._agreement.reached:  # else it would have to wait for the others' word
            check_fit(self._binding, self._members, region, shard)
            self._inner.begin(region, shard)

    def run(self, region: torch.Tensor, shard: torch.Tensor) -> None:
        check_fit(self._binding, self._members, region, shard)
        self._agreement.ensure(region.device)
        self._inner.run(region, shard)


def check_fit(binding: Binding, members: Members, region: torch.Tensor, shard: torch.Tensor) -> None:
    """A collective carries what it was made for; anything else is refused before it meets the others' messages."""
    wanted = [("region", region, binding.elements)]
    if binding.op is not Op.ALL_REDUCE:
        start, end = binding.bounds(members)
        wanted.append(("shard", shard, end - start))
    for name, tensor, elements in wanted:
        if tensor.numel() != elements or tensor.dtype != binding.dtype or not tensor.is_contiguous():
            raise StepError(
                f"rank {members.rank}: {binding.label} by {binding.route}: got a {name} of {tensor.numel()} elements "
                f"of {tensor.dtype}, expected {elements} of {binding.dtype}, contiguous. A collective carries what it "
                "was made for; make another for other tensors."
            )
