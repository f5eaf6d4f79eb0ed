"""YAML as it is given: what a reader of it would take for something else, or complain about without saying where, is
refused.

Import paths below the arguments of a task: models, losses, transforms, functions of a script.

The typed parser: YAML files and command line to a `Config`, with help and checks from the classes' own signatures.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_loader
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.checks import check_config
from ray_app.config.config import SECTIONS, Config, expand_home, from_dict
from ray_app.config.import_paths import TurnSpec, load_class
from ray_app.driver.refusals import explained, missing
from ray_app.errors import ConfigError
from ray_app.runlog.redaction import redact, register_secrets
from ray_app.task.base import Task


class _Once(yaml.SafeLoader):
    """Refuses a name that stands twice in a section, of which YAML's readers keep the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """See `yaml.SafeLoader.construct_mapping`."""
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{key.start_mark.name} has {key.value!r} twice in one section, in lines {lines[key.value]} and"
                    f" {line}; the second"
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
        raise ConfigError(
            f"{file} has a character that no text has (#x{error.character:04x}, at {error.position}); remove it."
        ) from error
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


def refuse_missing(task: str, init_args: dict[str, Any]) -> None:
    """Refuses what cannot be imported, by where it stands, with what is there and like it.

    Args:
        task: Class path of the task.
        init_args: Its arguments.

    Raises:
        ConfigError: There is no such class or function.
    """
    functions = getattr(load_class(task), "functions", ())
    paths = [
        (f"task.init_args.{name}", "", init_args[name]) for name in functions if isinstance(init_args.get(name), str)
    ]
    for place, field, path in [*paths, *_class_paths("task.init_args", init_args)]:
        try:
            load_class(path)
        except Exception as error:  # its module may raise what it likes
            why = missing(path, object)
            told = (
                f"{field}{why.removeprefix('class_path')}"
                if why is not None
                else f"{field} is {path!r}: {type(error).__name__}: {error}."
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


_GROUPS = "groups"
"""Stands beside `class_path` and `init_args` of an optimizer; the parser has it among the latter."""
_UNTYPED = {"fail_untyped": False}
"""An argument without a type hint may be anything: people write models so."""
_TRAINS = "Trains a model on a Ray cluster of any size; the number of workers does not change the result."


def load_config(path: str | os.PathLike[str] | None = None, **fields: Any) -> Config:
    """Reads and checks a configuration.

    Args:
        path: YAML file; not given: only `fields` and defaults.
        **fields: Values that go before the file's, dotted names with `__` for the dot: `train__epochs=3`.

    Raises:
        ConfigError: A field is unknown or mistyped, or values do not fit together; the message names the file.
    """
    arguments = ["--config", str(path)] if path is not None else []
    for name, value in fields.items():
        text = (
            value
            if isinstance(value, str)
            else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
        )
        arguments.append(f"--{name.replace('__', '.')}={text}")
    try:
        return parse(arguments, prog="load_config", exit_on_error=False)
    except ConfigError as error:
        if path is None or str(path) in str(error):
            raise
        raise ConfigError(f"{path}{' with the fields given beside it' if fields else ''}: {error}") from error


def parse(arguments: Sequence[str] | None = None, prog: str = "ray-app train", exit_on_error: bool = True) -> Config:
    """Parses a command line.

    Args:
        arguments: The command line without the program; not given: that of this process.
        prog: Name of the program, for messages.
        exit_on_error: Print an error and exit with code 2, as a command should, rather than raise.

    Raises:
        ConfigError: Values do not fit together, or any other error with `exit_on_error=False`.
    """
    return parse_more(arguments, {}, prog, exit_on_error)[0]


def parse_more(
    arguments: Sequence[str] | None,
    more: dict[str, type],
    prog: str,
    exit_on_error: bool = True,
    description: str = _TRAINS,
) -> tuple[Config, dict[str, Any]]:
    """`parse` with sections that are not part of a run's configuration, such as a command's own options.

    Args:
        arguments: See `parse`.
        more: A dataclass for every further section, by name.
        prog: See `parse`.
        exit_on_error: See `parse`.
        description: What the program does, for its help.

    Returns:
        The configuration, and the further sections by name.
    """
    importable_from_here()
    parser = _parser(prog, description, exit_on_error, SECTIONS | more)
    given = sys.argv[1:] if arguments is None else arguments
    refuse_bad_files(given)
    try:
        # A default of the parser's would hand all its arguments on to whatever class is named instead.
        parsed = parser.parse_args([f"--optimizer={Config.optimizer.class_path}", *given])
    except ArgumentError as error:
        raise ConfigError(f"The configuration is refused: {explained(str(error), _fields(SECTIONS | more))}") from error
    if parsed.task is not None:
        refuse_missing(parsed.task.class_path, Namespace(parsed.task.get("init_args") or {}).as_dict())
    try:
        dumped = parser.dump(parsed, skip_default=True, skip_unset=False)
    except (AttributeError, ImportError, TypeError, ValueError) as error:  # it imports every class_path below init_args
        raise ConfigError(
            f"The configuration is refused: a class_path below init_args cannot be imported: {error}."
        ) from error
    values = yaml.safe_load(dumped) or {}
    if not values.get("optimizer"):
        raise ConfigError(
            "The configuration is refused: optimizer is empty; write a class_path below it, or leave the section out."
        )
    groups = (values["optimizer"].get("init_args") or {}).pop(_GROUPS, None)
    for name in ("task", "optimizer", "schedule"):
        if values.get(name):
            values[name] = _as_set(values[name])
    values["optimizer"][_GROUPS] = groups
    if any("class_path" not in given for given in values.get("observers") or []):
        raise ConfigError(
            "The configuration is refused: observers is a list of class_path and init_args; one has no class_path."
        )
    if values.get("optimizers"):
        values["optimizers"] = {name: _turn(name, given) for name, given in values["optimizers"].items()}
    made = {name: section(**expand_home(values.pop(name, {}))) for name, section in more.items()}
    config = from_dict(values)
    check_config(config)
    return config, made


def importable_from_here() -> None:
    """Lets `class_path` name classes in files of the current folder."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


class Parser(ArgumentParser):
    """Knows that an optimizer is no argument of a schedule, also of one in another, and tells no secrets when it
    refuses something.

    jsonargparse makes parsers of this class for nested classes, too.
    """

    fields: Sequence[str] = ()

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        """See `ArgumentParser.parse_args`."""
        _guard_given(sys.argv[1:] if args is None else args)
        return super().parse_args(args, *more, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """See `ArgumentParser.error`."""
        told = (
            explained(message, self.fields) if self.exit_on_error else message
        )  # what a nested one says the outer one reads
        super().error(redact(told), ex)
        raise AssertionError("it has ended")

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        """See `ArgumentParser.add_class_arguments`."""
        if isinstance(theclass, type) and issubclass(theclass, LRScheduler):
            kwargs["skip"] = {"optimizer", *kwargs.get("skip", ())}
        added = super().add_class_arguments(theclass, *args, **(kwargs | _UNTYPED))
        self._need_untyped(theclass, added)
        if isinstance(theclass, type) and issubclass(theclass, Optimizer):
            self.add_argument(f"--{_GROUPS}", type=list[dict[str, Any]] | None, default=None)
        return added

    def add_function_arguments(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        """See `ArgumentParser.add_function_arguments`."""
        added: list[str] = super().add_function_arguments(function, *args, **(kwargs | _UNTYPED))
        self._need_untyped(function, added)
        return added

    def _need_untyped(self, of: Callable[..., Any], added: list[str]) -> None:
        """Marks arguments without type hint and default as needed, which jsonargparse takes for None where they are not
        given.
        """
        empty, parameters = inspect.Parameter.empty, list[inspect.Parameter]()
        with suppress(TypeError, ValueError):  # some that are written in C have no signature
            parameters = list(inspect.signature(of).parameters.values())
        needed = {parameter.name for parameter in parameters if parameter.annotation is parameter.default is empty}
        for action in self._actions:
            if action.dest in needed.intersection(added):
                action.required, action.default = True, argparse.SUPPRESS


def _guard_given(arguments: Sequence[str]) -> None:
    """Makes the secrets of a command line and of the files that it names known, also if something in it is wrong."""
    following = [*arguments[1:], ""]
    for argument, after in zip(arguments, following, strict=True):
        name, given_here, value = argument.partition("=")
        if not name.startswith("--"):
            continue
        value = value if given_here or after.startswith("--") else after
        register_secrets({name.rpartition(".")[2].lstrip("-"): value})
        with suppress(Exception):  # what is wrong with it the parser says
            given = yaml.safe_load(Path(value).read_text() if name == "--config" else value)
            register_secrets(given if isinstance(given, dict) else {})


def _parser(prog: str, description: str, exit_on_error: bool, sections: dict[str, type]) -> ArgumentParser:
    set_loader("ray_app", _loaded, (yaml.YAMLError,))
    parser = Parser(
        prog=prog,
        parser_mode="ray_app",
        usage=f"{prog} --config FILE [--SECTION.FIELD VALUE ...]",
        description=description,
        exit_on_error=exit_on_error,
        allow_abbrev=False,
    )
    parser.fields = _fields(sections)
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below; later ones win.")
    parser.add_subclass_arguments(
        Task,
        "task",
        instantiate=False,
        required=True,
        help="What is trained: class_path and init_args of a subclass of Task.",
    )
    parser.add_subclass_arguments(
        Optimizer, "optimizer", skip={"params"}, instantiate=False, help="The optimizer; default torch.optim.Adam."
    )
    parser.add_subclass_arguments(
        LRScheduler, "schedule", instantiate=False, help="Learning-rate schedule, moved after every step; default none."
    )
    parser.add_argument(
        "--optimizers",
        type=dict[str, dict[str, Any]] | None,
        default=None,
        help="Optimizers by name that take turns: class_path, init_args, groups, parameters, steps, schedule.",
    )
    parser.add_argument(
        "--observers",
        type=list[dict[str, Any]] | None,
        default=None,
        help="Classes, derived from ray_app.Observer, that the driver tells what happens: class_path and init_args of"
        " each.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Everything random derives from it.")
    for name, section in sections.items():
        parser.add_class_arguments(section, name)
    return parser


def _turn(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """One of several optimizers, its class and schedule checked as those of a single one are."""
    field, known = f"optimizers.{name}", [item.name for item in dataclasses.fields(TurnSpec)]
    if unknown := given.keys() - set(known):
        raise ConfigError(
            f"The configuration is refused: {field} has {', '.join(sorted(unknown))}; there are {', '.join(known)}."
        )
    _refuse_mistyped(field, given)
    parser = Parser(exit_on_error=False, parser_mode="ray_app")
    parser.add_subclass_arguments(Optimizer, "optimizer", skip={"params"}, instantiate=False)
    parser.add_subclass_arguments(LRScheduler, "schedule", instantiate=False)
    init_args = {**(given.get("init_args") or {}), _GROUPS: given.get(_GROUPS)}
    spec: dict[str, Any] = {"optimizer": {"class_path": given.get("class_path"), "init_args": init_args}}
    try:
        parsed = parser.parse_object(spec | ({"schedule": given["schedule"]} if given.get("schedule") else {}))
    except ArgumentError as error:
        raise ConfigError(
            f"The configuration is refused: of {field}: {explained(str(error), ['optimizer', 'schedule'])}"
        ) from error
    values = yaml.safe_load(parser.dump(parsed, skip_default=True, skip_unset=False))
    groups = values["optimizer"]["init_args"].pop(_GROUPS, None)
    rest = {key: given[key] for key in ("parameters", "steps") if key in given}
    return {**_as_set(values["optimizer"]), _GROUPS: groups, "schedule": _as_set(values.get("schedule")), **rest}


def _refuse_mistyped(field: str, given: dict[str, Any]) -> None:
    """Refuses what would be taken for something else: a text for its letters, a number in words.

    Raises:
        ConfigError: Something is no list of texts, or no number.
    """
    names, steps = given.get("parameters", []), given.get("steps", 1)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"The configuration is refused: {field}.parameters is {names!r}; it must be a list of names, as"
            f" ['critic.*']."
        )
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise ConfigError(
            f"The configuration is refused: {field}.steps is {steps!r}; it must be a number of steps, at least 1."
        )


def _loaded(text: str) -> Any:
    """YAML as the parser reads it."""
    found = get_loader("yaml")(text)
    optimizer = (
        found.get("optimizer", found) if isinstance(found, dict) else None
    )  # a file's, or the value of --optimizer
    if isinstance(optimizer, dict) and optimizer.keys() >= {"class_path", _GROUPS}:
        optimizer["init_args"] = {**(optimizer.get("init_args") or {}), _GROUPS: optimizer.pop(_GROUPS)}
    return found


def _fields(sections: dict[str, type]) -> list[str]:
    return [
        "seed",
        *(f"{name}.{field.name}" for name, section in sections.items() for field in dataclasses.fields(section)),
    ]


def _as_set(value: Any) -> Any:
    """A class, or several, with those arguments only that differ from their defaults: what a library adds later is not
    part of a run.
    """
    if isinstance(value, list):
        return [_as_set(part) for part in value]
    if isinstance(value, dict) and value.keys() >= {"class_path", "dict_kwargs"}:
        raise ConfigError(
            f"{value['class_path']} has dict_kwargs {sorted(value['dict_kwargs'])}; a run keeps init_args only. Name"
            f" these arguments in the"
            " signature of the class, and give them in init_args."
        )
    if isinstance(value, dict) and value.keys() == {"class_path"}:
        return {**value, "init_args": {}}  # as it is read again from a run, which has all of them
    if not isinstance(value, dict) or not value.keys() >= {"class_path", "init_args"}:
        return value
    parameters = inspect.signature(load_class(value["class_path"])).parameters
    given = value["init_args"] or {}
    kept = {k: _as_set(v) for k, v in given.items() if k not in parameters or not _same(parameters[k].default, v)}
    return {"class_path": value["class_path"], "init_args": kept}


def _same(default: Any, value: Any) -> bool:
    return bool((list(default) if isinstance(default, tuple) else default) == value)
