"""The size of each package has a ceiling: before a rule is added, look where it stands already.

A ceiling is lowered when a package shrinks, and raised only in a commit with a body that says what the lines are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CEILINGS = {
    "ray_app/checkpoint": 1_047,
    "ray_app/cli": 2_609,
    "ray_app/cluster": 4_952,
    "ray_app/config": 1_858,
    "ray_app/data": 4_594,
    "ray_app/drill": 3_039,
    "ray_app/driver": 3_193,
    "ray_app/evaluate": 663,
    "ray_app/ingest": 9_347,
    "ray_app/keras": 1_514,
    "ray_app/models": 2_334,
    "ray_app/plan": 1_007,
    "ray_app/predict": 613,
    "ray_app/preflight": 5_184,
    "ray_app/reduction": 2_431,
    "ray_app/report": 1_687,
    "ray_app/retrain": 2_073,
    "ray_app/runlog": 2_424,
    "ray_app/storage": 1_521,
    "ray_app/submit": 744,
    "ray_app/task": 11_353,
    "ray_app/track": 1_019,
    "ray_app/train": 10_410,
    "ray_app/tune": 2_242,
    "ray_app/watch": 1_200,
    "ray_app/*.py": 2_488,
    "tests": 79_891,
}
"""Lines of Python in each package with its packages, in the single modules of `ray_app`, and in all tests."""


def _files(folder: str) -> Iterator[Path]:
    """Yields the Python files of a folder with its folders, or of a pattern."""
    return ROOT.glob(folder) if folder.endswith(".py") else (ROOT / folder).rglob("*.py")


def _count_lines(folder: str) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in _files(folder))


@pytest.mark.parametrize("folder", CEILINGS)
def test_no_package_is_larger_than_its_ceiling(folder: str) -> None:
    lines = _count_lines(folder)
    assert lines <= CEILINGS[folder], (
        f"{folder} has {lines:,} lines of Python; its ceiling is {CEILINGS[folder]:,}. Remove what stands twice, or"
        " raise the ceiling here, in a commit with a body that says what the lines are for."
    )


def test_each_package_has_a_ceiling() -> None:
    packages = {f"ray_app/{file.relative_to(ROOT / 'ray_app').parts[0]}" for file in ROOT.glob("ray_app/*/**/*.py")}
    assert packages == {folder for folder in CEILINGS if folder.startswith("ray_app/") and not folder.endswith(".py")}
