"""[parallel]: which ranks have the same part of the model, and where they lie.

Neighbours share the layers of a stage; then come the copies of that, and then the next stage.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from towpath.errors import ConfigError
from towpath.topology.cluster import Topology
from towpath.train.config import ParallelConfig
from towpath.train.job import Job


def copies_of(parallel: ParallelConfig, world: int) -> int:
    """How often the job has each part of the model, and so among how many ranks a step's samples are shared out."""
    together = parallel.pipeline * parallel.tensor
    if world % together == 0:
        return world // together
    said = f"parallel.pipeline = {parallel.pipeline}"
    if parallel.tensor == 1:
        raise ConfigError(f"{said}: expected a divisor of the job's {world} ranks, which have as many stages each.")
    raise ConfigError(
        f"{said} × parallel.tensor = {parallel.tensor}: expected a divisor of the job's {world} ranks, got {together}."
    )


def topology_of_copies(parallel: ParallelConfig, launched: Topology) -> Topology:
    """How the ranks lie that hold the same part of the model: all, if it has one part. Neighbours are tensor-parallel,
    and the ranks of a stage are neighbours."""
    nodes, ranks = launched.nodes, launched.ranks_per_node
    if ranks % parallel.tensor:
        raise ConfigError(
            f"parallel.tensor = {parallel.tensor}: expected a divisor of the {ranks} ranks of a node, which the sums "
            "of shared layers are not to leave."
        )
    of_a_stage = copies_of(parallel, launched.world) * parallel.tensor
    if of_a_stage % ranks and ranks % of_a_stage:
        raise ConfigError(
            f"parallel.pipeline leaves {of_a_stage} ranks for each stage, which do not fill nodes of {ranks}: expected "
            "a multiple or a divisor of that."
        )
    nodes, ranks = (of_a_stage // ranks, ranks) if of_a_stage >= ranks else (1, of_a_stage)
    return Topology(nodes, ranks // parallel.tensor)


def layout_mesh(parallel: ParallelConfig, job: Job) -> DeviceMesh:
    """Of dimensions 'pp' and 'dp', and 'tp' where layers are shared."""
    sizes, names = (parallel.pipeline, copies_of(parallel, job.world), parallel.tensor), ("pp", "dp", "tp")
    used = 3 if parallel.tensor > 1 else 2
    return init_device_mesh(job.device.type, sizes[:used], mesh_dim_names=names[:used])
