"""The table in docs/concepts/sharding.md of what leaves save: a large embedding and output layer as units.

python -m tools.docs.draw_leaves    prints it
"""

from __future__ import annotations

from dataclasses import replace

from tools.docs import figures
from towpath import planning, strategy
from towpath.core.units import BucketSpec, UnitSpec
from towpath.plan.model import Model

MODEL, CLUSTER, NODES = "llama-3-8b", "dgx-a100-200g", 8
PRESETS = ("zero3", "zero++", "mics")
BUFFERS = ("weight slots", "gradient slots", "arriving gradients", "wire")


def in_the_root(model: Model) -> Model:
    """Return the model as `shard(units=[Block])` divides it: with its leaves in the root unit."""
    root, *others = model.units
    leaves = [unit for unit in others if unit.spec.leaf]
    numels = [n for unit in (*leaves, root) for bucket in unit.spec.buckets for n in bucket.numels]
    merged = replace(root, spec=UnitSpec("", (BucketSpec(tuple(numels)),), root=True))
    for leaf in leaves:
        merged = merged.combined_with(leaf)
    merged = replace(merged, entering=root.entering)
    return replace(model, units=(merged, *(unit for unit in others if not unit.spec.leaf)))


def table() -> str:
    cluster, model = planning.load_cluster(CLUSTER, nodes=NODES), planning.describe_model(MODEL)
    batching = planning.Batching(1, 1, checkpointing=True)
    request = planning.Request(batch=cluster.topology.world, memory=cluster.memory)
    rows: list[tuple[str, ...]] = []
    for preset in PRESETS:
        mine = strategy(preset, cluster.topology)
        both = [planning.Solver(m, cluster, request).predict(mine, batching) for m in (in_the_root(model), model)]
        memory = [f"{sum(step.memory[part] for part in BUFFERS) / 2**30:.1f} GiB" for step in both]
        exposed = [f"{1e3 * sum(step.exposed.values()):.0f} ms" for step in both]
        rows.append((f"`{preset}`", *memory, *exposed, *(f"{step.seconds:.2f} s" for step in both)))
    parts = ("buffers", "exposed", "step")
    head = ("strategy", *(f"{part}, {where}" for part in parts for where in ("in the root", "as leaves")))
    return figures.table(head, rows)


TABLES = {"large-leaves": table}

if __name__ == "__main__":
    print(table())
