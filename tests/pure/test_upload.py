"""Micro-batches go to a device ahead of their step, in the right order of calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_app.data.feed.feed import Feed
from ray_app.data.feed.upload import Upload
from ray_app.data.feed.windows import CachedWindows, MicroBatch
from ray_app.data.read.whole import Decoded
from ray_app.exchange.side_stream import SideStream
from ray_app.plan.cursor import Cursor
from tests.support.fake_cuda import DEVICE, Streams
from tests.support.local_world import TinyImages, make_job, write_images


def batch_of(rows: int) -> MicroBatch:
    fields = {"image": torch.zeros(rows, 2), "label": torch.arange(rows)}
    return MicroBatch(0, rows, fields, torch.arange(rows), 0, np.arange(rows))


def test_a_batch_is_copied_beside_what_computes_and_waited_for_by_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    upload = Upload(DEVICE)
    sent = upload.send([batch_of(3)])
    assert streams.calls == ["side: pin", "side: copy", "side: pin", "side: copy", "side: mark"]
    streams.calls.clear()
    upload.arrive(sent)
    [found] = sent
    assert streams.calls == ["computing: wait for mark", "computing: used by computing", "computing: used by computing"]
    assert {name: (value.device, tuple(value.shape)) for name, value in found.fields.items()} == {
        "image": (DEVICE, (3, 2)),
        "label": (DEVICE, (3,)),
    }
    assert found.keys.device.type == "cpu", "what augments draws on the host"


def test_what_computes_waits_for_a_stream_beside_it_by_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    side = SideStream(DEVICE)
    with side:
        torch.zeros(2).to(DEVICE, non_blocking=True)
    side.join()
    assert streams.calls == ["side: copy", "computing: wait for side"]


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
    feed.play(Cursor(), range(1))
    feed.next()
    assert feed._ahead is not None
    feed._ahead.result()
    copies = [call for call in streams.calls if "copy" in call]
    assert copies == ["side: copy"] * 3, "that of this step, and of two more"
    assert [call for call in streams.calls if "wait" in call] == ["computing: wait for mark"]
    feed.close()
