"""Generated tables of docs/reference/ and docs/guides/: commands, TOML keys, strategies, errors, shipped clusters.

Commands come from their `--help`, and TOML keys from what `towpath train --print-config` prints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import typer
from typer.testing import CliRunner

from tools.docs import figures
from towpath import api, errors
from towpath.cli import main
from towpath.core import presets
from towpath.core.formats import Precision
from towpath.core.schedule import schedule
from towpath.core.strategy import WITH_TRANSPORT, Protect, TransferKind
from towpath.core.units import units_from_numels
from towpath.plan.catalog import describe_model, load_cluster, shipped_clusters
from towpath.plan.hardware import GIB
from towpath.plan.request import Request
from towpath.plan.solver import Batching, Solver
from towpath.topology.cluster import Topology

# The pages docs/reference/cli-….md that have these commands; docs/reference/cli.md has all others.
PAGE_OF = dict.fromkeys(("probe", "bench", "doctor"), "measuring")
SECTIONS = ("model", "data", "train", "strategy", "strategy.outer", "parallel", "log", "checkpoint")


# Commands -------------------------------------------------------------------------------------------------------------


def commands(page: str) -> str:
    """Return a section for each command: its help, and a table of its arguments and options."""
    found = _leaves(typer.main.get_command(main.app), ())
    return "\n".join(_section(name, each) for name, each in found if PAGE_OF.get(name.split()[1], "") == page)


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the commands that have no subcommands, with their full names."""
    if subcommands := getattr(command, "commands", None):
        for name, each in subcommands.items():
            yield from _leaves(each, (*path, name))
    else:
        yield " ".join(("towpath", *path)), command


def _section(name: str, command: Any) -> str:
    context: Any = typer.Context(command, info_name=name)
    described = inspect.cleandoc(command.help or "")
    rows = [_parameter(each) for each in command.get_params(context) if not getattr(each, "hidden", False)]
    rows = sorted((row for row in rows if "--help" not in row[0]), key=lambda row: row[0].startswith("`-"))
    parts = [f"## `{name}`", described]
    if rows:
        parts.append(figures.table(("argument or option", "meaning", "default"), rows).rstrip())
    return "\n\n".join(parts) + "\n"


def _parameter(parameter: Any) -> Sequence[str]:
    options = [*getattr(parameter, "opts", ()), *getattr(parameter, "secondary_opts", ())]
    is_argument = parameter.param_type_name == "argument"
    metavar = parameter.metavar or ""
    if is_argument:
        name = f"`{metavar.strip('{}') or parameter.name.upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in options) + (f" {metavar}" if metavar else "")
    text = " ".join((getattr(parameter, "help", None) or "").split())
    if parameter.required:
        text += " Required."
    default = getattr(parameter.default, "value", parameter.default)
    shown = f"`{default}`" if default not in (None, False, "", (), []) and not callable(default) else ""
    if isinstance(parameter.show_default, str):  # what stands for a default that is computed
        shown = parameter.show_default
    return [cell.replace("|", "\\|") for cell in (name, text.strip(), shown)]


# TOML keys ------------------------------------------------------------------------------------------------------------


def keys(section: str) -> str:
    """Return a table of the keys of one section of a configuration."""
    found = re.search(rf"^\[{re.escape(section)}\]\n(.*?)(?=^\[|\Z)", _printed_config(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"--print-config prints no [{section}]"
    rows = re.findall(r"^(\w+) = (.*?)\s+# (.*)$", found[1], re.MULTILINE)
    escaped = [[f"`{key}`", f"`{value}`", text.replace("|", "\\|")] for key, value, text in rows]
    return figures.table(("key", "default", "meaning"), escaped)


@cache
def _printed_config() -> str:
    """Return the configuration of an empty file."""
    with NamedTemporaryFile(suffix=".toml") as empty:
        return CliRunner().invoke(main.app, ["train", empty.name, "--print-config"]).stdout


# Strategies -----------------------------------------------------------------------------------------------------------


_COUNTED = Topology(2, 8)
_SENT = {
    "weights": (TransferKind.GATHER, TransferKind.BACKWARD_GATHER),
    "gradients": (TransferKind.REDUCE, TransferKind.GRAD_SYNC),
    "new weights": (TransferKind.PARAM_SYNC,),
}


def strategies() -> str:
    """Return a table of every preset: what it shards, its codecs, and what crosses nodes."""
    return figures.table(("name", "P", "G", "OS", "codecs", "crosses nodes"), map(_preset, presets.strategies()))


def _preset(name: str) -> Sequence[str]:
    made = presets.strategy(name, _COUNTED)
    placement = made.placement
    extents = [_symbolic(extent) for extent in (placement.params, placement.grads, placement.optimizer)]
    copy = placement.backward_params
    if copy is not None:
        extents[0] += f", copy {_symbolic(copy)}"
    codecs = {str(made.transport(kind).codec) for kind in WITH_TRANSPORT} - {"none"}
    return f"`{name}`", *extents, ", ".join(f"`{codec}`" for codec in sorted(codecs)), _crossing(name)


def _symbolic(extent: Any) -> str:
    letters = {1: "1", _COUNTED.ranks_per_node: "R"}
    return f"{letters[extent.local]}×{'N' if extent.nodes > 1 else '1'}"


def _crossing(name: str) -> str:
    """Return the kinds of transfer that cross nodes, with how often."""
    units = tuple(unit.spec for unit in describe_model("gpt-2.5b", 1024).units)
    once, twice = (schedule(presets.strategy(name, _COUNTED), units, steps) for steps in (1, 2))
    parts: list[str] = []
    for what, kinds in _SENT.items():
        first, second = (sum(t.cable_bytes(0) for t in made.transfers if t.kind in kinds) for made in (once, twice))
        if first:
            passes = {t.kind for t in once.transfers if t.kind in kinds and t.cable_bytes(0)}
            often = "per micro-step" if second > first else "per step"
            parts.append(f"{what} {'twice ' if len(passes) > 1 and what == 'weights' else ''}{often}")
    return "; ".join(parts)


_SHOWN: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("ddp", {}),
    ("mics", {}),
    ("mics", {"gradients": "int4:64"}),
    ("paro-iig", {}),
    ("paro-nig", {}),
    ("hpz", {}),
    ("zero3", {}),
    ("zero++", {}),
)


def two_nodes() -> str:
    """Return simulated steps on two nodes of eight GPUs with 10 Gbit/s between them."""
    cluster = load_cluster("ethernet-10g")
    cluster = replace(cluster, hardware=replace(cluster.hardware, topology=_COUNTED))
    solver = Solver(describe_model("gpt-2.5b", 1024), cluster, Request(batch=1, memory=cluster.memory))

    def row(name: str, options: Mapping[str, Any]) -> Iterable[str]:
        made = presets.strategy(name, cluster.topology, **options)
        one, four = (solver.predict(made, Batching(8, micro_steps, checkpointing=True)) for micro_steps in (1, 4))
        said = ", ".join(f'`{key}="{value}"`' for key, value in options.items())
        yield f"`{name}`{f', {said}' if said else ''}"
        yield from (f"{one.seconds:.1f} s", f"{four.seconds:.1f} s", f"{one.inter_bytes / 2e9:.1f}")
        yield f"{one.peak_bytes / GIB:.1f}{'' if one.peak_bytes <= cluster.memory else ', does not fit'}"

    head = ("strategy", "step, 1 micro-step", "step, 4 micro-steps", "GB out of a node, 1 micro-step", "GiB of a rank")
    return figures.table(head, [tuple(row(name, options)) for name, options in _SHOWN])


_BILLIONS = (1, 8, 70)  # parameters of a model


def lost_nodes() -> str:
    """Return what surviving a lost node takes, by size of the model, on 4 nodes of 8 ranks with 25 Gbit/s each."""
    topology, rate, rows = Topology(4, 8), 25e9 / 8, dict[tuple[str, ...], list[str]]()
    for billions in _BILLIONS:
        units = units_from_numels([10**9] * billions)  # only the size matters
        for name in presets.strategies():
            made = presets.strategy(name, topology, protect=Protect())
            found = schedule(made, units, 1, Precision("bfloat16")).protection
            sent, memory = f"{found.step_bytes / 1e9:.3g}", f"{found.host_bytes / 1e9:,.0f}"
            seconds = (f"{found.step_bytes / rate:.2g} s", f"{found.heal_seconds(rate):.0f} s")
            row = (found.survives.value, f"{billions} billion", sent, memory, *seconds)
            rows.setdefault(row, []).append(f"`{name}`")
    head = (
        *("strategies", "survives a node", "parameters", "GB a step to the buddy", "GB of a node's memory"),
        *("the link, a step", "to heal"),
    )
    found = sorted(rows.items(), key=lambda each: each[0][0], reverse=True)
    first = f"{_BILLIONS[0]} billion"  # all sizes have the same strategies
    return figures.table(head, [(", ".join(names) if row[1] == first else "", *row) for row, names in found])


# Functions ------------------------------------------------------------------------------------------------------------


def arguments(function: Callable[..., Any]) -> str:
    """Return a table of a function's arguments, with their defaults, from its docstring."""
    documented = re.search(r"^Args:\n(.*?)(?=^\S)", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL)
    assert documented is not None, f"{function.__name__} has no Args:"
    found = re.findall(r"^    (\w+): (.*?)(?=^    [\w*]|\Z)", documented[1], re.MULTILINE | re.DOTALL)
    parameters = inspect.signature(function).parameters

    def default(name: str) -> str:
        value = parameters[name].default
        return "required" if value is inspect.Parameter.empty else f"`{value!r}`"

    rows = [(f"`{name}`", default(name), " ".join(text.split()).replace("|", "\\|")) for name, text in found]
    return figures.table(("argument", "default", "meaning"), rows)


# Errors ---------------------------------------------------------------------------------------------------------------


def error_table() -> str:
    """Return a table of the public errors, each with its base class and the summary of its docstring."""
    found = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.TowpathError)]
    rows = [
        (f"`{each.__name__}`", f"`{each.__bases__[0].__name__}`", " ".join(str(each.__doc__).split("\n\n")[0].split()))
        for each in found
    ]
    return figures.table(("error", "is a", "meaning"), rows)


# Clusters -------------------------------------------------------------------------------------------------------------


def clusters() -> str:
    """Return every shipped cluster. What it is comes from the first sentence of its file."""
    folder = figures.ROOT / "src/towpath/plan/clusters"
    headings = (
        "name",
        "GPUs and links",
        "nodes × ranks",
        "GiB a rank",
        "GB/s inside, a rank",
        "Gbit/s between, a node",
    )
    return figures.table(headings, (_cluster(name, folder / f"{name}.toml") for name in shipped_clusters()))


def _cluster(name: str, file: Path) -> Sequence[str]:
    comment = " ".join(line.removeprefix("# ") for line in takewhile(_is_comment, file.read_text().splitlines()))
    made = load_cluster(name)
    links = made.hardware
    return (
        f"`{name}`",
        comment.partition(". ")[0],
        f"{made.topology.nodes} × {made.topology.ranks_per_node}",
        f"{made.memory / GIB:.3g}",
        f"{links.intra.rate / 1e9:.3g}",
        f"{links.inter.rate * 8 / 1e9:.3g}",
    )


def _is_comment(line: str) -> bool:
    return line.startswith("#")


TABLES = {
    "clusters": clusters,
    "commands": partial(commands, ""),
    "measuring-commands": partial(commands, "measuring"),
    "strategies": strategies,
    "two-nodes": two_nodes,
    "lost-nodes": lost_nodes,
    "errors": error_table,
    "shard-arguments": partial(arguments, api.shard),
    **{f"keys-{section.replace('.', '-')}": partial(keys, section) for section in SECTIONS},
}
