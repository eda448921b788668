"""A stage of torch.distributed.pipelining whose module `shard` has sharded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_map_only

from towpath.core.formats import dtype_name
from towpath.core.pipeline import Compression
from towpath.core.schedule import Shape, transport_for
from towpath.core.transport import Transport
from towpath.engine.executor import Engine, engine_of
from towpath.pipeline.split_backward import input_gradients, weight_gradients
from towpath.pipeline.stage_link import Encoding, Sender
from towpath.pipeline.traced import TracedStages


@dataclass(frozen=True, slots=True)
class Place:
    """Of a stage in its pipeline. `inputs`, `outputs`: what it is given and hands on, on the meta device. `encoded`:
    the gradients, by the stage that sends them and the micro-batch, that take the wire for gradients. `halved`: the
    backward pass may be computed in two halves (`split_backward.py`)."""

    index: int
    stages: int
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup
    device: torch.device
    micro_batches: int
    copies: int  # ranks that hold this stage
    encoded: frozenset[tuple[int, int]]
    halved: bool


class BackwardPasses:
    """Of a step, on one rank: which one is an engine's last. Stages that have an engine in common count together, as
    that of tied embeddings whose ends are on one rank."""

    def __init__(self) -> None:
        self._expected: Counter[Engine] = Counter()
        self._begun: Counter[Engine] = Counter()
        self.accumulating = False  # inside no_sync, where no pass is the last one

    @property
    def engines(self) -> list[Engine]:
        return list(self._expected)

    def expect(self, engines: Iterable[Engine], count: int) -> None:
        for engine in engines:
            self._expected[engine] += count

    def begin_step(self) -> None:
        self._begun.clear()

    def begin(self, engines: Iterable[Engine]) -> list[Engine]:
        """Another one of all these. Those of which more are to come."""
        self._begun.update(engines)
        return [e for e in engines if self.accumulating or self._begun[e] < self._expected[e]]


class TowpathStage(PipelineStage):
    """Its engines are told which backward pass of a step is the last one: there the gradients begin to be synchronised,
    while the pipeline goes on. `Pipeline.step` delivers them in the end; the engine divides them, nobody else.

    What it sends to its neighbours may be encoded. Both ends of a link count the optimizer steps, and so switch to a
    codec in the same one.
    """

    def __init__(
        self, module: nn.Module, place: Place, compression: Compression, passes: BackwardPasses, traced: TracedStages
    ) -> None:
        device = place.device
        super().__init__(
            module,
            place.index,
            place.stages,
            device,
            input_args=place.inputs,
            output_args=place.outputs,
            group=place.group,
            # Of a schedule that would compute the weights' gradients later, all are then computed with the inputs'.
            dw_builder=None if place.halved else _nothing_left,
        )
        self._passes, self._encoded, self._compression = passes, place.encoded, compression
        self.halved, self._traced = place.halved, traced
        self.seconds_computed = 0.0  # in its passes
        self._outputs = [_encoding(t, compression.activations) for t in place.outputs if not self.is_last]
        self._inputs = [_encoding(t, compression.activations) for t in place.inputs if not self.is_first]
        self._sent_gradients = [
            _encoding(t, compression.activation_gradients) for t in place.inputs if not self.is_first
        ]
        self._gradients = [_encoding(t, compression.activation_gradients) for t in place.outputs if not self.is_last]
        self._output_senders = _senders(self._outputs, device, f"outputs of stage {place.index}")
        self._gradient_senders = _senders(self._sent_gradients, device, f"gradients of stage {place.index}")
        self._arriving: dict[tuple[str, int, int], torch.Tensor] = {}  # messages, by kind, micro-batch and tensor
        self.engines = engines_in(module)
        for engine in self.engines:
            engine.be_a_stage(place.copies * place.micro_batches)
        passes.expect(self.engines, place.micro_batches)
        self.begin_walk()

    @property
    def engine(self) -> Engine:
        return engine_of(self.submod)

    @property
    def handed_on(self) -> tuple[Shape, ...]:
        """What it sends to the next stage."""
        return tuple((each.shape, dtype_name(each.dtype)) for each in self._outputs)

    @property
    def senders(self) -> dict[str, Sender]:
        """Of all that it encodes."""
        found = {"outputs": self._output_senders, "gradients": self._gradient_senders}
        return {f"{kind}/{index}": sender for kind, senders in found.items() for index, sender in senders.items()}

    # Backward passes ------------------------------------------------------------------------------------------------

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        # PyTorch detaches the outputs of a halved backward pass in place, which a view does not allow.
        return tree_map_only(torch.Tensor, _no_view, output) if self.halved else output

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if backward_type == "input":
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            return input_gradients(self.engines, outputs, bwd_kwargs["output_grads"], inputs)
        # Counted: of schedules that split the backward pass, PyTorch does not say which one is the last.
        more_to_come = self._passes.begin(self.engines)
        last = not more_to_come
        with ExitStack() as stack:
            for engine in more_to_come:
                stack.enter_context(engine.no_sync())
            if backward_type == "weight":
                return weight_gradients(bwd_kwargs["param_groups"]), None
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.halved:  # they are there
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        with self._computing("backward" if self.is_first else "weight gradients", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """The engine has divided them."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """They are on their way. To wait for them here would hold up the stages that wait for this one."""

    # Messages -------------------------------------------------------------------------------------------------------

    def begin_walk(self) -> None:
        """Take the wires of the optimizer step that this walk is part of."""
        now = self._compression.at(self.engine.step)
        self._encodes_outputs = not now.activations.served
        self._encodes_gradients = not now.activation_gradients.served

    @contextmanager
    def keeping_senders(self) -> Generator[None]:
        """Around an evaluation: what senders of outputs carry is afterwards what it was before."""
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
        return self._traced.messages(self._sent_outputs(fwd_chunk_id), "output", self.stage_index, fwd_chunk_id)

    def _sent_outputs(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not (self._encodes_outputs and self._output_senders):
            return super().get_fwd_send_ops(fwd_chunk_id)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        encoded = [_encoded(self._output_senders, i, out) for i, out in enumerate(outputs)]
        self.fwd_cache[fwd_chunk_id] = (encoded, inputs)
        found = super().get_fwd_send_ops(fwd_chunk_id)
        self.fwd_cache[fwd_chunk_id] = (outputs, inputs)
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_fwd_recv_ops(fwd_chunk_id)
        if self._encodes_outputs:
            found = self._in_messages("output", fwd_chunk_id, found, self.args_recv_info[fwd_chunk_id], self._inputs)
        return self._traced.messages(found, "output", self.stage_index - 1, fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        for index, info in enumerate(self.args_recv_info[fwd_chunk_id]):
            message = self._arriving.pop(("output", fwd_chunk_id, index), None)
            if message is not None:
                info.buffer = self._inputs[index].decoded(message)
        with self._computing("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        encodes = self._encodes_gradient(self.stage_index, bwd_chunk_id)
        if self.has_backward and self._gradient_senders and encodes:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                _encoded(self._gradient_senders, i, gradient) for i, gradient in enumerate(gradients)
            )
        found = super().get_bwd_send_ops(bwd_chunk_id)
        return self._traced.messages(found, "gradient", self.stage_index - 1, bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_bwd_recv_ops(bwd_chunk_id)
        if found and self._encodes_gradient(self.stage_index + 1, bwd_chunk_id):
            infos = self.grad_recv_info[bwd_chunk_id]
            found = self._in_messages("gradient", bwd_chunk_id, found, infos, self._gradients)
        return self._traced.messages(found, "gradient", self.stage_index, bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        later = self.halved and not kwargs.get("full_backward", True)  # the gradients of the weights
        infos = self.grad_recv_info[bwd_chunk_id] if self.has_backward and not self.is_last else ()
        buffers = [info.buffer for info in infos]
        for index, info in enumerate(infos):
            message = self._arriving.pop(("gradient", bwd_chunk_id, index), None)
            if message is not None:
                info.buffer = self._gradients[index].decoded(message)
        try:
            if later and self.is_first:  # its inputs want no gradients
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            with self._computing("input gradients" if later else "backward", bwd_chunk_id):
                return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            for info, buffer in zip(infos, buffers, strict=True):
                info.buffer = buffer

    @contextmanager
    def _computing(self, work: str, micro_batch: int) -> Generator[None]:
        began = time.perf_counter()
        try:
            with self._traced.computing(work, self.stage_index, micro_batch):
                yield
        finally:
            self.seconds_computed += time.perf_counter() - began

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """What the next stage, on the same rank, is given. Without a backward pass PyTorch would ask for it too."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _in_messages(
        self,
        kind: str,
        micro_batch: int,
        receives: list[dist.P2POp],
        infos: Sequence[Any],
        encodings: Sequence[Encoding],
    ) -> list[dist.P2POp]:
        """The same, but for what is encoded: into the memory of a message."""
        received = [i for i, info in enumerate(infos) if not info.is_root_arg and info.buffer is not None]
        for index, receive in zip(received, receives, strict=True):
            if encodings[index].used:
                receive.tensor = self._arriving[kind, micro_batch, index] = encodings[index].message(self.device)
        return receives


def engines_in(module: nn.Module) -> list[Engine]:
    """A stage's own, and those of parts of it that are sharded by themselves."""
    return [engine_of(m) for m in module.modules() if hasattr(m, "towpath_engine")]


def _encoding(tensor: torch.Tensor, transport: Transport) -> Encoding:
    return Encoding(tuple(tensor.shape), tensor.dtype, transport_for(dtype_name(tensor.dtype), transport))


def _senders(encodings: Sequence[Encoding], device: torch.device, label: str) -> dict[int, Sender]:
    """By the number of the tensor, of those that are encoded."""
    return {i: Sender(each, device, f"{label}, {i}") for i, each in enumerate(encodings) if each.used}


def _encoded(senders: dict[int, Sender], index: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient that nobody computed is zeros, to PyTorch as well."""
    sender = senders.get(index)
    if sender is None:
        return tensor
    return sender.encoded(sender.zeros() if tensor is None else tensor)


def _no_view(output: torch.Tensor) -> torch.Tensor:
    return output.clone() if output._is_view() else output  # pyright: ignore[reportPrivateUsage]


def _nothing_left() -> Any:
    return lambda: None
