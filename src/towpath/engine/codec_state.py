"""The codec state of one rank: the error feedback and random seeds that codecs keep between steps.

Checkpoints save it. Only a run of the same strategy on as many nodes and ranks can load it, because other runs have
other slices. Racks, and the steps in which a codec is used, may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from towpath.codecs.packing import RoundingSeeds
from towpath.collectives.collective import Collective
from towpath.core.strategy import WITH_TRANSPORT
from towpath.engine.executor import Engine
from towpath.engine.parameters.low_rank_sync import LowRankSync

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
    made = engine.strategy
    plain = {"until": 0, "after": 0, "plain_route": None, "exact": False}
    always = {kind.value: replace(made.transport(kind), **plain) for kind in WITH_TRANSPORT}
    made = replace(made, topology=replace(made.topology, nodes_per_rack=None), **always)
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
