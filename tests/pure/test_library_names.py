"""Every name of a library that the code uses exists in what is installed, also where only a GPU or a cluster would come by.

An attribute that is missing is noticed when a line runs, and many lines run on a GPU alone: a call of a function that exists in no version
of PyTorch once ended every run on a GPU at its first worker.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from functools import cache
from typing import Any

import pytest

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
            if isinstance(name, ast.Constant) and (dotted := self._dotted(owner)) is not None:
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


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_a_library_that_the_code_uses_exists(library: str) -> None:
    used = {name: place for name, place in names().items() if name.split(".")[0] == library}
    assert len(used) >= {"torch": 200, "ray": 50, "mlflow": 15, "pyarrow": 30, "torchvision": 5}[library], "the code was not read"
    assert missing(used) == {}


def test_names_are_found_however_they_are_imported() -> None:
    text = """
import torch
import pyarrow.parquet as pq
import torch.distributed as dist
from torch import cuda, nn
from torch.nn import functional as F
import os

def f(x):
    from ray.util import scheduling_strategies
    cuda.Stream(x).wait_stream(cuda.current_stream())
    os.path.nothing
    x.torch.nothing
    getattr(torch.backends.cudnn, "conv")
    getattr(torch, "perhaps", None)
    return F.relu(pq.read_table(x)), dist.ReduceOp.SUM, torch._C._cuda_getDriverVersion(), nn.Nothing().parameters
"""
    found = Names(ast.parse(text)).found
    assert set(found) == {
        *("torch", "torch.cuda", "torch.nn", "pyarrow.parquet", "torch.distributed", "torch.nn.functional"),
        *("ray.util.scheduling_strategies", "torch.cuda.Stream", "torch.cuda.current_stream", "torch.backends.cudnn.conv"),
        *("torch.backends.cudnn", "torch.nn.functional.relu", "pyarrow.parquet.read_table", "torch.distributed.ReduceOp.SUM"),
        *("torch._C._cuda_getDriverVersion", "torch.nn.Nothing"),
    }
    assert set(missing(dict.fromkeys(found, "here"))) == {"torch._C._cuda_getDriverVersion", "torch.nn.Nothing"}
