"""How one kind of transfer travels: over which route."""

from __future__ import annotations

from dataclasses import dataclass

from towpath.errors import StrategyError
from towpath.spec.routes import ROUTES


@dataclass(frozen=True, slots=True)
class Wire:
    """`route`: 'flat' is the backend's own collective, the others are ours (`spec/routes.py` lists them)."""

    route: str = "flat"

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise StrategyError(f"Wire: unknown route {self.route!r}; known are {', '.join(ROUTES)}.")

    def __str__(self) -> str:
        return self.route
