"""The tensors and states that a rank has of a training: a complete model, its shards, or some stages of a pipeline."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from towpath.checkpoint.manifest import Manifest
from towpath.checkpoint.safe_files import DamagedError
from towpath.codecs.packing import RoundingSeeds
from towpath.collectives.collective import Collective
from towpath.core.strategy import WITH_TRANSPORT
from towpath.engine.executor import Engine
from towpath.engine.parameters.low_rank_sync import LowRankSync
from towpath.errors import CheckpointError
from towpath.outer.saved import IslandState
from towpath.topology.groups import Groups

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of activation checkpointing


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The parameters and persistent buffers of a model, by their names in a checkpoint.

    These are the names of the model as it was built, without the prefixes of wrappers. `aliases` maps the other names
    of tied parameters to the first name.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    def all(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers in one dict."""
        return {**self.parameters, **self.buffers}

    @property
    def names(self) -> dict[int, str]:
        """The names of the parameters, by identity."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def names_in(self, manifest: Manifest, names: Iterable[str]) -> dict[str, str]:
        """Return the names that tensors of the model have in a checkpoint, which may tie other parameters."""
        held, there = manifest.model, manifest.aliases
        others = defaultdict[str, list[str]](list)
        for alias, first in self.aliases.items():
            others[first].append(alias)
        known = {name: (name, *(there.get(n, n) for n in (name, *others[name]))) for name in names}
        return {name: next((n for n in each if n in held), name) for name, each in known.items()}


def named_tensors(model: nn.Module) -> NamedTensors:
    """Return the tensors of `model` by name, or raise CheckpointError for a model with other state."""
    parameters, aliases = parameters_of(model)
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({type(module).__name__}) has get_extra_state(), which no checkpoint holds: "
                "pass what it keeps as an extra of the State."
            )
        transient = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in module.named_buffers(recurse=False):
            if name not in transient:
                buffers.setdefault(id(buffer), (_as_built(f"{path}.{name}" if path else name), buffer))
    return NamedTensors(parameters, dict(buffers.values()), aliases)


def parameters_of(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return the parameters by their first names, and the other names of tied ones with the first name."""
    first: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = _as_built(raw)
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
        parameters.setdefault(known, parameter)
    return parameters, aliases


def _as_built(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# --- this rank --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """The tensors and states that one rank has of a model, and the part that this rank writes."""

    groups: Groups  # the ranks that train together: those of this rank's island, or of the whole job
    everyone: Groups  # the ranks of the whole job, which save and load together
    peers: Sequence[int]  # the job's ranks that compute the same batch as this one, and draw the same random numbers
    islands: IslandState | None = None
    named: Callable[[], NamedTensors]
    writes_copies: bool  # whether this rank writes tensors of which other ranks have copies
    engines: Mapping[str, Engine]  # by the prefix of the names of their codecs' states
    senders: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of messages between stages, by name
    fingerprint: str = ""  # equal for two runs whose codecs keep the same states
    held: frozenset[str] | None = None  # all tensors that any rank has; None if each rank has all of them
    written_elsewhere: frozenset[str] = frozenset()  # the sharded tensors of this rank that another stage writes
    copied_elsewhere: frozenset[str] = frozenset()  # the unsharded ones
    dropped: Callable[[], None] = lambda: None  # called after the engines have dropped accumulated gradients

    def codec_states(self) -> dict[str, torch.Tensor]:
        """Return what codecs carry from step to step. The tensors are those in use, except for seeds."""
        engines = self.engines.items()
        found = {f"{prefix}{name}": kept for prefix, engine in engines for name, kept in codec_state(engine).items()}
        found |= {f"{name}/{i}": kept for name, sender in self.senders.items() for i, kept in enumerate(sender.state)}
        return found | self._outer_feedback()

    def _outer_feedback(self) -> dict[str, torch.Tensor]:
        feedback = {} if self.islands is None else self.islands.outer.feedback()
        return {f"outer.{name}": kept for name, kept in feedback.items()}

    def load_codec_states(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take over the seeds, after the tensors in use were filled."""
        for prefix, engine in self.engines.items():
            load_codec_state(engine, {name: values[f"{prefix}{name}"] for name in codec_state(engine)})

    def go_to(self, step: int) -> None:
        """Continue as after `step` optimizer steps, without gradients that were accumulated before."""
        for engine in self.engines.values():
            engine.go_to(step)
        self.dropped()

    def reset_codec_states(self) -> None:
        """Begin without error feedback."""
        for engine in self.engines.values():
            reset_codec_state(engine)
        for sender in self.senders.values():
            sender.restart()
        for kept in self._outer_feedback().values():
            kept.zero_()


def local_state_of(model: Any) -> LocalState:
    """Return what this rank has of a model, sharded or not, or of a pipeline, which knows its own."""
    if not isinstance(model, nn.Module):
        if not hasattr(model, "local_state"):
            kind = type(model).__name__
            raise CheckpointError(
                f"model: expected a torch.nn.Module, or a pipeline of towpath.pipeline; got a {kind}."
            )
        return model.local_state()
    engine: Engine | None = getattr(model, "towpath_engine", None)
    places = [] if engine is None else [p for u in engine.units for b in u.buckets for p in b.layout.places]
    mesh = max((place.parallel.ranks for place in places if place.parallel is not None), key=len, default=[])
    mesh_size = len(mesh) or 1
    job = engine.comm.job if engine is not None and mesh_size == 1 else Groups()
    if engine is not None and engine.comm.job.world * mesh_size != job.world:
        raise CheckpointError(
            f"the model is on {engine.comm.job.world} data-parallel × {mesh_size} tensor-parallel ranks, and the "
            f"job has {job.world}: a checkpoint is of a whole job."
        )
    islands, groups = None, job
    if engine is not None and engine.outer is not None:
        if mesh_size > 1:
            raise CheckpointError("outer steps on a tensor-parallel mesh: checkpoints are not supported yet.")
        groups = engine.comm.groups
        islands = IslandState(engine.outer, job.rank // groups.world, engine.strategy.islands)
    return LocalState(
        groups=groups,
        everyone=job,
        peers=mesh or (job.rank,),
        islands=islands,
        named=lambda: named_tensors(model),
        writes_copies=groups.rank == 0,
        engines={} if engine is None else {"": engine},
        fingerprint="" if engine is None else fingerprint(engine),
    )


# --- codecs -----------------------------------------------------------------------------------------------------------

# The error feedback and the seeds that codecs keep between steps. Only a run of the same strategy on as many nodes and
# ranks can load them, because other runs have other slices.

_SEEDS = "seeds"


def codec_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the codec state of a model on this rank, by transfer.

    The tensors are those in use, not copies. Only the seeds are copied.
    """
    found = {f"{name}/{i}": kept for name, keeper in _keepers(engine) for i, kept in enumerate(keeper.state)}
    seeds = [rounding.seed for rounding in _rounding_seeds(engine)]
    return {**found, _SEEDS: torch.tensor(seeds, dtype=torch.int64)} if seeds else found


def load_codec_state(engine: Engine, values: Mapping[str, torch.Tensor]) -> None:
    """Restore codec state, such as error feedback, that `codec_state` returned at the step where the engine is now."""
    mine = codec_state(engine)
    # The manifest has compared `fingerprint` before, so other keys would be a bug and no damaged file.
    assert mine.keys() == values.keys(), (mine.keys(), values.keys())
    for name, value in values.items():
        if name != _SEEDS:
            mine[name].copy_(value)
    seeds = _rounding_seeds(engine)
    for rounding, seed in zip(seeds, values[_SEEDS].tolist() if seeds else [], strict=True):
        rounding.seed = seed


def reset_codec_state(engine: Engine) -> None:
    """Discard the codec state, so that the next step starts without error feedback."""
    for _, keeper in _keepers(engine):
        keeper.restart()


def fingerprint(engine: Engine) -> str:
    """Return a digest that is equal for runs that can load each other's codec state."""
    # Racks only say which machine is which rank, and steps only when a codec is used. Each rank keeps the same slices.
    # Snapshots change nothing that is computed.
    made = engine.strategy
    plain = {"until": 0, "after": 0, "plain_route": None, "nccl_route": None, "exact": False}
    always = {kind.value: replace(made.transport(kind), **plain) for kind in WITH_TRANSPORT}
    made = replace(made, topology=replace(made.topology, nodes_per_rack=None), protect=None, **always)
    lines = [made.to_toml(), str(engine.precision), str(engine.comm.device.type)]
    for unit in engine.units:
        for bucket in unit.buckets:
            lines.append(f"{bucket.plan.numel} {bucket.plan.spec.alignment}")
            for p in bucket.layout.places:
                lines.append(f"{unit.name} {p.names[0]} {tuple(p.shape)} {p.offset}")
                # On a tensor-parallel mesh the same shape may be another part of the tensor.
                lines += [f"{p.parallel.describe()} on {p.parallel.ranks}"] if p.parallel is not None else []
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _keepers(engine: Engine) -> Iterator[tuple[str, Collective | LowRankSync]]:
    for unit in engine.units:
        for number, bucket in enumerate(unit.buckets):
            for name, keeper in bucket.stateful.items():
                yield f"{unit.name or 'root'}/{number}/{name}", keeper


def _rounding_seeds(engine: Engine) -> list[RoundingSeeds]:
    return [seeds for _, keeper in _keepers(engine) for seeds in keeper.seeds]


# --- random numbers ---------------------------------------------------------------------------------------------------

_NUMPY_WORDS = 624  # in the state of its generator, a Mersenne twister


def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of this process's generators by name."""
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        import numpy as np

        legacy: Any = np.random.get_state()
        _, key, position, has_gauss, stored = legacy
        state["numpy"] = torch.tensor([position, has_gauss, *key.tolist()], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(stored, dtype=torch.float64)
    return state


def set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    """Set this process's generators to a state from `rng_state`, or raise DamagedError if it is not possible."""
    try:
        version, *words = state["python"].tolist()
        gauss = state["python_gauss"].item()
        random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "numpy" in state:
            import numpy as np

            position, has_gauss, *key = state["numpy"].tolist()
            if not 0 <= position <= _NUMPY_WORDS:  # NumPy does not check this, and would read outside its state
                raise ValueError(f"NumPy's position is {position}; expected 0 to {_NUMPY_WORDS}")
            words = np.array(key, dtype=np.uint32)
            np.random.set_state(("MT19937", words, position, has_gauss, state["numpy_gauss"].item()))
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"the random numbers are no state of a generator ({error}).") from error


def seed_anew(seed: int, step: int, peers: Sequence[int]) -> None:
    """Seed the generators of a rank that did not exist when the checkpoint was written.

    Ranks that are no `peers` get different seeds. Each gets the same one each time the checkpoint is resumed.
    """
    digest = hashlib.sha256(f"{seed} {step} {min(peers)}".encode()).digest()
    mine = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(mine)
    random.seed(mine)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(mine & 0xFFFFFFFF)
