"""The micro-batches of steps that are gathered at once: each as if it had been gathered alone, in values, in memory and
for autograd.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ray_app.data import windows as windows_module
from ray_app.data.local_readers import Decoded
from ray_app.data.windows import CachedWindows, MicroBatch, Window
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import EpochOrder, Plan
from ray_app.task.ragged import Ragged

ROWS, MICRO, STEPS = 107, 8, 14
EVEN = {"pixels": np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 4, 4), "label": np.arange(ROWS)}
UNEVEN = EVEN | {"flag": np.arange(ROWS, dtype=np.uint8)}
"""Eight rows of a field are eight bytes: the second step of a block would begin where no tensor of its own does."""
RAGGED = EVEN | {"words": Ragged.of([np.arange(1 + row % 5) for row in range(ROWS)], np.int64)}


def order() -> EpochOrder:
    return Plan(Manifest.from_files([("all", [ROWS])]), 3, 1, MICRO, ROWS + MICRO).epoch(0)


def window_of(fields: Any, reasons: dict[int, str] | None = None) -> Window:
    return CachedWindows(Decoded(fields, reasons or {})).take(order(), 0, 0)


class Calls:
    """How many calls of Python are made in a context."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.number += event in ("call", "c_call")


def told(batch: MicroBatch) -> list[Any]:
    tensors = {
        name: (values.dtype, tuple(values.shape), values.stride(), values.tolist())
        for name, values in batch.fields.items()
    }
    return [
        batch.rows,
        tensors,
        batch.keys.tolist(),
        batch.row_hash,
        batch.positions.tolist(),
        dict(batch.bad),
        batch.num_skipped,
    ]


def alone(window: Window) -> list[MicroBatch]:
    return [batch for step in range(STEPS) for batch in window.micro_batches(range(step, step + 1))]


@pytest.mark.parametrize("sizes", [(14,), (5, 9), (1, 13)], ids=str)
@pytest.mark.parametrize(
    ("fields", "reasons", "is_at_once"),
    [(EVEN, {}, True), (UNEVEN, {}, False), (RAGGED, {}, False), (EVEN, {40: "unreadable"}, False)],
    ids=["even", "uneven", "ragged", "bad"],
)
def test_steps_gathered_at_once_are_those_gathered_alone(
    fields: Any, reasons: dict[int, str], is_at_once: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, window, first = (
        [told(batch) for batch in alone(window_of(fields, reasons))],
        window_of(fields, reasons),
        0,
    )
    assert expected[-1][0] == ROWS % MICRO, "the last one is not whole"
    number, gathered = itertools.count(), windows_module.gather_rows
    monkeypatch.setattr(windows_module, "gather_rows", lambda *args: next(number) >= 0 and gathered(*args))
    found = list[MicroBatch]()
    for size in sizes:
        found += window.micro_batches(range(first, first + size))
        first += size
    assert [told(batch) for batch in found] == expected
    assert next(number) == (len(sizes) if is_at_once else STEPS), "only what may be gathered at once is"


@pytest.mark.parametrize("fields", [EVEN, UNEVEN, RAGGED], ids=["even", "uneven", "ragged"])
def test_they_begin_in_memory_where_a_tensor_of_its_own_does(fields: Any) -> None:
    """Kernels may sum in another order where values lie otherwise, and which steps are gathered at once depends on
    where a run went on.
    """
    batches = window_of(fields).micro_batches(range(STEPS))
    assert {values.data_ptr() % 64 for batch in batches for values in batch.fields.values()} == {0}


def test_a_block_costs_what_it_did() -> None:
    """Most steps gather nothing, so `test_step_cost.py` does not see it. Who makes it dearer has to change these
    numbers.
    """
    window, found = window_of(EVEN), {}
    for name, steps in {"a block of 12": range(12), "one": range(12, 13)}.items():
        with Calls() as calls:
            window.micro_batches(steps)
        found[name] = calls.number
    assert found == {"a block of 12": 125, "one": 19}


@pytest.mark.parametrize(("min_steps", "max_bytes"), [(3, 0), (3, 1 << 20)], ids=["the first", "all"])
def test_prepared_steps_are_those_gathered_later(
    min_steps: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several blocks, of which one that is kept keeps no more than its own."""
    monkeypatch.setattr(windows_module, "BLOCK_BYTES", 4 * MICRO * (64 + 8))
    window = window_of(EVEN).prepare(min_steps, max_bytes)
    assert window.is_prepared == (max_bytes > 0)
    found = window.micro_batches(range(2)) + window.micro_batches(range(2, STEPS))
    assert [told(batch) for batch in found] == [told(batch) for batch in alone(window_of(EVEN))]
    assert {batch.fields["pixels"].untyped_storage().nbytes() for batch in found[:2]} <= {
        3 * MICRO * 64,
        4 * MICRO * 64,
    }


def test_what_is_written_into_one_is_in_no_other() -> None:
    """Also what needs a gradient: autograd takes parts of one tensor for the same one."""
    first, second, *_ = (batch.fields["pixels"] for batch in window_of(EVEN).micro_batches(range(STEPS)))
    before, learned = second.clone(), torch.ones(4, 4, requires_grad=True)
    kept: Tensor = (second * learned).square()
    first[0] = learned
    assert (first.requires_grad, second.requires_grad) == (True, False)
    first.sum().backward()
    kept.sum().backward()
    assert torch.equal(second, before)
