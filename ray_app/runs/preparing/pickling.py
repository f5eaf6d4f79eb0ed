"""Whether a task can be sent to other processes, and which part of a value cannot be sent or stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ray import cloudpickle

from ray_app.errors import ConfigError, without_addresses
from ray_app.task.base import Task

_MAX_DEPTH, _MAX_PARTS = 8, 10_000


def refuse_unpicklable(task: Task) -> None:
    """Pickles a task and reads it again, as it is sent to readers, workers and the evaluator; also where nothing is sent.

    A run may be continued with another strategy, so what one of them needs is asked of all.

    Raises:
        ConfigError: It cannot be pickled; the message names the attribute.
    """
    if (refused := find_refused(type(task).__name__, task, _pickling_error)) is None:
        return
    name, value, error = refused
    raise ConfigError(
        f"{name} of the task cannot be sent to other processes: it is a {type(value).__module__}.{type(value).__qualname__}"
        f" ({type(error).__name__}: {first_line(error)}). A task is pickled to readers, workers and the evaluator,"
        " whatever the strategy: keep settings in it, and make locks, open files, generators and connections where they are used."
    )


def _pickling_error(value: Any) -> Exception | None:
    """Why a value cannot be pickled and read again; None if it can."""
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception as error:  # the classes of a user raise anything
        return error
    return None


def first_line(error: Exception) -> str:
    """What an error says in its first line, without the addresses of objects, which are others each time."""
    return without_addresses(next(iter(str(error).splitlines()), ""))


def find_refused(
    name: str, value: Any, error_of: Callable[[Any], Exception | None], seen: set[int] | None = None
) -> tuple[str, Any, Exception] | None:
    """The innermost part of a value for which there is an error: what it is called, the part and its error; None if there is no error.

    Args:
        name: What the value is called.
        value: The value.
        error_of: Returns why a part cannot be used, or None.
        seen: Identities of the parts that were looked at.
    """
    if (error := error_of(value)) is None:
        return None
    seen = set() if seen is None else seen
    seen.add(id(value))
    if len(seen) < _MAX_PARTS and name.count(".") + name.count("[") < _MAX_DEPTH:
        for inner, part in _parts(name, value):
            if id(part) not in seen and (refused := find_refused(inner, part, error_of, seen)) is not None:
                return refused
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
