"""Micro-batches are copied to a device before their step, with the calls of CUDA in the right order."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_app.data.feed import Feed, Upload
from ray_app.data.reader import Decoded
from ray_app.data.windows import CachedWindows, MicroBatch
from ray_app.devices import get_stream
from ray_app.plan.order import Cursor
from ray_app.reduction.overlap import SideStream
from tests.support.fake_cuda import DEVICE, RecordingCuda
from tests.support.local_world import TinyImages, make_job, write_images


def batch_of(rows: int) -> MicroBatch:
    fields = {"image": torch.zeros(rows, 2), "label": torch.arange(rows)}
    return MicroBatch(0, rows, fields, torch.arange(rows), 0, np.arange(rows))


def test_a_batch_is_copied_on_a_side_stream_and_only_the_device_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = RecordingCuda(monkeypatch)
    upload = Upload(DEVICE)
    batches = upload.send([batch_of(3)])
    operations = ("pin_memory", "copy", "pin_memory", "copy", "mark")
    assert streams.calls == [f"side, first: {operation}" for operation in operations]
    streams.calls.clear()
    upload.make_available(batches)
    [batch] = batches
    assert streams.calls == ["computing: wait for mark", "computing: used by computing", "computing: used by computing"]
    assert {name: (value.device, tuple(value.shape)) for name, value in batch.fields.items()} == {
        "image": (DEVICE, (3, 2)),
        "label": (DEVICE, (3,)),
    }
    assert batch.keys.device.type == "cpu", (
        "the keys should stay on the host, which draws the random numbers of augmentations"
    )


def test_joining_a_side_stream_makes_only_the_device_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RecordingCuda(monkeypatch)
    side = SideStream(DEVICE, "reduction")
    with side.entered():
        torch.zeros(2).to(DEVICE, non_blocking=True)
    side.join()
    assert streams.calls == ["side: copy", "computing: wait for side"]


def test_two_threads_can_enter_and_leave_a_side_stream_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gathering thread may still be busy with a batch that is no longer needed, while another one gathers the
    next batch.
    """
    streams = RecordingCuda(monkeypatch)
    inside = threading.Event()
    leave = threading.Event()
    side = SideStream(DEVICE, "upload")

    def gather() -> None:
        with side.entered():
            inside.set()
            assert leave.wait(20)

    gatherer = threading.Thread(target=gather)
    gatherer.start()
    assert inside.wait(20)
    with side.entered():
        leave.set()
        gatherer.join()
        torch.zeros(2).to(DEVICE, non_blocking=True)
    torch.zeros(2).to(DEVICE, non_blocking=True)
    assert streams.calls == ["side: copy", "computing: copy"]


def test_each_purpose_has_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after many generations: PyTorch reuses the streams of its pool, and a captured stream must not
    be the one that uploads.
    """
    RecordingCuda(monkeypatch)
    streams_of = {
        purpose: {id(get_stream(DEVICE, purpose)) for _ in range(40)} for purpose in ("upload", "reduction", "capture")
    }
    assert [len(streams) for streams in streams_of.values()] == [1, 1, 1]
    assert len(set.union(*streams_of.values())) == 3


def test_two_more_steps_are_uploaded_while_one_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "run",
        write_images(tmp_path / "data", [[40]]),
        logical_workers=1,
        batch=4,
        task=TinyImages(),
        data__shuffle_window_rows=40,
    )
    streams = RecordingCuda(monkeypatch)
    rows = job.plan.manifest.num_rows
    feed = Feed(job.plan, lambda cursor, assigned: CachedWindows(Decoded({"id": np.arange(rows)}, {})), DEVICE)
    feed.seek(Cursor(), range(1))
    feed.next()
    # The gathering thread ends with what it has begun.
    feed.close()
    copies = [call for call in streams.calls if "copy" in call]
    assert copies == ["side, first: copy"] * 3, "expected the copies of this step and of two more"
    assert [call for call in streams.calls if "wait" in call] == ["computing: wait for mark"]
