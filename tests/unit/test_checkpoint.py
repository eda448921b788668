"""Checkpoints in one process: what they refuse, what they find damaged, how they leave for others and arrive."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import towpath
from tests.ranks.checkpoints import Run, content, differing
from tests.ranks.models import MODELS, TiedGPT
from towpath import Topology, checkpoint
from towpath.checkpoint import State
from towpath.checkpoint.manifest import read_manifest
from towpath.cli.main import app
from towpath.errors import CheckpointError

ALONE = Topology(1, 1)


def _saved(root: Path, name: str = "gpt", steps: int = 2) -> Run:
    run = Run.of("ddp", ALONE, name)
    run.train(range(steps))
    assert checkpoint.save(root, steps, run.state()).ok
    return run


# --- what is saved ---------------------------------------------------------------------------------------------------


class EveryDtype(nn.Module):
    """Parameters and buffers of many dtypes and shapes, some without elements, one without a dimension."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            name = f"of_{dtype}".replace("torch.", "")
            setattr(self, name, nn.Parameter(torch.randn(3, 2, 2).to(dtype)))
            setattr(self, f"{name}_frozen", nn.Parameter(torch.randn(()).to(dtype), requires_grad=False))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("bytes", torch.randint(0, 256, (7,), dtype=torch.uint8))
        self.register_buffer("counts", torch.randint(-(2**62), 2**62, (2, 3)))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("wide", torch.randn(4, 6).t())
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def test_every_dtype_comes_back_bit_for_bit_sharded_or_not(tmp_path: Path) -> None:
    model = EveryDtype(1)
    model.of_float32.data[0, 0, 0] = float("nan")
    assert checkpoint.save(tmp_path, 0, State(model)).ok
    for other in (EveryDtype(2), towpath.shard(EveryDtype(2), "zero3", topology=ALONE)):
        scratch = other.scratch.clone()
        checkpoint.load(tmp_path, State(other))
        found, expected = content(other), content(model)
        found.pop("buffer scratch"), expected.pop("buffer scratch")
        assert [n for n in expected if not _same_bits(found[n], expected[n])] == []
        assert torch.equal(other.scratch, scratch)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


def test_an_optimizer_that_lists_its_parameters_otherwise_gets_the_states_of_each(tmp_path: Path) -> None:
    run = _saved(tmp_path)
    run.optimizer.param_groups[0]["lr"] = 0.125
    checkpoint.save(tmp_path, 3, run.state())
    resumed = Run.of("ddp", ALONE).spoil()
    matrices = [p for p in resumed.model.parameters() if p.dim() > 1]
    others = [p for p in resumed.model.parameters() if p.dim() <= 1]
    resumed.optimizer = torch.optim.AdamW([{"params": others[::-1]}, {"params": matrices}], lr=1.0)
    checkpoint.load(tmp_path, resumed.state())
    assert differing(resumed.content(), run.content()) == []
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [0.125, 0.125]
    assert resumed.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert resumed.train([5]) == run.train([5])


def test_groups_that_come_together_keep_what_they_do_not_agree_on(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    checkpoint.save(tmp_path, 1, State(model, torch.optim.SGD(groups, lr=0.25, momentum=0.9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1, weight_decay=0.125)
    loaded = checkpoint.load(tmp_path, State(model, optimizer))
    assert loaded is not None and "weight_decay of the optimizer's group 0 stays 0.125" in loaded.notes[0]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.9)


def test_schedules_and_data_positions_go_on_where_they_were(tmp_path: Path) -> None:
    def parts() -> tuple[Run, Any, Position]:
        run = Run.of("ddp", ALONE)
        return run, torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4]), Position()

    run, schedule, position = parts()
    for step in range(3):
        run.train([step])
        schedule.step()
        position.draw()
    checkpoint.save(tmp_path, 3, run.state(schedule=schedule, data=position))
    expected = [run.train([4]), position.draw()]
    resumed, again, elsewhere = parts()
    assert checkpoint.load(tmp_path, resumed.state(schedule=again, data=elsewhere)).notes == ()  # pyright: ignore
    assert again.get_last_lr() == schedule.get_last_lr() and again.state_dict() == schedule.state_dict()
    assert [resumed.train([4]), elsewhere.draw()] == expected
    loaded = checkpoint.load(tmp_path, resumed.state(other=Position()))
    assert loaded is not None and loaded.notes == (
        "'schedule' in the checkpoint was not loaded: this State has no such extra",
        "'data' in the checkpoint was not loaded: this State has no such extra",
        "the checkpoint has no 'other': it starts afresh",
    )
    alone = checkpoint.load(tmp_path, State(resumed.model, schedule=again, data=elsewhere))
    assert alone is not None and alone.notes == (
        "the states of AdamW in the checkpoint were not loaded: this State has no optimizer",
    )


def test_an_extra_of_another_kind_is_an_error_and_no_damage(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert checkpoint.save(tmp_path, 1, State(model, data=Position())).ok
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters()), [2])
    assert checkpoint.save(tmp_path, 2, State(model, data=schedule)).ok
    with pytest.raises(
        CheckpointError, match=r"'data' \(Position\) does not take .*KeyError.* Make the object that was"
    ):
        checkpoint.load(tmp_path, State(model, data=Position()))


class Position:
    def __init__(self) -> None:
        self.count, self.order = 0, torch.randperm(50)

    def draw(self) -> int:
        self.count += 1
        return int(self.order[self.count])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "order": self.order, "seen": (1, {2: None})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["seen"] == (1, {2: None})
        self.count, self.order = state_dict["count"], state_dict["order"]


# --- other models ----------------------------------------------------------------------------------------------------


def _untied() -> TiedGPT:
    model = TiedGPT()
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    return model


def test_tied_parameters_load_into_models_that_tie_and_into_models_that_do_not(tmp_path: Path) -> None:
    run = _saved(tmp_path / "tied")
    for model in (_untied(), towpath.shard(_untied(), "zero3", topology=ALONE)):
        optimizer = torch.optim.AdamW(model.parameters())
        loaded = checkpoint.load(tmp_path / "tied", State(model, optimizer))
        assert loaded is not None and loaded.notes == (
            "head.weight and tokens.weight were one parameter in the checkpoint, and are two in this model",
        )
        found, expected = content(model, optimizer), run.content()
        for key in ("{}", "exp_avg of {}", "step of {}"):
            assert torch.equal(found[key.format("head.weight")], expected[key.format("tokens.weight")])
    untied = _untied()
    checkpoint.save(tmp_path / "untied", 1, State(untied))
    checkpoint.load(tmp_path / "untied", run.state())
    assert torch.equal(content(run.model)["tokens.weight"], untied.tokens.weight)
    with torch.no_grad():
        untied.head.weight[0, 0] += 1
    checkpoint.save(tmp_path / "untied", 2, State(untied))
    with pytest.raises(CheckpointError, match=r"head\.weight and tokens\.weight are one parameter"):
        checkpoint.load(tmp_path / "untied", run.state())


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    _saved(tmp_path)
    before = content(wider := TiedGPT(width=16))
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.load(tmp_path, State(wider))
    assert "another model: tokens.weight is 37×12 in it and 37×16 in the model; positions.weight" in str(refusal.value)
    assert "more. Build the model that was saved" in str(refusal.value)
    assert differing(content(wider), before) == []
    with pytest.raises(CheckpointError, match=r"blocks\.2\.norm1\.weight 12 is not in it"):
        checkpoint.load(tmp_path, State(TiedGPT(layers=3)))
    with pytest.raises(CheckpointError, match=r"it has blocks\.1\.\S+ \S+, the model has not"):
        checkpoint.load(tmp_path, State(TiedGPT(layers=1)))
    model = TiedGPT()
    with pytest.raises(CheckpointError, match=r"states of AdamW, and .* is SGD.*train\.optimizer"):
        checkpoint.load(tmp_path, State(model, torch.optim.SGD(model.parameters())))


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as names go."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inside


def test_names_are_those_of_the_model_before_it_was_compiled(tmp_path: Path) -> None:
    run = _saved(tmp_path)
    compiled = TiedGPT()
    for i, block in enumerate(compiled.blocks):
        compiled.blocks[i] = Compiled(block)
    checkpoint.load(tmp_path, State(compiled))
    assert torch.equal(
        compiled.state_dict()["blocks.1._orig_mod.qkv.weight"], content(run.model)["blocks.1.qkv.weight"]
    )


# --- damage ----------------------------------------------------------------------------------------------------------

FILE = "rank-00000.safetensors"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def _replace(path: Path) -> None:
    shutil.copytree(path.parent.with_name("step-000002"), path.parent, dirs_exist_ok=True)


DAMAGES = [
    (FILE, _truncate, f"{FILE} is truncated"),
    (FILE, _flip, f"{FILE} is corrupted: "),
    (FILE, Path.unlink, f"{FILE} is missing"),
    ("manifest.json", _truncate, "manifest.json: not a whole manifest"),
    ("manifest.json", Path.unlink, "manifest.json is missing"),
    ("manifest.json", _replace, "manifest.json: it is of step 2; expected that of step-000003. Rename the folder"),
]


@pytest.mark.parametrize(("file", "damage", "said"), DAMAGES)
def test_damage_is_found_by_name_and_the_checkpoint_before_is_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None], said: str
) -> None:
    run = _saved(tmp_path)
    expected = run.content()
    run.train([2])
    checkpoint.save(tmp_path, 3, run.state())
    damage(tmp_path / "step-000003" / file)

    assert said in (checkpoint.verify(tmp_path / "step-000003") or "")
    loaded = checkpoint.load(tmp_path, run.spoil().state())

    assert loaded is not None and loaded.step == 2 and len(loaded.notes) == 1
    assert loaded.notes[0].startswith("step-000003 was passed over: ") and said in loaded.notes[0]
    assert differing(run.content(), expected) == []
    with pytest.raises(CheckpointError, match=file):
        checkpoint.load(tmp_path / "step-000003", run.state())
    exported = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "exported")])
    assert exported.exit_code == 0 and "step-000003 was passed over: " in exported.stderr


def test_an_empty_folder_has_nothing_to_resume_from_and_a_lost_one_is_an_error(tmp_path: Path) -> None:
    state = State(TiedGPT())
    assert checkpoint.load(tmp_path, state) is None and checkpoint.load(tmp_path / "none", state) is None
    assert checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "logs").mkdir()  # of a run that has not saved yet
    assert checkpoint.load(tmp_path, state) is None
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path / "step-000001", state)


def test_a_path_that_cannot_hold_checkpoints_is_an_error(tmp_path: Path) -> None:
    model = TiedGPT()
    (tmp_path / "weights.pt").touch()
    with pytest.raises(CheckpointError, match=r"weights\.pt is a file; expected a checkpoint, or a folder of"):
        checkpoint.load(tmp_path / "weights.pt", State(model))
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=r"dcp is a checkpoint of torch\.distributed\.checkpoint"):
        checkpoint.load(tmp_path / "dcp", State(model))


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    state, save, saver = State(model), checkpoint.save, checkpoint.Saver
    wrong: list[tuple[str, Callable[..., object], tuple[Any, ...], dict[str, Any]]] = [
        ("state: expected a checkpoint.State; got 3", save, (tmp_path, state, 3), {}),
        ("state: expected a checkpoint.State; got Linear", saver, (tmp_path, model), {}),
        *(("step: expected the number of steps", save, (tmp_path, s, state), {}) for s in (3.5, "3", -3, True, None)),
        ("keep_last is at least 1, or None to keep all; got 'x'", saver, (tmp_path, state), {"keep_last": "x"}),
        ("keep_last is at least 1, or None to keep all; got True", saver, (tmp_path, state), {"keep_last": True}),
        ("keep_every is at least 1", saver, (tmp_path, state), {"keep_last": 1, "keep_every": 1.5}),
        ("model: expected a torch.nn.Module, or a pipeline", State, ([model],), {}),
    ]
    for expected, call, arguments, options in wrong:
        with pytest.raises(CheckpointError) as refused:
            call(*arguments, **options)
        assert expected in str(refused.value) and list(tmp_path.iterdir()) == []
    with closing(saver(tmp_path, state)) as opened, pytest.raises(CheckpointError, match="step: expected"):
        opened.save("3")  # pyright: ignore[reportArgumentType]


class Fixed:
    """An extra whose state is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


_ENDLESS: dict[str, Any] = {}
_ENDLESS["again"] = _ENDLESS


@pytest.mark.parametrize(
    ("state", "failure"),
    [
        (torch.empty(3, device="meta"), "data.mean is a tensor on the meta device, which has no values to save."),
        (
            torch.eye(3).to_sparse(),
            r"data.mean is a sparse_coo tensor, which .* expected a dense tensor. Save to_dense",
        ),
        (torch.ones(2, dtype=torch.complex128), r"data.mean is a complex128 tensor, .* torch.view_as_real\(\) of a"),
        (_ENDLESS, r"data.mean.again.again… has more than 100 levels, or contains itself. Let state_dict\(\) return a"),
        (1 << 5000, r"data.mean is a number of 5,001 bits, and a checkpoint holds up to 4,096. Let its state_dict\(\)"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Any, failure: str
) -> None:
    outcome = checkpoint.save(tmp_path, 1, State(nn.Linear(2, 2), data=Fixed({"mean": state})))
    assert outcome.failure is not None and re.match(failure, outcome.failure)
    assert caplog.messages[-1].endswith(outcome.failure)  # nothing goes on while save is waited for
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("background", [False, True])
def test_tensors_of_an_extra_come_back_whatever_they_are_called_and_share(tmp_path: Path, background: bool) -> None:
    x, z = torch.arange(6.0), torch.tensor([1 + 2j])
    state = {"a.b": x, "a": {"b": x + 1}, 0: x + 2, "0": x + 3, None: x + 4, "None": x + 5, "0~2": x + 6}
    state |= {"same": x, "head": x[:3], "tail": x[2:], "conj": z.conj(), "imag": z.conj().imag}
    model, extra = nn.Linear(2, 2), Fixed(state)
    with closing(checkpoint.Saver(tmp_path, State(model, data=extra), background=background)) as saver:
        assert saver.save(1).outcome().ok
    assert checkpoint.load(tmp_path, State(model, data=extra)) is not None
    assert extra.state["a"]["b"].tolist() == (x + 1).tolist()
    assert {key: t.tolist() for key, t in extra.state.items() if key != "a"} == {
        key: t.tolist() for key, t in state.items() if isinstance(t, Tensor)
    }


def test_old_ones_go_when_a_new_one_is_there(tmp_path: Path) -> None:
    run = Run.of("ddp", ALONE)
    (tmp_path / "step-1234567").mkdir()  # later ones are not its own
    saver = checkpoint.Saver(tmp_path, run.state(), keep_last=2, keep_every=4)
    for step in range(1, 8):
        saver.save(step)
    assert saver.close().ok  # pyright: ignore[reportOptionalMemberAccess]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:06d}" for n in (4, 6, 7, 1_234_567)]


def test_a_failure_to_replace_a_checkpoint_leaves_it_and_one_to_clean_up_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _saved(tmp_path)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert "Input/output error" in str(checkpoint.save(tmp_path, 2, run.state()).failure)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"] and checkpoint.verify(
        tmp_path / "step-000002"
    ) is None
    monkeypatch.setattr(Path, "rename", rename)

    def unreadable(*_: Any) -> None:
        raise CheckpointError("cannot be searched for checkpoints")

    monkeypatch.setattr("towpath.checkpoint.folders.remove_old", unreadable)
    saver = checkpoint.Saver(tmp_path, run.state(), keep_last=1)
    saver.save(3)
    outcome = saver.close()
    assert outcome is not None and outcome.ok


# --- leaving and arriving --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_the_same_logits_after_an_export(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    model = MODELS["llama"].make(torch.float32)
    config = model.config
    config.tie_word_embeddings = tied
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, config.vocab_size, (2, 6))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    sharded = towpath.shard(model, "zero3", topology=ALONE)
    checkpoint.save(tmp_path / "run", 1, State(sharded, config=config.to_dict()))
    written = checkpoint.export(tmp_path / "run" / "step-000001", tmp_path / "hf", max_shard_bytes=4000)
    assert "model.safetensors.index.json" in {p.name for p in written} and len(written) > 4

    again = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()

    assert torch.equal(again(input_ids=ids).logits, expected)
    weights = {n for f in (tmp_path / "hf").glob("*.safetensors") for n in load_file(f)}
    assert ("lm_head.weight" in weights) is not tied
    # And its mirror: what was exported starts a run.
    path = checkpoint.import_safetensors(tmp_path / "hf", tmp_path / "new")
    assert checkpoint.verify(path) is None and read_manifest(path).values["config"]["hidden_size"] == 16
    torch.manual_seed(6)
    fresh = towpath.shard(LlamaForCausalLM(config), "zero3", topology=ALONE)
    loaded = checkpoint.load(tmp_path / "new", State(fresh, torch.optim.AdamW(fresh.parameters())))
    assert loaded is not None and loaded.notes == (
        "the checkpoint has no optimizer: the states of this one are as they were",
    )
    assert differing(content(fresh), content(sharded)) == []


def test_a_model_leaves_in_another_dtype_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

    model: Any = MODELS["llama"].make(torch.float32)
    checkpoint.save(tmp_path / "run", 1, State(model, config={**model.config.to_dict(), "dtype": "float32"}))
    (tmp_path / "tokenizer").mkdir()
    made = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="a")
    made.save_pretrained(tmp_path / "tokenizer")
    written = checkpoint.export(
        tmp_path / "run" / "step-000001",
        tmp_path / "hf",
        dtype=torch.bfloat16,
        tokenizer=tmp_path / "tokenizer",
        max_shard_bytes=4000,
    )
    assert all(path.is_file() for path in written)
    assert max(p.stat().st_size for p in written if p.suffix == ".safetensors") < 8000  # and their headers
    again: Any = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert again.config.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("b a")["input_ids"] == [1, 0]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_what_a_dtype_cannot_hold_does_not_leave_in_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias.fill_(1e6)
    checkpoint.save(tmp_path / "run", 1, State(model))
    step = tmp_path / "run" / "step-000001"
    with pytest.raises(CheckpointError, match=r"bias has values that torch.float16 cannot hold"):
        checkpoint.export(step, tmp_path / "out", dtype="float16")
    with pytest.raises(CheckpointError, match="expected float64, float32, bfloat16 or float16; got int8"):
        checkpoint.export(step, tmp_path / "new", dtype="int8")
    with pytest.raises(CheckpointError, match=r"tokenizer: .* is not there"):
        checkpoint.export(step, tmp_path / "new", tokenizer=tmp_path / "none.json")


def test_tensors_leave_under_the_names_that_others_know(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "run", 1, State(model, names={"weight": "lm_head.weight"}))
    checkpoint.export(tmp_path / "run" / "step-000001", tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["bias", "lm_head.weight"]
    root = checkpoint.import_safetensors(tmp_path / "out", tmp_path / "imported")
    with pytest.raises(CheckpointError, match=r"Start from the safetensors .* \(towpath train: model\.weights\)"):
        checkpoint.load(root, State(model, names={"weight": "lm_head.weight"}))


def test_what_cannot_leave_or_arrive_is_told_in_one_line(tmp_path: Path) -> None:
    _saved(tmp_path / "run")
    newest = tmp_path / "run" / "step-000002"
    with pytest.raises(CheckpointError, match="is not empty: export into a new folder"):
        checkpoint.export(newest, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors file, or a folder with some; found none"):
        checkpoint.import_safetensors(tmp_path / "none", tmp_path / "new")
    (tmp_path / "bad.safetensors").write_bytes(b"\x10" + b"\0" * 30)
    with pytest.raises(
        CheckpointError,
        match=r"bad\.safetensors: not a whole safetensors file",
    ):
        checkpoint.import_safetensors(tmp_path / "bad.safetensors", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    _flip(newest / FILE)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    save_file({"w": torch.ones(2)}, tmp_path / "good.safetensors")
    assert checkpoint.import_safetensors(tmp_path / "good.safetensors", tmp_path / "new").name == "step-000000"
    with pytest.raises(CheckpointError, match="is there already: import into a new folder"):
        checkpoint.import_safetensors(tmp_path / "good.safetensors", tmp_path / "new")


# --- the command -----------------------------------------------------------------------------------------------------


def _command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, CheckpointError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def test_the_command_lists_verifies_and_shows(tmp_path: Path) -> None:
    run = _saved(tmp_path)
    checkpoint.save(tmp_path, 3, run.state())
    code, text = _command("checkpoint", "ls", tmp_path)
    assert code == 0 and "step-000002" in text and "step-000003" in text
    assert _command("checkpoint", "verify", tmp_path)[0] == 0
    code, text = _command("checkpoint", "show", tmp_path)
    assert code == 0 and "step-000003: step 3, 1 rank," in text and "model.blocks.0.qkv.weight" in text
    _flip(tmp_path / "step-000003" / FILE)
    assert _command("checkpoint", "ls", tmp_path)[0] == 0
    code, text = _command("checkpoint", "verify", tmp_path)
    assert code == 1 and "corrupted" in text and "step-000002: every byte is what was written" in text
    (tmp_path / "step-000003" / FILE).unlink()
    code, text = _command("checkpoint", "ls", tmp_path, "--json")
    assert code == 1 and "is missing" in json.loads(text)[0]["problem"]
    assert _command("checkpoint", "ls", tmp_path / "none")[0] == 2


def test_the_command_exports_and_imports_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    run = _saved(tmp_path / "run" / "checkpoints")
    for command in (("checkpoint", "ls"), ("checkpoint", "verify"), ("checkpoint", "show")):
        code, text = _command(*command, tmp_path / "run")
        assert code == 0 and "step-000002" in text
    assert checkpoint.load(tmp_path / "run", State(TiedGPT())) is not None
    code, text = _command("export", tmp_path / "run", tmp_path / "out")
    assert code == 0 and "model.safetensors " in text and len(text.splitlines()) == 1
    assert _command("import", tmp_path / "out", tmp_path / "new")[0] == 0
    model = TiedGPT()
    assert checkpoint.load(tmp_path / "new", State(model)) is not None
    assert differing(content(model), content(run.model)) == []
    assert _command("export", tmp_path / "nothing", tmp_path / "out2")[0] == 2
    assert _command("import", tmp_path / "out", tmp_path / "new2", "--config", tmp_path / "none.json")[0] == 2
