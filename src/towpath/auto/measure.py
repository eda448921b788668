"""How long the passes of a live model's units take on this device, unit by unit.

Of like units one is run, with values and inputs drawn at random: no more than one unit is ever in memory, and the model
itself, which may be on the meta device, stays as it is. The root runs with the units left out.

Ranks that share processor cores should measure at the same time, since they fill one another's caches in a step too.
What a rank then waits for a core is left out: who shares the cores, and when, is for the simulator to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from towpath.auto.live import Call, Traced, trace
from towpath.core.formats import Precision
from towpath.engine.layout import UnitLayout, torch_dtype
from towpath.errors import ConfigError
from towpath.planner.model import Line, Measured, Model, Unit

_REPEATS = 5, 20  # at least and at most
_SECONDS = 0.5  # for one kind of unit, if that is within its repeats
# Of the calling thread: nanoseconds on a core, nanoseconds of waiting for one, times that it got one.
_SCHEDULED = Path("/proc/thread-self/schedstat")
_SCALE = 0.02  # of values: as new weights are

# Of a forward pass, of the backward pass, and of the processor in both.
Seconds = tuple[float, float, float]


def describe_measured(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    inputs: Callable[[int], Sequence[Any]],
    sizes: Sequence[int],
    length: int,
    device: torch.device,
    precision: Precision,
) -> Model:
    """`inputs(n)`: what the model is called with, for n sequences of `length` tokens; `sizes`: the n that are tried."""
    own = next((bucket.dtype for layout in layouts for bucket in layout.spec.buckets), "float32")
    dtype = torch_dtype(precision.compute_dtype(own))
    taken: list[list[Seconds]] = []
    described: tuple[Unit, ...] = ()
    for size in sizes:
        traced = trace(model, layouts, inputs(size), precision)
        described = traced.units(layouts, size * length)
        taken.append(_all_units(model, layouts, traced, device, dtype))
    tokens = [size * length for size in sizes]
    measured = tuple(
        replace(unit, measured=_measured(tokens, rows)) for unit, *rows in zip(described, *taken, strict=True)
    )
    return Model(type(model).__name__, length, measured)


def _measured(tokens: Sequence[int], rows: Sequence[Seconds]) -> Measured:
    forward, backward, worked = zip(*rows, strict=True)
    took = forward[-1] + backward[-1]  # nothing, of a unit that the inputs do not reach
    share = min(1.0, worked[-1] / took) if took else 1.0
    return Measured(line_through(tokens, forward), line_through(tokens, backward), share)


def line_through(tokens: Sequence[int], seconds: Sequence[float]) -> Line:
    """Through the first and the last; in proportion, where there is one only, or where more took less."""
    rise = (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]) if len(tokens) > 1 else 0.0
    fixed = seconds[0] - rise * tokens[0]
    return Line(fixed, rise) if rise > 0 and fixed >= 0 else Line(0.0, seconds[-1] / tokens[-1])


def _all_units(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> list[Seconds]:
    seen: dict[object, Seconds] = {}
    found: list[Seconds] = []
    for layout in layouts:
        modules = [m for m in layout.modules if m in traced.calls] if layout.name else []
        key = (layout.spec.buckets, layout.spec.kept, tuple(map(type, modules)), traced.flops[layout.name])
        if key not in seen:
            try:
                with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the user's numbers stay
                    if layout.name:
                        each = [_timed(m, m.named_parameters(), traced.calls[m], device, dtype) for m in modules]
                    else:
                        each = [_timed_root(model, layouts, traced, device, dtype)]
            except Exception as error:
                what = f"unit {layout.name}" if layout.name else "the root"
                raise ConfigError(
                    f"{what} cannot be run by itself, with inputs like its own: {error}. Leave out Workload(inputs=…), "
                    "so that nothing is measured of the model, or name a strategy."
                ) from error
            forward, backward, worked = (sum(each_of) for each_of in zip((0.0, 0.0, 0.0), *each, strict=True))
            seen[key] = (forward, backward, worked)
        found.append(seen[key])
    return found


def _timed_root(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> Seconds:
    own = {id(place.parameter) for bucket in layouts[0].buckets for place in bucket.places}
    mine = [(name, p) for name, p in model.named_parameters() if id(p) in own]
    others = [m for layout in layouts[1:] for m in layout.modules if m in traced.calls]
    with _left_out(others, traced, device, dtype):
        return _timed(model, mine, traced.calls[model], device, dtype)


@contextmanager
def _left_out(
    modules: Sequence[nn.Module], traced: Traced, device: torch.device, dtype: torch.dtype
) -> Generator[None]:
    """Inside, each of them gives what has the shape of its output, and computes nothing."""
    before = {module: module.__dict__.get("forward") for module in modules}
    for module in modules:
        module.forward = _nothing_like(traced.calls[module], device, dtype)
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _nothing_like(call: Call, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        entered = {t.shape: t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad}

        def like(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # Through what entered, so that the gradient finds its way to the embedding.
            return entered[value.shape] * 1 if value.shape in entered else _drawn(value, device, dtype)

        return tree_map(like, call.output)

    return forward


def _timed(
    module: nn.Module,
    parameters: Iterable[tuple[str, nn.Parameter]],
    call: Call,
    device: torch.device,
    dtype: torch.dtype,
) -> Seconds:
    def drawn(value: Any) -> Any:
        return _drawn(value, device, dtype) if isinstance(value, torch.Tensor) else value

    values = {name: drawn(value) for name, value in (*parameters, *module.named_buffers())}
    args, kwargs = tree_map(drawn, call.args), tree_map(drawn, call.kwargs)
    forwards: list[float] = []
    backwards: list[float] = []

    def run() -> None:
        began = _now(device)
        output = functional_call(module, values, args, kwargs)
        between = _now(device)
        roots = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        forwards.append(between - began)
        backwards.append(_now(device) - between)

    run()  # the first one fills caches
    worked, began = time.process_time(), time.perf_counter()
    least, most = _REPEATS
    while len(forwards) < least or (len(forwards) < most and time.perf_counter() - began < _SECONDS):
        run()
    share = 1.0  # where a device beside the processor computes, it is that which works
    if device.type == "cpu":
        worked = (time.process_time() - worked) / torch.get_num_threads()
        took = sum(forwards[1:]) + sum(backwards[1:])
        share = min(1.0, worked / took) if took else 1.0
    forward, backward = median(forwards[1:]), median(backwards[1:])
    return forward, backward, share * (forward + backward)


def _drawn(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if value.is_floating_point():
        made = torch.randn(value.shape, device=device, dtype=dtype) * _SCALE
        return made.requires_grad_(value.requires_grad)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, device=device, dtype=torch.bool)
    return torch.zeros(value.shape, device=device, dtype=value.dtype)  # an index that is always there


def _now(device: torch.device) -> float:
    """A clock that stands still while this thread waits for a core."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.perf_counter() - (_waited_for_cores() or 0.0)


def _waited_for_cores() -> float | None:
    """None: where the kernel does not say."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def ranks_measure_together(device: torch.device) -> bool:
    """Whether `describe_measured` may run on all ranks at once: where a rank can tell what it waited for a core."""
    return device.type != "cpu" or _waited_for_cores() is not None
