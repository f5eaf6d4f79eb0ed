"""Tries the versions of Ray, torch and Python, and writes `docs/versions.md`: `make versions`.

Each row of the table is an environment of its own, which is made from the package index and kept in
`build/environments`. In each the same is run: the digits on two workers of which one is killed with SIGKILL, a job that
is submitted to a head node, and a drill of five scenarios.

    versions.py environment NAME   make the environment of a row and print its folder
    versions.py test NAME          run the tests that are to pass with every version, in the environment of a row
    versions.py table [NAME ...]   run these rows, or all, and write the table; rows that are not run keep their result
    versions.py try                run what a row runs with this Python, and print the results as JSON
    versions.py extra NAME ...     try these extras of the package, or all, each in an environment that has no other
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "environments"
PAGE = ROOT / "docs" / "versions.md"
LIMIT_S = 900.0
SCENARIOS = "kill,kill_all,rendezvous,grow,damage"


@dataclass(frozen=True)
class Row:
    """An environment.

    Args:
        name: Name of the row and of its folder.
        python: Version of Python.
        resolution: Which versions within the ranges of pyproject.toml are installed, as uv calls it; None for the exact
            versions of requirements.txt.
        pins: Requirements that are added.
        overrides: Requirements that are installed although a library asks for another version.
        extra: The extra of the package that is installed.
    """

    name: str
    python: str
    resolution: str | None = "highest"
    pins: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    extra: str = "all"


ROWS = (
    Row("lowest", "3.11", "lowest-direct"),
    Row("ray256", "3.12", pins=("ray==2.56.1",)),
    Row("ray258", "3.13", pins=("ray==2.58.1", "torch==2.13.0", "torchvision==0.28.0")),
    Row("ray258-torch215", "3.11", pins=("ray==2.58.1", "torch==2.15.0")),
    Row("torch213", "3.12", pins=("ray==2.60.0", "torch==2.13.0", "torchvision==0.28.0")),
    Row("newest", "3.13"),
    Row("pyarrow26", "3.12", overrides=("pyarrow==26.0.1",)),
    Row("requirements", "3.11", None),
)
EXTRAS = {
    "tracking": ("tests/processes/track/test_mlflow_client.py", "tests/processes/models/test_registry.py"),
    "vision": ("tests/pure/task/test_configured_arguments.py", "tests/ray/task/test_random_crops.py"),
    "detection": ("tests/processes/task/test_detection.py",),
    "s3": ("tests/processes/storage/test_object_stores.py",),
    "tfrecord": ("tests/pure/ingest/readers/test_tfrecord.py",),
    "text": ("tests/processes/task/test_text.py",),
    "lora": ("tests/processes/task/test_pretrained.py",),
    "keras": ("tests/pure/task/keras", "tests/processes/task/keras/test_keras_results.py"),
}
"""The tests of what each extra is for."""
_TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "psutil")
_TOOLS_OF_EXTRAS = {
    "all": ("moto[server]", "pytorch-lightning", "nbformat", "nbclient", "ipykernel", "import-linter"),
    "s3": ("moto[server]",),
}
"""What only tests with these extras need; moto brings what the extra s3 should bring."""
_TESTS = (
    *("tests/pure", "tests/processes/train", "tests/ray/cluster/test_workers.py"),
    *("-m", "not campaign and not search and not exact_versions"),
    *("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"),
)
"""Arguments of pytest: the tests without Ray, training with every strategy, and killed workers on real Ray."""
_HEADER = f"""# Versions

Each row is an environment with versions that were tried together, made from the package index by `make versions`.
"lowest" has the lowest versions that pyproject.toml allows, "newest" the newest ones that existed. "requirements" has
the versions of requirements.txt, with which everything else in this documentation was measured. "pyarrow26" has the
newest versions and pyarrow 26, which MLflow's requirements do not allow yet.

- **Digits, one worker killed**: `conf/digits.yaml` on two workers, one of which is killed with SIGKILL at the first
  line of progress. "In place" means that the other one continued. The beginning of the digest of the parameters
  follows, which must be the same in all rows.
- **Job**: `ray-app submit` to a head node with token authentication.
- **Drill**: `ray-app drill` with the scenarios {", ".join(f"`{name}`" for name in SCENARIOS.split(","))}.

| row | Ray | torch | Python | digits, one worker killed | job | drill | date |
|---|---|---|---|---|---|---|---|
"""
_AFTER = """
`train.strategy: fsdp` needs torch 2.15, and is refused before the start with earlier versions.

With a version of Ray outside of these, all workers restart after a failure, and a warning says so. The reason is that
recovery in place changes parts of Ray Train that are not public.
"""


def environment(row: Row) -> Path:
    """Makes the environment of a row, unless it exists with the present requirements, and returns its folder."""
    folder = ENVIRONMENTS / row.name
    python = folder / "bin" / "python"
    files = [ROOT / name for name in ("requirements.txt", "requirements-dev.txt")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {*_TEST_TOOLS, *_TOOLS_OF_EXTRAS.get(row.extra, ())}
    texts = [file.read_text() for file in files]
    declared = [project["requires-python"], project["dependencies"], project["optional-dependencies"]]
    requirements = "\n".join([repr(row), *sorted(names), json.dumps(declared), *texts])
    marker_file = folder / "made-from.txt"
    if marker_file.exists() and marker_file.read_text() == requirements:
        return folder
    uv = [str(Path(sys.executable).parent / "uv")]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", _interpreter(row.python), str(folder)], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
    lines = (line for text in texts for line in text.splitlines())
    tools = [line for line in lines if re.split("[=>]", line)[0] in names]
    if row.resolution is None:
        subprocess.run([*install, "-r", str(files[0]), *tools], check=True)
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
    else:
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(row.overrides))
        options = ["--resolution", row.resolution, "--override", str(overrides), "--editable", f"{ROOT}[{row.extra}]"]
        subprocess.run([*install, *options, *row.pins, *tools], check=True)
    marker_file.write_text(requirements)
    return folder


def _interpreter(minor: str) -> str:
    """Returns the path of a Python that pyenv has; otherwise the version, which uv looks for and downloads."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(pyenv.glob(f"{minor}.*/bin/python"))), minor)


def try_here() -> dict[str, str]:
    """Runs what a row runs with this Python; returns the versions and the results, by column."""
    results = {name: version(name) for name in ("ray", "torch")} | {"python": platform.python_version()}
    with tempfile.TemporaryDirectory(prefix="versions") as name:
        folder = Path(name)
        subprocess.run(_command("ingest", "--source=digits", f"--out={folder / 'digits'}"), check=True, timeout=LIMIT_S)
        for column, attempt in (("kill", _kill), ("job", _job), ("drill", _drill)):
            try:
                results[column] = attempt(folder)
            # A failure is a result, too.
            except Exception as error:
                print(f"{column}: {error!r}", file=sys.stderr)
                results[column] = f"**failed**: {type(error).__name__}"
    return results


def _command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "ray_app", name, *options]


def _options(folder: Path, name: str) -> list[str]:
    data = folder / "digits"
    return [
        f"--config={ROOT / 'conf' / 'digits.yaml'}",
        f"--data.path={data / 'train'}",
        f"--data.eval_path={data / 'eval'}",
        f"--run.storage_path={folder / 'runs'}",
        f"--run.name={name}",
    ]


def _kill(folder: Path) -> str:
    """Trains on two workers and kills one; returns how the run recovered and the beginning of its digest."""
    import psutil

    command = _command("train", *_options(folder, "kill"))
    log = folder / "kill.log"
    killed = False
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if not killed and re.search(r"^epoch \d+/", log.read_text(), re.MULTILINE):
                children = psutil.Process(process.pid).children(recursive=True)
                workers = [child for child in children if "RayTrainWorker" in " ".join(child.cmdline())]
                workers[-1].kill()
                killed = True
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text()
    summary = json.loads((folder / "runs" / "kill" / "summary.json").read_text())
    if process.wait() or not killed or summary["restarts"]["failures"] != 1:
        raise RuntimeError(text)
    kind = "in place" if "replaced" in _events(folder / "runs" / "kill") else "all restarted"
    return f"{kind}, `{summary['params_digest'][:8]}`"


def _events(run: Path) -> set[str]:
    from ray_app.runlog.journal import read_events
    from ray_app.runlog.paths import RunPaths

    return {event.kind for event in read_events(RunPaths(run))}


def _job(folder: Path) -> str:
    """Submits the digits to a head node with token authentication."""
    sys.path.insert(0, str(ROOT))
    from tests.support.head import start_head

    (folder / "project").mkdir()
    with start_head(folder, cpus=4) as head:
        options = [*_options(folder, "job"), f"--submit.address={head.url}"]
        done = subprocess.run(
            _command("submit", *options),
            cwd=folder / "project",
            env=head.environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return "ok"


def _drill(folder: Path) -> str:
    options = [*_options(folder, "drill"), f"--drill.scenarios={SCENARIOS}", f"--drill.out={folder / 'drill'}"]
    done = subprocess.run(
        _command("drill", *options), cwd=folder, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return "ok"


def table(names: list[str]) -> None:
    """Runs the rows with these names, or all, and writes the page; exits with an error if a cell failed."""
    previous_cells = dict(re.findall(r"^\| (\S+) \|(.*)\|$", _page(), re.MULTILINE))
    lines = []
    for row in ROWS:
        cells = previous_cells.get(row.name)
        if not names or row.name in names:
            python = environment(row) / "bin" / "python"
            done = subprocess.run(
                [python, __file__, "try"], cwd=ROOT, env=_clean(), stdout=subprocess.PIPE, text=True, check=True
            )
            results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
            values = [results[name] for name in ("ray", "torch", "python", "kill", "job", "drill")]
            cells = f" {' | '.join([*values, time.strftime('%Y-%m-%d')])} "
        if cells is not None:
            lines.append(f"| {row.name} |{cells}|")
            print(lines[-1], flush=True)
    PAGE.write_text(_HEADER + "\n".join(lines) + "\n" + _AFTER)
    digests = {digest for line in lines for digest in re.findall(r"`(\w+)`", line)}
    if len(digests) > 1 or any("**failed**" in line for line in lines):
        sys.exit(f"A cell failed, or not all digests are equal: {', '.join(sorted(digests))}")


def try_extras(names: list[str]) -> None:
    """Runs the tests of each extra where no other extra is installed; exits with an error if one fails."""
    failed = []
    for extra in names or EXTRAS:
        python = environment(Row(f"extra-{extra}", "3.12", extra=extra)) / "bin" / "python"
        command = [python, "-m", "pytest", *EXTRAS[extra], "-m", "not campaign and not search"]
        if subprocess.run(command, cwd=ROOT, env=_clean(), check=False).returncode:
            failed.append(extra)
    if failed:
        sys.exit(f"Tests fail with these extras: {', '.join(failed)}")


def _page() -> str:
    return PAGE.read_text() if PAGE.exists() else ""


def _clean() -> dict[str, str]:
    """Returns the environment variables without those of another Python or cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON", "VIRTUAL"))}


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [row.name for row in ROWS]
    for command in ("environment", "test"):
        commands.add_parser(command).add_argument("name", choices=names)
    commands.add_parser("table").add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    commands.add_parser("try")
    commands.add_parser("extra").add_argument("names", nargs="*", choices=[*EXTRAS, []], metavar="NAME")
    options: Any = parser.parse_args()
    match options.command:
        case "environment":
            print(environment(next(row for row in ROWS if row.name == options.name)))
        case "test":
            python = environment(next(row for row in ROWS if row.name == options.name)) / "bin" / "python"
            sys.exit(subprocess.run([python, "-m", "pytest", *_TESTS], cwd=ROOT, env=_clean(), check=False).returncode)
        case "table":
            table(options.names)
        case "extra":
            try_extras(options.names)
        case _:
            print(json.dumps(try_here()))


if __name__ == "__main__":
    main()
