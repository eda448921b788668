"""One rank of a job on GPUs, without GPUs and without the other ranks: `fake_world` on the device of `runtime.py`.

The engine takes its branches for CUDA and NCCL. Collectives combine nothing: PyTorch's fake process group copies this
rank's values to all places. Launches of Triton are recorded and checked, and what they would compute is computed by the
C++ kernels, so exact messages can be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import towpath
from benchmarks.harness.fake_world import fake_world
from tests.fake_cuda.device import on_device, on_host
from tests.fake_cuda.runtime import Runtime, fake_cuda
from towpath.codecs import exact
from towpath.codecs.exact import MessageError, Problem
from towpath.codecs.kernels import cpp_codecs, pieces


@dataclass
class World:
    """What a test sees of the rank."""

    topology: towpath.Topology
    cuda: Runtime
    launches: list[str] = field(default_factory=list[str])  # the kernels of Triton, by name


def _host(value: Any) -> Any:
    return on_host(value) if isinstance(value, torch.Tensor) else value


def _encode_pieces(
    table: Any, values: Any, wire: torch.Tensor, seed: int, kept: Any = None, scratch: Any = None
) -> None:
    scratch = None if kept is None else torch.empty(2 * table.longest)
    pieces.encode_pieces(cpp_codecs, table, _host(values), on_host(wire), seed, _host(kept), scratch)


def _decode_pieces(table: Any, wire: torch.Tensor, out: torch.Tensor) -> None:
    pieces.decode_pieces(cpp_codecs, table, on_host(wire), on_host(out))


def _encode(codec: Any, x: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
    cpp_codecs.encode(codec, on_host(x), on_host(out), seed)


def _decode(codec: Any, data: torch.Tensor, out: torch.Tensor) -> None:
    cpp_codecs.decode(codec, on_host(data), on_host(out))


def _encode_exact(old: torch.Tensor | None, values: torch.Tensor, out: torch.Tensor) -> None:
    exact.encode(_host(old), on_host(values), on_host(out))


def _decode_slices(encoded: torch.Tensor, slices: torch.Tensor, own: int, difference: bool) -> torch.Tensor:
    found = [
        0 if row == own else _problem(message, values, difference)
        for row, (message, values) in enumerate(zip(on_host(encoded), on_host(slices), strict=True))
    ]
    return on_device(torch.tensor(found, dtype=torch.int32))


def _problem(message: torch.Tensor, values: torch.Tensor, difference: bool) -> int:
    """Return what `exact.decode` raises as a number. Old values, or a message, may be of another rank."""
    try:
        exact.decode(message, values, difference)
    except MessageError as error:
        return next(int(problem) for problem in Problem if problem.text in str(error))
    return 0


def _with_values(module: ModuleType, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `name` of a module with kernels: it launches them as always, and then computes."""
    launch = getattr(module, name)

    def call(*args: Any) -> Any:
        out = launch(*args)
        found = compute(*args)
        return out if found is None else found

    return call


@contextmanager
def _triton(world: World) -> Generator[None]:
    from triton.runtime.jit import JITFunction

    from towpath.codecs.exact import triton_kernels
    from towpath.codecs.kernels import triton_codecs

    def run(kernel: Any, *args: Any, **_: Any) -> None:
        name = kernel.fn.__name__
        host = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and not arg.is_cuda]
        if host:
            raise ValueError(f"Pointer argument (at {host[0]}) cannot be accessed from Triton (cpu tensor?): {name}")
        world.launches.append(name)
        world.cuda.device.launched += 1

    computed = {
        triton_codecs: {
            "encode": _encode, "decode": _decode, "encode_pieces": _encode_pieces, "decode_pieces": _decode_pieces
        },
        triton_kernels: {"encode": _encode_exact, "decode_slices": _decode_slices},
    }  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for module, functions in computed.items():
            for name, compute in functions.items():
                stack.enter_context(mock.patch.object(module, name, _with_values(module, name, compute)))
        yield


@contextmanager
def fake_gpus(nodes: int, ranks_per_node: int) -> Generator[World]:
    """Be rank 0 of so many ranks, each of which has a GPU. Models are to be moved to "cuda".

    Use it in a process that ends with the test. A process group that there is is left first.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    with fake_cuda() as cuda, fake_world(nodes, ranks_per_node, device="cuda", watch=False) as (topology, _):
        world = World(topology, cuda)
        with _triton(world):
            yield world
