"""One Parquet file of a data set, with the columns that are in the names of its folders; what cannot be read is named to the column."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset.files import Place, parquet, place_of, unusable
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.partitions import PartitionType, Value, partition_texts, partition_value

Partitions = Mapping[str, PartitionType]
_ADVICE = "It cannot be read as Parquet; restore it or ingest the data again."
_MAX_OPEN = 4
_TYPES = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string()}


def partition_fields(partitions: Partitions) -> list[pa.Field]:
    """The partition columns as Arrow fields."""
    return [pa.field(name, _TYPES[kind]) for name, kind in partitions.items()]


class DataFile:
    """An open Parquet file of a data set; a context manager that closes it.

    Args:
        root: Folder (path or URI) of the data set.
        path: The file, relative to it.
        partitions: The partition columns of the data set.
        buffer_bytes: Bytes of a column that are fetched at once; 0: a row group is fetched as a whole.
    """

    def __init__(self, root: str | Place, path: str, partitions: Partitions, buffer_bytes: int = 0) -> None:
        self.place = (place_of(root) if isinstance(root, str) else root) / path
        self._path = path
        self._file = parquet(self.place, buffer_bytes)
        self._own_names = set(self._file.schema_arrow.names)
        self._texts = partition_texts(path) if partitions else {}
        self._values: dict[str, Value] = {name: partition_value(self._texts[name], kind) for name, kind in partitions.items()}
        self._fields = {field.name: field for field in partition_fields(partitions)}

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close(force=True)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file, and the partition columns that it does not hold itself."""
        added = [field for name, field in self._fields.items() if name not in self._own_names]
        return pa.schema([*self._file.schema_arrow, *added])

    def read_row_group(self, index: int, columns: Sequence[str]) -> pa.Table:
        """The rows of a row group.

        Args:
            index: Of the row group in the file.
            columns: Names of columns; `a.b` is a field of a column of objects.

        Raises:
            DataError: A column is damaged, or is not in the file.
            OSError: The storage failed.
        """
        stored = self._stored_names(columns)
        try:
            table = self._file.read_row_group(index, columns=stored, use_threads=False)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise self._explain(error, index, stored) from error
        return self._with_partitions(table, columns, index, 0)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """The rows of all row groups; see `read_row_group`."""
        groups = [self.read_row_group(index, columns) for index in range(self._file.metadata.num_row_groups)]
        return pa.concat_tables(groups) if groups else self.schema.empty_table().select(list(columns))

    def rows_within(self, index: int, columns: Sequence[str], num_bytes: int) -> int:
        """How many rows of a row group have about so many bytes in these columns, at least one."""
        group = self._file.metadata.row_group(index)
        chunks = (group.column(i) for i in range(group.num_columns))
        begins = tuple(f"{name}." for name in columns)
        size = sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(begins))
        return max(1, num_bytes * group.num_rows // max(1, size))

    def iter_batches(self, index: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The rows of a row group from its beginning, at most so many at a time; see `read_row_group`."""
        stored, first = self._stored_names(columns), 0
        batches = self._file.iter_batches(rows, row_groups=[index], columns=stored, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                raise self._explain(error, index, stored) from error
            if batch is None:
                return
            yield self._with_partitions(pa.Table.from_batches([batch]), columns, index, first)
            first += batch.num_rows

    def _stored_names(self, columns: Sequence[str]) -> list[str]:
        """Those of the columns that the file itself holds."""
        known = {name: name in self._own_names or name.partition(".")[0] in self._own_names for name in columns}
        if unknown := [name for name, is_stored in known.items() if not is_stored and name not in self._values]:
            raise DataError(
                f"{self.place} has no column {unknown[0]!r}; its columns are {', '.join(sorted(self.schema.names))}. The file was changed"
                " since the start: restore it or ingest the data again."
            )
        return [name for name, is_stored in known.items() if is_stored]

    def _with_partitions(self, table: pa.Table, columns: Sequence[str], index: int, first: int) -> pa.Table:
        """The table with the partition columns among `columns`; one that the file holds, too, must say the same."""
        for name in columns:
            if name not in self._values:
                continue
            field = self._fields[name]
            if name not in self._own_names:
                table = table.append_column(field, pa.repeat(pa.scalar(self._values[name], field.type), table.num_rows))
            elif (row := self._contradiction(table.column(name), self._texts[name])) is not None:
                value = table.column(name)[row].as_py()
                reason = f"column {name!r} is {value!r}, but the folder says {self._texts[name]!r}; correct one of them"
                raise BadRowError(self._path, index, first + row, reason)
        return table

    @staticmethod
    def _contradiction(column: pa.ChunkedArray, text: str | None) -> int | None:
        """The first row whose value is not that of the folder's name."""
        try:
            wanted = pa.scalar(text, pa.string()).cast(column.type)
            same = column.is_null() if text is None else pc.fill_null(pc.equal(column, wanted), False)
        except NotImplementedError:
            # Arrow reads no text as a value of this type (half precision), so that nothing can be compared.
            return None
        except pa.ArrowException:  # the folder's text is no value of the column's type
            return 0 if len(column) else None
        row = pc.index(same, False).as_py()
        return row if row >= 0 else None

    def _explain(self, error: Exception, index: int, columns: Sequence[str]) -> Exception:
        """The error of reading a row group, with the column that cannot be read; a failure of the storage as it is."""
        if isinstance(unusable(self.place, error, _ADVICE), StorageError):
            return error
        place = f"{self.place}, row group {index}"
        for name in columns:
            try:
                self._file.read_row_group(index, columns=[name], use_threads=False)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as column_error:
                return unusable(f"{place}, column {name!r}", column_error, _ADVICE)
        return unusable(place, error, _ADVICE)


class OpenFiles:
    """The files of a data set that were read last: few are open at a time, however many are read.

    Args:
        root: Folder (path or URI) of the data set.
        partitions: The partition columns of the data set.
    """

    def __init__(self, root: str, partitions: Partitions) -> None:
        self._root, self._partitions = place_of(root), partitions
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def get(self, path: str) -> DataFile:
        """The file, opened unless it is open."""
        if path not in self._open:
            self._open[path] = DataFile(self._root, path, self._partitions)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        """Closes all of them."""
        while self._open:
            self._open.popitem()[1].close()
