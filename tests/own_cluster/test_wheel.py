"""The wheel as its users install it: in their environment, with their project, and without the checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_app import __version__
from tests.support.head import Head, start_head
from tests.support.paths import ROOT

pytestmark = [pytest.mark.timeout(1200), pytest.mark.rest]

_PROCESS_S = 600
_ONE_WORKER = "--scaling.max_workers=1"
_WITNESS = """
import os
import pathlib

import ray_app

# Every process says from where it has what it imports
with (pathlib.Path({folder!r}) / str(os.getpid())).open("a") as file:
    print(pathlib.Path(ray_app.__file__).parent, file=file)
"""


SHIPPED = ("LICENSE", "NOTICE", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class User:
    """A user with the wheel, and with a project from `ray-app init`.

    Args:
        project: Folder of the project.
        environment: Variables of the user's shell.
        witnesses: Folder in which every process that imports the project's package notes the origin of its `ray_app`.
        bin: Folder with the programs of the user's environment.
    """

    project: Path
    environment: dict[str, str]
    witnesses: Path
    bin: Path

    def run(self, *command: str, head: Head | None = None) -> str:
        """Runs a command in the project's folder; returns its output."""
        access = {name: value for name, value in head.environment.items() if name.startswith("RAY_")} if head else {}
        done = subprocess.run(
            command,
            cwd=self.project,
            env=self.environment | access,
            capture_output=True,
            text=True,
            timeout=_PROCESS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def take_origins(self) -> set[str]:
        """Returns the folders from which processes imported `ray_app` since the last call, and forgets them."""
        files = list(self.witnesses.iterdir())
        origins = {line for file in files for line in file.read_text().splitlines()}
        for file in files:
            file.unlink()
        return origins

    def digest(self, run: str) -> str:
        summary = json.loads((self.project.parent / "runs" / run / "summary.json").read_text())
        assert summary["status"] == "finished"
        return str(summary["params_digest"])


def environment_in(folder: Path) -> Path:
    """Makes an environment with all libraries of the present one but the application; returns its `bin` folder."""
    venv.create(folder, symlinks=True)
    (libraries,) = (folder / "lib").glob("python*/site-packages")
    for library in Path(sysconfig.get_path("purelib")).iterdir():
        if "ray_app" not in library.name:
            (libraries / library.name).symlink_to(library)
    return folder / "bin"


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=_PROCESS_S)
    (file,) = out.iterdir()
    assert file.name == f"ray_app-{__version__}.tar.gz"
    return file


@pytest.fixture(scope="module")
def wheel(source_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the source archive."""
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        str(source_archive),
    ]
    subprocess.run(command, check=True, timeout=_PROCESS_S)
    (file,) = out.iterdir()
    assert file.name == f"ray_app-{__version__}-py3-none-any.whl"
    return file


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    folder = tmp_path_factory.mktemp("user")
    programs = environment_in(folder / "environment")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=_PROCESS_S)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("RAY_", "PYTEST_"))
    }
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    subprocess.run(["ray-app", "init", "waves"], cwd=folder, env=environment, check=True, timeout=_PROCESS_S)
    (folder / "witnesses").mkdir()
    with (folder / "waves" / "waves" / "__init__.py").open("a") as package:
        package.write(_WITNESS.format(folder=str(folder / "witnesses")))
    account = User(folder / "waves", environment, folder / "witnesses", programs)
    account.run("python", "make_data.py")
    return account


@pytest.fixture(scope="module")
def installed_at(user: User) -> str:
    """Folder of the application in the user's environment."""
    package = Path(user.run("python", "-c", "import ray_app; print(ray_app.__file__)").strip()).parent
    assert package.is_relative_to(user.bin.parent)
    assert (package / "py.typed").exists()
    assert (package / "ingest" / "readers" / "digits.npz").exists()
    return str(package)


@pytest.fixture(scope="module")
def trained(user: User, installed_at: str) -> str:
    """Digest of the parameters of a run with two workers on the user's machine."""
    user.run("ray-app", "train", "--config", "train.yaml", "--run.storage_path=../runs", "--run.name=here")
    summary = json.loads((user.project.parent / "runs" / "here" / "summary.json").read_text())
    assert summary["best"]["value"] < 0.1
    assert (user.project.parent / "runs" / "here" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert user.take_origins() == {installed_at}
    return user.digest("here")


def test_the_source_archive_and_the_wheel_have_licence_and_data(source_archive: Path, wheel: Path) -> None:
    with tarfile.open(source_archive) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SHIPPED, "ray_app/ingest/readers/digits.npz", "ray_app/cli/digits.yaml", "ray_app/py.typed"} <= sources
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        files = set(archive_of_wheel.namelist())
        [metadata] = [name for name in files if name.endswith("/METADATA")]
        fields = archive_of_wheel.read(metadata).decode()
    folder = metadata.removesuffix("METADATA")
    assert {name for name in sources if name.startswith("ray_app/")} == {n for n in files if n.startswith("ray_app/")}
    assert {f"{folder}licenses/LICENSE", f"{folder}licenses/NOTICE"} <= files
    assert "\nLicense-Expression: Apache-2.0\n" in fields


def test_the_demo_trains_with_the_files_of_the_wheel(user: User, installed_at: str, tmp_path: Path) -> None:
    output = user.run("ray-app", "demo", "--out", str(tmp_path / "demo"))
    summary = json.loads((tmp_path / "demo" / "runs" / "demo" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["best"]["value"] > 0.97
    assert summary["params_digest"] in output
    assert f"ray-app train --config {tmp_path / 'demo'}" not in output
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"data", "digits.yaml", "runs"}


def test_a_project_trains_and_predicts_and_its_test_passes(user: User, trained: str, installed_at: str) -> None:
    assert f"ray-app {__version__}\n" == user.run("ray-app", "--version")
    user.take_origins()
    options = ["--config=train.yaml", "--predict.run=../runs/here", "--predict.data=data/eval", "--predict.out=../out"]
    assert "1,000 in, 1,000 out" in user.run("ray-app", "predict", *options)
    assert "1 passed" in user.run("python", "-m", "pytest", "-p", "no:cacheprovider")
    assert user.take_origins() == {installed_at}


@pytest.fixture(scope="module")
def bare_head(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A cluster of nodes that have the libraries, but not the application."""
    folder = tmp_path_factory.mktemp("bare")
    python = environment_in(folder / "environment") / "python"
    with pytest.MonkeyPatch.context() as image:
        image.delenv("PYTHONPATH", raising=False)
        image.chdir(folder)
        looked = subprocess.run([str(python), "-c", "import ray_app"], capture_output=True, text=True, check=False)
        assert "No module named 'ray_app'" in looked.stderr
        with start_head(folder, 4, python) as head:
            yield head


@pytest.mark.parametrize(
    ("way", "part_of_path"),
    [("send", "py_modules_files"), (f"ray_app=={__version__} --no-index --find-links WHEELS", "/pip/")],
    ids=["sent", "pip"],
)
def test_nodes_get_the_application_with_the_job(
    user: User, bare_head: Head, wheel: Path, trained: str, way: str, part_of_path: str
) -> None:
    way = way.replace("WHEELS", str(wheel.parent))
    name = "sent" if way == "send" else "by-pip"
    options = [
        f"--run.storage_path={user.project.parent / 'runs'}",
        f"--run.name={name}",
        f"--submit.address={bare_head.url}",
    ]
    user.take_origins()
    output = user.run(
        "ray-app", "submit", "--config=train.yaml", _ONE_WORKER, *options, f"--submit.ray_app={way}", head=bare_head
    )
    listed = re.findall(r"^ +\d+\.\d\d MB  (\S+)$", output, re.MULTILINE)
    assert {"data/", "waves/"} <= set(listed), output
    assert not [name for name in listed if "ray_app" in name], (
        "the package has files of the application, not just the project and its data"
    )
    assert user.digest(name) == trained
    take_origins = user.take_origins()
    assert len(take_origins) > 1
    on_nodes = {path for path in take_origins if not path.startswith(str(user.bin.parent))}
    assert all("runtime_resources" in path and part_of_path in path for path in on_nodes), take_origins


def test_a_job_on_nodes_without_the_application_says_so(user: User, bare_head: Head) -> None:
    options = [
        "--submit.ray_app=installed",
        f"--run.storage_path={user.project.parent / 'runs'}",
        f"--submit.address={bare_head.url}",
    ]
    access = {name: value for name, value in bare_head.environment.items() if name.startswith("RAY_")}
    command = ["ray-app", "submit", "--config=train.yaml", *options]
    done = subprocess.run(
        command,
        cwd=user.project,
        env=user.environment | access,
        capture_output=True,
        text=True,
        timeout=_PROCESS_S,
        check=False,
    )
    assert done.returncode == 1
    assert "No module named ray_app" in done.stdout


def test_nodes_that_have_the_application_run_a_plain_job(
    user: User, trained: str, installed_at: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as image:
        image.delenv("PYTHONPATH", raising=False)
        image.chdir(tmp_path)
        with start_head(tmp_path, 4, user.bin / "python") as head:
            user.take_origins()
            train = ["python", "-m", "ray_app", "train", "--config=train.yaml", _ONE_WORKER, "--run.name=plain"]
            job = ["python", "-m", "ray.scripts.scripts", "job", "submit", "--address", head.url, "--working-dir", "."]
            user.run(*job, "--", *train, f"--run.storage_path={user.project.parent / 'runs'}", head=head)
    assert user.digest("plain") == trained
    assert user.take_origins() == {installed_at}
