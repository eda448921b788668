"""The layers of a model, shared among tensor-parallel ranks as Megatron does it.

blocks        what comes first in each half of a block by columns, what ends it by rows: one sum over the ranks in each
              pass of a half
ends          the embedding and the output layer by the words of the vocabulary, where these divide
all else      norms, say, is whole on every rank
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from towpath.errors import ConfigError, StepError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# How a layer is shared, in transformers' words. WHOLE_OUTPUT: by columns, and every rank gets all that comes out;
# EACH_HEAD: whole on every rank, but applied to its own heads only.
COLUMNS, ROWS, WHOLE_OUTPUT = "colwise", "rowwise", "colwise_gather_output"
WORDS, EACH_HEAD = "embedding_rowwise", "replicated_with_grad_allreduce"

_HEADS_DIM = 2  # of queries and keys, [batch, length, heads, head width]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """`styles`: by a layer's name, where * stands for the number of a block. `ends`: the same of the embedding and of
    the output layer. `heads`: how many of each kind there are, of which every rank gets as many."""

    styles: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=dict[str, str])
    heads: Sequence[int] = ()

    def layers_of(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        """Name, module and style of what ranks share. `model` may be a stage, which has stand-ins for some of them."""
        yield from (*_named(model, self.styles), *_named(model, self.ends))


def _named(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        style = _style_of(name, styles)
        if style is not None and next(module.parameters(recurse=False), None) is not None:
            yield name, module, style


def _style_of(name: str, styles: Mapping[str, str]) -> str | None:
    return styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def plan_for(model: nn.Module, plan: TensorPlan | None, ranks: int) -> TensorPlan:
    """For so many ranks: without ends that these cannot share; or why they cannot share the blocks."""
    said = f"parallel.tensor = {ranks}:"
    if plan is None or not any(_named(model, plan.styles)):
        raise ConfigError(
            f"{said} {type(model).__name__} does not say how ranks share its layers: its configuration has no "
            "base_model_tp_plan, or one of other layers."
        )
    for count in plan.heads:
        if count % ranks:
            raise ConfigError(f"{said} expected a divisor of the model's {count} attention heads or key-value heads.")
    if not all(_can_share(layer, ranks) for _, layer, _ in _named(model, plan.ends)):
        plan = replace(plan, ends={})
    by_themselves = ((name, p, _style_of(name, plan.styles)) for name, p in model.named_parameters())
    told = [*plan.layers_of(model), *(each for each in by_themselves if each[2])]
    for name, layer, style in told:
        if style not in _SHARED:
            raise ConfigError(f"{said} {name} is to be shared as {style!r}, which is not supported.")
        kind, attribute = _SHARED[style]
        if kind is not nn.Module and not isinstance(layer, kind):
            raise ConfigError(f"{said} {name} is a {type(layer).__name__}: expected a {kind.__name__} to share.")
        if attribute and (size := getattr(layer, attribute)) % ranks:
            raise ConfigError(f"{said} {name} has {attribute} = {size}: expected a multiple of {ranks}.")
    return plan


# What a style is of, and what of it the ranks have to divide.
_SHARED: dict[str, tuple[type[nn.Module], str]] = {
    COLUMNS: (nn.Linear, "out_features"),
    WHOLE_OUTPUT: (nn.Linear, "out_features"),
    ROWS: (nn.Linear, "in_features"),
    WORDS: (nn.Embedding, "num_embeddings"),
    EACH_HEAD: (nn.Module, ""),
}


def _can_share(end: Any, ranks: int) -> bool:
    """DTensor would take the padding's number for one of a rank's own words."""
    return end.weight.shape[0] % ranks == 0 and getattr(end, "padding_idx", None) is None


def share_layers(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> nn.Module:
    """Every rank of `mesh` keeps its part of each layer of `model`, the whole one or a stage. Returns `model`."""
    from torch.distributed.tensor.parallel import parallelize_module

    layers = list(plan.layers_of(model))
    weights = {name: layer.weight for name, layer, _ in layers}
    for name, layer, style in layers:
        if style == EACH_HEAD:
            layer.register_forward_pre_hook(partial(_check_heads, name))
        parallelize_module(layer, mesh, _parallel_style(style))
    first: dict[int, nn.Module] = {}
    for name, layer, _ in layers:  # what was tied stays so
        layer.weight = first.setdefault(id(weights[name]), layer).weight
    readers = Counter(name.rpartition(".")[0] for name, _, style in layers if style == COLUMNS)
    for name, count in readers.items():
        if count > 1:
            model.get_submodule(name).register_forward_pre_hook(partial(_whole_input, mesh), with_kwargs=True)
    return model


def _parallel_style(style: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    match style:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise":
            return RowwiseParallel()
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case _:
            return SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)


def _check_heads(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Of other shapes DTensor would take another dimension for the heads."""
    if args[0].dim() != _HEADS_DIM + 2:
        raise StepError(
            f"{name}: its input has {args[0].dim()} dimensions; expected [batch, length, heads, head width]. Its ranks "
            "cannot share this model: leave out parallel.tensor."
        )


def _whole_input(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One DTensor for all layers that read it: their gradients of it are added up, and then summed over the ranks once.
    Each layer for itself would sum its own."""
    from torch.distributed.tensor import DTensor, Replicate

    def whole(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    if args:
        return (whole(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: whole(kwargs[name])}
