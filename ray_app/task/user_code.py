"""Where the code of a task is called: what it raises becomes a `TaskError` that says in which of the user's lines, and
what for.

Shown are the calls of the user's own files. Those of libraries and of this application are counted, but for the last
one, which says most.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType

from ray_app.errors import RayAppError, TaskError, remove_addresses

_APPLICATION = Path(__file__).parents[1]
_TASKS = Path(__file__).parent
_MACHINERY_MODULES = ("base", "user_code", "metrics", "metric_classes", "whole_batches", "lightning", "user_loop")
_MACHINERY = tuple(_TASKS / f"{name}.py" for name in _MACHINERY_MODULES)
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_MAX_CALLS = 30
_ON_DEVICE = "CUDA error"


class user_code:
    """A context in which the code of a task is called; a class, since each step enters several.

    Args:
        place: Says what is being done; asked only if something is raised.
        positions: Says for which rows, by their manifest positions.

    Raises:
        TaskError: The code raised anything but an error of the application's own.
    """

    def __init__(self, place: Callable[[], str], positions: Callable[[], Sequence[int]] = tuple) -> None:
        self._place, self._positions = place, positions

    def __enter__(self) -> None:
        """Begins it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it, see `Raises`."""
        if isinstance(error, Exception) and not isinstance(error, RayAppError):
            raise TaskError(
                describe_error(error), format_calls(error), self._place(), tuple(self._positions())
            ) from error


def describe_error(error: BaseException) -> str:
    """An error and the last of the user's own lines on the way to it: `KeyError: 'labels' (my_task.py, line 31, in
    update)`.
    """
    said = remove_addresses(f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0])
    if _ON_DEVICE in said:
        said += " (a GPU tells of errors later, maybe of those before: CUDA_LAUNCH_BLOCKING=1 shows where)"
    own = _user_frames(error)
    return said + (f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else "")


def row_error_reason(error: BaseException) -> str:
    """Why a row cannot be decoded: what a task of the application's says of it needs no more, what a user's raises
    needs the line.
    """
    own = _user_frames(error)
    is_users = bool(own) and not Path(own[-1].filename).is_relative_to(_TASKS)
    return describe_error(error) if is_users else remove_addresses(str(error)) or type(error).__name__


def _user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [call for call in traceback.extract_tb(error.__traceback__) if is_user_code(call.filename)]


def format_calls(error: BaseException) -> str:
    """The calls that led to an error, and to those that it came from, as Python shows them."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    told = [format_calls(before), "", "which led to:", ""] if before is not None else []
    said = remove_addresses(f"{type(error).__name__}: {error}".rstrip(": "))
    return "\n".join([*told, *_format_frames(traceback.extract_tb(error.__traceback__)), said])


def _format_frames(found: Sequence[traceback.FrameSummary]) -> Iterator[str]:
    """Calls in words, from the first of the user's own on; without one of them all are shown."""
    own = [i for i, call in enumerate(found) if is_user_code(call.filename)]
    told = found[own[0] if own else 0 :]
    if len(told) > _MAX_CALLS:
        yield f"  ... {len(told) - _MAX_CALLS} calls"
    for origin, group in groupby(
        told[-_MAX_CALLS:], lambda call: _library_of(call.filename) if own and call is not found[-1] else None
    ):
        some = list(group)
        if origin is not None:
            yield f"  ... {len(some)} call{'s' * (len(some) > 1)} in {origin}"
            continue
        for call in some:
            yield f'  File "{call.filename}", line {call.lineno}, in {call.name}'
            if call.line:
                yield f"    {call.line}"


def is_user_code(filename: str) -> bool:
    """Whether code is in a file of the user's, or in a task of the application's."""
    return _library_of(filename) is None


def _library_of(filename: str) -> str | None:
    """The library that code is in; None: see `is_user_code`."""
    path = Path(filename)
    if path.is_relative_to(_APPLICATION):
        return None if path.is_relative_to(_TASKS) and path not in _MACHINERY else _APPLICATION.name
    folder = next((name for name in ("site-packages", "dist-packages") if name in path.parts[:-1]), None)
    if folder is not None:
        return path.parts[path.parts.index(folder) + 1].removesuffix(".py")
    return (
        "Python" if filename.startswith("<frozen") or any(path.is_relative_to(place) for place in _STANDARD) else None
    )
