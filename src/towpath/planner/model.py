"""A model as the planner knows it: units, and of each its parameters, its arithmetic, and what autograd keeps of it.

Per token of a sequence of a given length: attention grows with it. FLOPs are those of matrix products, two for each
multiplication and addition; attention's count whole, as everybody counts them, though half of them are masked.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from towpath.core.pipeline import balanced
from towpath.core.units import BucketSpec, UnitSpec, together
from towpath.errors import ConfigError
from towpath.planner.named_models import nearest, published, published_names, words_of


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds that grow with the number of tokens."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def times(self, share: float) -> Line:
        return Line(share * self.fixed, share * self.per_token)

    def plus(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.per_token + other.per_token)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank took for a unit's passes, while nothing else went on. `share`: of those seconds, in which its
    processor worked; the rest it waited for something else that computes."""

    forward: Line
    backward: Line
    share: float = 1.0

    def times(self, share: float) -> Measured:
        return replace(self, forward=self.forward.times(share), backward=self.backward.times(share))

    def plus(self, other: Measured) -> Measured:
        return replace(self, forward=self.forward.plus(other.forward), backward=self.backward.plus(other.backward))


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters of a unit, and what it computes and keeps for one token.

    Args:
        spec: Its parameters.
        flops: FLOPs of a forward pass.
        kept: Elements in the compute dtype that autograd keeps for the backward pass.
        entering: Elements of the input, which is all that checkpointing keeps. Of the root: what it keeps from before
            the first block, until the backward pass ends.
        kept_fp32: Elements that autograd keeps in fp32, whatever the compute dtype is.
        kept_input: How many of `kept` are the input itself.
        kept_input_fp32: How many of `kept_fp32` are the input itself if the unit computes in fp32, and a copy if not.
        passing: Elements in the compute dtype that the backward pass needs at its peak, beside all that is kept. Of
            one block, if the unit has several.
        passing_fp32: The same in fp32.
        modules: How many blocks run in the unit.
        measured: Measured times. Without them, times follow from `flops`.
    """

    spec: UnitSpec
    flops: float
    kept: float
    entering: float
    kept_fp32: float = 0.0
    kept_input: float = 0.0
    kept_input_fp32: float = 0.0
    passing: float = 0.0
    passing_fp32: float = 0.0
    modules: int = 1
    measured: Measured | None = None

    @property
    def numel(self) -> int:
        return sum(sum(bucket.numels) for bucket in self.spec.buckets)

    @property
    def trainable(self) -> int:
        """Elements of what trains."""
        return sum(sum(bucket.numels) for bucket in self.spec.buckets if bucket.trainable)

    def computing(self, share: float) -> Unit:
        """The same parameters, but only a share of what is computed and kept."""
        return replace(
            self,
            flops=share * self.flops,
            kept=share * self.kept,
            entering=share * self.entering,
            kept_fp32=share * self.kept_fp32,
            kept_input=share * self.kept_input,
            kept_input_fp32=share * self.kept_input_fp32,
            passing=share * self.passing,
            passing_fp32=share * self.passing_fp32,
            measured=None if self.measured is None else self.measured.times(share),
        )

    def beside(self, other: Unit) -> Unit:
        """What both compute and keep; the parameters of the first."""
        mine, theirs = self.measured, other.measured
        return replace(
            self,
            flops=self.flops + other.flops,
            kept=self.kept + other.kept,
            entering=self.entering + other.entering,
            kept_fp32=self.kept_fp32 + other.kept_fp32,
            kept_input=self.kept_input + other.kept_input,
            kept_input_fp32=self.kept_input_fp32 + other.kept_input_fp32,
            passing=max(self.passing, other.passing),
            passing_fp32=max(self.passing_fp32, other.passing_fp32),
            measured=None if mine is None or theirs is None else mine.plus(theirs),
        )


@dataclass(frozen=True)
class Model:
    """`units`: the root's first, whose arithmetic is that of the model's end (the output layer)."""

    name: str
    length: int
    units: tuple[Unit, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(unit.numel for unit in self.units)

    @cached_property
    def trainable(self) -> int:
        """Elements of what trains."""
        return sum(sum(b.numels) for unit in self.units for b in unit.spec.buckets if b.trainable)

    @cached_property
    def trainable_parameters(self) -> int:
        """How many there are, whatever their sizes."""
        return sum(len(b.numels) for unit in self.units for b in unit.spec.buckets if b.trainable)

    @cached_property
    def flops(self) -> float:
        """Of a token, forward and backward: three times the forward pass's. What is recomputed does not count."""
        return 3 * sum(unit.flops for unit in self.units)


@dataclass(frozen=True)
class StagedModel:
    """A model cut into the stages of a pipeline. `width`: elements of a token that one hands to the next; `tied`:
    elements of the embeddings that the first and the last share, and that neither counts among its own."""

    whole: Model
    stages: tuple[Model, ...]
    width: int
    tied: int = 0


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a decoder or encoder of like blocks.

    Args:
        vocabulary: Rows of the embedding.
        width: Elements of a token between two blocks.
        depth: Number of blocks.
        heads: Attention heads that ask.
        hidden: Width of the feed-forward part.
        kv_heads: Heads of keys and values. Default: as many as `heads`.
        tied: The output layer shares the embedding's weights.
        gated: The feed-forward part has three matrices (Llama), not two (GPT).
        biases: Matrices and norms have biases.
        positions: Number of learned positions.
        head: Width of one head. Default: `width` divided by `heads`.
        head_norms: Queries and keys are normalized head by head (Qwen 3).
        norm_copies: Norms are written in plain PyTorch, as in transformers, so that autograd keeps of each a copy of
            its input in fp32, and what it has before the weights.
    """

    vocabulary: int
    width: int
    depth: int
    heads: int
    hidden: int
    kv_heads: int = 0  # 0: as many as heads
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
        if type(length) is not int or length < 1:
            raise ConfigError(f"model: length = {length!r}: expected a whole number of at least 1.")
        block = self._block(length)
        numel = sum(block.spec.buckets[0].numels)
        units = [self._root()]
        for batch in together([numel] * self.depth):
            units.append(_several(block, "blocks", batch))
        return Model(name, length, tuple(units))

    def staged(self, name: str, length: int, count: int) -> StagedModel:
        """Of about as many parameters each, as `towpath.pipeline.split` cuts it."""
        whole, block = self.model(name, length), self._block(length)
        if not 0 < count <= self.depth:
            raise ConfigError(f"{count} stages of a model that has {self.depth} blocks. Expected as many at most.")
        ends = self._ends()
        weights = [sum(block.spec.buckets[0].numels)] * self.depth
        weights[0] += self.vocabulary * self.width + self.width * self.positions
        weights[-1] += self.vocabulary * self.width + self.width
        stages: list[Model] = []
        for number, (start, end) in enumerate(balanced(weights, count)):
            root = ends[0] if number == 0 else ends[2] if number == count - 1 else ends[1]
            batches = together([block.numel] * (end - start))
            blocks = [_several(block, "blocks", [start + i for i in batch]) for batch in batches]
            stages.append(Model(f"{name}, stage {number}", length, (root, *blocks)))
        return StagedModel(whole, tuple(stages), self.width, self.vocabulary * self.width if self.tied else 0)

    def _ends(self) -> tuple[Unit, Unit, Unit]:
        """The root of the first stage, of those between, and of the last one. Tied embeddings are left out of both."""
        root = self._root()
        table = [] if self.tied else [(self.vocabulary, self.width)]
        positions = [(self.positions, self.width)] if self.positions else []
        norms = [self.width] * (2 if self.biases else 1)

        def of(matrices: list[tuple[int, int]], others: list[int]) -> UnitSpec:
            numels = [*map(prod, matrices), *others]
            return UnitSpec("", (_bucket(numels, matrices),) if numels else (), kept=True)

        first = Unit(of([*table, *positions], []), 0.0, 2 * self.width, 0)
        return first, Unit(of([], []), 0.0, 0.0, 0), replace(root, spec=of(table, norms))

    @property
    def _asking(self) -> int:
        """Width of queries, and of what attention gives."""
        return self.heads * self.head if self.head else self.width

    @property
    def _shared(self) -> int:
        """Width of keys, and of values: several heads may share them."""
        return self._asking * (self.kv_heads or self.heads) // self.heads

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Of a block: the attention's four, and those of the feed-forward part."""
        asking, shared = self._asking, self._shared
        attention = [(self.width, asking), (self.width, shared), (self.width, shared), (asking, self.width)]
        feed = [(self.width, self.hidden)] * (2 if self.gated else 1) + [(self.hidden, self.width)]
        return attention + feed

    def attention_flops(self, length: int) -> int:
        """Of a token in a block: its scores, and their product with the values."""
        return 4 * length * self._asking

    def _block(self, length: int) -> Unit:
        matrices = self.matrices
        asking, shared = self._asking, self._shared
        numels = [prod(shape) for shape in matrices]
        numels += [out for _, out in matrices] if self.biases else []
        numels += [self.width] * (4 if self.biases else 2)
        numels += [asking // self.heads] * 2 if self.head_norms else []
        # What the norms, projections, attention (which recomputes its scores) and activation functions read again.
        kept = 4 * self.width + 2 * asking + 2 * shared
        kept += self.hidden * (4 if self.gated else 2)
        kept_fp32 = self.heads + 2  # of attention one number for each head, of each norm one
        if self.head_norms:
            kept += asking + shared
            kept_fp32 += self.heads + (self.kv_heads or self.heads)
        if self.norm_copies:
            kept_fp32 += 2 * self.width + (asking + shared if self.head_norms else 0)
        return Unit(
            UnitSpec("block", (_bucket(numels, matrices),)),
            2 * sum(map(prod, matrices)) + self.attention_flops(length),
            kept,
            self.width,
            kept_fp32=kept_fp32,
            kept_input=0 if self.norm_copies else self.width,
            kept_input_fp32=self.width if self.norm_copies else 0,
            # The gradient of the block's output, and in the feed-forward part those of what the last matrix reads.
            passing=self.width + self.hidden * (2 if self.gated else 1),
        )

    def _root(self) -> Unit:
        matrices = [(self.vocabulary, self.width)] * (1 if self.tied else 2)
        matrices += [(self.positions, self.width)] if self.positions else []
        numels = [*map(prod, matrices), *[self.width] * (2 if self.biases else 1)]
        return Unit(
            UnitSpec("", (_bucket(numels, matrices),), kept=True),
            2.0 * self.vocabulary * self.width,
            2 * self.width,  # of the last norm; nobody keeps the logits, once there is a loss
            0,
            kept_fp32=self.vocabulary + (self.width if self.norm_copies else 0),  # the loss
            passing_fp32=2 * self.vocabulary,  # its gradient, before and after the softmax
        )


def _bucket(numels: Sequence[int], matrices: Sequence[tuple[int, int]]) -> BucketSpec:
    """`matrices`: those come first."""
    return BucketSpec(tuple(numels), matrices=(*matrices, *[None] * (len(numels) - len(matrices))))


def _several(block: Unit, name: str, batch: list[int]) -> Unit:
    """Small neighbours travel together, as `shard()` joins them."""
    first, last = batch[0], batch[-1]
    label = f"{name}.{first}" if first == last else f"{name}.{first}..{name}.{last}"
    count = len(batch)
    (bucket,) = block.spec.buckets
    spec = UnitSpec(label, (replace(bucket, numels=bucket.numels * count, matrices=bucket.matrices * count),))
    several = block.computing(count)
    return replace(several, spec=spec, passing=block.passing, passing_fp32=block.passing_fp32, modules=count)


def _llama(width: int, depth: int, heads: int, hidden: int, vocabulary: int = 32000) -> Transformer:
    return Transformer(vocabulary, width, depth, heads, hidden, tied=False, gated=True, biases=False)


def _gpt(width: int, depth: int, heads: int, vocabulary: int = 51200, positions: int = 1024) -> Transformer:
    return Transformer(vocabulary, width, depth, heads, 4 * width, positions=positions)


def _bert(width: int, depth: int, heads: int = 40) -> Transformer:
    return Transformer(32008, width, depth, heads, 4 * width, positions=512)


# The models of the papers, and the length of their sequences there. Of ZeRO++ only sizes are printed; its shapes are
# the usual ones of that size.
MODELS: dict[str, tuple[Transformer, int]] = {
    "llama-7b": (_llama(4096, 32, 32, 11008), 4096),
    "llama-13b": (_llama(5120, 40, 40, 13824), 4096),
    "llama-30b": (_llama(6656, 60, 52, 17920), 4096),
    "llama-65b": (_llama(8192, 80, 64, 22016), 4096),
    "bert-10b": (_bert(2560, 127), 512),
    "bert-15b": (_bert(2560, 190), 512),
    "bert-20b": (_bert(5120, 64), 512),
    "bert-50b": (_bert(8192, 62, heads=64), 512),  # 40 are printed, which do not divide it
    "gpt-2.5b": (_gpt(1920, 52, 20), 1024),
    "gpt-8.3b": (_gpt(3072, 72, 24), 1024),
    "gpt-9.2b": (_gpt(3072, 80, 24), 1024),
    "gpt-18b": (_gpt(6144, 40, 48, positions=2048), 2048),
    "gpt-100b": (_gpt(12288, 55, 96, positions=2048), 2048),
    "gpt-138b": (_gpt(12288, 76, 96, positions=2048), 2048),
}

_EXPECTED = "a name, a Hugging Face config.json or its folder, or a .toml file"


def describe(what: str | Path, length: int | None = None) -> Model:
    """From a short name, a `config.json` of transformers (or its folder), or a TOML file of a `Transformer`'s fields.

    `length`: of a sequence, in tokens.
    """
    shape, name, length = shape_of(what, length)
    return shape.model(name, length)


def shape_of(what: str | Path, length: int | None = None) -> tuple[Transformer, str, int]:
    """As `describe`: and what it is called, and how long its sequences are."""
    path = Path(what, "config.json") if Path(what).is_dir() else Path(what)
    if path.suffix not in (".json", ".toml"):
        return _named(str(what), length)
    if not path.is_file():
        raise ConfigError(f"model {str(what)!r}: there is no file {path}. Expected {_EXPECTED}.")
    try:
        text = path.read_text(encoding="utf-8")
        table: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}.") from None
    usual = table.pop("length", None) if path.suffix == ".toml" else None
    shape = _from_config(table, path) if path.suffix == ".json" else _from_table(table, path)
    length = length or usual or shape.positions or table.get("max_position_embeddings")
    if not length:
        raise ConfigError(f"model: {path} does not say how long its sequences are: pass length=, or --length.")
    return shape, path.stem if path.suffix == ".toml" else path.parent.name or "model", length


def _named(what: str, length: int | None) -> tuple[Transformer, str, int]:
    of_papers = {name: words_of(name) for name in MODELS}
    found = next((name for name, words in of_papers.items() if words == words_of(what)), None)
    if found is not None:
        shape, usual = MODELS[found]
        return shape, found, length or usual
    if (model := published(what)) is not None:
        return Transformer(**model.fields), model.name, length or model.length
    known = [*MODELS, *published_names()]
    if what.startswith(("/", ".", "~")) or what.count("/") > 1:
        raise ConfigError(f"model {what!r}: there is no such file or folder. Expected {_EXPECTED}.")
    raise ConfigError(
        f"model {what!r}: expected a name ({', '.join(known)}), a Hugging Face config.json or its folder, or a .toml "
        f"file. Did you mean {nearest(what, known)!r}?"
    )


def _from_table(table: Mapping[str, Any], path: Path) -> Transformer:
    known = {f.name: f for f in fields(Transformer)}
    if unknown := set(table) - set(known):
        raise ConfigError(f"model: {path}: unknown key {sorted(unknown)[0]!r}; it takes length, {', '.join(known)}.")
    for name in ("vocabulary", "width", "depth", "heads", "hidden"):
        if name not in table:
            raise ConfigError(f"model: {path}: {name} is missing; expected a whole number of at least 1.")
    return Transformer(**table)


# What each kind of model calls the same thing, in the order in which it is looked for.
_NAMES = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model"),
    "depth": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LIKE_GPT = ("gpt2", "gpt_neox", "gptj", "bert", "roberta", "opt", "bloom", "gpt_neo", "gpt_bigcode", "xlm-roberta")


def _from_config(config: Mapping[str, Any], path: Path) -> Transformer:
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = str(config.get("model_type", ""))
    if experts := next((key for key in _EXPERTS if config.get(key)), None):
        raise ConfigError(
            f"model: {path} has {experts} = {config[experts]!r}: it is a mixture of experts, and the planner knows "
            "only dense models, in which every token meets every parameter."
        )
    found: dict[str, int] = {}
    for name, theirs in _NAMES.items():
        value = next((config[key] for key in theirs if config.get(key)), None)
        if value is None and name == "hidden":
            value = 4 * found["width"]
        if value is None:
            raise ConfigError(f"model: {path} has no {' or '.join(theirs)}: it is of no kind that is known here.")
        found[name] = value
    plain = kind in _LIKE_GPT
    learned = plain and kind not in ("gpt_neox", "gptj", "bloom")
    positions = config.get("n_positions") or config.get("max_position_embeddings") or 0
    return Transformer(
        **found,
        kv_heads=config.get("num_key_value_heads") or 0,
        tied=bool(config.get("tie_word_embeddings", plain)),
        gated=not plain,
        biases=plain,
        positions=positions if learned else 0,
        head=config.get("head_dim") or 0,
        head_norms=kind == "qwen3",
        norm_copies=not plain,
    )
