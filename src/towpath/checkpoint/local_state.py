"""The tensors and states that a rank has of a training: a complete model, its shards, or some stages of a pipeline."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from towpath.checkpoint.manifest import Manifest
from towpath.checkpoint.safe_files import DamagedError
from towpath.engine.codec_state import codec_state, fingerprint, load_codec_state, reset_codec_state
from towpath.engine.executor import Engine
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


@dataclass(frozen=True, slots=True)
class CodecState:
    """State that a rank carries from step to step: the rounding errors of codecs, and the seeds they draw from."""

    state: Callable[[], dict[str, torch.Tensor]]  # by name: the tensors in use, except for seeds
    restart: Callable[[], object]  # begins anew
    load: Callable[[Mapping[str, torch.Tensor]], None] = lambda values: None  # after the tensors in use were filled


def codec_state_of(engine: Engine) -> CodecState:
    """Return the state of an engine's codecs."""
    return CodecState(
        partial(codec_state, engine), partial(reset_codec_state, engine), partial(load_codec_state, engine)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """The tensors and states that one rank has of a model, and the part that this rank writes."""

    groups: Groups  # the ranks that train together: those of this rank's island, or of the whole job
    everyone: Groups  # the ranks of the whole job, which save and load together
    peers: Sequence[int]  # the job's ranks that compute the same batch as this one, and draw the same random numbers
    islands: IslandState | None = None
    named: Callable[[], NamedTensors]
    writes_copies: bool  # whether this rank writes tensors of which other ranks have copies
    engines: tuple[Engine, ...] = ()
    states: Mapping[str, CodecState]  # by the prefix of their names
    fingerprint: str = ""  # equal for two runs whose ranks carry the same states
    held: frozenset[str] | None = None  # all tensors that any rank has; None if each rank has all of them
    written_elsewhere: frozenset[str] = frozenset()  # the sharded tensors of this rank that another stage writes
    copied_elsewhere: frozenset[str] = frozenset()  # the unsharded ones
    dropped: Callable[[], None] = lambda: None  # called after the engines have dropped accumulated gradients

    def state(self) -> dict[str, torch.Tensor]:
        """Return all states that this rank carries."""
        return {f"{prefix}{name}": t for prefix, each in self.states.items() for name, t in each.state().items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take over all states."""
        for prefix, each in self.states.items():
            each.load({name: values[f"{prefix}{name}"] for name in each.state()})

    def go_to(self, step: int) -> None:
        """Continue as after `step` optimizer steps, without gradients that were accumulated before."""
        for engine in self.engines:
            engine.go_to(step)
        self.dropped()

    def restart(self) -> None:
        """Start with new states."""
        for each in self.states.values():
            each.restart()


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
    states = {} if engine is None else {"": codec_state_of(engine)}
    if engine is not None and engine.outer is not None:
        if mesh_size > 1:
            raise CheckpointError("outer steps on a tensor-parallel mesh: checkpoints are not supported yet.")
        groups, outer = engine.comm.groups, engine.outer  # its state is the error feedback of exchanges
        states["outer."] = CodecState(outer.feedback, lambda: [kept.zero_() for kept in outer.feedback().values()])
        islands = IslandState(engine.outer, job.rank // groups.world, engine.strategy.islands)
    return LocalState(
        groups=groups,
        everyone=job,
        peers=mesh or (job.rank,),
        islands=islands,
        named=lambda: named_tensors(model),
        writes_copies=groups.rank == 0,
        engines=() if engine is None else (engine,),
        states=states,
        fingerprint="" if engine is None else fingerprint(engine),
    )


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
