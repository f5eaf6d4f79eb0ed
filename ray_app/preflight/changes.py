"""Changes between two starts of a run: its configuration, code, library versions, class defaults, and data files.

An existing run may be extended by more `train.epochs` or `train.max_steps` than at its last start. `code.json` stores
what the result depends on besides configuration and data. `data.json` stores the size and the modification time of each
data file (in a bucket its ETag), so that data that was changed in place is noticed.
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

from ray_app.config.config import Config, check_same_config, flatten, from_dict, result_fields
from ray_app.config.import_paths import iter_class_paths, load_class
from ray_app.data.reader import RowSource
from ray_app.errors import DataError, RegistryError, RunExistsError, join_names
from ray_app.models.package import follow_imports, sources_of
from ray_app.plan.order import Plan
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields
from ray_app.runlog.redaction import redact_value
from ray_app.runlog.stored_config import read_config
from ray_app.storage.data_files import file_versions
from ray_app.storage.files import put_json, read_json
from ray_app.train.state.state import has_total_steps_argument
from ray_app.version import __version__

_packages_distributions = functools.cache(importlib.metadata.packages_distributions)
_CLASSES = ("task", "optimizer", "optimizers", "schedule")


@dataclass(frozen=True)
class CodeVersions:
    """The content of `code.json` of a run.

    Args:
        files: SHA-256 of every source file of the user that the configured classes need, by the name of its module.
        versions: Versions of Python, of the application, and of the installed libraries that these files import.
        defaults: Dotted names of the arguments in `config.yaml` that are defaults of the configured classes, not set by
            the user.
        folders: Folders from which the files were imported, for messages: nothing is ever imported from them by this.
    """

    files: dict[str, str]
    versions: dict[str, str]
    defaults: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)


def read_code_versions(config: Config) -> CodeVersions:
    """Reads the source files and library versions of the configured classes as they are now."""
    files: dict[str, str] = {}
    folders = set[str]()
    libraries = {"torch", "numpy"}
    for class_path in sorted(set(iter_import_paths(config))):
        configured = load_class(class_path)
        if configured.__module__.partition(".")[0] == "ray_app":
            continue
        imports = follow_imports(configured.__module__, ours=False)
        libraries |= imports.libraries - {"ray_app"}
        files |= {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in imports.files.items()}
        folders |= {
            str(file.parents[name.count(".") + (file.name == "__init__.py")]) for name, file in imports.files.items()
        }
        # The file of `__main__` may be the server of a notebook rather than the user's code.
        is_read = configured.__module__ in imports.files and configured.__module__ != "__main__"
        if not is_read and configured.__module__.partition(".")[0] not in libraries:
            files[configured.__module__] = _digest_class(configured)
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {name: version for name in sorted(libraries) if (version := _library_version(name)) is not None}
    return CodeVersions(
        files, {"python": python, "ray_app": __version__} | versions, fill_defaults(config)[1], sorted(folders)
    )


def iter_import_paths(config: Config) -> Iterator[str]:
    """Yields all import paths in a configuration: classes at any depth, and the task arguments that name functions."""
    yield from (path for _, _, path in iter_class_paths("", config.to_dict()))
    if config.train.reducer is not None:
        yield config.train.reducer
    for name in getattr(load_class(config.task), "functions", ()):
        if isinstance(path := config.task.init_args.get(name), str):
            yield path


def source_files(class_path: str) -> dict[str, Path]:
    """Returns the source files of a class by the names of their modules, including files of the application."""
    name = load_class(class_path).__module__
    try:
        return sources_of(name).files
    except RegistryError:
        # A class that cannot be packaged can be trained nevertheless; then only its own file counts.
        file = getattr(importlib.import_module(name), "__file__", None)
        return {name: Path(file)} if file else {}


def describe_code_changes(paths: RunPaths, config: Config, now: CodeVersions) -> list[str]:
    """Returns the changes of code since a run's last start as phrases; an empty list if the run has no record of it.

    Raises:
        RunExistsError: The code has changed, and `run.changed` is `refuse`.
        OSError: The storage cannot be read.
    """
    before = read_stored_code(paths)
    if before is None:
        return []
    stored = flatten(read_config(paths, with_defaults=True).to_dict())
    filled = flatten(fill_defaults(config)[0].to_dict())
    changes = compare_code(before, now) + [
        f"the default of {name} was {stored[name]!r}, is {filled[name]!r}"
        for name in before.defaults
        if name in stored and name in filled and stored[name] != filled[name]
    ]
    _refuse_changes(config, f"The run {paths.name!r} was started with different code or defaults", changes)
    return changes


def _refuse_changes(config: Config, subject: str, changes: list[str]) -> None:
    """Raises `RunExistsError` for changes since the last start if `run.changed` is `refuse`."""
    if changes and config.run.changed == "refuse":
        lines = "\n- ".join(changes)
        raise RunExistsError(
            f"{subject}, so its result would match neither version:\n- {lines}\nNothing was changed. Restore the"
            " earlier version, choose another run.name for a new run, or set run.changed to warn to continue."
        )


def changed_fields(before: Config, now: Config) -> dict[str, list[Any]]:
    """Returns the values before and now by the dotted names of the fields that differ, without secrets."""
    old_values, new_values = (flatten(redact_value(config.to_dict())) for config in (before, now))
    return {
        name: [old_values.get(name), new_values.get(name)]
        for name in sorted(old_values.keys() | new_values.keys())
        if old_values.get(name) != new_values.get(name)
    }


def compare_code(before: CodeVersions, now: CodeVersions) -> list[str]:
    """Returns the differences of source files and library versions as phrases."""
    changes = []
    for name in sorted(before.files.keys() | now.files.keys()):
        if name not in now.files or name not in before.files:
            changes.append(f"{name} is {'new' if name in now.files else 'no longer needed'}")
        elif before.files[name] != now.files[name]:
            changes.append(f"the content of {name} changed")
    for name in sorted(before.versions.keys() & now.versions.keys()):
        if before.versions[name] != now.versions[name]:
            changes.append(f"{name} {before.versions[name]} -> {now.versions[name]}")
    return changes


def store_code(paths: RunPaths, code: CodeVersions) -> None:
    """Writes `code.json`, with the default arguments of the first start, as the classes in `config.yaml` have them."""
    before = read_stored_code(paths)
    put_json(paths.code, add_version(asdict(replace(code, defaults=before.defaults) if before is not None else code)))


def read_stored_code(paths: RunPaths) -> CodeVersions | None:
    """Returns the content of a run's `code.json`, or None if there is none or it is damaged.

    Raises:
        OSError: The storage cannot be read.
    """
    try:
        stored = read_json(paths.code)
        return from_known_fields(CodeVersions, stored) if stored is not None else None
    except (ValueError, TypeError):
        return None


def fill_defaults(config: Config) -> tuple[Config, list[str]]:
    """Returns the configuration with the default arguments of its classes filled in, and their dotted names."""
    values, added = config.to_dict(), list[str]()
    for name in _CLASSES:
        if values[name] is not None:
            values[name] = _fill_value(values[name], name, added)
    return from_dict(values), added


def _fill_value(value: Any, path: str, added: list[str]) -> Any:
    """Returns the value of the dotted name `path` with default arguments filled in; appends their names to `added`."""
    if isinstance(value, list | tuple):
        return [_fill_value(part, f"{path}.{i}", added) for i, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    whole = {name: _fill_value(part, f"{path}.{name}", added) for name, part in value.items()}
    if "class_path" not in value:
        return whole
    arguments, defaults = whole.get("init_args") or {}, dict[str, Any]()
    # Without a signature that can be inspected there are no defaults to fill in.
    with suppress(Exception):
        for name, parameter in inspect.signature(load_class(value["class_path"])).parameters.items():
            plain = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
            if name not in arguments and _is_plain(plain):
                defaults[name] = plain
    added += [f"{path}.init_args.{name}" for name in defaults]
    return whole | {"init_args": arguments | defaults}


def _is_plain(value: Any) -> bool:
    """Returns whether YAML can store a value."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _library_version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        owners = _packages_distributions().get(library)
        return importlib.metadata.version(owners[0]) if owners else None


def _digest_class(configured: Any) -> str:
    """Returns the SHA-256 of a class without an importable source file: one of a script, a zip file or a notebook.

    It covers the source of the module if Python has it, otherwise the compiled code of the methods.
    """
    compiled = {
        name: code for name, member in sorted(vars(configured).items()) if (code := _code_in(member)) is not None
    }
    file = str(getattr(sys.modules[configured.__module__], "__file__", ""))
    if {Path(code.co_filename).name for code in compiled.values()} == {Path(file).name}:
        with suppress(OSError, TypeError):
            return hashlib.sha256(inspect.getsource(sys.modules[configured.__module__]).encode()).hexdigest()
    return hashlib.sha256("".join(f"{name}{_code_text(code)}" for name, code in compiled.items()).encode()).hexdigest()


def _code_in(member: Any) -> CodeType | None:
    member = getattr(member, "__func__", member)
    code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
    return code if isinstance(code, CodeType) else None


def _code_text(code: CodeType) -> str:
    """Returns compiled code as text that does not depend on addresses of nested functions."""
    constants = [
        _code_text(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts
    ]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"


DataVersions = dict[str, dict[str, Any]]
"""For `data.path` and `data.eval_path`: the `root`, and the version of each of its `files`."""
_MAX_NAMED = 5


def read_data_versions(training: RowSource, evaluation: RowSource | None) -> DataVersions:
    """Reads the present versions (size and time, or ETag) of the files that a run reads.

    Raises:
        OSError: A file is missing, or the storage cannot be read.
    """
    versions: DataVersions = {}
    for name, source in (("data.path", training), ("data.eval_path", evaluation)):
        if source is not None:
            root, paths = source.reader.root, source.manifest.paths
            entries = zip(paths, file_versions(root, paths), strict=True)
            # JSON has no tuples, and the versions are compared with the content of the file.
            files = {path: list(version) if isinstance(version, tuple) else version for path, version in entries}
            versions[name] = {"root": str(root), "files": files}
    return versions


def describe_data_changes(paths: RunPaths, config: Config, now: DataVersions) -> list[str]:
    """Returns the changes of data files since a run's last start as sentences; an empty list without a record of them.

    Data in another folder than before is compared by the sizes of its files only, since a copy has other times.

    Raises:
        RunExistsError: Files have changed, and `run.changed` is `refuse`.
        OSError: The storage cannot be read.
    """
    before = _read_stored(paths)
    changes = [
        change
        for name in now
        if name in before and (change := _describe_source_changes(name, before[name], now[name])) is not None
    ]
    _refuse_changes(config, f"The data of the run {paths.name!r} changed since its last start", changes)
    return changes


def store_data_versions(paths: RunPaths, now: DataVersions) -> None:
    """Writes the versions of the data files to `data.json`, unless it has them."""
    if _read_stored(paths) != now:
        put_json(paths.data, add_version(now))


def _read_stored(paths: RunPaths) -> DataVersions:
    """Returns the content of `data.json`, without entries that are damaged."""
    try:
        stored = read_json(paths.data) or {}
        return {
            name: source
            for name, source in stored.items()
            if isinstance(source, dict) and isinstance(source.get("files"), dict)
        }
    except (ValueError, TypeError, AttributeError):
        # The file is damaged; the data then counts as not recorded.
        return {}


def _describe_source_changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Returns a sentence about the changed files of one data source, or None if there are none."""
    is_copy = before.get("root") != now["root"]
    both = [path for path in now["files"] if path in before["files"]]
    changed = [path for path in both if not _is_same(before["files"][path], now["files"][path], is_copy)]
    if not changed:
        return None
    differing = "size" if is_copy else "size, time or ETag"
    return f"{len(changed)} of {len(both)} files of {name} differ in {differing}: {join_names(changed, _MAX_NAMED)}"


def _is_same(before: Any, now: Any, is_copy: bool) -> bool:
    """Returns whether a file is unchanged, by its versions before and now."""
    if not is_copy:
        return bool(before == now)
    if isinstance(before, list) and isinstance(now, list):
        return bool(before[:1] == now[:1])
    # ETags of different storages cannot be compared.
    return True


def check_resume_compatibility(name: str, before: Config, stored_digest: str, config: Config, plan: Plan) -> None:
    """Refuses to resume a run with other values of the fields that decide the result.

    More steps than those of `before`, the configuration of the last start, are allowed if they do not change the steps
    that are done: an extended run is bit-identical to one that had the same length from the start.

    Raises:
        RunExistsError: The result would be another one; the message has the differences.
    """
    longer = before.replace(train__epochs=config.train.epochs, train__max_steps=config.train.max_steps)
    old, new = result_fields(longer, stored_digest), result_fields(config, plan.manifest.digest)
    if old != new:
        whole = [flatten(fill_defaults(one)[0].to_dict()) for one in (longer, config)]
        check_same_config(name, old, new, (whole[0], whole[1]))
    old_steps = before.train.total_steps(plan.steps_per_epoch)
    new_steps = config.train.total_steps(plan.steps_per_epoch)
    if new_steps != old_steps and (reason := _explain_length_refusal(config, old_steps, new_steps, plan)):
        raise RunExistsError(
            f"The run {name!r} exists with train.epochs {before.train.epochs} and train.max_steps"
            f" {before.train.max_steps}, {old_steps} steps; the configuration asks for {config.train.epochs} and"
            f" {config.train.max_steps}, {new_steps} steps. {reason} Nothing was changed. Choose another run.name for a"
            " new run."
        )


def _explain_length_refusal(config: Config, old_steps: int, new_steps: int, plan: Plan) -> str | None:
    """Returns why a run of `old_steps` steps cannot be changed to `new_steps` steps, or None if it can."""
    train, cadence = config.train, config.checkpoint
    if new_steps < old_steps:
        return "A run can become longer, not shorter."
    if config.schedule is not None and has_total_steps_argument(config.schedule):
        return (
            f"The schedule {config.schedule.class_path} depends on the total number of steps, so a longer run would"
            " have other learning rates from its first step. A run can grow with a schedule that does not, such as"
            " CosineAnnealingLR with T_max, StepLR or LambdaLR."
        )
    if old_steps % train.local_steps:
        return (
            f"The run ended in the middle of a round of train.local_steps = {train.local_steps}, and its logical"
            " workers averaged their parameters there."
        )
    planned = (
        cadence.every_steps,
        cadence.every_epochs and cadence.every_epochs * (train.steps_per_epoch or plan.steps_per_epoch),
    )
    if config.evaluate.patience is not None and not any(every and old_steps % every == 0 for every in planned):
        return (
            "evaluate.patience has counted the checkpoint at the end of the run, but checkpoint.every_steps and"
            " every_epochs plan none at that step of a longer run."
        )
    return None


def check_same_classes(paths: RunPaths, plan: Plan) -> None:
    """Refuses to resume a run if rows have other classes than at its first start.

    Raises:
        DataError: The digest of the classes is another one.
    """
    if plan.classes is not None and (read_json(paths.classes) or {}).get("digest") != plan.classes.digest:
        raise DataError(
            f"Rows have other classes than at the start of the run {paths.name!r}, so the resumed run would repeat"
            " other rows. Restore the earlier data, or choose another run.name."
        )
