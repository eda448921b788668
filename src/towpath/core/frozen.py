"""Where one copy of the parameters that do not train lies, where the strategy leaves it open.

What does not train never changes: with one copy in each node, it crosses between nodes once, at the start, and no
more. That takes more memory than spreading one copy over all nodes. So it is done where P spans nodes and memory
allows; a model of which nothing trains, as in inference, keeps the strategy's own placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from towpath.core.formats import item_bytes
from towpath.core.precision import Precision
from towpath.core.schedule import buffer_bytes, memory_bytes
from towpath.core.strategy import AS_TRAINED, Strategy
from towpath.core.unit_plan import UnitPlan, plan_unit
from towpath.core.units import UnitSpec
from towpath.topology.cluster import Extent

# Of what is free on the rank that has least, what the engine keeps may take so much, with two optimizer states of what
# trains. The rest is left to activations, and to the libraries.
SHARE_OF_MEMORY = 0.5
_OPTIMIZER_STATES = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """`strategy`: with nothing left open. `why`: one line for people; empty where nothing was to be decided."""

    strategy: Strategy
    why: str = ""


def is_open(strategy: Strategy, units: Sequence[UnitSpec]) -> bool:
    """Whether it depends on memory where frozen parameters lie."""
    frozen, trains = _kinds(units)
    return frozen and trains and strategy.frozen is None and strategy.placement.params.nodes > 1


def decided(strategy: Strategy, units: Sequence[UnitSpec], precision: Precision, memory: int | None) -> Decision:
    """`strategy` for a model of these units, where a rank has `memory` bytes for the engine and all else. None: enough.

    The same on all ranks that are given the same.
    """
    frozen, trains = _kinds(units)
    if not frozen:  # ranks that gather frozen parameters together would be compared, and there are none
        return Decision(replace(strategy, frozen=None, frozen_codec="none"))
    if not is_open(strategy, units):
        if strategy.frozen is None and strategy.placement.params.nodes > 1 and not trains:
            why = "nothing trains, so that frozen parameters lie as the strategy has it"
            return Decision(replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}.")
        return Decision(strategy)
    inside = replace(strategy, frozen=Extent(strategy.topology.ranks_per_node))
    needed = kept_bytes([plan_unit(inside.at(0), unit, precision) for unit in units])
    what = f"what the engine keeps then takes {needed:,} bytes of a rank"
    if memory is None:
        return Decision(inside, f"{strategy.name}: frozen parameters lie in each node ({inside.frozen}): {what}.")
    limit = int(SHARE_OF_MEMORY * memory)
    if needed <= limit:
        why = f"frozen parameters lie in each node ({inside.frozen}): {what}, and {limit:,} are allowed"
        return Decision(inside, f"{strategy.name}: {why}.")
    why = f"frozen parameters lie as those that train: in each node {what}, and {limit:,} are allowed"
    return Decision(replace(strategy, frozen=AS_TRAINED), f"{strategy.name}: {why}.")


def kept_bytes(plans: Sequence[UnitPlan]) -> int:
    """What one rank keeps: states, slots and wire buffers, and an optimizer's usual states of what trains."""
    states = sum(
        _OPTIMIZER_STATES * b.numel // b.optimizer.count * item_bytes(b.own_dtype)
        for plan in plans
        for b in plan.buckets
        if b.spec.trainable
    )
    return states + sum(memory_bytes(plans).values()) + sum(buffer_bytes(plans).values())


def _kinds(units: Sequence[UnitSpec]) -> tuple[bool, bool]:
    """Whether anything is frozen, and whether anything trains."""
    kinds = {bucket.trainable for unit in units for bucket in unit.buckets}
    return False in kinds, True in kinds
