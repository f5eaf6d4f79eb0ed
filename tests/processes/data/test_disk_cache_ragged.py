"""The disk cache of rows of different lengths: every row is verified, and the capacity is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_app.data.arrays import ArraySpec
from ray_app.data.disk_cache import RaggedRows
from ray_app.task.ragged import Ragged
from ray_app.train.job import Job
from tests.support.disk_caches import (
    CountingFetch,
    TinyTexts,
    assert_equal_to_uncached,
    cached_job,
    epoch_of,
    open_job_cache,
)
from tests.support.local_world import write_images


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return cached_job(tmp_path, write_images(tmp_path / "data", [[50, 1], [46]]), TinyTexts())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("file", "at", "new"),
    [
        ("field-003", 500, b"?"),
        ("field-003-places", 16 * 20 + 1, b"?"),
        ("field-003-places", 16 * 20 + 7, b"\xff"),
        ("field-003-places", 16 * 20 + 8, b"\x04"),
        ("field-003-places", 16 * 20 + 15, b"\x7f"),
        ("field-003-places", 16 * 20 + 15, b"\xff"),
        ("field-003-places", 16 * 20 + 8, b"\x25"),
        ("field-003-places", 16 * 30, bytes(160)),
        ("field-003", 0, bytes(8)),
        ("field-003", 4, b"\x7f"),
    ],
    ids=[
        "a value",
        "a place",
        "a place below 0",
        "a length",
        "an enormous length",
        "a length below 0",
        "half a number",
        "lost places",
        "what is taken",
        "too much is taken",
    ],
)
def test_ragged_rows_that_the_disk_corrupted_are_read_again(job: Job, file: str, at: int, new: bytes) -> None:
    cache, counting = open_job_cache(job), CountingFetch()
    epoch_of(job, 0, cache.around(counting))
    assert list(job.fields)[3] == "text"
    [folder] = Path(str(job.config.data.cache_dir)).glob("*/")
    content = bytearray((folder / file).read_bytes())
    assert content[at : at + len(new)] != new
    content[at : at + len(new)] = new
    (folder / file).write_bytes(content)
    for epoch in (1, 2, 3):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, cache.around(counting)))
    cache.close()


def test_checksums_of_zero_rows_depend_on_their_lengths(tmp_path: Path) -> None:
    rows = RaggedRows(tmp_path, 0, ArraySpec("<i2", (), (0, 1)))
    assert len(set(rows.sums(Ragged.of([[], [0], [0, 0], [0] * 9], np.int16)).tolist())) == 4
    rows.close()


def test_rows_longer_than_the_first_ones_are_read_once_capacity_is_exhausted(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job = replace(job, fields={**job.fields, "text": replace(job.fields["text"], length=0)})
    cache, counting = open_job_cache(job), CountingFetch()
    for epoch in range(3):
        assert_equal_to_uncached(job, epoch, epoch_of(job, epoch, cache.around(counting)))
    assert (
        caplog.text.count(
            "takes no more rows, they are read in every epoch: [Errno 28] rows are longer than the first ones were"
        )
        == 1
    )
    assert 97 < counting.rows < 3 * 97
    [folder] = Path(str(job.config.data.cache_dir)).glob("*/")
    assert (folder / "field-003").stat().st_size == 8 + 97 * 16
    cache.close()
