"""Checkpoints, indices and safetensors files made to do harm: each is read as it was written, or is a CheckpointError.

All tests run with less memory than what hostile files ask for: an allocation that believes them fails, and is no
CheckpointError.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from towpath import checkpoint
from towpath.checkpoint import State
from towpath.checkpoint.manifest import FORMAT
from towpath.checkpoint.safe_files import INDEX, Safetensors, is_plain
from towpath.cli.main import app
from towpath.errors import CheckpointError

FILE, STATES, MANIFEST = "rank-00000.safetensors", "rank-00000-optimizer.safetensors", "manifest.json"
GIB = 1 << 30
SPARE_BYTES = 1 * GIB  # for the tests themselves, threads' stacks included; hostile sizes are above
HUGE = 1 << 40


def fuzz(examples: int) -> settings:
    given_folder = [HealthCheck.function_scoped_fixture]  # each example writes it anew
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=given_folder
    )


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no test here loses power
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Loader:
    def __init__(self) -> None:
        self.order, self.at = torch.arange(5), (1, {2: "x"})

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "key": b"\x00\xff"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order, self.at = state_dict["order"], state_dict["at"]


class Case:
    """A small run, saved once, and what must come back from it."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()
        self.data = Loader()
        self.state = State(self.model, self.optimizer, data=self.data, config={"width": 2}, names={"0.bias": "b"})

    def content(self) -> list[torch.Tensor]:
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*self.model.state_dict().values(), *states, self.data.order)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    root = tmp_path_factory.mktemp("hostile")
    case = Case()
    assert checkpoint.save(root, 7, case.state).ok
    return case, root / "step-000007"


@pytest.fixture
def folder(saved: tuple[Case, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[1], tmp_path / "runs" / "step-000007"))


def _content_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())["content"]


def _seal(folder: Path, content: Any) -> None:
    """With the checksum that makes it look as if Towpath had written it."""
    text = json.dumps(content, separators=(",", ":"))
    whole = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "content": content}
    (folder / MANIFEST).write_text(json.dumps(whole))


def _everything(folder: Path, out: Path) -> list[str | None]:
    """What verify, load and export say of it; None where they are content."""
    said: list[str | None] = [checkpoint.verify(folder)]
    shutil.rmtree(out, ignore_errors=True)
    work: list[Callable[[], object]] = [
        lambda: checkpoint.load(folder, Case().state),
        lambda: checkpoint.export(folder, out),
    ]
    for attempt in work:
        try:
            attempt()
        except CheckpointError as error:
            said.append(str(error))
        else:
            said.append(None)
    return said


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../secret", "/dev/zero", "a/b", "..", "", "a\\b", "a\0b", "\ud800", MANIFEST, 7],
    ids=lambda name: repr(name),
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_box_names_no_file_but_those_of_its_folder(folder: Path, name: Any, listed: bool) -> None:
    (folder.parent / "secret").write_bytes((folder / FILE).read_bytes())
    content = _content_of(folder)
    for _, _, boxes in content["tensors"].values():
        for box in boxes:
            box[2] = name
    if listed:
        content["files"] = {str(name): [HUGE, 0]}
    _seal(folder, content)
    for said in _everything(folder, folder.parent / "out"):
        assert said is not None and MANIFEST in said and "file" in said


def _link(path: Path) -> None:
    path.with_name("target").write_bytes(b"")
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize("make", [os.mkfifo, _link, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_only_regular_files_are_read_and_nobody_waits_for_a_pipe(
    folder: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    told = "is a symbolic link|is a folder, a pipe or a device; expected a regular file"
    for file in (FILE, MANIFEST):
        (folder / file).rename(tmp_path / "whole")
        make(folder / file)
        for said in _everything(folder, tmp_path / "out"):
            assert said is not None and re.search(f"{file} ({told})", said)
        (folder / file).rmdir() if make is Path.mkdir else (folder / file).unlink()
        (tmp_path / "whole").rename(folder / file)
    for number, file in enumerate(("model.safetensors", INDEX)):
        source = tmp_path / f"{number}"
        source.mkdir()
        make(source / file)
        for read in (Safetensors, lambda source: checkpoint.import_safetensors(source, tmp_path / "new")):
            with pytest.raises(CheckpointError, match=told):
                read(source)


@pytest.mark.parametrize("name", ["../x.safetensors", "/dev/zero", "..", "", "a/b", 3, None, {}])
def test_an_index_names_no_file_but_those_beside_it(tmp_path: Path, name: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    (source / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    for read in (Safetensors, lambda source: checkpoint.import_safetensors(source, tmp_path / "new")):
        with pytest.raises(CheckpointError, match=r"weight_map\['w'\]\) names the file .*; expected the plain name"):
            read(source)


def test_links_in_the_cache_of_the_hub_lead_to_its_blobs_and_nowhere_else(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "main", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / ("ab" * 32))
    (snapshot / "model.safetensors").symlink_to("../../blobs/" + "ab" * 32)
    assert Safetensors(snapshot).shapes == Safetensors(snapshot / "model.safetensors").shapes == {"w": (2,)}
    assert checkpoint.import_safetensors(snapshot, tmp_path / "new").name == "step-000000"
    (blobs / ("ab" * 32)).rename(tmp_path / "elsewhere")
    (blobs / ("ab" * 32)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        Safetensors(snapshot)


@pytest.mark.parametrize("what", ["the checkpoint", "a file of it"])
def test_no_function_and_no_command_follows_a_link_out_of_a_checkpoint(folder: Path, tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if what == "the checkpoint":
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    else:
        (folder / FILE).rename(elsewhere)
        (folder / FILE).symlink_to(elsewhere)
    for said in _everything(folder, tmp_path / "out"):
        assert said is not None and "is a symbolic link, which is not followed" in said
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        checkpoint.load(folder.parent, Case().state)
    assert checkpoint.latest(folder.parent) is None
    for path in (folder, folder.parent):
        for command in ("checkpoint ls", "checkpoint verify"):
            result = CliRunner().invoke(app, [*command.split(), str(path)])
            assert result.exit_code == 1 and "is a symbolic link" in result.stdout
        assert isinstance(
            CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out")]).exception, CheckpointError
        )


# --- sizes and values -----------------------------------------------------------------------------------------------

TENSOR = "model.0.weight"  # [dtype, shape, boxes], and a box is [offsets, sizes, file]


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, key, value = path

    def change(content: dict[str, Any]) -> None:
        node: Any = content
        for step in way:
            node = node[step]
        node[key] = value

    return change


def _of_tensor(*path: Any) -> Callable[[dict[str, Any]], None]:
    return _set("tensors", TENSOR, *path)


def _giant_file(content: dict[str, Any]) -> None:
    content["tensors"][TENSOR][1:] = [[HUGE, 1], [[[0, 0], [HUGE, 1], FILE]]]
    content["files"][FILE][0] += HUGE * 4


NOT_ONCE = rf"the boxes of tensors\['{TENSOR}'\] do not hold each element"
MISFITS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (
        _of_tensor(["float32", [HUGE, HUGE], [[[0, 0], [HUGE, HUGE], FILE]]]),
        f"tensors of {FILE} are larger than the file",
    ),
    (_giant_file, f"{FILE} is truncated"),
    (_of_tensor(0, "int32"), f"{TENSOR}@0,0 is not in it as the manifest says"),
    (_of_tensor(2, []), NOT_ONCE),
    (_of_tensor(2, 0, 1, [1, 3]), NOT_ONCE),
    (_of_tensor(2, 0, 0, 0, 1), NOT_ONCE),
    # Of the right size in all: two that overlap, with a gap beside them, and one outside.
    (_of_tensor(2, [[[0, 0], [1, 3], FILE], [[0, 0], [1, 3], FILE]]), NOT_ONCE),
    (_of_tensor(2, [[[0, 0], [2, 1], FILE], [[0, 1], [1, 2], FILE], [[0, 2], [2, 1], FILE]]), NOT_ONCE),
    (_of_tensor(2, [[[0, 0], [1, 3], FILE], [[2, 0], [1, 3], FILE]]), NOT_ONCE),
    (_of_tensor(["float32", [1] * 60, [[[0] * 60, [1] * 60, FILE]] * 2]), "more boxes than any checkpoint"),
    (_of_tensor(2, 0, 0, 0, -1), r"boxes\[0\] is -1; expected an integer from 0"),
    (_of_tensor(2, 0, 2, STATES), rf"tensors of {STATES} are larger|{STATES}: {TENSOR}@0,0 is not in it"),
    (_of_tensor(1, 0, 2.0), r"shape\[0\] is 2\.0"),
    (_of_tensor(0, "float31"), "has the dtype 'float31'"),
    (_of_tensor(0, "save"), "has the dtype 'save'"),
    (_set("files", FILE, 0, float("nan")), r"\[0\] is nan"),
    (_set("seconds", 1e300), r"seconds is 1e\+300"),
    (_set("world", 0), r"'world'\] is 0; expected an integer from 1"),
    (_set("step", 10**400), r"'step'\] is 1"),
    (_set("values", "optimizer", "states", "0.weight", "like", 0, "gone"), r"optimizer\.0\.weight\.gone is missing"),
    (_set("values", "optimizer", "groups", 0, "options", "lr", "much"), "lr of the optimizer's group is 'much'"),
    (_set("values", "optimizer", "groups", 0, "options", "betas", {"(tuple)": [0.9]}), "betas of the optimizer's"),
    (_set("values", "data", "order", {"(tensor)": TENSOR}), "data refers to .*; expected a tensor of 'data'"),
    (_set("values", "data", "order", {"(tensor)": "data.gone"}), "data refers to .*; expected a tensor of 'data'"),
    (_set("values", "data", "key", {"(bytes)": "xyz"}), "non-hexadecimal"),
    (_set("values", "data", {"at": 1}), r"'data' \(Loader\) does not take its state \(KeyError"),
    (_set("values", "model", {}), r"values\.model\.aliases is missing"),
]


@pytest.mark.parametrize("change, told", MISFITS)
def test_what_does_not_fit_the_files_is_refused_by_file_and_field_before_memory_is_taken(
    folder: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    content = _content_of(folder)
    change(content)
    _seal(folder, content)
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(folder, Case().state)


def _rewrite(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Put another tensor into the first file, and seal the manifest anew."""
    held = {**load_file(folder / FILE), f"{name}@{','.join('0' * tensor.dim())}": tensor}
    save_file(held, folder / FILE)
    content = _content_of(folder)
    data = (folder / FILE).read_bytes()
    content["files"][FILE] = [len(data), zlib.crc32(data)]
    shape = list(tensor.shape)
    content["tensors"][name] = [str(tensor.dtype)[6:], shape, [[[0] * tensor.dim(), shape, FILE]]]
    _seal(folder, content)


@pytest.mark.parametrize(
    ("name", "state", "told"),
    [
        ("numpy", torch.tensor([10**6, *[0] * 625]), "NumPy's position is 1000000; expected 0 to 624"),
        ("python", torch.zeros(3, dtype=torch.int64), "no state of a generator"),
        ("torch", torch.zeros(3, dtype=torch.uint8), "no state of a generator"),
    ],
)
def test_a_generator_is_never_set_beside_its_state(folder: Path, name: str, state: torch.Tensor, told: str) -> None:
    _rewrite(folder, f"rank.0.rng.{name}", state)
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(folder, Case().state)


def test_a_file_of_holes_that_no_memory_holds_is_refused(folder: Path) -> None:
    content = _content_of(folder)
    content["tensors"]["data.order"][1:] = [[HUGE // 8], [[[0], [HUGE // 8], "holes"]]]
    content["files"]["holes"] = [HUGE, 0]
    (folder / "holes").touch()
    os.truncate(folder / "holes", HUGE)
    _seal(folder, content)
    with pytest.raises(CheckpointError, match=r"data\.order has shape .* for which there is no memory"):
        checkpoint.load(folder, Case().state)


# --- JSON ------------------------------------------------------------------------------------------------------------

DEEP_TEXT = b"[" * 100_000
TEXTS = [DEEP_TEXT, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"format": "\xff\xfe"}', b'{"crc32": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("text", [*TEXTS, b"", b"null", b"[1]", b'{"format": "towpath'], ids=range(8))
def test_json_that_no_program_wrote_is_refused_wherever_it_is_read(tmp_path: Path, folder: Path, text: bytes) -> None:
    (folder / MANIFEST).write_bytes(text)
    assert all(said is not None and MANIFEST in said for said in _everything(folder, folder.parent / "out"))
    (folder / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=INDEX):
        Safetensors(folder)
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        Safetensors(tmp_path / "x.safetensors")


def test_what_is_too_long_is_refused_unread_and_not_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(folder / MANIFEST, 2 * GIB)
    told = "manifest.json has 2,147,483,648 bytes; a whole manifest has at most 67,108,864"
    assert told in (checkpoint.verify(folder) or "")
    for length, size in ((2**63 + 5, 8), (GIB, 2 * GIB)):
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", length))
        os.truncate(path, size)
        for read in (Safetensors, lambda source: checkpoint.import_safetensors(source, tmp_path / "new")):
            with pytest.raises(CheckpointError, match=r"x\.safetensors: not a whole safetensors file"):
                read(path)
    monkeypatch.setattr("towpath.checkpoint.safe_files.MAX_JSON_BYTES", 1000)
    assert "and at most 1,000 are read" in (checkpoint.save(tmp_path / "saved", 1, Case().state).failure or "")
    assert list((tmp_path / "saved").iterdir()) == []


# --- the search ------------------------------------------------------------------------------------------------------


def test_bad_folders_do_not_stop_the_search_and_one_that_was_named_is_an_error(folder: Path, tmp_path: Path) -> None:
    root = folder.parent
    damages = [change for change, told in MISFITS if "does not take its state" not in told]  # of another kind
    for step, change in enumerate(damages, 8):
        bad = Path(shutil.copytree(folder, root / f"step-{step:06d}"))
        content = _content_of(bad)
        change(content)
        _seal(bad, content)
    (root / "step-000100").mkdir()
    os.mkfifo(root / "step-000100" / MANIFEST)
    (root / "step-000101").mkdir()
    (root / "step-000101" / MANIFEST).write_bytes(DEEP_TEXT)
    (root / "step-000103").write_text("a file")

    loaded = checkpoint.load(root, Case().state)
    assert loaded is not None and loaded.path == folder
    skipped = [note.split()[0] for note in loaded.notes]
    assert skipped == [f"step-{n:06d}" for n in (101, 100, *range(7 + len(damages), 7, -1))]
    assert checkpoint.latest(root) is not None
    with pytest.raises(CheckpointError, match="not a whole manifest"):
        checkpoint.load(root / "step-000101", Case().state)
    for command in (["export", str(root), str(tmp_path / "out")], ["checkpoint", "show", str(root)]):
        assert CliRunner().invoke(app, command).exit_code == 0
    for command in (["checkpoint", "ls", str(root), "--json"], ["checkpoint", "verify", str(root)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1 and "a pipe or a device" in result.stdout


def test_nothing_is_unpickled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    assert _everything(folder, tmp_path / "out") == [None, None, None]
    assert checkpoint.import_safetensors(tmp_path / "out", tmp_path / "new").exists()


def test_what_a_terminal_would_obey_is_shown_and_markup_is_text(folder: Path) -> None:
    content = _content_of(folder)
    content["tensors"] = {n.replace("model.0", "model.\x1b[2J[/b]"): t for n, t in content["tensors"].items()}
    content["values"] = {"[/x]\x07": 1}
    content["written_by"] = "[/red]\x1b]0;x"
    _seal(folder, content)
    result = CliRunner().invoke(app, ["checkpoint", "show", str(folder)])
    assert result.exit_code == 0 and "\x1b" not in result.stdout and r"\x1b[2J[/b]" in result.stdout


def test_a_manifest_of_another_format_is_refused_as_such(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": "towpath checkpoint 9"}))
    assert f"format is 'towpath checkpoint 9'; expected '{FORMAT}'" in (checkpoint.verify(folder) or "")


# --- fuzz ------------------------------------------------------------------------------------------------------------

DEEP: Any = 0
for _ in range(150):
    DEEP = [DEEP]

HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**300, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "../../x", "/dev/zero", "\ud800", "\0", "F64", "BOOL", MANIFEST, FILE, "y" * 5000),
    *([], {}, [[]], [0] * 100, [HUGE, HUGE], {"": {}}, {"(tensor)": TENSOR}, {"(tensor)": []}, {"(tuple)": 5}),
    *({"(items)": [[[], 1]]}, {"(items)": [[1, 1], [1, 2]]}, {"(bytes)": "zz"}, {"(bytes)": []}, DEEP),
]


def _nodes(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _nodes(child, (*path, key))


def _mutate(content: dict[str, Any], data: st.DataObject) -> None:
    """Replace, delete, repeat, rename or bury one node."""
    *way, key = data.draw(st.sampled_from(list(_nodes(content))))
    node: Any = content
    for step in way:
        node = node[step]
    match data.draw(st.sampled_from(["replace", "delete", "repeat", "rename", "bury", "nudge"])):
        case "delete":
            del node[key]
        case "repeat" if isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        case "rename" if isinstance(node, dict):
            node[data.draw(st.sampled_from([h for h in HOSTILE if isinstance(h, str)]))] = node.pop(key)
        case "bury":
            node[key] = [node[key]]
        case "nudge" if type(node[key]) is int:
            node[key] += data.draw(st.sampled_from([-8, -1, 1, 4, 1 << 40]))
        case _:
            node[key] = data.draw(st.sampled_from(HOSTILE))


@fuzz(50)
@given(st.data())
def test_any_change_of_a_manifest_that_vouches_for_itself_is_an_error_or_a_whole_checkpoint(
    saved: tuple[Case, Path], folder: Path, data: st.DataObject
) -> None:
    """Whoever seals a manifest anew can say what a checkpoint says; what it cannot is reach beyond it."""
    content = _content_of(saved[1])
    for _ in range(data.draw(st.integers(1, 2))):
        _mutate(content, data)
    _seal(folder, content)
    into = Case()
    shapes = {n: t.shape for n, t in into.model.state_dict().items()}
    try:
        loaded = checkpoint.load(folder, into.state)
        assert loaded is not None
        assert {n: t.shape for n, t in into.model.state_dict().items()} == shapes
        for parameter, state in into.optimizer.state.items():
            assert all(state[key].shape == parameter.shape for key in ("exp_avg", "exp_avg_sq") if key in state)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    checkpoint.verify(folder)
    try:
        shutil.rmtree(folder.parent / "out", ignore_errors=True)
        checkpoint.export(folder, folder.parent / "out")
    except CheckpointError:
        pass


def _change(original: bytes, data: st.DataObject) -> bytes:
    """Flip a bit, or replace some bytes by none, as many or more."""
    at = data.draw(st.integers(0, len(original) - 1))
    if data.draw(st.booleans()):
        return original[:at] + bytes([original[at] ^ 1 << data.draw(st.integers(0, 7))]) + original[at + 1 :]
    left = data.draw(st.sampled_from([at, at + 1, at + 9, len(original)]))
    return original[:at] + data.draw(st.binary(max_size=9)) + original[left:]


@fuzz(50)
@given(st.data())
def test_any_change_of_bytes_is_an_error_or_changes_nothing(
    saved: tuple[Case, Path], folder: Path, data: st.DataObject
) -> None:
    case, original = saved
    for name in (FILE, STATES, MANIFEST):
        (folder / name).write_bytes((original / name).read_bytes())
    name = data.draw(st.sampled_from([FILE, STATES, MANIFEST]))
    (folder / name).write_bytes(_change((original / name).read_bytes(), data))
    into = Case()
    for parameter in into.model.parameters():
        parameter.data.fill_(9.0)
    try:
        checkpoint.load(folder, into.state)
    except CheckpointError as error:
        assert name in str(error)
    else:
        assert all(torch.equal(a, b) for a, b in zip(into.content(), case.content(), strict=True))


@given(st.text(max_size=12))
@settings(derandomize=True, database=None, deadline=None)
def test_a_plain_name_stays_in_its_folder(name: str) -> None:
    if is_plain(name):
        assert os.path.normpath(Path("/a/b") / name) == f"/a/b/{name}" and Path("/a/b", name).parent == Path("/a/b")
