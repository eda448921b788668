"""Times the passes of a model's units.

Of equal units one is timed, with random values and inputs. Never more than one unit is in memory, and the model, which
may be on the meta device, stays as it is. The root unit runs without the other units.

Ranks that share processor cores should measure at the same time, because they also evict one another's caches in a
step. The time that a rank waits for a core does not count. The simulator predicts it.
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

from towpath.core.formats import Precision
from towpath.engine.layout import UnitLayout, torch_dtype
from towpath.errors import ConfigError
from towpath.plan.live import ModuleCall, Traced, trace
from towpath.plan.model import LinearSeconds, MeasuredPasses, Model, ModelUnit

_REPEATS = 5, 20  # the fewest and the most repetitions
_SECONDS = 0.5  # for one kind of unit, if the number of repetitions allows it
# For the calling thread: nanoseconds on a core, nanoseconds of waiting for one, and times that it got one.
_SCHEDULED = Path("/proc/thread-self/schedstat")
_SCALE = 0.02  # of random values: that of new weights

# The seconds of a forward pass, of a backward pass, and of the processor in both.
PassSeconds = tuple[float, float, float]


def describe_measured(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    inputs: Callable[[int], Sequence[Any]],
    sizes: Sequence[int],
    length: int,
    device: torch.device,
    precision: Precision,
) -> Model:
    """Describe a model for the planner, with measured times.

    `inputs` returns the model's inputs for some number of sequences of `length` tokens. `sizes` are the numbers of
    sequences that are measured. `layouts` are the units, as `lay_out` returns them.
    """
    own = next((bucket.dtype for layout in layouts for bucket in layout.spec.buckets), "float32")
    dtype = torch_dtype(precision.compute_dtype(own))
    taken: list[list[PassSeconds]] = []
    described: tuple[ModelUnit, ...] = ()
    for size in sizes:
        traced = trace(model, layouts, inputs(size), precision, device)
        described = traced.units(layouts, size * length)
        taken.append(_time_units(model, layouts, traced, device, dtype))
    tokens = [size * length for size in sizes]
    units: list[ModelUnit] = []
    for unit, *rows in zip(described, *taken, strict=True):
        forward, backward, worked = zip(*rows, strict=True)
        took = forward[-1] + backward[-1]  # zero for a unit that the inputs do not reach
        share = min(1.0, worked[-1] / took) if took else 1.0
        measured = MeasuredPasses(line_through(tokens, forward), line_through(tokens, backward), share)
        units.append(replace(unit, measured=measured))
    return Model(type(model).__name__, length, tuple(units))


def line_through(tokens: Sequence[int], seconds: Sequence[float]) -> LinearSeconds:
    """Return the line through the first and the last point.

    It starts at zero if there is only one point, or if the two points give a negative slope or offset.
    """
    rise = (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]) if len(tokens) > 1 else 0.0
    fixed = seconds[0] - rise * tokens[0]
    return LinearSeconds(fixed, rise) if rise > 0 and fixed >= 0 else LinearSeconds(0.0, seconds[-1] / tokens[-1])


def _time_units(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> list[PassSeconds]:
    seen: dict[object, PassSeconds] = {}
    found: list[PassSeconds] = []
    for layout in layouts:
        modules = [m for m in layout.modules if m in traced.calls] if layout.name else []
        key = (layout.spec.buckets, layout.spec.root, tuple(map(type, modules)), traced.flops[layout.name])
        if key not in seen:
            try:
                # The random numbers of the user's program stay the same.
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    if layout.name:
                        each = [_time(m, m.named_parameters(), traced.calls[m], device, dtype) for m in modules]
                    else:
                        each = [_time_root(model, layouts, traced, device, dtype)]
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


def _time_root(
    model: nn.Module, layouts: Sequence[UnitLayout], traced: Traced, device: torch.device, dtype: torch.dtype
) -> PassSeconds:
    # A model may read the parameters of leaves without calling them.
    near = [layout for layout in layouts if layout.spec.root or layout.spec.leaf]
    own = {id(place.parameter) for layout in near for bucket in layout.buckets for place in bucket.places}
    mine = [(name, p) for name, p in model.named_parameters() if id(p) in own]
    others = [m for layout in layouts[1:] for m in layout.modules if m in traced.calls]
    with _without_computing(others, traced, device, dtype):
        return _time(model, mine, traced.calls[model], device, dtype)


@contextmanager
def _without_computing(
    modules: Sequence[nn.Module], traced: Traced, device: torch.device, dtype: torch.dtype
) -> Generator[None]:
    """Replace the forward of each module by one that returns outputs of the right shape and computes nothing."""

    def replacement(call: ModuleCall) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            entered = {t.shape: t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}

            def like(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                # The output depends on an input where it can, so that the gradient reaches the embedding.
                return entered[value.shape] * 1 if value.shape in entered else _random_like(value, device, dtype)

            return tree_map(like, call.output)

        return forward

    before = {module: module.__dict__.get("forward") for module in modules}
    for module in modules:
        module.forward = replacement(traced.calls[module])
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _time(
    module: nn.Module,
    parameters: Iterable[tuple[str, nn.Parameter]],
    call: ModuleCall,
    device: torch.device,
    dtype: torch.dtype,
) -> PassSeconds:
    def random(value: Any) -> Any:
        return _random_like(value, device, dtype) if isinstance(value, torch.Tensor) else value

    values = {name: random(value) for name, value in (*parameters, *module.named_buffers())}
    args, kwargs = tree_map(random, call.args), tree_map(random, call.kwargs)
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

    run()  # the first run fills caches
    worked, began = time.process_time(), time.perf_counter()
    least, most = _REPEATS
    while len(forwards) < least or (len(forwards) < most and time.perf_counter() - began < _SECONDS):
        run()
    share = 1.0  # where a device computes, it works all the time
    if device.type == "cpu":
        worked = (time.process_time() - worked) / torch.get_num_threads()
        took = sum(forwards[1:]) + sum(backwards[1:])
        share = min(1.0, worked / took) if took else 1.0
    forward, backward = median(forwards[1:]), median(backwards[1:])
    return forward, backward, share * (forward + backward)


def _random_like(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if value.is_floating_point():
        made = torch.randn(value.shape, device=device, dtype=dtype) * _SCALE
        return made.requires_grad_(value.requires_grad)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, device=device, dtype=torch.bool)
    return torch.zeros(value.shape, device=device, dtype=value.dtype)  # an index that is always valid


def _now(device: torch.device) -> float:
    """Return the time of a clock that stands still while this thread waits for a core."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.perf_counter() - (_waited_for_cores() or 0.0)


def _waited_for_cores() -> float | None:
    """Return the seconds that this thread has waited for a core, or None if the kernel does not report them."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def ranks_measure_together(device: torch.device) -> bool:
    """Return whether all ranks may measure at once. It needs a kernel that reports how long threads wait for cores."""
    return device.type != "cpu" or _waited_for_cores() is not None
