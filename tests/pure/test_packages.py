"""Where things are, besides what import-linter holds: the committed picture is the code's, private parts of Ray are in
two packages, and those of torch in one module.
"""

from __future__ import annotations

import ast
import re

import pytest

from docs.picture import PICTURE, svg
from tests.support.library_names import Names
from tests.support.places import ROOT

KNOW_RAY = ("cluster", "submit")


def private_imports(code: str) -> set[str]:
    """Modules of Ray in code that its documentation does not have: a part of their name, or what is taken from them,
    begins with `_`.
    """
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {
        name for name in found if name.split(".")[0] == "ray" and any(part.startswith("_") for part in name.split("."))
    }


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from ray._raylet import node", {"ray._raylet.node"}),
        ("def f():\n    import ray.train.v2._internal.util", {"ray.train.v2._internal.util"}),
        ("from ray import _private, get", {"ray._private"}),
        ("import ray\nfrom ray.train import RunConfig\nfrom rayon._x import y", set()),
    ],
)
def test_private_imports_are_found(code: str, expected: set[str]) -> None:
    assert private_imports(code) == expected


def test_rays_private_parts_are_in_cluster_and_submit() -> None:
    files = (ROOT / "ray_app").rglob("*.py")
    found = {
        file.relative_to(ROOT / "ray_app").parts[0]: names
        for file in files
        if (names := private_imports(file.read_text()))
    }
    assert set(found) == set(KNOW_RAY), found


def private_torch_names(code: str) -> set[str]:
    """Names of torch in code of which a part begins with `_`, but for `__version__` and the like; and attributes of
    its objects by their names.
    """
    names = {name for name in Names(ast.parse(code)).found if name.split(".")[0] == "torch"}
    return {
        name for name in names if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    } | set(
        re.findall(
            r"(?<!self)\._(?:local_tensor|unsharded_param|param_fqn|version|buffers|get_backend|fsdp\w*)\b", code
        )
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from torch.utils._pytree import tree_leaves", {"torch.utils._pytree.tree_leaves"}),
        ("import torch.distributed as dist\ndist._x.y()", {"torch.distributed._x.y"}),
        ("import torch\ntorch._foreach_norm([])", {"torch._foreach_norm"}),
        ("def f(x):\n    return x._version", {"._version"}),
        ("import torch\nprint(torch.__version__)\nself._group._version_of()", set()),
    ],
)
def test_private_names_of_torch_are_found(code: str, expected: set[str]) -> None:
    assert private_torch_names(code) == expected


def test_torchs_private_names_are_in_one_module() -> None:
    """Where each stands with its reason, so that a new version of torch is compared with one file."""
    files = (ROOT / "ray_app").rglob("*.py")
    found = {
        file.relative_to(ROOT / "ray_app").as_posix(): names
        for file in files
        if (names := private_torch_names(file.read_text()))
    }
    assert set(found) == {"torch_private.py"}, found


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
