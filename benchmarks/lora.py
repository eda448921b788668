"""LoRA over slow links: what a step costs beside the computation alone, where most of the model does not train.

    python benchmarks/lora.py [CASE …] [--rounds 6] [--quick] [--resume]

Two nodes of two ranks train PEFT's adapters of a GPT. The cables are such that FSDP2's communication alone takes four
times what the module computes (races.py); that a whole step of FSDP2, plain and as its experts tune it, takes at least
three times as long as the computation is checked in the race. FSDP2 has the same parameters frozen, and reduces no
gradients of them. Ours keep them in the node: by default (`zero3`), or with all else (`mics`).

In `lora` all ranks compute on the machine's own cores, where whatever sends and receives competes with it; in
`lora-elsewhere` blocks wait instead, as for a device of their own. Needs `pip install 'towpath[peft]'`.
"""

from __future__ import annotations

from dataclasses import replace

from engine import ELSEWHERE
from races import COMPUTE, Field
from towpath.bench.harness.suite import Suite
from towpath.bench.workload import PLAIN, Workload

RANK = 8
REGIME = 4.0  # so that a step that overlaps all it can still takes three times the computation
MOST = 1.15
OURS, PEERS = ("zero3", "mics"), ("fsdp2", "fsdp2 tuned")
ASKED = (
    *((ours, COMPUTE, MOST) for ours in OURS),
    *((COMPUTE, peer, 1 / 3) for peer in PEERS),
)


def case(name: str, workload: Workload) -> Field:
    return Field(name, (*OURS, *PEERS), ASKED, replace(workload, adapters=RANK), regime=REGIME)


CASES = [case("lora", PLAIN), case("lora-elsewhere", replace(ELSEWHERE, dtype="float32"))]

SUITE = Suite("lora", __doc__ or "", CASES)

if __name__ == "__main__":
    SUITE.main()
