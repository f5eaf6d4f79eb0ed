"""How a run travels to a cluster, what is uploaded, and when it is submitted again."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from ray_app import load_config
from ray_app.cluster.resources import check_object_stores
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError
from ray_app.submit import server
from ray_app.submit.on_cluster import check_shared_storage
from ray_app.submit.options import EndedJob, SubmitSection, check_no_secrets, judge, non_default_fields, wait_s
from ray_app.submit.package import check_size, check_uploaded_data, list_job_files
from ray_app.submit.preflight import check_absolute_storage, compare_versions
from ray_app.submit.server import JobServer, LostContactError, _Tail
from tests.support.places import ROOT

DIGITS = ROOT / "conf" / "digits.yaml"


@pytest.mark.parametrize(
    ("ended", "again", "exit_code", "reason"),
    [
        (EndedJob("SUCCEEDED", 0), False, 0, "done"),
        (EndedJob("FAILED", 75), True, 75, "the run was interrupted"),
        (EndedJob("STOPPED"), False, 75, "somebody stopped the job"),
        (EndedJob("STOPPED", 75), False, 75, "somebody stopped the job"),
        (EndedJob("FAILED", -9), True, 1, "the driver was lost (killed by signal 9)"),
        (EndedJob("FAILED", 137), True, 1, "the driver was lost (killed by signal 9)"),
        (EndedJob("FAILED", -15), True, 1, "the driver was lost (killed by signal 15)"),
        (
            EndedJob("FAILED", None, "Job supervisor actor died: the node\nis gone"),
            True,
            1,
            "(Job supervisor actor died: the node)",
        ),
        (EndedJob("UNKNOWN"), True, 1, "the cluster does not know the job any more"),
        (EndedJob("FAILED", 1), False, 1, "the run failed"),
        (EndedJob("FAILED", 2), False, 2, "the run was refused"),
        (EndedJob("FAILED", 127), False, 127, "submit.python"),
        (EndedJob("FAILED", 3), False, 3, "exit code 3"),
        (
            EndedJob("FAILED", None, "pip failed", "RUNTIME_ENV_SETUP_FAILURE"),
            False,
            2,
            "could not set the job up: pip failed",
        ),
    ],
)
def test_when_a_run_is_submitted_again(ended: EndedJob, again: bool, exit_code: int, reason: str) -> None:
    after = judge(ended, done=1, retries=1)
    assert (after.again, after.exit_code) == (again, exit_code)
    assert reason in after.reason
    spent = judge(ended, done=2, retries=1)
    assert (spent.again, spent.exit_code) == (False, exit_code)
    assert ("no try is left of 2" in spent.reason) == again


def test_the_pause_doubles_up_to_a_bound() -> None:
    assert [wait_s(done, 5) for done in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert wait_s(60, 5) == 300


RUNS = sorted(path for path in (ROOT / "conf").glob("*.yaml") if not path.stem.startswith("retrain"))


@pytest.mark.rest
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_configuration_travels_whole(path: Path) -> None:
    config = load_config(path, run__name="it", train__epochs=7)
    text = json.dumps(non_default_fields(config))
    assert parse(["--config", text], exit_on_error=False) == config
    assert "drain_timeout_s" not in text


def test_no_secret_stands_in_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_secrets(load_config(DIGITS))
    with pytest.raises(ConfigError, match=r"tracking\.uri.*submit\.env") as refused:
        check_no_secrets(load_config(DIGITS, tracking__uri="https://me:hunter22secret@host"))
    assert "hunter22secret" not in str(refused.value)
    monkeypatch.setenv("SOME_TOKEN", "value-of-the-token")
    section = SubmitSection(env="SOME_TOKEN")
    assert section.environment({"SOME_TOKEN": "value", "OTHER": "x"}) == {
        "SOME_TOKEN": "value",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    assert "value" not in section.command(["-m", "ray_app", "train"], load_config(DIGITS))
    with pytest.raises(ConfigError, match=r"submit\.env names MISSING, not set here"):
        SubmitSection(env="SOME_TOKEN, MISSING").environment({"SOME_TOKEN": "value"})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with all that should stay at home."""
    files = ["mine/task.py", "runs.py", "conf/a.yaml", "my data/task.py", "datasets/here/train/part.parquet"]
    files += [
        ".git/objects/pack",
        "big env/bin/python",
        "big env/pyvenv.cfg",
        ".venv/lib/x.py",
        "mlruns/0/meta.yaml",
        "mlflow.db",
    ]
    files += [
        "runs/first/config.yaml",
        "datasets/other/part.parquet",
        "absolute/part.csv",
        "mine/__pycache__/task.pyc",
        ".mypy_cache/x",
    ]
    files += ["ignored/by_git", "weights.pt", ".env", "left/out.txt"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / ".gitignore").write_text("/ignored/\n")
    return tmp_path


def test_what_no_job_needs_stays_at_home_as_ray_sees_it(project: Path) -> None:
    paths = {
        "data__path": "datasets/here/train",
        "data__eval_path": str(project / "absolute"),
        "run__storage_path": str(project / "runs"),
    }
    config = load_config(DIGITS, **paths)
    package = list_job_files(config, SubmitSection(working_dir=str(project), exclude="left"))
    kept = {
        "mine/task.py",
        "runs.py",
        "conf/a.yaml",
        "my data/task.py",
        "datasets/here/train/part.parquet",
        ".gitignore",
    }
    assert set(package.files) == kept
    assert package.by_folder()[0] == ("conf/", 1000)
    archive = project.parent / f"{project.name}.zip"
    excludes = [*get_runtime_env_default_excludes(), *package.excludes]
    create_package(str(project), archive, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(archive) as made:
        packed_by_ray = {one.filename: one.file_size for one in made.infolist() if not one.is_dir()}
    assert packed_by_ray == package.files
    assert check_uploaded_data(package, config) == []


def test_a_package_that_is_too_big_names_what_is_big(project: Path) -> None:
    (project / "pictures").mkdir()
    (project / "pictures" / "one.png").write_bytes(bytes(3 << 20))
    config, section = load_config(DIGITS), SubmitSection(working_dir=str(project), max_package_mb=2)
    package = list_job_files(config, section)
    with pytest.raises(ConfigError, match=r"(?s)3\.0 MB.*more than the 2 MB.*submit\.exclude.*3\.00 MB  pictures/\n"):
        check_size(package, section)
    assert "3.00 MB  pictures/" in check_size(package, SubmitSection())
    assert [(one.level, one.topic) for one in check_uploaded_data(package, config)] == [
        ("refused", "training data"),
        ("refused", "evaluation data"),
    ]


def test_values_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a folder"):
        SubmitSection(working_dir=str(tmp_path / "missing")).check()
    with pytest.raises(ConfigError, match=r"submit\.retries is -1; it must be at least 0"):
        SubmitSection(retries=-1).check()


def test_the_application_goes_along_whole_whatever_stays_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Path] = []

    def upload(
        path: str, include_gitignore: bool, include_parent_dir: bool, excludes: list[str], is_file: bool
    ) -> None:
        assert (include_parent_dir, is_file) == (True, False)
        sent.append(tmp_path / "sent.zip")
        create_package(path, sent[0], include_gitignore=include_gitignore, include_parent_dir=True, excludes=excludes)

    client = server._Client.__new__(server._Client)
    monkeypatch.setattr(client, "_upload_package_if_needed", upload)
    runtime_env = SubmitSection().runtime_env() | {"excludes": ["/runs", "data"]}
    client._upload_py_modules_if_needed(runtime_env)
    with zipfile.ZipFile(sent[0]) as made:
        names = set(made.namelist())
    package = ROOT / "ray_app"
    assert names >= {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not any("__pycache__" in name for name in names)
    assert runtime_env["excludes"] == ["/runs", "data"]
    assert runtime_env["py_modules"][0].startswith("gcs://_ray_pkg_")
    assert [SubmitSection(ray_app=way).runtime_env() for way in ("installed", "ray_app==0.1.0")] == [
        {},
        {"pip": ["ray_app==0.1.0"]},
    ]


def test_versions_must_agree_where_it_matters() -> None:
    here = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0"}
    assert [one.level for one in compare_versions(here, here)] == ["ok"]
    assert [one.level for one in compare_versions(here, here | {"python": "3.11.9"})] == ["ok"]
    other = compare_versions(here, {"python": "3.12.1", "ray": "2.59.0", "torch": "2.14.0"})
    assert [one.level for one in other] == ["refused", "refused", "warning"]
    assert [
        word in one.text for one, word in zip(other, ("3.11", "2.59.0", "torch 2.15.0 (cluster: 2.14.0)"), strict=True)
    ] == [True] * 3


def test_a_cache_must_fit_into_each_object_store() -> None:
    nodes = [
        {"NodeManagerAddress": name, "Alive": True, "Resources": {"object_store_memory": size}}
        for name, size in (("a", 3e9), ("b", 1e9))
    ]
    assert "1,000.0 MB" in check_object_stores(10**8, nodes)
    with pytest.raises(ConfigError, match=r"needs 2,000\.0 MB .* b has 1,000\.0 MB\. Set data\.cache to disk"):
        check_object_stores(2 * 10**9, nodes)


def test_a_storage_inside_the_job_is_refused(tmp_path: Path) -> None:
    config = load_config(DIGITS)
    [found] = check_absolute_storage(config)
    assert (found.level, found.topic) == ("refused", "storage")
    assert "Give an absolute folder that all nodes share" in found.text
    assert check_absolute_storage(config.replace(run__storage_path=str(tmp_path))) == []
    assert check_absolute_storage(config.replace(run__storage_path="s3://bucket/prefix")) == []
    with pytest.raises(ConfigError, match="Ray removes that copy"):
        check_shared_storage("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1/runs", [])


class Cluster:
    """A job server's client, each of whose answers is an error until there is none left; it notes the ids that it is
    sent.
    """

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.sent = list(errors), list[str]()

    def get_address(self) -> str:
        return "http://head"

    def list_jobs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(submission_id="run-1")]

    def submit_job(self, submission_id: str, **_: object) -> str:
        self.sent.append(submission_id)
        if self.errors:
            raise self.errors.pop(0)
        return submission_id


def answered(status: int, text: str) -> RuntimeError:
    """What Ray's client raises."""
    return RuntimeError(f"Request failed with status code {status}: {text}.")


@pytest.fixture
def submitting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr(server, "_LOOK_S", 0.0)

    def submit(cluster: Cluster, lost_contact_s: float = 60.0) -> str:
        monkeypatch.setattr(server, "_Client", lambda: cluster)
        return JobServer(None, lost_contact_s).submit("run", "python", {}, {})

    return submit


BUSY, EXISTS = (
    answered(500, "No available agent to submit job, please try again later"),
    answered(500, "Job run-2 already exists"),
)


@pytest.mark.parametrize(
    "errors", [[BUSY, answered(502, "<html>\nbad gateway")], [BUSY, EXISTS], [ConnectionError("reset"), EXISTS]]
)
def test_a_cluster_that_cannot_take_a_job_now_is_asked_again(
    submitting: Callable[..., str], errors: list[Exception]
) -> None:
    cluster = Cluster(*errors)
    assert submitting(cluster) == "run-2"
    assert set(cluster.sent) == {"run-2"}
    assert cluster.errors == []
    with pytest.raises(LostContactError, match="No available agent"):
        submitting(Cluster(BUSY, BUSY), -1.0)


@pytest.mark.parametrize(
    "error", [answered(400, "no"), answered(500, "RuntimeError:\nRequest failed with status code 400: no"), EXISTS]
)
def test_a_job_that_the_cluster_refuses_is_not_sent_again(submitting: Callable[..., str], error: Exception) -> None:
    cluster = Cluster(error)
    with pytest.raises(ConfigError, match="the cluster does not take the job"):
        submitting(cluster)
    assert cluster.sent == ["run-2"]


def test_a_server_that_takes_the_connection_and_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        monkeypatch.setattr(server, "_ANSWER_S", 0.05)
        monkeypatch.setattr(server, "_UPLOAD_S", 0.05)
        with pytest.raises(ConfigError, match=f"no job server answers at {address}.*timed out"):
            JobServer(address, 60.0)
        monkeypatch.setattr(server._Client, "_check_connection_and_version", lambda *_, **__: None)
        for method in ("GET", "POST", "PUT"):
            with pytest.raises(requests.exceptions.ReadTimeout):
                server._Client()._do_request(method, "/api/jobs/", data=b"x")


def test_ctrl_c_ends_the_following_also_at_the_moment_when_output_comes() -> None:
    class Client:
        async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
            asyncio.get_running_loop().call_soon(
                signal.raise_signal, signal.SIGINT
            )  # after this step, before who waits for the output
            yield f"output of {job_id}"
            await asyncio.sleep(60)

    shown: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _Tail(shown.append).read(Client(), "job")  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(shown) <= 1
