"""What the package promises to the outside: its names, and that planning needs no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import towpath
from tests.documented import PAGES, ROOT


def test_the_public_names_are_few_sorted_and_all_there() -> None:
    assert towpath.__all__ == sorted(towpath.__all__)
    assert len(towpath.__all__) <= 27
    for name in towpath.__all__:
        assert getattr(towpath, name).__name__ == name


def test_planning_needs_nothing_but_python() -> None:
    """A schedule for 256 ranks, in a process in which neither torch nor numpy is ever imported."""
    program = """
import sys, towpath
from towpath.core.schedule import schedule
from towpath.core.units import units_from_numels
made = schedule(towpath.strategy("hpz", towpath.Topology(32, 8)), units_from_numels([10**8] * 2), 2)
assert made.inter_bytes > 0
assert not {"torch", "numpy"} & set(sys.modules), "torch or numpy was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_does_nothing() -> None:
    program = "import towpath, sys; assert not [m for m in sys.modules if m.startswith('towpath.')], sys.modules"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == done.stderr == ""


def test_no_framework_is_imported_but_by_the_module_for_it() -> None:
    program = """
import sys
import towpath.integrations, towpath.api, towpath.checkpoint, towpath.pipeline, towpath.train.run
theirs = {"accelerate", "transformers", "lightning", "peft", "datasets", "torchdata"} & set(sys.modules)
assert not theirs, theirs
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_says_which_there_are() -> None:
    try:
        towpath.shardd  # noqa: B018
    except AttributeError as error:
        assert "shard" in str(error)
    else:
        raise AssertionError("towpath.shardd should not exist")


def test_every_name_that_a_message_or_a_page_mentions_exists_after_a_plain_import() -> None:
    """In a fresh process, where nothing else has imported the modules that the names lie in."""
    texts = _messages(ROOT / "src" / "towpath")
    names = {name for text in texts for name in _NAME.findall(_IMPORT.sub("", text))}
    assert {"towpath.optim.whole_matrices", "towpath.checkpoint.get_model_state_dict"} <= names
    called = {name for page in PAGES for name in _CALL.findall(page.read_text(encoding="utf-8"))}
    assert "towpath.optim.whole_matrices" in called
    imported = {name for text in texts for name in _IMPORT.findall(text)}
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, *sorted(names | called), "--", *sorted(imported)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout


_NAME = re.compile(r"(?<![\w./-])(?:towpath|torch)(?:\.[A-Za-z_]\w*)+")
_CALL = re.compile(r"(?<![\w./-])towpath(?:\.\w+)+(?=\()")
_IMPORT = re.compile(r"\b(?:from|import) (towpath[\w.]*)")

# What PyTorch names may lie in a module of its own that a user imports first; of ours, nothing has to be.
_RESOLVE = """
import importlib, importlib.util, pkgutil, sys, torch, towpath
split = sys.argv.index("--")
for name in sys.argv[1:split]:
    try:
        eval(name) if name.startswith("towpath") else pkgutil.resolve_name(name)
    except (AttributeError, ImportError) as error:
        print(f"{name}: {error}"[:200])
for name in sys.argv[split + 1:]:
    if importlib.util.find_spec(name) is None:
        print(f"{name}: no such module")
"""


def _messages(folder: Path) -> list[str]:
    """Every text of several words in the source that is no docstring, less the names that a value completes."""
    found: list[str] = []
    for file in folder.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
                found.append(re.sub(r"\.?\w*\0", " ", text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [text for text in found if " " in text.strip()]
