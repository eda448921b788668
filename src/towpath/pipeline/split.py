"""A model cut into stages between its blocks, without knowing what it computes around them.

Of every stage but the first, what comes before the blocks is left out, and what the stage before handed on takes the
place of the first block's input; of every stage but the last, what comes after them. All else of the model's own
forward runs in each stage, such as what makes positions and masks of the shape of its input. Parameters keep their
names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from towpath.core.pipeline import balanced
from towpath.engine.layout import UnitLayout, lay_out
from towpath.errors import ShardError


def split(model: nn.Module, count: int, example: torch.Tensor) -> list[nn.Module]:
    """Split `model` into `count` stages with about the same number of parameters each.

    The stages share the memory of the model's parameters.

    Args:
        model: The model, with a row of blocks of one class in a ModuleList or Sequential.
        count: The number of stages, at most the number of blocks.
        example: An input of the model, such as tokens. Only its shape and dtype matter.

    Raises:
        ShardError: The model has too few blocks, or they do not run one after the other.
    """
    return cut(model, blocks_in(model, lay_out(model)), count, example)


def cut(model: nn.Module, blocks: Sequence[str], count: int, example: torch.Tensor) -> list[nn.Module]:
    """Split `model` between `blocks`, the names that `blocks_in` returns. The planner cuts a model several times."""
    if not 0 < count <= len(blocks):
        raise ShardError(f"split: {count} stages of a model that has {len(blocks)} blocks.")
    calls = _calls(model, blocks, example)
    weights = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in blocks]
    before, after = (sum(_numel(model.get_submodule(n)) for n in names) for names in (calls.before, calls.after))
    bounds = balanced(
        [weights[0] + before, *weights[1:-1], weights[-1] + after] if len(weights) > 1 else weights, count
    )
    return [_Stage(model, blocks[start:end], blocks, calls) for start, end in bounds]


def cut_of(stage: object) -> str:
    """Which blocks of a model that was split it has, in words; '' of any other stage."""
    return f"{stage.first_block} to {stage.last_block}" if isinstance(stage, _Stage) else ""


@dataclass(frozen=True, slots=True)
class _Calls:
    """What a run of the model has shown. `before`, `after`: modules with parameters that run before the first block and
    after the last one; `outputs`: the shape of what each of those before made; `wrapped`: blocks return a tuple."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: dict[str, torch.Size]
    wrapped: bool


class _Stage(nn.Module):
    """Its modules are those of the model, under their names; those that others have are stand-ins."""

    def __init__(self, model: nn.Module, mine: Sequence[str], blocks: Sequence[str], calls: _Calls) -> None:
        super().__init__()
        self.first_block, self.last_block = mine[0], mine[-1]
        self._first, self._last = mine[0] == blocks[0], mine[-1] == blocks[-1]
        kept = _shallow(model)
        for name in blocks:
            if name not in mine:
                _put(kept, name, _PassOn(calls.wrapped))
        for name in () if self._first else calls.before:
            _put(kept, name, _Empty(calls.outputs[name]))
        for name in () if self._last else calls.after:
            _put(kept, name, nn.Identity())
        for name, module in kept.named_children():
            self.add_module(name, module)
        for name, parameter in kept.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in kept.named_buffers(recurse=False):
            self.register_buffer(name, buffer, name not in kept._non_persistent_buffers_set)  # pyright: ignore
        self._model = [kept]  # in a list: its modules are named above
        # What of it shares its parameter with the other end, if it is one.
        self.tied = ""
        if self._first != self._last:
            ends = (calls.before, calls.after) if self._first else (calls.after, calls.before)
            self.tied = _tied(model, *ends)
        self._received: torch.Tensor | None = None
        self._handed_on: torch.Tensor | None = None
        if not self._first:
            kept.get_submodule(mine[0]).register_forward_pre_hook(self._take)
        if not self._last:
            kept.get_submodule(mine[-1]).register_forward_hook(self._hand_on)

    def forward(self, x: torch.Tensor) -> Any:
        if not self._first:
            self._received, x = x, torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
            for module in self._model[0].modules():
                if isinstance(module, _Empty):
                    module.dtype = self._received.dtype
        found = self._model[0](x)
        if self._last:
            return getattr(found, "logits", found)
        handed_on, self._handed_on, self._received = self._handed_on, None, None
        return handed_on

    def _take(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._received, *args[1:])

    def _hand_on(self, module: nn.Module, args: Any, output: Any) -> None:
        self._handed_on = output[0] if isinstance(output, tuple) else output


class _PassOn(nn.Module):
    """A block of another stage."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (x,) if self.wrapped else x


class _Empty(nn.Module):
    """In the place of what makes the first block's input: as large, and of the dtype that comes instead."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.dtype = shape, torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        return torch.zeros(1, dtype=self.dtype, device=device).expand(self.shape)


def blocks_in(model: nn.Module, layouts: Sequence[UnitLayout]) -> list[str]:
    """Return the names of the longest row of like blocks, among the modules of all units but the root."""
    homes = {id(module): name for name, module in model.named_modules()}
    # Lists inside lists: what computes between two of their modules, a residual for example, would be lost in a cut.
    nested = {homes[id(inner)] for outer in model.modules() if isinstance(outer, nn.ModuleList) for inner in outer}
    names = [homes[id(module)] for unit in layouts[1:] for module in unit.modules]
    names = [name for name in names if name.rpartition(".")[0] not in nested]
    rows: dict[str, list[str]] = {}
    for name in names:
        rows.setdefault(name.rpartition(".")[0], []).append(name)
    if not rows:
        raise ShardError("split: the model has no ModuleList or Sequential of like blocks to cut between.")
    return max(rows.values(), key=len)


def _calls(model: nn.Module, blocks: Sequence[str], example: torch.Tensor) -> _Calls:
    """Run without values: which modules come before the blocks, and which after."""
    inside = set(blocks)
    before: list[str] = []
    after: list[str] = []
    outputs: dict[str, torch.Size] = {}
    wrapped: list[bool] = []
    seen: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in inside:
                seen.append(name)
                wrapped.append(isinstance(output, tuple))
            elif not seen:
                before.append(name)
                outputs[name] = output.shape
            elif len(seen) == len(blocks):
                after.append(name)
            else:
                raise ShardError(f"split: {name} has parameters and runs between two blocks: give the stages yourself.")

        return hook

    watched = [name for name, module in model.named_modules() if name in inside or _is_outer_leaf(name, module, blocks)]
    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in watched]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            state = {
                n: torch.empty(t.shape, dtype=t.dtype) for n, t in (*model.named_parameters(), *model.named_buffers())
            }
            functional_call(model, state, (torch.zeros(example.shape, dtype=example.dtype),))
    finally:
        for handle in handles:
            handle.remove()
    if seen != list(blocks):
        raise ShardError(f"split: the blocks run in the order {', '.join(seen)}, not one after the other.")
    return _Calls(tuple(before), tuple(after), outputs, wrapped[0])


def _is_outer_leaf(name: str, module: nn.Module, blocks: Sequence[str]) -> bool:
    """Has parameters of its own, and is in no block."""
    outside = not any(name.startswith(f"{block}.") for block in blocks)
    return outside and next(module.parameters(recurse=False), None) is not None


def _tied(model: nn.Module, names: Sequence[str], others: Sequence[str]) -> str:
    """Which of the modules `names` has the parameter of one of `others`, if any: tied embeddings."""
    elsewhere = {id(p) for name in others for p in model.get_submodule(name).parameters()}
    found = [name for name in names if any(id(p) in elsewhere for p in model.get_submodule(name).parameters())]
    if len(found) > 1:
        raise ShardError(f"split: {' and '.join(found)} share parameters with the model's other end: expected one.")
    return found[0] if found else ""


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shallow(model: nn.Module) -> nn.Module:
    """Modules of its own around the same parameters and buffers: they can be exchanged without a trace in `model`."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo=dict(tensors))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, attribute = name.rpartition(".")
    parent = model.get_submodule(path)
    if isinstance(parent, (nn.ModuleList, nn.Sequential)):
        parent[int(attribute)] = module
    else:
        setattr(parent, attribute, module)
