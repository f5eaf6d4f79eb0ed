"""A process of its own that looks at everything in footers of Parquet files before anybody else does.

Some footers (of encrypted columns, or whose parts contradict each other) make the Parquet library abort its process.
This file is run by its path and imports nothing of the application: for each footer that comes in it answers with a
byte once it has survived it.
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


def look(tail: bytes) -> None:
    """Asks a footer for everything that `footers.py` asks it for; errors that Python can catch are met again there."""
    with contextlib.suppress(Exception):
        footer = pq.ParquetFile(pa.BufferReader(tail)).metadata
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            for number in range(group.num_columns):
                look_at_column(group, number)


def look_at_column(group: pq.RowGroupMetaData, number: int) -> None:
    """Asks for one column; statistics that Python cannot express, such as dates after the year 9999, do not hide later
    columns.
    """
    with contextlib.suppress(Exception):
        statistics = group.column(number).statistics
        if statistics is not None and statistics.has_min_max:
            _ = statistics.min, statistics.max


def read(count: int) -> bytes:
    """So many bytes of the input, without a buffer, which `select` would not see; none at its end."""
    parts: list[bytes] = []
    while count and (part := os.read(0, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> None:
    """Reads footers, each after its length, until there are no more, or none came for a while."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while select.select([0], [], [], _IDLE_S)[0] and (header := read(8)):
        look(read(struct.unpack("<q", header)[0]))
        os.write(1, b"+")


if __name__ == "__main__":
    main()
