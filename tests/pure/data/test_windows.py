"""Micro-batches of steps that are gathered at once equal those gathered alone, in values, in memory and for
autograd.
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
from ray_app.data.reader import Decoded
from ray_app.data.windows import CachedWindows, MicroBatch, Window
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import EpochOrder, Plan
from ray_app.task.ragged import Ragged

ROWS = 107
MICRO = 8
STEPS = 14
EVEN = {"pixels": np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 4, 4), "label": np.arange(ROWS)}
UNEVEN = EVEN | {"flag": np.arange(ROWS, dtype=np.uint8)}
"""Eight rows of `flag` are eight bytes, so the second step of a block would not be aligned as a separate tensor is."""
RAGGED = EVEN | {"words": Ragged.of([np.arange(1 + row % 5) for row in range(ROWS)], np.int64)}


def epoch_order() -> EpochOrder:
    return Plan(Manifest.from_files([("all", [ROWS])]), 3, 1, MICRO, ROWS + MICRO).epoch(0)


def window_of(fields: Any, reasons: dict[int, str] | None = None) -> Window:
    return CachedWindows(Decoded(fields, reasons or {})).take(epoch_order(), 0, 0)


class CallCounter:
    """Counts the calls of Python and C functions in a context."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> CallCounter:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.number += event in ("call", "c_call")


def values_of(batch: MicroBatch) -> list[Any]:
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


def gather_alone(window: Window) -> list[MicroBatch]:
    return [batch for step in range(STEPS) for batch in window.micro_batches(range(step, step + 1))]


@pytest.mark.parametrize("sizes", [(14,), (5, 9), (1, 13)], ids=str)
@pytest.mark.parametrize(
    ("fields", "reasons", "is_at_once"),
    [(EVEN, {}, True), (UNEVEN, {}, False), (RAGGED, {}, False), (EVEN, {40: "unreadable"}, False)],
    ids=["even", "uneven", "ragged", "bad"],
)
def test_steps_gathered_at_once_equal_steps_gathered_alone(
    fields: Any, reasons: dict[int, str], is_at_once: bool, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [values_of(batch) for batch in gather_alone(window_of(fields, reasons))]
    window = window_of(fields, reasons)
    first = 0
    assert expected[-1][0] == ROWS % MICRO, "the last micro-batch should be smaller"
    counter, gather_rows = itertools.count(), windows_module.gather_rows
    monkeypatch.setattr(windows_module, "gather_rows", lambda *args: next(counter) >= 0 and gather_rows(*args))
    batches = list[MicroBatch]()
    for size in sizes:
        batches += window.micro_batches(range(first, first + size))
        first += size
    assert [values_of(batch) for batch in batches] == expected
    assert next(counter) == (len(sizes) if is_at_once else STEPS), (
        "steps were gathered at once that should be gathered alone, or the other way round"
    )


@pytest.mark.parametrize("fields", [EVEN, UNEVEN, RAGGED], ids=["even", "uneven", "ragged"])
def test_tensors_of_a_block_are_aligned_as_separate_tensors(fields: Any) -> None:
    """Kernels may sum in another order at another alignment, and which steps are gathered at once depends on
    the step at which a run resumed.
    """
    batches = window_of(fields).micro_batches(range(STEPS))
    assert {values.data_ptr() % 64 for batch in batches for values in batch.fields.values()} == {0}


@pytest.mark.exact_versions
def test_gathering_a_block_makes_a_fixed_number_of_calls() -> None:
    """Most steps gather nothing, so `test_step_cost.py` does not measure it; a change that makes a block more
    expensive has to change these numbers.
    """
    window, call_counts = window_of(EVEN), {}
    for name, steps in {"a block of 12": range(12), "one": range(12, 13)}.items():
        with CallCounter() as calls:
            window.micro_batches(steps)
        call_counts[name] = calls.number
    assert call_counts == {"a block of 12": 125, "one": 19}


@pytest.mark.parametrize(("min_steps", "max_bytes"), [(3, 0), (3, 1 << 20)], ids=["the first", "all"])
def test_prepared_steps_equal_steps_gathered_later(
    min_steps: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks are prepared, and a retained batch keeps the memory of its own block only."""
    monkeypatch.setattr(windows_module, "BLOCK_BYTES", 4 * MICRO * (64 + 8))
    window = window_of(EVEN).prepare(min_steps, max_bytes)
    assert window.is_prepared == (max_bytes > 0)
    batches = window.micro_batches(range(2)) + window.micro_batches(range(2, STEPS))
    assert [values_of(batch) for batch in batches] == [values_of(batch) for batch in gather_alone(window_of(EVEN))]
    assert {batch.fields["pixels"].untyped_storage().nbytes() for batch in batches[:2]} <= {
        3 * MICRO * 64,
        4 * MICRO * 64,
    }


def test_a_write_into_one_batch_changes_no_other_batch() -> None:
    """Autograd would treat parts of one tensor as the same tensor."""
    first, second, *_ = (batch.fields["pixels"] for batch in window_of(EVEN).micro_batches(range(STEPS)))
    before, weight = second.clone(), torch.ones(4, 4, requires_grad=True)
    loss: Tensor = (second * weight).square()
    first[0] = weight
    assert (first.requires_grad, second.requires_grad) == (True, False)
    first.sum().backward()
    loss.sum().backward()
    assert torch.equal(second, before)
