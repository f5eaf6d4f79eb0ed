"""A disk that is really full: the newest checkpoint stays usable, no incomplete file stays, and later writes work."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ray_app.checkpoint.format import pack
from ray_app.checkpoint.store import WRITER, CheckpointStore
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError
from ray_app.retry import Retry
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_tree, put_atomic
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import CheckpointWriter
from tests.support.checkpoints import commit_of, snapshot_of

MIB = 1 << 20
FLOATS = 3 * MIB // 8
"""Number of values of a checkpoint of 3 MiB; the disk holds two and a half of them."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free_bytes(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_bsize


def test_a_full_disk_leaves_the_newest_checkpoint(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.001, attempts=6))
    paths = RunPaths(disk / "run")
    store, writer = CheckpointStore(paths), CheckpointWriter(paths, CheckpointSection(keep_last=2), list)
    for step in (1, 2):
        writer.save(lambda step=step: snapshot_of(step, FLOATS), commit_of(step))
    writer.wait_for_commit()
    before = free_bytes(disk)
    for step in (3, 4):
        writer.save(lambda step=step: snapshot_of(step, FLOATS), commit_of(step))
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.wait_for_commit()
    assert caplog.text.count("attempt 6 of 6 failed") == 2
    failed = read_events(paths, "write_failed")
    assert [(e.details["step"], e.details["attempts"]) for e in failed] == [(3, 6), (4, 6)]
    assert all("No space left on device" in e.details["reason"] for e in failed)
    assert before - free_bytes(disk) < MIB // 4, "an incomplete file fills the disk"
    written = {name.split("/")[0] for name in list_tree(paths.checkpoints) if not name.endswith(WRITER)}
    assert written == {"step-00000001-0001", "step-00000002-0001"}
    loaded = store.load_newest(lambda _: pytest.fail("it is damaged"))
    assert loaded is not None
    assert loaded[1].step == 2
    for file in list_tree(paths.checkpoint(1, 1)).values():
        file.unlink()
    writer.save(lambda: snapshot_of(5, FLOATS), commit_of(5))
    writer.wait_for_commit()
    assert [c.step for c in store.commits()] == [2, 5]


def test_a_run_falls_back_and_continues_on_a_disk_without_a_free_byte(disk: Path) -> None:
    """Even the marker of a bad checkpoint cannot be written; the run still falls back to the older checkpoint."""
    paths = RunPaths(disk / "run")
    store = CheckpointStore(paths)
    for step in (1, 2):
        store.write(pack(snapshot_of(step, FLOATS)), commit_of(step))
    path = paths.checkpoint(2, 1) / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"\x01")
    with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        put_atomic(disk / "more", bytes(4096))
    fallbacks: list[str] = []
    loaded = store.load_newest(lambda fallback: fallbacks.append(fallback.name))
    assert loaded is not None
    assert (loaded[1].step, fallbacks) == (1, ["step-00000002-0001"])
