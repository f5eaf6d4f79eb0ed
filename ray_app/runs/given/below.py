"""Import paths below the arguments of a task: models, losses, transforms, functions of a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray_app.config.class_path import load_class
from ray_app.errors import ConfigError
from ray_app.runs.given.refusals import missing


def refuse_missing(task: str, init_args: dict[str, Any]) -> None:
    """Refuses what cannot be imported, by where it stands, with what is there and like it.

    Args:
        task: Class path of the task.
        init_args: Its arguments.

    Raises:
        ConfigError: There is no such class or function.
    """
    functions = getattr(load_class(task), "functions", ())
    paths = [(f"task.init_args.{name}", "", init_args[name]) for name in functions if isinstance(init_args.get(name), str)]
    for place, field, path in [*paths, *_class_paths("task.init_args", init_args)]:
        try:
            load_class(path)
        except Exception as error:  # its module may raise what it likes
            why = missing(path, object)
            told = (
                f"{field}{why.removeprefix('class_path')}" if why is not None else f"{field} is {path!r}: {type(error).__name__}: {error}."
            )
            raise ConfigError(f"The configuration is refused: {place}{told}") from error


def _class_paths(place: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Where import paths stand, and what they are."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _class_paths(f"{place}[{number}]", one)
    elif isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield place, ".class_path", value["class_path"]
        for name, one in value.items():
            yield from _class_paths(place if name == "init_args" else f"{place}.{name}", one)
