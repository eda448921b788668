"""Tables of measured figures from benchmarks/results/*.jsonl: in docs and in benchmarks/comparisons/.

Every table shows the last run of each case, with the commit that was measured. `python -m tools.docs.generate`
writes them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report
from benchmarks.harness import figures, results
from towpath.cli.plots import standalone_svg

if TYPE_CHECKING:
    from benchmarks.suites.quality import Judged

Line = Mapping[str, Any]
Row = Sequence[str]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES_FOLDER = DOCS / "pictures"
COMPARISONS = ROOT / "benchmarks" / "comparisons"

HEADINGS = ("case", "figure", "result", "95 % interval", "commit or date")
# Rows of docs/guides/lora.md; all others are in the generated page.
_LORA = ("fsdp2", "fsdp2 tuned", "torch-ddp tuned", "zero3", "mics", "ddp frozen=1x1")
_SPEEDUP = ", times as fast"
# Rows of benchmarks/comparisons/papers.md that the lab measured. By suite and case: where the paper prints the figure,
# what it compares, the printed speed-up, the slower candidate and the faster one.
_APART, _EVERY_STEP = ", units apart", " sync_gradients=micro-step"
_TWO_NODES, _COMPRESSED = "mics group=2x2 route=", "Optimus-CC, Table 2"
_LAB = {
    ("ablations", "two hops, mics"): [
        ("MiCS, Fig. 14", "two hops / all ranks in every micro-step", "1.11 to 1.25", f"mics{_EVERY_STEP}", "mics")
    ],
    ("ablations", "two hops, paro-iig"): [
        ("", "the same, `paro-iig`", "–", f"paro-iig{_EVERY_STEP}", "paro-iig"),
    ],
    ("ablations", "two hops, paro-nig"): [
        ("", "the same, `paro-nig`", "–", f"paro-nig{_EVERY_STEP}", "paro-nig"),
    ],
    ("ablations", "spanning gather"): [
        ("MiCS, Fig. 13", "hierarchical / flat", "1.31 to 1.38", f"{_TWO_NODES}flat", f"{_TWO_NODES}hierarchical")
    ],
    ("ablations", "group sizes"): [
        ("MiCS, Fig. 12", "groups of one node / of all nodes", "1.6 ²", "mics group=2x4", "mics"),
    ],
    ("ablations", "small units, mics"): [
        ("MiCS, section 4", "small messages sent together / apart", "–", f"mics{_APART}", "mics"),
    ],
    ("pipeline", "optimus-50mbit"): [
        (_COMPRESSED, "cb / uncompressed", "1.07 ¹", "uncompressed", "cb"),
        ("", "cb + fe / uncompressed", "1.13 ¹", "uncompressed", "cb+fe"),
        ("", "cb + fe + sc / uncompressed", "1.45 ¹", "uncompressed", "cb+fe+sc"),
    ],
    ("pipeline", "large-embeddings-100mbit"): [
        ("Optimus-CC, Fig. 10", "fe, where the tied matrix is 73 % of the model", "–", "uncompressed", "fe"),
    ],
}
# Words of recorded figures, and those of the pages.
_WORDS = {
    ": times as fast": ": speed-up over no compression",
    "accounted": "CPU seconds / (seconds × cores)",
    "bytes / the schedule's": "bytes sent / bytes in the schedule",
    "exposed seconds, the schedule's": "exposed seconds with perfect overlap",
    "of it the call's own": "of these, allocated by the call",
    "the engine's own time on the host / step": "host time of the engine / step",
    "limited half way between": "memory limit halfway between the two",
    "bytes planned beside those scheduled": "bytes planned / bytes scheduled − 1",
    "rows_lost": "training rows lost",
}


@dataclass(frozen=True, slots=True)
class Page:
    """A generated page. `about` is the first paragraph, and `summary` its line in the list of pages."""

    title: str
    summary: str
    command: str
    about: str = ""


# By file of results. A new file needs an entry.
PAGES: Mapping[str, Page] = {
    "strategies": Page(
        "Strategies",
        "Steps of our strategies against tuned DDP, FSDP2 and HSDP.",
        "python -m benchmarks strategies",
        "A case names its nodes and ranks, its link and its micro-steps. `ratio4` is a communication-to-computation "
        "ratio of 4. The measured ratio is the first row of each case. Blocks of `waiting` cases sleep instead of "
        "computing. Ranks of `in-step` cases start each micro-step together. A speed-up compares medians of the "
        "rounds. It is above 1 where the first strategy is faster.",
    ),
    "scaling": Page(
        "Scaling",
        "Steps on one to eight nodes, with constant work per rank and with constant work in total.",
        "python -m benchmarks scaling",
        "Links between nodes have 200 Mbit/s. `weak` cases keep the work of each rank constant, and `strong` cases the "
        "work of all ranks together. CPU time near the wall time means that the cores limit the step, not the links.",
    ),
    "overhead": Page(
        "Overhead",
        "One rank against the unsharded module, and the time that the engine takes on the host.",
        "python -m benchmarks overhead",
    ),
    "memory": Page(
        "Memory",
        "Peak memory of starting a model of a billion parameters, and of training under a memory limit.",
        "python -m benchmarks memory",
    ),
    "loading": Page(
        "Loading",
        "Peak memory of two ranks that load a Hugging Face model of 1.3 billion parameters, next to FSDP2.",
        "python -m benchmarks loading",
        "Peaks are the kernel's (VmHWM), above the level before loading. They include pages of the files that the rank "
        "has read, which the kernel may drop. The model takes 5.5 GB in fp32, and 2.7 GB in its files.",
    ),
    "lora": Page(
        "LoRA",
        "Steps in which only PEFT's adapters train.",
        "python -m benchmarks lora",
        "`compute` is the forward and backward pass alone. `bare barrier` adds clipping, AdamW and one barrier a step. "
        "Blocks of `lora-elsewhere` sleep instead of computing.",
    ),
    "muon": Page(
        "Muon",
        "`optimizer.step()` of Muon on matrix owners, against gathering every gradient on every rank.",
        "python -m benchmarks muon",
    ),
    "ablations": Page(
        "Ablations",
        "One part at a time: kernels, message sizes, routes, group sizes and placements.",
        "python -m benchmarks ablations",
        "A figure is a ratio of steps. It is below 1 where the first is faster. Blocks sleep instead of computing. A "
        "smallest part of 1,048,576 KiB means that slices are sent unsplit.",
    ),
    "quality": Page(
        "Quality of codecs",
        "Validation loss of training with codecs.",
        "python -m benchmarks quality",
    ),
    "quality_pipeline": Page(
        "Quality of pipeline compression",
        "Perplexity of pipelines with Optimus-CC's compression, ranks, errors and bytes, at one setting.",
        "python -m benchmarks quality_pipeline",
        "One process emulates the ranks: it has their stages, encoders and low-rank sums, and leaves out the network.",
    ),
    "propagation": Page(
        "Lazy error propagation",
        "What error propagation between pipeline stages does to gradients of frozen weights and to training.",
        "python -m benchmarks propagation",
    ),
    "collectives": Page(
        "Collectives",
        "Seconds of one collective on each route, against the flat route.",
        "python -m benchmarks collectives",
        "A figure is a ratio of medians. It is below 1 where the first is faster. Regions have 64 MiB in float32, on "
        "links of 100 Mbit/s between nodes. In `shaped` cases, the links inside nodes have 1,600 Mbit/s. There the two "
        "two-level routes differ: `hierarchical` distributes slices after the last one has arrived, and `ho-ring` "
        "while they arrive. Cases `in-parts` split the slices of `ho-ring` and `two-hop` on 2 × 2 ranks, and name the "
        "size of the region: without a limit up to 1,024 KiB, and at 1 Gbit/s above. `coalesced` launches small "
        "gathers together.",
    ),
    "kernels": Page(
        "Codec kernels",
        "Encoding and decoding, against a copy in memory and against the reference implementation.",
        "python -m benchmarks kernels",
        "`encode/copy` is a throughput: 1 is as fast as a copy. `encode/reference` is a speed-up.",
    ),
    "kernels-avx2": Page(
        "Codec kernels on AVX2",
        "The same on a CPU without AVX-512.",
        "python -m benchmarks kernels",
    ),
    "exact": Page(
        "Exact transport",
        "Steps with exact transport against the best tuned peers, and against the same strategies without it.",
        "python -m benchmarks exact",
        "Two nodes of two ranks train in bf16. Bits per element between nodes are next to each speed-up, because they "
        "depend on the learning rate (0.001) and the step. Blocks of `waiting` cases sleep, and replay recorded "
        "gradients.",
    ),
    "exact_bytes": Page(
        "Bytes of exact transport",
        "What exact transport sends when a GPT trains on text, by the kernel's counters.",
        "python -m benchmarks exact_bytes",
        "`replay` cases compare blocks that wait, and replay recorded gradients, with blocks that compute.",
    ),
    "wires": Page(
        "Wires",
        "What `towpath.wires` saves under FSDP2 and DDP: bytes between nodes, and steps.",
        "python -m benchmarks wires",
        "Two nodes of two ranks train in bf16. Bytes are those of the kernel's counters. In cases `ratio4`, stock "
        "FSDP2 would communicate for four times as long as the model computes. On CPUs, FSDP2 overlaps nothing, which "
        "favors those who send fewer bytes. `towpath plan` predicts steps with overlap, on GPUs. Blocks of `waiting` "
        "cases sleep, and replay recorded gradients.",
    ),
    "exact_kernels": Page(
        "Exact codecs",
        "Encoding and decoding on one core, against a copy in memory and against zstd, and the bits per element.",
        "python -m benchmarks exact_kernels",
        "Throughput counts the bytes of the input.",
    ),
    "exact_kernels-avx2": Page(
        "Exact codecs on AVX2",
        "The same on a CPU without AVX-512.",
        "python -m benchmarks exact_kernels --level x86_64_v3",
    ),
    "planner": Page(
        "Planner",
        "Predicted against measured steps, and the cost of the planner's choice.",
        "python -m benchmarks planner",
    ),
    "pipeline_planner": Page(
        "Planner for pipelines",
        "Predicted against measured steps of pipelines.",
        "python -m benchmarks pipeline_planner",
    ),
    "pipeline": Page(
        "Pipelines",
        "Pipelines against PyTorch's own with DDP stages, and the speed-up from compression.",
        "python -m benchmarks pipeline",
    ),
    "engine": Page(
        "Engine",
        "Overlap and memory over many steps, and earlier pairs of strategies and peers.",
        "python -m benchmarks engine",
    ),
    "step_check": Page(
        "Step check",
        "The time that ranks need to compare which parameters got a gradient.",
        "python -m benchmarks step_check",
    ),
    "host": Page(
        "Host",
        "The time on the host of one rank among 64, per unit and micro-step.",
        "python -m benchmarks host",
        "The other ranks are not there, and nothing is sent or computed. Ratios compare with another commit.",
    ),
    "checkouts": Page(
        "Commits",
        "Steps of another commit against steps of this one.",
        "python -m benchmarks checkouts",
        "A figure is old seconds / new seconds. It is above 1 where the later commit is faster.",
    ),
    "checkouts-itself": Page(
        "A commit against itself",
        "The noise of the comparison of commits.",
        "python -m benchmarks checkouts",
    ),
    "outer_bytes": Page(
        "Bytes of outer steps",
        "What islands with outer steps send between nodes, by the kernel's counters.",
        "python -m benchmarks outer_bytes",
        "Four ranks train ten million parameters in bf16. Cases name the nodes and ranks, and the codec of exchanges. "
        "Each node is an island, and a period has 32 steps.",
    ),
    "outer_overlap": Page(
        "Overlap of outer steps",
        "Steps with an exchange between islands under way, against steps without.",
        "python -m benchmarks outer_overlap",
        "Blocks sleep instead of computing. The simulator chooses the shortest delay with which no step waits.",
    ),
    "outer_simulator": Page(
        "Simulator of outer steps",
        "Predicted against measured steps of islands, as the mean over a period of 16 steps.",
        "python -m benchmarks outer_simulator",
    ),
    "outer_time": Page(
        "Time to a loss with outer steps",
        "The time until training reaches a loss, with outer steps and without, on links of several rates.",
        "python -m benchmarks outer_time",
        "A GPT of ten million parameters trains on four ranks of two nodes. The loss is that of lossless synchronous "
        "training after 400 steps with the same seed. Time is the number of steps, from training on fast links, times "
        "the mean step on links of the rate.",
    ),
    "outer_quality": Page(
        "Quality of outer steps",
        "Validation loss of training with outer steps, at equal tokens.",
        "python -m benchmarks outer_quality",
        "Each variant differs from `center` in one setting. The center has two islands, which exchange their weights "
        "every 32 steps in int4 with error feedback. Losses are relative to synchronous training with the same "
        "optimizer and seed.",
    ),
    "train": Page("towpath train", "`towpath train` against a hand-written loop.", "python -m benchmarks train"),
    "checkpoints": Page(
        "Checkpoints",
        "The time for which a checkpoint in the background stops training, against one in the foreground.",
        "python -m benchmarks checkpoints",
    ),
    "protect": Page(
        "Protection",
        "Steps with snapshots in the memory of nodes against steps without, and the bytes that buddies get.",
        "python -m benchmarks protect",
        "Blocks wait instead of computing, on links with a communication-to-computation ratio of 2. A window has as "
        "many steps as lie between two snapshots. Bytes are those of the kernel's counters.",
    ),
    "healing": Page(
        "Healing",
        "Runs that lose a node of three, with its memory and disk, against an undisturbed one.",
        "python -m benchmarks healing",
        "Every loss, every norm and every file of the last checkpoint equal those of the undisturbed run, to the bit.",
    ),
    "recovery": Page(
        "Recovery",
        "The seconds from the loss of a node, or of its ranks, to the next step.",
        "python -m benchmarks recovery",
        "Three nodes of two ranks train 17 million parameters over 1 Gbit/s, on two cores of one machine.",
    ),
    "islands": Page(
        "Islands that come and go",
        "Islands that are killed and return over 10 Mbit/s, while the others train on.",
        "python -m benchmarks islands",
    ),
    "doctor": Page(
        "Doctor",
        "What `towpath doctor` and `accelerate test` find in labs with one fault, and in labs without.",
        "python -m benchmarks doctor",
        "An examination of a fault is right if its first finding has the cause and the machines of the fault. A word "
        "for the cause, or the name or address of a machine, in a complaint of `accelerate test` counts as named.",
    ),
    "shares": Page(
        "Unequal machines",
        "Steps of ranks of unequal speed, with equal batches, with shares, and with measured shares.",
        "python -m benchmarks shares",
        "Four ranks on two nodes. Blocks wait for each row, on the second node two or three times as long. An ideal "
        "step takes as long as all rows, if every rank is always busy.",
    ),
    "soak": Page("Soak", "A run whose ranks are killed and restarted again and again.", "python -m benchmarks soak"),
    "timeline": Page(
        "Overlap on a GPU",
        "The share of communication that runs while the GPU computes, on one H100.",
        "python -m benchmarks timeline --device cuda",
    ),
}


# Tables ---------------------------------------------------------------------------------------------------------------


def table(head: Row, body: Iterable[Row]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


@cache
def runs(suite: str) -> tuple[Line, ...]:
    """Return the last run of each case that has figures, and the last run of each case if that failed."""
    every = results.read(results.file_of(suite))
    good = results.last(every)
    latest = results.last(every, failed=True)
    return tuple(
        run
        for case, line in latest.items()
        for run in ([good[case]] if case in good else []) + [line] * ("failed" in line)
    )


def measured_table(suite: str) -> str:
    return table(HEADINGS, [row for run in runs(suite) for row in rows(suite, run)])


def rows(suite: str, run: Line) -> Iterable[Row]:
    """Yield a row for each figure of a run, or one with the reason if the run failed."""
    case, commit = run["case"]["name"], results.measured_at(run)
    if "failed" in run:
        yield case, f"failed: {' '.join(str(run['failed']).split())}".replace("|", "\\|"), "", "", commit
        return
    for check in _compared(run) if suite == "strategies" else run["checks"]:
        yield case, _in_words(check["what"]), *_result(check), commit


def _compared(run: Line) -> Iterable[Mapping[str, Any]]:
    """Yield the ratio of a run, the speed-up of each of our candidates, and what else was recorded."""
    if (ratio := run.get("comm_ratio", {}).get("found")) is not None:
        yield {"what": "communication / computation", "found": ratio}
    ours = [name for name in run["communication_share"] if run["candidates"][name]["ours"]]
    shown: set[str] = set()
    if (fastest := report.best_lossless_peer(run)) is not None:
        peer = next(name for name, seconds in run["median_seconds"].items() if seconds == fastest)
        for name in ours:
            shown.add(what := f"{name} against {peer}")
            yield figures.ratio(run["seconds"], peer, name).recorded() | {"what": what + _SPEEDUP}
    for check in run["checks"]:
        what = check["what"].partition(": ")[2] if check["what"].endswith(_SPEEDUP) else check["what"]
        if what.removesuffix(_SPEEDUP) not in shown:
            yield {**check, "what": what}


def _in_words(what: str) -> str:
    if what.endswith(_SPEEDUP):
        ours, _, theirs = what.removesuffix(_SPEEDUP).partition(" against ")
        return f"speed-up of `{ours}` over `{theirs}`"
    for recorded, shown in _WORDS.items():
        what = what.replace(recorded, shown)
    return what.replace("|", "\\|")


def _result(check: Mapping[str, Any]) -> tuple[str, str]:
    found = check["found"]
    return f"{found:,.0f}" if abs(found) >= 1e5 else f"{found:.4g}", results.interval(check)


def quality_table() -> str:
    """Return the final loss of each variant over that of `zero3` with the same seed, less one."""
    from benchmarks.suites import quality

    found = quality.runs_of()
    return judged_table(found, quality.rows_of(found))


def judged_table(found: Iterable[Line], judged: Iterable[Judged]) -> str:
    """Return the final loss of each variant over that of its baseline with the same seed, less one."""
    commits = {run["case"]["variant"]: results.measured_at(run) for run in found}
    return table(
        ("variant", "mean", "95 % interval", "by seed", "commit"),
        [
            (
                row.variant,
                f"{row.mean:+.2%}",
                row.interval,
                row.by_seed,
                commits[row.variant],
            )
            for row in judged
        ],
    )


def pipeline_quality_table() -> str:
    """Return how much faster each compression of a pipeline is, and what it costs in perplexity and in time."""
    from benchmarks.suites import quality_pipeline

    trained = quality_pipeline.runs_of()
    speeds = {name: _speedups(f"optimus-{name}") for name in ("50mbit", "20mbit")}
    same = quality_pipeline.steps_to_the_same(trained)
    found: list[Row] = []
    for row in quality_pipeline.rows_of(trained):
        candidate = quality_pipeline.VARIANTS.get(row.variant)
        if candidate is not None:
            times = [speeds[name].get(candidate) for name in speeds]
            steps = quality_pipeline.STEPS / same[row.variant]
            longer = ("–" if each is None else f"{steps / each:.2f}" for each in times)
            shown = ("–" if each is None else f"{each:.2f}" for each in times)
            cost = (f"{row.mean:+.2%}", row.by_seed, f"{same[row.variant]:.0f}")
            found.append((row.variant, *shown, *cost, *longer))
    heads = ("compression", "times as fast, 50 mbit", "20 mbit", "perplexity", "by seed")
    return table((*heads, "same loss without, at step", "time to this loss, 50 mbit", "20 mbit"), found)


def _speedups(case: str) -> dict[str, float]:
    run = next(run for run in runs("pipeline") if run["case"]["name"] == case)
    return {check["what"].partition(": times as fast")[0]: check["found"] for check in run["checks"]}


def pipeline_ranks_table() -> str:
    """Return what each rank of exposed messages costs in perplexity."""
    from benchmarks.suites import quality_pipeline

    of_rank = {name: int(name.rpartition(" ")[2]) for name in quality_pipeline.MESSAGE_RANKS}
    of_rank["cb"] = quality_pipeline.SIZES.rank
    rows = {row.variant: row for row in quality_pipeline.rows_of(quality_pipeline.runs_of()) if row.variant in of_rank}
    found = sorted((of_rank[name], f"{row.each[0]:+.2%}") for name, row in rows.items())
    return table(("rank of messages", "perplexity, seed 0"), [(str(rank), cost) for rank, cost in found])


def times_table() -> str:
    """Return the time of each candidate to the loss, by rate of the links, the fastest first."""
    from benchmarks.suites import outer_time

    return table(
        ("link", "candidate", "minutes to the loss", "by seed", "seconds of a step"),
        [
            (each.inter, f"`{each.candidate}`", each.minutes(each.mean), each.by_seed, f"{each.step:.3g}")
            for each in outer_time.times(outer_time.runs_of())
        ],
    )


def outer_quality_table() -> str:
    """Return the final loss of each variant of outer steps over that of synchronous training, less one."""
    from benchmarks.suites import outer_quality

    rows = outer_quality.rows_of(outer_quality.measured_runs())
    return table(
        ("variant", "loss", "95 % interval"), [(row.variant, f"{row.mean:+.2%}", row.interval) for row in rows]
    )


def outer_time_table() -> str:
    """Return the minutes of each candidate to the loss, by rate of the links."""
    from benchmarks.suites import outer_time

    times = {(each.candidate, each.inter): each.minutes(each.mean) for each in outer_time.times(outer_time.runs_of())}
    links = [inter for inter in outer_time.LINKS if any(inter == measured for _, measured in times)]
    body = [(f"`{name}`", *(times.get((name, inter), "–") for inter in links)) for name, _ in times]
    return table(("candidate", *links), list(dict.fromkeys(body)))


def lora_table() -> str:
    """Return steps of a few candidates over the forward and backward pass alone."""
    found: list[Row] = []
    for run in runs("lora"):
        for name in _LORA:
            if name in run["seconds"]:
                check = figures.ratio(run["seconds"], name, "compute").recorded()
                found.append((run["case"]["name"], check["what"], *_result(check), results.measured_at(run)))
    return table(HEADINGS, found)


def lab_table() -> str:
    """Return what the lab measured of the papers' own comparisons: the times of one candidate over those of another."""
    found: list[Row] = []
    for (suite, case), lines in _LAB.items():
        run = next((run for run in runs(suite) if run["case"]["name"] == case and "seconds" in run), None)
        for place, what, printed, slower, faster in lines if run else ():
            check = figures.ratio(run["seconds"], slower, faster).recorded()
            found.append((place, what, printed, *_result(check), results.measured_at(run)))
    return table(("figure", "what", "printed", "measured", "95 % interval", "commit"), found)


def speedups_table() -> str:
    """Return the four rows of README.md."""
    head = ("FSDP2 would communicate", "comparisons", "lossless", "compressed (lossy)")
    rows = report.readme_rows(_compared_strategies())
    return table(
        head, [("as long as it computes" if r == "1" else f"{r} times as long as it computes", *c) for r, *c in rows]
    )


def families_table() -> str:
    return table(report.HEADINGS, report.rows(_compared_strategies()))


def speedups_picture() -> str:
    return standalone_svg(report.draw_speedups, _compared_strategies(), (10.4, 4.6))


def _compared_strategies() -> list[Line]:
    return [run for run in runs("strategies") if "failed" not in run]


def _quality(pipelines: bool) -> str:
    """Return the picture of a suite that loads torch."""
    from benchmarks.suites import quality, quality_pipeline

    return quality_pipeline.picture() if pipelines else quality.picture()


def _exact_bytes() -> str:
    from benchmarks.suites import exact_bytes

    return exact_bytes.picture()


def _outer_quality() -> str:
    from benchmarks.suites import outer_quality

    return outer_quality.picture()


def _outer_time() -> str:
    from benchmarks.suites import outer_time

    return outer_time.picture()


def loading_table() -> str:
    """Return the peak memory of each way to load a model, from `loading`."""
    found: list[Row] = []
    for run in runs("loading"):
        peaks = (*run["loading"], *run["without_file_pages"])
        found.append((run["case"]["name"], *(f"{peak / 1e9:.1f} GB" for peak in peaks)))
    return table(("", "rank 0", "rank 1", "rank 0 without file pages", "rank 1 without file pages"), found)


# GPU clusters on which steps of FSDP2 are predicted, with and without wires.
_WIRED_CLUSTERS = ("ethernet-10g", "h100-100g")
_WIRED_MODEL, _WIRED_LENGTH, _WIRED_BATCH = "llama-7b", 2048, 4


def predicted_wires_table() -> str:
    """Return the predicted steps of FSDP2, HSDP and DDP on GPUs, with one micro-step."""
    from towpath.plan.catalog import describe_model, load_cluster
    from towpath.plan.hardware import GIB
    from towpath.plan.pytorch import predict_wrappers
    from towpath.plan.request import Request
    from towpath.plan.solver import Solver

    found: list[Row] = []
    for name in _WIRED_CLUSTERS:
        cluster = load_cluster(name)
        nodes = cluster.topology.nodes
        batch, model = _WIRED_BATCH * cluster.topology.world, describe_model(_WIRED_MODEL, _WIRED_LENGTH)
        request = Request(batch, cluster.memory, micro_batches=(_WIRED_BATCH,))
        steps = predict_wrappers(Solver(model, cluster, request))
        for step in steps:
            memory = f"{step.peak_bytes / GIB:.1f}" + (" (too much)" if step.peak_bytes > cluster.memory else "")
            sent, times = step.expected_inter_bytes / nodes / 1e9, steps[0].seconds / step.seconds
            found.append((name, step.strategy.name, f"{step.seconds:.3g} s", f"{times:.2f}", f"{sent:.1f}", memory))
    return table(("cluster", "training", "step", "times as fast as FSDP2", "GB out of a node", "GiB of a rank"), found)


def propagation_table(name: str) -> str:
    """Return one of the two tables in which the guide sums up what error propagation does."""
    from benchmarks.suites import propagation_page

    return {"gradients": propagation_page.gradient_summary, "trainings": propagation_page.training_summary}[name]()


TABLES = {
    "wires-predicted": predicted_wires_table,
    "loading": loading_table,
    "speedups": speedups_table,
    "families": families_table,
    "quality": quality_table,
    "lora": lora_table,
    "pipeline-quality": pipeline_quality_table,
    "pipeline-ranks": pipeline_ranks_table,
    "propagation-gradients": lambda: propagation_table("gradients"),
    "propagation-trainings": lambda: propagation_table("trainings"),
    "outer-quality": outer_quality_table,
    "outer-time": outer_time_table,
    "muon": lambda: measured_table("muon"),
    "papers-lab": lab_table,
    "comparisons": lambda: "".join(
        f"- [{page.title}](comparisons/{suite}.md): {page.summary}\n"
        for suite, page in PAGES.items()
        if results.file_of(suite).exists()
    ),
}

PICTURES = {
    PICTURES_FOLDER / "speedups.svg": speedups_picture,
    results.FOLDER / "quality.svg": lambda: _quality(pipelines=False),
    results.FOLDER / "quality_pipeline.svg": lambda: _quality(pipelines=True),
}
for _suite, _picture in {
    "exact_bytes": _exact_bytes,
    "outer_quality": _outer_quality,
    "outer_time": _outer_time,
}.items():
    if results.file_of(_suite).exists():
        PICTURES[results.FOLDER / f"{_suite}.svg"] = _picture


# Pages ----------------------------------------------------------------------------------------------------------------


def page_of(suite: str) -> str:
    """Return the page of a file of results."""
    page = PAGES[suite]
    origin = (
        f"`{page.command}` runs these cases and adds to [{suite}.jsonl](../results/{suite}.jsonl). This page shows the "
        "last run of each case. `python -m tools.docs.generate` writes it."
    )
    about = [textwrap.fill(text, 120, break_on_hyphens=False) for text in (f"{page.summary} {page.about}", origin)]
    return "\n\n".join([f"# {page.title}", *about, *_sections(suite)])


def _sections(suite: str) -> Iterable[str]:
    """Yield the table of a suite; for strategies, one per cluster and number of micro-steps."""
    if suite == "quality_pipeline":
        from benchmarks.suites import quality_pipeline

        yield from quality_pipeline.sections()
        return
    if suite == "propagation":
        from benchmarks.suites import propagation_page

        yield from propagation_page.sections()
        return
    if suite == "outer_quality":
        from benchmarks.suites import outer_quality

        found = outer_quality.measured_runs()
        yield judged_table(found, outer_quality.rows_of(found))
        yield "![Validation loss over optimizer steps](../results/outer_quality.svg)"
        return
    if suite == "outer_time":
        yield times_table()
        yield "![Validation loss over the time of training](../results/outer_time.svg)"
    if suite != "strategies":
        yield measured_table(suite)
        if suite == "exact":
            from benchmarks.suites import exact

            yield "## Means over the ratios\n\n" + table(
                ("figure", "result"), [(mean["what"], f"{mean['found']:.4g}") for mean in exact.mean_rows()]
            )
        if suite == "wires":
            about = (
                f"A step of {_WIRED_MODEL} on two clusters of `towpath plan`, with {_WIRED_BATCH} sequences of "
                f"{_WIRED_LENGTH:,} tokens a rank in one micro-step. On GPUs, FSDP2 overlaps."
            )
            yield f"## Predicted on GPUs\n\n{textwrap.fill(about, 120)}\n\n{predicted_wires_table()}"
        if suite == "exact_bytes":
            yield "![Bytes over optimizer steps, by class of parameters](../results/exact_bytes.svg)"
        return
    for heading, found in groupby(sorted(runs(suite), key=_place), key=_heading):
        yield f"## {heading}\n\n" + table(HEADINGS, [row for run in found for row in rows(suite, run)])


def _heading(run: Line) -> str:
    workload = run["case"]["workload"]
    shape, steps = workload["topology"], workload["micro_steps"]
    return f"{shape['nodes']} nodes × {shape['ranks_per_node']} ranks, {steps} micro-step{'s' * (steps > 1)}"


def _place(run: Line) -> tuple[Any, ...]:
    """Return a sort key: by heading, by the seconds that blocks wait, and by the communication-to-computation ratio."""
    workload, ratio = run["case"]["workload"], report.comm_ratio_of(run)
    column = len(report.COMM_RATIOS) if ratio is None else report.COMM_RATIOS.index(ratio)
    return _heading(run), workload.get("in_step", False), workload["wait_seconds"] or 0.0, column
