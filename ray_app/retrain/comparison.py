"""Scoring packaged models on the same rows, by one Ray task with the evaluator's resources.

A model is scored as it is served: from the files of its version in the registry, so the directory of the run that made it is not needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor, nn

from ray_app.config.sections import EvaluateSection
from ray_app.data.dataset.arrays import Columns
from ray_app.data.feed.memory_cache import fetch_at_once
from ray_app.data.read.attempts import Attempts
from ray_app.data.read.reader import RowSource, specs_of
from ray_app.errors import ConfigError
from ray_app.models import loader
from ray_app.models.on_device import module_on
from ray_app.plan.keyed import hash_array, key
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.task import environment
from ray_app.task.base import Batch, Task
from ray_app.task.rows.ragged import Arrays
from ray_app.task.score.scoring import Chunk, score

if TYPE_CHECKING:
    pass

MOST_BLOCKS = 1000
Files = dict[str, bytes]
"""The files of a package that hold its model, by name."""


@dataclass(frozen=True)
class Request:
    """Rows to score models on.

    Args:
        source: The data set.
        segments: Its rows.
        models: The packages by any name.
        blocks: Into how many chunks the rows are cut at least, as far as there are rows; not given: as is quick.
        chosen: Which of the rows count, shape (rows of the segments,); not given: all.
    """

    source: RowSource
    segments: list[Segment]
    models: dict[str, Files]
    blocks: int | None = None
    chosen: npt.NDArray[np.bool_] | None = None


class PackagedModule(nn.Module):
    """A loaded package, which is in evaluation mode for good: an exported one refuses to be asked for it.

    Args:
        module: What the loader returned.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._held = [module]  # no submodule, so that modes do not reach it

    def forward(self, *fields: Tensor) -> Any:
        """Runs it on its inputs, each (rows, ...)."""
        return self._held[0](*fields)


def files_of(data: Path) -> Files:
    """The files of the folder with `package.json`: a model that needs its task's code gets the one that is here, if that is the same."""
    return {file.name: file.read_bytes() for file in sorted(data.iterdir()) if file.is_file()}


def sample(manifest: Manifest, most_rows: int) -> list[Segment]:
    """About `most_rows` rows of all row groups, some consecutive ones of each, chosen by a keyed hash; all if there are no more."""
    share = min(1.0, most_rows / manifest.num_rows)
    luck = hash_array(key(2), np.arange(manifest.num_row_groups))
    segments = []
    for group, rows in enumerate(manifest.rows.tolist()):
        whole, part = divmod(rows * share, 1)
        take = int(whole) + (float(luck[group]) / 2**64 < part)
        if take:
            segments.append(Segment(group, int(luck[group]) % (rows - take + 1), take))
    return segments


def score_packages(task: Task, metrics: Sequence[str], requests: list[Request], section: EvaluateSection) -> list[dict[str, list[Chunk]]]:
    """Scores models on rows, in one Ray task on the connected cluster.

    Args:
        task: The prepared task of now, which decodes the rows and measures all the models.
        metrics: The metrics that are looked at besides the loss; the task need not have all.
        requests: Which models on which rows.
        section: The evaluator's resources and batch size.

    Returns:
        For each request what the chunks of its rows gave, by the model's name, in the order of the rows.

    Raises:
        BadRowError: A row cannot be decoded.
        ConfigError: A model takes fields that the task does not decode.
        ProcessDiedError: The process of the task died again and again.
    """
    options = {"num_cpus": section.num_cpus, "num_gpus": section.num_gpus, "max_retries": 0}
    submit = partial(ray.remote(_score_all).options(**options).remote, task, metrics, requests, section)
    rows = "; ".join(f"{sum(segment.rows for segment in request.segments):,} rows of {request.source.reader.root}" for request in requests)
    return Attempts(submit, lambda: f"while it scored models on {rows}").result()


def _score_all(task: Task, metrics: Sequence[str], requests: list[Request], section: EvaluateSection) -> list[dict[str, list[Chunk]]]:
    """Runs in the Ray task."""
    environment.pin(section.threads, True, refuses=False)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = environment.gpu_of(ray.get_gpu_ids(), visible) if section.num_gpus else torch.device("cpu")
    environment.use_device(device)
    found = []
    for request in requests:
        arrays = _arrays(request)
        rows = len(next(iter(arrays.values())))
        chunk_rows = -(-rows // request.blocks) if request.blocks else None
        scored = {}
        for name, files in request.models.items():
            with tempfile.TemporaryDirectory() as folder:
                model, inputs = _load(files, Path(folder), device)
            if not set(inputs) <= arrays.keys():
                raise ConfigError(
                    f"The {name} takes the fields {', '.join(inputs)}, but the task decodes {', '.join(arrays)}; they cannot be compared."
                    " Use another tracking.registered_model for a task with other inputs."
                )
            run, packaged = partial(run_packaged, inputs), PackagedModule(model)
            asked = score(task, packaged, arrays, section.batch_size, device, chunk_rows=chunk_rows, keep=metrics, forward=run)
            scored[name] = list(asked)
        found.append(scored)
    return found


def run_packaged(inputs: list[str], model: nn.Module, batch: Batch) -> Any:
    """Runs a package on the fields that it takes, in its order."""
    return model(*(batch[name] for name in inputs))


def _arrays(request: Request) -> Arrays:
    """The decoded rows of a request."""
    source = request.source
    columns = Columns(source.fields, sum(segment.rows for segment in request.segments))
    for table in fetch_at_once(source.reader, specs_of(source.manifest, request.segments, source.task_rows)):
        columns.add(table)
    arrays = columns.all()
    return arrays if request.chosen is None else {name: values[request.chosen] for name, values in arrays.items()}


def _load(files: Files, folder: Path, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The module of a package on a device, and the fields that it takes."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    description = loader.describe(folder)
    if description["format"] == "torch.export":
        model = module_on(loader.load_exported(folder / loader.EXPORTED), device)
    else:
        model = loader.load(folder).to(device)
    return model, [spec["name"] for spec in description["inputs"]]
