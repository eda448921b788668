"""`backward(inputs=...)` and `torch.autograd.grad` with parameters of sharded models.

The leaves of the graph are the unsharded views of a unit's parameters. The user names ShardTensors, which autograd does
not find in the graph. PyTorch calls no hook when it reads `inputs`. So the one autograd engine that PyTorch's Python
code calls is replaced by a subclass, which adds the views to the inputs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from towpath.core.step_state import ForwardPass
from towpath.engine.parameters.shard_tensor import ShardTensor, engine_of_parameter
from towpath.engine.parameters.unit import Unit
from towpath.errors import ShardError

# The units of all models that the running backward pass with `inputs=` has reached, and whether it goes on behind each,
# because inputs of the unit get gradients. None outside such a pass.
_reached: dict[Unit, bool] | None = None


@final
class _BackwardInputs(torch._C._ImperativeEngine):  # pyright: ignore
    """PyTorch's autograd engine, which also accepts sharded parameters as `inputs`."""

    def run_backward(
        self,
        tensors: Any,
        gradients: Any,
        keep_graph: Any,
        create_graph: Any,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        # The signature is that of PyTorch's own engine, which `torch.autograd` calls with positional arguments only.
        run: Any = super().run_backward  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        others = (keep_graph, create_graph)
        if not inputs:
            return run(tensors, gradients, *others, inputs, allow_unreachable, accumulate_grad)
        with backward_to(inputs) as views:
            # The ShardTensors remain inputs, because a penalty term may be computed from them directly.
            named = (*inputs, *views)
            if accumulate_grad or not views:
                return run(tensors, gradients, *others, named, allow_unreachable, accumulate_grad)
            # A view may have no gradient where the ShardTensor itself has one, so PyTorch must not refuse that.
            found = run(tensors, gradients, *others, named, True, accumulate_grad)
        return _of_tensors(inputs, found, allow_unreachable)


def _of_tensors(inputs: Sequence[Any], found: Sequence[Any], may_be_none: bool) -> tuple[Any, ...]:
    """Return the gradients of `inputs`, as `torch.autograd.grad` does; raise if a sharded parameter has one."""
    # The gradient of a parameter that modules have computed with would be this rank's own. Other inputs are fine.
    wanted, of_views = tuple(found[: len(inputs)]), found[len(inputs) :]
    if any(gradient is not None for gradient in of_views):
        raise ShardError(
            "torch.autograd.grad() got parameters of a sharded model. It would return gradients of this rank alone. "
            "Call loss.backward(inputs=parameters), and read their .grad: the mean over all ranks."
        )
    if not may_be_none and any(gradient is None for gradient in wanted):
        raise RuntimeError("torch.autograd.grad(): one of the inputs was not used in the graph (see allow_unused=).")
    return wanted


def let_backward_take_parameters() -> None:
    """Let `backward(inputs=...)` name sharded parameters, everywhere in this process."""
    # `Variable._execution_engine` is private. Every `backward()` and `grad()` of torch.autograd looks it up there, and
    # PyTorch has no public hook that sees `inputs=`.
    if not isinstance(Variable._execution_engine, _BackwardInputs):  # pyright: ignore
        Variable._execution_engine = _BackwardInputs()  # pyright: ignore


@contextmanager
def backward_to(inputs: Iterable[object]) -> Generator[list[nn.Parameter]]:
    """Run a backward pass with `inputs=`. Yield the unsharded views for those inputs that are ShardTensors."""
    global _reached
    named = {id(each): engine_of_parameter(each) for each in inputs if isinstance(each, ShardTensor)}
    views: list[nn.Parameter] = []
    for engine in dict.fromkeys(engine for engine in named.values() if engine is not None):
        buckets = [bucket for unit in engine.units for bucket in unit.trainable]
        pairs = [pair for bucket in buckets for pair in zip(bucket.layout.places, bucket.views, strict=True)]
        wanted = [(place, view) for place, view in pairs if id(place.parameter) in named and view.requires_grad]
        if wanted:
            engine.comm.program.ends_at([place.names[0] for place, _ in wanted])
            shown = {id(leaf.unsharded): leaf for unit in engine.leaves for leaf in unit.shown.leaf_parameters}
            views += [p for _, view in wanted for p in (view, shown.get(id(view))) if p is not None]
    # A backward pass may start another one inside, as reentrant checkpoints do. So the former value is restored.
    before, reached = _reached, dict[Unit, bool]()
    _reached = reached
    try:
        yield views
    finally:
        _reached = before
        for bucket in (bucket for unit in reached for bucket in unit.trainable):
            bucket.gradients.expected = len(bucket.views)


def expect_gradients(unit: Unit, passed: ForwardPass, inputs: Sequence[Node]) -> None:
    """Count the gradients of `unit` that the running backward pass will compute, `inputs` those of its inputs."""
    # With `backward(inputs=...)` no hook reports what autograd leaves out. If the pass ends in this unit, the unit has
    # finished once the named parameters have gradients. If not, the weights may be read again afterwards, for the
    # gradients of its inputs.
    passed.inputs_awaited = passed.inputs
    if _reached is None:
        return
    passed.inputs_awaited = sum(map(_will_run, inputs))
    _reached[unit] = _reached.get(unit, False) or passed.inputs_awaited > 0
    for bucket in unit.trainable:
        leaves = [get_gradient_edge(view).node for view in bucket.views if view.requires_grad]
        bucket.gradients.expected = len(bucket.views) if _reached[unit] else sum(map(_will_run, leaves))


def _will_run(node: Node) -> bool:
    """Return whether the running backward pass will execute this node of the graph."""
    # Private, and the only way to learn what the running pass leaves out. DDP and PyTorch's multi-grad hooks use it.
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore
    except RuntimeError:  # PyTorch has no answer for a leaf in torch.autograd.grad()
        return True
