"""The code that a task needs: which source files to ship with a model, and which libraries to name as its requirements."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from ray_app.errors import RegistryError

_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Sources:
    """What a module is made of.

    Args:
        files: The file of every module that is not installed, by the module's dotted name; packages included.
        libraries: Top-level names of the installed libraries that these import.
    """

    files: dict[str, Path]
    libraries: set[str]


def sources_of(module: str) -> Sources:
    """Follows the imports of a module, wherever they stand in the code except under `TYPE_CHECKING`, without running anything.

    Args:
        module: Dotted name of an importable module.

    Raises:
        RegistryError: A module is not found, has no source, or needs Ray.
    """
    found = followed(module)
    if module not in found.files:
        raise RegistryError(f"The task's module {module!r} is not a source file of its own that could be shipped with the model.")
    if "ray" in found.libraries:
        raise RegistryError(f"The code of {module!r} imports ray, so the model could not be loaded without it; import it elsewhere.")
    return found


def followed(module: str, ours: bool = True) -> Sources:
    """`sources_of` whatever is found.

    Args:
        module: Dotted name of an importable module.
        ours: Whether files of ray_app count as not installed.
    """
    files: dict[str, Path] = {}
    libraries: set[str] = set()
    todo = _with_packages(module)
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in files or top in sys.stdlib_module_names:
            continue
        if not _is_own(top) or (top == "ray_app" and not ours):
            libraries.add(top)
            continue
        found = _origin(name)
        if found is None:
            continue
        files[name] = found
        for imported in _imports(name, found):
            todo += _with_packages(imported)
    return Sources(files, libraries)


def requirements(libraries: set[str]) -> list[str]:
    """The installed versions of importable libraries, as lines of `requirements.txt`; those that are not installed are left out."""
    owners = importlib.metadata.packages_distributions()
    names = {owner for library in libraries for owner in owners.get(library, [])}
    return sorted(f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names)


def _with_packages(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _is_own(top: str) -> bool:
    """Whether a top-level module is the user's or ours, and not an installed library."""
    if top == "__main__":  # which has no specification
        return True
    spec = importlib.util.find_spec(top)
    if spec is None or top == "ray_app":
        return spec is not None
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
    return any(place and not set(_LIBRARY_FOLDERS) & set(Path(place).parts) for place in places)


def _origin(module: str) -> Path | None:
    """The source file of a module, or None if it has none or is not there."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    file = Path(spec.origin).resolve() if spec is not None and spec.origin and spec.origin.endswith(".py") else None
    return file if file is not None and file.is_file() else None  # in a zip there is none


def _imports(module: str, file: Path) -> set[str]:
    """The dotted names that a source file imports; of `from a import b` both `a` and, if it is a module, `a.b`."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(file.read_bytes())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            found.add(base)
            if base.partition(".")[0] not in sys.stdlib_module_names and _is_own(base.partition(".")[0]):
                found |= {f"{base}.{alias.name}" for alias in node.names if _origin(f"{base}.{alias.name}") is not None}
        todo += ast.iter_child_nodes(node)
    return found
