"""The actors of a batch prediction: they load the model, and turn one table of decoded rows into one part file."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from torch import Tensor

from ray_app.checkpoint.format import MODEL, params_digest, unpack_model
from ray_app.data.arrays import ArraySpec, fixed_array, from_column, to_column, to_list_array
from ray_app.data.parquet_files import DataFile
from ray_app.data.reader import POSITION, ReadSpec, check_positions, count_rows, read_span
from ray_app.devices import HOST, assigned_device, kind_of
from ray_app.errors import BadRowError, ConfigError, DataError
from ray_app.models import loader
from ray_app.models.export import exported_module
from ray_app.plan.manifest import ReadRules
from ray_app.process import keep_freed_memory
from ray_app.storage.data_files import Root
from ray_app.storage.files import put_atomic, to_location
from ray_app.task import environment
from ray_app.task.base import Batch, Task
from ray_app.task.ragged import Field, Ragged, concat_fields, to_batch
from ray_app.torch_private import exported_parameters, tree_leaves, use_eager_roi_align

MADE_FROM = b"ray_app.made_from"
"""Key of the digest in the metadata of a part."""
Predict = Callable[[Batch], Any]


@dataclass(frozen=True)
class Model:
    """A model to predict with, not yet loaded.

    Args:
        weights: Content of a `model.pt2`, or of a `model.safetensors`.
        inputs: Decoded fields in the order of the arguments of a `model.pt2`; None: the weights are those of
            `task.build_model()`.
    """

    task: Task
    weights: bytes
    inputs: list[str] | None
    params_digest: str

    def load(self, device: torch.device) -> Predict:
        """Loads the model without unpickling anything, as a function from a batch on the device to the task's outputs.

        The parameters are compared with their digest before the code of the task, or a program, gets them.

        Raises ConfigError if the weights cannot be loaded safely, or have another digest.
        """
        refused = "The model is refused, and none of its code was executed"
        try:
            checked = None if self.inputs is None else loader.rewrite_checked(io.BytesIO(self.weights))
            state = unpack_model({MODEL: self.weights}) if checked is None else exported_parameters(checked)
        except Exception as error:
            # Libraries raise errors of any type for damaged files.
            raise ConfigError(f"{refused}: {error}") from error
        if (digest := params_digest(state)) != self.params_digest:
            raise ConfigError(f"{refused}: its parameters have the digest {digest}, not {self.params_digest}.")
        try:
            return self._built(state, device) if checked is None else self._exported(checked, device)
        except Exception as error:
            raise ConfigError(f"The model is refused: {error}") from error

    def _exported(self, checked: IO[bytes], device: torch.device) -> Predict:
        names = self.inputs or []
        with checked:
            module = exported_module(loader.load_checked(checked), device)
        return lambda batch: module(*(batch[name] for name in names))

    def _built(self, state: dict[str, Tensor], device: torch.device) -> Predict:
        model = self.task.build_model()
        model.load_state_dict(state)
        model = model.to(device).eval()
        if not kind_of(device).is_host:
            use_eager_roi_align()
        return lambda batch: self.task.forward(model, batch)


@dataclass(frozen=True)
class PredictJob:
    """The settings of a prediction that every actor gets.

    Args:
        parts: File name and rows of each part, by the position of its first row.
        made_from: Digest of everything that decides the content of the parts.
    """

    model: Model
    root: Root
    fields: dict[str, ArraySpec]
    columns: list[str]
    rules: ReadRules
    parts: dict[int, tuple[str, ReadSpec]]
    out: str
    made_from: str
    batch_size: int
    threads: int
    device: str


class PredictActor:
    """Predicts and writes parts, as an actor of a pool."""

    def __init__(self, job: ray.ObjectRef) -> None:
        self._job: PredictJob = ray.get(job)
        keep_freed_memory()
        environment.set_threads_and_kernels(self._job.threads, True, refuses=False)
        self._device = HOST if self._job.device == HOST.type else assigned_device(ray.get_gpu_ids())
        kind_of(self._device).use(self._device)
        self._predict = self._job.model.load(self._device)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Predicts the decoded rows of a part and writes it; returns one row with its name and facts."""
        # Ray Data may call from another thread than that of the constructor.
        kind_of(self._device).use(self._device)
        position = int(fixed_array(table.column(POSITION), ArraySpec("<i8", ()))[0])
        name, spec = self._job.parts[position]
        rows = count_rows(spec)
        check_positions(table, np.arange(position, position + rows))
        outputs = self._outputs(table, spec)
        positions = pa.table({"position": np.arange(position, position + rows)})
        carried = _read_carried_columns(self._job, spec)
        start = positions if carried is None else carried.append_column("position", positions.column(0))
        data = encode_part(start, outputs, self._job.made_from)
        put_atomic(to_location(self._job.out) / name, data)
        return pa.table({"name": [name], "facts": [json.dumps(part_facts(data))]})

    def _outputs(self, table: pa.Table, spec: ReadSpec) -> dict[str, Field]:
        """Computes the predictions for the rows of a part, by column."""
        arrays = {name: from_column(table.column(name), spec) for name, spec in self._job.fields.items()}
        predictions = []
        for low in range(0, table.num_rows, self._job.batch_size):
            some = to_batch(arrays, np.arange(low, min(low + self._job.batch_size, table.num_rows)))
            batch = {name: values.to(self._device) for name, values in some.items()}
            with torch.no_grad():
                outputs = self._predict(batch)
            on_cpu = _to_cpu(outputs)
            rows = {name: values[low : low + self._job.batch_size] for name, values in arrays.items()}
            if (bad := _find_bad_output(on_cpu, rows, min(self._job.batch_size, table.num_rows - low))) is not None:
                raise _bad_row(spec, low + bad[0], f"{bad[1]!r} is NaN or infinite, and so is the model's output")
            predictions.append(self._job.model.task.predictions(on_cpu, batch))
        whole = {name: concat_fields([one[name] for one in predictions]) for name in predictions[0]}
        for name, values in whole.items():
            if len(values) != table.num_rows:
                raise DataError(
                    f"Task.predictions returned {len(values)} values of {name!r} for {table.num_rows} rows; return one"
                    " per row."
                )
            if (row := find_non_finite_row(values)) is not None:
                raise _bad_row(spec, row, f"its prediction {name!r} is NaN or infinite")
        return whole


def _bad_row(spec: ReadSpec, row: int, reason: str) -> BadRowError:
    """Returns the error that names a row of a part by its file."""
    for span in spec:
        if row < span.rows:
            return BadRowError(span.path, span.row_group, span.first + row, f"{reason}; correct the row or drop it")
        row -= span.rows
    raise AssertionError("the part has fewer rows")


def _find_bad_output(outputs: Any, rows: Mapping[str, Field], count: int) -> tuple[int, str] | None:
    """Returns the first row with a NaN or infinite value in both the decoded row and the outputs, and its field."""
    bad = np.zeros(count, np.bool_)
    for values in tree_leaves(outputs):
        if isinstance(values, Tensor) and values.is_floating_point() and values.shape[:1] == (count,):
            bad |= ~values.reshape(count, -1).isfinite().all(1).numpy()
    for row in np.flatnonzero(bad).tolist():
        for name, field in rows.items():
            if find_non_finite_row(field[row : row + 1]) is not None:
                return int(row), name
    return None


def find_non_finite_row(values: Field) -> int | None:
    """Returns the first row with a NaN or infinite value, None if there is none."""
    numbers = values.values if isinstance(values, Ragged) else values
    if numbers.dtype.kind != "f" or (finite := np.isfinite(numbers).all(tuple(range(1, numbers.ndim)))).all():
        return None
    first = int(np.argmin(finite))
    return int(np.searchsorted(values.offsets, first, "right")) - 1 if isinstance(values, Ragged) else first


def _to_cpu(outputs: Any) -> Any:
    """Copies a task's outputs to the CPU, in types that NumPy supports."""
    if isinstance(outputs, Tensor):
        return outputs.float().cpu() if outputs.dtype == torch.bfloat16 else outputs.cpu()
    if isinstance(outputs, dict):
        return {name: _to_cpu(values) for name, values in outputs.items()}
    return type(outputs)(map(_to_cpu, outputs)) if isinstance(outputs, list | tuple) else outputs


def _read_carried_columns(job: PredictJob, spec: ReadSpec) -> pa.Table | None:
    """Reads the columns of a part that are copied from the data set; returns None if there are none."""
    parts = []
    for span in spec if job.columns else ():
        with DataFile(job.root, span.path, job.rules) as file:
            parts.append(read_span(file, span, job.columns))
    return pa.concat_tables(parts).select(job.columns) if parts else None


def encode_part(carried: pa.Table, outputs: Mapping[str, Field], made_from: str) -> bytes:
    """Encodes columns and predictions, ragged ones as lists, as Parquet; equal values give equal bytes."""
    for name, values in outputs.items():
        if isinstance(values, np.ndarray) and values.ndim > 1:
            carried = carried.append_column(*to_column(name, values))
        else:
            carried = carried.append_column(
                name, to_list_array(values) if isinstance(values, Ragged) else pa.array(values)
            )
    file = io.BytesIO()
    pq.write_table(carried.replace_schema_metadata({MADE_FROM: made_from.encode()}), file, write_page_checksum=True)
    return file.getvalue()


def part_facts(data: bytes) -> dict[str, Any]:
    """Returns facts about the content of a part; raises OSError or ValueError if it is damaged.

    They are `rows`, `bytes`, `sha256`, the digest `made_from`, the `counts` of its predicted texts, and the `sums` of
    its predicted numbers.
    """
    table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True, use_threads=False)
    counts: dict[str, int] = {}
    sums: dict[str, float] = {}
    for name in ("predicted", "confidence"):
        kind = table.schema.field(name).type if name in table.column_names else pa.null()
        if pa.types.is_string(kind):
            counts = dict(sorted(Counter(table.column(name).to_pylist()).items()))
        elif pa.types.is_floating(kind) or pa.types.is_integer(kind):
            sums[name] = math.fsum(table.column(name).to_pylist())
    made_from = (table.schema.metadata or {}).get(MADE_FROM, b"").decode()
    facts = {"rows": table.num_rows, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return facts | {"made_from": made_from, "counts": counts, "sums": sums}
