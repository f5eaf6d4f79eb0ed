"""Micro-batches go to a device ahead of their step, in the right order of calls."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_app.data.feed import Feed, Upload
from ray_app.data.local_readers import Decoded
from ray_app.data.windows import CachedWindows, MicroBatch
from ray_app.plan.order import Cursor
from ray_app.reduction.overlap import SideStream, get_stream
from tests.support.fake_cuda import DEVICE, Streams
from tests.support.local_world import TinyImages, make_job, write_images


def batch_of(rows: int) -> MicroBatch:
    fields = {"image": torch.zeros(rows, 2), "label": torch.arange(rows)}
    return MicroBatch(0, rows, fields, torch.arange(rows), 0, np.arange(rows))


def test_a_batch_is_copied_beside_what_computes_and_waited_for_by_the_device_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    upload = Upload(DEVICE)
    sent = upload.send([batch_of(3)])
    assert streams.calls == ["side: pin_memory", "side: copy", "side: pin_memory", "side: copy", "side: mark"]
    streams.calls.clear()
    upload.make_available(sent)
    [found] = sent
    assert streams.calls == ["computing: wait for mark", "computing: used by computing", "computing: used by computing"]
    assert {name: (value.device, tuple(value.shape)) for name, value in found.fields.items()} == {
        "image": (DEVICE, (3, 2)),
        "label": (DEVICE, (3,)),
    }
    assert found.keys.device.type == "cpu", "what augments draws on the host"


def test_what_computes_waits_for_a_stream_beside_it_by_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    side = SideStream(DEVICE, "reduction")
    with side.entered():
        torch.zeros(2).to(DEVICE, non_blocking=True)
    side.join()
    assert streams.calls == ["side: copy", "computing: wait for side"]


def test_two_threads_may_be_in_a_stream_at_once_and_each_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that gathers may still be at what nobody wants any more, while the other one gathers what comes next."""
    streams, inside, go_on = Streams(monkeypatch), threading.Event(), threading.Event()
    side = SideStream(DEVICE, "upload")

    def gather() -> None:
        with side.entered():
            inside.set()
            assert go_on.wait(20)

    gatherer = threading.Thread(target=gather)
    gatherer.start()
    assert inside.wait(20)
    with side.entered():
        go_on.set()
        gatherer.join()
        torch.zeros(2).to(DEVICE, non_blocking=True)
    torch.zeros(2).to(DEVICE, non_blocking=True)
    assert streams.calls == ["side: copy", "computing: copy"]


def test_each_purpose_has_one_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a group forms anew: PyTorch's streams come round again, and a captured one must not be that which
    uploads.
    """
    Streams(monkeypatch)
    found = {
        purpose: {id(get_stream(DEVICE, purpose)) for _ in range(40)} for purpose in ("upload", "reduction", "capture")
    }
    assert [len(each) for each in found.values()] == [1, 1, 1]
    assert len(set.union(*found.values())) == 3


def test_two_steps_are_on_their_way_while_one_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "run",
        write_images(tmp_path / "data", [[40]]),
        logical_workers=1,
        batch=4,
        task=TinyImages(),
        data__shuffle_window_rows=40,
    )
    streams = Streams(monkeypatch)
    rows = job.plan.manifest.num_rows
    feed = Feed(job.plan, lambda cursor, played: CachedWindows(Decoded({"id": np.arange(rows)}, {})), DEVICE)
    feed.seek(Cursor(), range(1))
    feed.next()
    assert feed._pending is not None
    feed._pending.result()
    copies = [call for call in streams.calls if "copy" in call]
    assert copies == ["side: copy"] * 3, "that of this step, and of two more"
    assert [call for call in streams.calls if "wait" in call] == ["computing: wait for mark"]
    feed.close()
