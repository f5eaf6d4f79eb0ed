"""The command `ray-app init`: begins a project of one's own, which trains, and whose test passes, as it is written."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from ray_app.cli.main import exit_code
from ray_app.errors import ConfigError

_TEMPLATE = Path(__file__).parent / "project"
_NAME = "PACKAGE"
"""Stands for the package's name in the files of the template; its folder is called `package` there."""
_TAKEN = {"tests", "data", "runs", "predictions", "make_data"}
"""What the project itself holds besides its package."""


def project_files(package: str) -> Iterator[tuple[Path, str]]:
    """The files of a new project: their paths below its folder, and what stands in them.

    Args:
        package: Name of its package.
    """
    for file in sorted(_TEMPLATE.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            parts = [
                {"package": package, "gitignore": ".gitignore"}.get(part, part)
                for part in file.relative_to(_TEMPLATE).parts
            ]
            yield Path(*parts), file.read_text().replace(_NAME, package)


def package_name(folder: Path, asked: str | None) -> str:
    """The name of the project's package: the one that is asked for, or one made from the folder's.

    Raises:
        ConfigError: No module can be called so, or one is.
    """
    name = asked or re.sub(r"\W", "_", folder.name).lower()
    advice = "Give another name with --package, such as --package surface."
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"The package would be called {name!r}, which is no name that Python imports. {advice}")
    elsewhere = [path for path in sys.path if path and Path(path).resolve() not in (Path.cwd(), folder)]
    if name in _TAKEN | sys.stdlib_module_names or PathFinder.find_spec(name, elsewhere) is not None:
        raise ConfigError(f"The package would be called {name!r}, as {_whose(name)}. {advice}")
    return name


def _whose(name: str) -> str:
    return "a part of the project is" if name in _TAKEN else "an installed module is, and one would hide the other"


def begin(folder: Path, package: str) -> None:
    """Writes the files of a new project.

    Args:
        folder: Where to; made if it is not there.
        package: Name of its package.

    Raises:
        ConfigError: Something is there already, or it cannot be written.
    """
    try:
        held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if held:
            shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise ConfigError(
                f"{folder} is not empty (it holds {shown}), and nothing is overwritten. Name a new or an empty folder."
            )
        for path, text in project_files(package):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"A project cannot be written to {folder}: {error}. Name a new folder in one that you may write to."
        ) from error


def main(arguments: list[str] | None = None, prog: str = "ray-app init") -> int:
    """Parses the command line and begins the project.

    Returns:
        Exit code: see `exit_code`.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Begins a project of your own: a package with a task, data, a configuration, a test.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new or an empty folder")
    parser.add_argument(
        "--package", metavar="NAME", help="of the Python package in it; not given: made from the folder's name"
    )
    options = parser.parse_args(arguments)

    def work() -> None:
        folder = Path(options.folder).expanduser().resolve()
        package = package_name(folder, options.package)
        begin(folder, package)
        print(f"{folder} has a project with the package {package}; README.md says what is what. To see it train:\n")
        for command in (
            ["cd", options.folder],
            ["python", "make_data.py"],
            ["ray-app", "train", "--config", "train.yaml"],
        ):
            print(f"  {shlex.join(command)}")

    return exit_code(work, "The project was not begun")
