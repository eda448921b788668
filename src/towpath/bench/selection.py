"""Who is raced after the screening, and which pairs a race is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from towpath.bench.field import LOW_RANK, POWERSGD, Entrant
from towpath.bench.harness import figures
from towpath.bench.harness.figures import Check
from towpath.bench.peers import DEEPSPEED, CandidateSpec

# The best five of ours: some of each kind, or codecs would leave nobody for the race that lossless peers are in.
_OUR_LOSSLESS, _OUR_LOSSY, _LOSSY_PEERS = 3, 2, 1

# At least so many times as fast as the best tuned lossless peer: our best lossless everywhere, our best lossy where
# communication takes four times as long as the computation, or longer.
LOSSLESS_TARGET, LOSSY_TARGET, LOSSY_FROM_REGIME = 0.97, 2.2, 4.0
LOW_RANK_TARGET = 0.97


def finalists(entrants: Iterable[Entrant], seconds: Mapping[str, float]) -> list[Entrant]:
    """Of those that were screened: ours before peers, the quicker before the slower. Of each library of peers the best
    lossless one is raced, as it comes and with our ring where that is quicker: who is last on slow links may be first
    on others. The pair of equal rank is always raced."""
    screened = sorted((e for e in entrants if e.name in seconds), key=lambda e: seconds[e.name])
    peers = [e for e in screened if not e.ours and e.lossless]
    chosen = {
        *_first(screened, _OUR_LOSSLESS, ours=True, lossless=True),
        *_first(screened, _OUR_LOSSY, ours=True, lossless=False),
        *_best_of_each_library(peers),
        *_best_of_each_library([e for e in peers if not e.helped]),
        *_first(screened, _LOSSY_PEERS, ours=False, lossless=False),
        *(e for e in screened if e.name in (LOW_RANK, POWERSGD)),
    }
    return sorted(chosen, key=lambda e: (not e.ours, seconds[e.name]))


def _first(screened: Sequence[Entrant], count: int, *, ours: bool, lossless: bool) -> list[Entrant]:
    return [e for e in screened if e.ours is ours and e.lossless is lossless][:count]


def _best_of_each_library(peers: Sequence[Entrant]) -> Iterable[Entrant]:
    return {CandidateSpec.parse(each.name).name: each for each in reversed(peers)}.values()


@dataclass(frozen=True, slots=True)
class Pair:
    """`ours` is to be at least `at_least` times as fast as `theirs`. `what`: which pair this is."""

    what: str
    ours: str
    theirs: str
    at_least: float | None = None

    def check(self, seconds: Mapping[str, Sequence[float]]) -> Check:
        found = figures.ratio(seconds, self.theirs, self.ours)
        what = f"{self.what}: {self.ours} against {self.theirs}, times as fast"
        return Check(what, found.found, at_least=self.at_least, interval=found.interval)


OUR_LOSSLESS = "lossless"
AGAINST_UNHELPED = "lossless, peers as they come"
AGAINST_DEEPSPEED = "lossless, beside DeepSpeed"
OUR_LOSSY = "lossy against lossless"
EQUAL_RANK = "low rank"


def pairs(raced: Sequence[Entrant], medians: Mapping[str, float], regime: float | None) -> list[Pair]:
    """Lossless against lossless; the best of ours against the best peer, whoever they are in this race."""
    ours = _quickest(medians, (e for e in raced if e.ours and e.lossless))
    peer = _quickest(medians, (e for e in raced if not e.ours and e.lossless))
    unhelped = _quickest(medians, (e for e in raced if not e.ours and e.lossless and not e.helped))
    lossy = _quickest(medians, (e for e in raced if e.ours and not e.lossless))
    deepspeed = _quickest(medians, (e for e in raced if e.lossless and CandidateSpec.parse(e.name).name == DEEPSPEED))
    there = {e.name for e in raced}
    found: list[Pair] = []
    if ours and peer:
        found.append(Pair(OUR_LOSSLESS, ours, peer, LOSSLESS_TARGET))
    if ours and unhelped and unhelped != peer:
        found.append(Pair(AGAINST_UNHELPED, ours, unhelped, LOSSLESS_TARGET))
    if ours and deepspeed and deepspeed != peer:
        found.append(Pair(AGAINST_DEEPSPEED, ours, deepspeed, LOSSLESS_TARGET))
    if lossy and peer:
        asked = LOSSY_TARGET if regime is not None and regime >= LOSSY_FROM_REGIME else None
        found.append(Pair(OUR_LOSSY, lossy, peer, asked))
    if {LOW_RANK, POWERSGD} <= there:
        found.append(Pair(EQUAL_RANK, LOW_RANK, POWERSGD, LOW_RANK_TARGET))
    return found


def _quickest(medians: Mapping[str, float], entrants: Iterable[Entrant]) -> str | None:
    return min((e.name for e in entrants), key=lambda name: medians[name], default=None)
