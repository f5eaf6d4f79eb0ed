"""Every library that the package imports is a declared dependency, or belongs to an extra that is asked for by name."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ray_app.config.import_paths import EXTRAS
from tests.support.paths import ROOT

# The template of a project has dependencies of its own.
FILES = [
    *(file for file in sorted((ROOT / "ray_app").rglob("*.py")) if "project" not in file.parts),
    *sorted((ROOT / "jobs").glob("*.py")),
]
PROVIDED = {"IPython"}
"""Libraries of a notebook: every Python kernel has them, and only code that runs in one imports them."""
CHECKED_BEFORE = {
    "ray_app/models/package.py": ["ray_app/track/mlflow_client.py"],
    "ray_app/models/registry.py": ["ray_app/track/mlflow_client.py"],
    "ray_app/task/keras/copies.py": ["ray_app/task/keras/library.py"],
    "ray_app/task/images.py": ["ray_app/task/detection.py", "ray_app/task/module.py"],
    "ray_app/task/transforms.py": ["ray_app/task/detection.py", "ray_app/task/module.py"],
}
"""Modules that import a library of an extra, and the modules that require it before they call them.

`register_best` and all of the registry begin with `connect`; the tasks check their libraries in `prepare`.
"""


@dataclass(frozen=True)
class Imported:
    """An import of a library.

    Args:
        library: The top-level name.
        is_lazy: Whether the import is in a function, or for type checkers only.
        is_optional: Whether the code catches the ImportError.
    """

    library: str
    line: int
    is_lazy: bool
    is_optional: bool


def imports_in(code: str) -> Iterator[Imported]:
    """Yields the imports of a module except those of the standard library and of this project."""

    def visit(node: ast.AST, is_lazy: bool, is_optional: bool) -> Iterator[Imported]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        for library in {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "ray_app", "jobs"}:
            yield Imported(library, getattr(node, "lineno", 0), is_lazy, is_optional)
        is_lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_lazy |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        handlers = node.handlers if isinstance(node, ast.Try) else []
        is_optional |= any(handler.type and "ImportError" in ast.unparse(handler.type) for handler in handlers)
        for child in ast.iter_child_nodes(node):
            # Expressions have no imports.
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from visit(child, is_lazy, is_optional)

    return visit(ast.parse(code), False, False)


def required_extras(file: Path) -> set[str]:
    """Returns the extras that a module asks for by `require`."""
    code = file.read_text()
    return {
        EXTRAS[node.args[0].value]
        for node in ast.walk(ast.parse(code if "require(" in code else ""))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "require"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def names_of(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


@cache
def declared() -> tuple[set[str], dict[str, set[str]]]:
    """Returns the distributions of the package's dependencies, and those of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: names_of(lines) for name, lines in project["optional-dependencies"].items() if name != "all"}
    return names_of(project["dependencies"]), extras


@cache
def distributions() -> dict[str, set[str]]:
    """Returns the distributions that have a top-level module of a name."""
    providers = importlib.metadata.packages_distributions()
    return {library: {canonicalize_name(name) for name in names} for library, names in providers.items()}


def problem_of(imported: Imported, required: set[str]) -> str | None:
    """Returns what is wrong with an import in a module that requires these extras; None if nothing is."""
    base, extras = declared()
    # A library that is not installed is mostly in the distribution of its name.
    providers = distributions().get(imported.library, {imported.library})
    if providers & base or imported.library in PROVIDED:
        return None
    having = {extra for extra, names in extras.items() if names & providers}
    if not having:
        return "is neither a dependency nor in an extra in pyproject.toml"
    if not imported.is_lazy:
        return f"is only in the extras {', '.join(sorted(having))}; import it in the function that needs it"
    if not imported.is_optional and not having & required:
        return f"is only in the extras {', '.join(sorted(having))}; call `require` before, or extend CHECKED_BEFORE"
    return None


def test_each_imported_library_is_declared() -> None:
    problems = []
    for file in FILES:
        name = file.relative_to(ROOT).as_posix()
        required = set().union(
            *map(required_extras, [file, *(ROOT / before for before in CHECKED_BEFORE.get(name, []))])
        )
        for imported in imports_in(file.read_text()):
            if problem := problem_of(imported, required):
                problems.append(f"{name}, line {imported.line}: {imported.library} {problem}")
    assert problems == []


def test_each_extra_of_the_table_is_required_and_missing_elsewhere() -> None:
    """An entry of CHECKED_BEFORE that is no longer needed, or that names a module without the check, is reported."""
    for name, checking in CHECKED_BEFORE.items():
        imported = [i for i in imports_in((ROOT / name).read_text()) if problem_of(i, required_extras(ROOT / name))]
        assert imported, f"{name} does not need CHECKED_BEFORE"
        for module in checking:
            assert [i for i in imported if problem_of(i, required_extras(ROOT / module))] == [], module


def locked(name: str) -> dict[str, str]:
    """Returns the versions in a lock, and checks that each has a hash."""
    entries = re.split(r"\n(?=\w)", re.sub(r"^ +#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE))
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []
    pins = [Requirement(entry.partition("\\")[0]) for entry in entries]
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}


def test_the_locks_have_what_the_requirements_name_with_hashes() -> None:
    """`make lock` writes them."""
    dev, application = locked("requirements-dev.lock"), locked("requirements.lock")
    assert application.items() <= dev.items()
    for name, lock in (("requirements-dev.txt", dev), ("requirements.txt", application)):
        lines = [line for line in (ROOT / name).read_text().splitlines() if re.match(r"\w", line)]
        named = {canonicalize_name(pin.name): str(pin.specifier) for pin in map(Requirement, lines)}
        assert named.items() <= lock.items(), name


def test_an_ingest_imports_neither_torch_nor_ray() -> None:
    code = "import sys, ray_app.ingest.ingest; print(sorted({'torch', 'ray', 'pandas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
