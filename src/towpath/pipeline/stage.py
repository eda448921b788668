"""A stage of `torch.distributed.pipelining` whose module is sharded, and what a rank's stages have of a checkpoint.

A stage tells its engines which backward pass of a step is the last one, and encodes what it sends to its neighbors.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from towpath.checkpoint.local_state import (
    LocalState,
    NamedTensors,
    fingerprint,
    named_tensors,
)
from towpath.core.passes import Compression, StagePass, transport_for
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.transport import Transport
from towpath.core.units import StageOutput
from towpath.engine.executor import Engine, engine_of
from towpath.engine.layout import torch_dtype
from towpath.errors import CheckpointError
from towpath.observe.record import Trace
from towpath.observe.trace import BETWEEN, INSIDE
from towpath.pipeline.messages import Encoding, RecvDecoder, SendEncoder, Sender, trace_messages
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks

if TYPE_CHECKING:
    from towpath.pipeline.embedding_sync import TiedEmbeddings


class TowpathStage(PipelineStage):
    """A pipeline stage with a sharded module.

    Gradient syncs begin in the last backward pass of a step, while the pipeline goes on. `Pipeline.step` waits for
    them. Both ends of a link count the optimizer steps, and so switch to a codec in the same step.

    `inputs` and `outputs` are those of one micro-batch, on the meta device. `received` and `sent` are those that
    neighbors exchange. `encoded` has the gradient messages that use a codec, each as its sending stage and its
    micro-batch. `gradients` is the process group of all gradient messages. Activations use the group of the mesh.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        mesh: DeviceMesh,
        *,
        inputs: tuple[torch.Tensor, ...],
        outputs: tuple[torch.Tensor, ...],
        received: tuple[StageOutput, ...],
        sent: tuple[StageOutput, ...],
        micro_batches: int,
        compression: Compression,
        encoded: frozenset[tuple[int, int]],
        gradients: dist.ProcessGroup,
    ) -> None:
        device = torch.device(mesh.device_type)
        super().__init__(module, index, stages, device, inputs, outputs, group=mesh["pp"].get_group())
        self._encoded, self._compression, self._gradients = encoded, compression, gradients
        # For a trace: the stages whose outputs go to another node, by names such as "stage 0".
        self.leave_node: Set[str] = frozenset()
        self.accumulating = False  # inside `Pipeline.no_sync`, where no backward pass syncs gradients
        self.seconds_computed = 0.0  # of the host, which on a GPU launches the work only

        def encodings(tensors: Sequence[StageOutput], transport: Transport) -> list[Encoding]:
            peers = mesh["tp"].get_group() if any(t.shares > 1 for t in tensors) else None
            of = [(t.sent_shape, torch_dtype(t.dtype), transport_for(t.dtype, transport)) for t in tensors]
            return [Encoding(*each, peers if t.shares > 1 else None) for each, t in zip(of, tensors, strict=True)]

        forth, back = compression.activations, compression.activation_gradients
        self._receives_outputs = RecvDecoder(encodings(received, forth), device)
        self._receives_gradients = RecvDecoder(encodings(sent, back), device)
        self._sends_outputs = SendEncoder(encodings(sent, forth), device, f"outputs of stage {index}")
        self._sends_gradients = SendEncoder(encodings(received, back), device, f"gradients of stage {index}")
        # Parts that are sharded by themselves have their own.
        self.engines = [engine_of(m) for m in module.modules() if hasattr(m, "towpath_engine")]
        for engine in self.engines:
            engine.be_a_stage(mesh["dp"].size() * micro_batches)
        self.begin_walk()

    @property
    def engine(self) -> Engine:
        return engine_of(self.submod)

    @property
    def active_trace(self) -> Trace | None:
        return self.engine.comm.record.trace

    @property
    def senders(self) -> dict[str, Sender]:
        """The encoders of the stage's messages, by kind and number of the tensor."""
        found = {"outputs": self._sends_outputs, "gradients": self._sends_gradients}
        return {f"{kind}/{index}": sender for kind, sends in found.items() for index, sender in sends.senders.items()}

    # Backward passes ------------------------------------------------------------------------------------------------

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run a backward pass. Only the last one of the step syncs gradients."""
        with ExitStack() as stack:
            for engine in self.engines if self.accumulating or not last_backward else ():
                stack.enter_context(engine.no_sync())
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    # Messages -------------------------------------------------------------------------------------------------------

    def begin_walk(self) -> None:
        """Use the transports of the current optimizer step for one run of the whole schedule."""
        now = self._compression.at(self.engine.step)
        self._encodes_outputs = not now.activations.served
        self._encodes_gradients = not now.activation_gradients.served

    @contextmanager
    def keeping_senders(self) -> Generator[None]:
        """Restore the state of the outputs' senders after an evaluation."""
        carried = [kept for sender in self._sends_outputs.senders.values() for kept in sender.state]
        before = [kept.clone() for kept in carried]
        try:
            yield
        finally:
            for kept, value in zip(carried, before, strict=True):
                kept.copy_(value)

    def _encodes_gradient(self, source: int, micro_batch: int) -> bool:
        return self._encodes_gradients and (source, micro_batch) in self._encoded

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the outputs of a micro-batch, encoded if the step encodes them."""
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        sent = self._sends_outputs.messages(outputs, self._encodes_outputs, self.has_backward)
        self.fwd_cache[fwd_chunk_id] = sent, inputs
        found = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = outputs, inputs
        return self._traced(found, "output", self.stage_index, fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_fwd_recv_ops(fwd_chunk_id)
        self._receives_outputs.begin(fwd_chunk_id, found, self.args_recv_info[fwd_chunk_id], self._encodes_outputs)
        return self._traced(found, "output", self.stage_index - 1, fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch on its decoded inputs."""
        infos = self.args_recv_info[fwd_chunk_id]
        self._receives_outputs.decode(fwd_chunk_id, infos)
        for info in infos:
            buffer: torch.Tensor | None = getattr(info, "buffer", None)
            if buffer is not None and not hasattr(info, "tensor_meta"):
                # PyTorch 2.11 asks for the gradients of inputs only when it makes their buffers.
                buffer.requires_grad_(self.has_backward)
        with self._computing("forward", fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:  # PyTorch's says what the stage was called with. Its cause is what it raised.
                raise (error.__cause__ or error) from None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        encodes = self._encodes_gradient(self.stage_index, bwd_chunk_id)
        if self.has_backward and not self.is_first:
            gradients = self._sends_gradients.messages(self.bwd_cache[bwd_chunk_id], encodes, in_step=True)
            self.bwd_cache[bwd_chunk_id] = gradients
        found = self._of_gradients(super().get_bwd_send_ops(bwd_chunk_id))
        return self._traced(found, "gradient", self.stage_index - 1, bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch's outputs."""
        found = self._of_gradients(super().get_bwd_recv_ops(bwd_chunk_id))
        if found:
            encoded = self._encodes_gradient(self.stage_index + 1, bwd_chunk_id)
            self._receives_gradients.begin(bwd_chunk_id, found, self.grad_recv_info[bwd_chunk_id], encoded)
        return self._traced(found, "gradient", self.stage_index, bwd_chunk_id)

    def _of_gradients(self, found: list[dist.P2POp]) -> list[dist.P2POp]:
        for each in found:
            each.group = self._gradients  # it has the ranks of the mesh's group, in the same order
        return found

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward of a micro-batch on its decoded gradients."""
        infos = self.grad_recv_info[bwd_chunk_id] if self.has_backward and not self.is_last else ()
        buffers = [info.buffer for info in infos]
        self._receives_gradients.decode(bwd_chunk_id, infos)
        try:
            with self._computing("backward", bwd_chunk_id):
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            for info, buffer in zip(infos, buffers, strict=True):
                info.buffer = buffer

    @contextmanager
    def _computing(self, work: str, micro_batch: int) -> Generator[None]:
        began = time.perf_counter()
        try:
            name = f"{work} of stage {self.stage_index}, micro-batch {micro_batch}"
            with nullcontext() if self.active_trace is None else self.active_trace.phase(name):
                yield
        finally:
            self.seconds_computed += time.perf_counter() - began

    def _traced(self, found: list[dist.P2POp], kind: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
        """Return the operations of messages between `stage` and the next one. If there is a trace, it shows them."""
        if self.active_trace is not None:
            track = BETWEEN if f"stage {stage}" in self.leave_node else INSIDE
            trace_messages(found, self.active_trace, track, kind, micro_batch)
        return found


def schedule_of(engine: Engine, micro_batches: int, passes: Sequence[StagePass], step: int | None = None) -> Schedule:
    """Return the transfers of one sharded module in an optimizer step that runs these passes."""
    strategy = engine.strategy if step is None else engine.strategy.at(step)
    units = tuple(unit.plan.spec for unit in engine.units)
    return derive_schedule(strategy, units, micro_batches, engine.precision, passes, form=engine.comm.form)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def name_prefixes(modules: Mapping[int, nn.Module], stages: int, group: dist.ProcessGroup) -> list[str]:
    """Return what precedes the names of each stage's parameters. Every rank must call it, and gets the same.

    It is "" if no two stages have a name in common, and otherwise the number of the stage, as in `nn.Sequential`.
    """
    mine = [(index, name) for index, module in modules.items() for name, _ in module.named_parameters()]
    gathered = Groups(group).all_gather_objects(mine)
    counts = Counter(name for each in gathered for _, name in each)
    unique = all(count == 1 for count in counts.values())
    return ["" if unique else f"{index}." for index in range(stages)]


def _named_in(stages: Sequence[TowpathStage], prefixes: Sequence[str], twin: Mapping[str, str]) -> NamedTensors:
    """Return the tensors of stages by their names in the pipeline. Tied parameters have that of the first stage."""
    each = [(prefixes[s.stage_index], named_tensors(s.submod)) for s in stages]
    parameters = {f"{prefix}{name}": p for prefix, one in each for name, p in one.parameters.items()}
    buffers = {f"{prefix}{name}": b for prefix, one in each for name, b in one.buffers.items()}
    aliases = {f"{prefix}{alias}": f"{prefix}{name}" for prefix, one in each for alias, name in one.aliases.items()}
    return NamedTensors(
        {twin.get(name, name): p for name, p in parameters.items()},
        buffers,
        {alias: twin.get(name, name) for alias, name in aliases.items()},
    )


def local_state_of(
    mesh: DeviceMesh, stages: Sequence[TowpathStage], tied: TiedEmbeddings | None, prefixes: Sequence[str], how: str
) -> LocalState:
    """Return what this rank has of a checkpoint. Every rank must call it.

    `how` is what must be equal for the states of codecs to fit, next to the strategies of the stages.
    """
    groups = Groups()
    if mesh.size() != groups.world:
        raise CheckpointError(
            f"the pipeline's mesh has {mesh.size()} ranks, and the job {groups.world}: a checkpoint is of a whole job."
        )

    engines = {f"stage {s.stage_index}/": s.engine for s in stages}
    twin: dict[str, str] = {}  # the names of tied parameters in the last stage, with their names in the first stage
    if tied is not None and tied.module is not None:
        engines["tied/"] = engine_of(tied.module)
        first, last = tied.ends.names
        twin = {f"{prefixes[-1]}{last}.{name}": f"{prefixes[0]}{first}.{name}" for name in tied.names}

    def of_this_rank() -> tuple[dict[int, set[str]], dict[str, str], list[str]]:
        names = {s.stage_index: set(_named_in([s], prefixes, twin).all()) for s in stages}
        aliases = {**_named_in(stages, prefixes, twin).aliases, **twin}
        return names, aliases, [fingerprint(engine) for engine in engines.values()]

    gathered = AllRanks(groups, "State()", CheckpointError).combine(of_this_rank, list)
    aliases = {alias: first for _, each, _ in gathered for alias, first in each.items()}
    of_stages = {stage: names for of_rank, _, _ in gathered for stage, names in of_rank.items()}
    # Of the stages that have a tensor, the first one writes it. One that two stages of a rank share is no copy.
    lowest = {name: stage for stage in sorted(of_stages, reverse=True) for name in of_stages[stage]}
    own = gathered[groups.rank][0]
    copied = frozenset(name for names in own.values() for name in names if lowest[name] not in own)
    codec_states = "\n".join([how, *(line for _, _, fingerprints in gathered for line in fingerprints)])
    others = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    layers = "tp" in (mesh.mesh_dim_names or ())  # ranks share them
    return LocalState(
        groups=groups,
        everyone=groups,
        peers=Groups(mesh["tp"].get_group()).members if layers else (groups.rank,),
        named=lambda: replace(_named_in(stages, prefixes, twin), aliases=aliases),
        writes_copies=not any(mesh.get_local_rank(name) for name in others),
        engines=engines,
        senders={f"messages of stage {s.stage_index}/{n}": sender for s in stages for n, sender in s.senders.items()},
        fingerprint=hashlib.sha256(codec_states.encode()).hexdigest(),
        held=frozenset(lowest),
        # If one engine spans both ends, each of their ranks writes a share of the tied parameters.
        written_elsewhere=frozenset() if tied is not None and tied.fused else copied,
        copied_elsewhere=copied,
    )
