"""Who takes part in `towpath bench strategies`, and who of them is lossless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import towpath
from towpath.bench import deepspeed_peer
from towpath.bench.peers import AUTO, CandidateSpec
from towpath.core.formats import Codec, item_bytes
from towpath.core.strategy import WITH_TRANSPORT
from towpath.topology.cluster import Topology

# Of ddp with low-rank gradients, and of DDP's PowerSGD hook beside it.
RANK = 4
LOW_RANK, POWERSGD = f"ddp gradients=low-rank:{RANK}", f"torch-ddp tuned powersgd={RANK}"

# Beside every preset as it comes: the planner's choice, and presets that send in few bits what they send once a step.
_MORE_OF_OURS = (
    *(AUTO, f"{AUTO} allow=int8,int4:64"),
    *(LOW_RANK, "ddp gradients=int4:64", "mics gradients=int4:64", "paro-nig gradients=int4:64"),
)
_PEERS = (
    *("torch-ddp", "torch-ddp tuned", "torch-ddp bf16", "torch-ddp tuned bf16"),
    *(f"torch-ddp powersgd={RANK}", POWERSGD),
    *("fsdp2", "fsdp2 tuned", "fsdp2 tuned ring"),
    *("fsdp2 reshard=node", "fsdp2 tuned reshard=node", "fsdp2 tuned reshard=node ring"),
    *("fsdp2 reshard=no", "fsdp2 tuned reshard=no", "fsdp2 tuned reshard=no ring"),
    *(
        "hsdp",
        "hsdp tuned",
        "hsdp tuned ring",
        "hsdp reshard=no",
        "hsdp tuned reshard=no",
        "hsdp tuned reshard=no ring",
    ),
)
# Where a step has several micro-steps: gradients stay whole, and are reduced once.
_PEERS_OF_SEVERAL = ("fsdp2 sync=last", "fsdp2 tuned sync=last", "fsdp2 tuned sync=last ring")

# Names of groups.
OURS, PEERS = "ours", "peers"

# Where it is installed.
_DEEPSPEED = tuple(
    f"deepspeed {how}{which}" for how in ("", "tuned ") for which in ("stage=1", "stage=2", "stage=3", "stage=3 hpz")
)

# Of a quick run: who wins most often on either side, and who is best known.
QUICK = ("paro-ngg", "mics", "zero++", "fsdp2 tuned", "hsdp tuned", "torch-ddp tuned bf16")


@dataclass(frozen=True, slots=True)
class Entrant:
    """`helped`: a peer with a part of ours, so that no backend's flaw is held against it."""

    name: str
    ours: bool
    lossless: bool
    helped: bool = False

    @staticmethod
    def of(name: str, topology: Topology, dtype: str) -> Entrant:
        kind = CandidateSpec.parse(name)
        return Entrant(name, not kind.foreign, lossless(name, topology, dtype), kind.foreign and kind.has("ring"))


def everyone(micro_steps: int) -> tuple[str, ...]:
    """By name, ours first."""
    deepspeed = _DEEPSPEED if deepspeed_peer.installed() else ()
    peers = (*_PEERS, *(_PEERS_OF_SEVERAL if micro_steps > 1 else ()), *deepspeed)
    return (*towpath.strategies(), *_MORE_OF_OURS, *peers)


def named(names: Sequence[str], micro_steps: int) -> tuple[str, ...]:
    """`ours` and `peers` are all of them."""
    groups = {OURS: [n for n in everyone(micro_steps) if not CandidateSpec.parse(n).foreign]}
    groups[PEERS] = [n for n in everyone(micro_steps) if n not in groups[OURS]]
    return tuple(dict.fromkeys(each for name in names for each in groups.get(name, [name])))


def lossless(name: str, topology: Topology, dtype: str) -> bool:
    """Whether nothing travels in fewer bits than the run computes in: of a codec, or a hook, that is narrower."""
    kind = CandidateSpec.parse(name)
    if kind.name == AUTO:
        return not kind.has("allow")
    if kind.foreign:
        narrow_hook = kind.has("bf16") and item_bytes(dtype) > item_bytes("bfloat16")
        return not (narrow_hook or kind.has("powersgd") or kind.has("quantized"))
    strategy = kind.strategy(topology)
    codecs = [strategy.transport(kind).codec for kind in WITH_TRANSPORT if getattr(strategy.moves, kind.value)]
    return all(
        codec == "none" or (isinstance(codec, Codec) and not _narrower(codec, dtype))
        for codec in (*codecs, strategy.frozen_codec)
    )


def _narrower(codec: Codec, dtype: str) -> bool:
    """A codec with scales rounds whatever it is given."""
    return codec.largest is not None or codec.encoded_bytes(1) < item_bytes(dtype)
