"""Models and clusters by name, or from a file.

The data of published models is in `models.toml`, that of clusters in `clusters/`, both next to this file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from towpath.core.formats import FLOATING, codec_names
from towpath.errors import ConfigError
from towpath.plan.hardware import GIB, Cluster, CodecSpeed, Hardware, Launching, Link, OffloadMemory, Racks
from towpath.plan.model import Model, Transformer
from towpath.plan.profile import Profile
from towpath.topology.cluster import Topology


def shipped_clusters() -> list[str]:
    """Return the sorted names of the clusters that come with Towpath."""
    folder = files("towpath.plan").joinpath("clusters")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load_cluster(what: str | Path, nodes: int | None = None, ranks_per_node: int | None = None) -> Cluster:
    """Load the description of a cluster.

    Args:
        what: The name of a shipped cluster, a TOML file, or a JSON file that `towpath probe` wrote.
        nodes: Number of nodes, in place of the description's. A measured cluster keeps its own.
        ranks_per_node: Ranks of each node, in the same way. A rank keeps its device and its links inside the node. A
            node keeps its links to other nodes.

    Returns:
        The cluster.

    Raises:
        ConfigError: If there is no such cluster, or its file cannot be read.
    """
    if Path(what).suffix == ".json":
        profile = Profile.load(what)
        measured = profile.topology
        if nodes not in (None, measured.nodes) or ranks_per_node not in (None, measured.ranks_per_node):
            asked = Topology(nodes or measured.nodes, ranks_per_node or measured.ranks_per_node)
            raise ConfigError(
                f"profile {what}: expected its own nodes × ranks, {measured}; got {asked}. A measurement does not hold "
                "for other numbers. Probe there, or describe that cluster in a .toml."
            )
        return profile.cluster()
    if str(what) in shipped_clusters():
        path: Any = files("towpath.plan").joinpath("clusters", f"{what}.toml")
    else:
        path = Path(what)
        if not path.is_file():
            known = ", ".join(shipped_clusters())
            raise ConfigError(f"cluster {str(what)!r}: expected a .toml file, or one of {known}.")
    found = from_table(path.name.removesuffix(".toml"), _read("cluster", path))
    return found.on(nodes or found.topology.nodes, ranks_per_node)


def _read(what: str, path: Any) -> dict[str, Any]:
    """Return the table in a file, or raise an error that names `what` it was to describe."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.name.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: cannot read {path}: {error}. Correct it there, or name another.") from None


# Models --------------------------------------------------------------------------------------------------------------


_EXPECTED = "a name, a Hugging Face config.json or its folder, or a .toml file"


def describe_model(what: str | Path, length: int | None = None) -> Model:
    """Describe a model by its name or from a file.

    Args:
        what: The name of a published model such as "llama-3.1-8b", a `config.json` of transformers or its folder, or
            a TOML file with the fields of `Transformer`.
        length: Tokens of a sequence. Default: the model's own.

    Returns:
        The model.

    Raises:
        ConfigError: If the model is unknown, its file cannot be read, or it is a mixture of experts.
    """
    shape, name, length = model_shape(what, length)
    return shape.model(name, length)


def model_shape(what: str | Path, length: int | None = None) -> tuple[Transformer, str, int]:
    """Return the shape of a model, its name, and the tokens of a sequence, for `Transformer.staged`."""
    path = Path(what, "config.json") if Path(what).is_dir() else Path(what)
    if path.suffix not in (".json", ".toml"):
        return _named(str(what), length)
    if not path.is_file():
        raise ConfigError(f"model {str(what)!r}: there is no file {path}. Expected {_EXPECTED}.")
    table = _read("model", path)
    usual = table.pop("length", None) if path.suffix == ".toml" else None
    shape = _from_config(table, path) if path.suffix == ".json" else _from_table(table, path)
    length = length or usual or shape.positions or table.get("max_position_embeddings")
    if not length:
        raise ConfigError(f"model: {path} does not say how long its sequences are: pass length=, or --length.")
    return shape, path.stem if path.suffix == ".toml" else path.parent.name or "model", length


def _from_table(table: Mapping[str, Any], path: Path) -> Transformer:
    known = {f.name: f for f in fields(Transformer)}
    if unknown := set(table) - set(known):
        raise ConfigError(f"model: {path}: unknown key {sorted(unknown)[0]!r}; it takes length, {', '.join(known)}.")
    if missing := [name for name in _NAMES if name not in table]:
        raise ConfigError(f"model: {path}: {missing[0]} is missing; expected a whole number of at least 1.")
    return Transformer(**table)


# The names of each size in a `config.json`, in order of preference.
_NAMES = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model"),
    "depth": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LIKE_GPT = ("gpt2", "gpt_neox", "gptj", "bert", "roberta", "opt", "bloom", "gpt_neo", "gpt_bigcode", "xlm-roberta")


def _from_config(config: Mapping[str, Any], path: Path) -> Transformer:
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = str(config.get("model_type", ""))
    if experts := next((key for key in _EXPERTS if config.get(key)), None):
        raise ConfigError(
            f"model: {path} has {experts} = {config[experts]!r}: it is a mixture of experts, and the planner knows "
            "only dense models, in which every token meets every parameter."
        )
    found: dict[str, int] = {}
    for name, theirs in _NAMES.items():
        value = next((config[key] for key in theirs if config.get(key)), None)
        if value is None and name == "hidden":
            value = 4 * found["width"]
        if value is None:
            raise ConfigError(f"model: {path} has no {' or '.join(theirs)}: it is of no kind that is known here.")
        found[name] = value
    plain = kind in _LIKE_GPT
    learned = plain and kind not in ("gpt_neox", "gptj", "bloom")
    positions = config.get("n_positions") or config.get("max_position_embeddings") or 0
    return Transformer(
        **found,
        kv_heads=config.get("num_key_value_heads") or 0,
        tied=bool(config.get("tie_word_embeddings", plain)),
        gated=not plain,
        biases=plain,
        positions=positions if learned else 0,
        head=config.get("head_dim") or 0,
        head_norms=kind == "qwen3",
        norm_copies=not plain,
    )


# Models by name ------------------------------------------------------------------------------------------------------


@cache
def named_models() -> dict[str, tuple[Transformer, int]]:
    """Return the models of the papers, and published ones, by name, each with the length of its sequences."""
    data = _data()
    published = {name: data["all"] | entry for entry in data["model"] for name in entry["names"]}
    sizes = {f.name for f in fields(Transformer)}
    return {
        name: (Transformer(**{key: value for key, value in entry.items() if key in sizes}), entry["length"])
        for name, entry in (data["papers"] | published).items()
    }


def _named(what: str, length: int | None) -> tuple[Transformer, str, int]:
    """Find a model by name, however it is spelled: "llama-3.1-8b", "Llama3.1-8B" or "meta-llama/Llama-3.1-8B"."""
    words, spelled = _words_of(what), {" ".join(_words_of(name)): name for name in named_models()}
    if found := spelled.get(" ".join(words)):
        shape, usual = named_models()[found]
        return shape, found, length or usual
    nearest = spelled[difflib.get_close_matches(" ".join(words), list(spelled), n=1, cutoff=0.0)[0]]
    for start, family in _data()["experts"].items():
        if words[: len(_words_of(start))] == _words_of(start):
            raise ConfigError(
                f"model {what!r}: {family} is a mixture of experts, and the planner knows only dense models, in which "
                f"every token meets every parameter. Expected one such as {nearest}."
            )
    if what.startswith(("/", ".", "~")) or what.count("/") > 1:
        raise ConfigError(f"model {what!r}: there is no such file or folder. Expected {_EXPECTED}.")
    raise ConfigError(
        f"model {what!r}: expected a name ({', '.join(named_models())}), a Hugging Face config.json or its folder, "
        f"or a .toml file. Did you mean {nearest!r}?"
    )


def _words_of(name: str) -> list[str]:
    """Return the words and numbers of a model's name, so that spellings of one name are equal.

    The owner ("meta-llama/") is left out, and so are words that do not change the shape ("-Instruct").
    """
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?", name.lower().rpartition("/")[2])
    return [word for word in words if word not in _data()["ignored"]]


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("towpath.plan").joinpath("models.toml").read_text(encoding="utf-8"))


# A codec reads an element and writes less, or the other way round. It is about as fast as a copy of the element.
_BYTES_OF_A_CODED_ELEMENT = 4.0


def from_table(name: str, table: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a parsed TOML file describes. Raise ConfigError if the file is not valid."""
    root = _ClusterTable(f"cluster {name}", "", dict(table))
    if isinstance(sizes := table.get("ranks_per_node"), list):
        Topology(root.count("nodes"), sizes).check_equal(f"cluster {name}: the planner")
    topology = Topology(root.count("nodes"), root.count("ranks_per_node"))
    memory = int(root.number("memory") * GIB)
    compute, intra, inter = map(root.section, ("compute", "intra", "inter"))
    peak = tuple((dtype, compute.number(dtype) * 1e12) for dtype in FLOATING if dtype in compute.table)
    if not peak:
        raise ConfigError(f"cluster {name}: [compute] needs TFLOP/s of one dtype at least: {', '.join(FLOATING)}.")
    copies = compute.number("memory") * 1e9
    reached = compute.number("reached")
    if reached > 1:
        compute.refuse("reached", "a share from 0 to 1")
    rates = intra.number("gigabytes") * 1e9, inter.number("gigabits") * 1e9 / 8
    links = [
        Link(rate, section.number("latency") / 1e6, section.number("message") / 1e6)
        for rate, section in zip(rates, (intra, inter), strict=True)
    ]
    racks = host_memory = None
    if "racks" in root.table:
        section = root.section("racks")
        racks = Racks(section.count("nodes"), section.number("gigabits") * 1e9 / 8)
        topology = racks.topology(topology.nodes, topology.ranks_per_node)
    if "host" in root.table:
        section = root.section("host")
        host_memory = OffloadMemory(section.number("copies") * 1e9, section.number("memory") * 1e9)
    launching = Launching()
    if "launch" in root.table:
        section = root.section("launch")
        told = [each.name for each in fields(Launching) if each.name in section.table]
        launching = replace(launching, **{name: section.number(name) / 1e6 for name in told})
    codecs = _codecs(root, copies)
    root.end()
    hardware = Hardware(
        topology,
        *links,
        memory_rate=copies,
        sum_rate=copies,
        codecs=codecs,
        racks=racks,
        host_memory=host_memory,
        launching=launching,
    )
    return Cluster(name, hardware, memory, peak, reached)


def _codecs(root: _ClusterTable, copies: float) -> tuple[tuple[str, CodecSpeed], ...]:
    usual = CodecSpeed(copies / _BYTES_OF_A_CODED_ELEMENT, copies / _BYTES_OF_A_CODED_ELEMENT)
    speeds = dict.fromkeys(codec_names(), usual)
    if "codecs" in root.table:
        section = root.section("codecs")
        for codec in [codec for codec in codec_names() if codec in section.table]:
            pair = section.take(codec)
            if not (isinstance(pair, list) and len(pair) == 2 and all(_is_positive(rate) for rate in pair)):
                section.refuse(codec, "[encode, decode], in 10⁹ elements a second", pair)
            speeds[codec] = CodecSpeed(pair[0] * 1e9, pair[1] * 1e9)
    return tuple(speeds.items())


class _ClusterTable:
    """A table of the file. Keys are taken out one by one, and the keys that are left at the end are unknown."""

    def __init__(self, file: str, name: str, table: dict[str, Any]) -> None:
        self._file, self._name, self.table = file, name, table
        self._sections: list[_ClusterTable] = []

    def take(self, key: str) -> Any:
        return self.table.pop(key, None)

    def number(self, key: str) -> float:
        value = self.take(key)
        if not _is_positive(value):
            self.refuse(key, "a number above 0", value)
        return float(value)

    def count(self, key: str) -> int:
        value = self.take(key)
        if type(value) is not int or value < 1:
            self.refuse(key, "a whole number of at least 1", value)
        return value

    def section(self, key: str) -> _ClusterTable:
        value = self.take(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self._file}: expected a section [{key}]; got {value!r}.")
        self._sections.append(_ClusterTable(self._file, key, dict(value)))
        return self._sections[-1]

    def refuse(self, key: str, expected: str, value: Any = None) -> NoReturn:
        where = f"{self._name}.{key}" if self._name else key
        got = "it is missing" if value is None else f"got {value!r}"
        raise ConfigError(f"{self._file}: {where}: {got}; expected {expected}.")

    def end(self) -> None:
        for each in (*self._sections, self):
            if each.table:
                where = f"[{each._name}] " if each._name else ""
                raise ConfigError(f"{self._file}: {where}unknown key {next(iter(each.table))!r}.")


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
