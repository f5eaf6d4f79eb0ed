"""What a result depends on besides configuration and data: the user's own source files, versions of libraries, defaults
of classes.

Data that was changed in place between two starts of a run: noticed by size and time of its files, in a bucket by their
ETags.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

from ray_app.config.config import Config, flatten, from_dict
from ray_app.config.import_paths import load_class
from ray_app.data.reader import RowSource
from ray_app.errors import RegistryError, RunExistsError
from ray_app.models.package import follow_imports, sources_of
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields
from ray_app.runlog.stored_config import read_config
from ray_app.storage.data_files import file_versions, locate_data
from ray_app.storage.files import put_json, read_json
from ray_app.version import __version__

_CLASSES = ("task", "optimizer", "optimizers", "schedule")


@dataclass(frozen=True)
class CodeVersions:
    """What `code.json` of a run says.

    Args:
        files: SHA-256 of every source file of the user's that the configured classes need, by the name of its module.
        versions: Of Python, of the application, and of the installed libraries that these files import.
        defaults: Arguments of the configured classes that stand in `config.yaml` and were not given: dotted names.
    """

    files: dict[str, str]
    versions: dict[str, str]
    defaults: list[str] = field(default_factory=list)


def read_code_versions(config: Config) -> CodeVersions:
    """What the configured classes are made of, as it is now."""
    files: dict[str, str] = {}
    libraries = {"torch", "numpy"}
    for class_path in sorted(set(iter_import_paths(config))):
        made = load_class(class_path)
        if _top_level(made.__module__) == "ray_app":
            continue
        found = follow_imports(made.__module__, ours=False)
        libraries |= found.libraries - {"ray_app"}
        files |= {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in found.files.items()}
        is_read = (
            made.__module__ in found.files and made.__module__ != "__main__"
        )  # which may be what serves a notebook
        if not is_read and _top_level(made.__module__) not in libraries:
            files[made.__module__] = _digest_class(made)
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {name: version for name in sorted(libraries) if (version := _library_version(name)) is not None}
    return CodeVersions(files, {"python": python, "ray_app": __version__} | versions, fill_defaults(config)[1])


def iter_import_paths(config: Config) -> Iterator[str]:
    """Everything that a configuration names by an import path: classes, however deep, and what the task's class says
    are functions.
    """
    yield from _iter_class_paths(config.to_dict())
    for name in getattr(load_class(config.task), "functions", ()):
        if isinstance(path := config.task.init_args.get(name), str):
            yield path


def _iter_class_paths(values: Any) -> Iterator[str]:
    for item in values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ():
        yield from _iter_class_paths(item)
    if isinstance(values, dict) and isinstance(values.get("class_path"), str):
        yield values["class_path"]


def source_files(class_path: str) -> dict[str, Path]:
    """The files of a class, those of the application's included, by the names of their modules."""
    name = load_class(class_path).__module__
    try:
        return sources_of(name).files
    except RegistryError:  # it can be trained all the same; then its own file counts
        file = getattr(importlib.import_module(name), "__file__", None)
        return {name: Path(file)} if file else {}


def describe_code_changes(paths: RunPaths, config: Config, now: CodeVersions) -> list[str]:
    """What is not as at a run's last start, in words; nothing of a run that did not record it.

    Raises:
        RunExistsError: Something, and `run.changed_code` is `refuse`.
        OSError: The storage does not answer.
    """
    before = read_stored_code(paths)
    if before is None:
        return []
    found = [*compare_code(before, now), *_describe_default_changes(paths, config, before.defaults)]
    if found and config.run.changed_code == "refuse":
        raise RunExistsError(
            f"The run {paths.name!r} was started with other code, so its result would be that of neither:\n- "
            + "\n- ".join(found)
            + "\nNothing was changed. Restore what it was, give another run.name for a new run, or set run.changed_code"
            " to warn to go on."
        )
    return found


def _describe_default_changes(paths: RunPaths, config: Config, names: list[str]) -> list[str]:
    stored, now = (
        flatten(each.to_dict()) for each in (read_config(paths, with_defaults=True), fill_defaults(config)[0])
    )
    both = [name for name in names if name in stored and name in now and stored[name] != now[name]]
    return [f"the default of {name} was {stored[name]!r}, is {now[name]!r}" for name in both]


def compare_code(before: CodeVersions, now: CodeVersions) -> list[str]:
    """What differs, in words."""
    found = []
    for name in sorted(before.files.keys() | now.files.keys()):
        if name not in now.files or name not in before.files:
            found.append(f"{name} is {'new' if name in now.files else 'no longer needed'}")
        elif before.files[name] != now.files[name]:
            found.append(f"{name} has another content")
    for name in sorted(before.versions.keys() & now.versions.keys()):
        if before.versions[name] != now.versions[name]:
            found.append(f"{name} {before.versions[name]} -> {now.versions[name]}")
    return found


def store_code(paths: RunPaths, code: CodeVersions) -> None:
    """Writes `code.json`; which arguments were not given stays as at the first start, as the classes in `config.yaml`
    do.
    """
    before = read_stored_code(paths)
    put_json(paths.code, add_version(asdict(replace(code, defaults=before.defaults) if before is not None else code)))


def read_stored_code(paths: RunPaths) -> CodeVersions | None:
    """What a run's `code.json` says; None for a run that has none, or one that cannot be read.

    Raises:
        OSError: The storage does not answer.
    """
    try:
        found = read_json(paths.code)
        return from_known_fields(CodeVersions, found) if found is not None else None
    except (ValueError, TypeError):
        return None


def fill_defaults(config: Config) -> tuple[Config, list[str]]:
    """The configuration with the arguments of its classes that were not given, and their dotted names."""
    values, added = config.to_dict(), list[str]()
    for name in _CLASSES:
        if values[name] is not None:
            values[name] = _fill_value(values[name], name, added)
    return from_dict(values), added


def _fill_value(value: Any, place: str, added: list[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_fill_value(part, f"{place}.{i}", added) for i, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    whole = {name: _fill_value(part, f"{place}.{name}", added) for name, part in value.items()}
    if "class_path" not in value:
        return whole
    given, defaults = whole.get("init_args") or {}, dict[str, Any]()
    with suppress(Exception):  # what cannot be looked into has none
        defaults = {name: plain for name, plain in _plain_defaults(value["class_path"]) if name not in given}
    added += [f"{place}.init_args.{name}" for name in defaults]
    return whole | {"init_args": given | defaults}


def _plain_defaults(class_path: str) -> Iterator[tuple[str, Any]]:
    """The arguments of a class that have a default which YAML keeps."""
    for parameter in inspect.signature(load_class(class_path)).parameters.values():
        value = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        if parameter.default is not parameter.empty and _is_plain(value):
            yield parameter.name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _library_version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        owners = _distributions().get(library)
        return importlib.metadata.version(owners[0]) if owners else None


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _digest_class(made: Any) -> str:
    """Of a class whose file is a script, in a zip, or none, as in a notebook: of its source if Python has it, or of
    what it became.
    """
    compiled = {name: code for name, member in sorted(vars(made).items()) if (code := _code_in(member)) is not None}
    file = str(getattr(sys.modules[made.__module__], "__file__", ""))
    if {Path(code.co_filename).name for code in compiled.values()} == {Path(file).name}:
        with suppress(OSError, TypeError):
            return hashlib.sha256(inspect.getsource(sys.modules[made.__module__]).encode()).hexdigest()
    return hashlib.sha256("".join(f"{name}{_code_text(code)}" for name, code in compiled.items()).encode()).hexdigest()


def _code_in(member: Any) -> CodeType | None:
    member = getattr(member, "__func__", member)
    code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
    return code if isinstance(code, CodeType) else None


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"


DataVersions = dict[str, dict[str, Any]]
"""For `data.path` and `data.eval_path`: the `root`, and of each of its `files` what changes with its content."""
_MAX_NAMED = 5


def read_data_versions(training: RowSource, evaluation: RowSource | None) -> DataVersions:
    """What changes with the content of the files that a run reads, as it is now.

    Raises:
        OSError: One is gone, or the storage does not answer.
    """
    sources = {"data.path": training} | ({"data.eval_path": evaluation} if evaluation is not None else {})
    return {name: _file_versions(source.reader.root, source.manifest.paths) for name, source in sources.items()}


def _file_versions(root: str, paths: tuple[str, ...]) -> dict[str, Any]:
    found = file_versions(locate_data(root), paths)
    return {
        "root": root,
        "files": {path: list(one) if isinstance(one, tuple) else one for path, one in zip(paths, found, strict=True)},
    }


def describe_data_changes(paths: RunPaths, config: Config, now: DataVersions) -> list[str]:
    """The files that are not as at a run's last start, in sentences; nothing of a run that did not record them.

    Data in another folder than before is compared by the sizes of its files alone: a copy has times of its own.

    Raises:
        RunExistsError: Some are, and `run.changed_data` is `refuse`.
        OSError: The storage does not answer.
    """
    before = _read_stored(paths)
    found = [
        said
        for name in now
        if name in before and (said := _describe_source_changes(name, before[name], now[name])) is not None
    ]
    if found and config.run.changed_data == "refuse":
        raise RunExistsError(
            f"The data of the run {paths.name!r} was changed since its last start, so its result would be that of"
            f" neither:\n- "
            + "\n- ".join(found)
            + "\nNothing was changed. Restore the data, give another run.name for a new run, or set run.changed_data to"
            " warn to go on."
        )
    return found


def store_data_versions(paths: RunPaths, now: DataVersions) -> None:
    """Writes `data.json`."""
    put_json(paths.data, add_version(now))


def is_stored(paths: RunPaths, now: DataVersions) -> bool:
    """Whether `data.json` says the same."""
    return _read_stored(paths) == now


def _read_stored(paths: RunPaths) -> DataVersions:
    try:
        stored = read_json(paths.data) or {}
        return {
            name: one for name, one in stored.items() if isinstance(one, dict) and isinstance(one.get("files"), dict)
        }
    except (ValueError, TypeError, AttributeError):  # it is damaged; then nothing is known
        return {}


def _describe_source_changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    is_copy = before.get("root") != now["root"]
    both = [path for path in now["files"] if path in before["files"]]
    changed = [path for path in both if not _is_same(before["files"][path], now["files"][path], is_copy)]
    if not changed:
        return None
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    what = "size" if is_copy else "size, time or ETag"
    return f"{len(changed)} of {len(both)} files of {name} have another {what}: {', '.join(changed[:_MAX_NAMED])}{more}"


def _is_same(before: Any, now: Any, is_copy: bool) -> bool:
    if not is_copy:
        return bool(before == now)
    if isinstance(before, list) and isinstance(now, list):
        return bool(before[:1] == now[:1])
    return True  # an ETag of another place says nothing
