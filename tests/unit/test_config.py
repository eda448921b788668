"""What `towpath train` may be told, how it is refused, and that what is written loads as what was read."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.documented import Fence, all_fences
from towpath.core.formats import Codec, Precision
from towpath.core.outer import Outer
from towpath.core.presets import strategies
from towpath.core.strategy import Strategy
from towpath.errors import ConfigError
from towpath.planner.catalog import describe_model, load_cluster
from towpath.topology.cluster import Extent, Topology
from towpath.train.config import Config, StrategyConfig, TrainConfig
from towpath.train.strategy_config import OuterConfig

DOCUMENTED = [fence for fence in all_fences() if fence.language == "toml"]


@pytest.mark.parametrize("fence", DOCUMENTED, ids=lambda fence: fence.page)
def test_the_files_that_the_documentation_shows_are_read(tmp_path: Path, fence: Fence) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(fence.text)
    readers = {"": Config.load, "model": describe_model, "cluster": load_cluster}
    readers[fence.said](file)


def test_what_is_written_loads_as_the_same() -> None:
    config = Config.from_dict(
        {
            "model": {"width": 64, "heads": 2, "tied": False},
            "data": {"text": ["a.txt", 'odd "name".txt'], "held_out": 0.1},
            "train": {"steps": 7, "learning_rate": 3, "betas": [0.8, 0.9], "clip": float("inf")},
            "strategy": {"name": "mics", "group": [2, 1], "gradients": "int4:64", "outer": {"every": 32, "delay": 2}},
            "log": {"trace": [3, 5], "wandb": "project"},
        }
    )
    assert Config.from_dict(tomllib.loads(str(config))) == config


def test_what_is_written_beside_a_hugging_face_model_loads_as_the_same() -> None:
    config = Config.from_dict({"model": {"hf": "llama", "weights": "llama"}})
    written = tomllib.loads(str(config))
    assert written["model"] == {"hf": "llama", "weights": "llama"}
    assert Config.from_dict(written) == config


@given(texts=st.lists(st.text()), column=st.text(), rate=st.floats(min_value=0, exclude_min=True, allow_nan=False))
@example(texts=['a "name"', "C:\\new\nline\x7f\x00"], column="🚣 # not a comment", rate=5e-324)
def test_whatever_its_texts_and_numbers_what_is_written_loads_as_the_same(
    texts: list[str], column: str, rate: float
) -> None:
    config = Config.from_dict({"data": {"text": texts, "column": column}, "train": {"learning_rate": rate}})
    assert Config.from_dict(tomllib.loads(str(config))) == config


def test_the_defaults_are_written_with_what_they_mean() -> None:
    for line in str(Config()).splitlines():
        assert not line or line.startswith("[") or " # " in line, line


def test_overrides_are_toml_and_what_is_not_is_text(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[train]\nsteps = 5\n")
    overrides = ["train.steps=9", "strategy.name=paro-iig", "data.text=x.txt"]
    overrides += ["train.betas=[0.5, 0.6]", "model.tied=false"]
    config = Config.load(file, overrides)
    assert (config.train.steps, config.strategy.name, config.data.text) == (9, "paro-iig", ("x.txt",))
    assert (config.train.betas, config.model.tied) == ((0.5, 0.6), False)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, Precision("float32", None, "float32")),
        ({"precision": "bf16"}, Precision("bfloat16", None, "float32")),
        ({"precision": "bf16", "accumulate": "bf16"}, Precision("bfloat16", None, "bfloat16")),
        ({"precision": "bf16", "reduce": "fp32", "accumulate": "bf16"}, Precision("bfloat16", "float32", None)),
    ],
    ids=str,
)
def test_dtypes_are_those_of_train(train: dict[str, str], expected: Precision) -> None:
    assert Config.from_dict({"train": train}).train.dtypes == expected


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"train": {"stepz": 3}}, "unknown key train.stepz; did you mean 'steps'?"),
        ({"trian": {}}, r"unknown section \[trian\]; did you mean 'train'?"),
        ({"train": 3}, r"train = 3: expected a section \[train\]"),
        ({"train": {"steps": "many"}}, 'train.steps = "many": expected a whole number'),
        ({"train": {"steps": True}}, "train.steps = true: expected a whole number"),
        ({"train": {"steps": 1.5}}, "train.steps = 1.5: expected a whole number"),
        ({"train": {"steps": 0}}, "train.steps = 0: expected more than 0"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate = nan: expected more than 0"),
        ({"train": {"betas": [0.9]}}, "expected 2 values"),
        ({"train": {"betas": [0.9, 1.0]}}, "up to, not including, 1"),
        ({"train": {"precision": "int8"}}, "expected one of 'fp32', 'bf16'"),
        ({"train": {"batch": 6, "micro_batch": 4}}, "train.micro_batch = 4: expected a divisor of train.batch = 6"),
        ({"model": {"width": 100, "heads": 8}}, "model.width = 100: expected a multiple of 2 × heads = 16"),
        ({"model": {"heads": 8, "kv_heads": 3}}, "expected a divisor of heads = 8"),
        (
            {"model": {"hf": "llama", "width": 64}},
            "model.width is given together with model.hf = 'llama', which decides it",
        ),
        ({"model": {"hf": "llama", "depth": 8}}, "model.depth is given together with model.hf"),
        (
            {"model": {"hf": "llama", "width": 100, "tied": False}},
            "model.width, model.tied are given together with model.hf",
        ),
        ({"data": {"text": ["a"], "tokens": "b"}}, "expected only one source; data.text is given too"),
        ({"data": {"text": ["a", "b"], "weights": [1]}}, "as many numbers as data.text has entries, 2"),
        ({"data": {"tokens": ["a", "b"]}}, "as many numbers as data.tokens has entries, 2"),
        ({"data": {"text": ["a", "b"], "weights": [1, 0]}}, "data.weights = .*: expected numbers above 0"),
        ({"data": {"text": ["a", "b"], "weights": [1, math.nan]}}, "data.weights = .*: expected numbers above 0"),
        (
            {"data": {"text": ["a", "b"], "weights": [1, 1e-3]}},
            "data.weights = .*: expected shares of at least 1 in 1000",
        ),
        ({"data": {"dataset": "a", "weights": [1]}}, "data.weights = .*: expected none: a dataset is one source"),
        ({"data": {"weights": [1]}}, "as many numbers as data.text has entries, 0"),
        ({"data": {"held_out": 1.0}}, "data.held_out = 1.0"),
        ({"data": {"held_out": 0.0}, "train": {"evaluate_every": 1}}, "evaluate_every = 1: expected 0, since"),
        ({"train": {"seed": 1 << 63}}, "train.seed = .*: expected a whole number from 0 to"),
        ({"data": {"text": "caf\udce9.txt"}}, r"data.text = 'caf\\udce9.txt': expected Unicode text"),
        ({"strategy": {"name": "zerro3"}}, r"expected a preset \(zero3\?\)"),
        ({"strategy": {"allow": ["int8"]}}, r"strategy.allow = \('int8',\): expected only with strategy.name = auto"),
        ({"strategy": {"name": "auto", "route": "ring"}}, "expected nothing: auto chooses it"),
        ({"strategy": {"name": "auto", "allow": ["int3"]}}, "strategy.allow = 'int3': expected a codec"),
        ({"strategy": {"pipelines": [2]}}, "pipelines = .*: expected only with strategy.name = auto"),
        ({"strategy": {"name": "auto", "pipelines": [0]}}, r"pipelines = \[0\]: expected numbers of ranks, from 1"),
        ({"strategy": {"name": "auto", "schedules": ["1F2B"]}}, r"schedules = '1F2B': expected of .* \(1F1B\?\)"),
        ({"strategy": {"name": "auto", "schedules": ["1F1B"]}}, r"pipelines = \[\]: expected some above 1"),
        ({"strategy": {"name": "auto", "tensors": [2], "offload": "optimizer"}}, "expected nothing beside"),
        ({"strategy": {"name": "auto", "tensors": [2]}, "parallel": {"tensor": 2}}, "expected one of the two"),
        ({"strategy": {"name": "auto", "pipelines": [2]}, "train": {"compile": True}}, "no train.compile yet"),
        ({"strategy": {"nodes": 2}}, "nodes and ranks_per_node"),
        ({"strategy": {"nodes": 3, "ranks_per_node": 1, "nodes_per_rack": 2}}, "expected a divisor of nodes"),
        ({"strategy": {"nodes_per_rack": 2}}, r"expected a divisor of nodes \(0\), which it needs"),
        ({"strategy": {"nodes": 2, "ranks_per_node": 1, "nodes_per_rack": -1}}, "expected a divisor of nodes"),
        ({"strategy": {"name": "auto", "interleaved": True}}, "expected codecs in strategy.allow with it"),
        ({"strategy": {"group": [2]}}, r"strategy.group = \[2\]: expected \[ranks of a node, nodes\]"),
        ({"log": {"trace": [0]}}, "counted from 1"),
        ({"log": {"trace": [500]}}, "log.trace names step 500, but train.steps is 200"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        Config.from_dict(table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["steps=3", "train.steps", "train.=3", ".steps=3", "="])
def test_an_override_that_names_no_key_is_refused(tmp_path: Path, override: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="is not an override"):
        Config.load(file, [override])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent.toml: No such file"):
        Config.load(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not TOML"):
        Config.load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        Config.load(broken)


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    config = TrainConfig(batch=24, micro_batch=4)
    assert [config.micro_steps(world) for world in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"4 ranks × train.micro_batch 4 compute 16 at once"):
        config.micro_steps(4)


@pytest.mark.parametrize("name", strategies())
def test_every_preset_is_a_strategy_section(name: str) -> None:
    assert StrategyConfig(name=name).build(Topology(2, 2), 100).name == name


def test_a_strategy_section_passes_its_options_on(tmp_path: Path) -> None:
    made = StrategyConfig(name="mics", group=(2, 2), gradients="int4:64", feedback="both").build(Topology(4, 2), 100)
    assert made.placement.params == Extent(2, 2)
    assert made.grad_sync.feedback == "both"
    file = tmp_path / "s.toml"
    file.write_text(made.to_toml())
    assert StrategyConfig(name=str(file)).build(Topology(4, 2), 100) == made
    resting = StrategyConfig(name="zero3", frozen=(2, 1), frozen_codec="int4:64").build(Topology(2, 2), 100)
    assert resting.frozen == Extent(2)
    assert resting.frozen_codec == Codec.parse("int4:64")
    assert StrategyConfig(name="zero3").build(Topology(2, 2), 100).frozen is None
    assert StrategyConfig(name="zero++", interleaved=True).build(Topology(2, 2), 100).reduce.until == 50
    with pytest.raises(ConfigError, match="frozen"):
        StrategyConfig(name="zero3", frozen=(2,))
    with pytest.raises(ConfigError, match="remove frozen_codec, frozen"):
        StrategyConfig(name=str(file), frozen=(2, 1), frozen_codec="int8").build(Topology(4, 2), 100)
    with pytest.raises(ConfigError, match="remove route"):
        StrategyConfig(name=str(file), route="ring").build(Topology(4, 2), 100)
    racks = StrategyConfig(nodes=4, ranks_per_node=2, nodes_per_rack=2)
    assert racks.topology(Topology(8, 1)) == Topology(4, 2, 2)
    cut = StrategyConfig(name="zero3", nodes=4, ranks_per_node=1).build(Topology(2, 2), 100)
    assert cut.topology == Topology(4, 1)
    assert Strategy.from_toml(cut.to_toml()) == cut


# --- outer steps ------------------------------------------------------------------------------------------------------


def test_outer_steps_are_a_section_in_the_strategy(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[strategy]\nname = 'mics'\n[strategy.outer]\nevery = 32\n")
    overrides = [
        "strategy.outer.codec=int4",
        "strategy.outer.islands=2",
        "strategy.nodes=4",
        "strategy.ranks_per_node=2",
    ]
    made = Config.load(file, overrides).strategy.build(Topology(8, 1), 100)
    assert made.islands == 2
    assert made.topology == Topology(2, 2)
    assert made.outer is not None
    assert made.outer.every == 32
    assert made.outer.transport.feedback == "all"
    saved = tmp_path / "s.toml"
    saved.write_text(made.to_toml())
    assert StrategyConfig(name=str(saved)).build(Topology(4, 2), 100) == made
    with pytest.raises(ConfigError, match=r"which says all: remove \[strategy.outer\]"):
        StrategyConfig(name=str(saved), outer=OuterConfig(every=2)).build(Topology(4, 2), 100)


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"delay": 2}, r"strategy.outer.delay = 2: expected strategy.outer.every above 0 with it"),
        ({"every": 4, "delay": 4}, r"\[strategy.outer\]: Outer: delay=4 with every=4"),
        ({"every": 4, "codec": "int2"}, r"\[strategy.outer\]: .*int2"),
        ({"evry": 4}, r"unknown key strategy.outer.evry; did you mean 'every'"),
        ({"every": "4"}, r"strategy.outer.every = \"4\": expected a whole number"),
        (4, r"strategy.outer = 4: expected a section \[strategy.outer\]"),
    ],
)
def test_outer_steps_that_cannot_be_are_refused(outer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_dict({"strategy": {"outer": outer}})


def test_outer_steps_have_the_defaults_of_the_api() -> None:
    assert OuterConfig(every=32).build() == Outer(32)
