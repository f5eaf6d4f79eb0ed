"""Rules of the package structure that import-linter does not check: private names of Ray are in one package, those of
torch in one module, and the committed picture is that of the code.
"""

import ast
import re
from functools import cache

from docs.picture import PICTURE, svg
from tests.support.library_names import Names, dotted_name
from tests.support.paths import ROOT

ALLOWED = {"data/ray_tasks.py": {"ray.data._internal.progress"}}
"""The name of a logger, in a package below `cluster`: without it Ray Data would warn that it shows no progress bars."""


def is_private(name: str) -> bool:
    """Returns whether this is a private name of Ray: a part of it begins with `_`."""
    return re.fullmatch(r"ray(\.\w+)*\._[a-z]\w*([.:]\w+)*", name, re.IGNORECASE) is not None


def private_names(code: str) -> set[str]:
    """Returns the private names of Ray that code imports, accesses as attributes, or has as a string."""
    names, attributes = set[str](), set[ast.AST]()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node not in attributes and (name := dotted_name(node)) is not None:
            attributes |= set(ast.walk(node))
            names.add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return set(filter(is_private, names))


@cache
def private_names_by_file() -> dict[str, set[str]]:
    """Returns the private names of Ray in each module of the package that has any."""
    folder, names_of = ROOT / "ray_app", {}
    for file in folder.rglob("*.py"):
        code = file.read_text()
        if re.search(r"\bray\b", code, re.IGNORECASE) and (names := private_names(code)):
            names_of[file.relative_to(folder).as_posix()] = names
    return names_of


def test_private_names_of_ray_are_only_in_the_package_cluster() -> None:
    names_of = private_names_by_file()
    outside = {file: names for file, names in names_of.items() if not file.startswith("cluster/")}
    assert outside == ALLOWED
    assert "cluster/ray_private.py" in names_of


def test_only_the_controller_fails_to_import_without_private_names_of_ray() -> None:
    """With a version of Ray that does not have them, runs recover by restart, which does not use the controller."""
    files = list[str]()
    for file in private_names_by_file():
        tree = ast.parse((ROOT / "ray_app" / file).read_text())
        for node in [child for child in tree.body if isinstance(child, ast.Import | ast.ImportFrom)]:
            if private_names(ast.unparse(node)):
                files.append(file)
    assert {*files} == {
        f"cluster/controller/{name}.py" for name in ("controller", "pending_workers", "scaling_policy", "worker_group")
    }


def private_torch_names(code: str) -> set[str]:
    """Returns the names of torch of which a part begins with `_`, except names such as `__version__`, and the private
    attributes of its objects.
    """
    tree = ast.parse(code if "torch" in code else "")
    names = {name for name in Names(tree).first_lines if name.split(".")[0] == "torch"}
    return {
        name for name in names if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    } | set(
        re.findall(
            r"(?<!self)\._(?:local_tensor|unsharded_param|param_fqn|version|buffers|get_backend|fsdp\w*)\b", code
        )
    )


def test_private_names_of_torch_are_only_in_one_module() -> None:
    """That module has the reason for each name, so that only one file is compared with a new version of torch."""
    files = (ROOT / "ray_app").rglob("*.py")
    names_of = {
        file.relative_to(ROOT / "ray_app").as_posix(): names
        for file in files
        if (names := private_torch_names(file.read_text()))
    }
    assert set(names_of) == {"torch_private.py"}, names_of


def test_the_committed_picture_of_the_packages_is_up_to_date() -> None:
    assert PICTURE.read_text() == svg(), "run `make picture`, and look at it"


def test_tests_import_shared_code_from_support_and_not_from_other_tests() -> None:
    imports = {
        f"{file.relative_to(ROOT)}: {node.module}"
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(r"from tests\.\S*test_", code := file.read_text())
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.") and "test_" in str(node.module)
    }
    assert imports == set(), "a test module imports another one; move the shared code to tests/support"
