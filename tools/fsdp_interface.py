"""Check what `towpath.wires` uses of FSDP2 against the PyTorch that is installed.

    python -m tools.fsdp_interface

It takes one FSDP2 step on two gloo ranks with objects that record how they are called. It prints what holds and what
breaks, and exits with 1 if something breaks. Each check stands alone, so one that fails hides no other.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towpath.errors import StepError
from towpath.fsdp import fields
from towpath.fsdp.peers import factor_of

Calls = list[dict[str, Any]]


class Recorder:
    """An object in place of one of FSDP2's own. It records the calls, and makes them."""

    def __init__(self, stock: Any) -> None:
        self.stock, self.calls, self.allocated = stock, Calls(), Calls()
        self.returned: list[Any] = []

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.allocated.append({"": args, **kwargs})
        return self.stock.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = kwargs["input_tensor"].clone() if "input_tensor" in kwargs else None
        self.calls.append({"": args, "before": before, **kwargs})
        self.returned.append(self.stock(*args, **kwargs))
        return self.returned[-1]


class RecordingGroup(dist.ProcessGroup):
    """A process group of replicas, as `towpath.fsdp.replicas.ReplicaGroup` takes the place of FSDP2's."""

    def __init__(self, stock: dist.ProcessGroup) -> None:
        super().__init__(stock.rank(), stock.size())
        self.stock, self.calls = stock, []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.calls.append((tensors, opts.reduceOp))
        return self.stock.allreduce(tensors, opts)


class Table:
    """The checks so far, each with what broke."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def check(self, what: str, holds: Callable[[], Any]) -> None:
        """Add a row. `holds` returns False, or raises, if `what` breaks."""
        try:
            outcome = "" if holds() is not False else "is otherwise"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.rows.append((what, outcome))


def _model(mesh: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


def _has_keywords(calls: Calls, names: set[str]) -> bool:
    return bool(calls) and all(set(call) - {"", "before"} <= names and not call[""] for call in calls)


def _sharded(table: Table) -> None:
    """Check a model that is sharded over all ranks."""
    model = _model(init_device_mesh("cpu", (2,)))
    module, world = model[0], dist.get_world_size()
    check = table.check
    check("FSDPModule of a sharded module", lambda: isinstance(module, FSDPModule))
    check("_get_fsdp_state() and its parameter groups", lambda: len(fields.param_groups(module)) == 1)
    check("a module without parameters of its own has none", lambda: not fields.parameters_of(model))
    check("fsdp_params of a group", lambda: len(fields.parameters_of(module)) == 2)
    check(
        "sharded_param is the parameter of the module",
        lambda: fields.parameters_of(module)[0].sharded_param is module.weight,
    )
    check(
        "padded_sharded_param_size of a parameter",
        lambda: tuple(fields.parameters_of(module)[0].padded_sharded_param_size) == (4, 5),
    )
    check("sharded_param and sizes tell what is trained", lambda: fields.trained_in(module, 4 * 5 + 4) == (0, 1))
    check("_sharded_param_data is flat and padded", lambda: fields.shards_of(module)[0].shape == (20,))
    check("fsdp_pre_all_gather of a tensor subclass", lambda: fields.has_own_cast(module) is False)
    check("_mp_policy of a module", lambda: "None" in fields.dtypes_of(module))
    check("mesh_info.shard_process_group", lambda: isinstance(fields.groups_of(module)[0], dist.ProcessGroup))
    check("no mesh_info.replicate_process_group without replicas", lambda: fields.groups_of(module)[1] is None)
    check("_all_gather_comm and _reduce_scatter_comm", lambda: None not in fields.comms_of(module))

    gather, reduce = map(Recorder, fields.comms_of(module))
    versions: list[int] = []
    check("set_custom_all_gather", lambda: module.set_custom_all_gather(gather))
    check("set_custom_reduce_scatter", lambda: module.set_custom_reduce_scatter(reduce))
    check("the setters set what comms_of() reads", lambda: fields.comms_of(module) == (gather, reduce))
    steps: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: steps.append("before")),
        register_optimizer_step_post_hook(lambda *_: steps.append("after")),
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    check("version counters of parameters can be read", lambda: versions.extend(fields.versions_of(module)))
    check("a step of an optimizer", lambda: _step(model, optimizer))
    check("optimizers call global hooks before and after a step", lambda: steps == ["before", "after"])
    check("a step moves the version counters", lambda: _moved(module, versions))
    check("a write in place moves the version counters", lambda: _write(module) or _moved(module, versions))
    check("load_state_dict moves the version counters", lambda: _load(module) or _moved(module, versions))
    for hook in hooks:
        hook.remove()

    check("two all-gathers in a step", lambda: len(gather.calls) == 2)
    check(
        "all-gather is called with output_tensor, input_tensor, group, async_op",
        lambda: _has_keywords(gather.calls, {"output_tensor", "input_tensor", "group", "async_op"}),
    )
    check(
        "the group of an all-gather is mesh_info's",
        lambda: all(call["group"] is fields.groups_of(module)[0] for call in gather.calls),
    )
    check(
        "an all-gather's output is flat, rank by rank",
        lambda: all(call["output_tensor"].shape == (world * len(call["input_tensor"]),) for call in gather.calls),
    )
    check(
        "an all-gather's input is the flat shards of the module, one after the other",
        lambda: len(gather.calls[0]["before"]) == sum(len(each) for each in fields.shards_of(module)),
    )
    check("one reduce-scatter in a step", lambda: len(reduce.calls) == 1)
    check(
        "reduce-scatter is called with output_tensor, input_tensor, group, op",
        lambda: _has_keywords(reduce.calls, {"output_tensor", "input_tensor", "group", "op", "async_op"}),
    )
    check("reduce-scatter's result is used in stream order", lambda: not reduce.calls[0].get("async_op", False))
    check("op of a mean", lambda: factor_of(reduce.calls[0]["op"], world) == 1 / world)
    for name, recorder in (("all-gather", gather), ("reduce-scatter", reduce)):
        check(
            f"allocate(size, dtype=, device=) of the {name}",
            lambda recorder=recorder: all(
                set(call) == {"", "dtype", "device"} and len(call[""]) == 1 for call in recorder.allocated
            ),
        )
    check("wires may return a Work of their own", lambda: _gather_with_work(module, gather, model))
    check("set_force_sum_reduction_for_comms gives op SUM", lambda: _op_of_sum(model, module, reduce))
    check("the factor of PREMUL_SUM can be read", lambda: factor_of(_premul_sum(), world) == 0.25)
    check("stock objects can be set again", lambda: module.set_custom_all_gather(gather.stock))


def _moved(module: Any, versions: list[int]) -> bool:
    """Return whether the version counters have moved since the last call."""
    before, versions[:] = list(versions), fields.versions_of(module)
    return all(new > old for old, new in zip(before, versions, strict=True))


def _write(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def _load(module: Any) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


class _Done(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: Any = None) -> bool:
        self.waits += 1
        return True


def _gather_with_work(module: Any, gather: Recorder, model: Any) -> bool:
    """Return whether FSDP2 waits for the work that a gather returns when it is told to overlap."""
    work = _Done()

    class Gather(Recorder):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            pending = super().__call__(*args, **kwargs)
            if pending is not None:
                pending.wait()
            return work

    module.set_custom_all_gather(Gather(gather.stock))
    handle = module.unshard(async_op=True)
    handle.wait()
    module.reshard()
    return work.waits > 0


def _op_of_sum(model: Any, module: Any, reduce: Recorder) -> bool:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    model(torch.ones(2, 5)).sum().backward()
    return factor_of(reduce.calls[-1]["op"], dist.get_world_size()) == 1.0


def _premul_sum() -> Any:
    # FSDP2 makes it for `set_gradient_divide_factor`. gloo cannot send it, so it is made here.
    if callable(dist.ReduceOp.PREMUL_SUM):
        return dist.ReduceOp.PREMUL_SUM(0.25)
    return dist._make_nccl_premul_sum(0.25)


def _replicated(table: Table) -> None:
    """Check a model with two replicas, each of one rank."""
    model = _model(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    module, check = model[0], table.check
    check("mesh_info.replicate_process_group", lambda: isinstance(fields.groups_of(module)[1], dist.ProcessGroup))
    stock = fields.groups_of(module)[1]
    group = RecordingGroup(stock) if stock is not None else None
    check("replicate_process_group can be set", lambda: fields.set_replicate_group(module, group))
    check("a step of a replicated model", lambda: _step(model, torch.optim.AdamW(model.parameters())))
    check(
        "gradients of replicas go to the allreduce of the group that was set",
        lambda: bool(group.calls) and all(len(tensors) == 1 for tensors, _ in group.calls),
    )
    check("op of an all-reduce over replicas", lambda: factor_of(group.calls[0][1], 2) in (1.0, 0.5))


def _data_parallel(table: Table) -> None:
    """Check DistributedDataParallel's communication hook."""
    from towpath.fsdp.replicas import current_pass, queue_callback, sum_bucket

    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 3))
    table.check("DDP: _comm_hooks", lambda: model._comm_hooks == [])
    buckets: list[tuple[int, int]] = []
    ends: list[tuple[bool, bool]] = []  # whether a bucket is the last one, and its parameters follow each other

    def fail() -> None:
        raise StepError("from a callback")

    class State:
        fails = False

        def average(self, bucket: Any) -> Any:
            buffer, parameters = bucket.buffer(), bucket.parameters()
            buckets.append((bucket.index(), buffer.dim()))
            ours = all(any(p is q for q in model.parameters()) for p in parameters)
            places = [gradient.storage_offset() - buffer.storage_offset() for gradient in bucket.gradients()]
            dense = places == [0, *accumulate(p.numel() for p in parameters)][:-1]
            ends.append((bucket.is_last(), ours and dense and sum(p.numel() for p in parameters) == len(buffer)))
            future: Any = torch.futures.Future()
            if self.fails:  # the future has no result
                queue_callback(fail)
            else:
                future.set_result(buffer)
            return future

    def is_told() -> bool:
        State.fails = True
        try:
            model(torch.ones(2, 5)).sum().backward()
        except StepError:
            return True
        return False

    table.check("DDP: register_comm_hook takes the wires' hook", lambda: model.register_comm_hook(State(), sum_bucket))
    table.check("DDP: _comm_hooks has it", lambda: model._comm_hooks[0][0] is sum_bucket)
    table.check("DDP: a step", lambda: _step(model, torch.optim.AdamW(model.parameters())))
    table.check("DDP: index() and flat buffer() of a bucket", lambda: buckets == [(0, 1)])
    table.check("DDP: is_last(), and parameters() in the order of the buffer", lambda: ends == [(True, True)])
    table.check("DDP: no backward pass is under way outside of one", lambda: current_pass() == -1)
    table.check("DDP: the error of a callback is raised before DDP waits, with its type", is_told)


def _rank(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), 2), rank=rank, world_size=2)
    table = Table()
    for check in (_sharded, _replicated, _data_parallel):
        try:
            check(table)
        except Exception as error:
            table.rows.append((check.__name__.strip("_"), f"{type(error).__name__}: {error}"))
    if rank == 0:
        width = max(len(what) for what, _ in table.rows)
        print(f"torch {torch.__version__}")
        for what, broken in table.rows:
            print(f"{what:<{width}}  {'BREAKS: ' + broken if broken else 'holds'}")
        Path(folder, "broken").write_text(str(sum(bool(broken) for _, broken in table.rows)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=2)
        return 1 if int(Path(folder, "broken").read_text()) else 0


if __name__ == "__main__":
    sys.exit(main())
