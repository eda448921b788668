"""Measure the bits that an exact message takes of each element of a snapshot, relative to the snapshot before.

    python -m benchmarks.snapshot_bytes [--steps 200] [--every 10]

One process trains a GPT of 2.9 million parameters in float32 with AdamW, on the sources of the Python standard library.
Every `every` steps, it encodes the weights and both states of AdamW as differences to those of the snapshot before, and
as values. The means are over all snapshots after the first half of the steps. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import mean

import torch
from torch import Tensor

from benchmarks import gpt
from benchmarks.suites.exact_bytes import encoded

BATCH, LENGTH = 8, 128
WARMUP = 20  # steps


def bits(learning_rate: float, beta2: float, steps: int, every: int) -> dict[str, float]:
    """Return the bits of an element by state and codec, as the mean of the snapshots of the second half of a run."""
    torch.manual_seed(0)
    model, data = gpt.GPT(context=LENGTH), gpt.batches(0, BATCH, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, beta2), weight_decay=0.1)
    before: dict[str, Tensor] = {}
    found: dict[str, list[float]] = defaultdict(list)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, step / WARMUP)
        model(*next(data)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every:
            continue
        held = {"weights": [p.detach().flatten() for p in model.parameters()]}
        for name in ("exp_avg", "exp_avg_sq"):
            held[name] = [optimizer.state[p][name].flatten() for p in model.parameters()]
        now = {name: torch.cat(parts) for name, parts in held.items()}
        for name, values in now.items() if step > steps // 2 else ():
            for codec, old in (("differences", before[name]), ("values", None)):
                elements, size = encoded(old, values)
                found[f"{name} {codec}"].append(8 * size / elements)
        before = now
    return {name: mean(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    for learning_rate, beta2 in ((1e-3, 0.95), (1e-4, 0.95), (1e-4, 0.999)):
        found = bits(learning_rate, beta2, options.steps, options.every)
        states = ("weights", "exp_avg", "exp_avg_sq")
        cells = [f"{name} {found[f'{name} differences']:.1f} or {found[f'{name} values']:.1f}" for name in states]
        total = sum(found[f"{name} differences"] for name in states) / 96
        print(f"lr {learning_rate:g}, beta2 {beta2}: {', '.join(cells)} bits; as differences, {total:.3f} of all bytes")


if __name__ == "__main__":
    main()
