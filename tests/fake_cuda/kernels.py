"""Launches of Triton on the fake device. They are recorded and checked, and the C++ kernels compute their results."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.fake_cuda.device import Device, on_device, on_host
from towpath.codecs import exact
from towpath.codecs.exact import MessageError, Problem
from towpath.codecs.kernels import cpp_codecs, pieces


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
def recorded_launches(device: Device) -> Generator[list[str]]:
    """Yield a list that gets the name of each kernel that is launched on `device`."""
    from triton.runtime.jit import JITFunction

    from towpath.codecs.exact import triton_kernels
    from towpath.codecs.kernels import triton_codecs

    def run(kernel: Any, *args: Any, **_: Any) -> None:
        name = kernel.fn.__name__
        host = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and not arg.is_cuda]
        if host:
            raise ValueError(f"Pointer argument (at {host[0]}) cannot be accessed from Triton (cpu tensor?): {name}")
        launches.append(name)
        device.launched += 1

    launches: list[str] = []
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
        yield launches
