"""The names of libraries that the code uses, and whether they exist in what is installed."""

from __future__ import annotations

import ast
import importlib
import warnings
from functools import cache
from typing import Any

from tests.support.places import ROOT

LIBRARIES = ("torch", "ray", "mlflow", "pyarrow", "torchvision")
FILES = [file for folder in ("ray_app", "benchmarks", "jobs") for file in sorted((ROOT / folder).rglob("*.py"))]


def exists(path: str) -> bool:
    """Whether a dotted name stands for something: a module, or an attribute of one or of what is in it."""
    names = path.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:cut]))
            for name in names[cut:]:
                found = getattr(found, name)
        except (ImportError, AttributeError):
            continue
        return True
    return False


class Names(ast.NodeVisitor):
    """The dotted names of libraries in a file, with their lines.

    Attributes:
        found: Each name as it is imported, and the line of its first use.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        for node in ast.walk(tree):  # imports within functions come after the lines that use them elsewhere
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
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
                self.found.setdefault(name, node.lineno)

    def _dotted(self, node: ast.expr) -> str | None:
        """The name that a chain of attributes on an imported name stands for; None if it begins elsewhere."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Notes the whole chain, or looks into what it begins with."""
        if (name := self._dotted(node)) is not None:
            self.found.setdefault(name, node.lineno)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Notes `getattr(owner, "name")`, which has no other value to give."""
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            owner, name = node.args
            if (
                isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and (dotted := self._dotted(owner)) is not None
            ):
                self.found.setdefault(f"{dotted}.{name.value}", node.lineno)
        self.generic_visit(node)


@cache
def names() -> dict[str, str]:
    """Each name of a library, and where it is used first."""
    first: dict[str, str] = {}
    for file in FILES:
        for name, line in Names(ast.parse(file.read_text())).found.items():
            first.setdefault(name, f"{file.relative_to(ROOT)}:{line}")
    return first


def missing(places: dict[str, str]) -> dict[str, str]:
    """The names that do not exist, with where they are used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: place for name, place in places.items() if not exists(name)}
