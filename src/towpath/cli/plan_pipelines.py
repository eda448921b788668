"""`towpath plan --pipeline`: the model in stages, beside all that is planned without."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from towpath.core.pipeline import COMPRESSIONS, SCHEDULES, plain_walk
from towpath.errors import ConfigError
from towpath.planner.catalog import model_shape
from towpath.planner.pipelines import Layout, PipelinePrediction, Pipelines, Walks
from towpath.planner.solver import Batching, Infeasible, Ranking, Solver
from towpath.train.progress import progress_bar

_WITHOUT_TORCH = ("GPipe", "1F1B")


@dataclass(frozen=True, slots=True)
class Asked:
    """Sizes of pipelines and of tensor parallelism, schedules and compressions, of which all are tried."""

    pipelines: Sequence[int]
    tensors: Sequence[int]
    schedules: Sequence[str]
    compressions: Sequence[str]

    def __post_init__(self) -> None:
        for option, given, known in (
            ("--schedule", self.schedules, list(SCHEDULES)),
            ("--compression", self.compressions, list(COMPRESSIONS)),
        ):
            for name in given:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                    raise ConfigError(f"{option} {name}: did you mean {close!r}? Known: {', '.join(known)}.")
        if not self.pipelines and (self.tensors or self.schedules or self.compressions):
            raise ConfigError("--tensor, --schedule and --compression are of pipelines: pass --pipeline, too.")


def with_pipelines(
    found: Ranking | Infeasible, solver: Solver, name: str, length: int | None, asked: Asked, best: int
) -> Ranking | Infeasible:
    """What was found without stages, and what there is with them: together the `best` of both."""
    schedules = asked.schedules or ("1F1B",)
    pipelines = _pipelines(solver, name, length, schedules)
    with progress_bar("Planning stages") as say:
        staged = pipelines.solve(
            asked.pipelines, schedules, asked.compressions or ("none",), asked.tensors or (1,), best, say
        )
    if not staged:
        return found
    if isinstance(found, Infeasible):
        return Ranking(tuple(staged), len(staged), len(staged), len(staged), False)
    together = sorted((*found.ranked, *staged), key=lambda priced: (priced.seconds, priced.peak_bytes))
    return replace(found, ranked=tuple(together[:best]))


def simulated(
    solver: Solver, name: str, length: int | None, layout: Layout, batching: Batching, trace: Path | None
) -> PipelinePrediction:
    """One step of a pipeline; in `trace`, if that is given, what one copy of each of its ranks does."""
    pipelines = _pipelines(solver, name, length, (layout.schedule,))
    pipelines.check(layout, batching)
    if trace is not None:
        from towpath.train.trace import simulated_intervals, write_trace  # with the engine's trace, and so with torch

        timeline = pipelines.replay(layout, batching)
        ranks = {rank: simulated_intervals(each.events) for rank, each in enumerate(timeline.ranks)}
        write_trace(trace, ranks, {rank: f"rank {rank} of {layout}, simulated" for rank in ranks})
    return pipelines.predict(layout, batching)


def _pipelines(solver: Solver, name: str, length: int | None, schedules: Sequence[str]) -> Pipelines:
    shape, called, tokens = model_shape(name, length)
    return Pipelines(
        lambda count: shape.staged(called, tokens, count), solver.cluster, solver.request, _walks(schedules)
    )


def _walks(schedules: Sequence[str]) -> Walks:
    """Schedules of several stages on a rank are PyTorch's to plan."""
    if all(schedule in _WITHOUT_TORCH for schedule in schedules):
        return plain_walk
    from towpath.pipeline.schedules import walks

    return walks


def settings(priced: PipelinePrediction) -> list[str]:
    """Of `towpath train`."""
    layout = priced.layout
    found = [f"parallel.pipeline={layout.pipeline}", f"parallel.schedule={layout.schedule}"]
    found += [] if layout.tensor == 1 else [f"parallel.tensor={layout.tensor}"]
    return found + ([] if layout.compression == "none" else [f"parallel.compression={layout.compression}"])
