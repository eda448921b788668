"""One unit on one rank: its modules, its buckets, and the memory in which its weights are unsharded.

The executor reads from it what its transfers read and write. The end of the file compares at each boundary what the
ranks did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import nn

from towpath.collectives.collective import Workspace
from towpath.core.collective_log import Call
from towpath.core.schedule import unused_params_transfers
from towpath.core.step_state import ParamVersion
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.engine.comm import CommContext
from towpath.engine.layout import UnitLayout
from towpath.engine.parameters.bucket import Bucket, Buffers
from towpath.engine.parameters.gradients import FlatGradients
from towpath.engine.parameters.module_parameters import ModuleParameters
from towpath.engine.queues import RankTransfer
from towpath.errors import StepError


class Unit:
    """The modules and buckets that are unsharded, resharded and reduced together. The engine holds one for each unit.

    `index` is the unit's number in the model. `views` are the unsharded parameters, `shown` is what modules have as
    parameters. `trainable` are the buckets that train, and `gathered` those whose weights have to be gathered.
    `coalesced` has the small buckets whose gathers, or reductions, run as one transfer.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        plan: UnitPlan,
        buckets: list[Bucket],
        version: ParamVersion,
        comm: CommContext,
    ) -> None:
        self.index, self.name, self.modules, self.plan, self.layout = index, layout.name, layout.modules, plan, layout
        self.buckets, self.version = buckets, version
        self.trainable = [b for b in buckets if b.trainable]
        self.gathered = [b for b in buckets if not b.always_whole]
        self.shown = ModuleParameters(layout.name, buckets, comm.number)
        self.views, self._rank = self.shown.views, comm.number
        self.checksums = torch.zeros(0, dtype=torch.int64)  # checksums of the parameters at the time of unshard()
        self.coalesced: dict[TransferKind, tuple[list[Bucket], RankTransfer]] = {}
        self._coalesce(comm)
        # Addresses [start, end) of the memory of the unsharded weights, while the slot is this unit's.
        self._turns: list[tuple[int, int, Bucket]] = []

    def take(self, plan: UnitPlan, comm: CommContext) -> None:
        """Use the transfers of `plan` from now on."""
        self.plan = plan
        for bucket, planned in zip(self.buckets, plan.buckets, strict=True):
            bucket.bind(planned, comm)
        self._coalesce(comm)

    def _coalesce(self, comm: CommContext) -> None:
        self.coalesced.clear()
        for kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.REDUCE):
            if together := [self.buckets[i] for i in self.plan.together(kind)]:
                bound = [each for bucket in together for each in bucket.transfers[kind]]
                self.coalesced[kind] = together, comm.coalesce(bound)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's parameters, in the order of the flat buffers."""
        return (place.parameter for bucket in self.buckets for place in bucket.layout.places)

    @property
    def reduced(self) -> list[tuple[Bucket, FlatGradients]]:
        """The buckets whose gradients are reduced in every micro-step, with these gradients."""
        found = ((bucket, bucket.gradients) for bucket in self.trainable)
        return [(b, gradients) for b, gradients in found if isinstance(gradients, FlatGradients) and gradients.reduces]

    @torch.inference_mode(False)
    def assign_slot(self, memory: Buffers) -> None:
        """Keep the unsharded weights in `memory` from now on, which is that of the unit's slot."""
        starts = _starts([(b.plan.compute_dtype, b.plan.numel) for b in self.gathered])
        for bucket, start in zip(self.gathered, starts, strict=True):
            bucket.assign_slot(memory[bucket.plan.compute_dtype][start : start + bucket.plan.numel])
        self._turns = [(b.full.data_ptr(), b.full.data_ptr() + b.full.nbytes, b) for b in self.gathered]
        # A graph that was kept (retain_graph) still reads the former memory. Raising the version by 2, which
        # `invalidate_views` never does, makes autograd refuse that graph permanently.
        self.shown.raise_versions(2)

    def open_gradients(self, memory: Buffers | None) -> None:
        """Let gradients arrive in `memory` from now on, or with None in the G shards themselves."""
        reduced = self.reduced
        starts = _starts([(b.plan.reduce_dtype, b.plan.numel) for b, _ in reduced])
        for (bucket, gradients), start in zip(reduced, starts, strict=True):
            assert memory is not None
            gradients.begin(memory[bucket.plan.reduce_dtype][start : start + bucket.plan.numel])
        for bucket in self.trainable:
            if not bucket.gradients.reduces:
                bucket.gradients.begin(None)

    def check_returned(self, outputs: Iterable[torch.Tensor]) -> None:
        """Raise `StepError` if a forward's output is in memory that will hold another unit's weights."""
        for output in outputs if self._turns else ():
            at = _address(output)
            for start, end, bucket in self._turns:
                if start <= at < end:
                    places = bucket.layout.places
                    index = max(i for i, p in enumerate(places) if p.of(bucket.full).data_ptr() <= at)
                    raise StepError(
                        f"rank {self._rank}: unit {self.name!r} returns the memory of its own parameter "
                        f"{places[index].names[0]!r}, as a parameter is, or a slice or detach() of it. Outside the "
                        "unit's forward that memory holds other weights. Compute with it inside the forward, return "
                        "p.clone(), or leave this unit to the root: pass the other units as units= to shard()."
                    )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element, or 0 if it has no storage, as with some subclasses."""
    try:
        return torch.Tensor.data_ptr(tensor)  # the override of a subclass may raise
    except RuntimeError:
        return 0


def _starts(sizes: Sequence[tuple[str, int]]) -> list[int]:
    """Return where each of the sizes starts in the memory of its dtype."""
    used: dict[str, int] = {}
    starts: list[int] = []
    for dtype, numel in sizes:
        starts.append(used.get(dtype, 0))
        used[dtype] = starts[-1] + numel
    return starts


# Default of `shard(check_every=)`: how many boundaries pass between two comparisons of parameter values.
CHECK_EVERY = 100

_COLUMNS = 1021
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@final
class UnusedParams:
    """The check at each boundary, over the units that train in the order in which gradients are reduced.

    `Engine` holds one. `check_every` is the number of boundaries between two comparisons of values, or 0 for never.
    """

    def __init__(self, strategy: Strategy, trained: Sequence[Unit], comm: CommContext) -> None:
        self._trained, self._comm = trained, comm
        self._places = [place for unit in trained for bucket in unit.trainable for place in bucket.layout.places]
        self._transfers = comm.bind(unused_params_transfers(strategy, len(self._places), comm.log.bytes))
        self._values = Values(trained, comm.device)
        self.check_every = CHECK_EVERY if comm.log.compares(Call.VALUES) else 0

    def compare(self, boundary: int) -> list[bool]:
        """Return for each parameter whether any rank has a gradient for it.

        Args:
            boundary: The number of this boundary. At each `check_every`-th boundary checksums of the parameters are
                taken, and the ranks compare them at the next boundary.
        """
        mine = [used for unit in self._trained for bucket in unit.trainable for used in bucket.gradients.used]
        if not self._transfers:
            return mine
        log = self._comm.log
        kept = sum(place.parameter.grad is not None for place in self._places)
        frozen = tuple(place.names[0] for place in self._places if not place.parameter.requires_grad)
        self._comm.program.ends_backward(self._comm.queues.micro_step + 1, kept, frozen)
        for unit, checksum in self._values.taken():
            log.note(Call.VALUES, f"parameters of unit {unit or 'root'!r}", ((("checksum", checksum),),))
        if self.check_every and boundary % self.check_every == 0:
            self._values.take()
        compared = torch.tensor([*mine, *log.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(compared, compared, workspace)

        self._comm.queues.submit(TransferKind.UNUSED_PARAMS, self._transfers, [combine]).wait()
        combined = compared.tolist()
        log.check(bytes(combined[len(mine) :]), self._comm.groups.gather_objects)
        return [bool(used) for used in combined[: len(mine)]]


@final
class Values:
    """Checksums of the memory that the optimizer writes to on this rank, one for each bucket.

    `UnusedParams` takes them at one boundary and reads them at the next. By then a GPU has computed them, so reading
    does not stall the host.
    """

    def __init__(self, trained: Sequence[Unit], device: torch.device) -> None:
        self._buckets = [(unit.name, bucket) for unit in trained for bucket in unit.trainable]
        self._on_host = torch.zeros(len(self._buckets), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._end: torch.cuda.Event | None = None
        self._is_taken = False

    def take(self) -> None:
        """Start to compute the checksums, and to copy them to the host."""
        checksums = torch.stack([checksum_of(bucket) for _, bucket in self._buckets])
        self._on_host.copy_(checksums, non_blocking=True)
        if checksums.is_cuda:
            self._end = torch.cuda.Event()
            self._end.record()
        self._is_taken = True

    def taken(self) -> Iterator[tuple[str, int]]:
        """Yield the unit and the checksum of each bucket, if `take` was called since the last time."""
        if not self._is_taken:
            return
        if self._end is not None:
            self._end.synchronize()
        self._is_taken = False
        for (unit, _), value in zip(self._buckets, self._on_host.tolist(), strict=True):
            yield unit, value


def checksum_of(bucket: Bucket) -> torch.Tensor:
    return checksum(bucket.master.detach())


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on each bit of a flat tensor, and on the order of the bits.

    The tensor is read once, as a matrix whose columns are summed. Work on the sums takes negligible time. The number of
    columns is prime, so that a column does not match a dimension of a parameter. The number of rows is odd, so that
    equal changes in all rows do not cancel.
    """
    width = next(width for width in _INTEGERS if values.nbytes % width == 0 and width >= values.element_size())
    words = values.view(_INTEGERS[width])
    rows = words.numel() // _COLUMNS
    rows -= rows > 0 and rows % 2 == 0
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    sums = torch.cat([matrix.sum(0, dtype=torch.int64), rest.long()])
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return ((sums ^ (sums >> 29)) * weights).sum()
