"""One unit on one rank: its modules, its buckets, and the memory in which its weights are unsharded.

The executor reads from it what its transfers read and write. `ParamSyncs` lets ranks agree on the sizes of messages
that only the device knows, and raises where one could not be decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import final

import torch
from torch import nn

from towpath.collectives.collective import Workspace
from towpath.core.queues import LoggedCall
from towpath.core.schedule import message_sizes_transfers
from towpath.core.step_state import ParamVersion
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.unit_plan import UnitPlan
from towpath.engine.comm import CommContext
from towpath.engine.layout import UnitLayout
from towpath.engine.parameters.bucket import Bucket, Buffers
from towpath.engine.parameters.gradients import FlatGradients
from towpath.engine.parameters.module_parameters import ModuleParameters
from towpath.engine.transfer_queues import RankTransfer
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
        self._slot_spans: list[tuple[int, int, Bucket]] = []

    def use_plan(self, plan: UnitPlan, comm: CommContext) -> None:
        """Use the transfers of `plan` from now on."""
        self.plan = plan
        for bucket, planned in zip(self.buckets, plan.buckets, strict=True):
            # Buckets first: coalesced transfers are made of theirs.
            bucket.use_plan(planned, comm)
        self._coalesce(comm)

    def _coalesce(self, comm: CommContext) -> None:
        self.coalesced.clear()
        for kind in (TransferKind.GATHER, TransferKind.BACKWARD_GATHER, TransferKind.REDUCE):
            # Small buckets, whose time is mostly latency. One launch, or one message, pays it once (MiCS, section 4).
            if together := [self.buckets[i] for i in self.plan.together(kind)]:
                bound = [each for bucket in together for each in bucket.transfers[kind]]
                self.coalesced[kind] = together, comm.coalesce(bound)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The user's parameters, in the order of the flat buffers."""
        return (place.parameter for place in self.layout.places)

    @property
    def reduced(self) -> list[tuple[Bucket, FlatGradients]]:
        """The buckets whose gradients are reduced in every micro-step, with these gradients."""
        found = ((bucket, bucket.gradients) for bucket in self.trainable)
        return [(b, gradients) for b, gradients in found if isinstance(gradients, FlatGradients) and gradients.reduces]

    # Evaluation may move a unit to another slot, and training must go on with it.
    @torch.inference_mode(False)
    def assign_slot(self, memory: Buffers) -> None:
        """Keep the unsharded weights in `memory` from now on, which is that of the unit's slot."""
        starts = _starts([(b.plan.compute_dtype, b.plan.numel) for b in self.gathered])
        for bucket, start in zip(self.gathered, starts, strict=True):
            bucket.assign_slot(memory[bucket.plan.compute_dtype][start : start + bucket.plan.numel])
        self._slot_spans = [(b.full.data_ptr(), b.full.data_ptr() + b.full.nbytes, b) for b in self.gathered]
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

    def check_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """Raise `StepError` if a forward's output is in memory that will hold another unit's weights."""
        for output in outputs if self._slot_spans else ():
            at = _address(output)
            for start, end, bucket in self._slot_spans:
                if start <= at < end:
                    places = bucket.layout.places
                    index = max(i for i, p in enumerate(places) if p.of(bucket.full).data_ptr() <= at)
                    raise StepError(
                        f"rank {self._rank}: unit {self.name!r} returns the memory of its own parameter "
                        f"{places[index].names[0]!r}, which holds other weights outside the unit's forward. Return "
                        "p.clone(), or leave this unit to the root: pass the other units as units= to shard()."
                    )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element, or 0 if it has no storage, as with some subclasses."""
    try:
        # The override of a subclass may raise.
        return torch.Tensor.data_ptr(tensor)
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


# Collectives of the backend send as many bytes from every rank, and only the device knows how long its messages became.
# So all units are encoded right after the optimizer's step, in the hook that follows it. The host then waits once, for
# the sizes of all messages, and the ranks agree on the largest of each over gloo. The passes need no further wait.


@final
class ParamSyncs:
    """The parameter syncs of all units of a model on one rank. The engine holds one."""

    def __init__(self, strategy: Strategy, units: Sequence[Unit], comm: CommContext) -> None:
        self._strategy, self._units, self._comm = strategy, units, comm
        self.bind()

    def bind(self) -> None:
        self._transfers = self._comm.bind(message_sizes_transfers(self._strategy, [u.plan for u in self._units]))
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        self._syncs = [each for bucket in buckets for each in bucket.transfers[TransferKind.PARAM_SYNC]]
        self._agreeing = [each.collective for each in self._syncs if each.collective.encoded_size is not None]
        self._may_fail = any(each.transfer.coding is not None for each in self._syncs)
        # The copy of the sizes to the host is asynchronous only if this memory is page-locked.
        pinned = self._comm.device.type == "cuda"
        # Behind the sizes: whether any rank could not decode the messages before.
        self._sizes = torch.zeros(len(self._agreeing) + 1, dtype=torch.int64, pin_memory=pinned)
        self._is_checked = False  # `check` follows the last agreement

    @property
    def agrees(self) -> bool:
        """Whether any sizes have to be agreed on."""
        return bool(self._agreeing)

    def agree(self, units: Sequence[int]) -> None:
        """Encode the parameter syncs of these units, and set the sizes that all ranks agree on."""
        buckets = [bucket for index in units for bucket in self._units[index].buckets]
        # Encoded on the queue that sends later, so that nothing overwrites the message in between.
        works = [b.encode_param_sync for b in buckets if b.dirty and b.plan.agrees_on_sizes]
        queues = self._comm.queues
        # The host waits: collectives of the backend need the number of bytes as a Python integer.
        queues.submit(TransferKind.PARAM_SYNC, (), [*works, self._read_sizes]).wait(on_host=True)
        # The messages of before were decoded by now.
        self._sizes[-1] = bool(self.problems(wait=False))
        self._is_checked = False

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(self._sizes, self._sizes, workspace)

        # The sizes are in the host's memory, so the wait also holds for the host, which reads them next.
        queues.submit(TransferKind.MESSAGE_SIZES, self._transfers, [combine]).wait()
        for collective, size in zip(self._agreeing, self._sizes.tolist(), strict=False):
            collective.agreed_size = size

    def check(self) -> None:
        """Raise on all ranks if any could not decode a message of this step. Call it after the optimizer's step."""
        # The boundary would find it only by a wait for the forward pass. The weights were stepped, but not saved.
        self._is_checked = True
        if bool(self._sizes[-1]):
            self.raise_problems(together=True)

    def _read_sizes(self, workspace: Workspace) -> None:
        """Copy the sizes of all messages to the host: of those that were not encoded now, from last time."""
        sizes = [size for each in self._agreeing if (size := each.encoded_size) is not None]
        self._sizes[:-1].copy_(torch.cat(sizes), non_blocking=True)

    def problems(self, wait: bool = True) -> list[tuple[str, str]]:
        """Return transfers whose last messages could not be decoded, each with the reason."""
        return [(str(bound.transfer), text) for bound in self._syncs for text in bound.collective.problems(wait)]

    def note_problems(self) -> None:
        """Tell all ranks at the boundary what could not be decoded. They compare their logs there, and raise."""
        # What a GPU has not decoded yet is found by `check`, if the program calls its optimizers' `step`.
        for transfer, text in self.problems(wait=not self._is_checked):
            self._comm.log.note(LoggedCall.UNDECODED, transfer, ((("problem", text),),))

    def raise_problems(self, together: bool = False) -> None:
        """Raise `StepError` if this rank could not decode a message; if `together`, also for all other ranks."""
        # Without a boundary no log is compared. Only ranks that make the call together may use a collective here.
        groups = self._comm.groups
        mine = [(groups.number, *problem) for problem in self.problems()]
        everyones = groups.all_gather_objects(mine) if together and self._may_fail else [mine]
        for rank, transfer, text in chain.from_iterable(everyones):
            raise StepError(f"rank {groups.number}: rank {rank} could not decode {transfer}: {text}")
