"""Reads in threads of this process, and the loading of a whole data set into memory.

A worker that decodes rows in its own process reads in threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Columns
from ray_app.data.bad_rows import read_reasons
from ray_app.data.reader import Fetch, Reader, ReadSpec, RowSource, SliceReader, check_positions, plan_all_reads
from ray_app.errors import DataError
from ray_app.task.ragged import Field


def choose_fetch(threads: int, default: Fetch) -> Fetch:
    """Returns a `Fetch` that reads in `threads` threads of this process, or `default` where `threads` is 0."""
    return partial(fetch_in_threads, threads=threads) if threads else default


def fetch_in_threads(reader: Reader, specs: Sequence[ReadSpec], threads: int) -> Iterator[pa.Table]:
    """Runs read tasks concurrently in threads, which call `decode` at once, and yields their rows in order.

    The calling thread reads the slices of large row groups.
    """
    waiting: deque[Future[list[pa.Table]]] = deque()
    stop = threading.Event()
    with closing(SliceReader.of(reader)) as slices, ThreadPoolExecutor(threads, "reader") as pool:
        try:
            for spec in specs:
                spec_slices = [slices.take(span) for span in spec if span.group_rows]
                waiting.append(pool.submit(_read, reader, spec, spec_slices, stop))
                if len(waiting) > threads:
                    yield from _drain(waiting.popleft().result())
            while waiting:
                yield from _drain(waiting.popleft().result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _drain(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Yields the tables and removes each from the list, so that its memory is freed once it is consumed."""
    while tables:
        yield tables.pop(0)


def _read(reader: Reader, spec: ReadSpec, slices: list[pa.Table], stop: threading.Event) -> list[pa.Table]:
    """Returns all rows of a read task; returns early, with none, once `stop` is set and the result is not used."""
    remaining, tables = iter(slices), list[pa.Table]()
    for table in reader.read(spec, lambda _: next(remaining)):
        if stop.is_set():
            return []
        tables.append(table)
    return tables


@dataclass(frozen=True)
class Decoded:
    """A data set in memory, with the reasons of bad rows by manifest position if the reader skips these."""

    arrays: dict[str, Field]
    reasons: dict[int, str]


def load_all(fetch: Fetch, source: RowSource) -> Decoded:
    """Decodes a whole data set into memory; raises DataError if rows are missing or not the planned ones."""
    manifest = source.manifest
    columns = Columns(source.fields, manifest.num_rows)
    reasons: dict[int, str] = {}
    done = 0
    for table in fetch(source.reader, plan_all_reads(manifest, source.task_rows)):
        positions = np.arange(done, done + table.num_rows)
        check_positions(table, positions)
        reasons |= read_reasons(table, positions)
        columns.add(table)
        done += table.num_rows
    if done != manifest.num_rows:
        raise DataError(f"Read {done} rows of {manifest.num_rows}; the data set changed while it was read.")
    return Decoded(columns.all(), reasons)
