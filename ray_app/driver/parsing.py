"""Parsing of YAML files and command lines into a `Config`, with help and checks from the signatures of the classes.

`load_config` and `parse` are the functions for users and commands. Before jsonargparse parses anything, `check_files`
checks the YAML files, with errors that name the line, and afterwards `check_import_paths` checks the classes and
functions that the arguments of a task name. `driver/refusals.py` explains jsonargparse's errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader
from jsonargparse.typing import register_type
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.checks import check_config
from ray_app.config.config import SECTIONS, Config, TextDumper, expand_home, from_dict
from ray_app.config.import_paths import TurnSpec, iter_class_paths, load_class
from ray_app.driver.refusals import explain_error, explain_path
from ray_app.errors import ConfigError
from ray_app.process import current_folder
from ray_app.runlog.redaction import redact, register_secrets
from ray_app.task.base import Task


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses a key that occurs twice in a section, where others keep the last one silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """See `yaml.SafeLoader.construct_mapping`."""
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{key.start_mark.name} has {key.value!r} twice in one section, in lines {lines[key.value]} and"
                    f" {line}; the second would replace the first. Merge both into one."
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def check_files(arguments: Sequence[str]) -> None:
    """Raises `ConfigError` for a YAML file in a command line (`--config`) that is broken or has a section twice.

    The message names the file, the line and what to do.
    """
    for name, value in _named_values(arguments):
        if name == "--config" and os.path.isfile(value):
            _check_file(Path(value))


def _named_values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each option of a command line with the value that it may have, in the same or in the next argument."""
    for argument, next_argument in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals_sign, value = argument.partition("=")
        if name.startswith("--"):
            yield name, value if equals_sign or next_argument.startswith("--") else next_argument


def _check_file(file: Path) -> None:
    try:
        with file.open() as text:
            yaml.load(text, _UniqueKeyLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}); save it as UTF-8.") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{file} has a character that YAML refuses (#x{error.character:04x}, at {error.position}); remove it."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 0
        # The message does not quote the line, which may contain a secret.
        has_tab = "\t" in "".join(file.read_text().splitlines()[line - 1 : line])
        remedy = (
            "YAML is indented by blanks, but this line has a tab: replace it by two blanks."
            if has_tab
            else "Correct the line; a section's name ends with a colon, and its fields are indented by two blanks."
        )
        raise ConfigError(f"{file}, line {line}: {error.problem or error.context}. {remedy}") from error


def check_import_paths(task: str, init_args: dict[str, Any]) -> None:
    """Raises `ConfigError` for an import path in the arguments of a task that cannot be imported, with similar names.

    They are those of models, losses, transforms, and functions of a script.
    """
    functions = getattr(load_class(task), "functions", ())
    paths = [
        (f"task.init_args.{name}", "", init_args[name]) for name in functions if isinstance(init_args.get(name), str)
    ]
    for parent, field, path in [*paths, *iter_class_paths("task.init_args", init_args)]:
        try:
            load_class(path)
        # The imported module may raise any error.
        except Exception as error:
            raise _refusal(f"{explain_path(parent, field, path, error)}") from error


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"The configuration is refused: {problem}")


T = TypeVar("T")
_GROUPS = "groups"
"""The key beside `class_path` and `init_args` of an optimizer, which the parser handles as one of `init_args`."""
_UNTYPED = {"fail_untyped": False}
"""An argument without a type hint takes any value, because many models are written without type hints."""
_TRAINS = "Trains a model on a Ray cluster of any size; the number of workers does not change the result."


def load_config(path: str | os.PathLike[str] | None = None, **fields: Any) -> Config:
    """Reads and checks a configuration.

    Args:
        path: YAML file; without one only `fields` and the defaults count.
        **fields: Values that override those of the file, with `__` for the dot in names: `train__epochs=3`.

    Raises:
        ConfigError: A field is unknown or mistyped, or values do not fit together; the message names the file.
    """
    arguments = ["--config", str(path)] if path is not None else []
    for name, value in fields.items():
        text = value
        if not isinstance(value, str):
            text = yaml.dump(value, Dumper=TextDumper, default_flow_style=True).split("\n...")[0].strip()
        arguments.append(f"--{name.replace('__', '.')}={text}")
    try:
        return parse(arguments, prog="load_config", exit_on_error=False)
    except ConfigError as error:
        if path is None or str(path) in str(error):
            raise
        raise ConfigError(f"{path}{' with the fields given here' if fields else ''}: {error}") from error


def parse(arguments: Sequence[str] | None = None, prog: str = "ray-app train", exit_on_error: bool = True) -> Config:
    """Parses a command line.

    Args:
        arguments: The command line without the program; by default that of this process.
        prog: Name of the program, for messages.
        exit_on_error: Print an error and exit with code 2, as a command should, instead of raising.

    Raises:
        ConfigError: Values do not fit together, or any other error with `exit_on_error=False`.
    """
    return parse_with_sections(arguments, {}, prog, exit_on_error)[0]


def parse_with_sections(
    arguments: Sequence[str] | None,
    more: dict[str, type],
    prog: str,
    exit_on_error: bool = True,
    description: str = _TRAINS,
) -> tuple[Config, dict[str, Any]]:
    """Parses a command line as `parse` does, with sections that are not part of a run's configuration.

    Args:
        more: A dataclass for each additional section, by name.
        description: What the program does, for its help.

    Returns:
        The configuration, and the additional sections by name.
    """
    add_current_folder_to_path()
    parser = _parser(prog, description, exit_on_error, tuple((SECTIONS | more).items()))
    arguments = sys.argv[1:] if arguments is None else arguments
    check_files(arguments)
    try:
        # The default is an argument: the parser would pass all arguments of a default on to another class.
        parsed = parser.parse_args([f"--optimizer={Config.optimizer.class_path}", *arguments])
    except ArgumentError as error:
        raise _refusal(f"{explain_error(str(error), _fields(SECTIONS | more))}") from error
    if parsed.task is not None:
        check_import_paths(parsed.task.class_path, Namespace(parsed.task.get("init_args") or {}).as_dict())
    values = {name: value for name, value in _to_plain(parsed).items() if name != "config"}
    if not values.get("optimizer"):
        raise _refusal("optimizer is empty; write a class_path below it, or leave the section out.")
    groups = (values["optimizer"].get("init_args") or {}).pop(_GROUPS, None)
    for name in ("task", "optimizer", "schedule"):
        if values.get(name):
            values[name] = without_defaults(values[name])
    values["optimizer"][_GROUPS] = groups
    if any("class_path" not in spec for spec in values.get("observers") or []):
        raise _refusal("observers has an entry without class_path; each needs a class_path, and may have init_args.")
    if values.get("optimizers"):
        values["optimizers"] = {name: _parse_optimizer(name, spec) for name, spec in values["optimizers"].items()}
    more_sections = {name: section(**expand_home(values.pop(name, {}))) for name, section in more.items()}
    config = from_dict(values)
    check_config(config)
    return config, more_sections


def load_section(name: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """Returns a section that is not part of a run's configuration, from its values, with the checks of a file's.

    Raises:
        ConfigError: A field is unknown or mistyped.
    """
    parser = Parser(exit_on_error=False, parser_mode="ray_app")
    parser.add_class_arguments(kind, name)
    try:
        parsed = parser.parse_object({name: dict(values)})
    except ArgumentError as error:
        raise _refusal(f"{explain_error(str(error), _fields({name: kind}))}") from error
    return kind(**expand_home(_to_plain(parsed)[name]))


def parse_options(kind: type[T], arguments: Sequence[str] | None, prog: str, description: str) -> T:
    """Parses a command line with options that are the fields of a dataclass."""
    add_current_folder_to_path()
    parser = ArgumentParser(prog=prog, description=description)
    parser.add_class_arguments(kind, None)
    return kind(**parser.parse_args(arguments).as_dict())


def add_current_folder_to_path() -> None:
    """Adds the current folder to the search path, so that `class_path` can name classes in its files."""
    if "" not in sys.path and str(current_folder()) not in sys.path:
        sys.path.insert(0, str(current_folder()))


class Parser(ArgumentParser):
    """A parser that does not take the optimizer for an argument of a schedule, and redacts secrets in its messages.

    jsonargparse makes parsers of this class for nested classes, too.
    """

    fields: Sequence[str] = ()

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        """See `ArgumentParser.parse_args`."""
        _register_secrets_of(sys.argv[1:] if args is None else args)
        return super().parse_args(args, *more, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """See `ArgumentParser.error`."""
        # The message of a nested parser is not changed, because the outer parser reads it.
        text = explain_error(message, self.fields) if self.exit_on_error else message
        super().error(redact(text), ex)
        raise AssertionError("the parser has exited or raised")

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        """See `ArgumentParser.add_class_arguments`."""
        if isinstance(theclass, type) and issubclass(theclass, LRScheduler):
            kwargs["skip"] = {"optimizer", *kwargs.get("skip", ())}
        added = super().add_class_arguments(theclass, *args, **(kwargs | _UNTYPED))
        self._require_untyped(theclass, added)
        if isinstance(theclass, type) and issubclass(theclass, Optimizer):
            self.add_argument(f"--{_GROUPS}", type=list[dict[str, Any]] | None, default=None)
        return added

    def add_function_arguments(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        """See `ArgumentParser.add_function_arguments`."""
        added: list[str] = super().add_function_arguments(function, *args, **(kwargs | _UNTYPED))
        self._require_untyped(function, added)
        return added

    def _require_untyped(self, function: Callable[..., Any], added: list[str]) -> None:
        """Marks arguments without a type hint and a default as required; jsonargparse passes None for them."""
        empty, parameters = inspect.Parameter.empty, list[inspect.Parameter]()
        # Some functions in C have no signature.
        with suppress(TypeError, ValueError):
            parameters = list(inspect.signature(function).parameters.values())
        required = {parameter.name for parameter in parameters if parameter.annotation is parameter.default is empty}
        for action in self._actions:
            if action.dest in required.intersection(added):
                action.required, action.default = True, argparse.SUPPRESS


def _register_secrets_of(arguments: Sequence[str]) -> None:
    """Registers the secrets of a command line and of the files that it names, also if they contain errors."""
    for name, value in _named_values(arguments):
        register_secrets({name.rpartition(".")[2].lstrip("-"): value})
        # The parser reports errors.
        with suppress(Exception):
            content = yaml.safe_load(Path(value).read_text() if name == "--config" else value)
            register_secrets(content if isinstance(content, dict) else {})


@lru_cache(8)
def _parser(prog: str, description: str, exit_on_error: bool, sections: tuple[tuple[str, type], ...]) -> ArgumentParser:
    """Returns the parser of a command, which a process makes once; `sections` are pairs of a name and a dataclass."""
    set_loader("ray_app", _load_yaml, (yaml.YAMLError,))
    parser = Parser(
        prog=prog,
        parser_mode="ray_app",
        usage=f"{prog} --config FILE [--SECTION.FIELD VALUE ...]",
        description=description,
        exit_on_error=exit_on_error,
        allow_abbrev=False,
    )
    parser.fields = _fields(dict(sections))
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below; the last one wins.")
    task = "The task to train: class_path and init_args of a subclass of Task."
    parser.add_subclass_arguments(Task, "task", instantiate=False, required=True, help=task)
    optimizer = "The optimizer; default torch.optim.Adam."
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, instantiate=False, help=optimizer)
    schedule = "Learning-rate schedule, advanced after every step; default none."
    parser.add_subclass_arguments(LRScheduler, "schedule", instantiate=False, help=schedule)
    optimizers = "Alternating optimizers by name: class_path, init_args, groups, parameters, steps, schedule."
    parser.add_argument("--optimizers", type=dict[str, dict[str, Any]] | None, default=None, help=optimizers)
    observers = "Subclasses of ray_app.Observer that the driver notifies of events: class_path and init_args of each."
    parser.add_argument("--observers", type=list[dict[str, Any]] | None, default=None, help=observers)
    parser.add_argument("--seed", type=int, default=0, help="The seed from which all random numbers are derived.")
    for name, section in sections:
        parser.add_class_arguments(section, name)
    return parser


def _parse_optimizer(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns one of several optimizers, with its class and its schedule checked like those of a single optimizer."""
    field, allowed = f"optimizers.{name}", [item.name for item in dataclasses.fields(TurnSpec)]
    if unknown := spec.keys() - set(allowed):
        raise _refusal(f"{field} has the unknown keys {', '.join(sorted(unknown))}; allowed are {', '.join(allowed)}.")
    # The parser does not check these, and a text would count as a list of letters.
    names, steps = spec.get("parameters", []), spec.get("steps", 1)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"{field}.parameters is {names!r}; it must be a list of names, such as ['critic.*'].")
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise _refusal(f"{field}.steps is {steps!r}; it must be a number of steps, at least 1.")
    parser = Parser(exit_on_error=False, parser_mode="ray_app")
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, instantiate=False)
    parser.add_subclass_arguments(LRScheduler, "schedule", instantiate=False)
    init_args = {**(spec.get("init_args") or {}), _GROUPS: spec.get(_GROUPS)}
    classes: dict[str, Any] = {"optimizer": {"class_path": spec.get("class_path"), "init_args": init_args}}
    if spec.get("schedule"):
        classes["schedule"] = spec["schedule"]
    try:
        parsed = parser.parse_object(classes)
    except ArgumentError as error:
        raise _refusal(f"of {field}: {explain_error(str(error), ['optimizer', 'schedule'])}") from error
    values = _to_plain(parsed)
    groups = values["optimizer"]["init_args"].pop(_GROUPS, None)
    rest = {key: spec[key] for key in ("parameters", "steps") if key in spec}
    schedule = without_defaults(values.get("schedule"))
    return {**without_defaults(values["optimizer"]), _GROUPS: groups, "schedule": schedule, **rest}


class _Text(str):
    """A text in quotes that would be another value without them: the parser does not read it as YAML once more."""

    __slots__ = ()


class _TextLoader(yaml.SafeLoader):
    """A YAML loader that makes a `_Text` of such a text, where any value is allowed as in the arguments of a class."""

    def construct_scalar(self, node: Any) -> Any:
        """See `yaml.SafeLoader.construct_scalar`."""
        text = super().construct_scalar(node)
        return _Text(text) if node.style and not isinstance(_load_plainly(text), str) else text


def _load_plainly(text: str) -> Any:
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text


def _keep_texts(content: Any, texts: Any) -> Any:
    """Returns what the parser has read with each text that `_TextLoader` has kept as one."""
    if isinstance(texts, dict) and isinstance(content, dict):
        return {key: _keep_texts(value, texts.get(key)) for key, value in content.items()}
    if isinstance(texts, list) and isinstance(content, list):
        return [_keep_texts(*pair) for pair in zip(content, texts, strict=True)]
    return texts if isinstance(texts, _Text) else content


# The parser reads dates as texts, too.
_TextLoader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))
register_type(_Text, serializer=str, deserializer=_Text)


def _load_yaml(text: str) -> Any:
    """Returns YAML as the parser reads it, with `groups` of the optimizer among its `init_args`."""
    content = get_loader("yaml")(text)
    if isinstance(content, dict | list):
        content = _keep_texts(content, yaml.load(text, _TextLoader))
    # The text is that of a file, or the value of --optimizer.
    optimizer = content.get("optimizer", content) if isinstance(content, dict) else None
    if isinstance(optimizer, dict) and optimizer.keys() >= {"class_path", _GROUPS}:
        optimizer["init_args"] = {**(optimizer.get("init_args") or {}), _GROUPS: optimizer.pop(_GROUPS)}
    return content


def _fields(sections: dict[str, type]) -> list[str]:
    return [
        "seed",
        *(f"{name}.{field.name}" for name, section in sections.items() for field in dataclasses.fields(section)),
    ]


def _to_plain(value: Any) -> Any:
    """Returns what was parsed as a configuration has it: mappings, lists, numbers and texts."""
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def without_defaults(value: Any) -> Any:
    """Returns the specifications of classes with only those arguments that differ from their defaults.

    So an argument that a library adds later does not become a part of a run.
    """
    if isinstance(value, list):
        return [without_defaults(part) for part in value]
    if isinstance(value, dict) and value.keys() >= {"class_path", "dict_kwargs"}:
        raise ConfigError(
            f"{value['class_path']} has dict_kwargs {sorted(value['dict_kwargs'])}; a run stores only init_args. Name"
            " these arguments in the signature of the class, and set them in init_args."
        )
    if isinstance(value, dict) and value.keys() == {"class_path"}:
        # A stored run has `init_args` of every class.
        return {**value, "init_args": {}}
    if not isinstance(value, dict) or not value.keys() >= {"class_path", "init_args"}:
        return value
    parameters = inspect.signature(load_class(value["class_path"])).parameters
    init_args = {
        name: without_defaults(argument)
        for name, argument in (value["init_args"] or {}).items()
        if name not in parameters or not _is_default(parameters[name].default, argument)
    }
    return {"class_path": value["class_path"], "init_args": init_args}


def _is_default(default: Any, value: Any) -> bool:
    return bool((list(default) if isinstance(default, tuple) else default) == value)
