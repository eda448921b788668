"""A trace of steps on 2×2 ranks: its link tracks add up to `towpath.stats`, and Perfetto can open its file."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import towpath
from tests.ranks.checkpoints import Run
from tests.ranks.models import TiedGPT
from tests.ranks.server import Worlds, on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_steady import Checkpointed
from towpath import tracing
from towpath.errors import StepError
from towpath.observe.stats import running_trace, totals
from towpath.observe.trace import BETWEEN, COMPUTE, INSIDE, WAITING, Interval

SHAPE = towpath.Topology(2, 2)
LABELS = ["ddp", "zero3", "hpz", "paro-iig", "zero3@hierarchical", "zero++", "mics gradients=int4:64 feedback=both"]
MICRO_STEPS = 2


@in_turn(LABELS, 1)
@on_ranks(SHAPE.world)
def test_the_tracks_of_the_links_add_up_to_stats(label: str) -> None:
    run = _run(label)
    model = run.model
    run.train(range(2), MICRO_STEPS)
    with tracing.trace(model) as trace:
        before, totals_before = towpath.stats(model), totals(model)
        run.train(range(2), MICRO_STEPS)
        done = towpath.stats(model).since(before)
        looked = totals(model).since(totals_before)
    assert _sum(trace.intervals, BETWEEN, "bytes") == done.inter_bytes > 0, label
    assert _sum(trace.intervals, INSIDE, "bytes") == done.intra_bytes, label
    for track, of in ((BETWEEN, "inter_bytes"), (INSIDE, "intra_bytes")):
        on_it = [t for t in done.transfers if getattr(t, of)]
        assert _sum(trace.intervals, track, "calls") == sum(t.calls for t in on_it), (label, track)
        in_flight = sum(t.seconds_in_flight for t in on_it)
        # The same readings of one clock, in another order of adding.
        assert _seconds(trace.intervals, track) == pytest.approx(in_flight, abs=1e-9), (label, track)
    assert _seconds(trace.intervals, WAITING) == pytest.approx(done.seconds_exposed, abs=1e-9), label
    assert (looked.inter_bytes, looked.intra_bytes) == (done.inter_bytes, done.intra_bytes)
    assert sum(t.calls for t in looked.transfers) == sum(t.calls for t in done.transfers)
    assert looked.seconds_exposed == pytest.approx(done.seconds_exposed, abs=1e-9)


@on_ranks(SHAPE.world)
def test_micro_steps_units_and_codecs_are_told_apart() -> None:
    run = _run("zero++")
    model = run.model
    run.train(range(2), MICRO_STEPS)
    with tracing.trace(model) as trace:
        run.train(range(1), MICRO_STEPS)
    between = [i.args for i in trace.intervals if i.track == BETWEEN]
    found = {(args["kind"], args["unit"], args["micro_step"]) for args in between}
    scheduled = towpath.schedule(model.towpath_engine.strategy, model, MICRO_STEPS).transfers
    wanted = {(t.kind.value, t.unit or "root", t.micro_step) for t in scheduled if t.inter_bytes}
    assert found == wanted
    codecs = {i.track for i in trace.intervals if i.track.startswith("codec ")}
    transports = {f"codec {t.transport.codec}" for t in scheduled if t.transport.encoding}
    assert codecs == transports
    assert {t.transport.encoding.name for t in scheduled if t.transport.encoding} == {"int8", "int4"}


@on_ranks(SHAPE.world)
def test_compute_is_in_the_order_of_the_units_with_holes_where_it_waited() -> None:
    run = _run("zero3")
    model = run.model
    run.train(range(2), MICRO_STEPS)
    with tracing.trace(model) as trace, trace.phase("the step"):
        run.train(range(1), MICRO_STEPS)
    computed = [i for i in trace.intervals if i.track == COMPUTE]
    names = [i.name for i in computed]
    order = [n for n, _ in ((n, None) for n in dict.fromkeys(names)) if "blocks" in n]
    forward = [f"forward blocks.{i}" for i in range(4)]
    assert order == [*forward, *(f"backward blocks.{i}" for i in reversed(range(4)))]
    assert {"forward root", "backward root", "the step", "rest of the step"} <= set(names)
    # Together with the waiting they fill the trace, each moment once.
    held = sorted((i for i in trace.intervals if i.track in (COMPUTE, WAITING)), key=lambda i: i.start_seconds)
    assert held[0].start_seconds >= 0
    for one, next_one in pairwise(held):
        assert next_one.start_seconds == pytest.approx(one.end_seconds, abs=1e-8)
    # A unit is computed after its gather has begun.
    gathers = {i.args["unit"]: i for i in reversed(trace.intervals) if i.args.get("kind") == "gather"}
    for interval in computed:
        if interval.name.startswith("forward blocks"):
            assert gathers[interval.args["unit"]].end_seconds <= interval.start_seconds


@on_ranks(SHAPE.world)
def test_what_a_checkpoint_recomputes_is_told_apart() -> None:
    model: Any = towpath.shard(Checkpointed(), strategy_of("zero3", SHAPE))
    run = Run(model, torch.optim.AdamW(model.parameters()))
    run.train(range(1), MICRO_STEPS)
    with tracing.trace(model) as trace:
        run.train(range(1), MICRO_STEPS)
    names = [i.name for i in trace.intervals if i.track == COMPUTE]
    order = list(dict.fromkeys(n for n in names if n.endswith(("blocks.1", "blocks.2"))))
    again = [f"{work} blocks.{i}" for i in (2, 1) for work in ("recompute", "backward")]
    assert [n for n in order if n.startswith("forward")] == ["forward blocks.1", "forward blocks.2"]
    assert sorted(order[2:]) == sorted(again) and order[2].endswith("blocks.2"), order


@on_ranks(SHAPE.world)
def test_a_model_is_traced_once_at_a_time_and_not_beyond() -> None:
    run = _run("ddp")
    model = run.model
    with tracing.trace(model), pytest.raises(StepError, match="being traced already"), tracing.trace(model):
        raise AssertionError("not reached")
    with pytest.raises(KeyError), tracing.trace(model):
        raise KeyError
    with tracing.trace(model) as trace:
        run.train(range(1), MICRO_STEPS)
    found = trace.intervals
    run.train(range(1), MICRO_STEPS)
    assert trace.intervals is found and running_trace(model) is None


def test_the_file_is_what_perfetto_opens_and_adds_up_to_stats(world: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "made" / "trace.json"
    done = world(SHAPE.world).run(_write, path)
    events = json.loads(path.read_text())["traceEvents"]
    names = _check_format(events)
    assert {names[rank, 0] for rank in range(SHAPE.world)} == {f"rank {r}" for r in range(SHAPE.world)}
    for rank, (inter_bytes, intra_bytes) in enumerate(done):
        tracks = {name for (pid, _), name in names.items() if pid == rank}
        assert {COMPUTE, BETWEEN, INSIDE} <= tracks and any(t.startswith("codec int8") for t in tracks), tracks
        for track, sent_bytes in ((BETWEEN, inter_bytes), (INSIDE, intra_bytes)):
            on_it = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == track]
            assert sum(e["args"]["bytes"] for e in on_it) == sent_bytes
            rows = {names[rank, e["tid"]] for e in on_it}
            assert rows <= {track, *(f"{track} ({n})" for n in range(2, 20))}


def _write(path: Path) -> tuple[int, int]:
    run = _run("zero++")
    model = run.model
    run.train(range(2), MICRO_STEPS)
    with tracing.trace(model) as trace:
        before = towpath.stats(model)
        run.train(range(1), MICRO_STEPS)
        done = towpath.stats(model).since(before)
    tracing.write_trace(path, model, trace)
    return done.inter_bytes, done.intra_bytes


def _check_format(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Check complete events that do not overlap on a thread. Return the names of processes (thread 0) and threads."""
    names: dict[tuple[int, int], str] = {}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        where = (event["pid"], event["tid"])
        assert event["ph"] in ("M", "X") and type(event["name"]) is str
        if event["ph"] == "X":
            assert type(event["cat"]) is str and event["ts"] >= 0 and event["dur"] >= 0
            threads[where].append((event["ts"], event["dur"]))
        elif event["name"] in ("process_name", "thread_name"):
            names[where] = event["args"]["name"]
    assert set(threads) <= set(names)
    for inside in threads.values():
        assert inside == sorted(inside)
        for (start, length), (following, _) in pairwise(inside):
            assert round(start * 1e3) + round(length * 1e3) <= round(following * 1e3)
    return names


def _run(label: str) -> Run:
    torch.manual_seed(1)
    model: Any = towpath.shard(TiedGPT(layers=4, width=32), strategy_of(label, SHAPE))
    return Run(model, torch.optim.AdamW(model.parameters()))


def _sum(intervals: tuple[Interval, ...], track: str, arg: str) -> int:
    return sum(int(i.args[arg]) for i in intervals if i.track == track)


def _seconds(intervals: tuple[Interval, ...], track: str) -> float:
    return sum(i.seconds for i in intervals if i.track == track)
