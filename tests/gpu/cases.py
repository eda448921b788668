"""All cases of tools/gpu.py, by part and value: a run that is cut off has tried the most telling ones.

Cases without ranks run next to the others. Those that need as many ranks as the one before share their ranks.
"""

from __future__ import annotations

from tests.gpu import figures, kernels, on_ranks, starting
from tests.gpu.case import Case

CASES: list[Case] = [
    *kernels.CASES,
    *on_ranks.ON_FOUR,
    *starting.CASES[:7],
    *on_ranks.ON_FEWER,
    *starting.CASES[7:],
    *on_ranks.ON_ONE,
    *kernels.SANITIZED,
    *figures.CASES,
]
