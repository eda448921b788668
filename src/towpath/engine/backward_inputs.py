"""`backward(inputs=...)` and `torch.autograd.grad` with parameters of sharded models.

The leaves of the graph are the unsharded views of a unit's parameters. The user names ShardTensors, which autograd does
not find in the graph. PyTorch calls no hook when it reads `inputs`. So the one autograd engine that PyTorch's Python
code calls is replaced by a subclass, which adds the views to the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.autograd import Variable

from towpath.engine.executor import backward_to
from towpath.errors import ShardError


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
        run: Any = super().run_backward  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        others = (keep_graph, create_graph)
        if not inputs:
            return run(tensors, gradients, *others, inputs, allow_unreachable, accumulate_grad)
        with backward_to(inputs) as views:
            # The ShardTensors remain inputs, because a penalty term may be computed from them directly.
            named = (*inputs, *views)
            if accumulate_grad or not views:
                return run(tensors, gradients, *others, named, allow_unreachable, accumulate_grad)
            found = run(tensors, gradients, *others, named, True, accumulate_grad)
        return _of_tensors(inputs, found, allow_unreachable)


def _of_tensors(inputs: Sequence[Any], found: Sequence[Any], may_be_none: bool) -> tuple[Any, ...]:
    """Return the gradients of `inputs`, as `torch.autograd.grad` does; raise if a sharded parameter has one.

    The gradient of a parameter that modules have computed with would be this rank's own. Other inputs are fine.
    """
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
    if not isinstance(Variable._execution_engine, _BackwardInputs):  # pyright: ignore
        Variable._execution_engine = _BackwardInputs()  # pyright: ignore
