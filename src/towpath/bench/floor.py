"""The least that a step can take: the simulator's, where nothing takes time but the blocks and the cables."""

from __future__ import annotations

from towpath.bench.workload import Workload
from towpath.core.formats import Codec
from towpath.core.strategy import WITH_TRANSPORT, Strategy
from towpath.core.unit_plan import plan_unit
from towpath.engine.layout import lay_out
from towpath.lab import Rate
from towpath.sim.hardware import CodecSpeed, Hardware, Link
from towpath.sim.replay import ComputeSeconds, Replay

_AT_ONCE = 1e18  # bytes, or elements, a second


def floor_seconds(strategy: Strategy, workload: Workload, computing: float, inter: Rate | None) -> float:
    """Of a step without its optimizer. What can be done while something else is under way costs nothing: this is the
    schedule with perfect overlap.

    `computing`: the module's forward and backward of one micro-step, which its blocks share.
    """
    plans = [plan_unit(strategy, unit.spec, workload.precision) for unit in lay_out(workload.model())]
    blocks = len(plans) - 1
    forward = computing / blocks / 3  # the backward pass takes twice as long
    seconds = ComputeSeconds((0.0, *[forward] * blocks), (0.0, *[2 * forward] * blocks), 0.0, 0.0)
    return Replay(strategy, plans, _hardware(strategy, inter), seconds, workload.micro_steps).run().seconds


def _hardware(strategy: Strategy, inter: Rate | None) -> Hardware:
    codecs = {w.codec.name for w in map(strategy.transport, WITH_TRANSPORT) if isinstance(w.codec, Codec)}
    return Hardware(
        strategy.topology,
        intra=Link(_AT_ONCE, 0.0),
        inter=Link(_AT_ONCE if inter is None else inter.bytes_per_second, 0.0),
        memory_rate=_AT_ONCE,
        sum_rate=_AT_ONCE,
        codecs=tuple((name, CodecSpeed(_AT_ONCE, _AT_ONCE)) for name in sorted(codecs)),
    )
