"""A child process that reads everything in footers of Parquet files before the application does.

Some footers (with encrypted columns, or with contradicting parts) make the Parquet library abort its process. This file
is therefore run by its path in a process of its own, and imports nothing of the application. For each footer that
arrives on its standard input it answers with one byte once it has survived the reading.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import struct

import pyarrow as pa
import pyarrow.parquet as pq

_IDLE_S = 5.0


def main() -> None:
    """Reads footers, each preceded by its length, until the input ends or no footer arrives for `_IDLE_S` seconds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([0], [], [], _IDLE_S)[0] and (header := read_input(8)):
        read_footer(read_input(struct.unpack("<q", header)[0]))
        os.write(1, b"+")


def read_footer(tail: bytes) -> None:
    """Reads everything from a footer that `parquet_files.py` reads; errors that Python can catch occur there again."""
    with contextlib.suppress(Exception):
        footer = pq.ParquetFile(pa.BufferReader(tail)).metadata
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            for number in range(group.num_columns):
                read_column(group, number)


def read_column(group: pq.RowGroupMetaData, number: int) -> None:
    """Reads the statistics of a column, except values that Python cannot express, such as the year 10,000."""
    with contextlib.suppress(Exception):
        statistics = group.column(number).statistics
        if statistics is not None and statistics.has_min_max:
            _ = statistics.min, statistics.max


def read_input(count: int) -> bytes:
    """Returns `count` bytes of the input, or none at its end; without a buffer, which `select` would not see."""
    parts: list[bytes] = []
    while count and (part := os.read(0, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
