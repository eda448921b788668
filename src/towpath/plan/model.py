"""A model as the planner knows it: its units, and what one rank computes and holds of them.

All sizes are per token of a sequence with a fixed length, because attention grows with the length. FLOPs count matrix
products, with two FLOPs per multiplication and addition. Attention counts in full, as is usual, although causal masks
hide half of its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from towpath.core.formats import Precision, item_bytes
from towpath.core.passes import balanced
from towpath.core.schedule import buffer_bytes, host_memory_bytes, memory_bytes
from towpath.core.unit_plan import UnitPlan
from towpath.core.units import LARGE_LEAF, BucketSpec, UnitSpec, together
from towpath.errors import ConfigError
from towpath.plan.hardware import Cluster, Hardware
from towpath.plan.replay import ComputeSeconds
from towpath.plan.request import Optimizer

# The backward pass multiplies each matrix twice: for the gradient of the weights and for that of the inputs.
_BACKWARD = 2


@dataclass(frozen=True, slots=True)
class LinearSeconds:
    """Seconds that grow linearly with the number of tokens."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        """Return the seconds for some number of tokens."""
        return self.fixed + self.per_token * tokens

    def plus(self, other: LinearSeconds, times: float = 1.0) -> LinearSeconds:
        """Return the sum of these seconds and of `times` the others."""
        return LinearSeconds(self.fixed + times * other.fixed, self.per_token + times * other.per_token)


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    """The measured seconds of a unit's passes on one rank, while nothing else ran.

    `share` is the part of these seconds in which the processor worked. During the rest, it waited for a device.
    """

    forward: LinearSeconds
    backward: LinearSeconds
    share: float = 1.0

    def scaled(self, share: float) -> MeasuredPasses:
        """Return a share of these seconds."""
        nothing = LinearSeconds(0.0, 0.0)
        return replace(self, forward=nothing.plus(self.forward, share), backward=nothing.plus(self.backward, share))

    def plus(self, other: MeasuredPasses) -> MeasuredPasses:
        """Return the sum of both."""
        return replace(self, forward=self.forward.plus(other.forward), backward=self.backward.plus(other.backward))


# The fields of a unit that add up over blocks, and those of which only the largest counts.
_SUMMED = ("flops", "kept", "entering", "kept_fp32", "kept_input", "kept_input_fp32")
_PEAKS = ("passing", "passing_fp32")


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """The parameters of a unit, and what it computes and keeps for one token."""

    spec: UnitSpec  # the parameters
    flops: float  # FLOPs of a forward pass
    kept: float  # elements in the compute dtype that autograd keeps for the backward pass
    # Elements of the input. Checkpointing keeps only these. For the root unit, this is what it keeps from before the
    # first block until the end of the backward pass.
    entering: float
    kept_fp32: float = 0.0  # elements that autograd keeps in fp32, whatever the compute dtype is
    kept_input: float = 0.0  # how many of `kept` are the input itself
    # How many of `kept_fp32` are the input itself if the unit computes in fp32, and a copy if not.
    kept_input_fp32: float = 0.0
    # Elements in the compute dtype that the backward pass needs at its peak, in addition to all that is kept. If the
    # unit has several blocks, this is for one of them.
    passing: float = 0.0
    passing_fp32: float = 0.0  # the same in fp32
    modules: int = 1  # number of blocks that run in the unit
    # Measured times. Without them, times follow from `flops`.
    measured: MeasuredPasses | None = None

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(sum(bucket.numels) for bucket in self.spec.buckets)

    @property
    def trainable(self) -> int:
        """Number of elements of trainable parameters."""
        return sum(sum(bucket.numels) for bucket in self.spec.buckets if bucket.trainable)

    def computing(self, share: float) -> ModelUnit:
        """Return a unit with the same parameters that computes and keeps only a share."""
        scaled = {name: share * getattr(self, name) for name in (*_SUMMED, *_PEAKS)}
        return replace(self, **scaled, measured=None if self.measured is None else self.measured.scaled(share))

    def combined_with(self, other: ModelUnit) -> ModelUnit:
        """Return a unit with the parameters of this one that computes and keeps what both do."""
        mine, theirs = self.measured, other.measured
        summed = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        peaks = {name: max(getattr(self, name), getattr(other, name)) for name in _PEAKS}
        return replace(self, **summed, **peaks, measured=None if mine is None or theirs is None else mine.plus(theirs))


@dataclass(frozen=True)
class Model:
    """A model, described by its units."""

    name: str  # its name
    length: int  # tokens of a sequence
    # Its units. The root unit comes first. Its arithmetic is that of the model's end (the output layer).
    units: tuple[ModelUnit, ...]

    @cached_property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def trainable(self) -> int:
        """Number of elements of trainable parameters."""
        return sum(unit.trainable for unit in self.units)

    @cached_property
    def flops(self) -> float:
        """FLOPs per token of both passes: three times the forward pass. Recomputed blocks do not count."""
        return 3 * sum(unit.flops for unit in self.units)


@dataclass(frozen=True)
class StagedModel:
    """A model that is split into the stages of a pipeline."""

    model: Model  # the unsplit model
    stages: tuple[Model, ...]  # the model of each stage
    width: int  # elements per token that one stage sends to the next
    # Elements of the embeddings that the first and the last stage share. Neither stage has them in its units.
    tied: int = 0


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a decoder or encoder with equal blocks.

    Args:
        vocabulary: Rows of the embedding.
        width: Elements of a token between two blocks.
        depth: Number of blocks.
        heads: Number of heads of queries.
        hidden: Width of the feed-forward part.
        kv_heads: Number of heads of keys and values. Default: as many as `heads`.
        tied: Whether the output layer shares the weights of the embedding.
        gated: Whether the feed-forward part has three matrices (Llama) in place of two (GPT).
        biases: Whether matrices and norms have biases.
        positions: Number of learned positions.
        head: Width of one head. Default: `width` divided by `heads`.
        head_norms: Whether queries and keys are normalized head by head (Qwen 3).
        norm_copies: Whether norms are written in plain PyTorch, as in transformers. Autograd then keeps for each norm
            a copy of its input in fp32, and its output before the weights.
    """

    vocabulary: int
    width: int
    depth: int
    heads: int
    hidden: int
    kv_heads: int = 0
    tied: bool = True
    gated: bool = False
    biases: bool = True
    positions: int = 0
    head: int = 0
    head_norms: bool = False
    norm_copies: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "depth", "heads", "hidden"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"model: {name} = {value!r}: expected a whole number of at least 1.")
        if self.width % self.heads and not self.head:
            raise ConfigError(f"model: width = {self.width}: expected a multiple of heads = {self.heads}.")

    def model(self, name: str, length: int) -> Model:
        """Return the model with this shape.

        Its small blocks are combined into units, as `shard()` does.
        """
        if type(length) is not int or length < 1:
            raise ConfigError(f"model: length = {length!r}: expected a whole number of at least 1.")
        block = self._block(length)
        units = [_combined(block, batch) for batch in together([block.numel] * self.depth)]
        return Model(name, length, self._with_ends(units))

    def staged(self, name: str, length: int, count: int) -> StagedModel:
        """Return the model in stages of about equally many parameters, as `towpath.pipeline.split` makes them."""
        model, block = self.model(name, length), self._block(length)
        if not 0 < count <= self.depth:
            raise ConfigError(f"{count} stages of a model that has {self.depth} blocks. Expected as many at most.")
        weights = [block.numel] * self.depth
        weights[0] += self.vocabulary * self.width + self.width * self.positions
        weights[-1] += self.vocabulary * self.width + self.width
        stages: list[Model] = []
        for number, (start, end) in enumerate(balanced(weights, count)):
            batches = together([block.numel] * (end - start))
            blocks = [_combined(block, [start + i for i in batch]) for batch in batches]
            units = self._with_ends(blocks, number == 0, number == count - 1, of_stage=True)
            stages.append(Model(f"{name}, stage {number}", length, units))
        return StagedModel(model, tuple(stages), self.width, self.vocabulary * self.width if self.tied else 0)

    @property
    def _query_width(self) -> int:
        """Width of the queries, and of the output of attention."""
        return self.heads * self.head if self.head else self.width

    @property
    def _key_width(self) -> int:
        """Width of the keys, and of the values. Several heads may share them."""
        return self._query_width * (self.kv_heads or self.heads) // self.heads

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes of a block's matrices: four of the attention, and those of the feed-forward part."""
        query, key = self._query_width, self._key_width
        attention = [(self.width, query), (self.width, key), (self.width, key), (query, self.width)]
        feed = [(self.width, self.hidden)] * (2 if self.gated else 1) + [(self.hidden, self.width)]
        return attention + feed

    def attention_flops(self, length: int) -> int:
        """Return the FLOPs per token and block of the attention scores and of their product with the values."""
        return 4 * length * self._query_width

    def _block(self, length: int) -> ModelUnit:
        matrices = self.matrices
        query, key = self._query_width, self._key_width
        numels = [prod(shape) for shape in matrices]
        numels += [out for _, out in matrices] if self.biases else []
        numels += [self.width] * (4 if self.biases else 2)
        numels += [query // self.heads] * 2 if self.head_norms else []
        # What norms, projections, activation functions and attention read again. Attention recomputes its scores.
        kept = 4 * self.width + 2 * query + 2 * key
        kept += self.hidden * (4 if self.gated else 2)
        kept_fp32 = self.heads + 2  # one number for each head of attention, and one for each norm
        if self.head_norms:
            kept += query + key
            kept_fp32 += self.heads + (self.kv_heads or self.heads)
        if self.norm_copies:
            kept_fp32 += 2 * self.width + (query + key if self.head_norms else 0)
        return ModelUnit(
            UnitSpec("block", (_bucket(numels, matrices),)),
            2 * sum(map(prod, matrices)) + self.attention_flops(length),
            kept,
            self.width,
            kept_fp32=kept_fp32,
            kept_input=0 if self.norm_copies else self.width,
            kept_input_fp32=self.width if self.norm_copies else 0,
            # The gradient of the block's output, and those of the inputs of the last matrix of the feed-forward part.
            passing=self.width + self.hidden * (2 if self.gated else 1),
        )

    def _with_ends(
        self, blocks: Sequence[ModelUnit], first: bool = True, last: bool = True, *, of_stage: bool = False
    ) -> tuple[ModelUnit, ...]:
        """Return the units of a model, or of a stage: the root, and the leaves around the blocks.

        `first` and `last` say whether the model's beginning and its end are in it. Embeddings that two stages share
        are in neither of them.
        """
        table, positions = (self.vocabulary, self.width), (self.positions, self.width)
        before = [("embedding", table)] if first and not (self.tied and of_stage) else []
        before += [("positions", positions)] if first and self.positions else []
        after = [("head", table)] if last and not self.tied else []
        tied = {"embedding"} if self.tied else set[str]()
        leaves = {n: shape for n, shape in (*before, *after) if prod(shape) >= LARGE_LEAF and n not in tied}
        small = [shape for n, shape in (*before, *after) if n not in leaves]
        numels = [*map(prod, small), *([self.width] * (2 if self.biases else 1) if last else [])]
        spec = UnitSpec("", (_bucket(numels, small),) if numels else (), root=True)
        root = ModelUnit(spec, 0.0, 2 * self.width if first else 0.0, 0)
        if last:
            root = ModelUnit(
                spec,
                0.0 if "head" in leaves else 2.0 * self.vocabulary * self.width,
                # The inputs of the last norm and of the output layer. Logits are released once there is a loss.
                (1 if "head" in leaves else 2) * self.width,
                0,
                kept_fp32=self.vocabulary + (self.width if self.norm_copies else 0),  # the loss
                passing_fp32=2 * self.vocabulary,  # its gradient, before and after the softmax
            )
        return (
            root,
            *(self._leaf(n, leaves[n]) for n, _ in before if n in leaves),
            *blocks,
            *(self._leaf(n, leaves[n]) for n, _ in after if n in leaves),
        )

    def _leaf(self, name: str, shape: tuple[int, int]) -> ModelUnit:
        """Return an embedding, or the output layer with the name "head", as a unit of its own."""
        spec = UnitSpec(name, (_bucket([prod(shape)], [shape]),), leaf=True, lookup=name != "head")
        if spec.lookup:
            return ModelUnit(spec, 0.0, 0.0, 0.0)
        return ModelUnit(spec, 2.0 * prod(shape), self.width, self.width, kept_input=self.width)


def _bucket(numels: Sequence[int], matrices: Sequence[tuple[int, int]]) -> BucketSpec:
    """Return a bucket whose first parameters are the matrices."""
    return BucketSpec(tuple(numels), matrices=(*matrices, *[None] * (len(numels) - len(matrices))))


def _combined(block: ModelUnit, batch: Sequence[int]) -> ModelUnit:
    """Return a unit of several neighboring blocks, as `shard()` combines small ones."""
    first, last, count = batch[0], batch[-1], len(batch)
    label = f"blocks.{first}" if first == last else f"blocks.{first}..blocks.{last}"
    (bucket,) = block.spec.buckets
    spec = UnitSpec(label, (replace(bucket, numels=bucket.numels * count, matrices=bucket.matrices * count),))
    several = block.computing(count)
    return replace(several, spec=spec, passing=block.passing, passing_fp32=block.passing_fp32, modules=count)


# What a rank computes ------------------------------------------------------------------------------------------------


def compute_seconds(model: Model, cluster: Cluster, dtype: str, tokens: int, checkpointing: bool) -> ComputeSeconds:
    """Return the seconds that one rank computes in a micro-step if nothing else runs, without the optimizer."""
    passes: list[tuple[float, float]] = []
    took = worked = 0.0  # the measured seconds, and those of the processor
    for unit in model.units:
        if unit.measured is None:
            forward = unit.flops * tokens / cluster.flops_of(dtype)
            backward = _BACKWARD * forward
        else:
            forward, backward = unit.measured.forward.at(tokens), unit.measured.backward.at(tokens)
            took += forward + backward
            worked += unit.measured.share * (forward + backward)
        passes.append((forward, backward))
    (root_forward, root_backward), *others = passes
    # Checkpointing adds one more forward pass of each block.
    again = [checkpointing * (not unit.spec.leaf) for unit in model.units[1:]]
    return ComputeSeconds(
        forward=(0.0, *(forward for forward, _ in others)),
        backward=(root_backward, *(b + times * f for times, (f, b) in zip(again, others, strict=True))),
        forward_end=root_forward,
        backward_end=0.0,
        share=worked / took if took else 1.0,
    )


def optimizer_seconds(
    elements: float, own: str, optimizer: Optimizer, hardware: Hardware, on_host: bool = False
) -> float:
    """Return the seconds of the optimizer's step on one rank: those of its memory traffic."""
    moved = elements * (optimizer.moved_bytes(own) + item_bytes(own))  # the norm reads the gradients once more
    rate = hardware.offloading.memory_rate if on_host else hardware.memory_rate
    return moved / (2 * rate)  # a copy reads and writes


# What a rank holds ---------------------------------------------------------------------------------------------------


def engine_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of states and of the engine's buffers on the device, by part, without activations."""
    return memory_bytes(plans) | {"optimizer": _optimizer_bytes(plans, optimizer, False)} | buffer_bytes(plans)


def host_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes in the host's memory, by part. There are none unless the strategy offloads."""
    held = host_memory_bytes(plans)
    return held | ({"optimizer": _optimizer_bytes(plans, optimizer, True)} if "master" in held else {})


def _optimizer_bytes(plans: Sequence[UnitPlan], optimizer: Optimizer, on_host: bool) -> int:
    return sum(
        b.numel // b.optimizer.count * item_bytes(b.own_dtype) * optimizer.states
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable and b.optimizer_on_host == on_host
    )


def activation_bytes(model: Model, precision: Precision, tokens: int, checkpointing: bool) -> int:
    """Return the peak of activations in a micro-step of `tokens` tokens.

    The peak is either at the start of the backward pass, or in the backward pass of a unit. At the start, there are
    all kept activations and the gradient of the loss. Later, those of the root's end and of later units are released.
    With `checkpointing`, blocks are recomputed one at a time.
    """
    root, *others = [_TokenBytes.of(unit, precision) for unit in model.units]
    peak = root.kept + sum(unit.stays(checkpointing) for unit in others) + root.passing
    before = root.entering
    for unit in others:
        before += unit.stays(checkpointing)
        peak = max(peak, before + unit.passing + (unit.recomputed if checkpointing else 0.0))
    return round(tokens * peak)


def kept_bytes(model: Model, precision: Precision, tokens: int, checkpointing: bool) -> int:
    """Return the activations that a micro-step keeps between its forward and its backward pass, as in a pipeline."""
    root, *others = [_TokenBytes.of(unit, precision) for unit in model.units]
    return round(tokens * (root.kept + sum(unit.stays(checkpointing) for unit in others)))


@dataclass(frozen=True, slots=True)
class _TokenBytes:
    """The activations of a unit in bytes per token. `recomputed` is for one block, without its input."""

    entering: float
    kept: float
    recomputed: float
    passing: float

    def stays(self, checkpointing: bool) -> float:
        return self.entering if checkpointing else self.kept

    @staticmethod
    def of(unit: ModelUnit, precision: Precision) -> _TokenBytes:
        dtype = precision.compute_dtype(unit.spec.buckets[0].dtype if unit.spec.buckets else "float32")
        item = item_bytes(dtype)
        kept = unit.kept * item + 4 * unit.kept_fp32
        kept_input = unit.kept_input * item + (4 * unit.kept_input_fp32 if dtype == "float32" else 0.0)
        recomputed = (kept - kept_input) / unit.modules
        return _TokenBytes(unit.entering * item, kept, recomputed, unit.passing * item + 4 * unit.passing_fp32)
