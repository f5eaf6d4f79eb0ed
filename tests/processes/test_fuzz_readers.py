"""100,000 mutated files: each is refused by a clear error or read, nothing of it runs, and no process dies or grows."""

from pathlib import Path

import pytest

from tests.support.fuzzing import find_faults

MUTANTS = {"frames": 27_000, "run": 46_000, "packages": 7_500, "images": 14_800, "sources": 5_900}
"""The least number of mutants of each group; a test of all takes four minutes on two cores."""


@pytest.mark.search
@pytest.mark.parametrize("group", MUTANTS)
def test_mutated_files_are_refused_or_read(tmp_path: Path, group: str) -> None:
    assert sum(MUTANTS.values()) >= 100_000
    faults, num_good = find_faults(group, tmp_path)
    assert not faults, f"{len(faults)} faults, such as {faults[:5]}"
    assert num_good >= MUTANTS[group]


@pytest.mark.rest
def test_each_fault_is_found(tmp_path: Path) -> None:
    faults, _ = find_faults("faults", tmp_path)
    kinds = ("it ran", "it took", "KeyError", "the process died of SIGSEGV")
    assert [kind for fault in faults for kind in kinds if fault["fault"].startswith(kind)] == [
        kind for kind in kinds for _ in range(2 - (kind == "it took"))
    ]
