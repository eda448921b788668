"""The calls that all ranks of a pipeline make together, compared before anything is sent.

A rank that is given a wrong batch sends nothing, and its neighbors would wait for it. So each rank tells the first rank
of its pipeline what it is about to do, the first ranks of all copies compare that, and each tells its pipeline.

The messages are 16 bytes, between hosts. Those between stages cost a step no time. Later stages end the step before
earlier than the first one does, so their words are there when it begins. They wait for its first output anyway, which
comes after its answer. Only the comparison among the copies of the first stage takes a round trip between them.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from towpath.errors import StepError
from towpath.topology.groups import Groups


@final
class MeshRanks:
    """All ranks of a pipeline's mesh. They meet along one dimension of it after the other: 'pp' first."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = sorted(mesh.mesh_dim_names or (), key=lambda name: name != "pp")
        self.groups = [Groups(mesh[name].get_group()) for name in names]
        self.members: list[int] = sorted(mesh.mesh.flatten().tolist())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of `members`."""
        found = {dist.get_rank(): value}
        for groups in self.groups:
            found = {rank: each for told in groups.gather_objects(found) for rank, each in told.items()}
        return [found[rank] for rank in self.members]


_CALLS = ("evaluate()", "step()", "step() inside no_sync()")


@final
class Calls:
    """The comparison of the calls of all ranks. Every rank must make it."""

    def __init__(self, everyone: MeshRanks) -> None:
        self._everyone = everyone
        # Groups of its own: what other threads compare meanwhile goes through others.
        self._pipeline, *others = (
            groups.of((tuple(range(groups.world)),), "calls of a pipeline", "gloo") for groups in everyone.groups
        )
        self._first = self._pipeline.rank() == 0
        self._others = [group for group in others if group.size() > 1]

    def agree(self, call: str, step: int, refusal: StepError | None) -> None:
        """Return if all ranks make this call in the same optimizer step, and none refuses it; else raise on all.

        Args:
            call: The call as errors name it: "evaluate()", "step()" or "step() inside no_sync()".
            step: How many optimizer steps there were before it.
            refusal: Why this rank cannot do it.
        """
        number = 3 * step + _CALLS.index(call)
        word = torch.tensor([number, -number] if refusal is None else [torch.iinfo(torch.int64).max, 0])
        words = [torch.empty_like(word) for _ in range(self._pipeline.size())] if self._first else None
        dist.gather(word, words, group=self._pipeline, group_dst=0)
        if words is not None:
            word = torch.stack(words).amax(0)
            for group in self._others:
                dist.all_reduce(word, dist.ReduceOp.MAX, group=group)
        dist.broadcast(word, group=self._pipeline, group_src=0)
        most, least = word.tolist()
        if most != -least:
            self._raise(call, step, refusal)

    def _raise(self, call: str, step: int, refusal: StepError | None) -> None:
        mine = f"Pipeline.{call} of step {step + 1}"
        told = self._everyone.gather_objects((mine, None if refusal is None else str(refusal)))
        if refusal is not None:
            raise refusal
        by_rank = dict(zip(self._everyone.members, told, strict=True))
        own = dist.get_rank()
        for rank, (_, error) in by_rank.items():
            if error is not None:
                raise StepError(f"rank {own}: Pipeline.{call} was refused on rank {rank}: {error}")
        rank, other = next((rank, theirs) for rank, (theirs, _) in by_rank.items() if theirs != mine)
        raise StepError(
            f"rank {own} is in {mine}, and rank {rank} in {other}. Let every rank make the same calls in the same "
            "order, and load the same checkpoint."
        )
