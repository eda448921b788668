"""The list of defects that `python tests/mutants/run.py` puts in fits the sources as they are."""

from __future__ import annotations

import ast

from tests.mutants.run import ROOT, mutants


def test_every_listed_defect_can_be_put_in_and_is_python() -> None:
    listed = mutants()
    assert len(listed) >= 30 and len({m.name for m in listed}) == len(listed)
    for mutant in listed:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        mutated = mutant.mutated(text)
        assert mutated != text, mutant.name
        if mutant.file.endswith(".py"):
            ast.parse(mutated, mutant.name)
        for test in mutant.tests.split():
            assert (ROOT / test.partition("::")[0]).exists(), f"{mutant.name}: {test} is not there"
