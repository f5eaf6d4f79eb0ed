"""The names of libraries that the code uses, and whether they exist in the installed versions."""

from __future__ import annotations

import ast
import importlib
import warnings
from functools import cache
from typing import Any

from tests.support.paths import ROOT

LIBRARIES = ("torch", "ray", "mlflow", "pyarrow", "torchvision", "keras")
FILES = [file for folder in ("ray_app", "benchmarks", "jobs") for file in sorted((ROOT / folder).rglob("*.py"))]


def exists(path: str) -> bool:
    """Returns whether a dotted name is a module, or an attribute of one, at any depth."""
    names = path.split(".")
    if names[0] == "keras":
        # The libraries of Keras programs are not on every machine on which `make gpu` runs.
        from ray_app.task.keras.library import choose_backend

        choose_backend()
    for cut in range(len(names), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(names[:cut]))
            for name in names[cut:]:
                value = getattr(value, name)
        except (ImportError, AttributeError):
            continue
        return True
    return False


class Names(ast.NodeVisitor):
    """The dotted names of libraries in a file, with their lines.

    Attributes:
        first_lines: The line of the first use of each imported name.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.first_lines: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        nodes = list(ast.walk(tree))
        # Imports within functions may come after lines of other functions that use the names.
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_import(node.value):
                self._aliases[node.targets[0].id] = "keras"
        self.visit(tree)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                name = f"{node.module}.{alias.name}"
                bound, stands_for = alias.asname or alias.name, name
            else:
                name = alias.name
                bound, stands_for = (alias.asname, name) if alias.asname else (name.split(".")[0], name.split(".")[0])
            if name.split(".")[0] in LIBRARIES and not (isinstance(node, ast.ImportFrom) and node.level):
                self._aliases[bound] = stands_for
                self.first_lines.setdefault(name, node.lineno)

    def _dotted(self, node: ast.expr) -> str | None:
        """Returns the full name of a chain of attributes on an imported name; None for other chains."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if _is_import(node):
            return "keras"
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Records the whole chain, or visits its beginning if that is not an imported name."""
        if (name := self._dotted(node)) is not None:
            self.first_lines.setdefault(name, node.lineno)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Records the name of `getattr(owner, "name")` without a default."""
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            owner, name = node.args
            if (
                isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and (dotted := self._dotted(owner)) is not None
            ):
                self.first_lines.setdefault(f"{dotted}.{name.value}", node.lineno)
        self.generic_visit(node)


def dotted_name(node: ast.expr) -> str | None:
    """Returns the text of a chain of attributes on a name, such as `a.b.c`; None for other expressions."""
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _is_import(node: ast.expr) -> bool:
    """Returns whether an expression is a call of `import_keras`, by which the package imports Keras."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == "import_keras"


@cache
def names() -> dict[str, str]:
    """Returns each name of a library, with the file and line of its first use."""
    first: dict[str, str] = {}
    for file in FILES:
        code = file.read_text()
        # Without the name of a library a module uses none.
        if not any(library in code for library in LIBRARIES):
            continue
        for name, line in Names(ast.parse(code)).first_lines.items():
            first.setdefault(name, f"{file.relative_to(ROOT)}:{line}")
    return first


def missing(locations: dict[str, str]) -> dict[str, str]:
    """Returns the names that do not exist, with the location of their use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: location for name, location in locations.items() if not exists(name)}
