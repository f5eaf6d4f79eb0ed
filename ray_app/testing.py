"""Tests of tasks and strategies: the real training loop in worker processes of this machine, without Ray.

A test prepares a job with `make_job`, trains it on any number of workers of a `WorkerPool`, and compares the
`TrainedRun`s. Data is read in the workers, gradients are reduced by gloo over the loopback interface, and checkpoints
and records are those of a run. Recovery in place needs a cluster: if a worker is lost, the others end with an error,
and the next training continues from the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.context
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors.torch
from torch import Tensor

from ray_app.checkpoint.format import Snapshot, params_digest, unpack
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.preflight.prepare import prepare
from ray_app.preflight.short_trainings import MembershipFactory, cache_windows, stream_windows, train_rank
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.process_group import FileStoreMembership

__all__ = [
    "DieAfter",
    "FileStoreMembership",
    "Hooks",
    "KilledError",
    "RankResult",
    "TrainedRun",
    "WorkerPool",
    "cache_windows",
    "digest_tensors",
    "make_job",
    "read_trained_run",
    "stream_windows",
    "train_rank",
]

_ANSWER_TIMEOUT_S = 240.0


def make_job(config: Config, folder: Path) -> Job:
    """Prepares a configuration as `ray-app train` does, and returns the job of its workers.

    The section `run` does not matter. The folder of the run is made by the training.

    Raises:
        ConfigError: The configuration is refused, as a run would refuse it.
        DataError: The data is refused, as a run would refuse it.
    """
    prepared = prepare(config.replace(run__name=None))
    initial = None
    if prepared.initial is not None:
        initial = f"{folder}-initial.safetensors"
        safetensors.torch.save_file(prepared.initial, initial)
    return dataclasses.replace(prepared.job, run_root=str(folder), fence=1, initial=initial)


class KilledError(Exception):
    """A worker has ended because the test asked for it."""


@dataclass(frozen=True)
class DieAfter:
    """A `Hooks.after_step` that ends the training after a step: by SIGKILL of the rank `killed`, or by an error."""

    step: int
    killed: int | None = None

    def __call__(self, rank: int, step: int) -> None:
        """Ends this worker if the step is the one."""
        if step == self.step and self.killed is None:
            raise KilledError(f"rank {rank} dies after step {step}")
        if step == self.step and rank == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class RankResult:
    """The value that a function returned on one rank, or its error (`KilledError` if its process was killed) as well.

    `trace` is the traceback of the error as text.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


PRELOADED_MODULES = ("ray_app.testing", "ray_app.task.image", "torchmetrics", "pandas", "pytest")
"""Modules that take long to import; pyarrow imports pandas at its first array."""


def make_context(preloaded: Sequence[str] = PRELOADED_MODULES) -> multiprocessing.context.ForkServerContext:
    """Returns a context of multiprocessing: processes are forks of a server that has imported modules already.

    A process has one such server, and the first context that starts a process decides what the server imports. So
    start all processes of tests in contexts of this function: without the modules, each would import them again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


class WorkerPool:
    """Worker processes that live through many trainings, so that each imports torch only once.

    Use it as a context, or call `close`.

    Args:
        folder: Folder for the files at which process groups meet.
        preloaded: Modules that are imported once for all processes, if they are installed; see `make_context`.
    """

    def __init__(self, size: int, folder: Path, preloaded: Sequence[str] = PRELOADED_MODULES) -> None:
        self._folder, self._num_groups = folder, 0
        self._context = make_context(preloaded)
        self._workers = [self._start() for _ in range(size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self) -> tuple[Any, Any]:
        """Starts a process; returns it and the pipe to it."""
        pipe, worker_pipe = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(worker_pipe,), daemon=True)
        process.start()
        worker_pipe.close()
        return process, pipe

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

    def call(self, size: int, function: Callable[..., Any], *args: Any) -> list[RankResult]:
        """Calls `function(rank, store, *args)` in `size` processes, and returns the result of each.

        The function is pickled by reference. `store` is a new file for a process group.
        """
        self._num_groups += 1
        store = self._folder / f"store-{self._num_groups}"
        for rank in range(size):
            self._workers[rank][1].send((function, (rank, store, *args)))
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        return [self._receive(rank, deadline_s) for rank in range(size)]

    def _receive(self, rank: int, deadline_s: float) -> RankResult:
        """Waits for the result of a rank; a process that is gone, late or left with an error is replaced."""
        pipe = self._workers[rank][1]
        try:
            if pipe.poll(max(0.0, deadline_s - time.monotonic())):
                result = pipe.recv()
                if result.error is not None:
                    self._restart(rank)
                return result
            error: Exception = TimeoutError(f"rank {rank} did not answer within {_ANSWER_TIMEOUT_S:g} s")
        except (EOFError, ConnectionResetError):
            error = KilledError(f"the process of rank {rank} was killed")
        self._restart(rank)
        return RankResult(error=error, trace=str(error))

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function as `call` does, and returns the values; an error of any rank fails."""
        results = self.call(size, function, *args)
        assert all(r.error is None for r in results), "\n".join(r.trace for r in results)
        return [r.value for r in results]

    def train(
        self,
        job: Job,
        size: int,
        hooks: Hooks = Hooks(),
        windows: OpenWindows = stream_windows,
        membership: MembershipFactory = FileStoreMembership,
    ) -> list[RankResult]:
        """Runs the training loop on `size` workers, from the newest checkpoint of the run if it has one.

        Args:
            job: What to train, from `make_job`.
            hooks: Faults, such as `Hooks(after_step=DieAfter(5, killed=1))`.
            windows: How rows reach the step.
            membership: Makes the membership of each worker; it is pickled.
        """
        return self.call(size, train_rank, job, size, hooks, windows, membership)

    def train_to_end(self, job: Job, size: int, windows: OpenWindows = stream_windows) -> None:
        """Trains as `train` does; an error of any rank fails."""
        self.run(size, train_rank, job, size, Hooks(), windows, FileStoreMembership)

    def train_new_run(self, job: Job, size: int, windows: OpenWindows = stream_windows) -> TrainedRun:
        """Trains from the first step to the last in a run folder of its own, and returns the run."""
        job = dataclasses.replace(job, run_root=f"{job.run_root}-{self._num_groups}")
        self.train_to_end(job, size, windows)
        return read_trained_run(job)


def _serve(pipe: Any) -> None:
    """Answers calls until the pipe closes or a call fails.

    The frames of an error hold the process group, and the peers may wait for its connections to close. So the process
    ends after an error, and the pool starts another.
    """
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        result = _call(function, args)
        pipe.send(result)
        if result.error is not None:
            return


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> RankResult:
    try:
        return RankResult(function(*args))
    except Exception as error:
        return RankResult(error=error, trace=traceback.format_exc())


@dataclass(frozen=True)
class TrainedRun:
    """What a run left behind.

    Args:
        commit: The newest checkpoint.
        steps: What was recorded of each step and must not depend on the workers, in the order of the steps.
        workers: The number of workers of each execution of each step.
        snapshot: The contents of the checkpoint.
    """

    commit: Commit
    steps: list[tuple[Any, ...]]
    workers: list[list[int]]
    snapshot: Snapshot

    @property
    def digests(self) -> dict[str, Any]:
        """The digest of the parameters, and everything else that the newest checkpoint holds, tensors as digests.

        Two runs with equal digests are bit-identical: parameters, buffers, optimizer, schedule and position.
        """
        values = digest_tensors(self.snapshot)
        return {"params": self.commit.params_digest, **values}


def digest_tensors(value: Any) -> Any:
    """Returns a snapshot, or a value that one may hold, with a digest in place of each tensor, for comparisons."""
    if isinstance(value, Snapshot):
        return {item.name: digest_tensors(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return params_digest({"": value})
    if isinstance(value, dict):
        return {k: digest_tensors(v) for k, v in value.items()}
    return [digest_tensors(v) for v in value] if isinstance(value, list | tuple) else value


_RESULT_COLUMNS = ("epoch", "loss", "lr", "grad_norm")


def read_trained_run(job: Job) -> TrainedRun:
    """Reads the newest checkpoint and the records of a run.

    Raises:
        AssertionError: A step has no record, or a step that was executed again has other numbers.
    """
    records: dict[int, set[tuple[Any, ...]]] = {}
    workers: dict[int, list[int]] = {}
    for path in sorted(Path(job.run_root, "metrics").glob("*.json")):
        columns = json.loads(path.read_bytes())
        for i, step in enumerate(columns["step"]):
            values = [columns[name][i] for name in _RESULT_COLUMNS]
            values += [tuple(columns["rows"][i]), tuple(columns["row_hash"][i])]
            if "weight" in columns:
                values.append(columns["weight"][i])
            if "metrics" in columns:
                values.append(tuple(sorted(columns["metrics"][i].items())))
            records.setdefault(step, set()).add(tuple(values))
            workers.setdefault(step, []).append(columns["workers"][i])
    steps = sorted(records)
    assert steps == list(range(1, len(steps) + 1)), "a step has no record"
    assert all(len(values) == 1 for values in records.values()), "a repeated step has other values"
    store = CheckpointStore(job.paths)
    commit = store.commits()[-1]
    return TrainedRun(
        commit, [records[s].pop() for s in steps], [workers[s] for s in steps], unpack(store.load(commit))
    )
