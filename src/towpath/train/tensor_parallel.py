"""Tensor parallelism: the ranks of a node share the layers of a model as in Megatron.

The first layers of each half of a block are cut by columns and its last layer by rows, so each pass of a half needs one
all-reduce. The embedding and the output layer are cut by the words of the vocabulary where the ranks divide it.
Everything else, such as norms, is replicated on every rank.
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

# The styles of transformers. WHOLE_OUTPUT: cut by columns, and every rank gets the whole output. EACH_HEAD: replicated,
# but each rank applies it to its own heads only.
COLUMNS, ROWS, WHOLE_OUTPUT = "colwise", "rowwise", "colwise_gather_output"
WORDS, EACH_HEAD = "embedding_rowwise", "replicated_with_grad_allreduce"

# The type of layer that each style applies to, and the attribute that the ranks must divide.
_LAYERS: dict[str, tuple[type[nn.Module], str]] = {
    COLUMNS: (nn.Linear, "out_features"),
    WHOLE_OUTPUT: (nn.Linear, "out_features"),
    ROWS: (nn.Linear, "in_features"),
    WORDS: (nn.Embedding, "num_embeddings"),
    EACH_HEAD: (nn.Module, ""),
}
_HEADS_DIM = 2  # of queries and keys, [batch, length, heads, head width]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How ranks share the layers of a model."""

    styles: Mapping[str, str]  # the style of each layer by its name, in which * stands for the number of a block
    ends: Mapping[str, str] = field(default_factory=dict[str, str])  # the styles of the embedding and the output layer
    heads: Sequence[int] = ()  # the numbers of heads of each kind, which the ranks must divide

    def layers_of(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield name, module and style of each shared layer. `model` may be a stage, which lacks some of them."""
        yield from (*_layers_in(model, self.styles), *_layers_in(model, self.ends))


def _layers_in(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        style = _style_of(name, styles)
        if style is not None and next(module.parameters(recurse=False), None) is not None:
            yield name, module, style


def _style_of(name: str, styles: Mapping[str, str]) -> str | None:
    return styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def plan_for(model: nn.Module, plan: TensorPlan, ranks: int) -> TensorPlan:
    """Return the plan for a number of ranks, without the ends that these ranks cannot share.

    It raises ConfigError if they cannot share the blocks.
    """
    prefix = f"parallel.tensor = {ranks}:"
    if not any(_layers_in(model, plan.styles)):
        raise ConfigError(
            f"{prefix} {type(model).__name__} does not say how ranks share its layers: its configuration has no "
            "base_model_tp_plan, or one of other layers."
        )
    for count in plan.heads:
        if count % ranks:
            raise ConfigError(f"{prefix} expected a divisor of the model's {count} attention heads or key-value heads.")
    # With a padding index, DTensor would take the index for one of a rank's own words.
    ends: list[Any] = [layer for _, layer, _ in _layers_in(model, plan.ends)]
    if any(end.weight.shape[0] % ranks or getattr(end, "padding_idx", None) is not None for end in ends):
        plan = replace(plan, ends={})
    parameters = ((name, p, _style_of(name, plan.styles)) for name, p in model.named_parameters())
    for name, layer, style in (*plan.layers_of(model), *(each for each in parameters if each[2])):
        if style not in _LAYERS:
            raise ConfigError(f"{prefix} {name} is to be shared as {style!r}, which is not supported.")
        kind, attribute = _LAYERS[style]
        if kind is not nn.Module and not isinstance(layer, kind):
            raise ConfigError(f"{prefix} {name} is a {type(layer).__name__}: expected a {kind.__name__} to share.")
        if attribute and (size := getattr(layer, attribute)) % ranks:
            raise ConfigError(f"{prefix} {name} has {attribute} = {size}: expected a multiple of {ranks}.")
    return plan


def share_layers(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> nn.Module:
    """Let every rank of `mesh` keep its part of each shared layer of `model`, which may be a stage. Return `model`."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    parallel_styles = {
        COLUMNS: ColwiseParallel(),
        WHOLE_OUTPUT: ColwiseParallel(output_layouts=Replicate()),
        ROWS: RowwiseParallel(),
        WORDS: RowwiseParallel(input_layouts=Replicate()),
        EACH_HEAD: SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
    }
    layers = list(plan.layers_of(model))
    weights = {name: layer.weight for name, layer, _ in layers}
    for name, layer, style in layers:
        if style == EACH_HEAD:
            layer.register_forward_pre_hook(partial(_check_heads, name))
        parallelize_module(layer, mesh, parallel_styles[style])
    first: dict[int, nn.Module] = {}
    for name, layer, _ in layers:  # tied weights stay tied
        layer.weight = first.setdefault(id(weights[name]), layer).weight
    readers = Counter(name.rpartition(".")[0] for name, _, style in layers if style == COLUMNS)
    for name, count in readers.items():
        if count > 1:
            model.get_submodule(name).register_forward_pre_hook(partial(_replicate_input, mesh), with_kwargs=True)
    return model


def _check_heads(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    # With another shape, DTensor would take another dimension for the heads.
    if args[0].dim() != _HEADS_DIM + 2:
        raise StepError(
            f"{name}: its input has {args[0].dim()} dimensions; expected [batch, length, heads, head width]. Its ranks "
            "cannot share this model: leave out parallel.tensor."
        )


def _replicate_input(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the input one DTensor for all layers that read it.

    Their gradients of the input are then added up, and reduced over the ranks once. Otherwise each layer would reduce
    its own.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def replicated(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    if args:
        return (replicated(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: replicated(kwargs[name])}
