"""Small jobs over generated images, and a configurable membership without Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ErrorType
from torch.optim import Optimizer

from ray_app.config.checks import check_config
from ray_app.config.config import Config, digest
from ray_app.data.arrays import to_column
from ray_app.data.feed import Feed
from ray_app.data.folds import open_training_data
from ray_app.data.probes import probe
from ray_app.data.reader import fetch_in_process
from ray_app.data.windows import StreamedWindows, Windows
from ray_app.errors import PeerLostError
from ray_app.plan.order import Cursor, Plan
from ray_app.preflight.inputs import make_plan, read_classes
from ray_app.reduction.peer_errors import clear_group, set_group
from ray_app.reduction.world import World
from ray_app.task.base import Batch, Task
from ray_app.task.image import ImageClassification
from ray_app.train.job import Job
from ray_app.train.membership import Flags, GenerationInfo
from ray_app.train.process_group import FileStoreMembership, ProcessGroup, _list_sockets
from tests.support.device_group import watch_peers

CPU = torch.device("cpu")
CLASSES = 5


def has_begun_to_open(group: ProcessGroup) -> bool:
    """Returns whether a process group has connected to its store."""
    return any(group._is_store(number) for number, _ in _list_sockets())


def write_images(folder: Path, files: list[list[int]], classes: int = CLASSES) -> Path:
    """Writes 8x8 images as Parquet; `files` holds the rows of every row group of every file, 0 for an empty row group.

    The column `id` is the row's manifest position.
    """
    assert len(files) <= 10, "file names must sort as they are numbered"
    folder.mkdir(parents=True)
    rows = sum(map(sum, files))
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, rows)
    labels[: min(rows, classes)] = np.arange(classes)[: min(rows, classes)]
    images = random.integers(0, 200, (rows, 8, 8)).astype(np.uint8)
    # One column of pixels is brighter, so that there is something to learn.
    images[np.arange(rows), labels] += 50
    columns = [to_column("image", images), to_column("id", np.arange(rows))]
    schema = pa.schema([field for field, _ in columns] + [pa.field("label", pa.int64())])
    table = pa.Table.from_arrays([*(data for _, data in columns), pa.array(labels)], schema=schema)
    done = 0
    for i, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"part-{i}.parquet", schema) as writer:
            for count in groups:
                writer.write_table(table.slice(done, count))
                done += count
    return folder


class TinyImages(ImageClassification):
    """A small dense network with dropout and one-dimensional batch-norm, in variants.

    Args:
        variant: `unused` adds a parameter that gets no gradient, `frozen` one that must not get one.
        bad_rows: Manifest positions with a loss of `bad_value`.
        bad_value: NaN or infinity; 0: the loss is finite, its gradient is not.
        loss_shape: `rows`: one loss per row; `mean`: their mean.
    """

    def __init__(
        self,
        variant: str = "",
        bad_rows: tuple[int, ...] = (),
        bad_value: float = float("nan"),
        loss_shape: str = "rows",
    ) -> None:
        super().__init__()
        self.variant = variant
        self.bad_rows = bad_rows
        self.bad_value = bad_value
        self.loss_shape = loss_shape

    def columns(self) -> list[str]:
        return [*super().columns(), "id"]

    def decode(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {**super().decode(rows), "id": rows["id"]}

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, CLASSES)
        )
        if self.variant == "unused":
            model.register_parameter("unused", nn.Parameter(torch.ones(7)))
        if self.variant == "frozen":
            model[1].requires_grad_(False)
        return model

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = super().loss(outputs, batch)
        if self.loss_shape == "mean":
            return losses.mean()
        bad = torch.isin(batch["id"], torch.tensor(self.bad_rows, dtype=torch.int64))
        if self.bad_value == 0:
            return losses + torch.where(bad, losses - losses, 1).sqrt()
        return torch.where(bad, self.bad_value, losses)


class CustomTrainingStep(ImageClassification):
    """A task with its own training step: two forward passes with different dropout, and clamped weights."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        first, second = self.forward(model, batch), self.forward(model, batch)
        return self.loss(first, batch) + (first - second).square().mean(-1)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)


def make_job(
    folder: Path,
    data: Path | list[dict[str, Any]],
    *,
    logical_workers: int = 4,
    batch: int = 12,
    task: Task | None = None,
    every: int | None = None,
    **fields: Any,
) -> Job:
    """Returns the job of a run in `folder` over the images in `data`; `fields` as for `Config.replace`.

    With `every` it has two epochs, and a checkpoint after every so many steps.
    """
    defaults: dict[str, Any] = {
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "data__shuffle_window_rows": batch,
    }
    if every is not None:
        defaults |= {"train__epochs": 2, "checkpoint__every_epochs": None, "checkpoint__every_steps": every}
    config = Config().replace(
        task__class_path="ray_app.task.image.ImageClassification",
        scaling__max_workers=logical_workers,
        data__path=data if isinstance(data, list) else str(data),
        data__global_batch_size=batch,
        **(defaults | fields),
    )
    check_config(config)
    dataset = open_training_data(config)
    task = task or ImageClassification(model_args={"channels": 4, "dropout": 0.3}, flip=True, crop_padding=1)
    prepared = task.prepare(dataset.facts)
    plan = make_plan(config, dataset.manifest, read_classes(config, dataset))
    return Job(
        config=config,
        config_digest=digest(config, plan.manifest.digest),
        task=prepared,
        plan=plan,
        data_root=dataset.root,
        fields=probe(dataset, prepared.columns(), prepared.decode),
        run_root=str(folder),
        fence=1,
        best_metric=prepared.best_metric,
        best_mode=prepared.best_mode,
        initial=config.train.init_from,
    )


def disk_cached(job: Job, cursor: Cursor, assigned: range) -> Windows:
    """Returns windows that are prefetched in this process through the disk cache in `data.cache_dir`."""
    fetch = job.through_cache(fetch_in_process)
    return StreamedWindows(job.plan, cursor, assigned, job.passes, fetch, dataclasses.replace(job.source, task_rows=7))


def feed_of(plan: Plan, cursor: Cursor, assigned: range, windows: Windows) -> Feed:
    """Returns a feed over windows that are already open."""
    feed = Feed(plan, lambda _cursor, _assigned: windows, CPU)
    feed.seek(cursor, assigned)
    return feed


class LocalMembership(FileStoreMembership):
    """The membership of processes that meet at a file, with requests to stop, other backends and several hosts.

    Args:
        world: Rank and size of this process.
        store: The file of the process group's store.
        stop: The step, from 1, in which a rank requests to stop, by rank.
        backend: Backend of the process group, such as one that imitates a device's.
        hosts: The host name of each rank, to imitate several hosts.
    """

    def __init__(
        self,
        world: World,
        store: Path,
        stop: dict[int, int] | None = None,
        backend: str = "gloo",
        hosts: tuple[str, ...] = (),
    ) -> None:
        super().__init__(world, store, backend, hosts)
        self._stop_step = (stop or {}).get(world.rank)
        self._num_steps = 0

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        if self._world.size == 1 or self._backend == "gloo":
            with super().generation(step, was_broken) as generation:
                yield generation
            return
        with (
            watch_peers(self._store, self._world.rank, self._world.size) as watch,
            super().generation(step, was_broken) as (world, info),
        ):
            state = _DeviceState(dist.group.WORLD)
            watch(state.abort)
            set_group(state)
            try:
                yield dataclasses.replace(world, has_device_collectives=True), info
            finally:
                clear_group(state)

    def flags(self) -> Flags:
        """Returns the flags of the next step; the loop asks once a step."""
        self._num_steps += 1
        return Flags.STOP if self._stop_step == self._num_steps else Flags(0)


class _DeviceState:
    """The state of a process group like one of a device, see `reduction.peer_errors.Breakable`."""

    is_aborted = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def abort(self) -> None:
        """Aborts the group and those made of its ranks, after the loss of a peer."""
        self.is_aborted = True
        for group in list(dist.distributed_c10d._world.pg_map):
            group.abort()

    def check_device_errors(self) -> None:
        self._group.check_device_errors()
        if self.is_aborted:
            raise PeerLostError("the group was aborted")

    def has_failed(self) -> bool:
        return bool(self._group.error != ErrorType.SUCCESS)
