"""What jsonargparse refuses, in a line: the field, what was given, the nearest valid names. Its own text buries
these.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.task.base import Task

_BASES: dict[str, type] = {"task": Task, "optimizer": Optimizer, "schedule": LRScheduler}
_LIKE = {
    "task": "my_project.task.MyTask",
    "optimizer": "torch.optim.Adam",
    "schedule": "torch.optim.lr_scheduler.OneCycleLR",
}
_FIELD = re.compile(r'Parser key "(task|optimizer|schedule)"')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_OPTION = re.compile(r"Option '([^']+)' is not accepted")
_NEEDED = re.compile(r"the following arguments are required: ([\w, ]+)")
_NO_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_VALUE = re.compile(r"""Parser key "(?!task"|optimizer"|schedule")([\w.]+)".*?Given value: ([^\n]*)""", re.DOTALL)
_IN_A_FILE = re.compile(r"^\s*(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'(?: is not accepted)?\s*$")
_UNKNOWN = re.compile(r"unrecognized arguments: --([\w.-]+)")
_SECTION_VALUE = re.compile(r"""Parser key "([\w.]+)":.*?(?:Got value: ([^\n]*)|Given value: ([^\n]*))""", re.DOTALL)
_EXPECTED = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])")
_CALLED = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
    "dict": "a mapping",
}
_MOST_NAMED = 12


def explained(message: str, fields: Iterable[str]) -> str:
    """A refusal of jsonargparse's in the house's words, or as it is if it is of no kind that is known.

    Args:
        message: What it says.
        fields: The dotted names that a configuration has.
    """
    names = sorted(fields)
    if not names:
        return message
    if found := _UNKNOWN.search(message):
        return _of_field(f"--{found[1]}", found[1], names)
    if found := _IN_A_FILE.search(message):
        place = ".".join(filter(None, found.groups()))
        return _of_field(place, place, names)
    if 'Parser key "optimizers"' in message:
        return (
            "optimizers is a mapping of names to optimizers that take turns, each with class_path and parameters, and"
            " if you like with"
            " init_args, groups, steps and schedule; look at its shape."
        )
    field = _FIELD.search(message)
    if field is None and (value := _SECTION_VALUE.search(message)):
        return _of_section(value[1], value[3] or value[2], _EXPECTED.findall(message)) or message
    return (_of_class(field[1], message) if field is not None else None) or message


def _of_section(name: str, given: str, expected: list[tuple[str, str]]) -> str | None:
    """What is wrong with the value of a field; None if it is not known what the field holds."""
    allowed = list(
        dict.fromkeys(
            f"one of {choices.replace(chr(39), '')}" if choices else _CALLED.get(kind, kind)
            for kind, choices in expected
        )
    )
    if not allowed:
        return None
    quotes = ""
    if "text" in allowed and given[:1] not in ("'", "[", "{"):
        quotes = (
            " YAML takes what is not in quotes, as 007, 1e3, 12:30 and on, for a number, a time or true; write it in"
            " quotes:"
            f" {name.rpartition('.')[2]}: '...'."
        )
    return f"{name} is {given}; it must be {' or '.join(allowed)}.{quotes}"


def _of_class(field: str, message: str) -> str | None:
    """What is wrong with a class or its arguments; None if that is not known."""
    named, wanted = _CLASS.findall(message), f"{_BASES[field].__module__}.{_BASES[field].__qualname__}"
    told: str | None = None
    if named and (option := _OPTION.search(message)):
        told = _of_argument(field, named[-1], option[1])
    elif found := _NO_SUBCLASS.search(message):
        told = (
            f"{field}.class_path is {found[1]!r}, which is no subclass of {wanted}. Derive it from that, or name one."
        )
    elif f"Not a valid subclass of {_BASES[field].__name__}\n" in message:
        keys = "class_path, init_args and groups" if field == "optimizer" else "class_path and init_args"
        told = f"{field} has {keys}, and nothing else; look at the names of its keys."
    elif named and (why := missing(named[-1], _BASES[field])):
        told = f"{field}.{why}"
    elif named and (needed := _NEEDED.search(message)):
        told = f"{named[-1]} needs {needed[1]}, which is not given; write it below {field}.init_args."
    elif named and (value := _VALUE.search(message)):
        told = _of_value(named[-1], value[1], value[2])
    elif (found := _NO_PATH.search(message)) and not named:
        told = (
            f"{field}.class_path is {found[1]!r}, which is no import path of a class. Give module and class, such as"
            f" {_LIKE[field]}."
        )
    return told


def _of_value(class_path: str, name: str, given: str) -> str | None:
    if name == "groups":
        return (
            f"optimizer.groups is {given}; it must be a list of mappings, each with names and options, such as"
            f" weight_decay: 0.0."
        )
    try:
        wanted = inspect.signature(_get(class_path)).parameters[name].annotation
    except Exception:  # it cannot be looked into
        return None
    told = (wanted if isinstance(wanted, str) else inspect.formatannotation(wanted)).replace(" | torch.Tensor", "")
    where = ", where Spec is {class_path: IMPORT.PATH, init_args: {NAME: VALUE}}" if "Spec" in told else ""
    return f"{class_path} got {name} = {_own(given, name)!r}; it must be {told}{where}."


def _own(given: str, name: str) -> Any:
    """What an argument was given, where jsonargparse says what its whole class was given."""
    try:
        value = ast.literal_eval(given)
    except (ValueError, SyntaxError):
        return given
    return value["init_args"].get(name, value) if isinstance(value, dict) and "init_args" in value else value


def _of_field(shown: str, given: str, fields: list[str]) -> str:
    section = given.rpartition(".")[0]
    top = given.partition(".")[0]
    if top in _BASES:
        return f"{shown} is no field; {top} has class_path and init_args."
    near = _near(given, fields)
    own = [field.removeprefix(f"{section}.") for field in fields if section and field.startswith(f"{section}.")]
    sections = dict.fromkeys([*_BASES, *(field.partition(".")[0] for field in fields)])
    has = f"{section} has {', '.join(own)}." if own else f"Sections are {', '.join(sections)}."
    return f"{shown} is no field.{f' Did you mean {near}?' if near else ''} {has}"


def _of_argument(field: str, class_path: str, given: str) -> str:
    if given in ("clas_path", "classpath", "class", "init_arg", "args", "kwargs"):
        return f"{field} has a key {given!r}; it has class_path and init_args."
    try:
        parameters = inspect.signature(_get(class_path)).parameters.values()
    except Exception:  # it cannot be looked into
        return f"{class_path} has no argument {given!r}."
    names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ("params", "optimizer")
    ]
    near = _near(given, names)
    return (
        f"{class_path} has no argument {given!r}.{f' Did you mean {near}?' if near else ''} It has"
        f" {', '.join(names) or 'none'}."
    )


def missing(class_path: str, base: type) -> str | None:
    """Which part of an import path is not there, and what is like it; None if all of it is."""
    there: Any = None
    parts = class_path.split(".")
    for i, part in enumerate(parts):
        before = ".".join(parts[:i])
        try:
            there = _part(there, ".".join(parts[: i + 1]), part)
        except AttributeError:
            return _told(class_path, before, part, _names(there, base, i == len(parts) - 1), parts[i + 1 :])
        except Exception as error:
            return (
                f"class_path is {class_path!r}, and {'.'.join(parts[: i + 1])} cannot be imported:"
                f" {type(error).__name__}: {error}."
            )
    return None


def _part(there: Any, path: str, name: str) -> Any:
    """The next part of an import path: a module, or what a module has.

    Raises:
        AttributeError: There is none.
    """
    if there is None or isinstance(there, ModuleType):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                raise  # of another module, which this one imports
            if there is None or not hasattr(there, name):
                raise AttributeError(name) from error
    return getattr(there, name)


def _names(there: Any, base: type, is_last: bool) -> list[str]:
    if there is None:
        return [module.name for module in pkgutil.iter_modules()]
    if base is object and is_last:  # whatever can be called
        return sorted(name for name, value in vars(there).items() if callable(value) and not name.startswith("_"))
    classes = [
        name
        for name, value in vars(there).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    modules = [module.name for module in pkgutil.iter_modules(getattr(there, "__path__", []))]
    return sorted(classes if is_last and classes else [*classes, *modules])


def _told(class_path: str, before: str, part: str, names: list[str], after: list[str]) -> str:
    where = (
        f"{before} has no {part!r}"
        if before
        else f"there is no module {part!r} where Python looks (the current folder, PYTHONPATH)"
    )
    near = difflib.get_close_matches(part, names, 1, 0.6)
    if near:
        return (
            f"class_path is {class_path!r}, but {where}. Did you mean"
            f" {'.'.join([*([before] if before else []), near[0], *after])}?"
        )
    has = (
        f" It has {', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}."
        if before and names
        else ""
    )
    return f"class_path is {class_path!r}, but {where}.{has}"


def _near(given: str, names: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(given, names, 1, 0.6)), None)


def _get(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
