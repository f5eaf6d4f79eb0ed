"""A run in the background of a notebook, to be watched, disturbed and stopped from other cells."""

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
from rich.console import Console

from ray_app.config.config import Config
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, Run, open_run
from ray_app.errors import RunEndedError
from ray_app.storage.files import Location, put_atomic, to_location
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import RendezvousStatus
from ray_app.watch.terminal import RunConsole, SafeConsole

_LOOK_S = 0.25
_EXIT_S = 60.0


@dataclass(frozen=True)
class Worker:
    """A worker that trains now.

    Args:
        rank: Its rank.
        node: Id of its node, as Ray says it.
        pid: Id of its process there.
        step: Its finished steps.
        id: Id of its Ray actor.
    """

    rank: int
    node: str
    pid: int
    step: int
    id: str

    def __repr__(self) -> str:
        return f"<worker {self.rank}: process {self.pid} on node {self.node[:8]}, step {self.step}>"


@dataclass(frozen=True)
class _Slowly:
    """Pauses rank 0, and so all of them, after every step, as long as a file is there."""

    while_there: str
    seconds: float

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if rank == 0 and to_location(self.while_there).exists():
            time.sleep(self.seconds)


class Training:
    """A run that goes on in the background; made by `start_training`.

    It ends with the process at the latest: then it is stopped, with a checkpoint, and starting the same run name again
    continues it.

    Args:
        run: What runs.
        opened: What to leave when it has ended: the lease, the cluster.
        said: What it says meanwhile.
        slowed: A file; while it is there the run pauses after steps.
    """

    def __init__(self, run: Run, opened: ExitStack, said: StringIO, slowed: Location) -> None:
        self._run, self._opened, self._said, self._slowed = run, opened, said, slowed
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._newest: RendezvousStatus | None = None
        self._asking, self._over = threading.Lock(), False
        self._thread = threading.Thread(target=self._go, name="training", daemon=True)
        atexit.register(self._leave)  # before the thread, which unregisters it
        self._thread.start()

    @property
    def status(self) -> str:
        """`running`, or how it ended, see `Result.status`."""
        if self._thread.is_alive():
            return "running"
        return self._result.status if self._result is not None else "failed"

    @property
    def step(self) -> int:
        """Finished steps."""
        if self._result is not None:
            return int(self._result.summary["steps"])
        seen = self._look()
        return seen.record.step if seen is not None and seen.record is not None else 0

    def workers(self) -> list[Worker]:
        """The workers that train now, by rank; none while they form a group, and after the end."""
        beats = self._ask("workers") or []
        return [Worker(beat.rank, beat.node, beat.pid, beat.step, beat.worker) for beat in beats]

    def watch(self, *, step: int | None = None, workers: int | None = None, limit_s: float = 600.0) -> None:
        """Shows progress until the run is where it is awaited; interrupting it leaves the run alone.

        Args:
            step: Returns when so many steps are finished.
            workers: Returns when so many workers have finished a step together.
            limit_s: Seconds to wait at most.

        Raises:
            RunEndedError: The run has ended and did not come there, or no longer has so many workers.
            TimeoutError: It was not there in time.
        """
        wanted = (
            " and ".join([f"step {step}"] * (step is not None) + [f"{workers} workers"] * (workers is not None))
            or "nothing"
        )
        deadline_s = time.monotonic() + limit_s

        def is_there() -> bool:
            is_over = not self._thread.is_alive()
            if self.step >= (step or 0) and (workers is None or self._steps_with(workers)):
                return True
            if is_over:
                why = (
                    f"it failed: {self._error}"
                    if self._error
                    else f"it is {self.status}. Let it train longer, or slow it: pause_s"
                )
                raise RunEndedError(f"The run never came to {wanted}; {why}.") from self._error
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"The run did not come to {wanted} within {limit_s:g} s; it is at step {self.step}.")
            return False

        self._show_until(is_there)

    def wait(self) -> Result:
        """Lets it go at full speed, shows progress to its end, and says what came of it, as `run_training` does.

        Interrupting it leaves the run alone.

        Raises:
            RayAppError: See `run_training`.
        """
        self._slowed.unlink(missing_ok=True)
        self._show_until(lambda: not self._thread.is_alive(), shows_last=True)
        self._thread.join()
        _print(self._said)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> Result:
        """Stops it after the step at hand, with a checkpoint, and waits until its workers are gone; starting it again
        continues it.

        Raises:
            RayAppError: See `run_training`.
        """
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

    def _show_until(self, is_there: Callable[[], bool], shows_last: bool = False) -> None:
        with RunConsole(self._job, self._job.config.scaling.worker_limit, SafeConsole(Console()), lambda: []) as shown:
            while True:
                is_last_look = is_there()
                seen = self._look()
                waiting = seen.waiting if seen is not None else None
                shown.show(
                    seen.record if seen else None,
                    waiting or "waiting for the workers to start ...",
                    waiting is not None,
                )
                if is_last_look:
                    break
                self._thread.join(_LOOK_S)
            if shows_last:
                shown.show_last()

    def _steps_with(self, workers: int) -> bool:
        """Whether so many form the group now, and have finished a step together."""
        seen = self._look()
        return seen is not None and seen.record is not None and seen.record.workers == workers == len(self.workers())

    def _look(self) -> RendezvousStatus | None:
        """The newest word of the rendezvous; None before the first."""
        self._newest = self._ask("status") or self._newest
        return self._newest

    def _ask(self, what: str) -> Any:
        """Asks the rendezvous; None if it is not there yet, or any more."""
        with self._asking, suppress(ValueError, ray.exceptions.RayError):
            if not self._over and ray.is_initialized():  # asking would start a cluster
                return ray.get(getattr(ray.get_actor(self._job.rendezvous), what).remote())
        return None

    def _go(self) -> None:
        try:
            with self._opened:
                try:
                    self._result = self._run.run()
                finally:
                    with self._asking:  # whoever asked a cluster that is being left would start another one
                        self._over = True
        except BaseException as error:  # raised by `wait`
            self._error = error
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        self._run.stop()
        self._thread.join(_EXIT_S)


def start_training(config: Config, *, pause_s: float = 0.0) -> Training:
    """Starts a run like `run_training`, and returns at once; the run goes on while other cells are executed.

    Args: config: From `load_config`. pause_s: Seconds of a pause after each step, for a short run that somebody wants
        to watch. `wait` and `stop` end the pauses.

    Raises:
        ConfigError: The configuration is refused; nothing was started or written.
        DataError: The data is refused, likewise.
    """
    said = StringIO()
    slowed = to_location(config.run.storage_path) / f"slowed-{uuid.uuid4().hex}"
    faults = Faults(train=Hooks(after_step=_Slowly(str(slowed), pause_s))) if pause_s else Faults()
    with ExitStack() as stack:
        run = stack.enter_context(open_run(config, Console(file=said), faults, background=True))
        if pause_s:
            put_atomic(slowed, b"")
            stack.callback(slowed.unlink, missing_ok=True)
        _print(said)
        return Training(run, stack.pop_all(), said, slowed)


def _print(said: StringIO) -> None:
    """Prints what was said since the last time."""
    text = said.getvalue().rstrip()
    said.seek(0)
    said.truncate()
    if text:
        SafeConsole(Console()).print(text)
