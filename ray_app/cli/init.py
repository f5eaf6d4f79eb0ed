"""The command `ray-app init`: writes a new project that trains, and passes its test, unchanged."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ray_app.cli.main import exit_code
from ray_app.errors import ConfigError, join_names

_TEMPLATES = Path(__file__).parent / "project"
"""The folder `common` has the files of all projects; `task` and `keras` have the files of one kind of project."""
_NAME = "PACKAGE"
"""Placeholder for the package's name in the files of the template, where its folder is called `package`."""
_TAKEN = {"tests", "data", "runs", "predictions", "make_data"}
"""Names of files and folders of the project other than its package."""


def package_name(folder: Path, requested: str | None) -> str:
    """Returns the requested package name or one derived from the folder's; raises `ConfigError` if it is unusable."""

    name = requested or re.sub(r"\W", "_", folder.name).lower()
    advice = "Set another name with --package, such as --package surface."
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"The package would be called {name!r}, which Python cannot import. {advice}")
    elsewhere = [path for path in sys.path if path and Path(path).resolve() not in (Path.cwd(), folder)]
    if name in _TAKEN | sys.stdlib_module_names or PathFinder.find_spec(name, elsewhere) is not None:
        owner = "a part of the project is" if name in _TAKEN else "an installed module is, and one would hide the other"
        raise ConfigError(f"The package would be called {name!r}, as {owner}. {advice}")
    return name


def write_project(folder: Path, package: str, is_keras: bool) -> None:
    """Writes the files of a new project; raises `ConfigError` if the folder is not empty or cannot be written to."""
    try:
        entries = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if entries:
            raise ConfigError(
                f"{folder} is not empty (it has {join_names(entries, 5)}), and no file is overwritten. Name a new or an"
                " empty folder."
            )
        names = {"package": package, "gitignore": ".gitignore"}
        for template in (_TEMPLATES / "common", _TEMPLATES / ("keras" if is_keras else "task")):
            for file in sorted(template.rglob("*")):
                if file.is_file() and file.suffix != ".pyc":
                    path = folder.joinpath(*(names.get(part, part) for part in file.relative_to(template).parts))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(file.read_text().replace(_NAME, package))
    except OSError as error:
        raise ConfigError(
            f"A project cannot be written to {folder}: {error}. Name a new folder in a writable one."
        ) from error


def main(arguments: list[str] | None = None, prog: str = "ray-app init") -> int:
    """Runs `ray-app init`; see `exit_code`."""
    description = "Creates a project: a package with a task or a Keras model, data, a configuration, a test."
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="a new or an empty folder")
    package_help = "name of the Python package; default: derived from the folder's name"
    parser.add_argument("--package", metavar="NAME", help=package_help)
    keras_help = "the package has a compiled Keras model instead of a task; this needs the extra keras"
    parser.add_argument("--keras", action="store_true", help=keras_help)
    options = parser.parse_args(arguments)

    def work() -> None:
        folder = Path(options.folder).expanduser().resolve()
        package = package_name(folder, options.package)
        write_project(folder, package, options.keras)
        print(f"{folder} has a project with the package {package}; README.md explains its files. To train it:\n")
        print(f"  {shlex.join(['cd', options.folder])}\n  python make_data.py\n  ray-app train --config train.yaml")

    return exit_code(work, "The project could not be created")
