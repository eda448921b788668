"""The candidates of `strategies`: who takes part, who is lossless, who is compared after the screening, which pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import towpath
from benchmarks import deepspeed_peer
from benchmarks.harness import figures
from benchmarks.harness.figures import Check
from benchmarks.peers import AUTO, DEEPSPEED, CandidateSpec
from benchmarks.workload import Workload
from towpath.comparison import is_lossless
from towpath.core.formats import item_bytes
from towpath.errors import ConfigError, TowpathError
from towpath.topology.cluster import Topology

# The rank of ddp with low-rank gradients, and of DDP's PowerSGD hook.
RANK = 4
LOW_RANK, POWERSGD = f"ddp gradients=low-rank:{RANK}", f"torch-ddp tuned powersgd={RANK}"

# In addition to every preset: the planner's choice, and presets whose one message per step has few bits.
_MORE_OF_OURS = (
    *(AUTO, f"{AUTO} allow=int8,int4:64"),
    *(LOW_RANK, "ddp gradients=int4:64", "mics gradients=int4:64", "paro-nig gradients=int4:64"),
)
# Wires under PyTorch's own.
_WIRED = ("fsdp2 wires", "fsdp2 tuned wires", "hsdp wires", "hsdp tuned reshard=no wires", "torch-ddp tuned wires")
_PEERS = (
    *("torch-ddp", "torch-ddp tuned", "torch-ddp bf16", "torch-ddp tuned bf16"),
    *(f"torch-ddp powersgd={RANK}", POWERSGD),
    *("fsdp2", "fsdp2 tuned", "fsdp2 tuned ring"),
    *("fsdp2 reshard=node", "fsdp2 tuned reshard=node", "fsdp2 tuned reshard=node ring"),
    *("fsdp2 reshard=no", "fsdp2 tuned reshard=no", "fsdp2 tuned reshard=no ring"),
    *("hsdp", "hsdp tuned", "hsdp tuned ring"),
    *("hsdp reshard=no", "hsdp tuned reshard=no", "hsdp tuned reshard=no ring"),
)
# With several micro-steps: gradients stay unsharded, and are reduced once.
_PEERS_OF_SEVERAL = ("fsdp2 sync=last", "fsdp2 tuned sync=last", "fsdp2 tuned sync=last ring")
_DEEPSPEED = tuple(
    f"deepspeed {how}{which}" for how in ("", "tuned ") for which in ("stage=1", "stage=2", "stage=3", "stage=3 hpz")
)
# The candidates of a quick run: those that win most often on either side, and the best known.
QUICK = ("paro-ngg", "mics", "zero++", "fsdp2 tuned", "hsdp tuned", "torch-ddp tuned bf16")
# Names of groups.
OURS, PEERS = "ours", "peers"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate by name. A peer with wires is `ours`.

    A `helped` peer uses a part of ours, so that a flaw of the backend does not count.
    """

    name: str
    ours: bool
    lossless: bool
    helped: bool = False

    @staticmethod
    def of(name: str, topology: Topology, dtype: str) -> Candidate:
        """Return the candidate with a name."""
        spec = CandidateSpec.parse(name)
        return Candidate(name, spec.ours, lossless(name, topology, dtype), spec.foreign and spec.has("ring"))


def every_name(micro_steps: int) -> tuple[str, ...]:
    """Return the names of all candidates, ours first, and DeepSpeed's if it is installed."""
    deepspeed = _DEEPSPEED if deepspeed_peer.installed() else ()
    peers = (*_PEERS, *(_PEERS_OF_SEVERAL if micro_steps > 1 else ()), *deepspeed)
    return (*towpath.strategies(), *_MORE_OF_OURS, *_WIRED, *peers)


def expanded(names: Sequence[str], micro_steps: int) -> tuple[str, ...]:
    """Return the names with the groups `ours` and `peers` replaced by their members."""
    groups = {OURS: [n for n in every_name(micro_steps) if CandidateSpec.parse(n).ours]}
    groups[PEERS] = [n for n in every_name(micro_steps) if n not in groups[OURS]]
    return tuple(dict.fromkeys(each for name in names for each in groups.get(name, [name])))


def lossless(name: str, topology: Topology, dtype: str) -> bool:
    """Return whether a candidate sends nothing in fewer bits than the run computes in."""
    spec = CandidateSpec.parse(name)
    if spec.name == AUTO:
        return not spec.has("allow")
    if spec.foreign:
        narrow_hook = spec.has("bf16") and item_bytes(dtype) > item_bytes("bfloat16")
        encoded = bool(spec.options.get("wires"))
        return not (narrow_hook or encoded or spec.has("powersgd") or spec.has("quantized"))
    return is_lossless(spec.strategy(topology), dtype)


def candidates_of(names: Sequence[str], workload: Workload) -> list[Candidate]:
    """Return the candidates with these names. An unknown name, or one that cannot run here, is a `ConfigError`."""
    try:
        if any(CandidateSpec.parse(name).name == DEEPSPEED for name in names):
            deepspeed_peer.check_installed()
        return [Candidate.of(name, workload.topology, workload.dtype) for name in dict.fromkeys(names)]
    except (ValueError, TowpathError) as error:
        raise ConfigError(str(error)) from None


# After the screening --------------------------------------------------------------------------------------------------

# The best five of ours, with some of each kind: otherwise codecs could leave no lossless candidate.
_OUR_LOSSLESS, _OUR_LOSSY, _LOSSY_PEERS = 3, 2, 1

# Targets as multiples of the speed of the best tuned lossless peer: for our best lossless candidate everywhere, and for
# our best lossy one from a comm ratio of four.
LOSSLESS_TARGET, LOSSY_TARGET, LOSSY_FROM_RATIO = 0.97, 2.2, 4.0
LOW_RANK_TARGET = 0.97


def finalists(candidates: Iterable[Candidate], seconds: Mapping[str, float]) -> list[Candidate]:
    """Return the candidates of the comparison, ours before peers, and the faster before the slower.

    Of each library, the best lossless peer takes part, as it is and with our ring if that is faster. A peer that is
    last on slow links may be first on others. The pair of equal rank always takes part.
    """
    screened = sorted((c for c in candidates if c.name in seconds), key=lambda c: seconds[c.name])
    peers = [c for c in screened if not c.ours and c.lossless]

    def first(count: int, *, ours: bool, lossless: bool) -> list[Candidate]:
        return [c for c in screened if c.ours is ours and c.lossless is lossless][:count]

    chosen = {
        *first(_OUR_LOSSLESS, ours=True, lossless=True),
        *first(_OUR_LOSSY, ours=True, lossless=False),
        *_best_of_each_library(peers),
        *_best_of_each_library([c for c in peers if not c.helped]),
        *first(_LOSSY_PEERS, ours=False, lossless=False),
        *(c for c in screened if c.name in (LOW_RANK, POWERSGD)),
    }
    return sorted(chosen, key=lambda c: (not c.ours, seconds[c.name]))


def _best_of_each_library(peers: Sequence[Candidate]) -> Iterable[Candidate]:
    return {CandidateSpec.parse(each.name).name: each for each in reversed(peers)}.values()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two candidates and the least speed-up of `ours` over `theirs`. `what` says which pair it is."""

    what: str
    ours: str
    theirs: str
    at_least: float | None = None

    def check(self, seconds: Mapping[str, Sequence[float]]) -> Check:
        """Return the speed-up of the pair."""
        what = f"{self.what}: {self.ours} against {self.theirs}, times as fast"
        return figures.speedup(seconds, what, self.ours, self.theirs, self.at_least)


OUR_LOSSLESS = "lossless"
AGAINST_UNHELPED = "lossless, peers as they come"
AGAINST_DEEPSPEED = "lossless, against DeepSpeed"
OUR_LOSSY = "lossy against lossless"
EQUAL_RANK = "low rank"


def pairs(compared: Sequence[Candidate], medians: Mapping[str, float], comm_ratio: float | None) -> list[Pair]:
    """Return the pairs of a comparison: the best of ours of each kind against the best peer."""

    def fastest(candidates: Iterable[Candidate]) -> str | None:
        return min((c.name for c in candidates), key=lambda name: medians[name], default=None)

    ours = fastest(c for c in compared if c.ours and c.lossless)
    peer = fastest(c for c in compared if not c.ours and c.lossless)
    unhelped = fastest(c for c in compared if not c.ours and c.lossless and not c.helped)
    lossy = fastest(c for c in compared if c.ours and not c.lossless)
    deepspeed = fastest(c for c in compared if c.lossless and CandidateSpec.parse(c.name).name == DEEPSPEED)
    found: list[Pair] = []
    if ours and peer:
        found.append(Pair(OUR_LOSSLESS, ours, peer, LOSSLESS_TARGET))
    if ours and unhelped and unhelped != peer:
        found.append(Pair(AGAINST_UNHELPED, ours, unhelped, LOSSLESS_TARGET))
    if ours and deepspeed and deepspeed != peer:
        found.append(Pair(AGAINST_DEEPSPEED, ours, deepspeed, LOSSLESS_TARGET))
    if lossy and peer:
        target = LOSSY_TARGET if comm_ratio is not None and comm_ratio >= LOSSY_FROM_RATIO else None
        found.append(Pair(OUR_LOSSY, lossy, peer, target))
    if {LOW_RANK, POWERSGD} <= {c.name for c in compared}:
        found.append(Pair(EQUAL_RANK, LOW_RANK, POWERSGD, LOW_RANK_TARGET))
    return found
