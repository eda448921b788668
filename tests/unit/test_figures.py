"""Tables of measured figures in the docs are those of the results, and say which code they are of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from docs import figures

PAGE = "before\n<!-- figures: strategies -->\nold\n<!-- end of figures -->\nafter\n"


def test_the_pages_say_what_was_measured() -> None:
    told = "run `python docs/figures.py`, and commit what it writes"
    old = figures.old_pages()
    assert not old, f"{', '.join(page.name for page in old)}: {told}"


def test_every_table_is_of_a_suite_whose_sources_are_known_and_there() -> None:
    marked = [suite for page in figures.PAGES for _, suite, _, _ in figures._MARKED.findall(page.read_text())]
    assert "strategies" in marked and set(marked) <= set(figures.KNOWN)
    for paths in figures.SOURCES.values():
        assert all((figures.ROOT / path).exists() for path in paths), paths


def write(folder: Path, **line: object) -> None:
    check = {"what": "a / b", "found": 1.234, "at_least": 1.5, "met": False, "low": 1.1, "high": 1.3}
    run = {"case": {"name": "here"}, "checks": [check], **line}
    (folder / "strategies.jsonl").write_text(json.dumps(run) + "\n")


def test_a_figure_that_missed_what_was_asked_stays_and_one_that_changed_is_noticed(tmp_path: Path) -> None:
    assert figures.written(PAGE, tmp_path).splitlines()[2] == figures.NOT_YET.strip()
    write(tmp_path, versions={"towpath": "1.0"})
    made = figures.written(PAGE, tmp_path)
    assert "| here | a / b | 1.234 | 1.1 – 1.3 | ≥ 1.5, missed | version 1.0 |\n" in made
    assert made.startswith("before\n") and made.endswith("<!-- end of figures -->\nafter\n")
    assert figures.written(made, tmp_path) == made
    assert figures.written(made.replace("1.234", "1.324"), tmp_path) == made


class TestAge:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        (tmp_path / "src" / "towpath" / "engine").mkdir(parents=True)
        return tmp_path

    def commit(self, root: Path, file: str) -> str:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        for arguments in (["add", "-A"], [*author, "commit", "-qm", file]):
            subprocess.run(["git", "-C", str(root), *arguments], check=True)
        head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
        return head.stdout.strip()

    def age(self, root: Path, commit: str) -> str:
        return figures.when({"commit": commit}, "strategies", root)

    def test_a_change_of_what_was_measured_makes_a_figure_one_of_before_at_once_and_once(self, root: Path) -> None:
        measured = self.commit(root, "src/towpath/engine/a.py")
        assert self.age(root, measured) == f"at {measured[:10]}"
        self.commit(root, "docs/page.md")
        self.commit(root, "src/towpath/cli/other.py")
        assert self.age(root, measured) == f"at {measured[:10]}"  # not what was measured
        (root / "src/towpath/engine/a.py").write_text("another")  # the page can go into the same commit
        before = f"at {measured[:10]}, before its code changed"
        assert self.age(root, measured) == before
        self.commit(root, "src/towpath/engine/a.py")
        assert self.age(root, measured) == before
        self.commit(root, "src/towpath/engine/b.py")
        assert self.age(root, measured) == before  # the next change finds the page as it has to be

    def test_a_commit_that_git_does_not_know_is_taken_at_its_word(self, root: Path) -> None:
        self.commit(root, "src/towpath/engine/a.py")
        assert self.age(root, "f" * 40) == f"at {'f' * 10}"
