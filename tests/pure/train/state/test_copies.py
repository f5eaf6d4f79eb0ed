"""`copy_to_host` makes the copies of the training state that snapshots consist of."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ray_app.train.state import transfer
from ray_app.train.state.transfer import copy_to_host
from tests.support.fake_cuda import DEVICE, RecordingCuda

CPU = torch.device("cpu")


def test_a_copy_reuses_memory_of_equal_shape_and_has_its_own_otherwise() -> None:
    state = {"a": torch.arange(3.0), "b": [torch.arange(6.0).view(2, 3).T, 7], "c": torch.zeros(4)}
    first = copy_to_host(state)
    state["a"] += 1
    old: dict[str, Any] = {"a": first["a"], "c": torch.zeros(5)}
    second = copy_to_host(state, old)
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [1.0, 2.0, 3.0]
    assert second["c"] is not old["c"], "memory of another shape was reused"
    assert (second["b"][0].tolist(), second["b"][1]) == ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 7)
    assert second["b"][0].is_contiguous()


def test_all_copies_are_enqueued_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RecordingCuda(monkeypatch)
    monkeypatch.setattr(
        transfer,
        "page_locked_like",
        lambda values: [streams.record("page-locked", torch.empty(v.shape)) for v in values],
    )
    monkeypatch.setattr(
        Tensor,
        "copy_",
        lambda into, value, non_blocking=False: streams.record(f"copy{'' if non_blocking else ' and wait'}", into),
    )
    state = {"a": torch.zeros(3, device=DEVICE), "b": [torch.zeros(2, device=DEVICE)]}
    old = {"a": torch.zeros(3)}
    copies = copy_to_host(state, old)
    waits = [call for call in streams.calls if "wait" in call]
    assert waits == streams.calls[-1:], (
        "the host waited before all copies were enqueued, or returned copies without waiting"
    )
    assert copies["a"] is old["a"]
    assert copies["b"][0].device == CPU
    assert streams.calls == [f"computing: {call_text}" for call_text in ("page-locked", "copy", "copy", "wait for all")]
