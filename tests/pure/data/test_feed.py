"""The feed: every row exactly once, the same micro-batches for every world size and from every cursor, checked by what
arrives.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.data import feed as feed_module
from ray_app.data import prefetch as streamed_module
from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.feed import Feed, Upload
from ray_app.data.local_readers import choose_fetch, load_all
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.probes import probe
from ray_app.data.reader import Fetch, Reader, ReadSpec, RowSource, fetch_in_process
from ray_app.data.windows import CachedWindows, MicroBatch, Window, Windows
from ray_app.errors import BadRowError, DataError
from ray_app.plan.assignment import logical_workers_of
from ray_app.plan.order import Cursor, Plan
from tests.support.local_world import feed_of, write_images

EPOCHS = 2
COLUMNS = ["image", "id"]
CPU = torch.device("cpu")


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": rows["image"], "id": rows["id"]}


def source_of(dataset: Dataset, plan: Plan, task_rows: int, decode: Decode = decode) -> RowSource:
    fields = probe(dataset, COLUMNS, decode)
    return RowSource(Reader(dataset.root, COLUMNS, decode, fields), plan.manifest, task_rows)


def streamed(
    dataset: Dataset, plan: Plan, cursor: Cursor, played: range, fetch: Fetch = fetch_in_process, task_rows: int = 5
) -> Windows:
    return StreamedWindows(plan, cursor, played, EPOCHS, fetch, source_of(dataset, plan, task_rows))


def threaded(dataset: Dataset, plan: Plan, cursor: Cursor, played: range) -> Windows:
    return streamed(dataset, plan, cursor, played, choose_fetch(2, fetch_in_process))


def cached(dataset: Dataset, plan: Plan, cursor: Cursor, played: range) -> Windows:
    del cursor, played
    return CachedWindows(load_all(fetch_in_process, source_of(dataset, plan, 6)))


ALL = [streamed, threaded, cached]
Open = Callable[[Dataset, Plan, Cursor, range], Windows]
Place = tuple[int, int, int]
"""Epoch, step and logical worker of a micro-batch."""


def deliver(
    dataset: Dataset, plan: Plan, open_windows: Open, world_size: int, start: Cursor = Cursor()
) -> dict[Place, MicroBatch]:
    """What the feeds of all ranks deliver from a cursor to the end of the run, and checks the tensors against the
    positions.
    """
    found: dict[Place, MicroBatch] = {}
    for rank in range(world_size):
        played = logical_workers_of(rank, world_size, plan.logical_workers)
        feed = feed_of(plan, start, played, open_windows(dataset, plan, start, played))
        cursor = start
        while cursor < Cursor(EPOCHS, 0):
            batches = feed.next()
            assert [batch.logical_worker for batch in batches] == list(played)
            assert [batch.rows for batch in batches] == [plan.rows_of_step(cursor.step)[v] for v in played]
            for batch in batches:
                assert batch.fields["id"].tolist() == batch.positions.tolist(), (
                    "the tensors are of other rows than the feed says"
                )
                assert len(batch.fields["image"]) == len(batch.keys) == batch.rows
                place = (cursor.epoch, cursor.step, batch.logical_worker)
                assert place not in found
                found[place] = batch
            cursor = cursor.next(plan.steps_per_epoch)
        feed.close()
    return found


def run_epoch(feed: Feed, plan: Plan) -> None:
    for _ in range(plan.steps_per_epoch):
        feed.next()


def assert_same(some: dict[Place, MicroBatch], others: dict[Place, MicroBatch]) -> None:
    """Equal places have equal rows, pixels, keys and hashes."""
    assert some.keys() == others.keys()
    for place, batch in some.items():
        other = others[place]
        assert batch.positions.tolist() == other.positions.tolist(), place
        assert torch.equal(batch.fields["image"], other.fields["image"]), place
        assert torch.equal(batch.keys, other.keys), place
        assert batch.row_hash == other.row_hash, place


def assert_exactly_once(plan: Plan, delivered: dict[Place, MicroBatch]) -> None:
    """Every epoch counts every row once, or with `drop` at most once and less than a step short."""
    for epoch in range(EPOCHS):
        counted: Counter[int] = Counter()
        for place, batch in delivered.items():
            if place[0] == epoch:
                counted.update(batch.fields["id"].tolist())
        assert sum(counted.values()) == plan.rows_per_epoch
        everything = Counter(range(plan.manifest.num_rows))
        if plan.keep_last:
            assert counted == everything
        else:
            assert counted <= everything
            assert counted.total() > everything.total() - plan.global_batch_size - plan.logical_workers


def plan_of(
    dataset: Dataset,
    *,
    logical_workers: int = 4,
    batch: int = 12,
    window: int = 6,
    keep_last: bool = True,
    seed: int = 3,
) -> Plan:
    return Plan(dataset.manifest, seed, logical_workers, batch, window, keep_last)


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
def aligned(request: pytest.FixtureRequest) -> Iterator[None]:
    """These rows begin nowhere that is aligned, so that no two steps are gathered at once, unless that does not
    matter.
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
@pytest.mark.parametrize("keep_last", [True, False])
def test_every_row_exactly_once_on_every_world_size(datasets: dict[str, Dataset], shape: str, keep_last: bool) -> None:
    dataset = datasets[shape]
    plan = plan_of(dataset, keep_last=keep_last)
    if not plan.steps_per_epoch:
        assert not keep_last
        assert dataset.manifest.num_rows < plan.global_batch_size
        return
    first = deliver(dataset, plan, streamed, 1)
    assert_exactly_once(plan, first)
    for open_windows, size in itertools.product(ALL, (1, 2, 3, 4)):
        again = deliver(dataset, plan, open_windows, size)
        assert_exactly_once(plan, again)
        assert_same(first, again)


def test_the_feed_meets_the_plan(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)
    for (epoch, step, v), batch in deliver(dataset, plan, streamed, 3).items():
        assert batch.fields["id"].tolist() == plan.epoch(epoch).rows_at(v, step).tolist()


@pytest.mark.parametrize("open_windows", ALL)
@pytest.mark.parametrize(
    "window",
    [pytest.param(1, marks=pytest.mark.rest), 6, pytest.param(1000, marks=pytest.mark.rest)],
    ids="window{}".format,
)
def test_a_resume_at_every_step_on_other_workers_delivers_just_the_rest(
    datasets: dict[str, Dataset], open_windows: Open, window: int
) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=window)
    undisturbed = deliver(dataset, plan, open_windows, 2)
    assert plan.steps_per_epoch == 9
    for done in range(EPOCHS * plan.steps_per_epoch + 1):
        start = Cursor.at(done, plan.steps_per_epoch)
        rest = {place: batch for place, batch in undisturbed.items() if Cursor(*place[:2]) >= start}
        assert_same(rest, deliver(dataset, plan, open_windows, 1 + done % 4, start))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, Any]]:
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


@given(cases(), st.data())
@settings(max_examples=40, deadline=None)
def test_any_data_any_workers_any_cursor(case: tuple[list[list[int]], dict[str, Any]], data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        dataset = open_dataset(str(write_images(Path(folder) / "data", case[0])))
        plan = plan_of(dataset, **case[1])
        if not plan.steps_per_epoch:
            return
        sizes = st.integers(1, plan.logical_workers)
        first = deliver(dataset, plan, data.draw(st.sampled_from(ALL)), data.draw(sizes))
        assert_exactly_once(plan, first)
        start = Cursor.at(data.draw(st.integers(0, EPOCHS * plan.steps_per_epoch)), plan.steps_per_epoch)
        rest = {place: batch for place, batch in first.items() if Cursor(*place[:2]) >= start}
        assert_same(rest, deliver(dataset, plan, data.draw(st.sampled_from(ALL)), data.draw(sizes), start))


@pytest.mark.parametrize("window", [6, 1000], ids="window{}".format)
def test_large_steps_are_gathered_ahead_and_are_the_same(
    datasets: dict[str, Dataset], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when every step is done twice, as after a worker was lost in it, and once by other workers."""
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=window)
    expected = deliver(dataset, plan, streamed, 1)
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.prefetch._PREPARED_BYTES", 0)
    submitted: list[int] = []
    gather = feed_module._gather

    def noted(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
        if threading.current_thread().name.startswith("gatherer"):
            submitted.extend(steps)
        return gather(windows, steps, upload)

    monkeypatch.setattr(feed_module, "_gather", noted)
    assert_same(expected, deliver(dataset, plan, streamed, 1))
    assert submitted, "nothing was gathered ahead"
    assert not any(step % plan.steps_per_window == 0 for step in submitted), (
        "it may wait for a window that nobody asked for yet"
    )
    feed = Feed(plan, lambda cursor, played: streamed(dataset, plan, cursor, played), CPU)
    found: dict[Place, MicroBatch] = {}
    cursor = Cursor()
    while cursor < Cursor(EPOCHS, 0):
        for played in (range(4), range(4), range(2)):
            feed.seek(cursor, played)
            found |= {(cursor.epoch, cursor.step, batch.logical_worker): batch for batch in feed.next()}
        cursor = cursor.next(plan.steps_per_epoch)
    feed.close()
    assert_same(expected, found)


def test_a_closed_feed_leaves_no_thread(datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.prefetch._PREPARED_BYTES", 0)
    before = set(threading.enumerate())
    plan = plan_of(datasets["prime and ragged"], window=1000)
    feed = Feed(plan, lambda cursor, played: streamed(datasets["prime and ragged"], plan, cursor, played), CPU)
    feed.seek(Cursor(), range(4))
    for _ in range(3):
        feed.next()
    assert set(threading.enumerate()) - before, "no thread has gathered"
    feed.close()
    assert not set(threading.enumerate()) - before


def test_a_step_above_the_bytes_of_a_block_is_gathered_alone(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_MAX_LARGE_BLOCK_BYTES", 1)
    monkeypatch.setattr(feed_module, "BLOCK_BYTES", 1)
    monkeypatch.setattr(feed_module, "_MIN_THREAD_BYTES", 0)
    monkeypatch.setattr("ray_app.data.prefetch._PREPARED_BYTES", 0)
    blocks: list[int] = []
    gather = feed_module._gather

    def noted(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
        blocks.append(len(steps))
        return gather(windows, steps, upload)

    monkeypatch.setattr(feed_module, "_gather", noted)
    deliver(datasets["prime and ragged"], plan_of(datasets["prime and ragged"], window=1000), streamed, 1)
    assert set(blocks) == {1}


@pytest.mark.parametrize("open_windows", ALL)
@pytest.mark.parametrize(("every", "steps"), [(3, 5), (5, 1)], ids=["back", "ahead"])
def test_going_to_a_window_that_does_not_come_next(
    datasets: dict[str, Dataset], open_windows: Open, every: int, steps: int
) -> None:
    """Back as local steps do, which a lost worker takes back to the last average, in the epoch before at times; ahead
    behind what others did while this one was frozen.
    """
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)
    assert plan.steps_per_window < 5
    expected = deliver(dataset, plan, open_windows, 1)
    feed = Feed(plan, lambda cursor, played: open_windows(dataset, plan, cursor, played), CPU)
    found: dict[Place, MicroBatch] = {}
    places = [Cursor.at(step, plan.steps_per_epoch) for step in range(EPOCHS * plan.steps_per_epoch)]
    for first in range(0, len(places) - steps, every):
        feed.seek(places[first], range(4))
        for cursor in places[first : first + steps]:
            found |= {(cursor.epoch, cursor.step, batch.logical_worker): batch for batch in feed.next()}
    feed.close()
    assert_same({place: expected[place] for place in found}, found)


def test_augmentation_keys_belong_to_epoch_and_row_only(datasets: dict[str, Dataset]) -> None:
    """The same row has the same key under another L, batch and window; another key in the next epoch and for another
    seed.
    """
    dataset = datasets["prime and ragged"]

    def keys(**changes: Any) -> dict[tuple[int, int], int]:
        delivered = deliver(dataset, plan_of(dataset, **changes), streamed, 1)
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


def test_row_hashes_sum_to_the_same_whatever_the_order(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    sums = set()
    for logical_workers, batch in ((4, 12), (2, 10), (1, 7)):
        delivered = deliver(dataset, plan_of(dataset, logical_workers=logical_workers, batch=batch), streamed, 1)
        for epoch in range(EPOCHS):
            sums.add(sum(b.row_hash for place, b in delivered.items() if place[0] == epoch) % 2**64)
    assert len(sums) == 1
    one = [b.row_hash for b in deliver(dataset, plan_of(dataset, logical_workers=1, batch=1), cached, 1).values()]
    assert len(set(one)) == dataset.manifest.num_rows, "two rows have one hash"


def repeated_row(table: pa.Table) -> list[pa.Table]:
    return [table.slice(0, 1), table]


def skipped_row(table: pa.Table) -> list[pa.Table]:
    return [table.slice(1)]


def swapped_rows(table: pa.Table) -> list[pa.Table]:
    return [table.take(list(reversed(range(table.num_rows))))]


def other_rows(table: pa.Table) -> list[pa.Table]:
    shifted = np.frombuffer(table.column("__position__").chunk(0).buffers()[1], dtype="<i8") + 1
    wrong = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(shifted), [None, pa.py_buffer(shifted)])
    return [table.set_column(table.schema.get_field_index("__position__"), table.schema.field("__position__"), wrong)]


def no_rows(table: pa.Table) -> list[pa.Table]:
    del table
    return []


@pytest.mark.parametrize("fault", [repeated_row, skipped_row, swapped_rows, other_rows, no_rows])
@pytest.mark.parametrize("at", [0, 2])
def test_a_source_that_delivers_other_rows_is_refused(
    datasets: dict[str, Dataset], fault: Callable[[pa.Table], list[pa.Table]], at: int
) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=6)

    def faulty(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for i, table in enumerate(fetch_in_process(reader, specs)):
            yield from fault(table) if i == at else [table]

    feed = feed_of(plan, Cursor(), range(4), streamed(dataset, plan, Cursor(), range(4), faulty))
    with pytest.raises(DataError, match=r"planned|too early"):
        run_epoch(feed, plan)
    feed.close()
    with pytest.raises(DataError, match=r"planned|Read \d+ rows of 103"):
        load_all(faulty, source_of(dataset, plan, 5))


def test_tables_of_any_size_are_cut_to_windows(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)

    def in_one(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        yield pa.concat_tables(fetch_in_process(reader, specs))

    def in_crumbs(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for table in fetch_in_process(reader, specs):
            yield table.slice(0, 0)
            yield from (table.slice(i, 1) for i in range(table.num_rows))

    first = deliver(dataset, plan, streamed, 1)
    for fetch in (in_one, in_crumbs):
        assert_same(first, deliver(dataset, plan, lambda d, p, c, r, fetch=fetch: streamed(d, p, c, r, fetch), 2))
    assert_same(first, deliver(dataset, plan, lambda d, p, c, r: streamed(d, p, c, r, task_rows=1000), 2))


def test_a_row_that_cannot_be_decoded_is_named_to_the_consumer(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset)

    def picky(rows: dict[str, Any]) -> dict[str, Any]:
        if 57 in rows["id"]:  # part-1, row group 0, row 3
            raise ValueError("unreadable")
        return decode(rows)

    windows = StreamedWindows(plan, Cursor(), range(4), 1, fetch_in_process, source_of(dataset, plan, 9, picky))
    feed = feed_of(plan, Cursor(), range(4), windows)
    with pytest.raises(BadRowError) as caught:
        run_epoch(feed, plan)
    feed.close()
    assert str(caught.value).startswith(
        "part-1.parquet, row group 0, row 3: ValueError: unreadable (test_feed.py, line "
    )


def test_it_reads_only_a_little_ahead_and_closes_in_the_middle(datasets: dict[str, Dataset]) -> None:
    dataset = datasets["prime and ragged"]
    plan = plan_of(dataset, window=3)  # a window per step
    read: list[ReadSpec] = []
    blocked = threading.Event()

    def counting(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        for spec in specs:
            read.append(spec)
            if len(read) == 1 + 2 * 4:  # queue of 4 windows, 4 taken, one in hand
                blocked.set()
            yield from reader.read(spec)

    windows = streamed(dataset, plan, Cursor(), range(4), counting, task_rows=3)
    feed = feed_of(plan, Cursor(), range(4), windows)
    feed.next()
    assert blocked.wait(10), "it does not read ahead"
    feed.close()
    assert sum(p.rows for spec in read for p in spec) <= 3 * (4 + 4 + 1 + 1), "it reads too far ahead"
    assert not [t for t in threading.enumerate() if t.name == "feed"]
    assert feed.wait_s > 0


def test_the_next_execution_is_started_before_the_last_windows_of_one_are_taken(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_module, "_TASKS_PER_EXECUTION", 8)
    dataset = datasets["small row groups"]
    plan = plan_of(dataset, logical_workers=1, batch=3, window=3)  # a window per step, a read task per window
    second = threading.Event()
    executions: list[int] = []

    def noted(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        executions.append(len(specs))
        if len(executions) == 2:
            second.set()
        yield from fetch_in_process(reader, specs)

    windows = streamed(dataset, plan, Cursor(), range(1), noted, task_rows=3)
    feed = feed_of(plan, Cursor(), range(1), windows)
    for _ in range(4):
        feed.next()
    assert second.wait(10), "nothing is read between two executions"
    feed.close()
    assert executions[:2] == [8, 8]
    assert not [t for t in threading.enumerate() if t.name.startswith(("feed", "next-execution"))]


def test_it_closes_while_the_next_execution_waits_for_the_cpu_of_the_present_one(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_module, "_TASKS_PER_EXECUTION", 8)
    dataset = datasets["small row groups"]
    plan = plan_of(dataset, logical_workers=1, batch=3, window=3)
    cpu, waits = threading.Semaphore(), threading.Event()

    def on_one_cpu(reader: Reader, specs: Any) -> Iterator[pa.Table]:
        if not cpu.acquire(blocking=False):
            waits.set()
            cpu.acquire()
        try:
            yield from fetch_in_process(reader, specs)
        finally:
            cpu.release()

    feed = feed_of(plan, Cursor(), range(1), streamed(dataset, plan, Cursor(), range(1), on_one_cpu, task_rows=3))
    for _ in range(4):
        feed.next()
    assert waits.wait(10), "the next execution was not started"
    closer = threading.Thread(target=feed.close, daemon=True)
    closer.start()
    closer.join(10)
    assert not closer.is_alive(), "closing waits for an execution that waits for the present one"


def test_a_window_lets_go_of_each_table_when_it_is_in_its_place(datasets: dict[str, Dataset]) -> None:
    """So a window is in memory once, not a second time in the blocks that it came in."""
    dataset = datasets["no rest"]
    plan = plan_of(dataset, logical_workers=1, window=36)
    given: list[weakref.ref[pa.Table]] = []
    alive: list[int] = []

    def noted(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
        for table in fetch_in_process(reader, specs):
            alive.append(sum(kept() is not None for kept in given))
            given.append(weakref.ref(table))
            yield table
            del table

    feed = feed_of(plan, Cursor(), range(1), streamed(dataset, plan, Cursor(), range(1), noted, task_rows=3))
    run_epoch(feed, plan)
    feed.close()
    assert len(given) >= 12
    assert max(alive) <= 2
