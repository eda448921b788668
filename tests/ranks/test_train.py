"""`towpath train` as a whole, on ranks: what a configuration trains, what is written, and how everybody fails alike.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks.server import Worlds, run_ranks
from tests.ranks.strategies import ROUNDING, in_turn, seldom
from towpath import strategies
from towpath.errors import TowpathError
from towpath.train import models
from towpath.train import trainer as trainer_module
from towpath.train.checkpoints import CheckpointManager
from towpath.train.config import Config
from towpath.train.data import prepare
from towpath.train.job import init_distributed
from towpath.train.metrics import JsonLines
from towpath.train.trainer import BETAS, TrainingRun, learning_rate, run_training

Rows = list[dict[str, Any]]

STEPS = 5

TINY: dict[str, dict[str, Any]] = {
    "model": {"width": 16, "depth": 2, "heads": 2},
    "train": {
        "steps": STEPS,
        "batch": 8,
        "micro_batch": 1,
        "length": 16,
        "learning_rate": 1e-2,
        "threads": 1,
    },
    "strategy": {"nodes": "2x2"},
}

# Losses of about 5.5 in fp32, whose gradients are summed in another order: each differs by some roundings of 5e-7, and
# five steps of AdamW make of that no more than this.
ROUNDED = 2e-5


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.txt"
    text.write_text("".join(f"the {i}th line says {i * i % 97}\n" for i in range(400)))
    prepare([str(text)], folder / "tokens")
    return folder / "tokens"


@pytest.fixture
def config(tokens: Path, tmp_path: Path) -> Callable[..., Config]:
    """`config(train={"steps": 3}, …)`: the tiny one, with these keys instead. It begins anew, whatever is there."""

    def of(**sections: dict[str, Any]) -> Config:
        table = {"data": {"tokens": str(tokens)}, "log": {"folder": str(tmp_path / "run")}} | TINY
        table["checkpoint"] = {"resume": "off"}
        if "hf" in sections.get("model", {}):  # which decides what TINY says of the model
            table["model"] = {}
        names = table.keys() | sections.keys()
        return Config.from_dict({name: table.get(name, {}) | sections.get(name, {}) for name in names})

    return of


def _on(nodes: int, ranks_per_node: int) -> dict[str, Any]:
    return {"nodes": f"{nodes}x{ranks_per_node}"}


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    table = tomllib.loads(str(config))
    return Config.from_dict({name: table[name] | sections.get(name, {}) for name in table})


def rows_of(config: Config, kind: str = "train") -> Rows:
    lines = Path(config.log.folder, "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def _train(config: Config) -> tuple[str, str]:
    """What it printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run_training(config)
    return out.getvalue(), err.getvalue()


def _steps(config: Config) -> tuple[list[float], float, dict[str, Tensor]]:
    """The losses, then the held-out loss and the weights."""
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
        training = TrainingRun(config, job)
        losses = [training.train_step().loss for _ in range(config.train.steps)]
        held_out, _ = training.evaluate()
        assert held_out is not None
        return losses, held_out, _weights(training)


def _weights(training: TrainingRun) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in training.model.named_parameters()}


# --- the same training ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers, with dropout."""
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    made = GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    assert made.resid_pdrop > 0
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tokens: Path) -> tuple[list[float], float]:
    """What one rank trains."""
    mine = Config.from_dict(TINY | {"data": {"tokens": str(tokens)}, "strategy": {}})
    losses, held_out, _ = run_ranks(_steps, 1, mine)[0]
    assert losses[-1] < losses[0] - 0.5
    return losses, held_out


def _near(found: tuple[list[float], float, Any], expected: tuple[list[float], float]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=ROUNDED, rel=0)
    assert found[1] == pytest.approx(expected[1], abs=ROUNDED, rel=0)


PARO = [name for name in strategies() if name.startswith("paro-")]
LOSSLESS: list[Any] = [
    *({"name": name} for name in strategies() if name not in (*PARO, *ROUNDING)),
    *({"name": name} for name in PARO),
    {"name": "zero3 route=hierarchical"},
]


@in_turn(LOSSLESS, 1, "options")
def test_every_lossless_strategy_trains_alike(
    world: Worlds, config: Callable[..., Config], alone: tuple[list[float], float], options: dict[str, Any]
) -> None:
    for found in world(4).run(_steps, config(strategy=options)):
        _near(found, alone)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 1), (2, 4), (1, 2), (1, 8)])
def test_any_number_of_ranks_and_micro_steps_trains_alike(
    world: Worlds, config: Callable[..., Config], alone: tuple[list[float], float], ranks: int, micro_batch: int
) -> None:
    mine = config(train={"micro_batch": micro_batch}, strategy=_on(1, ranks))
    for found in world(ranks).run(_steps, mine):
        _near(found, alone)


@pytest.mark.parametrize("clip", [0.5, seldom(0.0)])
def test_a_run_is_what_plain_pytorch_makes_of_its_settings(
    world: Worlds, config: Callable[..., Config], clip: float
) -> None:
    """The order of samples, the learning rate, what decays, what is clipped: written out by hand."""
    mine = config(train={"clip": clip, "weight_decay": 0.5, "seed": 3})
    for found, expected in world(4).run(_plain_beside, mine):
        assert found == pytest.approx(expected, abs=ROUNDED, rel=0)


def _plain_beside(config: Config) -> tuple[list[float], list[float]]:
    train = config.train
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
        training = TrainingRun(config, job)
    built: Any = models.build_model(config.model, 256).model
    plain = type(built)(built.shape)
    with torch.no_grad():
        for name, values in _weights(training).items():
            plain.get_parameter(name).copy_(values)
    decaying = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    assert decaying and others
    groups = [{"params": decaying, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS)
    losses: list[float] = []
    for step in range(STEPS):
        inputs, targets = training.tokens.train.batch(step * train.batch, train.batch)
        loss = nn.functional.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if train.clip:
            nn.utils.clip_grad_norm_(plain.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [training.train_step().loss for _ in range(STEPS)], losses


def test_recomputing_blocks_changes_no_bit(world: Worlds, config: Callable[..., Config]) -> None:
    both = [config(train={"checkpointing": on}, strategy=_on(2, 1)) for on in (False, True)]
    (losses, held_out, weights), (again, held_out_again, weights_again) = (world(2).run(_steps, c)[0] for c in both)
    assert losses == again and held_out == held_out_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parity
@pytest.mark.compiles
def test_compiled_blocks_train_alike(
    world: Worlds, config: Callable[..., Config], alone: tuple[list[float], float]
) -> None:
    for found in world(2).run(_compiled, config(train={"compile": True, "checkpointing": True}, strategy=_on(1, 2))):
        _near(found, alone)


def _compiled(config: Config) -> Any:
    asked: list[models.ModelBundle] = []

    def compile_blocks(built: models.ModelBundle) -> None:
        asked.append(built)
        # Without a compiler for the machine's own code.
        models.compile_blocks(built, backend="aot_eager", fullgraph=True)

    before, trainer_module.compile_blocks = trainer_module.compile_blocks, compile_blocks
    torch._dynamo.utils.counters.clear()
    try:
        with warnings.catch_warnings():
            # It looks at the .grad of a block's input, and hides the warning in a way that does not work for errors.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            found = _steps(config)
        # Both blocks share one graph in training, and one without gradients.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    finally:
        trainer_module.compile_blocks = before
        torch._dynamo.reset()
    assert len(asked) == 1
    return found


def test_in_bf16_the_masters_stay_fp32(
    world: Worlds, config: Callable[..., Config], alone: tuple[list[float], float]
) -> None:
    mine = config(train={"precision": "bf16"}, strategy=_on(2, 1))
    losses, _, weights = world(2).run(_steps, mine)[0]
    # 8 bits: each logit, of order 1, is off by some 0.004 at most; the mean over 128 tokens by less.
    assert losses == pytest.approx(alone[0], abs=0.05, rel=0)
    assert losses != alone[0]
    for values in weights.values():
        assert values.dtype == torch.float32
    assert any(not torch.equal(values, values.bfloat16().float()) for values in weights.values())


# --- losses that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, seldom(0.0)])
def test_a_loss_that_is_not_finite_stops_every_rank_and_is_not_saved(
    world: Worlds, config: Callable[..., Config], clip: float
) -> None:
    mine = config(train={"clip": clip})
    mine = _with(mine, checkpoint={"every": 1})
    for kind, told in world(4).run(_failed, mine, "_poisoned_train", {2}):
        assert kind == "StepError" and told.startswith("step 3: the loss is nan")
    saved = Path(mine.log.folder, "checkpoints").glob("step-*")
    assert sorted(path.name for path in saved) == ["step-000001", "step-000002"]


@in_turn(["zero3", "paro-iig", "ddp"], 1)
def test_nothing_is_read_from_the_device_before_the_optimizer_steps(
    world: Worlds, config: Callable[..., Config], label: str
) -> None:
    """So that the host enqueues the optimizer's kernels while the device still computes gradients."""
    for early, late in world(2).run(_reads, config(strategy={"name": label, **_on(2, 1)})):
        assert early == [] and late == ["tolist"] * 2  # flags in host memory, and the loss of the step before


def _reads(config: Config) -> tuple[list[str], list[str]]:
    """What the host reads after the last backward pass: until the optimizer's step has ended, and in the rest of it."""
    with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        training = TrainingRun(config, job)
        first = training.train_step()
        reads, early = _HostReads(patch), list[str]()
        clip = TrainingRun._clip_gradients

        def clipped(self: TrainingRun) -> Tensor:
            reads.found = []
            return clip(self)

        patch.setattr(TrainingRun, "_clip_gradients", clipped)  # what comes first after the backward pass
        training.optimizer.register_step_post_hook(lambda *_: early.extend(reads.found) or reads.found.clear())
        with reads:
            second = training.train_step()
        assert first.settled and not second.settled
        return early, reads.found


class _HostReads(TorchDispatchMode):
    """Notes what waits for a GPU: values that become the host's, and copies that are not asynchronous."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "item", "cpu", "numpy", "new_tensor", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, self._noting(name, getattr(Tensor, name)))
        patch.setattr(torch, "tensor", self._noting("torch.tensor", torch.tensor))

    def _noting(self, name: str, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return method(*args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        creates = name.startswith(("full", "zeros", "empty", "new_empty"))
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero") or (
            "device" in (kwargs or {}) and not creates
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _poisoned_train(config: Config, steps: set[int]) -> tuple[str, str]:
    with _poisoned(steps):
        return _train(config)


@contextlib.contextmanager
def _poisoned(steps: set[int]) -> Any:
    """The loss of rank 2 is NaN in these steps, counted from 0."""
    whole, passes = trainer_module.next_token_loss, 0
    per_step = TINY["train"]["batch"] // (4 * TINY["train"]["micro_batch"])

    def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal passes
        loss = whole(model, inputs, targets)
        if not model.training:
            return loss
        passes += 1
        return loss * math.nan if dist.get_rank() == 2 and (passes - 1) // per_step in steps else loss

    trainer_module.next_token_loss = loss_of
    try:
        yield
    finally:
        trainer_module.next_token_loss = whole


# --- what is written --------------------------------------------------------------------------------------------------


def test_what_a_run_says_and_writes(world: Worlds, config: Callable[..., Config]) -> None:
    mine = config(train={"evaluate_every": 2}, log={"trace": [2, 5], "tensorboard": True})
    (out, err), *others = world(4).run(_train, mine)
    assert others == [("", "")] * 3
    assert "Where the time went (5 steps" in out and "What was sent, by all ranks together" in out
    assert "vocabulary 256" in err and "zero3 on 2 × 2 cpu ranks" in err
    assert "5/5  loss" in err and "step 4: held-out loss" in err

    assert [row["step"] for row in rows_of(mine)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows_of(mine, "validation")] == [2, 4, 5]
    assert Config.load(Path(mine.log.folder, "config.toml")) == mine
    assert list(Path(mine.log.folder, "tensorboard").glob("events.out.*"))
    for step in mine.log.trace:
        found = json.loads(Path(mine.log.folder, f"trace-step-{step:06}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in found} == {0, 1, 2, 3}
        assert "rank 2 (node 1)" in [e["args"]["name"] for e in found if e["name"] == "process_name"]
        for track, key in (("between nodes", "inter_bytes"), ("inside nodes", "intra_bytes")):
            sent = sum(e["args"]["bytes"] for e in found if e["pid"] == 0 and e.get("cat") == track)
            assert sent == rows_of(mine)[step - 1][key] > 0


def test_runs_that_share_a_folder_are_told_apart(world: Worlds, config: Callable[..., Config]) -> None:
    for seed in (1, 2):
        world(2).run(_train, config(train={"steps": 2, "seed": seed}, strategy=_on(seed, 3 - seed)))
    starts = rows_of(config(), "start")
    assert [(row["step"], row["config"]["train"]["seed"]) for row in starts] == [(0, 1), (0, 2)]
    assert [[row[key] for key in ("nodes", "ranks_per_node")] for row in starts] == [[1, 2], [2, 1]]
    lines = Path(config().log.folder, "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds == ["start", "train", "train", "validation"] * 2


def test_where_rows_or_a_trace_cannot_be_written_the_training_goes_on_and_says_so(
    world: Worlds, config: Callable[..., Config]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    mine = config(train={"steps": 4}, strategy=_on(2, 1), log={"trace": [2]})
    Path(mine.log.folder, "trace-step-000002.json").mkdir(parents=True)  # in its place
    printed = world(2).run(_train_on_a_full_disk, mine)
    assert "step 2: the trace cannot be written" in printed[0][1]
    assert [row["step"] for row in rows_of(mine)] == [1, 2]
    assert "step 3: JsonLines cannot write: [Errno 28] No space left on device" in printed[0][1]
    assert "Where the time went (4 steps" in printed[0][0]


def _train_on_a_full_disk(config: Config) -> tuple[str, str]:
    write = JsonLines.write

    def full(self: JsonLines, kind: str, step: int, values: Any) -> None:
        if step == 3:
            self._file = open("/dev/full", "ab", buffering=0)  # noqa: PTH123, SIM115
        write(self, kind, step, values)

    JsonLines.write = full
    try:
        return _train(config)
    finally:
        JsonLines.write = write


# --- failures ---------------------------------------------------------------------------------------------------------


def _failed(config: Config, action: str = "_train", *args: Any) -> tuple[str, str]:
    try:
        globals()[action](config, *args)
    except TowpathError as error:
        return type(error).__name__, str(error)
    raise AssertionError("it trained")


REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "missing tokens": ({"data": {"tokens": "nowhere"}}, "cannot read nowhere/tokens.json: No such file"),
    "length": ({"train": {"length": 1_000_000}}, "one sequence of train.length = 1000000 needs 1000001"),
    "batch": ({"train": {"batch": 6}}, "train.batch = 6 sequences cannot be shared out: 4 ranks"),
    "no weights": ({"model": {"weights": "nowhere"}}, "no safetensors at nowhere"),
    "no model": ({"model": {"hf": "nowhere"}}, "expected a config.json"),
    "cluster": ({"strategy": {"nodes": "3x1"}}, "3"),
    "strategy file": ({"strategy": {"name": "nowhere.toml"}}, "cannot read the strategy nowhere.toml"),
    "log folder": ({"log": {"folder": "/dev/null/run"}}, "cannot write /dev/null/run/metrics.jsonl"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_begin_is_one_line_on_every_rank(world: Worlds, config: Callable[..., Config], case: str) -> None:
    sections, words = REFUSED[case]
    for kind, told in world(4).run(_failed, config(**sections)):
        assert kind != "StepError" and words in told
        assert "\n" not in told


@pytest.mark.parametrize("lacking", [0, 2])
@pytest.mark.parametrize("key", ["data.tokens", "model.weights", "model.hf"])
def test_a_rank_without_the_file_ends_all(
    world: Worlds, config: Callable[..., Config], key: str, lacking: int, gpt2: Path
) -> None:
    section, _, name = key.partition(".")
    sections = {} if section == "data" else {section: {name: str(gpt2)}}
    found = world(4).run(_lacking, config(**sections), section, name, lacking)
    for rank, (kind, told) in enumerate(found):
        assert kind == "ConfigError" and "\n" not in told
        if rank == lacking:
            assert "nowhere" in told and "failed on rank" not in told
        else:
            assert f"the start failed on rank {lacking}: " in told


def _lacking(config: Config, section: str, name: str, lacking: int) -> tuple[str, str]:
    if dist.get_rank() == lacking:
        config = _with(config, **{section: {name: "nowhere"}})
    elif name == "weights":  # of which only the first to look at it may complain
        config = _with(config, model={"weights": ""})
    return _failed(config)


def test_ranks_with_other_settings_refuse_to_train(world: Worlds, config: Callable[..., Config]) -> None:
    for kind, told in world(4).run(_apart, config()):
        assert kind == "ConfigError"
        assert "rank 0 has 'train.seed = 0', rank 3 has 'train.seed = 7'" in told, told


def _apart(config: Config) -> tuple[str, str]:
    return _failed(_with(config, train={"seed": 7}) if dist.get_rank() == 3 else config)


# --- Muon -------------------------------------------------------------------------------------------------------------

# It iterates in bf16: what differs in the last bit of a gradient may differ in the eighth of an update.
MUON_ROUNDED = 2e-3


def test_muon_trains_alike_under_every_strategy_and_goes_on_where_it_was(
    world: Worlds, config: Callable[..., Config]
) -> None:
    muon = {"optimizer": "muon", "steps": 4, "batch": 4}
    (expected, *_), *_ = world(4).run(_steps, config(train=muon, strategy={"name": "ddp"}))
    assert expected[-1] < expected[0] - 0.05
    for resumed in world(4).run(_muon_resumed, config(train=muon, strategy={"name": "zero3"})):
        assert resumed == pytest.approx(expected, rel=MUON_ROUNDED)


def _muon_resumed(config: Config) -> list[float]:
    """The losses of two steps, and of two more after it was saved and resumed under another strategy."""
    losses: list[float] = []
    for last, name, resume in ((2, "zero3", "off"), (4, "paro-iig", "auto")):
        with init_distributed() as job, contextlib.redirect_stderr(io.StringIO()):
            changed = _with(config, checkpoint={"resume": resume}, strategy={"name": name})
            training = TrainingRun(changed, job)
            with CheckpointManager(training):
                while training.state.step < last:
                    losses.append(training.train_step().loss)
    matrices, others = training.optimizer.members
    assert [group["lr"] for group in matrices.param_groups] == [learning_rate(config.train, 3)]
    assert matrices.kind == "Muon" and type(others) is torch.optim.AdamW and len(others.param_groups) == 2
    return losses
