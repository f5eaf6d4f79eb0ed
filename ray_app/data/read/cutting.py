"""A stream of tables of any size, cut into tables of wanted lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ray_app.errors import DataError


class Cut:
    """See the module.

    Args:
        tables: What read tasks yield.
    """

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, rows: int) -> list[pa.Table]:
        """The next rows, in one or more tables.

        Raises:
            DataError: There are not so many left.
        """
        parts: list[pa.Table] = []
        while rows:
            parts.append(self.next(rows))
            rows -= parts[-1].num_rows
        return parts

    def next(self, most: int) -> pa.Table:
        """The next table, or as many of its rows as are wanted.

        Raises:
            DataError: There is none left.
        """
        table = self._rest if self._rest is not None else next(self._tables, None)
        if table is None:
            raise DataError(f"The read tasks ended {most} rows too early; the data set changed while it was read.")
        self._rest = table.slice(most) if table.num_rows > most else None
        return table.slice(0, most)
