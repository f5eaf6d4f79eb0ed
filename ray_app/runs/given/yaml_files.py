"""YAML as it is given: what a reader of it would take for something else, or complain about without saying where, is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ray_app.errors import ConfigError


class _Once(yaml.SafeLoader):
    """Refuses a name that stands twice in a section, of which YAML's readers keep the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """See `yaml.SafeLoader.construct_mapping`."""
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{key.start_mark.name} has {key.value!r} twice in one section, in lines {lines[key.value]} and {line}; the second"
                    " would replace all of the first. Put what belongs to it in one place."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def refuse_bad_files(arguments: Sequence[str]) -> None:
    """Reads the files that a command line names with `--config`.

    Raises:
        ConfigError: One is no YAML, or has a section twice; the message names the file, the line and what to do.
    """
    following = [*arguments[1:], ""]
    for argument, after in zip(arguments, following, strict=True):
        name, given_here, value = argument.partition("=")
        place = value if given_here else after
        if name == "--config" and os.path.isfile(place):
            _read(Path(place))


def _read(file: Path) -> None:
    try:
        with file.open() as text:
            yaml.load(text, _Once)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8 ({error}); save it as such.") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{file} has a character that no text has (#x{error.character:04x}, at {error.position}); remove it.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 0
        has_tab = "\t" in "".join(file.read_text().splitlines()[line - 1 : line])  # the line itself may hold a secret
        remedy = (
            "YAML is indented by blanks, and this line has a tab: put two blanks in its place."
            if has_tab
            else "Correct the line; a section ends with a colon, and what is in it is indented by two blanks."
        )
        raise ConfigError(f"{file}, line {line}: {error.problem or error.context}. {remedy}") from error
