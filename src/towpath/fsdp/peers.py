"""The ranks of one process group of FSDP2 or DDP: their nodes, their transfers, and what they compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from towpath.collectives.collective import Workspace
from towpath.core import presets
from towpath.core.formats import ENCODED, Precision
from towpath.core.queues import LoggedCall
from towpath.core.schedule import unused_params_transfers
from towpath.core.strategy import Strategy, TransferKind
from towpath.core.transfer import Transfer
from towpath.core.transport import LOW_RANK
from towpath.core.unit_plan import plan_unit
from towpath.core.units import BucketSpec, Range, UnitSpec
from towpath.engine.agree.digest import CollectiveLog
from towpath.engine.comm import CommContext
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.engine.transfer_queues import Handle, RankTransfer, Work
from towpath.errors import ConfigError, StepError
from towpath.topology.cluster import Topology
from towpath.topology.groups import Groups, detect_shape
from towpath.topology.store import gather_through_store
from towpath.topology.together import together
from towpath.version import __version__


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the transfers between nodes are sent, as the user of `towpath.wires` wants them."""

    exact: bool
    gradients: str | None
    hold: str | None
    topology: Topology | None
    takes_matrices: bool = False  # whether the parameters of a buffer of gradients are known, as for buckets of DDP

    def strategy(self, preset: str, topology: Topology) -> Strategy:
        """Return the strategy whose transfers are sent."""
        options: presets.Options = {"exact": self.exact}
        if self.gradients is not None:
            low_rank = self.gradients.startswith(LOW_RANK)
            if low_rank and not self.takes_matrices:
                raise ConfigError(
                    f"wires(): gradients={self.gradients!r} factors whole matrices, and FSDP2 reduces slices of them. "
                    "Pass a codec of blocks, such as 'int8' or 'int4:64'. DistributedDataParallel takes low rank."
                )
            # Otherwise, feedback at both hops, and where an all-reduce shares out its sums.
            options |= {"gradients": self.gradients, "feedback": "first" if low_rank else "all"}
        return replace(presets.strategy(preset, topology, **options), name="wires")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one process group on one rank."""

    group: dist.ProcessGroup
    strategy: Strategy
    comm: CommContext
    compared: tuple[RankTransfer, ...]  # the comparison before each step
    hold: str | None
    # What may keep tensors from one step to the next: transfers of gradients, and syncs in low rank.
    keepers: WeakSet[RankTransfer | LowRankSync] = field(default_factory=WeakSet)

    @staticmethod
    def of(
        group: dist.ProcessGroup,
        device: torch.device,
        preset: str,
        wishes: Wishes,
        model: Iterable[str],
        units: Mapping[str, int],
    ) -> Peers:
        """Return the ranks of `group`. Every rank must call it, with the same `model`, as lines of text.

        `units`: The elements of a rank's shard of each unit.
        """
        groups, topology = Groups(group), wishes.topology
        _meet(groups)
        groups.connect()
        # Otherwise, the host names of ranks that detect the topology would meet what other ranks compare next.
        with together(groups, "wires()", _SAME) as lines:
            lines.append(f"the topology is {'to be detected' if topology is None else 'passed'}")
        shape = Topology(*detect_shape(groups)) if topology is None else topology
        with together(groups, "wires()", _SAME) as lines:
            shape.check_equal("towpath.wires()")
            strategy = wishes.strategy(preset, _among(groups.members, shape))
            lines += [f"towpath {__version__}, torch {torch.__version__}", f"hold={wishes.hold}, {shape}"]
            lines += [*strategy.to_toml().splitlines(), *model]
        number: int = next(groups.shared("models made", count))
        log = CollectiveLog(strategy, groups.rank, number, groups.shared("last models", dict), first=groups.first)
        comm = CommContext(groups, device, log)
        # All groups of the job send what this one sends, such as those of each place in a node under HSDP.
        comm.record.islands = dist.get_world_size() // groups.world
        plans = [
            plan_unit(strategy, UnitSpec(name, (BucketSpec((numel * groups.world,)),)), Precision(), comm.form)
            for name, numel in units.items()
        ]
        comm.share(strategy, plans)
        comm.queues.plan(plans)
        comm.meet(t for plan in plans for bucket in plan.buckets for each in bucket.transfers.values() for t in each)
        return Peers(
            group, strategy, comm, tuple(comm.bind(unused_params_transfers(strategy, 1, log.bytes))), wishes.hold
        )

    @property
    def nodes(self) -> int:
        return self.strategy.topology.nodes

    @property
    def width(self) -> int:
        """The ranks of each node."""
        return self.strategy.topology.ranks_per_node

    @property
    def ranks(self) -> int:
        return self.strategy.topology.world

    def holds_on_host(self, nbytes: int) -> bool:
        """Return whether weights of this size are held in the host's memory."""
        if self.hold is None and self.comm.device.type == "cuda":
            return nbytes > torch.cuda.mem_get_info(self.comm.device)[0] - _ROOM
        return self.hold == "host"

    def bind(self, kind: TransferKind, unit: str, elements: int, dtype: torch.dtype) -> list[RankTransfer]:
        """Return the transfer of `kind` for a flat buffer of `elements` in all, or nothing if it moves nothing."""
        name, strategy = str(dtype).removeprefix("torch."), self.strategy
        codec = strategy.transport(kind).encoding
        if codec is not None and name not in ENCODED:
            raise ConfigError(
                f"wires(): gradients={codec} encodes {', '.join(ENCODED)}; got {name} gradients of {unit or 'root'}. "
                "Reduce in float32 (with FSDP2, reduce_dtype= of MixedPrecisionPolicy), or leave gradients= out."
            )
        bound = self.comm.bind(
            Transfer(
                kind,
                Range(unit, name, elements // move.regions, name),
                move,
                strategy.transport(kind),
                strategy.topology,
                form=self.comm.form,
            )
            for move in getattr(strategy.moves, kind.value)
        )
        if kind is TransferKind.GRAD_SYNC:
            self.keepers.update(bound)
        return bound

    @property
    def feedback_bytes(self) -> int:
        """The bytes of what codecs keep of gradients for the next step."""
        states = (each.state if isinstance(each, LowRankSync) else each.collective.state for each in self.keepers)
        return sum(kept.nbytes for state in states for kept in state)

    def submit(
        self, kind: TransferKind, transfers: Sequence[RankTransfer], works: Sequence[Work], after: Sequence[Handle] = ()
    ) -> Handle:
        """Submit a job to the queue of `kind`."""
        # Without an optimizer, as in an evaluation, no step ends, and its list of transfers would grow for ever.
        if self.comm.record.so_far() > _LONGEST_STEP:
            self.comm.record.end_step()
        return self.comm.queues.submit(kind, transfers, works, after)

    def compare(self, problems: Iterable[tuple[str, str]] = (), ends_step: bool = True) -> None:
        """Raise StepError on every rank if one has submitted other transfers than its peers since the last time.

        `problems`: Transfers whose last messages this rank could not decode, each with the reason.
        """
        comm = self.comm
        for transfer, problem in problems:
            comm.log.note(LoggedCall.UNDECODED, transfer, ((("problem", problem),),))
        told = torch.tensor([0, *comm.log.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self.compared:
                transfer.run(told, told, workspace)

        comm.queues.submit(TransferKind.UNUSED_PARAMS, self.compared, [combine]).wait()
        comm.log.check(bytes(told.tolist()[1:]), comm.groups.all_gather_objects)
        if ends_step:
            comm.record.end_step()
            comm.watchdog.status.step += 1


def _meet(groups: Groups) -> None:
    """Wait until all ranks have come here. Raise if some do not.

    A rank that does not call `wires` runs FSDP2's own collectives on the same process group. Messages would meet them,
    and gloo then ends the process. So ranks meet through the store.
    """
    number: int = next(groups.shared("wires() calls", count))
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    try:
        gather_through_store(store, f"wires/{groups.name}/{number}", groups.rank, groups.world, None, groups.timeout)
    except ConfigError as error:
        raise ConfigError(f"wires() needs all ranks of a process group. {error}") from error


def _among(ranks: Sequence[int], topology: Topology) -> Topology:
    """Return the topology of the ranks of one process group. `topology` is theirs, or that of all ranks of the job."""
    if topology.world == len(ranks):
        return topology
    if topology.world != dist.get_world_size():
        raise ConfigError(
            f"wires(): the topology of {topology} has {topology.world} ranks, and the job has {dist.get_world_size()}. "
            "Pass the job's numbers of nodes and of ranks per node, or leave topology= out."
        )
    on_node = Counter(map(topology.node_of, ranks))
    if len(set(on_node.values())) > 1:
        counts = ", ".join(f"{count} on node {node}" for node, count in on_node.items())
        raise ConfigError(
            f"wires(): a process group of the model has {counts}. It needs as many ranks on each of its nodes: pass a "
            "topology whose nodes divide the group evenly."
        )
    return topology.of(ranks)


# A step with more transfers is recorded as several.
_LONGEST_STEP = 1 << 14
# The memory of a GPU that is left free when weights are held there.
_ROOM = 1 << 30
_SAME = "Build the same model, shard it in the same way, and call towpath.wires() alike on every rank."


def factor_of(op: Any, ranks: int) -> float:
    """Return the factor by which `op` multiplies the sum over all ranks."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    state = op.__getstate__()  # the only access to the factor of PREMUL_SUM; plain operations have a number
    kind, factor = state if isinstance(state, tuple) else (op, None)
    if kind == dist.ReduceOp.PREMUL_SUM and factor is not None:
        return float(factor)
    raise StepError(f"towpath.wires() sums, averages, or scales the sum of gradients; got {kind}.")
