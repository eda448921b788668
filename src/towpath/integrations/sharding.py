"""What all frameworks need of us: to shard a model that an optimizer already has the parameters of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from towpath.api import shard
from towpath.core.formats import Dtype, MixedPrecisionPolicy, Precision
from towpath.core.presets import Preset
from towpath.core.strategy import Offload, Strategy
from towpath.engine.checks.optimizers import adopt
from towpath.engine.executor import engine_of, engine_with
from towpath.engine.layout import UnitChoice
from towpath.engine.parameters.unit import CHECK_EVERY
from towpath.errors import ShardError
from towpath.optim import members_of, whole_of
from towpath.planner.request import Workload
from towpath.sharded_module import ShardedModule
from towpath.topology.cluster import Topology

# What frameworks call mixed precision. Gradients are reduced as they would be by FSDP: in float32.
_MIXED: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Sharding:
    """What `towpath.shard()` is to be called with. `precision`: by default what the framework's own setting says."""

    strategy: Preset | Literal["auto"] | str | Strategy
    topology: Topology | None = None
    units: UnitChoice | None = None
    precision: Precision | Dtype | MixedPrecisionPolicy | None = None
    mesh: DeviceMesh | None = None
    workload: Workload | None = None
    offload: Offload | None = None
    check_every: int = CHECK_EVERY

    def __post_init__(self) -> None:
        if self.strategy == "auto" and self.workload is None:
            raise ShardError(
                'strategy="auto" has to know what a step computes. Pass strategy=Sharding("auto", workload='
                "towpath.Workload(tokens=…)), with the tokens of one rank's forward pass, and micro_steps=, optimizer= "
                "and memory= as they are. towpath.integrations has Sharding."
            )

    @staticmethod
    def of(strategy: str | Strategy | Sharding) -> Sharding:
        return strategy if isinstance(strategy, Sharding) else Sharding(strategy)

    def apply(self, model: nn.Module, mixed: str = "no") -> None:
        """Shard `model` in place. `mixed`: the framework's mixed precision, "no", "bf16" or "fp16"."""
        precision = self.precision
        if precision is None and mixed != "no":
            if mixed not in _MIXED:
                raise ShardError(
                    f'mixed precision {mixed!r}: expected "no", "bf16" or "fp16". What else there is to say takes '
                    "Sharding(…, precision=towpath.Precision(…))."
                )
            precision = Precision(params=_MIXED[mixed], reduce=torch.float32)
        shard(
            model,
            self.strategy,
            topology=self.topology,
            units=self.units,
            precision=precision,
            mesh=self.mesh,
            workload=self.workload,
            offload=self.offload,
            check_every=self.check_every,
        )


def take_over(optimizer: Optimizer, model: nn.Module | None = None) -> None:
    """Prepare `optimizer` for the sharded parameters that it has, also if it was made before the model was sharded.

    Args:
        optimizer: The optimizer. If it has no sharded parameters, nothing is done.
        model: A sharded model. If the optimizer has none of its parameters, nothing is done. By default, any model.

    Raises:
        ShardError: The optimizer has stepped already, or needs whole matrices and is not wrapped.
    """
    adopt(optimizer)
    engines = {engine_with(p) for group in optimizer.param_groups for p in group["params"]} - {None}
    if not engines or (model is not None and engine_of(model) not in engines):
        return
    for member in members_of(optimizer):
        if needs_owner_stepped(member):
            name = type(member).__name__
            raise ShardError(
                f"{name} computes with whole matrices, of which each rank has a part. Pass "
                f"towpath.optim.owner_stepped({name}(…)) instead, or towpath.optim.chain() of it and others."
            )
    for whole in whole_of(optimizer):
        whole.share_out()


def needs_owner_stepped(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is an Adafactor or a Muon, PyTorch's or another package's, that is not wrapped."""
    return any(kind.__name__ in ("Adafactor", "Muon") for kind in type(optimizer).__mro__)


def is_sharded(model: nn.Module) -> TypeGuard[ShardedModule]:
    return isinstance(model, ShardedModule)


def need_process_group() -> None:
    """One process that nothing has launched is a group of its own, so that a script can be tried by itself."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def not_installed(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'towpath[{extra}]'.", name=error.name)
