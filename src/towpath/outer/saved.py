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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from towpath.checkpoint.manifest import Manifest
from towpath.checkpoint.safe_files import DamagedError
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import CheckpointError
from towpath.outer.sync import Held, OuterSync

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


def island_manifest(manifest: Manifest, island: int | None) -> Manifest:
    """Return a checkpoint as an island reads it, under the names of one without islands."""
    # Without an island, as for a run with another number of them: slow weights, and buffers and states of island 0.
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
class IslandState:
    """The state of this rank that its island would not have as a job of its own."""

    outer: OuterSync
    island: int  # the number of this rank's island
    islands: int  # how many there are

    def trained(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those tensors of a model that differ between islands: parameters that train, and buffers."""
        mine = {id(parameter) for part, _ in self.outer.parts() for parameter, _ in part.held(part.slow)}
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
        for part, is_pending in self.outer.parts():
            slow, momentum = part.settled(self.outer.plan, is_pending)
            found = {"model.": slow, _MOMENTUM: momentum, _SLOW: None if slow is part.slow else part.slow}
            if is_pending:
                found |= {_MOMENTUM_NOW: part.momentum, _PENDING: part.difference}
            for prefix, flat in found.items():
                for parameter, tensor in part.held(flat) if flat is not None else ():
                    yield f"{prefix}{names[id(parameter)]}", tensor


def restore_islands(
    islands: IslandState, manifest: Manifest, names: Mapping[int, str], targets: dict[str, torch.Tensor]
) -> Callable[[], list[str]]:
    """Add the slow weights, momentum and pending results of a checkpoint to `targets`. Return what to call once filled.

    That function continues the outer steps, and returns notes for the user. Other code loads the weights that the
    optimizer writes to. If the checkpoint is of as many islands, these are the weights of this rank's island. Otherwise
    they are the slow weights, to which pending results were applied.
    """
    outer, mine, saved = islands.outer, islands.values(), manifest.values.get(VALUE)
    step: int = manifest.values.get("engine", {"step": manifest.step})["step"]
    if saved is None:

        def restart() -> list[str]:
            outer.restart()
            outer.begin_anew(step)
            return ["the checkpoint has no outer steps: slow weights begin as its weights, and the momentum at zero"]

        return restart
    goes_on, count = all(saved[key] == mine[key] for key in _TIMING), saved["count"]
    # The last step whose exchanges were begun and applied, and the step of each exchange that is under way.
    under_way = {int(fragment): begun for fragment, begun in saved["under_way"].items()} if goes_on else {}
    outer.resume(saved["done"], under_way)  # `parts` then tells which exchanges are under way

    def find(held: Iterator[Held], *prefixes: str) -> None:
        """Add what this rank holds. The last prefix is that of values to which pending exchanges were applied."""
        for parameter, tensor in held:
            found = [f"{prefix}{names[id(parameter)]}" for prefix in prefixes[0 if goes_on else -1 :]]
            name = next((name for name in found if name in manifest.tensors), None)
            if name is None and _MOMENTUM not in prefixes:
                raise DamagedError(f"{found[-1]} is missing, which a run with outer steps has.")
            if name is None:  # the run had no momentum
                tensor.local.zero_()
            elif name in targets:
                raise CheckpointError(
                    f"{name}: parameters that were tied are two in this model, which outer steps cannot resume. Load "
                    "the checkpoint without outer steps."
                )
            else:
                targets[name] = tensor

    for part, is_pending in outer.parts():
        if part.momentum is not None:
            find(part.held(part.momentum), _MOMENTUM_NOW, _MOMENTUM)
        if is_pending:
            find(part.held(part.difference), _PENDING)
        if count == islands.islands:  # otherwise the weights will be those that were loaded
            find(part.held(part.slow), _SLOW, _SETTLED)

    def resume() -> list[str]:
        outer.resume(saved["done"], under_way)
        if goes_on:
            return []
        if count == islands.islands:
            return ["exchanges under way were applied to the slow weights: every, fragments or delay has changed"]
        outer.begin_anew(step)
        return [
            f"the checkpoint is of {count} islands, and now there are {islands.islands}: all of them begin with the "
            "slow weights, and with the optimizer's states of island 0"
        ]

    return resume
