"""What `towpath train` may be told, how it is refused, and that what is written loads as what was read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.documented import Fence, all_fences
from towpath.core.formats import Precision
from towpath.core.presets import strategy
from towpath.errors import ConfigError
from towpath.plan.catalog import describe_model, load_cluster
from towpath.topology.cluster import Topology
from towpath.train.config import Config, OuterConfig, StrategyConfig, TrainConfig

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
            "model": {"width": 64, "heads": 2, "hf": ""},
            "data": {"tokens": 'odd "name"', "held_out": 0.1},
            "train": {"steps": 7, "learning_rate": 3, "clip": float("inf")},
            "strategy": {
                "name": "mics gradients=int4:64",
                "exact": True,
                "outer": {"every": 32, "delay": 2, "blend": 0.5},
            },
            "log": {"trace": [3, 5], "wandb": "project"},
        }
    )
    assert Config.from_dict(tomllib.loads(str(config))) == config


@given(text=st.text(), rate=st.floats(min_value=0, exclude_min=True, allow_nan=False))
@example(text='🚣 # not "a" comment\nC:\\new\x7f\x00', rate=5e-324)
def test_whatever_its_texts_and_numbers_what_is_written_loads_as_the_same(text: str, rate: float) -> None:
    config = Config.from_dict({"data": {"tokens": text}, "train": {"learning_rate": rate}, "model": {"hf": text}})
    assert Config.from_dict(tomllib.loads(str(config))) == config


def test_overrides_are_toml_and_what_is_not_is_text(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[train]\nsteps = 5\n")
    overrides = ["train.steps=9", "strategy.name=paro-iig", "data.tokens=a folder", "log.trace=2"]
    overrides += ["train.compile=true", "strategy.outer.every=8"]
    config = Config.load(file, overrides)
    assert (config.train.steps, config.strategy.name, config.data.tokens) == (9, "paro-iig", "a folder")
    assert (config.train.compile, config.log.trace, config.strategy.outer.every) == (True, (2,), 8)


def test_in_bf16_micro_steps_are_summed_in_fp32() -> None:
    assert TrainConfig(precision="bf16").dtypes == Precision("bfloat16", None, "float32")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"train": {"stepz": 3}}, "unknown key train.stepz; did you mean 'steps'?"),
        ({"train": {"lr": 1e-3}}, r"unknown key train.lr\. Known: batch, .* CHANGELOG.md tells where others went"),
        ({"trian": {}}, r"unknown section \[trian\]; did you mean 'train'?"),
        ({"train": {"steps": "many"}}, 'train.steps = "many": expected a whole number'),
        ({"train": {"steps": True}}, "train.steps = true: expected a whole number"),
        ({"train": {"steps": 0}}, "train.steps = 0: expected more than 0"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate = nan: expected more than 0"),
        ({"train": {"precision": "int8"}}, "expected one of 'fp32', 'bf16'"),
        ({"train": {"batch": 6, "micro_batch": 4}}, "train.micro_batch = 4: expected a divisor of train.batch = 6"),
        ({"model": {"width": 100, "heads": 8}}, "model.width = 100: expected a multiple of 2 × heads = 16"),
        ({"model": {"hf": "llama", "width": 64}}, "model.width = 64: expected nothing beside model.hf = 'llama'"),
        ({"data": {"held_out": 1.0}}, "data.held_out = 1.0"),
        ({"data": {"held_out": 0.0}, "train": {"evaluate_every": 1}}, "evaluate_every = 1: expected 0, since"),
        ({"train": {"seed": 1 << 63}}, "train.seed = .*: expected a whole number from 0 to"),
        ({"strategy": {"name": "zerro3"}}, r"expected a preset \(zero3\?\)"),
        ({"strategy": {"allow": ["int8"]}}, r"strategy.allow = \['int8'\]: expected only with strategy.name = auto"),
        ({"strategy": {"name": "auto route=ring"}}, "expected auto alone: it chooses the options"),
        ({"strategy": {"name": "auto", "allow": ["int3"]}}, "strategy.allow = 'int3': expected a codec"),
        ({"strategy": {"nodes": "2"}}, "strategy.nodes = '2': expected NODESxRANKS"),
        ({"strategy": {"nodes": "1+3", "shares": "2,1"}}, "strategy.shares = '2,1': expected 4 numbers"),
        ({"strategy": {"nodes": "1+3"}, "parallel": {"tensor": 2}}, r"\[parallel\] needs the same number of ranks"),
        ({"strategy": {"shares": "2,1"}, "parallel": {"tensor": 2}}, "expected none with parallel.tensor = 2"),
        ({"log": {"trace": [500]}}, "expected steps up to train.steps = 200; got 500"),
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


def test_a_strategy_section_passes_its_options_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exact": True, "offload": "optimizer"}
    named = StrategyConfig(name="mics gradients=int4:64 feedback=both", nodes="4x1", **options)
    made = named.build(Topology(2, 2))
    assert made == strategy("mics", Topology(4, 1), gradients="int4:64", feedback="both", **options)
    file = tmp_path / "s.toml"
    file.write_text(made.to_toml())
    assert StrategyConfig(name=str(file)).build(Topology(4, 1)) == made
    with pytest.raises(ConfigError, match="which says all: remove offload, exact"):
        StrategyConfig(name=str(file), exact=True, offload="params").build(Topology(4, 1))
    with pytest.raises(ConfigError, match=r"cannot read the strategy .*absent.toml: No such file"):
        StrategyConfig(name=str(tmp_path / "absent.toml")).build(Topology(4, 1))


# --- outer steps ------------------------------------------------------------------------------------------------------


def test_outer_steps_are_a_section_in_the_strategy(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[strategy]\nname = 'mics'\n[strategy.outer]\nevery = 32\n")
    overrides = ["strategy.outer.codec=int4", "strategy.outer.islands=2"]
    overrides += ["strategy.nodes=4x2", "strategy.outer.blend=0.5"]
    made = Config.load(file, overrides).strategy.build(Topology(8, 1))
    assert (made.islands, made.topology) == (2, Topology(2, 2))
    assert made.outer is not None and (made.outer.every, made.outer.blend) == (32, 0.5)
    assert made.outer.transport.feedback == "all"
    saved = tmp_path / "s.toml"
    saved.write_text(made.to_toml())
    assert StrategyConfig(name=str(saved)).build(Topology(4, 2)) == made
    with pytest.raises(ConfigError, match=r"which says all: remove \[strategy.outer\]"):
        StrategyConfig(name=str(saved), outer=OuterConfig(every=2)).build(Topology(4, 2))


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"delay": 2}, r"strategy.outer.delay = 2: expected strategy.outer.every above 0 with it"),
        ({"every": 4, "delay": 4}, r"\[strategy.outer\]: Outer: delay=4 with every=4"),
        ({"every": 4, "codec": "int2"}, r"\[strategy.outer\]: .*int2"),
        ({"evry": 4}, r"unknown key strategy.outer.evry; did you mean 'every'"),
        (4, r"strategy.outer = 4: expected a section \[strategy.outer\]"),
    ],
)
def test_outer_steps_that_cannot_be_are_refused(outer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_dict({"strategy": {"outer": outer}})
