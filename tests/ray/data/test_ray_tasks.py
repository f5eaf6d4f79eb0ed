"""Rows that kill their reader end the read with an error that names them; a single death is survived."""

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
from ray_app.data.bad_rows import Decode
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.ray_tasks import ActorPool, fetch_ray, map_in_actors, start_memory_cache
from ray_app.data.reader import POSITION, Reader, RowSource, describe_spec, plan_all_reads
from ray_app.errors import ProcessDiedError
from ray_app.ingest.ingest import run_on_cluster

pytestmark = pytest.mark.usefixtures("ray_cluster")


@dataclass(frozen=True)
class KillingDecode:
    """Kills the process that decodes a row, a number of times.

    Args:
        row: The row that kills.
        times: Number of kills.
        folder: Folder in which each death leaves a file.
        signal: Signal that kills the process.
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


@pytest.mark.parametrize(("group", "message"), [(10, ROWS), (60, SLICED)], ids=["Ray Data", "slices"])
def test_a_row_that_kills_its_reader_is_named_in_the_error(
    tmp_path: Path, deaths: Path, group: int, message: str
) -> None:
    dataset = dataset_of(tmp_path, group=group)
    with pytest.raises(ProcessDiedError) as error:
        list(fetch_ray(reader_of(dataset, KillingDecode(35, 99, deaths)), plan_all_reads(dataset.manifest, 10)))
    assert str(error.value).startswith(message)
    assert not error.value.retryable
    assert 3 <= len(list(deaths.iterdir())) <= 4, (
        "too many or too few deaths (Ray Data does not report the lost task, so a fourth is possible)"
    )


@pytest.mark.parametrize("group", [10, 60], ids=["Ray Data", "slices"])
def test_reads_succeed_after_two_deaths_of_the_reader(tmp_path: Path, deaths: Path, group: int) -> None:
    dataset = dataset_of(tmp_path, group=group)
    table = pa.concat_tables(
        fetch_ray(
            reader_of(dataset, KillingDecode(35, 2, deaths, signal.SIGKILL)), plan_all_reads(dataset.manifest, 10)
        )
    )
    assert numbers(table, "a") == numbers(table, POSITION) == list(range(60))
    assert len(list(deaths.iterdir())) == 2


def test_a_memory_cache_names_the_rows_that_kill_its_readers(tmp_path: Path, deaths: Path) -> None:
    dataset = dataset_of(tmp_path)
    cache = start_memory_cache(RowSource(reader_of(dataset, KillingDecode(35, 99, deaths)), dataset.manifest, 10))
    with pytest.raises(ProcessDiedError, match=r"part-0\.parquet, row group 3, rows 0 to 9"):
        cache.read()
    cache.end()


def test_a_memory_cache_that_dies_three_times_is_an_error(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)

    @dataclass(frozen=True)
    class KillsItsActor:
        def __reduce__(self) -> Any:
            return _kill_worker_process, ()

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            return rows

    cache = start_memory_cache(RowSource(reader_of(dataset, KillsItsActor()), dataset.manifest, 10))
    with pytest.raises(ProcessDiedError, match=r"died 3 times while it decoded the data set for data\.cache: memory"):
        cache.read()


def _kill_worker_process() -> Any:
    """Kills the process that unpickles the task, if it is a worker."""
    import ray

    if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        os.kill(os.getpid(), signal.SIGKILL)
    return dict


@dataclass
class Doubled:
    """An actor that dies with a row, or doubles the rows."""

    killing: KillingDecode | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        values = numbers(table, "a")
        if self.killing is not None and self.killing.row in values:
            self.killing.die()
        return pa.table({"first": [values[0]], "twice": [sum(2 * value for value in values)]})


@pytest.mark.parametrize("victim", ["the reader", "the actor"])
@pytest.mark.parametrize("times", [2, 99])
def test_a_part_that_kills_processes_is_tried_three_times(
    tmp_path: Path, deaths: Path, victim: str, times: int
) -> None:
    dataset = dataset_of(tmp_path)
    killing = KillingDecode(35, times, deaths)
    reader = reader_of(dataset, killing if victim == "the reader" else KillingDecode(-1, 0, deaths))
    specs = plan_all_reads(dataset.manifest, 10)
    pool = ActorPool(Doubled, (killing,) if victim == "the actor" else (), 1, 1, 0)
    results = map_in_actors(pool, reader, specs, lambda row: specs[row["first"] // 10])
    if times == 2:
        assert sorted((row["first"], row["twice"]) for row in results) == [(10 * i, 200 * i + 90) for i in range(6)]
    else:
        with pytest.raises(ProcessDiedError) as error:
            list(results)
        assert str(error.value).startswith(ROWS)
        assert len(list(deaths.iterdir())) <= 4


def test_an_input_that_kills_its_ingest_is_named_in_the_error(deaths: Path) -> None:
    killing = KillingDecode(3, 99, deaths)

    def work(number: int) -> int:
        if number == killing.row:
            killing.die()
        return number

    with pytest.raises(ProcessDiedError, match="A process died 3 times while it ingested 3 "):
        list(run_on_cluster(work, range(8)))
    assert len(list(deaths.iterdir())) == 3


def test_a_read_of_many_row_groups_is_described_briefly(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)
    [spec] = plan_all_reads(dataset.manifest, 60)
    assert describe_spec(spec, 1) == "part-0.parquet, row group 0, rows 0 to 9; and 5 more row groups"
