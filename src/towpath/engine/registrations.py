"""How often a module got a parameter or a module: what has changed since is looked for only when this number has."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class _Registrations:
    def __init__(self) -> None:
        self.made = 0
        self._counting = False

    def count(self) -> None:
        """From now on, in this process."""
        if not self._counting:
            self._counting = True
            register_module_module_registration_hook(self._add)
            register_module_parameter_registration_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.made += 1


registrations = _Registrations()
