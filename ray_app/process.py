"""What a run changes in the process that it is in, which may be a notebook's, and gives back: signals, environment,
settings.

Imports in bulk: what is imported is no garbage, and to look for some meanwhile takes a fifth of the time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_lock = threading.Lock()
_lent: dict[str, list[list[Any]]] = {}
"""What each setting was before each of the times for which it is lent now, by the name of the setting, the earliest
first.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What `malloc.h` calls the free memory that is kept, and what the system is asked for on its own."""


def keep_freed_memory() -> None:
    """Lets glibc keep up to a gigabyte of freed memory for what is asked for next; for a process that does nothing but
    compute for a run.

    Each step asks for what the one before has freed. What went back to the system in between comes again page by page,
    filled with zeros: up to 9,000 page faults in a step of ResNet-18, a tenth of its time (see `man 3 mallopt`). A
    thread's own memory is kept up to 64 MB. What the environment says of it counts more. glibc cannot be asked to go
    back to its own changing thresholds.
    """
    malloc = ctypes.CDLL(None)
    if not hasattr(malloc, "mallopt") or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return
    malloc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    malloc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that it takes


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds an interrupt back to the end; in another thread than the main one there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """Puts the handler that a signal has now back at the end, if both are in the main thread; no other may do so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if is_main and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


@contextmanager
def variables(**settings: str | None) -> Iterator[None]:
    """Sets environment variables, also for processes that are started meanwhile, and puts them back.

    Args:
        settings: Their values; None: what it is.
    """
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(put_back(name, partial(os.environ.get, name), partial(_set_variable, name)))
            if value is not None:
                os.environ[name] = value
        yield


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def put_back(name: str, read: Callable[[], T], write: Callable[[T], object]) -> Iterator[None]:
    """Whatever a setting becomes, it is then what it was. Of several times that overlap, as those of two runs, the last
    one puts it back.

    Args:
        name: What the setting is called.
        read: What it is.
        write: Makes it that.
    """
    mine: list[Any] = []
    with _lock:
        mine.append(read())
        _lent.setdefault(name, []).append(mine)
    try:
        yield
    finally:
        with _lock:
            times = _lent[name]
            place = next(i for i, each in enumerate(times) if each is mine)
            if place + 1 < len(times):
                times[place + 1][:] = mine
            else:
                write(mine[0])
            del times[place]


@contextmanager
def without_gc() -> Iterator[None]:
    """Has nobody look for garbage meanwhile."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()
