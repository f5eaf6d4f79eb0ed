"""Newcomers that take long: each is asked once whether it has its slot, however often one looks, and given up if it has none."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.cluster.control import newcomers as module
from ray_app.cluster.control.newcomers import NO_ROOM, Newcomer, Newcomers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Ray was asked about which slot; none that begins with `no` is there, and nobody answers."""
    found: Counter[str] = Counter()

    def table(group: str) -> dict[str, Any]:
        found[group] += 1
        return {"state": "PENDING" if group.startswith("no") else "CREATED"}

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda refs, **_: ([], refs), kill=lambda actor: None))
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "remove_placement_group", lambda group: None)
    return found


def test_each_is_asked_for_its_slot_once_and_those_without_are_given_up(asked: Counter[str]) -> None:
    ours, now = Newcomers(None), time.monotonic()
    ours._all = [Newcomer(None, group, None, group, now - 1, now + 60) for group in ("a", "no slot", "b")]  # type: ignore[arg-type]
    assert ours.look() == [NO_ROOM]
    assert [ours.look() for _ in range(9)] == [[]] * 9
    assert len(ours) == 2
    assert asked == {"a": 1, "no slot": 1, "b": 1}
