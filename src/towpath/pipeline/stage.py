"""A stage of `torch.distributed.pipelining` whose module is sharded, and its messages.

A stage tells its engines which backward pass of a step is the last one, and encodes what it sends to its neighbors.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from towpath.codecs.kernels import kernels_for
from towpath.codecs.low_rank import columns_of, first_factor, orthonormal, with_unit_columns
from towpath.core.formats import dtype_name, wide
from towpath.core.passes import Compression, Shape, StagePass, transport_for
from towpath.core.schedule import Schedule
from towpath.core.schedule import schedule as derive_schedule
from towpath.core.transport import Transport, matrix_of
from towpath.engine.executor import Engine, engine_of
from towpath.engine.layout import torch_dtype
from towpath.observe.record import Trace
from towpath.observe.trace import BETWEEN, INSIDE
from towpath.pipeline.observed import trace_messages

# A message in fewer bytes: as low-rank factors, or in a codec of blocks. Both ends of a link have the same encodings,
# and know which messages are encoded. So messages need no header.


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a link sends tensors of one shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    transport: Transport

    @property
    def used(self) -> bool:
        """Whether the tensors are encoded. Otherwise they are sent as they are."""
        if self.transport.low_rank is not None:
            return self.transport.low_rank.pays(self.shape)
        return self.transport.encoding is not None

    def message(self, device: torch.device) -> torch.Tensor:
        """Return an empty buffer for one message."""
        if self.transport.low_rank is not None:
            return torch.empty(self.transport.low_rank.encoded_elements(self.shape), dtype=self.dtype, device=device)
        assert self.transport.encoding is not None
        return torch.empty(self.transport.encoding.encoded_bytes(prod(self.shape)), dtype=torch.uint8, device=device)

    def factors(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the low-rank factors P and Q as views of a message."""
        assert self.transport.low_rank is not None
        rows, columns = matrix_of(self.shape)
        p, q = message.split([rows * self.transport.low_rank.rank, columns * self.transport.low_rank.rank])
        return p.view(rows, -1), q.view(columns, -1)

    def decoded(self, message: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a message carries."""
        if self.transport.low_rank is not None:
            p, q = self.factors(message)
            return (p @ q.T).view(self.shape)
        assert self.transport.encoding is not None
        decoded = torch.empty(prod(self.shape), dtype=self.dtype, device=message.device)
        kernels_for(message.device).decode(self.transport.encoding, message, decoded)
        return decoded.view(self.shape)


class Sender:
    """The encoder of one tensor of a link, with its error feedback.

    What a message loses is added to the next encoded one, in the next step if it was the last one of its own step (lazy
    error propagation).
    """

    def __init__(self, encoding: Encoding, device: torch.device, label: str) -> None:
        self.encoding = encoding
        self._dtype = torch_dtype(wide(dtype_name(encoding.dtype)))
        self._seed = crc32(label.encode())
        _, columns = matrix_of(encoding.shape)
        factor, error = encoding.transport.kept_for_message(encoding.shape)
        self._factor = torch.empty(factor, dtype=self._dtype, device=device).view(columns, -1)
        self._error = torch.empty(error, dtype=self._dtype, device=device).view(-1, columns)
        self._drawn = torch.zeros(1, dtype=torch.int64)
        self.restart()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that one message leaves for the next."""
        codec = self.encoding.transport.encoding
        drawn = (self._drawn,) if codec is not None and codec.stochastic else ()
        return (*(kept for kept in (self._factor, self._error) if kept.numel()), *drawn)

    def restart(self) -> None:
        """Reset the error feedback, and the factor that the next factorization starts from."""
        self._error.zero_()
        if self._factor.numel():
            columns, rank = self._factor.shape
            self._factor.copy_(first_factor(columns, rank, self._seed, self._dtype, self._factor.device))

    def encoded(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the message for a tensor. None, a gradient that was not computed, counts as zeros."""
        if tensor is None:
            tensor = torch.zeros(self.encoding.shape, dtype=self.encoding.dtype, device=self._error.device)
        message = self.encoding.message(tensor.device)
        x = tensor.detach().reshape(matrix_of(self.encoding.shape)).to(self._dtype)
        if self._error.numel():
            x = x + self._error
        finite = self._factorize(x, message) if self._factor.numel() else self._encode_blocks(x, message)
        if self._error.numel():
            lost = x - self.encoding.decoded(message).view(x.shape).to(self._dtype)
            # A value that is not finite arrives as it is, but must not reach later messages.
            self._error.copy_(torch.where(finite, lost, self._error))
        return message

    def _factorize(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Write the factors of `x` to the message. Return whether they are finite."""
        p, q = self.encoding.factors(message)
        basis = orthonormal(columns_of(x, self._factor))
        factor = columns_of(x.T, basis)
        p.copy_(basis)
        q.copy_(factor)
        finite = message.isfinite().all()
        self._factor.copy_(torch.where(finite, with_unit_columns(factor, self._factor), self._factor))
        return finite

    def _encode_blocks(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Write `x` to the message in the codec of blocks. Return whether it is finite."""
        codec = self.encoding.transport.encoding
        assert codec is not None
        self._drawn += 1
        values = x.to(self.encoding.dtype).reshape(-1)
        kernels_for(x.device).encode(codec, values, message, self._seed + int(self._drawn))
        return values.isfinite().all()


@final
class Receiver:
    """The messages of one kind that a stage receives, from the buffers that they arrive in to the decoded tensors."""

    def __init__(self, encodings: Sequence[Encoding], device: torch.device) -> None:
        self._encodings, self._device = encodings, device
        self.arriving: dict[tuple[int, int], torch.Tensor] = {}  # encoded messages, by micro-batch and tensor

    def begin(self, micro_batch: int, receives: Sequence[dist.P2POp], infos: Sequence[Any]) -> None:
        """Give each operation that receives an encoded tensor the buffer of a message."""
        # The model's own inputs have no buffer. In PyTorch 2.11 their placeholders lack the attribute.
        received = [i for i, info in enumerate(infos) if getattr(info, "buffer", None) is not None]
        for index, receive in zip(received, receives, strict=True):
            if self._encodings[index].used:
                message = self._encodings[index].message(self._device)
                receive.tensor = self.arriving[micro_batch, index] = message

    def decode(self, micro_batch: int, infos: Sequence[Any]) -> None:
        """Put the decoded tensors where PyTorch's stage expects what arrived."""
        for index, info in enumerate(infos):
            message = self.arriving.pop((micro_batch, index), None)
            if message is not None:
                info.buffer = self._encodings[index].decoded(message)


class TowpathStage(PipelineStage):
    """A pipeline stage with a sharded module.

    Gradient syncs begin in the last backward pass of a step, while the pipeline goes on. `Pipeline.step` waits for
    them. Both ends of a link count the optimizer steps, and so switch to a codec in the same step.

    `inputs` and `outputs` are those of one micro-batch, on the meta device. `encoded` has the gradient messages that
    use a codec, each as its sending stage and its micro-batch.
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
        micro_batches: int,
        compression: Compression,
        encoded: frozenset[tuple[int, int]],
    ) -> None:
        device = torch.device(mesh.device_type)
        super().__init__(module, index, stages, device, inputs, outputs, group=mesh["pp"].get_group())
        self._encoded, self._compression = encoded, compression
        # For a trace: whether what a stage sends on goes to another node. Keys are names such as "stage 0".
        self.leaves_node: Mapping[str, bool] = {}
        self.accumulating = False  # inside `Pipeline.no_sync`, where no backward pass syncs gradients
        self.seconds_computed = 0.0  # of the host, which on a GPU launches the work only

        def encodings(tensors: Sequence[torch.Tensor], transport: Transport) -> list[Encoding]:
            return [Encoding(tuple(t.shape), t.dtype, transport_for(dtype_name(t.dtype), transport)) for t in tensors]

        def senders(encodings: Sequence[Encoding], kind: str) -> dict[int, Sender]:
            label = f"{kind} of stage {index}"
            return {i: Sender(each, device, f"{label}, {i}") for i, each in enumerate(encodings) if each.used}

        received, sent = () if self.is_first else inputs, () if self.is_last else outputs
        back = compression.activation_gradients
        self._receives_outputs = Receiver(encodings(received, compression.activations), device)
        self._receives_gradients = Receiver(encodings(sent, back), device)
        self._output_senders = senders(encodings(sent, compression.activations), "outputs")
        self._gradient_senders = senders(encodings(received, back), "gradients")
        # The shapes and dtypes of the tensors that the stage sends to the next one.
        self.output_shapes: tuple[Shape, ...] = tuple((tuple(t.shape), dtype_name(t.dtype)) for t in sent)
        # Parts that are sharded by themselves have their own.
        self.engines = [engine_of(m) for m in module.modules() if hasattr(m, "towpath_engine")]
        for engine in self.engines:
            engine.be_a_stage(mesh["dp"].size() * micro_batches)
        self.begin_walk()

    @property
    def engine(self) -> Engine:
        return engine_of(self.submod)

    @property
    def trace(self) -> Trace | None:
        return self.engine.comm.record.trace

    @property
    def senders(self) -> dict[str, Sender]:
        """The encoders of the stage's messages, by kind and number of the tensor."""
        found = {"outputs": self._output_senders, "gradients": self._gradient_senders}
        return {f"{kind}/{index}": sender for kind, senders in found.items() for index, sender in senders.items()}

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
        carried = [kept for sender in self._output_senders.values() for kept in sender.state]
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
        if self._encodes_outputs:
            self.fwd_cache[fwd_chunk_id] = _encoded(self._output_senders, outputs), inputs
        found = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = outputs, inputs
        return self._traced(found, "output", self.stage_index, fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_fwd_recv_ops(fwd_chunk_id)
        if self._encodes_outputs:
            self._receives_outputs.begin(fwd_chunk_id, found, self.args_recv_info[fwd_chunk_id])
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
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        encodes = self._encodes_gradient(self.stage_index, bwd_chunk_id)
        if self.has_backward and self._gradient_senders and encodes:
            self.bwd_cache[bwd_chunk_id] = _encoded(self._gradient_senders, self.bwd_cache[bwd_chunk_id])
        found = super().get_bwd_send_ops(bwd_chunk_id)
        return self._traced(found, "gradient", self.stage_index - 1, bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch's outputs."""
        found = super().get_bwd_recv_ops(bwd_chunk_id)
        if found and self._encodes_gradient(self.stage_index + 1, bwd_chunk_id):
            self._receives_gradients.begin(bwd_chunk_id, found, self.grad_recv_info[bwd_chunk_id])
        return self._traced(found, "gradient", self.stage_index, bwd_chunk_id)

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
            with nullcontext() if self.trace is None else self.trace.phase(name):
                yield
        finally:
            self.seconds_computed += time.perf_counter() - began

    def _traced(self, found: list[dist.P2POp], kind: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
        """Return the operations of messages between `stage` and the next one. If there is a trace, it shows them."""
        if self.trace is not None:
            track = BETWEEN if self.leaves_node.get(f"stage {stage}", True) else INSIDE
            trace_messages(found, self.trace, track, kind, micro_batch)
        return found


def _encoded(senders: dict[int, Sender], tensors: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors, with the message in place of each one that has a sender."""
    return tuple(senders[i].encoded(tensor) if i in senders else tensor for i, tensor in enumerate(tensors))


def schedule_of(engine: Engine, micro_batches: int, passes: Sequence[StagePass], step: int | None = None) -> Schedule:
    """Return the transfers of one sharded module in an optimizer step that runs these passes."""
    strategy = engine.strategy if step is None else engine.strategy.at(step)
    units = tuple(unit.plan.spec for unit in engine.units)
    return derive_schedule(strategy, units, micro_batches, engine.precision, passes, form=engine.comm.form)
