"""The command `ray-app`: its table of commands, its imports, and the requirements in the project file."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ray_app
from ray_app.cli.main import COMMANDS, main
from ray_app.cluster.ray_private import search_path
from ray_app.driver.finalize import report_end
from ray_app.runlog.paths import RunPaths
from ray_app.watch.terminal import find_mlflow_page
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PROCESS_S = 120


def test_help_and_version_import_no_heavy_library() -> None:
    code = "import sys; from ray_app.cli.main import main; main([sys.argv[1]]); print(*sys.modules, file=sys.stderr)"
    for option, expected in (("--help", "train a configuration"), ("--version", f"ray-app {ray_app.__version__}\n")):
        done = subprocess.run(
            [sys.executable, "-c", code, option],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_PROCESS_S,
            check=True,
        )
        assert expected in done.stdout
        assert not {"torch", "ray", "numpy", "jsonargparse", "yaml"} & set(done.stderr.split())


@pytest.mark.rest
@pytest.mark.parametrize("name", COMMANDS)
def test_usage_of_every_command_names_the_program_as_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"], "python -m ray_app")
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert not output.out
    assert f"python -m ray_app {name}" in output.err
    assert "--no-such-option" in output.err or "required" in output.err
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"ray_app.cli.{name}").main(["--help"])
    assert ended.value.code == 0
    assert f"ray-app {name}" in capsys.readouterr().out.split("\n\n")[0]


def test_an_unknown_command_is_refused_and_the_nearest_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(arguments) for arguments in (["trian"], [], ["--help"])] == [2, 2, 0]
    output = capsys.readouterr()
    assert "ray-app: 'trian' is not a command. Did you mean train? Commands: demo, init, ingest" in output.err
    assert all(f"\n  {name} " in output.out for name in COMMANDS)


def test_every_job_is_a_command() -> None:
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py")}
    assert jobs == set(COMMANDS) - {"init"}
    assert PROJECT["scripts"] == {"ray-app": "ray_app.cli.main:run"}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("arguments", "started"),
    [([], "runpy.run_path('jobs/report.py', run_name='__main__')"), (["report"], "sys.exit(run())")],
)
def test_a_process_exits_before_the_interpreter_shuts_down(arguments: list[str], started: str) -> None:
    """A thread that runs C++ code during the shutdown can abort the process, which loses the command's exit code."""
    code = f"""
import runpy, sys
from ray_app.cli.main import run
class Late:
    __del__ = lambda self: print("taken apart")
late = Late()
sys.argv[:] = {["ray-app", *arguments, "--run", "missing"]}
print("begun")
{started}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=_PROCESS_S, check=False
    )
    assert (done.returncode, done.stdout) == (2, "begun\n"), done.stderr
    assert "missing" in done.stderr


@pytest.mark.parametrize(("redirected", "code"), [(">/dev/full", 120), (">&-", 0)])
def test_unwritable_output_yields_the_documented_exit_code(redirected: str, code: int) -> None:
    command = f"{shlex.quote(sys.executable)} -m ray_app --version {redirected}"
    # Without this variable, output is written at the end of the process.
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_PROCESS_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


NAMED = re.compile(r"\bjobs/\w+\.py")


def test_no_message_names_a_job_that_an_installation_lacks() -> None:
    named = {
        path.name
        for path in (ROOT / "ray_app").rglob("*.*")
        if path.suffix in (".py", ".j2") and NAMED.search(path.read_text())
    }
    assert named == set()


def test_pins_are_within_the_ranges_of_the_project_file() -> None:
    def read(lines: list[str]) -> dict[str, Requirement]:
        return {requirement.name.lower(): requirement for requirement in map(Requirement, lines)}

    pins = read([line for line in (ROOT / "requirements.txt").read_text().splitlines() if re.match(r"\w", line)])
    others = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "all"}
    extras = [line for lines in others.values() for line in lines]
    ranges = read([*PROJECT["dependencies"], *extras])
    assert pins.keys() == ranges.keys()
    for name, pin in pins.items():
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert ranges[name].specifier.contains(exact.version), name
        assert ranges[name].extras == pin.extras
    everything = set(Requirement(PROJECT["optional-dependencies"]["all"][0]).extras)
    assert everything == set(PROJECT["optional-dependencies"]) - {"all"}


def test_the_search_path_has_the_existing_folders_of_the_driver(tmp_path: Path) -> None:
    libraries, project = tmp_path / "of-another" / "site-packages", tmp_path / "project"
    libraries.mkdir(parents=True)
    project.mkdir()
    code = "from ray_app.cluster.ray_private import search_path; print(*search_path(), sep='\\n')"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(project), str(libraries), str(tmp_path / "missing")])
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_PROCESS_S,
        check=True,
    )
    # An editable installation finds ROOT by itself.
    folders = [path for path in done.stdout.splitlines() if path != str(ROOT)]
    assert folders == [str(tmp_path), str(project), str(libraries)]
    assert not any(path.startswith(sys.prefix) for path in search_path())


def test_printed_commands_quote_paths_with_spaces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, uri = tmp_path / "my runs" / "one", "sqlite:////my runs/mlflow.db"
    report_end(RunPaths(run))
    (command,) = re.findall(r"ray-app report .*(?= tries again)", caplog.text)
    assert shlex.split(command) == ["ray-app", "report", "--run", str(run)]
    assert shlex.split(find_mlflow_page(uri))[-2:] == ["--backend-store-uri", uri]


def test_a_command_in_another_encoding_starts_itself_again_in_utf_8() -> None:
    code = (
        "import sys; from ray_app.cli.main import run; sys.argv[1:] = ['--version']; run(); print(sys.flags.utf8_mode)"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split()[-1] == "1"
