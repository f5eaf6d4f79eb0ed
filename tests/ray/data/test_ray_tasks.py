"""A process that dies of what it reads ends what waits for it, with the rows; one that dies by chance changes
nothing.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.memory_cache import start_memory_cache
from ray_app.data.ray_tasks import ActorPool, fetch_ray, map_in_actors
from ray_app.data.reader import POSITION, Decode, Reader, RowSource, describe_spec, plan_all_reads
from ray_app.errors import ProcessDiedError
from ray_app.ingest.ingest import run_on_cluster

pytestmark = pytest.mark.usefixtures("ray_cluster")


@dataclass(frozen=True)
class Deadly:
    """Kills the process that decodes a row, some times.

    Args:
        row: Of which row.
        times: How often.
        folder: Where each death leaves a file.
        signal: By which signal.
    """

    row: int
    times: int
    folder: Path
    signal: int = signal.SIGSEGV

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        if self.row in rows["a"]:
            self.die()
        return {"a": rows["a"]}

    def die(self) -> None:
        if len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), self.signal)


@pytest.fixture
def deaths(tmp_path: Path) -> Path:
    (tmp_path / "deaths").mkdir()
    return tmp_path / "deaths"


def dataset_of(folder: Path, rows: int = 60, group: int = 10) -> Dataset:
    (folder / "data").mkdir()
    pq.write_table(pa.table({"a": np.arange(rows)}), folder / "data" / "part-0.parquet", row_group_size=group)
    return open_dataset(str(folder / "data"))


def reader_of(dataset: Dataset, decode: Decode) -> Reader:
    return Reader(dataset.root, ["a"], decode, {"a": ArraySpec("<i8", ())})


def numbers(table: pa.Table, name: str) -> list[int]:
    return np.frombuffer(table[name].combine_chunks().buffers()[1], "<i8").tolist()


ROWS = "A process died 3 times while it read part-0.parquet, row group 3, rows 0 to 9 "
SLICED = "A process died 3 times while it read part-0.parquet, row group 0, rows 30 to 39 "


@pytest.mark.parametrize(("group", "said"), [(10, ROWS), (60, SLICED)], ids=["Ray Data", "slices"])
def test_a_row_that_kills_its_reader_ends_the_reading_with_its_place(
    tmp_path: Path, deaths: Path, group: int, said: str
) -> None:
    dataset = dataset_of(tmp_path, group=group)
    with pytest.raises(ProcessDiedError) as error:
        list(fetch_ray(reader_of(dataset, Deadly(35, 99, deaths)), plan_all_reads(dataset.manifest, 10)))
    assert str(error.value).startswith(said)
    assert not error.value.retryable
    assert 3 <= len(list(deaths.iterdir())) <= 4, "Ray Data does not say which task it lost"


@pytest.mark.parametrize("group", [10, 60], ids=["Ray Data", "slices"])
def test_readers_that_die_twice_change_nothing(tmp_path: Path, deaths: Path, group: int) -> None:
    dataset = dataset_of(tmp_path, group=group)
    table = pa.concat_tables(
        fetch_ray(reader_of(dataset, Deadly(35, 2, deaths, signal.SIGKILL)), plan_all_reads(dataset.manifest, 10))
    )
    assert numbers(table, "a") == numbers(table, POSITION) == list(range(60))
    assert len(list(deaths.iterdir())) == 2


def test_the_actor_of_a_memory_cache_tells_of_what_its_readers_died(tmp_path: Path, deaths: Path) -> None:
    dataset = dataset_of(tmp_path)
    cache = start_memory_cache(RowSource(reader_of(dataset, Deadly(35, 99, deaths)), dataset.manifest, 10))
    with pytest.raises(ProcessDiedError, match=r"part-0\.parquet, row group 3, rows 0 to 9"):
        cache.read()
    cache.end()


def test_the_actor_of_a_memory_cache_that_dies_three_times_is_given_up(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)

    @dataclass(frozen=True)
    class EndsItsActor:
        def __reduce__(self) -> Any:
            return _end_of_an_actor, ()

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            return rows

    cache = start_memory_cache(RowSource(reader_of(dataset, EndsItsActor()), dataset.manifest, 10))
    with pytest.raises(ProcessDiedError, match=r"died 3 times while it decoded the data set for data\.cache: memory"):
        cache.read()


def _end_of_an_actor() -> Any:
    """Ends the process that unpickles it, if that is no driver."""
    import ray

    if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        os.kill(os.getpid(), signal.SIGKILL)
    return dict


@dataclass
class Doubled:
    """An actor's class: dies with a row, or doubles it."""

    deadly: Deadly | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        found = numbers(table, "a")
        if self.deadly is not None and self.deadly.row in found:
            self.deadly.die()
        return pa.table({"first": [found[0]], "twice": [sum(2 * each for each in found)]})


@pytest.mark.parametrize("dies", ["the reader", "the actor"])
@pytest.mark.parametrize("times", [2, 99])
def test_parts_that_kill_are_tried_three_times(tmp_path: Path, deaths: Path, dies: str, times: int) -> None:
    dataset = dataset_of(tmp_path)
    deadly = Deadly(35, times, deaths)
    reader = reader_of(dataset, deadly if dies == "the reader" else Deadly(-1, 0, deaths))
    specs = plan_all_reads(dataset.manifest, 10)
    pool = ActorPool(Doubled, (deadly,) if dies == "the actor" else (), 1, 1, 0)
    flow = map_in_actors(pool, reader, specs, lambda found: specs[found["first"] // 10])
    if times == 2:
        assert sorted((found["first"], found["twice"]) for found in flow) == [(10 * i, 200 * i + 90) for i in range(6)]
    else:
        with pytest.raises(ProcessDiedError) as error:
            list(flow)
        assert str(error.value).startswith(ROWS)
        assert len(list(deaths.iterdir())) <= 4


def test_an_input_that_kills_its_ingest_is_named(deaths: Path) -> None:
    deadly = Deadly(3, 99, deaths)

    def work(number: int) -> int:
        if number == deadly.row:
            deadly.die()
        return number

    with pytest.raises(ProcessDiedError, match="A process died 3 times while it ingested 3 "):
        list(run_on_cluster(work, range(8)))
    assert len(list(deaths.iterdir())) == 3


def test_rows_of_many_row_groups_are_named_in_brief(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)
    [spec] = plan_all_reads(dataset.manifest, 60)
    assert describe_spec(spec, 1) == "part-0.parquet, row group 0, rows 0 to 9; and 5 more row groups"
