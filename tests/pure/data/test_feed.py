"""The feed delivers every row exactly once, and the same micro-batches for every world size and from every cursor."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.data import feed as feed_module
from ray_app.data import windows as windows_module
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.feed import Feed, Upload
from ray_app.data.reader import Reader, ReadSpec, fetch_in_process, load_all
from ray_app.data.windows import CachedWindows, MicroBatch, StreamedWindows, Window
from ray_app.errors import BadRowError, DataError
from ray_app.plan.order import Cursor
from tests.support.delivery import (
    CPU,
    EPOCHS,
    OPENERS,
    BatchId,
    OpenWindows,
    assert_equal_batches,
    assert_exactly_once,
    decode,
    deliver,
    open_cached,
    open_streamed,
    open_threaded,
    plan_of,
    run_epoch,
    source_of,
)
from tests.support.local_world import feed_of, write_images
from tests.support.waiting import wait_until

SHAPES: dict[str, list[list[int]]] = {
    "prime and ragged": [[40, 1, 13], [29, 0], [20]],
    "small row groups": [[3] * 40],
    "a group of one row": [[1], [30, 1, 30], [1]],
    "files and groups without rows": [[], [0, 17, 0], [], [0], [24]],
    "fewer rows than a step": [[3], [4]],
    "fewer rows than logical workers": [[1], [1]],
    "one row": [[1]],
    "last step of 1, 1, 0, 0 rows": [[20, 6]],
    "last step of 1, 0, 0, 0 rows": [[25]],
    "no rest": [[24], [12]],
}
QUICK_SHAPES = ("prime and ragged", "files and groups without rows", "fewer rows than logical workers")


@pytest.fixture(scope="module", params=[64, 1], ids=["alone", "in blocks"], autouse=True)
def alignment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test with and without the alignment of tensors.

    The rows of these tests are not aligned to 64 bytes, so each step is gathered alone; without the requirement,
    several steps are gathered as one block.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ray_app.data.windows._ALIGNED_BYTES", request.param)
        yield


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    root = tmp_path_factory.mktemp("data")
    return {
        name: open_dataset(str(write_images(root / str(i), files))) for i, (name, files) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=() if name in QUICK_SHAPES else pytest.mark.rest) for name in SHAPES]
)
@pytest.mark.parametrize("keep_last", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_every_row_is_delivered_once_on_every_world_size(
    datasets: dict[str, Dataset], shape: str, keep_last: bool
) -> None:
    dataset = datasets[shape]
    plan = plan_of(dataset, keep_last=keep_last)
    if not plan.steps_per_epoch:
        assert not keep_last
        assert dataset.manifest.num_rows < plan.global_batch_size
        return
    first = deliver(dataset, plan, open_streamed, 1)
    assert_exactly_once(plan, first)
    for open_windows, size in itertools.product(OPENERS, (1, 2, 3, 4)):
        batches_by_id = deliver(dataset, plan, open_windows, size)
        assert_exactly_once(plan, batches_by_id)
        assert_equal_batches(first, batches_by_id)


def test_the_feed_delivers_the_rows_of_the_plan(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)
    for (epoch, step, v), batch in deliver(dataset, plan, open_streamed, 3).items():
        assert batch.fields["id"].tolist() == plan.epoch(epoch).rows_at(v, step).tolist()


@pytest.mark.parametrize(
    "open_windows", [pytest.param(open_streamed, marks=pytest.mark.rest), open_threaded, open_cached]
)
@pytest.mark.parametrize(
    "window",
    [pytest.param(1, marks=pytest.mark.rest), 6, pytest.param(1000, marks=pytest.mark.rest)],
    ids="window{}".format,
)
def test_a_resume_on_other_workers_delivers_only_the_remaining_steps(
    datasets: dict[str, Dataset], open_windows: OpenWindows, window: int
) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=window)
    undisturbed = deliver(dataset, plan, open_windows, 2)
    assert plan.steps_per_epoch == 9
    for done in range(EPOCHS * plan.steps_per_epoch + 1):
        start = Cursor.at(done, plan.steps_per_epoch)
        rest = {batch_id: batch for batch_id, batch in undisturbed.items() if Cursor(*batch_id[:2]) >= start}
        assert_equal_batches(rest, deliver(dataset, plan, open_windows, 1 + done % 4, start))


@st.composite
def data_sets_and_plans(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, Any]]:
    files = draw(
        st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=4).filter(
            lambda f: sum(map(sum, f)) > 0
        )
    )
    logical_workers = draw(st.integers(1, 5))
    return files, {
        "logical_workers": logical_workers,
        "batch": logical_workers * draw(st.integers(1, 5)),
        "window": draw(st.integers(1, 20)),
        "keep_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }


@given(data_sets_and_plans(), st.data())
@settings(max_examples=15, deadline=None)
def test_any_data_set_is_delivered_once_and_resumes_at_any_cursor(
    case: tuple[list[list[int]], dict[str, Any]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        dataset = open_dataset(str(write_images(Path(folder) / "data", case[0])))
        plan = plan_of(dataset, **case[1])
        if not plan.steps_per_epoch:
            return
        sizes = st.integers(1, plan.logical_workers)
        first = deliver(dataset, plan, data.draw(st.sampled_from(OPENERS)), data.draw(sizes))
        assert_exactly_once(plan, first)
        start = Cursor.at(data.draw(st.integers(0, EPOCHS * plan.steps_per_epoch)), plan.steps_per_epoch)
        rest = {batch_id: batch for batch_id, batch in first.items() if Cursor(*batch_id[:2]) >= start}
        assert_equal_batches(rest, deliver(dataset, plan, data.draw(st.sampled_from(OPENERS)), data.draw(sizes), start))


@pytest.mark.rest
@pytest.mark.parametrize("window", [6, 1000], ids="window{}".format)
def test_large_steps_are_gathered_ahead_and_equal_those_gathered_in_place(
    datasets: dict[str, Dataset], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second feed repeats every step, as after a lost worker, and once more on other logical workers."""
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=window)
    expected = deliver(dataset, plan, open_streamed, 1)
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.windows._PREPARED_BYTES", 0)
    submitted: list[int] = []
    gather = feed_module.gather_steps

    def record_steps(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
        if threading.current_thread().name.startswith("gatherer"):
            submitted.extend(steps)
        return gather(windows, steps, upload)

    monkeypatch.setattr(feed_module, "gather_steps", record_steps)
    assert_equal_batches(expected, deliver(dataset, plan, open_streamed, 1))
    assert submitted, "no step was gathered by the thread"
    feed = Feed(plan, lambda cursor, assigned: open_streamed(dataset, plan, cursor, assigned), CPU)
    batches_by_id: dict[BatchId, MicroBatch] = {}
    cursor = Cursor()
    while cursor < Cursor(EPOCHS, 0):
        for assigned in (range(4), range(4), range(2)):
            feed.seek(cursor, assigned)
            batches_by_id |= {(cursor.epoch, cursor.step, batch.logical_worker): batch for batch in feed.next()}
        cursor = cursor.next(plan.steps_per_epoch)
    feed.close()
    assert_equal_batches(expected, batches_by_id)


@pytest.mark.parametrize("is_read", [True, False])
def test_the_first_step_of_a_window_is_gathered_ahead_if_the_window_has_been_read(
    datasets: dict[str, Dataset], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(datasets["prime and ragged"], window=6)
    expected = deliver(datasets["prime and ragged"], plan, open_cached, 1)
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr(CachedWindows, "has_next", lambda self, count: is_read)
    in_place: set[int] = set()
    gather = feed_module.gather_steps

    def record_steps(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
        if not threading.current_thread().name.startswith("gatherer"):
            in_place.update(steps)
        return gather(windows, steps, upload)

    monkeypatch.setattr(feed_module, "gather_steps", record_steps)
    assert_equal_batches(expected, deliver(datasets["prime and ragged"], plan, open_cached, 1))
    firsts = set(range(0, plan.steps_per_epoch, plan.steps_per_window))
    assert len(firsts) > 1
    assert in_place == ({0} if is_read else firsts)


def test_windows_that_are_not_read_or_end_with_an_error_are_not_there(datasets: dict[str, Dataset]) -> None:
    dataset, goes_on = datasets["prime and ragged"], threading.Event()
    plan = plan_of(dataset, logical_workers=1, batch=3, window=3)

    def fetch_and_fail(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        goes_on.wait(10)
        yield from itertools.islice(fetch_in_process(reader, specs), 1)
        raise ValueError("unreadable")

    before = set(threading.enumerate())
    windows = StreamedWindows(plan, Cursor(), range(1), 1, fetch_and_fail, source_of(dataset, plan, 3), 2)
    assert not windows.has_next(1)
    goes_on.set()
    wait_until(lambda: windows.has_next(1))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert (windows.has_next(1), windows.has_next(2)) == (True, False)
    windows.close()


def test_a_closed_feed_leaves_no_thread(datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.windows._PREPARED_BYTES", 0)
    before = set(threading.enumerate())
    plan = plan_of(datasets["prime and ragged"], window=1000)
    feed = Feed(plan, lambda cursor, assigned: open_streamed(datasets["prime and ragged"], plan, cursor, assigned), CPU)
    feed.seek(Cursor(), range(4))
    for _ in range(3):
        feed.next()
    assert set(threading.enumerate()) - before, "the feed started no thread, so this test would show nothing"
    feed.close()
    assert not set(threading.enumerate()) - before


def test_a_step_above_the_bytes_of_a_block_is_gathered_alone(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_MAX_LARGE_BLOCK_BYTES", 1)
    monkeypatch.setattr(feed_module, "BLOCK_BYTES", 1)
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.windows._PREPARED_BYTES", 0)
    blocks: list[int] = []
    gather = feed_module.gather_steps

    def record_block(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
        blocks.append(len(steps))
        return gather(windows, steps, upload)

    monkeypatch.setattr(feed_module, "gather_steps", record_block)
    deliver(datasets["prime and ragged"], plan_of(datasets["prime and ragged"], window=1000), open_streamed, 1)
    assert set(blocks) == {1}


def test_a_seek_keeps_streams_that_go_on_there_and_closes_those_of_unwanted_logical_workers(
    datasets: dict[str, Dataset],
) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)
    opened, closed = list[range](), list[range]()

    class RecordedWindows(CachedWindows):
        def __init__(self, logical_workers: range) -> None:
            super().__init__(load_all(fetch_in_process, source_of(dataset, plan, 6)))
            self._logical_workers = logical_workers
            opened.append(logical_workers)

        def close(self) -> None:
            closed.append(self._logical_workers)

    feed = Feed(plan, lambda cursor, logical_workers: RecordedWindows(logical_workers), CPU)
    for step in range(EPOCHS * plan.steps_per_epoch):
        feed.seek(Cursor.at(step, plan.steps_per_epoch), range(4))
        feed.next()
    assert (opened, closed) == ([range(4)], [])
    for assigned in (range(2), range(4)):
        feed.seek(Cursor(), assigned)
    assert (opened, closed) == ([range(4), range(2), range(2, 4)], [range(4)])
    feed.close()


@pytest.mark.rest
@pytest.mark.parametrize("open_windows", OPENERS)
@pytest.mark.parametrize(("every", "steps"), [(3, 5), (5, 1)], ids=["back", "ahead"])
def test_seek_to_a_window_out_of_order_delivers_the_same_batches(
    datasets: dict[str, Dataset], open_windows: OpenWindows, every: int, steps: int
) -> None:
    """Local steps go back to the last average after a lost worker, sometimes into the epoch before; a worker
    that was frozen goes ahead to the step of the others.
    """
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)
    assert plan.steps_per_window < 5
    expected = deliver(dataset, plan, open_windows, 1)
    feed = Feed(plan, lambda cursor, assigned: open_windows(dataset, plan, cursor, assigned), CPU)
    batches_by_id: dict[BatchId, MicroBatch] = {}
    cursors = [Cursor.at(step, plan.steps_per_epoch) for step in range(EPOCHS * plan.steps_per_epoch)]
    for first in range(0, len(cursors) - steps, every):
        feed.seek(cursors[first], range(4))
        for cursor in cursors[first : first + steps]:
            batches_by_id |= {(cursor.epoch, cursor.step, batch.logical_worker): batch for batch in feed.next()}
    feed.close()
    assert_equal_batches({batch_id: expected[batch_id] for batch_id in batches_by_id}, batches_by_id)


def test_augmentation_keys_depend_on_seed_epoch_and_row_only(datasets: dict[str, Dataset]) -> None:
    """The keys do not depend on the number of logical workers, the batch and the window, but on the epoch and
    the seed.
    """
    dataset = datasets["prime and ragged"]

    def keys(**changes: Any) -> dict[tuple[int, int], int]:
        delivered = deliver(dataset, plan_of(dataset, **changes), open_streamed, 1)
        return {
            (epoch, position): value
            for (epoch, _, _), batch in delivered.items()
            for position, value in zip(batch.positions.tolist(), batch.keys.tolist(), strict=True)
        }

    first = keys()
    assert first == keys(logical_workers=2, batch=10, window=40)
    assert len(set(first.values())) == len(first) == EPOCHS * dataset.manifest.num_rows
    assert not set(first.values()) & set(keys(seed=4).values())
    assert min(first.values()) >= 0
    # Other keys would augment the rows of all runs in another way.
    assert (first[0, 0], first[1, 102]) == (618614072183754669, 5371836672407890873)


def test_the_sum_of_row_hashes_does_not_depend_on_the_order(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    sums = set()
    for logical_workers, batch in ((4, 12), (2, 10), (1, 7)):
        delivered = deliver(dataset, plan_of(dataset, logical_workers=logical_workers, batch=batch), open_streamed, 1)
        for epoch in range(EPOCHS):
            sums.add(sum(b.row_hash for batch_id, b in delivered.items() if batch_id[0] == epoch) % 2**64)
    assert len(sums) == 1
    hashes = [
        b.row_hash for b in deliver(dataset, plan_of(dataset, logical_workers=1, batch=1), open_cached, 1).values()
    ]
    assert len(set(hashes)) == dataset.manifest.num_rows, "two rows have one hash"


def repeat_row(table: pa.Table) -> list[pa.Table]:
    return [table.slice(0, 1), table]


def skip_row(table: pa.Table) -> list[pa.Table]:
    return [table.slice(1)]


def swap_rows(table: pa.Table) -> list[pa.Table]:
    return [table.take(list(reversed(range(table.num_rows))))]


def shift_rows(table: pa.Table) -> list[pa.Table]:
    positions = np.frombuffer(table.column("__position__").chunk(0).buffers()[1], dtype="<i8") + 1
    shifted_column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(positions), [None, pa.py_buffer(positions)])
    return [
        table.set_column(
            table.schema.get_field_index("__position__"), table.schema.field("__position__"), shifted_column
        )
    ]


def drop_rows(table: pa.Table) -> list[pa.Table]:
    del table
    return []


@pytest.mark.parametrize("fault", [repeat_row, skip_row, swap_rows, shift_rows, drop_rows])
@pytest.mark.parametrize("table_index", [0, 2])
def test_a_source_that_delivers_other_rows_is_refused(
    datasets: dict[str, Dataset], fault: Callable[[pa.Table], list[pa.Table]], table_index: int
) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=6)

    def fetch_with_fault(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for i, table in enumerate(fetch_in_process(reader, specs)):
            yield from fault(table) if i == table_index else [table]

    feed = feed_of(plan, Cursor(), range(4), open_streamed(dataset, plan, Cursor(), range(4), fetch_with_fault))
    with pytest.raises(DataError, match=r"A read task delivered|planned|too early"):
        run_epoch(feed, plan)
    feed.close()
    with pytest.raises(DataError, match=r"A read task delivered|planned|too early"):
        load_all(fetch_with_fault, source_of(dataset, plan, 5))


def test_tables_of_any_size_are_cut_to_windows(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)

    def fetch_one_table(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        yield pa.concat_tables(fetch_in_process(reader, specs))

    def fetch_single_rows(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for table in fetch_in_process(reader, specs):
            yield table.slice(0, 0)
            yield from (table.slice(i, 1) for i in range(table.num_rows))

    first = deliver(dataset, plan, open_streamed, 1)
    for fetch in (fetch_one_table, fetch_single_rows):
        assert_equal_batches(
            first, deliver(dataset, plan, lambda d, p, c, r, fetch=fetch: open_streamed(d, p, c, r, fetch), 2)
        )
    assert_equal_batches(first, deliver(dataset, plan, lambda d, p, c, r: open_streamed(d, p, c, r, task_rows=1000), 2))


def test_the_feed_names_a_row_that_cannot_be_decoded(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)

    def decode_but_row_57(rows: dict[str, Any]) -> dict[str, Any]:
        # Row 57 is row 3 of row group 0 of part-1.
        if 57 in rows["id"]:
            raise ValueError("unreadable")
        return decode(rows)

    windows = StreamedWindows(
        plan, Cursor(), range(4), 1, fetch_in_process, source_of(dataset, plan, 9, decode_but_row_57)
    )
    feed = feed_of(plan, Cursor(), range(4), windows)
    with pytest.raises(BadRowError) as caught:
        run_epoch(feed, plan)
    feed.close()
    assert str(caught.value).startswith(
        "part-1.parquet, row group 0, row 3: ValueError: unreadable (test_feed.py, line "
    )


def test_the_feed_reads_few_windows_ahead_and_closes_within_an_epoch(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    # With windows of 3 rows, each step has its own window.
    plan = plan_of(dataset, window=3)
    specs_read: list[ReadSpec] = []
    blocked = threading.Event()

    def fetch_and_count(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for spec in specs:
            specs_read.append(spec)
            # Four windows are in the queue, four were taken, and one is being read.
            if len(specs_read) == 1 + 2 * 4:
                blocked.set()
            yield from reader.read(spec)

    windows = open_streamed(dataset, plan, Cursor(), range(4), fetch_and_count, task_rows=3)
    feed = feed_of(plan, Cursor(), range(4), windows)
    feed.next()
    assert blocked.wait(10), "the feed does not read ahead"
    feed.close()
    assert sum(p.rows for spec in specs_read for p in spec) <= 3 * (4 + 4 + 1 + 1), "the feed reads too far ahead"
    assert not [t for t in threading.enumerate() if t.name == "feed"]
    assert feed.wait_s > 0


def test_the_next_execution_starts_before_the_present_one_is_consumed(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_module, "_TASKS_PER_EXECUTION", 8)
    dataset = datasets["small row groups"]
    # Each step has its own window, and each window its own read task.
    plan = plan_of(dataset, logical_workers=1, batch=3, window=3)
    second = threading.Event()
    executions: list[int] = []

    def fetch_and_record(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        executions.append(len(specs))
        if len(executions) == 2:
            second.set()
        yield from fetch_in_process(reader, specs)

    windows = open_streamed(dataset, plan, Cursor(), range(1), fetch_and_record, task_rows=3)
    feed = feed_of(plan, Cursor(), range(1), windows)
    for _ in range(4):
        feed.next()
    assert second.wait(10), "the second execution did not start while the first one was consumed"
    feed.close()
    assert executions[:2] == [8, 8]
    assert not [t for t in threading.enumerate() if t.name.startswith(("feed", "next-execution"))]


def test_close_does_not_wait_for_an_execution_that_waits_for_a_cpu(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows_module, "_TASKS_PER_EXECUTION", 8)
    dataset = datasets["small row groups"]
    plan = plan_of(dataset, logical_workers=1, batch=3, window=3)
    cpu, waits = threading.Semaphore(), threading.Event()

    def fetch_on_one_cpu(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        if not cpu.acquire(blocking=False):
            waits.set()
            cpu.acquire()
        try:
            yield from fetch_in_process(reader, specs)
        finally:
            cpu.release()

    feed = feed_of(
        plan, Cursor(), range(1), open_streamed(dataset, plan, Cursor(), range(1), fetch_on_one_cpu, task_rows=3)
    )
    for _ in range(4):
        feed.next()
    assert waits.wait(10), "the next execution was not started"
    closer = threading.Thread(target=feed.close, daemon=True)
    closer.start()
    closer.join(10)
    assert not closer.is_alive(), "close waits for an execution that waits for the CPU of the present one"


def test_a_window_releases_each_table_after_copying_it(datasets: dict[str, Dataset]) -> None:
    """A window is in memory once, and not a second time in the tables that it was read from."""
    dataset = datasets["no rest"]
    plan = plan_of(dataset, logical_workers=1, window=36)
    references: list[weakref.ref[pa.Table]] = []
    alive: list[int] = []

    def fetch_and_record(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
        for table in fetch_in_process(reader, specs):
            alive.append(sum(reference() is not None for reference in references))
            references.append(weakref.ref(table))
            yield table
            del table

    feed = feed_of(
        plan, Cursor(), range(1), open_streamed(dataset, plan, Cursor(), range(1), fetch_and_record, task_rows=3)
    )
    run_epoch(feed, plan)
    feed.close()
    assert len(references) >= 12
    assert max(alive) <= 2
