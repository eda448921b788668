"""Which feature each test and each case on a GPU is about: none is left out, and none is counted twice."""

from __future__ import annotations

from collections import Counter

from tests.features import FEATURES, OTHER
from tests.gpu.cases import CASES
from tests.session.record import ROOT

FOLDERS = ("unit", "ranks", "lab", "order", "fake_cuda")


def test_each_file_of_tests_belongs_to_one_feature() -> None:
    listed = Counter([*OTHER, *(file for feature in FEATURES for file in feature.files)])
    there = {
        path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")
    }
    assert listed.keys() == there
    assert {file for file, times in listed.items() if times > 1} == set()


def test_each_case_on_a_gpu_has_a_name_of_its_own_and_a_feature() -> None:
    names = Counter(case.name for case in CASES)
    assert {name for name, times in names.items() if times > 1} == set()
    assert {case.feature for case in CASES} <= {feature.name for feature in FEATURES}
