"""Planned reads by threads of this process, for a worker whose node reads for itself: rows are decoded where they are
used.

A whole data set, decoded into memory.
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


def choose_fetch(threads: int, otherwise: Fetch) -> Fetch:
    """What reads by so many threads of this process; `otherwise`, if there are to be none."""
    return partial(fetch_in_threads, threads=threads) if threads else otherwise


def fetch_in_threads(reader: Reader, specs: Sequence[ReadSpec], threads: int) -> Iterator[pa.Table]:
    """Reads as many tasks side by side as there are threads, and yields their rows in order; slices of large row groups
    are read here.

    Args:
        reader: Reads and decodes; `decode` is called by several threads at once.
        specs: Which rows.
        threads: How many, at least 1.
    """
    waiting: deque[Future[list[pa.Table]]] = deque()
    over = threading.Event()
    with closing(SliceReader.of(reader)) as slices, ThreadPoolExecutor(threads, "reader") as pool:
        try:
            for spec in specs:
                waiting.append(pool.submit(_read, reader, spec, [slices.take(span) for span in spec if span.of], over))
                if len(waiting) > threads:
                    yield from _each(waiting.popleft().result())
            while waiting:
                yield from _each(waiting.popleft().result())
        finally:
            over.set()
            pool.shutdown(cancel_futures=True)


def _each(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Lets go of each."""
    while tables:
        yield tables.pop(0)


def _read(reader: Reader, spec: ReadSpec, sliced: list[pa.Table], over: threading.Event) -> list[pa.Table]:
    """All rows of a task; none any more once nobody waits for them."""
    given, tables = iter(sliced), list[pa.Table]()
    for table in reader.read(spec, lambda _: next(given)):
        if over.is_set():
            return []
        tables.append(table)
    return tables


@dataclass(frozen=True)
class Decoded:
    """A whole data set in memory.

    Args:
        arrays: Every field in manifest order.
        reasons: Why rows are bad, by manifest position; only where the reader skips bad rows.
    """

    arrays: dict[str, Field]
    reasons: dict[int, str]


def load_all(fetch: Fetch, source: RowSource) -> Decoded:
    """Decodes a whole data set."""
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
