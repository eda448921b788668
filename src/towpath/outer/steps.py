"""The part of the step machine that synchronizes islands: which exchange begins or is applied after which step."""

from __future__ import annotations

from collections.abc import Mapping

from towpath.core.step_state import Action, ApplyOuter, Submit, Task, Wait
from towpath.core.strategy import TransferKind
from towpath.outer.exchanges import OuterPlan


class OuterSteps:
    """The outer steps of one model on one rank.

    The engine calls `advance` before the parameter sync that follows an optimizer step. Optimizer steps are counted by
    boundaries, so that a step that loss scaling skips counts on every island.

    Attributes:
        done: The last optimizer step whose exchanges were begun and applied.
        under_way: The exchange of each fragment that is not applied yet, with the step that it belongs to.
    """

    def __init__(self, plan: OuterPlan) -> None:
        self._plan, self._outer = plan, plan.settings
        self.done = 0
        self.under_way: dict[int, tuple[Task, int]] = {}

    def advance(self, step: int) -> list[Action]:
        """Return the actions of all optimizer steps that ended since the last call. `step` is the last one."""
        actions: list[Action] = []
        while self.done < step:
            self.done += 1
            actions += [self._begin(fragment) for fragment in self._outer.begun_at(self.done)]
            for fragment in self._outer.applied_at(self.done):
                actions += self._apply(fragment)
        return actions

    def average(self) -> list[Action]:
        """Return the actions that apply the exchanges under way now, and then average the weights of all islands."""
        actions = [action for fragment in tuple(self.under_way) for action in self._apply(fragment)]
        fragments = range(len(self._plan.fragments))
        actions += [self._begin(fragment) for fragment in fragments]
        return actions + [action for fragment in fragments for action in self._apply(fragment, average=True)]

    def resume(self, done: int, under_way: Mapping[int, int]) -> None:
        """Continue after optimizer step `done`, with exchanges whose results are there but not applied yet.

        `under_way` has the step that each of them belongs to.
        """
        self.done = done
        self.under_way = {f: (Task(TransferKind.OUTER, f), begun) for f, begun in under_way.items()}

    def _begin(self, fragment: int) -> Action:
        task = Task(TransferKind.OUTER, fragment, transfers=self._plan.fragments[fragment].exchanges)
        self.under_way[fragment] = task, self.done
        return Submit(task)

    def _apply(self, fragment: int, *, average: bool = False) -> list[Action]:
        if fragment not in self.under_way:  # it was applied by `average`, or is from before a checkpoint
            return []
        exchange, _ = self.under_way.pop(fragment)
        gathers = self._plan.fragments[fragment].gathers
        gather = Task(TransferKind.OUTER_GATHER, fragment, transfers=gathers) if gathers else None
        # The host waits, too, because it reads whether the slow weights of all islands are equal.
        return [Wait(exchange, on_host=True), ApplyOuter(fragment, exchange, gather, average)]
