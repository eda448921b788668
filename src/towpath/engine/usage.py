"""What the ranks compare at every boundary: which parameters got a gradient, and that they ran the same units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from towpath.collectives.workspace import Workspace
from towpath.core.schedule import usage_transfers
from towpath.core.strategy import Kind, Strategy
from towpath.engine.unit import Unit
from towpath.engine.wiring import Wiring


@final
class Usage:
    """Of the units that train, in the order in which their gradients are delivered."""

    def __init__(self, strategy: Strategy, trained: Sequence[Unit], wiring: Wiring) -> None:
        self._trained, self._wiring = trained, wiring
        parameters = sum(len(bucket.gradients.used) for unit in trained for bucket in unit.trainable)
        self._transfers = wiring.bind(usage_transfers(strategy, parameters))

    def compare(self) -> list[bool]:
        """By parameter: whether any rank has a gradient of it. An error, on every rank, if they ran different units."""
        mine = [used for unit in self._trained for bucket in unit.trainable for used in bucket.gradients.used]
        if not self._transfers:
            return mine
        journal = self._wiring.journal
        compared = torch.tensor([*mine, *journal.encoded()], dtype=torch.uint8)

        def combine(workspace: Workspace) -> None:
            for transfer in self._transfers:
                transfer.run(compared, compared, workspace)

        self._wiring.queues.submit(Kind.USAGE, self._transfers, [combine]).wait()
        combined = compared.tolist()
        journal.check(bytes(combined[len(mine) :]), self._wiring.groups.gather_objects)
        return [bool(used) for used in combined[: len(mine)]]
