"""A count of the parameters and submodules that modules register, to notice changes of a model after `shard()`.

PyTorch calls a hook whenever a module registers a parameter or a submodule. Engines count these calls. They search
their models for parameters that are not sharded only if the count has changed.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    """The number of parameters and submodules that modules have registered in this process."""

    def __init__(self) -> None:
        self.made = 0
        self._counting = False

    def count(self) -> None:
        """Start counting in this process. Later calls do nothing."""
        if not self._counting:
            # PyTorch's hooks are global, and each further one would count every registration again.
            self._counting = True
            register_module_module_registration_hook(self._add)
            register_module_parameter_registration_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.made += 1


registrations = _Registrations()
