"""Explanations of jsonargparse's long errors in one line: the field, its value, and the nearest valid names."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import ray_app.task
from ray_app.config.import_paths import EXTRAS, explain_extra, iter_class_paths, load_class
from ray_app.errors import join_names
from ray_app.task.base import Task

_BASES: dict[str, type] = {"task": Task, "optimizer": Optimizer, "schedule": LRScheduler}
_EXAMPLES = {
    "task": "my_project.task.MyTask",
    "optimizer": "torch.optim.Adam",
    "schedule": "torch.optim.lr_scheduler.OneCycleLR",
}
_COMMAND_SECTIONS = ("drill", "predict", "retrain", "submit", "tune")
_FIELD = re.compile(r'Parser key "(task|optimizer|schedule)"')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_OPTION = re.compile(r"Option '([^']+)' is not accepted")
_NEEDED = re.compile(r"the following arguments are required: ([\w, ]+)")
_NO_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_VALUE = re.compile(
    r"""Parser key "(?!(?:task|optimizer|schedule)")([\w.]+)":(.*?)(?:Got|Given) value: ([^\n]*)""", re.DOTALL
)
_IN_A_FILE = re.compile(r"^\s*(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'(?: is not accepted)?\s*$")
_UNKNOWN = re.compile(r"unrecognized arguments: --([\w.-]+)")
_NAMESPACE_VALUE = re.compile(r"Given value: (Namespace\([^\n]*)")
_EXPECTED = re.compile(r"Expected (?:a )?(?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])")
_TYPE_NAMES = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
    "dict": "a mapping",
    "list": "a list",
}


def explain_error(message: str, fields: Iterable[str]) -> str:
    """Returns an explanation of an error of jsonargparse, or its message if the error is of an unknown kind.

    `fields` are the dotted names of the fields of a configuration.
    """
    names = sorted(fields)
    if not names:
        return message
    if match := _UNKNOWN.search(message):
        return _explain_field(f"--{match[1]}", match[1], names)
    if match := _IN_A_FILE.search(message):
        field_name = ".".join(filter(None, match.groups()))
        return _explain_field(field_name, field_name, names)
    if 'Parser key "optimizers"' in message:
        return (
            "optimizers has the wrong form. It must map names to optimizers, each with class_path and parameters, and"
            " optionally init_args, groups, steps and schedule."
        )
    field = _FIELD.search(message)
    if field is None and (match := _VALUE.search(message)):
        name, details, value = match.groups()
        return _explain_value(f"{name} is", name.rpartition(".")[2], value, details) or message
    return (_explain_class(field[1], message) if field is not None else None) or message


def _explain_value(subject: str, name: str, value: str, details: str) -> str | None:
    """Returns what is wrong with a value, by the types that jsonargparse names; None if it names none.

    `subject` begins the sentence before the value.
    """
    expected = dict.fromkeys(
        f"one of {choices.replace(chr(39), '')}" if choices else _TYPE_NAMES.get(kind, kind)
        for kind, choices in _EXPECTED.findall(details)
    )
    if not expected:
        return None
    hint = ""
    if "a mapping" in expected and re.fullmatch(r"\w+(\.\w+)+", value):
        hint = " A class is written as {class_path: IMPORT.PATH, init_args: {NAME: VALUE}}."
    if "text" in expected and value[:1] not in ("'", "[", "{"):
        hint = (
            " YAML reads unquoted text such as 007, 1e3, 12:30 and on as a number, a time or true; write it in quotes:"
            f" {name}: '...'."
        )
    return f"{subject} {value}; it must be {' or '.join(expected)}.{hint}"


def _explain_class(field: str, message: str) -> str | None:
    """Returns what is wrong with a class or its arguments; None if that is not known."""
    base = _BASES[field]
    class_paths = _CLASS.findall(message)
    if class_paths and (option := _OPTION.search(message)):
        return _explain_argument(field, class_paths[-1], option[1])
    if match := _NO_SUBCLASS.search(message):
        return (
            f"{field}.class_path is {match[1]!r}, which is not a subclass of {base.__module__}.{base.__qualname__}."
            " Derive the class from it, or name a subclass."
        )
    if f"Not a valid subclass of {base.__name__}\n" in message:
        keys = "class_path, init_args and groups" if field == "optimizer" else "class_path and init_args"
        return f"{field} has an unknown key; it may have only {keys}."
    if class_paths:
        return _explain_named_class(field, class_paths[-1], message) or _explain_inner_path(field, message)
    if match := _NO_PATH.search(message):
        return (
            f"{field}.class_path is {match[1]!r}, which is not an import path of a class. Give module and class, such"
            f" as {_EXAMPLES[field]}."
        )
    return None


def _explain_named_class(field: str, class_path: str, message: str) -> str | None:
    """Returns what is wrong with the import path of a class or its required arguments; None if that is not known."""
    if reason := explain_missing(class_path, _BASES[field]):
        return f"{field}.{reason}"
    if needed := _NEEDED.search(message):
        return f"{class_path} needs {needed[1]}, which is missing; set it in {field}.init_args."
    if match := _VALUE.search(message):
        name, details, value = match.groups()
        return _explain_value(f"{class_path} got {name} =", name, value, details)
    return None


def _explain_inner_path(field: str, message: str) -> str | None:
    """Returns which import path below the arguments of a class cannot be imported; None if all can be."""
    match = _NAMESPACE_VALUE.search(message)
    try:
        value = _to_plain(ast.parse(match[1], mode="eval").body) if match else {}
    except SyntaxError:
        return None
    for parent, name, path in iter_class_paths(f"{field}.init_args", (value or {}).get("init_args")):
        try:
            load_class(path)
        # The imported module may raise any error.
        except Exception as error:
            return explain_path(parent, name, path, error)
    return None


def _to_plain(node: ast.AST) -> Any:
    """Returns the mappings, lists and values of the text of a `Namespace` of jsonargparse; None for other parts."""
    if isinstance(node, ast.Call):
        return {keyword.arg: _to_plain(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.Dict):
        return {_to_plain(key): _to_plain(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.List):
        return [_to_plain(element) for element in node.elts]
    return node.value if isinstance(node, ast.Constant) else None


def explain_path(parent: str, field: str, path: str, error: Exception) -> str:
    """Returns why a path below a section cannot be imported, with the nearest name."""
    reason = explain_missing(path, object)
    if reason is None:
        return f"{parent}{field} is {path!r}: {type(error).__name__}: {error}."
    return f"{parent}{field}{reason.removeprefix('class_path')}"


def _explain_field(option: str, name: str, fields: list[str]) -> str:
    """Returns that a field (`option` as the user wrote it) does not exist, with the nearest name and its section."""
    section, top = name.rpartition(".")[0], name.partition(".")[0]
    if top in _BASES:
        return f"{option} is not a field; {top} has only class_path and init_args."
    siblings = [field.removeprefix(f"{section}.") for field in fields if section and field.startswith(f"{section}.")]
    sections = dict.fromkeys([*_BASES, *(field.partition(".")[0] for field in fields)])
    if top in _COMMAND_SECTIONS and top not in sections:
        return (
            f"{option} is a field of ray-app {top}, which this command does not read. Put the section {top} into a file"
            f" of its own: ray-app {top} --config FILE --config {top}.yaml."
        )
    available = f"{section} has {', '.join(siblings)}." if siblings else f"Sections are {', '.join(sections)}."
    return f"{option} is not a field.{_suggest(name, fields)} {available}"


def _explain_argument(field: str, class_path: str, argument: str) -> str:
    """Returns that a class has no argument of a name, with the nearest name and its arguments."""
    if argument in ("clas_path", "classpath", "class", "init_arg", "args", "kwargs"):
        return f"{field} has a key {argument!r}; it may have only class_path and init_args."
    problem = f"{class_path} has no argument {argument!r}."
    try:
        parameters = inspect.signature(load_class(class_path)).parameters.values()
    # The class may raise any error when it is imported or inspected.
    except Exception:
        return problem
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [name for name in named if name not in ("params", "optimizer")]
    return f"{problem}{_suggest(argument, names)} Its arguments are {', '.join(names) or 'none'}."


def explain_missing(class_path: str, base: type) -> str | None:
    """Returns which part of an import path does not exist, with the nearest name; None if all parts exist."""
    parent: Any = None
    parts = class_path.split(".")
    for i, part in enumerate(parts):
        before = ".".join(parts[:i])
        try:
            parent = _import_part(parent, ".".join(parts[: i + 1]), part)
        except AttributeError:
            names, path = _names_in(parent, base, i == len(parts) - 1), _find_class(parts[0], parts[-1], base)
            return _explain_missing_part(class_path, before, part, names, parts[i + 1 :], path)
        except Exception as error:
            return (
                f"class_path is {class_path!r}, but {'.'.join(parts[: i + 1])} cannot be imported:"
                f" {type(error).__name__}: {error}."
            )
    return None


def _import_part(parent: Any, path: str, name: str) -> Any:
    """Returns the next part of an import path: a module or an attribute; `AttributeError` if there is none."""
    if parent is None or isinstance(parent, ModuleType):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                # Another module is missing, which this one imports.
                raise
            if parent is None or not hasattr(parent, name):
                raise AttributeError(name) from error
    return getattr(parent, name)


def _names_in(parent: Any, base: type, is_last: bool) -> list[str]:
    """Returns the names that could follow in an import path after a module or class, or begin it (None).

    `base` is the class that the path has to name the subclass of; `object` for any callable.
    """
    if parent is None:
        return [module.name for module in pkgutil.iter_modules()]
    members = vars(parent).items()
    if base is object and is_last:
        return sorted(name for name, value in members if callable(value) and not name.startswith("_"))
    classes = [n for n, value in members if isinstance(value, type) and issubclass(value, base) and value is not base]
    modules = [module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", []))]
    return sorted(classes if is_last and classes else [*classes, *modules])


def _find_class(package: str, name: str, base: type) -> str | None:
    """Returns the import path of a class, which is looked for in the imported modules of a package and in all tasks."""
    for module in pkgutil.iter_modules(ray_app.task.__path__, "ray_app.task."):
        with suppress(ImportError):
            importlib.import_module(module.name)
    values = (getattr(module, name, None) for key, module in list(sys.modules.items()) if key.startswith(f"{package}."))
    classes = (value for value in values if isinstance(value, type) and issubclass(value, base))
    return next((f"{defined.__module__}.{name}" for defined in classes), None)


def _explain_missing_part(
    class_path: str, before: str, part: str, names: list[str], after: list[str], path: str | None
) -> str:
    """Returns the message about a missing part of an import path, with the `names` that exist in its place."""
    if not before and part in EXTRAS:
        return f"class_path is {class_path!r}, but {part} is {explain_extra(part)}."
    missing = f"there is no module {part!r} where Python looks (in the current folder or PYTHONPATH)"
    problem = f"class_path is {class_path!r}, but {f'{before} has no {part!r}' if before else missing}"
    nearest = _nearest(part, names)
    if path or nearest:
        return f"{problem}. Did you mean {path or '.'.join(filter(None, [before, nearest, *after]))}?"
    return f"{problem}. The names there are {join_names(names)}." if before and names else f"{problem}."


def _nearest(name: str, names: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, 1, 0.6)), None)


def _suggest(name: str, names: list[str]) -> str:
    """Returns a question with the nearest of some names; an empty text if none is near."""
    nearest = _nearest(name, names)
    return f" Did you mean {nearest}?" if nearest else ""
