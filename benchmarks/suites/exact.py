"""Compare steps with exact transport with those of the best tuned peers, and with the same strategies without it.

    exact [CASE …] [--quick] [--resume]

Two nodes of two ranks train in bf16. Blocks compute, or wait and replay recorded gradients. The candidates of each case
are few: strategies with exact transport, one without, and the peers that were the fastest in the suite `strategies`.
Bits per element between nodes are next to each speed-up, because they depend on the learning rate and the step.

At a ratio, links are slow enough that FSDP2's communication takes as many times the computation. The case at 200 mbit
is README's. Cases `unshaped` have links as fast as the machine allows. There exact transport costs time, and "auto" has
to leave it off. `python -m benchmarks report exact` has the means over the ratios.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from benchmarks.environment import Environment, NodeLink, waiting
from benchmarks.harness import figures, results
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.peers import AUTO
from benchmarks.report import comparison_table
from benchmarks.suites.strategies import BITS, QUICK_DEPTH, QUICK_WIDTH, StrategiesCase
from benchmarks.workload import SQUARE, Workload

EXACT = " exact=true"
RATIOS = (8.0, 4.0, 2.0, 1.0)
RATE = "200mbit"
HSDP, FSDP2, DDP = "hsdp tuned reshard=no ring", "fsdp2 tuned reshard=no ring", "torch-ddp tuned bf16"
# By whether blocks wait and the number of micro-steps: ours without exact transport, all of ours with it, and peers.
# They are those that win in `strategies`. With blocks that compute, all ranks share two cores, and the strategies that
# work least on them are the fastest.
CANDIDATES = {
    (False, 1): ("paro-igg", ("paro-igg", "paro-ngg"), (HSDP, FSDP2, DDP)),
    (False, 4): ("paro-nng", ("paro-nng", "paro-nig"), (HSDP, DDP)),
    (True, 1): ("paro-iig", ("paro-iig", "paro-nig"), (HSDP, DDP)),
    (True, 4): ("paro-nig", ("paro-nig", "paro-iig"), (HSDP, DDP)),
}
# Least speed-up over the best lossless peer: in the mean over the ratios, and at the ratio 8.
MEANS = {(False, 1): 1.5, (True, 1): 1.42, (False, 4): 1.17, (True, 4): 1.17}
AT_EIGHT = {1: 1.9, 4: 1.35}
AUTO_UNSHAPED = 0.97
MOST_SLOWER = 1.05  # of a step with exact transport, on links on which it cannot pay


@dataclass(frozen=True, slots=True)
class ExactCase:
    """A comparison of exact transport in one environment."""

    name: str
    workload: Workload
    link: NodeLink

    @property
    def group(self) -> tuple[bool, int]:
        """Whether blocks wait, and the number of micro-steps."""
        return self.workload.wait_seconds is not None, self.workload.micro_steps

    @property
    def candidates(self) -> tuple[str, ...]:
        """The candidates, ours first."""
        plain, exact, peers = CANDIDATES[self.group]
        auto = () if self.link.comm_ratio else (AUTO,)
        return (plain, *(name + EXACT for name in exact), *auto, *peers)

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Compare the candidates."""
        workload = self.workload
        if settings.quick:
            workload = replace(workload, width=QUICK_WIDTH, depth=QUICK_DEPTH)
        options = Namespace(candidates=self.candidates, screen=False, quick=settings.quick)
        case = StrategiesCase(self.name, workload, self.link)
        found = case.measure(replace(settings, options=options))
        bits = [check for check in found["checks"] if check.what.endswith(BITS)]
        return {**found, "checks": [*self._checks(found), *bits]}

    def _checks(self, found: Mapping[str, Any]) -> Iterator[Check]:
        seconds, usual = found["seconds"], found["median_seconds"]
        plain = CANDIDATES[self.group][0]
        exact = [name for name in self.candidates if name.endswith(EXACT) and name in usual]
        peers = [name for name in CANDIDATES[self.group][2] if name in usual]
        fastest, peer = (min(names, key=usual.__getitem__, default=None) for names in (exact, peers))
        at_eight = AT_EIGHT[self.workload.micro_steps] if self.link.comm_ratio == RATIOS[0] else None
        for ours, least in ((fastest, at_eight), (plain, None), (AUTO, AUTO_UNSHAPED)):
            if ours in usual and peer is not None:
                yield figures.speedup(seconds, f"{ours} against {peer}, times as fast", ours, peer, least)
        if plain in usual and plain + EXACT in usual:
            most = None if self.link.comm_ratio else MOST_SLOWER
            yield figures.ratio(seconds, plain + EXACT, plain, at_most=most)


def means(lines: Iterable[Mapping[str, Any]]) -> list[Check]:
    """Return the mean over the ratios of the best speed-ups with exact transport, where every ratio was measured."""
    speedups: dict[tuple[bool, int], dict[float, float]] = {}
    for line in lines:
        ratio, workload, checks = line["case"]["link"]["comm_ratio"], line["case"]["workload"], line["checks"]
        if ratio is not None and checks and f"{EXACT} against " in checks[0]["what"]:
            group = workload["wait_seconds"] is not None, workload["micro_steps"]
            speedups.setdefault(group, {})[ratio] = checks[0]["found"]
    found: list[Check] = []
    for (waits, micro_steps), by_ratio in sorted(speedups.items()):
        if set(by_ratio) == set(RATIOS):
            what = f"blocks {'wait' if waits else 'compute'}, {micro_steps} micro-step{'s' * (micro_steps > 1)}"
            limit = MEANS[waits, micro_steps]
            found.append(Check(f"{what}: mean speed-up over the best peer", mean(by_ratio.values()), at_least=limit))
    return found


def mean_rows() -> list[Mapping[str, Any]]:
    """Return the means of the committed results, as a result line keeps figures."""
    lines = results.last(results.read(results.file_of("exact"))).values()
    return [check.recorded() for check in means(lines)]


def summary() -> str:
    """Return the means of the committed results and their limits."""
    return "\n".join(figures.verdict(check) for check in mean_rows())


def cases() -> Iterator[ExactCase]:
    """Yield all cases. Slow links come before fast ones, so that candidates can stay."""
    for waits, micro_steps in CANDIDATES:
        workload = Workload(SQUARE, micro_steps, "bfloat16")
        at_rate = () if waits or micro_steps > 1 else (NodeLink(inter=RATE),)
        for link in (*(NodeLink(ratio) for ratio in RATIOS), *at_rate, NodeLink()):
            each = Environment(waiting(workload) if waits else workload, link)
            yield ExactCase(each.name.removeprefix("2x2-"), each.workload, link)


SUITES = (Suite("exact", __doc__ or "", tuple(cases()), shown=comparison_table, summary=summary),)
