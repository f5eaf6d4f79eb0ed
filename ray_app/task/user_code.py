"""Errors of user code: a context that converts them into `TaskError`, and texts that name the user's lines.

A traceback shows the calls in the user's files. Calls in libraries and in this application are counted, except the last
one, which is the most informative.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ray_app.errors import RayAppError, TaskError, remove_addresses

T = TypeVar("T")
_APPLICATION = Path(__file__).parents[1]
_TASKS = Path(__file__).parent
# Modules of `task` that only call user code; the others are tasks, which count as user code.
_MACHINERY_MODULES = ("base", "user_code", "metrics", "metric_classes", "whole_batches", "lightning", "user_loop")
MACHINERY = (
    *(_TASKS / f"{name}.py" for name in _MACHINERY_MODULES),
    *sorted((_TASKS / "keras").glob("*.py")),
)
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_MAX_CALLS = 30
_ON_DEVICE = "CUDA error"


class user_code:
    """A context that calls the code of a task, and turns its errors into a `TaskError`.

    The error of a device that has failed becomes a `DeviceFaultError`, see `find_device_fault`.

    It is a class, because each step enters several, and a generator is slower. `activity` says what the code does, and
    `positions` on which rows, as manifest positions; both are called only after an error.
    """

    def __init__(self, activity: Callable[[], str], positions: Callable[[], Sequence[int]] = tuple) -> None:
        self._activity, self._positions = activity, positions

    def __enter__(self) -> None:
        """Enters the context."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the context and converts an error, see the class."""
        if isinstance(error, Exception) and not isinstance(error, RayAppError):
            # Readers, which use no device, import this module.
            from ray_app.task.environment import find_device_fault

            raise (
                find_device_fault(error)
                or TaskError(describe_error(error), format_calls(error), self._activity(), tuple(self._positions()))
            ) from error


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error with the last line of user code that led to it.

    An example is `KeyError: 'labels' (my_task.py, line 31, in update)`.
    """
    message = remove_addresses(f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0])
    if _ON_DEVICE in message:
        message += " (a GPU reports errors late, possibly from earlier calls: CUDA_LAUNCH_BLOCKING=1 shows where)"
    if not (frames := _user_frames(error)):
        return message
    last = frames[-1]
    return f"{message} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def row_error_reason(error: BaseException) -> str:
    """Returns why a row cannot be decoded, from the error of the decoding.

    An error of user code is described with its line, see `describe_error`. Of an error of the application, such as of
    one of its tasks, only the message is returned.
    """
    frames = _user_frames(error)
    is_users = bool(frames) and not Path(frames[-1].filename).is_relative_to(_TASKS)
    return describe_error(error) if is_users else remove_addresses(str(error)) or type(error).__name__


def bisect_rows(count: int, attempt: Callable[[int, int], T]) -> Iterator[tuple[int, int, T | Exception]]:
    """Yields parts [low, high) of rows that are as long as possible, with the result or, of one row, with its error.

    Args:
        count: Number of rows.
        attempt: Gets such a part and returns its result, or raises an error that does not say of which row it is.
    """
    todo = [(0, count)]
    while todo:
        low, high = todo.pop()
        result: T | Exception
        try:
            result = attempt(low, high)
        except Exception as error:
            if high - low > 1:
                todo += [((low + high) // 2, high), (low, (low + high) // 2)]
                continue
            result = error
        yield low, high, result


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [call for call in traceback.extract_tb(error.__traceback__) if is_user_code(call.filename)]


def format_calls(error: BaseException) -> str:
    """Returns the calls that led to an error and to its causes, formatted like Python's tracebacks."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    cause = [format_calls(before), "", "which led to:", ""] if before is not None else []
    message = remove_addresses(f"{type(error).__name__}: {error}".rstrip(": "))
    return "\n".join([*cause, *_format_frames(traceback.extract_tb(error.__traceback__)), message])


def _format_frames(frames: Sequence[traceback.FrameSummary]) -> Iterator[str]:
    """Yields lines for the calls from the first one in user code on; for all calls if there is none."""
    user_calls = [i for i, call in enumerate(frames) if is_user_code(call.filename)]
    visible = frames[user_calls[0] if user_calls else 0 :]
    if len(visible) > _MAX_CALLS:
        yield f"  ... {len(visible) - _MAX_CALLS} calls"

    def collapsed_library(call: traceback.FrameSummary) -> str | None:
        return _library_of(call.filename) if user_calls and call is not frames[-1] else None

    for library, group in groupby(visible[-_MAX_CALLS:], collapsed_library):
        calls = list(group)
        if library is not None:
            yield f"  ... {len(calls)} call{'s' * (len(calls) > 1)} in {library}"
            continue
        for call in calls:
            yield f'  File "{call.filename}", line {call.lineno}, in {call.name}'
            if call.line:
                yield f"    {call.line}"


def is_user_code(filename: str) -> bool:
    """Whether a file has user code, or a task of the application."""
    return _library_of(filename) is None


def _library_of(filename: str) -> str | None:
    """Returns the name of the library that a file belongs to, None for a file of `is_user_code`."""
    path = Path(filename)
    if path.is_relative_to(_APPLICATION):
        return None if path.is_relative_to(_TASKS) and path not in MACHINERY else _APPLICATION.name
    folder = next((name for name in ("site-packages", "dist-packages") if name in path.parts[:-1]), None)
    if folder is not None:
        return path.parts[path.parts.index(folder) + 1].removesuffix(".py")
    is_standard = filename.startswith("<frozen") or any(path.is_relative_to(folder) for folder in _STANDARD)
    return "Python" if is_standard else None
