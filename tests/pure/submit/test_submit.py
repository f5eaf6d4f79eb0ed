"""Submitting a run to a cluster: its configuration, its package, and its repetition after an end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from ray_app import load_config
from ray_app.cluster.resources import check_object_stores
from ray_app.driver.parsing import parse, parse_with_sections
from ray_app.errors import ConfigError
from ray_app.submit import server
from ray_app.submit.options import (
    SUBMISSION_BACKOFF,
    EndedJob,
    SubmitSection,
    check_no_secrets,
    judge,
    non_default_fields,
)
from ray_app.submit.preflight import (
    check_absolute_storage,
    check_secret_files,
    check_size,
    check_uploaded_data,
    list_job_files,
)
from ray_app.submit.server import JobServer, LostContactError, OutputTail
from ray_app.tune.options import TuneSection
from tests.support.paths import ROOT

DIGITS = ROOT / "conf" / "digits.yaml"


@pytest.mark.parametrize(
    ("ended", "again", "exit_code", "reason"),
    [
        (EndedJob("SUCCEEDED", 0), False, 0, "done"),
        (EndedJob("FAILED", 75), True, 75, "the run was interrupted"),
        (EndedJob("STOPPED"), False, 75, "the job was stopped by a user"),
        (EndedJob("STOPPED", 75), False, 75, "the job was stopped by a user"),
        (EndedJob("FAILED", -9), True, 1, "the driver was lost (killed by signal 9)"),
        (EndedJob("FAILED", 137), True, 1, "the driver was lost (killed by signal 9)"),
        (EndedJob("FAILED", -15), True, 1, "the driver was lost (killed by signal 15)"),
        (
            EndedJob("FAILED", None, "Job supervisor actor died: the node\nis gone"),
            True,
            1,
            "(Job supervisor actor died: the node)",
        ),
        (EndedJob("UNKNOWN"), True, 1, "the cluster no longer knows the job"),
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
def test_the_end_of_a_job_decides_whether_the_run_is_resubmitted(
    ended: EndedJob, again: bool, exit_code: int, reason: str
) -> None:
    verdict = judge(ended, done=1, retries=1)
    assert (verdict.again, verdict.exit_code) == (again, exit_code)
    assert reason in verdict.reason
    last_verdict = judge(ended, done=2, retries=1)
    assert (last_verdict.again, last_verdict.exit_code) == (False, exit_code)
    assert ("all 2 tries are used" in last_verdict.reason) == again


def test_the_pause_between_submissions_doubles_up_to_a_limit() -> None:
    assert [SUBMISSION_BACKOFF.pause_s(done) for done in (1, 2, 3, 4)] == [5, 10, 20, 40]
    assert SUBMISSION_BACKOFF.pause_s(60) == 300


RUNS = sorted(path for path in (ROOT / "conf").glob("*.yaml") if not path.stem.startswith("retrain"))


@pytest.mark.rest
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_submitted_configuration_is_complete(path: Path) -> None:
    config = load_config(path, run__name="it", train__epochs=7)
    text = json.dumps(non_default_fields(config))
    assert parse(["--config", text], exit_on_error=False) == config
    assert "step_timeout_s" not in text


def test_a_submitted_study_is_complete() -> None:
    config, tune = load_config(DIGITS), TuneSection(space={"train.grad_clip_norm": {"choice": [None, 1.0]}}, slots=3)
    *command, text = shlex.split(SubmitSection().command(["-m", "ray_app", "tune"], config, {"tune": asdict(tune)}))
    assert command == ["exec", "python", "-m", "ray_app", "tune", "--config"]
    assert parse_with_sections(["--config", text], {"tune": TuneSection}, "tune", False) == (config, {"tune": tune})


def test_no_secret_is_part_of_a_submitted_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_secrets(load_config(DIGITS))
    with pytest.raises(ConfigError, match=r"tracking\.uri.*submit\.env") as refused:
        check_no_secrets(load_config(DIGITS, tracking__uri="https://me:hunter22secret@host"))
    assert "hunter22secret" not in str(refused.value)
    monkeypatch.setenv("SOME_TOKEN", "value-of-the-token")
    section = SubmitSection(env="SOME_TOKEN")
    assert section.environment({"SOME_TOKEN": "value", "OTHER": "x"}) == {
        "SOME_TOKEN": "value",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "PYTHONHASHSEED": "0",
    }
    assert "value" not in section.command(["-m", "ray_app", "train"], load_config(DIGITS))
    with pytest.raises(ConfigError, match=r"submit\.env names MISSING, which is not set here"):
        SubmitSection(env="SOME_TOKEN, MISSING").environment({"SOME_TOKEN": "value"})
    other = {"RAY_JOB_STOP_WAIT_TIME_S": "600", "PYTHONHASHSEED": "7"}
    assert SubmitSection(env="RAY_JOB_STOP_WAIT_TIME_S,PYTHONHASHSEED").environment(other) == other


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Returns a project with files of all kinds that a job does not need."""
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
    (tmp_path / ".rayignore").write_text("left\n")
    return tmp_path


def test_the_package_leaves_out_the_same_files_as_ray(project: Path) -> None:
    paths = {
        "data__path": "datasets/here/train",
        "data__eval_path": str(project / "absolute"),
        "run__storage_path": str(project / "runs"),
    }
    config = load_config(DIGITS, **paths)
    package = list_job_files(config, SubmitSection(working_dir=str(project)))
    expected = {
        "mine/task.py",
        "runs.py",
        "conf/a.yaml",
        "my data/task.py",
        "datasets/here/train/part.parquet",
        ".gitignore",
        ".rayignore",
    }
    assert set(package.files) == expected
    assert package.by_folder()[0] == ("conf/", 1000)
    archive = project.parent / f"{project.name}.zip"
    excludes = [*get_runtime_env_default_excludes(), *package.excludes]
    create_package(str(project), archive, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(archive) as zip_file:
        packed_by_ray = {member.filename: member.file_size for member in zip_file.infolist() if not member.is_dir()}
    assert packed_by_ray == package.files
    assert check_uploaded_data(package, config) == []
    sources = [{"path": config.data.path, "weight": 1}, {"path": "elsewhere", "weight": 1}]
    [finding] = check_uploaded_data(package, config.replace(data__path=sources))
    assert (finding.level, finding.text[:40]) == ("refused", "data.path is 'elsewhere', a relative path"[:40])


_SECRET_NAMES = [
    *(".ssh/id_ed25519", ".ssh/config", "id_rsa", "keys/id_ecdsa", ".aws/credentials", ".ray/auth_token"),
    *(".kube/config", "kubeconfig", "prod.kubeconfig", ".config/gcloud/application_default_credentials.json"),
    *("service-account.json", "credentials.json", "my-credentials.yaml", ".npmrc", ".git-credentials", ".pypirc"),
    *(".docker/config.json", ".huggingface/token", ".cache/huggingface/token", ".kaggle/kaggle.json", ".pgpass"),
    *(".databrickscfg", ".env", ".env.prod", ".envrc", "prod.env", "secrets.yaml", "conf/secrets.toml"),
    *(".streamlit/secrets.toml", "server.key", "a/b.KEY", "cert.pem", "store.p12", "store.pfx", "a.jks"),
    *("terraform.tfvars", "terraform.tfstate", ".bash_history", ".python_history", ".netrc", ".s3cfg", ".boto"),
    *(".azure/x", ".vault-token", ".htpasswd", "datasets/here/.env", "datasets/here/x.pem"),
    *("datasets/here/.aws/credentials", "client_secret_1.json", ".gnupg/x", ".snowsql/config", "rclone.conf"),
    ".my.cnf",
]


@pytest.mark.parametrize("name", _SECRET_NAMES)
def test_files_of_secrets_are_not_uploaded(tmp_path: Path, name: str) -> None:
    for file in (name, "datasets/here/a.csv", "credentials/mine.py", "secrets.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x")
    config = load_config(DIGITS, data__path="datasets/here")
    package = list_job_files(config, SubmitSection(working_dir=str(tmp_path)))
    assert name not in package.files
    assert len(package.files) == 3


def test_other_files_that_look_like_secrets_are_named(tmp_path: Path) -> None:
    key = "-----BEGIN PRIVATE KEY-----\n"
    files = {
        "my_token.txt": "x",
        "secrets/db": "x",
        "credentials": "x",
        "a.crt": key,
        "gcp.json": f'{{"k": "{key}"}}',
        "big.bin": key * 999,
    }
    files |= {
        "tokenizer.json": "x",
        "max_tokens.csv": "x",
        "token_store.py": "x",
        "left/api_key.txt": "x",
        ".rayignore": "left",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    [finding] = check_secret_files(list_job_files(load_config(DIGITS), SubmitSection(working_dir=str(tmp_path))))
    assert finding.level == "warning"
    assert "key: a.crt, credentials, gcp.json, my_token.txt, secrets/db. All users" in finding.text


@pytest.mark.parametrize("folder", ["/", "~", "~/..", "link"])
def test_a_home_folder_is_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "home" / "me" / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    (tmp_path / "link").symlink_to(tmp_path / "home" / "me")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is or contains your home folder.*Name the folder of the project"):
        SubmitSection(working_dir=os.path.expanduser(folder)).check()
    SubmitSection(working_dir="home/me/project").check()


def test_the_refusal_of_a_large_package_names_its_largest_folders(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "pictures").mkdir()
    (project / "pictures" / "one.png").write_bytes(bytes(3 << 20))
    config = load_config(DIGITS)
    package = list_job_files(config, SubmitSection(working_dir=str(project)))
    assert "3.00 MB  pictures/" in check_size(package)
    monkeypatch.setattr("ray_app.submit.preflight._MAX_PACKAGE_MB", 2)
    with pytest.raises(ConfigError, match=r"(?s)3\.0 MB.*more than the 2 MB.*\.rayignore.*3\.00 MB  pictures/\n"):
        check_size(package)
    assert [(one.level, one.topic) for one in check_uploaded_data(package, config)] == [
        ("refused", "training data"),
        ("refused", "evaluation data"),
    ]


def test_invalid_submit_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a folder"):
        SubmitSection(working_dir=str(tmp_path / "missing")).check()


def test_the_package_of_ray_app_is_complete_despite_excludes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with zipfile.ZipFile(sent[0]) as zip_file:
        names = set(zip_file.namelist())
    package = ROOT / "ray_app"
    assert names >= {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert not any("__pycache__" in name for name in names)
    assert runtime_env["excludes"] == ["/runs", "data"]
    assert runtime_env["py_modules"][0].startswith("gcs://_ray_pkg_")
    assert [SubmitSection(ray_app=option).runtime_env() for option in ("installed", "a==1 -i https://x")] == [
        {},
        {"pip": {"packages": ["a==1"], "pip_install_options": ["-i", "https://x"]}},
    ]


@pytest.mark.parametrize("value", ["ray_app==0.3.0", "ray_app", "", "ray_app==0.3.0 --extra-index-url https://x"])
def test_the_application_is_not_taken_from_the_public_index(value: str) -> None:
    with pytest.raises(ConfigError, match=r"submit\.ray_app is .*public index.*--index-url"):
        SubmitSection(ray_app=value).check()
    for allowed in ("send", "installed", "/my w/ray_app.whl", "ray_app==1 --index-url=https://x", "a --no-index -f /w"):
        SubmitSection(ray_app=allowed).check()


def test_a_cache_must_fit_into_each_object_store() -> None:
    nodes = [
        {"NodeManagerAddress": name, "Alive": True, "Resources": {"object_store_memory": size}}
        for name, size in (("a", 3e9), ("b", 1e9))
    ]
    check_object_stores(10**8, nodes)
    with pytest.raises(ConfigError, match=r"needs 2,000\.0 MB .* b has 1,000\.0 MB\. Set data\.cache to disk"):
        check_object_stores(2 * 10**9, nodes)


def test_a_storage_path_inside_the_job_is_refused(tmp_path: Path) -> None:
    config = load_config(DIGITS)
    [finding] = check_absolute_storage(config)
    assert (finding.level, finding.topic) == ("refused", "storage")
    assert "Set an absolute folder that all nodes share" in finding.text
    assert check_absolute_storage(config.replace(run__storage_path=str(tmp_path))) == []
    assert check_absolute_storage(config.replace(run__storage_path="s3://bucket/prefix")) == []


class Cluster:
    """The client of a job server that raises the given errors one after the other, and records the submitted ids."""

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


def server_error(status: int, text: str) -> RuntimeError:
    """Returns the error that Ray's client raises for a status and a text."""
    return RuntimeError(f"Request failed with status code {status}: {text}.")


@pytest.fixture
def submit_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setattr(server, "_LOOK_S", 0.0)

    def submit(cluster: Cluster, lost_contact_s: float = 60.0) -> str:
        monkeypatch.setattr(server, "_Client", lambda: cluster)
        monkeypatch.setattr(server, "_LOST_CONTACT_S", lost_contact_s)
        return JobServer(None).submit("run", "python", {}, {})

    return submit


BUSY, EXISTS = (
    server_error(500, "No available agent to submit job, please try again later"),
    server_error(500, "Job run-2 already exists"),
)


@pytest.mark.parametrize(
    "errors", [[BUSY, server_error(502, "<html>\nbad gateway")], [BUSY, EXISTS], [ConnectionError("reset"), EXISTS]]
)
def test_a_job_is_sent_again_while_the_cluster_cannot_take_it(
    submit_to: Callable[..., str], errors: list[Exception]
) -> None:
    cluster = Cluster(*errors)
    assert submit_to(cluster) == "run-2"
    assert set(cluster.sent) == {"run-2"}
    assert cluster.errors == []
    with pytest.raises(LostContactError):
        submit_to(Cluster(BUSY, BUSY), -1.0)


@pytest.mark.parametrize(
    "error",
    [server_error(400, "no"), server_error(500, "RuntimeError:\nRequest failed with status code 400: no"), EXISTS],
)
def test_a_job_that_the_cluster_refuses_is_not_sent_again(submit_to: Callable[..., str], error: Exception) -> None:
    cluster = Cluster(error)
    with pytest.raises(ConfigError, match="the cluster refuses the job"):
        submit_to(cluster)
    assert cluster.sent == ["run-2"]


def test_a_job_server_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        monkeypatch.setattr(server, "_ANSWER_S", 0.05)
        monkeypatch.setattr(server, "_UPLOAD_S", 0.05)
        with pytest.raises(ConfigError, match=f"no job server answers at {address}.*timed out"):
            JobServer(address)
        monkeypatch.setattr(server._Client, "_check_connection_and_version", lambda *_, **__: None)
        for method in ("GET", "POST", "PUT"):
            with pytest.raises(requests.exceptions.ReadTimeout):
                server._Client()._do_request(method, "/api/jobs/", data=b"x")


def test_ctrl_c_ends_the_log_tail_while_output_arrives() -> None:
    class Client:
        async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
            # The signal arrives after this step, before the reader gets the output.
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            yield f"output of {job_id}"
            await asyncio.sleep(60)

    output: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            OutputTail(output.append).read(Client(), "job")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(output) <= 1
