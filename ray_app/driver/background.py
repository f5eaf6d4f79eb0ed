"""Training in the background of a notebook, which other cells watch, disturb and stop."""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Any

import ray

from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.config.config import Config
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Run, open_run
from ray_app.errors import RunEndedError, SilentActorError
from ray_app.runlog.output import TextConsole
from ray_app.storage.files import Location, put_atomic, to_location
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.watch.terminal import RunConsole, SafeConsole

_POLL_S = 0.25
_EXIT_TIMEOUT_S = 60.0
"""Seconds that a run has to write a checkpoint and end when the process ends."""


@dataclass(frozen=True)
class Worker:
    """A worker that trains now; `id` is that of its Ray actor."""

    rank: int
    node: str
    pid: int
    step: int
    id: str

    def __repr__(self) -> str:
        return f"<worker {self.rank}: process {self.pid} on node {self.node[:8]}, step {self.step}>"


@dataclass(frozen=True)
class _PauseAfterStep:
    """Pauses rank 0, for which all ranks wait, after every step, as long as a file exists."""

    flag_file: str
    seconds: float

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank == 0 and to_location(self.flag_file).exists():
            time.sleep(self.seconds)


class Training:
    """A run in the background; made by `start_training`.

    It ends with the process at the latest: then it is stopped, with a checkpoint, and starting the same run name again
    continues it.
    """

    def __init__(self, run: Run, open_contexts: ExitStack, output: StringIO, pause_file: Location) -> None:
        self._run = run
        self._open_contexts = open_contexts
        self._output = output
        self._pause_file = pause_file
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._newest: RendezvousStatus | None = None
        self._query_lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run_to_end, name="training", daemon=True)
        # The thread unregisters the function at its end, so it is registered before the thread starts.
        atexit.register(self._stop_at_exit)
        self._thread.start()

    @property
    def status(self) -> str:
        """`running`, or how the run ended, see `Result.status`."""
        if self._thread.is_alive():
            return "running"
        return self._result.status if self._result is not None else "failed"

    @property
    def step(self) -> int:
        """The number of finished steps."""
        if self._result is not None:
            return int(self._result.summary["steps"])
        status = self._query_status()
        return status.record.step if status is not None and status.record is not None else 0

    def workers(self) -> list[Worker]:
        """Returns the workers that train now, by rank; none while they form a generation, and after the end."""
        heartbeats = self._query("workers") or []
        return [Worker(beat.rank, beat.node, beat.pid, beat.step, beat.worker) for beat in heartbeats]

    def watch(self, *, step: int | None = None, workers: int | None = None, limit_s: float = 600.0) -> None:
        """Shows progress until so many steps are finished, and so many workers have finished a step together.

        An interrupt does not affect the run. It waits for `limit_s` seconds at most.

        Raises:
            RunEndedError: The run has ended before, or has ended and no longer has so many workers.
            TimeoutError: The run has not reached it in time.
        """
        goals = [f"step {step}"] * (step is not None) + [f"{workers} workers"] * (workers is not None)
        goal = " and ".join(goals) or "nothing"
        deadline_s = time.monotonic() + limit_s

        def is_reached() -> bool:
            # The thread is looked at first, so that the last step of a run that ends meanwhile counts.
            is_over = not self._thread.is_alive()
            if self.step >= (step or 0) and (workers is None or self._steps_with(workers)):
                return True
            if is_over:
                why = f"the run is {self.status}. Train longer, or slow the run down with pause_s"
                if self._error:
                    why = f"the run failed: {self._error}"
                raise RunEndedError(f"The run ended before {goal}; {why}.") from self._error
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"The run did not reach {goal} within {limit_s:g} s; it is at step {self.step}.")
            return False

        self._show_until(is_reached)

    def wait(self) -> Result:
        """Ends the pauses, shows progress to the end of the run, and prints its result; raises as `run_training` does.

        An interrupt does not affect the run.
        """
        self._pause_file.unlink(missing_ok=True)
        self._show_until(lambda: not self._thread.is_alive(), shows_last=True)
        self._thread.join()
        _print_new(self._output)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> Result:
        """Stops the run after the present step, with a checkpoint, and waits for its end; a new start continues it."""
        self._run.stop()
        return self.wait()

    def __repr__(self) -> str:
        return (
            f"<run {self._job.paths.name}: {self.status}, step {self.step} of {self._job.total_steps},"
            f" {len(self.workers())} workers>"
        )

    @property
    def _job(self) -> Job:
        return self._run.job

    def _show_until(self, is_reached: Callable[[], bool], shows_last: bool = False) -> None:
        max_workers = self._job.config.scaling.worker_limit
        with RunConsole(self._job, max_workers, SafeConsole(TextConsole()), lambda: []) as console:
            while True:
                is_last = is_reached()
                console.show_status(self._query_status())
                if is_last:
                    break
                self._thread.join(_POLL_S)
            if shows_last:
                console.show_last()

    def _steps_with(self, workers: int) -> bool:
        """Returns whether so many workers form the generation now and have finished a step together."""
        status = self._query_status()
        record = status.record if status is not None else None
        return record is not None and record.workers == workers == len(self.workers())

    def _query_status(self) -> RendezvousStatus | None:
        """Returns the newest status of the rendezvous; None before the first."""
        self._newest = self._query("status") or self._newest
        return self._newest

    def _query(self, method: str) -> Any:
        """Returns the result of a method of the rendezvous; None if the rendezvous does not exist yet, or any more."""
        with self._query_lock, suppress(ValueError, SilentActorError, ray.exceptions.RayError):
            # Without a connection the call would start a cluster.
            if not self._is_over and ray.is_initialized():
                return getattr(RendezvousHandle(ray.get_actor(self._job.rendezvous)), method)()
        return None

    def _run_to_end(self) -> None:
        try:
            with self._open_contexts:
                try:
                    self._result = self._run.run()
                finally:
                    # A query during the disconnection from the cluster would start another one.
                    with self._query_lock:
                        self._is_over = True
        # The error is raised by `wait`.
        except BaseException as error:
            self._error = error
        atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self._run.stop()
        self._thread.join(_EXIT_TIMEOUT_S)


def start_training(config: Config, *, pause_s: float = 0.0) -> Training:
    """Starts a run like `run_training`, and returns at once; the run goes on while other cells are executed.

    Args:
        config: From `load_config`.
        pause_s: Seconds of a pause after each step, to watch a short run. `wait` and `stop` end the pauses.

    Raises:
        ConfigError, DataError: The configuration or the data is refused; nothing was started or written.
    """
    output = StringIO()
    pause_file = to_location(config.run.storage_path) / f"slowed-{uuid.uuid4().hex}"
    faults = Faults(train=Hooks(after_step=_PauseAfterStep(str(pause_file), pause_s))) if pause_s else Faults()
    with ExitStack() as stack:
        run = stack.enter_context(open_run(config, TextConsole(file=output), faults, background=True))
        if pause_s:
            put_atomic(pause_file, b"")
            stack.callback(pause_file.unlink, missing_ok=True)
        _print_new(output)
        return Training(run, stack.pop_all(), output, pause_file)


def _print_new(output: StringIO) -> None:
    """Prints the messages that have been collected since the last call."""
    text = output.getvalue().rstrip()
    output.seek(0)
    output.truncate()
    if text:
        SafeConsole(TextConsole()).print(text)
