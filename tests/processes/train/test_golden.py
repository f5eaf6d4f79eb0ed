"""The digest of conf/digits.yaml, which README's picture shows, on machines with a recorded digest."""

import re
import warnings
from pathlib import Path

import pytest

from ray_app.driver.finalize import newest_commit
from ray_app.driver.single import train_in_process
from ray_app.preflight.prepare import claim, prepare
from ray_app.train.job import Hooks
from ray_app.train.membership import SingleProcessMembership
from tests.support.jobs import digits_config
from tests.support.paths import ROOT

RECORDED_DIGESTS = {
    ("cpu x86_64", "AVX512", "1"): "eeebf144a7c5a872da737b44c51b5fbc310ed200818d04be9618aac53ae02186",
}
"""Digests by device, instruction set and number of threads."""
OLDEST_TORCH, NEWEST_TORCH = (2, 13), (2, 15)
"""The minor versions of torch with which the digests are the same."""


@pytest.mark.rest
def test_the_digits_run_has_the_digest_of_the_picture(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = claim(prepare(digits_config(digits, tmp_path, data__eval_path=None)), 1).job
    train_in_process(job, SingleProcessMembership(job.config.logical_workers, lambda: False), Hooks())
    commit = newest_commit(job)
    assert commit is not None
    torch = tuple(map(int, str(commit.environment["torch"]).split(".")[:2]))
    device, instructions, threads = (str(commit.environment[name]) for name in ("device", "cpu_capability", "threads"))
    machine = device, instructions, threads
    if machine in RECORDED_DIGESTS and OLDEST_TORCH <= torch <= NEWEST_TORCH:
        assert commit.params_digest == RECORDED_DIGESTS[machine]
    else:
        with capsys.disabled():
            print(f"\n{machine} with torch {torch} has no recorded digest: {commit.params_digest}")
        warnings.warn(
            f"the digest of conf/digits.yaml on {machine}, torch {torch} is not recorded; add it to RECORDED_DIGESTS:"
            f" {commit.params_digest}",
            stacklevel=1,
        )
    [picture_digest] = set(re.findall(r"[0-9a-f]{64}", (ROOT / "docs" / "pictures" / "terminal.svg").read_text()))
    assert picture_digest in RECORDED_DIGESTS.values(), "the picture shows another run"
