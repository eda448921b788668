"""Checkpoints of runs with outer steps: what each island has of its own, and what all islands share.

    island.I.NAME                 what island I would have in a checkpoint of its own: weights, states, random numbers
    model.NAME                    the slow weights, with the results of exchanges under way applied; frozen parameters
    outer.momentum.NAME           the outer momentum, in the same way
    outer.slow.NAME               the slow weights of now, where they differ from `model.NAME`
    outer.momentum_now.NAME       the momentum of now, where it differs
    outer.pending.NAME            the result of an exchange that is not applied yet, summed over the islands

So a run without outer steps, an export and a run with another number of islands read `model.NAME`. They take everything
else from island 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from towpath.checkpoint.manifest import Manifest
from towpath.checkpoint.safe_files import DamagedError
from towpath.engine.outer import OuterSync
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError

VALUE = "islands"
_SLOW, _MOMENTUM_NOW, _PENDING = "outer.slow.", "outer.momentum_now.", "outer.pending."
_SETTLED, _MOMENTUM = "outer.settled.", "outer.momentum."  # the first one is stored as `model.NAME`
# If any of these has changed, what was under way cannot go on.
_TIMING = ("count", "every", "fragments", "delay")
# The values of a checkpoint that describe the model. Tools read them without looking at islands.
_OF_MODEL = ("model", "config", "names", "peft")


def prefix_of(island: int) -> str:
    """Return the prefix of the names of what an island has of its own."""
    return f"island.{island}."


def islands_of(manifest: Manifest) -> int:
    """Return the number of islands that wrote a checkpoint: 1 without outer steps."""
    return manifest.values.get(VALUE, {"count": 1})["count"]


def view_of(manifest: Manifest, island: int | None) -> Manifest:
    """Return a checkpoint as an island reads it, under the names of one without islands: its own weights and states.

    None, as for a run with another number of islands, takes the slow weights, and buffers and states of island 0.
    """
    if VALUE not in manifest.values:
        return manifest
    prefix = prefix_of(island or 0)
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if not name.startswith("island.")}
    for name, tensor in manifest.tensors.items():
        plain = name.removeprefix(prefix)
        if plain != name and (island is not None or plain not in manifest.tensors):
            tensors[plain] = tensor
        elif name.startswith("model."):
            tensors[f"{_SETTLED}{name.removeprefix('model.')}"] = tensor
    values = {name: value for name, value in manifest.values.items() if not name.startswith("island.")}
    values |= {n.removeprefix(prefix): v for n, v in manifest.values.items() if n.startswith(prefix)}
    return replace(manifest, tensors=tensors, values=values, world=manifest.world // islands_of(manifest))


@dataclass(frozen=True, slots=True)
class IslandContents:
    """The part of a run with outer steps that this rank has, besides what its island would have as a job of its own.

    Attributes:
        outer: The outer steps.
        island: The number of this rank's island.
        islands: The number of islands.
    """

    outer: OuterSync
    island: int
    islands: int

    def trained(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those tensors of a model that differ between islands: parameters that train, and buffers."""
        mine = {id(parameter) for parameter, _ in self.outer.slow_weights()}
        return {n: t for n, t in tensors.items() if id(t) in mine or not isinstance(t, ShardTensor)}

    def renamed(self, values: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return the values of this rank of its island, under the island's names, and those of the whole job."""
        out = {f"{prefix_of(self.island)}{name}": value for name, value in values.items()}
        if self.island == 0 and rank == 0:  # tools read these without looking at islands
            out |= {name: value for name, value in values.items() if name in _OF_MODEL}
            out[VALUE] = self.values()
        return out

    def values(self) -> dict[str, Any]:
        """Return what is the same on all islands, and is no tensor."""
        steps, settings = self.outer.steps, self.outer.plan.settings
        under_way = {str(fragment): begun for fragment, (_, begun) in steps.under_way.items()}
        timing = {"every": settings.every, "fragments": settings.fragments, "delay": settings.delay}
        return {"count": self.islands, "done": steps.done, "under_way": under_way} | timing

    def tensors(self, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that all islands share, and this rank's part of them. `names`: by identity."""
        outer = self.outer
        for now, settled, prefix, now_prefix in (
            (outer.slow_weights(), outer.settled_weights(), "model.", _SLOW),
            (outer.momentum(), outer.settled_momentum(), _MOMENTUM, _MOMENTUM_NOW),
        ):
            for (parameter, tensor), (_, later) in zip(now, settled, strict=True):
                name = names[id(parameter)]
                yield f"{prefix}{name}", later
                if later.local.data_ptr() != tensor.local.data_ptr():
                    yield f"{now_prefix}{name}", tensor
        for parameter, tensor in outer.pending():
            yield f"{_PENDING}{names[id(parameter)]}", tensor


class IslandRestore:
    """The slow weights, momentum and pending results of a checkpoint. Fill its `targets`, then call `finish`.

    Other code loads the weights that the optimizer writes to. If the checkpoint is of as many islands, these are the
    weights of this rank's island. Otherwise they are the slow weights, to which pending results were applied.
    """

    def __init__(self, contents: IslandContents, manifest: Manifest, names: Mapping[int, str]) -> None:
        self._contents, self._saved = contents, manifest.values.get(VALUE)
        self._step: int = manifest.values.get("engine", {"step": manifest.step})["step"]
        self.targets: dict[str, torch.Tensor] = {}
        if self._saved is None:
            return
        outer, mine = contents.outer, contents.values()
        self._goes_on = all(self._saved[key] == mine[key] for key in _TIMING)
        outer.resume(*self._progress)  # `pending` yields the sums of what is under way
        held = [(parameter, tensor, (_MOMENTUM_NOW, _MOMENTUM)) for parameter, tensor in outer.momentum()]
        held += [(parameter, tensor, (_PENDING,)) for parameter, tensor in outer.pending()]
        if self._saved["count"] == contents.islands:  # otherwise the weights will be those that were loaded
            held += [(parameter, tensor, (_SLOW, _SETTLED)) for parameter, tensor in outer.slow_weights()]
        for parameter, tensor, prefixes in held:
            found = [f"{prefix}{names[id(parameter)]}" for prefix in prefixes[0 if self._goes_on else -1 :]]
            name = next((name for name in found if name in manifest.tensors), None)
            if name is None and _MOMENTUM not in prefixes:
                raise DamagedError(f"{found[-1]} is missing, which a run with outer steps has.")
            if name is None:  # the run had no momentum
                tensor.local.zero_()
            elif name in self.targets:
                raise CheckpointError(
                    f"{name}: parameters that were tied are two in this model, which outer steps cannot resume. Load "
                    "the checkpoint without outer steps."
                )
            else:
                self.targets[name] = tensor

    @property
    def _progress(self) -> tuple[int, dict[int, int]]:
        """The last step whose exchanges were begun and applied, and the step of each exchange that is under way."""
        assert self._saved is not None
        if not self._goes_on:
            return self._saved["done"], {}
        return self._saved["done"], {int(fragment): begun for fragment, begun in self._saved["under_way"].items()}

    def finish(self) -> list[str]:
        """Continue the outer steps with what was loaded. Return notes for the user."""
        outer = self._contents.outer
        if self._saved is None:
            outer.restart()
            outer.begin_anew(self._step)
            return ["the checkpoint has no outer steps: slow weights begin as its weights, and the momentum at zero"]
        outer.resume(*self._progress)
        if self._goes_on:
            return []
        if self._saved["count"] == self._contents.islands:
            return ["exchanges under way were applied to the slow weights: every, fragments or delay has changed"]
        outer.begin_anew(self._step)
        return [
            f"the checkpoint is of {self._saved['count']} islands, and now there are {self._contents.islands}: all of "
            "them begin with the slow weights, and with the optimizer's states of island 0"
        ]
