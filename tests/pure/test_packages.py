"""Where things are, besides what import-linter holds: the committed picture is the code's, and Ray's private names are
in one package.
"""

from __future__ import annotations

import ast
import re

import pytest

from docs.picture import PICTURE, svg
from tests.support.places import ROOT

ALLOWED = {"data/ray_tasks.py": {"ray.data._internal.progress"}}
"""The name of a logger, in a package below `cluster`: without it Ray Data would warn that it shows no progress bars."""


def is_private(name: str) -> bool:
    """Whether it is a name of Ray that its documentation does not have: a part of it begins with `_`."""
    return re.fullmatch(r"ray(\.\w+)*\._[a-z]\w*(\.\w+)*", name, re.IGNORECASE) is not None


def private_names(code: str) -> set[str]:
    """Private names of Ray that code imports, reaches by attributes, or has as a text."""
    names, attributes = set[str](), set[ast.AST]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node not in attributes:
            attributes |= set(ast.walk(node))
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return set(filter(is_private, names))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from ray._raylet import node", {"ray._raylet.node"}),
        ("def f():\n    import ray.train.v2._internal.util", {"ray.train.v2._internal.util"}),
        ("from ray import _private, get", {"ray._private"}),
        ("import ray\nfrom ray.train import RunConfig\nfrom rayon._x import y", set()),
        ("import ray\nray._private.state.state.get_nodes()", {"ray._private.state.state.get_nodes"}),
        ("import ray\nray.nodes()[0]._x\nray.__version__\nmine.ray._x", set()),
        ("logger('ray._private.utils')\n'Of `ray._private.utils` nothing is used.'", {"ray._private.utils"}),
    ],
)
def test_private_names_are_recognized(code: str, expected: set[str]) -> None:
    assert private_names(code) == expected


def test_rays_private_names_are_in_the_package_cluster_only() -> None:
    folder, names_of = ROOT / "ray_app", {}
    for file in folder.rglob("*.py"):
        if names := private_names(file.read_text()):
            names_of[file.relative_to(folder).as_posix()] = names
    outside = {file: names for file, names in names_of.items() if not file.startswith("cluster/")}
    assert outside == ALLOWED
    assert "cluster/ray_private.py" in names_of


def test_the_picture_is_that_of_the_code() -> None:
    assert PICTURE.read_text() == svg(), "run `make picture`, and look at it"


def test_tests_share_what_is_in_support_and_import_no_other_tests() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {node.module}"
        for file in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.") and "test_" in str(node.module)
    }
    assert found == set(), "put it into tests/support"
