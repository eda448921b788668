"""The agreement of a pipeline's ranks: on the shapes of messages at the beginning, and on every call before it runs.

Shapes are found by running each stage on tensors without values, so that no step has to send them. A rank with a wrong
batch would send nothing, and its neighbors would wait for it. So all ranks compare their calls before they send.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from towpath.core.formats import FLOATING, Precision, dtype_name
from towpath.core.passes import Compression, transport_for
from towpath.core.transport import matrix_of
from towpath.core.units import StageOutput
from towpath.engine.layout import torch_dtype
from towpath.engine.parameters.dtensors import local_part, parallel_of
from towpath.errors import ShardError, StepError
from towpath.topology.groups import Groups
from towpath.topology.together import AllRanks, together

Tensors = tuple[torch.Tensor, ...]


@final
class DifferingTensors(TorchDispatchMode):
    """Finds the tensors that differ between tensor-parallel ranks, in runs without values.

    These are a rank's part of a DTensor that is split, or that is a partial sum, and what is computed from such parts.
    Plain inputs and plain parameters are the same on these ranks. Only a DTensor makes parts whole again.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # Views of a part differ, too, so its memory counts. Each is held, so that no other tensor gets its address.
        self._memory = dict[int, torch.UntypedStorage]()
        self.in_outputs = False  # whether outputs of a module are among them

    def __contains__(self, value: Any) -> bool:
        return _is_plain(value) and value.untyped_storage()._cdata in self._memory

    def add(self, values: Any) -> Any:
        for each in filter(_is_plain, tree_leaves(values)):
            self._memory[each.untyped_storage()._cdata] = each.untyped_storage()
        return values

    @contextmanager
    def following(self) -> Generator[None]:
        """Follow the local parts of DTensors, and what is computed from them."""
        from torch.distributed.tensor import DTensor

        dtensor: Any = DTensor
        to_local = dtensor.to_local

        def noted(tensor: Any, *, grad_placements: Any = None) -> Any:
            local = to_local(tensor, grad_placements=grad_placements)
            if all(placement.is_replicate() for placement in (*tensor.placements, *(grad_placements or ()))):
                return local
            return self.add(local.clone())  # a copy, because a part may be a view of what does not differ

        dtensor.to_local = noted
        try:
            with self:
                yield
        finally:
            dtensor.to_local = to_local

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.add(found) if any(value in self for value in tree_leaves((args, kwargs))) else found


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "placements")


def forward_without_values(
    module: nn.Module, inputs: Sequence[torch.Tensor], precision: Precision, differing: DifferingTensors | None = None
) -> Any:
    """Return what a module returns, in tensors of the right shapes and dtypes. Nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            dtype = tensor.dtype
            if not isinstance(tensor, nn.Parameter):
                return torch.empty(tensor.shape, dtype=dtype)
            if dtype.is_floating_point:
                dtype = torch_dtype(precision.compute_dtype(dtype_name(dtype)))
            made, parallel = torch.empty(local_part(tensor).shape, dtype=dtype), parallel_of(tensor)
            return made if parallel is None else parallel.wrap(made)

        state = {name: fake(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        # The forward of a sharded module casts its inputs, as hooks do in `engine/hooks.py`.
        lower = [
            precision.params if t.is_floating_point() and precision.params else dtype_name(t.dtype) for t in inputs
        ]
        given = tuple(torch.empty(t.shape, dtype=torch_dtype(d)) for t, d in zip(inputs, lower, strict=True))
        with nullcontext() if differing is None else differing.following():
            return functional_call(module, state, given)


def meta_outputs(
    module: nn.Module, inputs: Sequence[torch.Tensor], precision: Precision, differing: DifferingTensors | None = None
) -> Tensors:
    """Return the outputs of a stage on the meta device, without computing them."""
    found = forward_without_values(module, inputs, precision, differing)
    outputs = found if isinstance(found, (tuple, list)) else (found,)
    if not all(isinstance(t, torch.Tensor) for t in outputs):
        raise ShardError(
            f"a stage hands on {', '.join(type(t).__name__ for t in outputs)}: expected a tensor, or a tuple of them."
        )
    if differing is not None:
        differing.in_outputs |= any(not _is_plain(t) or t in differing for t in outputs)
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in outputs)


def exchanged_tensors(
    modules: Mapping[int, nn.Module], count: int, example: Tensors, precision: Precision, everyone: MeshRanks
) -> tuple[list[Tensors], list[tuple[StageOutput, ...]]]:
    """Return the inputs of each of `count` stages, and the outputs of the last one, on the meta device.

    Floating-point tensors require gradients, because stages send these back. Every rank must call it, and gets the same
    tensors or an error. PyTorch would find the shapes in the first step, when the modules are sharded already.

    The second list has those of them that stages exchange. Tensor-parallel ranks send shares, unless a tensor between
    any two stages differs between these ranks.
    """
    ranks = AllRanks(everyone.groups["pp"], "Pipeline()", ShardError)
    peers = everyone.groups["tp"].world if "tp" in everyone.groups else 1
    found = [tuple(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in example)]
    for index in range(count):
        # What the last stage returns is not sent.
        differing = DifferingTensors() if peers > 1 and index < count - 1 else None

        def outputs(index: int = index, differing: DifferingTensors | None = differing) -> tuple[Tensors, bool] | None:
            if index not in modules:
                return None
            try:
                made = meta_outputs(modules[index], found[-1], precision, differing)
            except Exception as error:  # whatever the user's module raises
                raise ShardError(f"stage {index}, called with {shapes_of(found[-1])}: {error}") from error
            return made, differing is not None and differing.in_outputs

        made, differ = ranks.combine(outputs, lambda given: next(each for each in given if each is not None))
        found.append(made)
        peers = 1 if differ else peers
    sent = [tuple(StageOutput.on(peers, t.shape, dtype_name(t.dtype)) for t in each) for each in found[1:-1]]
    exchanged = [tuple(t.detach().requires_grad_(t.dtype.is_floating_point) for t in each) for each in found]
    return exchanged, [(), *sent, ()]


def shapes_of(tensors: Tensors) -> str:
    return ", ".join(f"{_sizes(t.shape)} {dtype_name(t.dtype)}" for t in tensors)


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def check_exchanged(between: Sequence[Sequence[StageOutput]], compression: Compression) -> None:
    """Raise an error if codecs do not take the tensors between any two stages, or if low rank saves nothing.

    All ranks know these tensors, so all ranks raise.
    """
    exchanged = [tensor for tensors in between for tensor in tensors]
    transports = (compression.activations, compression.activation_gradients)
    for tensor in exchanged:
        for transport in transports:
            transport_for(tensor.dtype, transport)
    floating = [tensor.sent_shape for tensor in exchanged if tensor.dtype in FLOATING]
    for low_rank in (transport.low_rank for transport in transports):
        if floating and low_rank is not None and not any(low_rank.pays(shape) for shape in floating):
            rows, columns = matrix_of(max(floating, key=prod))
            below = rows * columns / (rows + columns) / low_rank.rate
            raise ShardError(
                f"Pipeline: between stages {low_rank} sends no less than the tensor itself, of {rows} × {columns} "
                f"elements at most. Take a rank below {below:.0f}, or leave it out."
            )


def check_batch(batch: Sequence[torch.Tensor], example: Tensors, micro_batches: int) -> None:
    """Raise `StepError` if the batch does not consist of `micro_batches` micro-batches of the example's shape."""
    expected = [(micro_batches * t.shape[0], *t.shape[1:]) if t.dim() else () for t in example]
    _check_tensors(batch, "a batch")
    got = [tuple(t.shape) for t in batch]
    for index, (tensor, like) in enumerate(zip(batch, example, strict=False)):
        if tensor.dtype != like.dtype and (tensor.dtype.is_floating_point or like.dtype.is_floating_point):
            raise StepError(
                f"a batch whose tensor {index} is {dtype_name(tensor.dtype)}: expected {dtype_name(like.dtype)}, as of "
                "the example."
            )
    if got != expected:
        raise StepError(
            f"a batch of {', '.join(map(_sizes, got)) or 'nothing'}: expected {', '.join(map(_sizes, expected))}, "
            f"which is {micro_batches} micro-batches of the example's shape. Shapes are the same in every step: pad "
            "what is shorter, or make another Pipeline."
        )


def check_target(target: torch.Tensor | None, rows: Set[int], micro_batches: int) -> None:
    """Raise `StepError` unless the target has the rows of all micro-batches. `rows` are possible numbers for one."""
    expected = " or ".join(str(micro_batches * each) for each in sorted(rows))
    if target is None:
        raise StepError(f"no target: expected one of {expected} rows on the rank of the last stage. Pass target=.")
    _check_tensors([target], "a target")
    if not target.dim() or target.shape[0] not in {micro_batches * each for each in rows}:
        raise StepError(
            f"a target of {_sizes(target.shape) or 'no dimension'}: expected {expected} rows, for {micro_batches} "
            "micro-batches of the example's shape. Pass a target that is as long as the batch."
        )


def _check_tensors(given: Sequence[object], what: str) -> None:
    if other := next((type(each).__name__ for each in given if not isinstance(each, torch.Tensor)), ""):
        raise StepError(f"{what} with a {other}: expected tensors.")


@final
class MeshRanks:
    """All ranks of a pipeline's mesh. They meet along one dimension of the mesh after the other, 'pp' first."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = sorted(mesh.mesh_dim_names or (), key=lambda name: name != "pp")
        self.groups = {name: Groups(mesh[name].get_group()) for name in names}  # by the dimension of the mesh
        self.members: list[int] = sorted(mesh.mesh.flatten().tolist())

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of `members`."""
        found = {dist.get_rank(): value}
        for groups in self.groups.values():
            found = {rank: each for told in groups.all_gather_objects(found) for rank, each in told.items()}
        return [found[rank] for rank in self.members]


# The calls of a Pipeline that ranks compare, as errors name them.
EVALUATE, STEP, ACCUMULATE = CALLS = "evaluate()", "step()", "step() inside no_sync()"


@final
class CallCheck:
    """The comparison of the calls of all ranks. Every rank must construct it.

    Each rank tells the first rank of its pipeline what it is about to do. The first ranks of all copies compare that,
    and each tells its pipeline. The messages are 16 bytes, between hosts. Later stages lose no time. They end a step
    before the first one does, so their messages have arrived when the next step begins. They wait for the first stage's
    output anyway, which comes after its answer. Only the copies of the first stage wait for a round trip.
    """

    def __init__(self, everyone: MeshRanks) -> None:
        self._everyone = everyone
        # Separate groups, because other threads may compare something meanwhile.
        self._pipeline, *others = (
            groups.of((tuple(range(groups.world)),), "calls of a pipeline", "gloo")
            for groups in everyone.groups.values()
        )
        self._first = self._pipeline.rank() == 0
        self._others = [group for group in others if group.size() > 1]

    def check(self, call: str, step: int, refusal: StepError | None) -> None:
        """Raise on all ranks unless all make this call after the same number of steps, and none refuses it."""
        number = len(CALLS) * step + CALLS.index(call)
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
            advice = "Let every rank make the same calls in the same order, and load the same checkpoint."
            with together(self._everyone, f"Pipeline.{call}", advice, StepError) as lines:
                if refusal is not None:
                    raise refusal
                lines.append(f"Pipeline.{call} of step {step + 1}")
