"""Workers as plain processes with gloo, to run the real training loop without Ray."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
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

from ray_app.checkpoint.format import MODEL, Snapshot, params_digest, unpack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.checks import check_config
from ray_app.config.config import Config, digest
from ray_app.data.arrays import to_column
from ray_app.data.dataset import open_dataset
from ray_app.data.feed import Feed
from ray_app.data.local_readers import load_all
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.probes import probe
from ray_app.data.reader import fetch_in_process
from ray_app.data.windows import CachedWindows, Windows
from ray_app.plan.order import Cursor, Plan
from ray_app.preflight.prepare import make_plan, read_classes
from ray_app.reduction import group_state
from ray_app.reduction.base import World, collective
from ray_app.runlog.journal import StepRecord
from ray_app.task.base import Batch, Task
from ray_app.task.image import ImageClassification
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import Flags, GenerationInfo, Phase
from ray_app.train.process_group import _list_sockets, _shut_down, open_stage_groups

CPU = torch.device("cpu")
CLASSES = 5
_ANSWER_S, _EXCHANGE_S = 240.0, 60.0


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
    images[np.arange(rows), labels] += 50  # something to learn
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
        bad: Manifest positions whose loss is `bad_value`.
        bad_value: NaN or infinity; 0: the loss is finite, its gradient is not.
    """

    def __init__(
        self, variant: str = "", bad: tuple[int, ...] = (), bad_value: float = float("nan"), loss_shape: str = "rows"
    ) -> None:
        super().__init__()
        self.variant, self.bad, self.bad_value, self.loss_shape = variant, bad, bad_value, loss_shape

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
        bad = torch.isin(batch["id"], torch.tensor(self.bad, dtype=torch.int64))
        if self.bad_value == 0:
            return losses + torch.where(bad, losses - losses, 1).sqrt()
        return torch.where(bad, self.bad_value, losses)


class OwnStep(ImageClassification):
    """A training step of its own: two forward passes with different dropout, and weights that are held in bounds."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        first, second = self.forward(model, batch), self.forward(model, batch)
        return self.loss(first, batch) + (first - second).square().mean(-1)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)


def make_job(
    folder: Path, data: Path, *, logical_workers: int, batch: int, task: Task | None = None, **fields: Any
) -> Job:
    """A run in `folder` over the images in `data`; `fields` as for `Config.replace`."""
    defaults = {
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "data__shuffle_window_rows": batch,
    }
    config = Config().replace(
        task__class_path="ray_app.task.image.ImageClassification",
        scaling__max_workers=logical_workers,
        data__path=str(data),
        data__global_batch_size=batch,
        **(defaults | fields),
    )
    check_config(config)
    dataset = open_dataset(str(data))
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


def streamed(job: Job, cursor: Cursor, played: range) -> Windows:
    """Reads ahead in this process, in read tasks of a few rows."""
    return StreamedWindows(
        job.plan, cursor, played, job.passes, fetch_in_process, dataclasses.replace(job.source, task_rows=7)
    )


def cached(job: Job, cursor: Cursor, played: range) -> Windows:
    """Gathers from memory."""
    del cursor, played
    return CachedWindows(load_all(fetch_in_process, job.source))


def disk_cached(job: Job, cursor: Cursor, played: range) -> Windows:
    """Reads ahead in this process through the disk cache in `data.cache_dir`."""
    fetch = job.through_cache(fetch_in_process)
    return StreamedWindows(job.plan, cursor, played, job.passes, fetch, dataclasses.replace(job.source, task_rows=7))


def feed_of(plan: Plan, cursor: Cursor, played: range, windows: Windows) -> Feed:
    """A feed that plays windows which are open already."""
    feed = Feed(plan, lambda _cursor, _played: windows, CPU)
    feed.seek(cursor, played)
    return feed


class LocalMembership:
    """The membership of plain processes that share a file.

    Args:
        world: Who this worker is.
        store: The file; a new one for every group.
        stop: Ranks that ask to stop, and in which of their steps (from 1).
        backend: Of their process group.
        hosts: Of all ranks, as if they were several.
    """

    recovers = False

    def __init__(
        self,
        world: World,
        store: Path,
        stop: dict[int, int] | None = None,
        backend: str = "gloo",
        hosts: tuple[str, ...] = (),
    ) -> None:
        self._hosts = hosts
        self._world, self._store, self._stop, self._backend = world, store, stop or {}, backend
        self._asked = 0

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`."""
        del step, lost
        formed = GenerationInfo(1, self._world.rank, self._world.size, "", 0)
        if self._world.size == 1:
            yield self._world, formed
            return
        before = set(_list_sockets())
        with collective():
            store = dist.FileStore(str(self._store), self._world.size)  # type: ignore[attr-defined]
            timeout = timedelta(seconds=_EXCHANGE_S)
            dist.distributed_c10d._world.group_count = 0  # as `ProcessGroup` does
            dist.init_process_group(
                self._backend, store=store, rank=self._world.rank, world_size=self._world.size, timeout=timeout
            )
            groups = open_stage_groups(self._world.rank, self._hosts, timeout, self._backend != "gloo")
            dist.barrier()  # nobody leaves while another still connects
        mine = set(_list_sockets()) - before
        state = _DeviceState(dist.group.WORLD)
        try:
            # Only a group that behaves like one of a device has this method.
            check = getattr(dist.group.WORLD, "check_device_errors", None)
            group_state.set_group(state)
            world = dataclasses.replace(self._world, hosts=self._hosts, groups=groups, check_device_errors=check)
            yield world, formed
        except BaseException:
            dist.group.WORLD.abort()  # type: ignore[union-attr]
            for each in mine:
                _shut_down(*each)  # the error's frames may hold the group, for whose connections' end the others wait
            raise
        finally:
            group_state.clear_group(state)
            dist.destroy_process_group()

    def flags(self) -> Flags:
        """See `Membership.flags`; asked once a step."""
        self._asked += 1
        return Flags.STOP if self._stop.get(self._world.rank) == self._asked else Flags(0)

    def is_leaving(self) -> bool:
        """See `Membership.is_leaving`."""
        return False

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`."""

    def moved(self) -> None:
        """See `Membership.moved`."""

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """See `Membership.report`."""

    def recorded(self) -> int:
        """See `Membership.recorded`."""
        return 0


class _DeviceState:
    """What a group knows of itself, see `group_state`; nobody here gives one up before it is left."""

    is_aborted = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def has_failed(self) -> bool:
        """See `Breakable`."""
        error = getattr(self._group, "error", ErrorType.SUCCESS)  # gloo has none
        return bool(error != ErrorType.SUCCESS)


class KilledError(Exception):
    """A worker ended because a test wanted it."""


@dataclass(frozen=True)
class DieAfter:
    """A hook that ends the loop after a step: on all ranks by an error, or one rank by killing its process.

    Args:
        step: Finished steps.
        killed: The rank whose process is killed.
    """

    step: int
    killed: int | None = None

    def __call__(self, rank: int, step: int) -> None:
        if step == self.step and self.killed is None:
            raise KilledError(f"rank {rank} dies after step {step}")
        if step == self.step and rank == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank: its value, or its error with the traceback as text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class Pool:
    """Worker processes that live through many cases.

    Args:
        size: How many.
        folder: Where to put the files that process groups meet at.
        preloaded: Modules that are imported once for all; those of the first pool of this process.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        preloaded: Sequence[str] = ("ray_app.train.loop", "ray_app.task.image", "torchmetrics"),
    ) -> None:
        self._folder, self._groups = folder, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))  # torch is imported once for all workers
        self._workers = [self._start() for _ in range(size)]

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _restart(self, rank: int) -> None:
        self._end(rank)
        self._workers[rank] = self._start()

    def _end(self, rank: int) -> None:
        process, pipe = self._workers[rank]
        process.kill()
        process.join()
        pipe.close()

    def close(self) -> None:
        """Ends the processes."""
        for rank in range(len(self._workers)):
            self._end(rank)

    def outcomes(self, size: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """Calls `function(rank, store, *args)` on `size` processes; `store` is a new file for their process group."""
        self._groups += 1
        store = self._folder / f"store-{self._groups}"
        for rank in range(size):
            self._workers[rank][1].send((function, (rank, store, *args)))
        deadline_s = time.monotonic() + _ANSWER_S
        return [self._outcome(rank, deadline_s) for rank in range(size)]

    def _outcome(self, rank: int, deadline_s: float) -> Outcome:
        pipe = self._workers[rank][1]
        try:
            if pipe.poll(max(0.0, deadline_s - time.monotonic())):
                outcome = pipe.recv()
                if outcome.error is not None:
                    self._restart(rank)
                return outcome
            gone: Exception = TimeoutError(f"rank {rank} did not answer within {_ANSWER_S:g} s")
        except (EOFError, ConnectionResetError):
            gone = KilledError(f"the process of rank {rank} was killed")
        self._restart(rank)
        return Outcome(error=gone, trace=str(gone))

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The values of `outcomes`; an error on any rank is raised."""
        outcomes = self.outcomes(size, function, *args)
        assert all(o.error is None for o in outcomes), "\n".join(o.trace for o in outcomes)
        return [o.value for o in outcomes]

    def train(
        self, job: Job, size: int, hooks: Hooks = Hooks(), windows: OpenWindows = streamed, **membership: Any
    ) -> list[Outcome]:
        """Runs the training loop on `size` workers."""
        return self.outcomes(size, _train, job, size, hooks, windows, membership)

    def run_job(self, job: Job, size: int, windows: OpenWindows = streamed) -> None:
        """Trains to the end on `size` workers."""
        self.run(size, _train, job, size, Hooks(), windows, {})

    def trained(self, job: Job, size: int, windows: OpenWindows = streamed) -> Trained:
        """Trains from beginning to end in a new run directory."""
        folder = Path(f"{job.run_root}-{self._groups}")
        job = dataclasses.replace(job, run_root=str(folder))
        self.run_job(job, size, windows)
        return result_of(job)


def _serve(pipe: Any) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        outcome = _outcome_of(function, args)
        pipe.send(outcome)
        if outcome.error is not None:
            return  # an error's frames hold the process group, for whose connections' end the other ranks may wait


def _outcome_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        return Outcome(function(*args))
    except Exception as error:
        return Outcome(error=error, trace=traceback.format_exc())


def _train(
    rank: int, store: Path, job: Job, size: int, hooks: Hooks, windows: OpenWindows, membership: dict[str, Any]
) -> None:
    world, evaluation = World(rank, size, job.plan.logical_workers), job.evaluation
    load = (
        (lambda: load_all(fetch_in_process, evaluation).arrays)
        if job.workers_evaluate and evaluation is not None
        else None
    )
    train(job, LocalMembership(world, store, **membership), windows, CPU, hooks, load_evaluation=load)


@dataclass(frozen=True)
class Trained:
    """What a run left behind.

    Args:
        commit: The newest checkpoint.
        steps: For every step what was recorded of it that must not depend on the workers, in the order of the steps.
        workers: For every step the world sizes that did it.
        snapshot: What the checkpoint holds.
    """

    commit: Commit
    steps: list[tuple[Any, ...]]
    workers: list[list[int]]
    snapshot: Snapshot

    @property
    def bits(self) -> dict[str, Any]:
        """The parameters' digest and all else that the newest checkpoint holds, tensors as digests."""
        return {"params": self.commit.params_digest, "file": self.commit.files[MODEL]["sha256"], **plain(self.snapshot)}


def plain(value: Any) -> Any:
    """Whatever a snapshot may hold, or one itself, to be compared: tensors as digests."""
    if isinstance(value, Snapshot):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return params_digest({"": value})
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def result_of(job: Job) -> Trained:
    """Reads a run's newest checkpoint and its record, and checks that steps that were done again gave the same."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    workers: dict[int, list[int]] = {}
    for path in sorted(job.paths.metrics.glob("*.json")):  # type: ignore[union-attr]
        columns = json.loads(path.read_bytes())
        for i, step in enumerate(columns["step"]):
            values = tuple(columns[name][i] for name in ("epoch", "loss", "lr", "grad_norm"))
            own = [tuple(sorted(columns["metrics"][i].items()))] if "metrics" in columns else []
            over = [columns["weight"][i]] if "weight" in columns else []
            found.setdefault(step, set()).add(
                (*values, tuple(columns["rows"][i]), tuple(columns["row_hash"][i]), *over, *own)
            )
            workers.setdefault(step, []).append(columns["workers"][i])
    steps = sorted(found)
    assert steps == list(range(1, len(steps) + 1)), "a step has no record"
    assert all(len(values) == 1 for values in found.values()), "a step that was done again has other numbers"
    store = CheckpointStore(job.paths)
    commit = store.commits()[-1]
    return Trained(commit, [found[s].pop() for s in steps], [workers[s] for s in steps], unpack(store.load(commit)))
