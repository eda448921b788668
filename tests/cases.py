"""Cases of a test that are looped over inside it: for those that take less time than a test of their own would."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Calls the test with every combination of the values; what fails says with which."""
    combinations = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for case in combinations:
                try:
                    test(**case, **fixtures)
                except BaseException as error:
                    error.add_note("with " + ", ".join(f"{name}={value}" for name, value in case.items()))
                    raise

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in values]
        run.__signature__ = signature.replace(parameters=left)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return mark
