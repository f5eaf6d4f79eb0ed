"""Data sets in a ratio: the order is that of a reference, and every step has the ratio in expectation."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ray_app.plan.hashing import hash_array, key, mix_array, permutation
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Mixture, Plan

Files = list[tuple[str, list[int]]]
FILES: Files = [("0/0.parquet", [7, 5]), ("0/1.parquet", [9, 0, 4]), ("1/0.parquet", [2, 3]), ("2/0.parquet", [1])]
WEIGHTS = [5, 2, 1]


def generate(seed: int) -> tuple[Files, list[int]]:
    """Returns the row groups and weights of up to twelve data sets."""
    rng = np.random.default_rng(seed)
    files = [
        (f"{number}/{file}.parquet", [1, *rng.integers(0, 12, rng.integers(0, 4)).tolist()])
        for number in range(rng.integers(1, 13))
        for file in range(rng.integers(1, 4))
    ]
    return sorted(files), rng.integers(1, 10, 1 + max(int(path.split("/")[0]) for path, _ in files)).tolist()


def plan_of(files: Files = FILES, weights: list[int] = WEIGHTS, logical_workers: int = 3, **fields: Any) -> Plan:
    fields = {"seed": 7, "global_batch_size": 4 * logical_workers, "shuffle_window_rows": 12, **fields}
    manifest = Manifest.from_files(files)
    return Plan(manifest=manifest, logical_workers=logical_workers, mixture=Mixture.of(manifest, weights), **fields)


def reference(files: Files, weights: list[int], plan: Plan, epoch: int) -> list[tuple[int, int]]:
    """Returns the data set and the row of each use in an epoch before it is cut and shuffled, by lists alone."""
    groups: list[list[tuple[int, list[int]]]] = [[] for _ in weights]
    position = 0
    for path, sizes in files:
        identity = mix_array(Manifest.from_files([(path, sizes)]).path_hash)[0]
        for index, size in enumerate(sizes):
            with np.errstate(over="ignore"):
                rank = int(hash_array(key(1, plan.seed, epoch), np.array([identity + np.uint64(index)]))[0])
            groups[int(path.split("/")[0])].append((rank, list(range(position, position + size))))
            position += size
    streams = [[row for _, rows in sorted(parts) for row in rows] for parts in groups]
    uses, used = list[tuple[int, int]](), [0] * len(weights)
    while any(count < len(rows) for count, rows in zip(used, streams, strict=True)):
        # Of the data sets that have had less than their share after the next row, the one with the earliest row at
        # which its share is one row more is next; of equal ones that with the smallest weight.
        shares = [Fraction(weight, sum(weights)) for weight in weights]
        behind = [i for i, share in enumerate(shares) if used[i] < share * (len(uses) + 1)]
        source = min(behind, key=lambda i: (math.ceil((used[i] + 1) / shares[i]), weights[i]))
        uses.append((source, streams[source][used[source] % len(streams[source])]))
        used[source] += 1
    return uses


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_the_rows_are_those_of_a_reference(seed: int | None) -> None:
    files, weights = (FILES, WEIGHTS) if seed is None else generate(seed)
    plan = plan_of(files, weights, logical_workers=1 + (seed or 0) % 3)
    for epoch in range(2):
        order, uses = plan.epoch(epoch), reference(files, weights, plan, epoch)
        assert plan.rows_per_epoch == len(uses)
        share, rest = divmod(len(uses), plan.logical_workers)
        ends = [worker * share + min(worker, rest) for worker in range(plan.logical_workers + 1)]
        for worker, (start, end) in enumerate(pairwise(ends)):
            rows = uses[start:end]
            for window in range(plan.windows_per_epoch):
                planned = [
                    row
                    for step in range(window * 3, min(plan.steps_per_epoch, window * 3 + 3))
                    for row in order.rows_at(worker, step).tolist()
                ]
                # A window is read one data set after the other, and then shuffled.
                read = [row for _, row in sorted(rows[12 * window : 12 * window + 12], key=lambda use: use[0])]
                shuffled = permutation(key(2, plan.seed, epoch, worker, window), len(read))
                assert planned == [read[i] for i in shuffled]


@pytest.mark.parametrize("seed", range(12))
def test_each_row_is_used_and_each_window_has_the_ratio(seed: int) -> None:
    files, weights = generate(seed)
    plan = plan_of(files, weights)
    mixture = plan.mixture
    assert mixture is not None
    uses, repeats = Counter[int](), set[tuple[int, int]]()
    for worker in range(3):
        for window in range(plan.windows_per_epoch):
            order = plan.epoch(1)
            rows = order.stored_positions(worker, window)[order.window_order(worker, window)]
            repeat = order.window_repeats(worker, window)
            assert isinstance(repeat, np.ndarray)
            uses.update(rows.tolist())
            repeats |= set(zip(rows.tolist(), repeat.tolist(), strict=True))
            source = mixture.of_group[np.searchsorted(plan.manifest.first_row, rows, side="right") - 1]
            shares = np.bincount(source, minlength=len(weights)) - len(rows) * np.array(weights) / sum(weights)
            assert np.abs(shares).max() < 2
    for row in range(plan.rows_per_epoch + 1):
        assert all(abs(n - row * w / sum(weights)) < 1 for n, w in zip(mixture.rows_before(row), weights, strict=True))
    assert len(repeats) == uses.total() == plan.rows_per_epoch
    source_of_row = np.repeat(mixture.of_group, plan.manifest.rows)
    counts = [[uses[row] for row in np.flatnonzero(source_of_row == source)] for source in range(len(weights))]
    # The rows of one data set are used once, and the uses of two rows of any data set differ by one at most.
    assert any(set(rows) == {1} for rows in counts)
    assert all(max(rows) - min(rows) <= 1 <= min(rows) for rows in counts)


def test_an_epoch_is_described() -> None:
    assert plan_of().describe_uses(["a", "b", "c"]) == (
        "weighted: a pass over the data uses 40 rows: 25 of a (1 per row), 10 of b (2 per row), 5 of c (5 per row)"
    )
    assert plan_of(weights=[10, 4, 2]).epoch(3).rows_at(1, 2).tolist() == plan_of().epoch(3).rows_at(1, 2).tolist()


def test_each_step_has_the_ratio_in_expectation() -> None:
    plan = plan_of(logical_workers=2, shuffle_window_rows=16, global_batch_size=8)
    counts = np.zeros((plan.full_steps, 3))
    for epoch in range(600):
        order = plan.epoch(epoch)
        for step in range(plan.full_steps):
            rows = np.concatenate([order.rows_at(worker, step) for worker in range(2)])
            counts[step] += np.bincount(np.searchsorted([25, 30], rows, side="right"), minlength=3)
    # The standard error of a share is below 0.8 %.
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - np.array([5, 2, 1]) / 8).max() < 0.035
