"""Settings of this process that a run changes and restores, and standard streams that never raise.

The settings are signal handlers, environment variables and garbage collection. The process may be that of a notebook,
which goes on after the run.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import logging
import os
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Numbers of `malloc.h`: the free memory that the process keeps, and the size from which a block is mapped by itself.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

_lock = threading.Lock()
_previous_values: dict[str, list[list[Any]]] = {}
"""By the name of a setting: its value at the entry of each open block of `restore_setting`, the earliest first."""

_FOLDER_S = 5.0
_FLUSH_S = 2.0
_FLUSH_POLL_S = 0.1


def keep_freed_memory() -> None:
    """Makes glibc keep up to a gigabyte of freed memory for the next allocations, in a process that only computes.

    Each step allocates what the last one has freed. Memory that went back to the system in between comes back page by
    page, filled with zeros: up to 9,000 page faults in a step of ResNet-18, a tenth of its time (see `man 3 mallopt`).
    Settings in the environment take precedence. glibc cannot be told to return to its own changing thresholds.
    """
    malloc = ctypes.CDLL(None)
    if not hasattr(malloc, "mallopt") or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return
    malloc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    # glibc accepts no larger value.
    malloc.mallopt(_MMAP_THRESHOLD, 32 << 20)


def current_folder() -> Path:
    """Returns the current folder, which is entered again if it was removed and made again.

    Where several nodes of Ray are on one machine, the agent of each unpacks the working directory of a job into the
    same folder, and removes that of the other before.

    Raises:
        FileNotFoundError: The folder was not made again.
    """
    with suppress(FileNotFoundError):
        return Path.cwd()
    # The shell that started this process has set it.
    folder, deadline_s = os.environ.get("PWD", ""), time.monotonic() + _FOLDER_S
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            os.chdir(folder)
            return Path.cwd()
        time.sleep(0.1)
    reason = "the current folder of this process was removed; start the command again in a folder that exists"
    raise FileNotFoundError(errno.ENOENT, reason, folder)


def why_not_writable(folder: Path) -> str | None:
    """Makes and removes a folder in the nearest parent that exists; returns why that fails, None if it does not."""
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not existing.is_dir():
            return f"{existing} is a file"
        Path(tempfile.mkdtemp(prefix=".ray_app-", dir=existing)).rmdir()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or folder})"
    return None


def check_owner(folder: Path, advice: str) -> os.stat_result:
    """Returns the status of a folder that belongs to this user or root; refuses a link, a file, and any other owner.

    Another user could change the files in it, or have made a link to a folder of this user in its place.

    Raises:
        PermissionError: The message ends with the advice.
    """
    status = folder.lstat()
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, f"the owner is another user (uid {status.st_uid}); {advice}", str(folder))
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, f"the path is not a folder; remove it, or {advice}", str(folder))
    return status


def private_folder() -> Path:
    """Returns this user's folder in the temporary folder, `ray_app-UID`, which it makes if it does not exist.

    Raises:
        PermissionError: Another user can predict the name, and has made the folder first, or can write to it.
    """
    folder, advice = Path(tempfile.gettempdir()) / f"ray_app-{os.getuid()}", "set TMPDIR to your own folder"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    mode = check_owner(folder, advice).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = f"other users can write to the folder; remove it if it is not needed, or {advice}"
        raise PermissionError(errno.EPERM, reason, str(folder))
    if mode & 0o077:
        # Folders in it, such as those of Ray, may be open to all.
        folder.chmod(0o700)
    return folder


@cache
def temporary_folder() -> Path:
    """Returns `private_folder`; a new folder of this process if another user has taken the name of the usual one."""
    try:
        return private_folder()
    except PermissionError as error:
        folder = tempfile.mkdtemp(prefix="ray_app-")
        logger.warning("Temporary files are in %s: %s", folder, error)
        return Path(folder)


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to the standard error of the moment, which a copy of the output replaces for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr() -> None:
    """Writes log lines from INFO on to standard error, in all processes but the driver, which has its console."""
    application_logger = logging.getLogger("ray_app")
    if not application_logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        application_logger.addHandler(handler)
        # Ray Train prints the lines of the root logger of its workers, too.
        application_logger.propagate = False
    application_logger.setLevel(logging.INFO)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""The signals that ask a process to end soon.

Terminals send INT and HUP, schedulers TERM, and before a limit USR1, USR2 or XCPU (SLURM, LSF, SGE, PBS).
"""


def _stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop this process: none outside of the main thread, where Python allows no handlers.

    One that is ignored stays ignored (`nohup`, background jobs of scripts). One of a scheduler for which the program
    has a handler of its own, such as by `faulthandler.register`, keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    caught = 0
    with suppress(OSError), open("/proc/self/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))

    def is_free(number: signal.Signals) -> bool:
        handler = signal.getsignal(number)
        if number in (signal.SIGINT, signal.SIGTERM) or getattr(handler, "__module__", None) == __name__:
            return handler is not signal.SIG_IGN
        # Python does not know a handler that a library in C has installed.
        return handler is signal.SIG_DFL and not caught >> (number - 1) & 1

    return list(filter(is_free, STOP_SIGNALS))


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defers signals that ask this process to stop to the end of the block."""
    received: list[int] = []

    def record(number: int, _: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, record) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # `ray.init` may have installed its own.
            if signal.getsignal(number) is record:
                signal.signal(number, handler)
        for interrupt in dict.fromkeys(received):
            signal.raise_signal(interrupt)


@contextmanager
def restore_handler(number: signal.Signals) -> Iterator[None]:
    """Restores a signal's present handler at the end of the block; outside of the main thread it does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if is_main and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


@contextmanager
def stop_at_signals(interrupted: threading.Event) -> Iterator[None]:
    """Turns `STOP_SIGNALS` into a stop at the next step boundary; a second SIGINT raises `KeyboardInterrupt`.

    A second signal of a scheduler, which warns before it ends a job, changes nothing. The context is entered after
    `ray.init`, which installs its own handler, and left when the run is closed. So a claimed run records how it ended.
    """
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        interrupted.set()
        if received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    with _handled(_stop_signals(), stop):
        yield


@contextmanager
def interrupt_at_signals() -> Iterator[None]:
    """Makes the first of `STOP_SIGNALS` raise `KeyboardInterrupt` within the block, also after `ray.init`.

    Further ones do not disturb what ends then, except SIGINT.
    """
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        if number == signal.SIGINT or len(received) == 1:
            raise KeyboardInterrupt(number)

    with _handled(_stop_signals(), interrupt):
        try:
            yield
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            raise KeyboardInterrupt from error


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Installs a handler for some signals, and restores those before at the end."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    except RuntimeError as error:
        # An interrupt while a condition takes its lock again lets `with` release a lock that is free.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt(*error.__context__.args) from error
        raise
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def set_variables(**settings: str | None) -> Iterator[None]:
    """Sets environment variables (None: as it is), also of new processes, and restores them at its end."""
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(restore_setting(name, partial(os.environ.get, name), partial(_set_variable, name)))
            if value is not None:
                os.environ[name] = value
        yield


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def restore_setting(name: str, read: Callable[[], T], write: Callable[[T], object]) -> Iterator[None]:
    """Restores a setting of a name at the end of the block, whatever the block has done with it.

    Blocks may overlap, as those of two runs do; then the last one to end restores the value before the first.
    """
    previous: list[Any] = []
    with _lock:
        previous.append(read())
        _previous_values.setdefault(name, []).append(previous)
    try:
        yield
    finally:
        with _lock:
            blocks = _previous_values[name]
            index = next(i for i, block in enumerate(blocks) if block is previous)
            # A later block is still open: it has to restore the value from before this one.
            if index + 1 < len(blocks):
                blocks[index + 1][:] = previous
            else:
                write(previous[0])
            del blocks[index]


@contextmanager
def lasting_thread() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Provides a function that calls another one in a thread which lasts until the block ends, or in the main thread.

    Linux ends the processes of Ray with the thread that has started them, not with its process (PR_SET_PDEATHSIG).
    """
    if threading.current_thread() is threading.main_thread():
        yield lambda call: call()
        return
    result, is_over = Future[object](), threading.Event()

    def run(call: Callable[[], object]) -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # raised in the thread that waits
            result.set_exception(error)
        is_over.wait()

    def call_and_wait(call: Callable[[], object]) -> object:
        threading.Thread(target=run, args=(call,), name="ray-start", daemon=True).start()
        return result.result()

    try:
        yield call_and_wait
    finally:
        is_over.set()


@contextmanager
def without_gc() -> Iterator[None]:
    """Pauses the garbage collector; for imports in bulk, which produce no garbage and of which it takes a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SafeStream:
    """A text stream that never raises: it drops text that cannot be written, and logs the first failure (`failure`).

    Characters that the encoding lacks are written as escapes. A slow reader of a non-blocking pipe is waited for, up to
    two seconds. `name` names the stream in the warning.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        """See `TextIOBase.write`."""
        self._attempt(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See `IOBase.writelines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """See `IOBase.flush`."""
        self._attempt(self._stream.flush)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            try:
                work()
            except BlockingIOError:
                self._flush_slowly()
        except Exception as error:
            if self.failure is None:
                self.failure = error
                logger.warning(
                    "%s cannot be written, the work continues: %s: %s", self._name, type(error).__name__, error
                )

    def _flush_slowly(self) -> None:
        """Writes the contents of the buffers as the reader of a non-blocking pipe accepts them, for a limited time."""
        deadline_s = time.monotonic() + (_FLUSH_S if self.failure is None else 0.0)
        # Not `Retry`: it waits until the stream can be written, and does not sleep.
        while True:
            try:
                return self._stream.flush()
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                select.select([], [self._stream], [], _FLUSH_POLL_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_standard_streams_safe() -> None:
    """Replaces the standard output and the standard error of this process by streams that never raise."""
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream, title))


def import_in_background(module: str) -> None:
    """Imports a module in a thread, while the driver waits for the start of the cluster.

    Code that imports it earlier waits for the rest of the import. So does the end of the process, which could abort it
    otherwise.
    """

    def import_it() -> None:
        # An error occurs again where the module is needed.
        with suppress(Exception), without_gc():
            importlib.import_module(module)

    threading.Thread(target=import_it, name="imports").start()
