"""Whether a task can be sent to other processes, and what in it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ray import cloudpickle

from ray_app.errors import ConfigError
from ray_app.task.base import Task

_MAX_DEPTH = 8
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def refuse_unpicklable(task: Task) -> None:
    """Pickles a task and reads it again, as it is sent to readers, workers and the evaluator; also where nothing is sent.

    A run may be continued with another strategy, so what one of them needs is asked of all.

    Raises:
        ConfigError: It cannot be pickled; the message names the attribute.
    """
    error = _error_of(task)
    if error is None:
        return
    name, value, why = _culprit(f"{type(task).__name__}", task, error, set())
    raise ConfigError(
        f"{name} of the task cannot be sent to other processes: it is a {type(value).__module__}.{type(value).__qualname__}"
        f" ({type(why).__name__}: {_first_line(why)}). A task is pickled to readers, workers and the evaluator,"
        " whatever the strategy: keep settings in it, and make locks, open files, generators and connections where they are used."
    )


def _error_of(value: Any) -> Exception | None:
    """Why a value cannot be pickled and read again; None if it can."""
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception as error:  # the classes of a user raise anything
        return error
    return None


def _first_line(error: Exception) -> str:
    """What an error says in its first line, without the addresses of objects, which are others each time."""
    return _ADDRESS.sub("", next(iter(str(error).splitlines()), ""))


def _culprit(name: str, value: Any, error: Exception, seen: set[int]) -> tuple[str, Any, Exception]:
    """The innermost part of a value that cannot be pickled: what it is called, the part and its error."""
    seen.add(id(value))
    if len(seen) < 10_000 and name.count(".") + name.count("[") < _MAX_DEPTH:
        for inner, part in _parts(name, value):
            if id(part) not in seen and (why := _error_of(part)) is not None:
                return _culprit(inner, part, why, seen)
    return name, value, error


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds: attributes, items, and what a function or a method is bound to."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif (owner := getattr(value, "__self__", None)) is not None and not isinstance(owner, type):
        yield f"{name}.__self__", owner
    elif (closure := getattr(value, "__closure__", None)) is not None:
        names = value.__code__.co_freevars
        yield from ((f"{name}, which uses {free}", cell.cell_contents) for free, cell in zip(names, closure, strict=True))
    else:
        yield from ((f"{name}.{attribute}", part) for attribute, part in getattr(value, "__dict__", {}).items())
