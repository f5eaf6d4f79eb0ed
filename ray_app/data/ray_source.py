"""Planned reads as a Ray Data source: one read task per `ReadSpec`, decoding included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from ray_app.data.source import Reader, ReadSpec


class PlannedSource(Datasource):
    """Ray Data reads what the plan says, in its order.

    Args:
        reader: Reads and decodes.
        specs: One read task each.
    """

    def __init__(self, reader: Reader, specs: Sequence[ReadSpec]) -> None:
        super().__init__()
        self._reader, self._specs = reader, specs

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown before the first decode."""
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None) -> list[ReadTask]:
        """One task per planned read, whatever parallelism is asked for: the plan sizes them."""
        del parallelism, per_task_row_limit, data_context
        return [
            ReadTask(
                _read(self._reader, spec),
                BlockMetadata(num_rows=sum(p.rows for p in spec), size_bytes=None, input_files=None, exec_stats=None),
            )
            for spec in self._specs
        ]


def _read(reader: Reader, spec: ReadSpec) -> Callable[[], Iterable[pa.Table]]:
    def run() -> Iterable[pa.Table]:
        return [reader.read(spec)]

    return run
