"""The content of a checkpoint: model, optimizer, everything else with a state, and random numbers.

    model.NAME                parameters (the masters, in their own dtype) and persistent buffers
    optimizer.NAME.STATE      per parameter, by the parameter's name
    EXTRA.PATH                the tensors in the state of an extra
    rank.R.rng.…, rank.R.codec.…   what each rank has of its own; in a snapshot also rank.R.buffer.…

Values that are not tensors are in the manifest, under `model`, `optimizer`, the names of the extras, `engine`, `rng`,
`config` and, for adapters of PEFT, `peft`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from towpath.checkpoint.exporting import ADAPTERS, adapters_of
from towpath.checkpoint.local_state import NamedTensors, local_state_of, rng_state
from towpath.checkpoint.manifest import encode_value
from towpath.checkpoint.storage import TensorChunks, WriteItems
from towpath.core.formats import dtype_name, shape_text
from towpath.core.strategy import Protect
from towpath.engine.optimizer_steps import adopt
from towpath.engine.parameters.matrix_steps import not_savable
from towpath.engine.parameters.shard_spec import ShardSpec
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError
from towpath.optim import members_of, owner_stepped_members
from towpath.outer.saved import IslandState, prefix_of

RESERVED = ("model", "optimizer", "rank", "engine", "rng", "island", "islands", "outer", "snapshot", ADAPTERS)
_SPLIT_ELEMENTS = 1 << 16  # a slice that several ranks hold is divided among them, unless it is smaller
_LOADED = weakref.WeakKeyDictionary[Any, Path | None]()  # by model, see `State.snapshot`
_SHOWN = 200  # characters of an extra's state in an error


class State:
    """Everything that a checkpoint contains: what to save, and where to load it.

    With several ranks, every rank must create the `State`. An unsharded model must be the same on all of them.

    Example:
        state = State(model, optimizer, schedule=scheduler, data=loader)

    Args:
        model: The model, sharded or not, or a pipeline of `towpath.pipeline`.
        optimizer: The model's optimizer, for a pipeline that of this rank. Without one, only the model is saved.
        config: The model's configuration, which an export writes as Hugging Face's config.json.
        names: Other names for tensors in an export, by their names in the model.
        **extras: Anything else with `state_dict()` and `load_state_dict()`. The states must be the same on every rank.
            Saving fails if they differ in anything but the values of tensors, of which rank 0's are saved.

    Raises:
        CheckpointError: An extra has a reserved name, or the model is only on a part of the job's ranks.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        **extras: Stateful,
    ) -> None:
        taken = [name for name in extras if name.partition(".")[0] in RESERVED]
        if taken:
            raise CheckpointError(
                f"{taken[0]!r} is a name of Towpath's own in a checkpoint; call this state otherwise."
            )
        self.model, self.optimizer, self.extras = model, optimizer, extras
        self.config, self.names = config, dict(names or {})
        self._savers = weakref.WeakSet[Any]()  # those that save this state
        self.local = local_state_of(model)
        for engine in self.local.engines.values():
            engine.before_rewrite.append(weakref.WeakMethod(self.settle))
        self.island_rank = self.local.groups.rank
        self._hook: RemovableHandle | None = None

    @property
    def snapshot(self) -> Path | None:
        """The snapshot in this node's memory that was loaded last into the model, also by another `State`."""
        return _LOADED.get(self.model)

    @snapshot.setter
    def snapshot(self, path: Path | None) -> None:
        _LOADED[self.model] = path

    @property
    def protect(self) -> Protect | None:
        """How the model's strategy protects the training against the loss of a node, or None."""
        return next((engine.strategy.protect for engine in self.local.engines.values()), None)

    def add_saver(self, saver: Any) -> None:
        """Call `saver.settle` before anything that it saves is changed."""
        self._savers.add(saver)
        if self._hook is None and self.optimizer is not None:
            # The optimizer must not keep the state alive, nor its savers and their locks.
            self._hook = self.optimizer.register_step_pre_hook(partial(_settle, weakref.ref(self)))
            weakref.finalize(self, self._hook.remove)

    def settle(self) -> None:
        """Return when everything that is being saved has been copied, so that it may be changed."""
        for saver in list(self._savers):
            saver.settle()

    # --- saving

    def collect(self, nodes: Sequence[int] | None = None) -> WriteItems:
        """Return what this rank writes: pieces of the tensors in use, and on rank 0 values that are not tensors.

        `nodes`: The node of each rank of the job. Each node then writes all slices that its ranks hold. By default,
        those that several ranks hold are written once.
        """
        mine = partial(self._mine, nodes=nodes)
        model, islands, engines = self.named(), self.local.islands, [*self.local.engines.values()]
        copies, tensors = self.local.writes_copies, model.all()
        if islands is not None:
            islands.outer.wait()  # an exchange under way changes what is kept of rounding errors
            tensors = islands.trained(tensors)  # the others are equal on all islands, which share one copy
        found = dict(mine({f"model.{name}": tensor for name, tensor in tensors.items()}, copies))
        own = {f"rank.{self.island_rank}.rng.{name}": tensor for name, tensor in rng_state().items()}
        own |= {f"rank.{self.island_rank}.codec.{name}": tensor for name, tensor in self.local.codec_states().items()}
        if nodes is not None and not copies:  # a checkpoint has those of one rank
            own |= {f"rank.{self.island_rank}.buffer.{name}": tensor for name, tensor in model.buffers.items()}
        found.update(mine(own, True))
        rng = {"seed": torch.initial_seed(), "peers": len(self.local.peers)}
        values: dict[str, Any] = {"model": {"aliases": model.aliases}, "rng": rng}
        if engines:
            values["engine"] = {"step": engines[0].step, "fingerprint": self.local.fingerprint}
        if self.optimizer is not None:
            tensors, owned, values["optimizer"] = collect_optimizer(self.optimizer, model)
            found.update(mine(tensors, copies, owned=owned))
        same: dict[str, str] = {}
        of_extras: dict[str, torch.Tensor] = {}
        for name, extra in self.extras.items():
            before = len(of_extras)
            values[name] = encode_value(extra.state_dict(), name, of_extras)
            shapes = [f"{t.dtype} {shape_text(tuple(t.shape))}" for t in [*of_extras.values()][before:]]
            text = json.dumps([values[name], *shapes] if shapes else values[name], sort_keys=True)
            same[f"the state of {name!r}"] = (
                text if len(text) <= _SHOWN else f"a text of CRC-32 {crc32(text.encode()):x}"
            )
        found.update(mine(of_extras, self.island_rank == 0))
        if self.config is not None:
            try:  # as in a config.json, which has no tuples, and only strings as keys
                values["config"] = json.loads(json.dumps(self.config))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"config: expected what JSON can hold, as to_dict() gives it ({error})."
                ) from error
        if self.names:
            values["names"] = self.names
        if self.island_rank == 0 and (adapters := adapters_of(self.model)):
            values[ADAPTERS] = adapters
        if self.island_rank > 0:  # other ranks may have the states of other parameters
            differ = self.local.held is not None or (self.optimizer is not None and is_spread(self.optimizer))
            values = {name: value for name, value in values.items() if name == "optimizer" and differ}
        if islands is not None:
            found = {f"{prefix_of(islands.island)}{name}": pieces for name, pieces in found.items()}
            found |= self._shared_by_islands(islands, model, mine)
            values = islands.renamed(values, self.island_rank)
        return WriteItems(
            pieces=found,
            values=values,
            same=same,
            island=0 if islands is None else islands.island,
            strategy=engines[0].strategy.to_toml() if engines else None,
        )

    def _shared_by_islands(
        self, islands: IslandState, model: NamedTensors, mine: Callable[..., Iterator[tuple[str, TensorChunks]]]
    ) -> dict[str, TensorChunks]:
        """Return what island 0 writes for all islands."""
        if islands.island > 0:
            return {}
        trained = islands.trained(model.all())
        equal = {f"model.{name}": t for name, t in model.all().items() if name not in trained}
        found = dict(mine(equal, self.local.writes_copies))
        return found | dict(mine(dict(islands.tensors(model.names)), False, steady=False))

    def named(self) -> NamedTensors:
        """Return this rank's tensors of the model, or raise CheckpointError if they are unsharded meanwhile."""
        if any(engine.kept_unsharded for engine in self.local.engines.values()):
            raise CheckpointError("inside towpath.full_parameters(): leave it before a checkpoint is saved or loaded.")
        return self.local.named()

    def _mine(
        self,
        tensors: Mapping[str, torch.Tensor],
        copies: bool,
        steady: bool = True,
        owned: Mapping[str, ShardTensor] = MappingProxyType({}),
        nodes: Sequence[int] | None = None,
    ) -> Iterator[tuple[str, TensorChunks]]:
        """Yield what this rank writes of `tensors`. Ranks that hold the same slice of a ShardTensor divide it.

        `copies`: Whether this rank writes other tensors. `steady`: Whether ShardTensors stay as they are until the
        optimizer's step. `owned`: The parameters of full states, of which the owners in other replicas have the same.
        `nodes`: As for `collect`.
        """
        for name, tensor in tensors.items():
            _check_storable(name, tensor)
            parameter, number = owned.get(name), crc32(name.encode())
            sharded = parameter if parameter is not None else tensor if isinstance(tensor, ShardTensor) else None
            if self._is_written_elsewhere(name, sharded is not None):
                continue
            writers, shared_as = _writers(sharded.shard_spec, nodes) if sharded is not None else ((), None)
            if isinstance(tensor, ShardTensor):
                boxes = dict(_share(tensor, number, writers))
            elif copies if parameter is None else _is_turn(parameter.shard_spec, number, writers):
                boxes = {(0,) * tensor.dim(): tensor.detach()}
            else:
                continue
            if boxes:
                stays = steady and sharded is not None and self.optimizer is not None
                yield name, TensorChunks(tensor.dtype, tensor.shape, boxes, stays, shared_as)

    def _is_written_elsewhere(self, name: str, sharded: bool) -> bool:
        names = self.local.written_elsewhere if sharded else self.local.copied_elsewhere
        return any(name == f"model.{n}" or name.startswith(f"optimizer.{n}.") for n in names)


def _settle(state: weakref.ref[State], *_: object) -> None:
    if (found := state()) is not None:
        found.settle()


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor that a safetensors file cannot hold."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype is torch.complex128:
        kind = dtype_name(tensor.dtype if tensor.layout is torch.strided else tensor.layout)
        raise CheckpointError(
            f"{name} is a {kind} tensor, which a checkpoint cannot hold: expected a dense tensor. Save "
            "to_dense() of a sparse, dequantize() of a quantized, and torch.view_as_real() of a complex128 tensor."
        )


def _writers(shard_spec: ShardSpec, nodes: Sequence[int] | None) -> tuple[Sequence[int], str | None]:
    """Return which holders of a slice write it: all of them together, or those of this rank's node.

    In the second case, if other nodes write the same files, return also what names this rank's.
    """
    holders, replica = shard_spec.holders, shard_spec.replica
    if nodes is None:
        return holders, None
    ranks = [0] if replica.everyone is None else dist.get_process_group_ranks(replica.everyone)
    on: dict[int, list[int]] = {}
    for rank in holders:
        on.setdefault(nodes[ranks[rank]], []).append(rank)
    mine = on[nodes[ranks[replica.rank]]]
    if len(on) == 1:
        return mine, None
    if len({len(each) for each in on.values()}) > 1:  # they would divide it into other parts: the first one writes it
        return holders[:1], None
    # All its holders are in the name: those of a frozen parameter may be others, of which rank 0 is the first, too.
    first = ranks[min(on.values())[mine.index(replica.rank)]]
    return mine, f"{first:05d}-{crc32(str([ranks[rank] for rank in holders]).encode()):08x}"


def _is_turn(shard_spec: ShardSpec, number: int, writers: Sequence[int]) -> bool:
    """Return whether this rank writes what all `writers` have. `number` selects one of them."""
    return writers[number % len(writers)] == shard_spec.replica.rank


def _share(tensor: ShardTensor, number: int, writers: Sequence[int]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the boxes that this rank writes of a slice that all `writers` hold. `number` selects one of them."""
    shard_spec, local = tensor.shard_spec, tensor.to_local().detach()
    if not shard_spec.counts or shard_spec.replica.rank not in writers:
        return  # another rank has the same slice, perhaps one of the tensor-parallel mesh, and writes it
    first, last = shard_spec.bounds()
    if tensor.numel() == 0:
        if shard_spec.slot == 0 and shard_spec.replica.rank == writers[0]:
            yield (0,) * tensor.dim(), local.view(tensor.shape)
        return
    if last - first >= _SPLIT_ELEMENTS:
        place, count = writers.index(shard_spec.replica.rank), len(writers)
        start, end = (first + (last - first) * i // count for i in (place, place + 1))
    else:
        start, end = (first, last) if _is_turn(shard_spec, number, writers) else (first, first)
    for box in tensor.boxes((start, end)):
        yield box.offsets, local[box.start - first : box.end - first].view(box.sizes)


# --- optimizers -------------------------------------------------------------------------------------------------------
#
# The states go by the names of their parameters, so that they fit an optimizer that lists these in another order.
#
#     groups    per group: the names of its parameters, and its options (lr, betas, …)
#     states    per parameter: the states of the same shape (exp_avg), and the others (step)

_NUMBERS = ("step", "mu_product", "eta", "mu")  # one number, even if the parameter is one number too


def collect_optimizer(
    optimizer: Optimizer, model: NamedTensors
) -> tuple[dict[str, torch.Tensor], dict[str, ShardTensor], dict[str, Any]]:
    """Return the tensors of this rank's states, the parameters of those that it owns, and as JSON everything else."""
    adopt(optimizer)
    tensors, owned = dict[str, torch.Tensor](), dict[str, ShardTensor]()
    groups, states = list[dict[str, Any]](), dict[str, Any]()
    names = model.names
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        mine = [name_of(names, p, number) for p in group["params"]]
        groups.append({"names": mine, "options": encode_value(options, f"optimizer.(group {number})", tensors)})
        for name, parameter in zip(mine, group["params"], strict=True):
            if parameter not in optimizer.state:
                continue
            of_one: dict[str, torch.Tensor] = {}
            states[name] = _state(name, parameter, optimizer.state[parameter], of_one, owns(optimizer, parameter))
            tensors.update(of_one)
            if isinstance(parameter, ShardTensor) and owns(optimizer, parameter):
                owned.update(dict.fromkeys(of_one, parameter))
    return tensors, owned, {"kind": kind_of(optimizer), "groups": groups, "states": states}


def kind_of(optimizer: Optimizer) -> str:
    """Return the names of the classes that the states belong to."""
    return " + ".join(getattr(each, "kind", type(each).__name__) for each in members_of(optimizer))


def owns(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether this rank, and no other of its replica, has the full states of the parameter."""
    return any(each.owns(parameter) for each in owner_stepped_members(optimizer))


def is_spread(optimizer: Optimizer) -> bool:
    """Return whether ranks have the states of different parameters."""
    return any(part.is_spread for each in owner_stepped_members(optimizer) for part in each.parts)


def name_of(names: dict[int, str], parameter: torch.Tensor, group: int) -> str:
    """Return the name of an optimizer's parameter, or raise CheckpointError if it is not the model's."""
    if id(parameter) not in names:
        raise CheckpointError(
            f"group {group} of the optimizer has one of shape {tuple(parameter.shape)} that is not the model's: "
            "pass the optimizer of this model."
        )
    return names[id(parameter)]


def _state(
    name: str, parameter: nn.Parameter, state: dict[str, Any], tensors: dict[str, torch.Tensor], full: bool
) -> dict[str, Any]:
    """Add the tensors of a parameter's states to `tensors`, and return the rest. `full`: this rank owns them."""
    for key, value in state.items():
        if full and is_traceable_wrapper_subclass(value):
            raise not_savable(f"{name}.{key}", type(value).__name__)
    like = [key for key, value in state.items() if is_like(key, value, parameter)]
    if isinstance(parameter, ShardTensor) and not full:  # a state of the parameter's shape is sharded like it
        like = [key for key in like if isinstance(state[key], ShardTensor)]
    tensors.update({f"optimizer.{name}.{key}": state[key] for key in like})
    rest = {key: value for key, value in state.items() if key not in like}
    return {"like": like, "rest": encode_value(rest, f"optimizer.{name}", tensors)}


def is_like(key: str, value: Any, parameter: nn.Parameter) -> bool:
    """Return whether a state has one element for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _NUMBERS
