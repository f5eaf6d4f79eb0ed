"""The plan has every row once, for any shape of data and any number of logical workers, and never changes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.plan import assignment, hashing
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Cursor, Plan

files = st.lists(st.lists(st.integers(0, 40), max_size=6), min_size=1, max_size=5).filter(
    lambda f: sum(map(sum, f)) > 0
)


def manifest_of(rows: list[list[int]]) -> Manifest:
    return Manifest.from_files((f"part-{i}.parquet", groups) for i, groups in enumerate(rows))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    logical = draw(st.integers(1, 6))
    return Plan(
        manifest=manifest_of(draw(files)),
        seed=draw(st.integers(0, 2**40)),
        logical_workers=logical,
        global_batch_size=logical * draw(st.integers(1, 9)),
        shuffle_window_rows=draw(st.integers(1, 60)),
        keep_last=draw(st.booleans()),
    )


@given(plans(), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_every_row_is_planned_once_per_epoch(plan: Plan, epoch: int) -> None:
    order = plan.epoch(epoch)
    counts: Counter[int] = Counter()
    for step in range(plan.steps_per_epoch):
        sizes = []
        for v in range(plan.logical_workers):
            rows = order.rows_at(v, step)
            counts.update(rows.tolist())
            sizes.append(len(rows))
        assert sizes == plan.rows_of_step(step)
        assert sizes[0] == max(sizes) > 0, "logical worker 0 has fewer rows than another one"
    assert max(counts.values(), default=1) == 1
    assert sum(counts.values()) == plan.rows_per_epoch
    if plan.keep_last:
        assert counts == Counter(range(plan.manifest.num_rows))
    else:
        assert set(counts) <= set(range(plan.manifest.num_rows))
        assert plan.manifest.num_rows - sum(counts.values()) < plan.global_batch_size + plan.logical_workers


@given(plans(), st.integers(0, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_at_a_position_do_not_depend_on_earlier_calls(plan: Plan, epoch: int, data: st.DataObject) -> None:
    """The rows are the same in any order of calls, and for a process that has asked for no other position before."""
    positions = [(v, s) for s in range(plan.steps_per_epoch) for v in range(plan.logical_workers)]
    order = plan.epoch(epoch)
    from_start = {position: order.rows_at(*position).tolist() for position in positions}
    sample = data.draw(st.permutations(positions))[:20]
    other_order = plan.epoch(epoch)
    assert [other_order.rows_at(*position).tolist() for position in sample] == [
        from_start[position] for position in sample
    ]
    for position in sample[:2]:
        assert plan.epoch(epoch).rows_at(*position).tolist() == from_start[position]


def test_the_order_of_a_plan_never_changes() -> None:
    plan = Plan(manifest_of([[5, 7], [3], [11, 1]]), 7, 2, 4, 6)
    assert plan.epoch(1).group_order.tolist() == GROUP_ORDER
    assert [plan.epoch(1).rows_at(v, 0).tolist() for v in (0, 1)] == FIRST_STEP
    assert hashing.key(1, 2, 3) == FIXED_KEY


GROUP_ORDER = [4, 0, 1, 2, 3]
FIRST_STEP = [[4, 0], [15, 16]]
FIXED_KEY = 15020427595393229491


def test_epochs_and_seeds_have_different_orders() -> None:
    manifest = manifest_of([[50] * 8])
    orders = {
        tuple(Plan(manifest, seed, 1, 10, 100).epoch(e).rows_at(0, 0).tolist()) for seed in (0, 1) for e in (0, 1)
    }
    assert len(orders) == 4


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_every_logical_worker_is_assigned_once(case: tuple[int, int]) -> None:
    logical, world = case
    strided = [assignment.logical_workers_of(r, world, logical, strided=True) for r in range(world)]
    passes = [[block[i] for block in strided if i < len(block)] for i in range(assignment.count_passes(world, logical))]
    assert [v for logical_workers in passes for v in logical_workers] == list(range(logical)), (
        "the logical workers of a pass are not consecutive"
    )
    blocks = [assignment.logical_workers_of(r, world, logical) for r in range(world)]
    assert [v for block in blocks for v in block] == list(range(logical))
    assert max(map(len, blocks)) == assignment.count_passes(world, logical)
    assert min(map(len, blocks)) >= 1
    for block in blocks:
        nodes = assignment.subtrees(block, logical)
        assert [v for low, high in nodes for v in range(low, high)] == list(block)


def test_a_world_larger_than_the_logical_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run"):
        assignment.logical_workers_of(0, 5, 4)


@given(st.integers(1, 50), st.integers(0, 500))
def test_cursor_counts_steps(steps: int, done: int) -> None:
    cursor = Cursor()
    for _ in range(done):
        cursor = cursor.next(steps)
    assert cursor == Cursor.at(done, steps)


@given(files)
def test_a_manifest_and_its_digest_survive_json(rows: list[list[int]]) -> None:
    manifest = manifest_of(rows)
    again = Manifest.from_json(manifest.to_json())
    assert again.digest == manifest.digest
    assert again.rows.tolist() == manifest.rows.tolist()
    other = manifest_of([[*rows[0], 1], *rows[1:]])
    assert other.digest != manifest.digest


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_a_permutation_has_each_index_once(base: int, length: int) -> None:
    assert sorted(hashing.permutation(base, length).tolist()) == list(range(length))


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1))
def test_array_and_scalar_hashes_agree(values: list[int]) -> None:
    hashed = hashing.mix_array(np.array(values, dtype=np.uint64))
    assert hashed.tolist() == [hashing.mix(v) for v in values]


def test_the_mixer_is_splitmix64() -> None:
    """The reference has the first numbers of the published implementation for the state 1234567
    (https://prng.di.unimi.it/splitmix64.c).
    """
    reference = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(len(reference))]
    assert [hashing.mix(state) for state in states] == reference
    assert hashing.mix_array(np.array(states, np.uint64)).tolist() == reference


@given(plans(), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_without_shuffling_a_step_has_the_next_rows_of_the_manifest(shuffled: Plan, epoch: int) -> None:
    plan = replace(shuffled, shuffle=False)
    order, batch = plan.epoch(epoch), plan.global_batch_size
    for step in range(plan.steps_per_epoch):
        rows = [order.rows_at(v, step) for v in range(plan.logical_workers)]
        assert [len(part) for part in rows] == shuffled.rows_of_step(step)
        end = min((step + 1) * batch, plan.manifest.num_rows)
        assert np.concatenate(rows).tolist() == list(range(step * batch, end))
        for v, part in enumerate(rows):
            window = step // plan.steps_per_window
            assert set(part.tolist()) <= set(order.stored_positions(v, window).tolist())


def test_a_window_reads_no_empty_segment() -> None:
    plan = Plan(manifest_of([[0, 5, 0, 0, 7], [0], [3, 0, 2]]), 3, 2, 4, 4)
    windows = [(v, w) for v in range(2) for w in range(plan.windows_per_epoch)]
    for epoch in range(4):
        segments = [segment for v, w in windows for segment in plan.epoch(epoch).window_segments(v, w)]
        assert all(segment.rows > 0 for segment in segments)
        assert sum(segment.rows for segment in segments) == plan.manifest.num_rows
