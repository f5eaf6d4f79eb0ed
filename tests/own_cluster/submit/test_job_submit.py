"""Ray jobs on a real head node with token authentication, submitted by `ray job submit`, over REST and by
`ray-app submit`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ray_app.config.config import default_tracking_uri, from_yaml
from ray_app.report.facts import read_facts
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.tune.record import StudyPaths, read_record
from ray_app.watch.live_views import list_values
from tests.support.head import RAY, Head, start_head
from tests.support.paths import ROOT, SUPPORT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

_JOB_S = 600
_EPOCHS, _STEPS = 40, 40 * 23


@dataclass(frozen=True)
class JobCluster:
    """A head node, the project of a user, and the folder with its runs."""

    head: Head
    project: Path
    folder: Path

    def paths(self, name: str) -> RunPaths:
        return RunPaths(self.folder / "runs" / name)

    def summary(self, name: str) -> dict[str, Any]:
        return json.loads(self.paths(name).summary.read_text())

    def options(self, name: str) -> list[str]:
        delay_folder = self.folder / name
        delay_folder.mkdir(exist_ok=True)
        return ["--config", "conf/slow.yaml", f"--run.name={name}", f"--task.init_args.folder={delay_folder}"]

    def go_on(self, name: str) -> None:
        (self.folder / name / "fast").touch()

    def submit(self, name: str, *more: str) -> subprocess.Popen[str]:
        """Starts `ray-app submit` in the user's project."""
        command = [
            sys.executable,
            "-m",
            "ray_app",
            "submit",
            *self.options(name),
            f"--submit.address={self.head.url}",
            *more,
        ]
        both = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.project, env=self.head.environment, stdout=both, stderr=subprocess.STDOUT, text=True
        )

    def wait_for_checkpoint(self, name: str, lives: Callable[[], bool]) -> None:
        def happened() -> bool:
            assert lives()
            return bool(read_events(self.paths(name), "checkpointed"))

        wait_until(happened, limit_s=_JOB_S)

    def is_over(self, job_id: str) -> bool:
        return self.head.job(job_id)["status"] not in ("PENDING", "RUNNING")

    def mlflow(self, name: str) -> Any:
        from mlflow.tracking import MlflowClient

        config = from_yaml(self.paths(name).config.read_text())
        run_id = json.loads(self.paths(name).tracking.read_text())["run_id"]
        return MlflowClient(default_tracking_uri(config)).get_run(run_id)

    def mlflow_status(self, name: str) -> str:
        return self.mlflow(name).info.status


@pytest.fixture(scope="module")
def cluster(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobCluster]:
    folder = tmp_path_factory.mktemp("jobs")
    project = folder / "project"
    (project / "conf").mkdir(parents=True)
    shutil.copy(SUPPORT / "slow_task.py", project)
    config: dict[str, Any] = yaml.safe_load((ROOT / "conf" / "digits.yaml").read_text())
    config["task"] = {"class_path": "slow_task.SlowTask", "init_args": {"folder": "nowhere"}}
    config["data"] |= {"path": str(digits / "train"), "eval_path": str(digits / "eval")}
    config |= {"run": {"storage_path": str(folder / "runs")}, "scaling": {"max_workers": 1, "logical_workers": 2}}
    config |= {"train": {"epochs": _EPOCHS}, "checkpoint": {"every_epochs": 4}, "submit": {"retries": 3}}
    (project / "conf" / "slow.yaml").write_text(yaml.safe_dump(config))
    plain = {name: value for name, value in config.items() if name != "submit"}
    (project / "conf" / "plain.yaml").write_text(yaml.safe_dump(plain))
    # The nodes have the application, and so has the user.
    with pytest.MonkeyPatch.context() as image:
        image.setenv("PYTHONPATH", str(ROOT))
        with start_head(folder, cpus=12) as head:
            yield JobCluster(head, project, folder)


@pytest.fixture(scope="module")
def flows(cluster: JobCluster) -> Iterator[dict[str, Future[Any]]]:
    """Results of the scenarios, which run concurrently since they mostly wait for processes to start."""
    functions: dict[str, Callable[[JobCluster], Any]] = {
        "stopped": stop_and_resubmit,
        "killed": kill_driver,
        "rest": submit_over_rest,
        "tail": follow_through_proxy,
        "dry": dry_run,
    }
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(flow, cluster) for name, flow in functions.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def undisturbed(cluster: JobCluster, flows: dict[str, Future[Any]]) -> tuple[dict[str, Any], str]:
    """The summary and the output of a run that plain `ray job submit` started."""
    # The other scenarios run meanwhile.
    del flows
    cluster.options("plain")
    cluster.go_on("plain")
    options = ["--config", "conf/plain.yaml", *cluster.options("plain")[2:]]
    command = [str(RAY), "job", "submit", "--address", cluster.head.url, "--working-dir", str(cluster.project)]
    command += ["--submission-id", "plain", "--", "python", "-m", "ray_app", "train", *options]
    done = subprocess.run(
        command, env=cluster.head.environment, capture_output=True, text=True, timeout=_JOB_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return cluster.summary("plain"), done.stdout


def test_a_job_submitted_without_ray_app_submit_trains(
    cluster: JobCluster, undisturbed: tuple[dict[str, Any], str]
) -> None:
    summary, output = undisturbed
    assert "Task was destroyed" not in output
    job = cluster.head.job("plain")
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert f"Starting run plain in {cluster.paths('plain').root}\n" in output
    progress = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert progress
    assert all("1 of 1 workers" in line and "\x1b" not in line and "\r" not in line for line in progress)
    assert (summary["status"], summary["steps"], summary["world_sizes"]) == ("finished", _STEPS, [[0, 1]])
    assert summary["mlflow_run_id"]
    assert summary["params_digest"] in output
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        cluster.head.ask("/api/jobs/", token="another token")


def test_a_run_and_its_job_name_each_other(cluster: JobCluster, undisturbed: tuple[dict[str, Any], str]) -> None:
    summary, output = undisturbed
    ray_job = summary["ray_job"]
    page = f"{cluster.head.url}/#/jobs/{ray_job['job_id']}"
    assert ray_job == {
        "job_id": ray_job["job_id"],
        "submission_id": "plain",
        "dashboard": cluster.head.url,
        "page": page,
    }
    assert cluster.head.job(ray_job["job_id"])["submission_id"] == "plain", (
        "the page requests this job of the dashboard"
    )
    [started] = read_events(cluster.paths("plain"), "started")
    assert started.details["ray_job"] == ray_job
    lines = output.splitlines()
    [run, *before] = [number for number, line in enumerate(lines) if line.startswith("Starting run plain")]
    assert not before
    assert lines[run + 1] == f"Ray job {ray_job['job_id']} (plain): {page}"
    [mlflow] = [line for line in lines if line.startswith("MLflow run ")]
    assert mlflow.startswith(f"MLflow run {summary['mlflow_run_id']} of the experiment ray_app: sqlite:///")
    assert cluster.mlflow("plain").data.tags["ray_app.ray_job"] == page
    assert f'<a href="{page}">' in cluster.paths("plain").report.read_text()
    assert ("Ray job", page) in list_values(read_facts(cluster.paths("plain")))


def stop_and_resubmit(cluster: JobCluster) -> dict[str, Any]:
    """Stops a run by `ray job stop` after its first checkpoint and submits it again."""
    with cluster.submit("stopped") as submitted:
        cluster.wait_for_checkpoint("stopped", lambda: submitted.poll() is None)
        command = [str(RAY), "job", "stop", "--address", cluster.head.url, "stopped-1"]
        subprocess.run(command, env=cluster.head.environment, check=True, timeout=_JOB_S, capture_output=True)
        output = submitted.communicate(timeout=_JOB_S)[0]
    outcome = {"output": output, "code": submitted.returncode, "summary": cluster.summary("stopped")}
    outcome["job"], outcome["mlflow"] = cluster.head.job("stopped-1"), cluster.mlflow_status("stopped")
    outcome["ended"] = [event.kind for event in read_events(cluster.paths("stopped"), "interrupted", "driver_lost")]
    wait_until(lambda: not cluster.head.live_resources_of("stopped-1"))
    cluster.go_on("stopped")
    with cluster.submit("stopped") as again:
        assert again.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("  stop: "):
            lines.append(again.stdout.readline())
            assert lines[-1], lines
        again.send_signal(signal.SIGINT)
        outcome["output again"] = "".join(lines) + again.communicate(timeout=_JOB_S)[0]
    wait_until(lambda: cluster.is_over("stopped-2"), limit_s=_JOB_S)
    return outcome | {"code again": again.returncode, "job again": cluster.head.job("stopped-2")}


def test_a_stopped_job_is_closed_and_continues_when_submitted_again(
    cluster: JobCluster, flows: dict[str, Future[Any]], undisturbed: Any
) -> None:
    outcome = flows["stopped"].result(_JOB_S)
    assert (outcome["code"], outcome["job"]["status"]) == (75, "STOPPED"), outcome["output"]
    assert "Stopping after this step, with a checkpoint ..." in outcome["output"]
    assert "the job was stopped by a user; submitting the same run.name again continues it" in outcome["output"]
    summary = outcome["summary"]
    assert (summary["status"], outcome["ended"], outcome["mlflow"]) == ("interrupted", ["interrupted"], "KILLED")
    steps = [
        event.details["step"] for event in read_events(cluster.paths("stopped"), "checkpointed") if event.fence == 1
    ]
    assert 0 < steps[-1] == summary["steps"] < _STEPS
    assert any("epoch " in line and "1 of 1 workers" in line for line in outcome["output"].splitlines())

    assert (outcome["code again"], outcome["job again"]["driver_exit_code"]) == (130, 0), outcome["output again"]
    assert outcome["job again"]["metadata"]["ray_app_directory"] == str(cluster.paths("stopped").root)
    assert "as job stopped-2 (try 1 of 4)" in outcome["output again"]
    assert "The job stopped-2 continues." in outcome["output again"]
    final = cluster.summary("stopped")
    assert (final["status"], final["params_digest"]) == ("finished", undisturbed[0]["params_digest"])
    assert (final["redone_steps"], final["restarts"]["driver"]) == (0, 1)
    assert cluster.mlflow_status("stopped") == "FINISHED"


def kill_driver(cluster: JobCluster) -> dict[str, Any]:
    """Kills the driver of a run after its first checkpoint."""
    with cluster.submit("killed") as submitted:
        cluster.wait_for_checkpoint("killed", lambda: submitted.poll() is None)
        driver = psutil.Process(int(cluster.head.job("killed-1")["driver_info"]["pid"]))
        assert driver.cmdline()[1:4] == ["-m", "ray_app", "train"]
        cluster.go_on("killed")
        driver.send_signal(signal.SIGKILL)
        output = submitted.communicate(timeout=_JOB_S)[0]
    return {"output": output, "code": submitted.returncode}


def test_a_job_with_a_killed_driver_is_submitted_again(
    cluster: JobCluster, flows: dict[str, Future[Any]], undisturbed: Any
) -> None:
    outcome = flows["killed"].result(_JOB_S)
    output = outcome["output"]
    assert outcome["code"] == 0, output
    assert re.search(r"^try 2 of 4 in \d+(\.\d+)? s: the driver was lost \(killed by signal 9\)$", output, re.MULTILINE)
    assert [cluster.head.job(name)["status"] for name in ("killed-1", "killed-2")] == ["FAILED", "SUCCEEDED"]
    assert (output.count("Starting run killed in"), output.count("Continuing run killed in")) == (1, 1)
    summary = cluster.summary("killed")
    assert (summary["status"], summary["params_digest"]) == ("finished", undisturbed[0]["params_digest"])
    assert summary["restarts"]["driver"] == 1
    assert cluster.mlflow_status("killed") == "FINISHED"


def submit_over_rest(cluster: JobCluster) -> dict[str, Any]:
    """Submits a run, stops it with Ray's grace period of 3 seconds, and submits it again, all over HTTP."""
    archive = cluster.folder / "project.zip"
    with zipfile.ZipFile(archive, "w") as package:
        for file in cluster.project.rglob("*"):
            package.write(file, file.relative_to(cluster.project))
    cluster.head.put("/api/packages/gcs/_ray_pkg_rest.zip", archive.read_bytes())
    options = ["--config", "conf/plain.yaml", *cluster.options("rest")[2:]]
    body: dict[str, Any] = {"entrypoint": " ".join(["python", "-m", "ray_app", "train", *options])}
    body["runtime_env"] = {"working_dir": "gcs://_ray_pkg_rest.zip"}
    cluster.head.ask("/api/jobs/", body=body | {"submission_id": "rest-1"})
    cluster.wait_for_checkpoint("rest", lambda: not cluster.is_over("rest-1"))
    # The evaluator closes the run when the driver is lost, so it must have started.
    wait_until(lambda: read_evaluations(cluster.paths("rest")), limit_s=_JOB_S)
    assert cluster.head.ask("/api/jobs/rest-1/stop", body={})["stopped"]
    wait_until(lambda: cluster.head.job("rest-1")["status"] == "STOPPED", limit_s=_JOB_S)
    wait_until(lambda: cluster.mlflow_status("rest") == "KILLED", limit_s=_JOB_S)
    wait_until(
        lambda: cluster.paths("rest").summary.exists() and cluster.summary("rest")["mlflow_run_id"], limit_s=_JOB_S
    )
    outcome = {"summary": cluster.summary("rest")}
    cluster.go_on("rest")
    cluster.head.ask("/api/jobs/", body=body | {"submission_id": "rest-2"})
    wait_until(lambda: cluster.is_over("rest-2"), limit_s=_JOB_S)
    return outcome | {"log": cluster.head.ask("/api/jobs/rest-2/logs")["logs"]}


def test_a_job_stopped_over_rest_continues_when_submitted_again(
    cluster: JobCluster, flows: dict[str, Future[Any]], undisturbed: Any
) -> None:
    outcome = flows["rest"].result(_JOB_S)
    assert outcome["summary"]["status"] == "interrupted"
    assert 0 < outcome["summary"]["steps"] < _STEPS
    job = cluster.head.job("rest-2")
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0), outcome["log"]
    summary = cluster.summary("rest")
    assert (summary["status"], summary["params_digest"]) == ("finished", undisturbed[0]["params_digest"])


FOLLOWER = """
import json, sys
from ray_app.submit import server as job_server
from ray_app.submit.server import JobServer, LostContactError
server = JobServer(sys.argv[1])
job = server.submit("odd", "for i in 1 2 3 4 5 6; do echo line $i; sleep 1; done; exit 3", {}, {})
def show(piece): print(piece, end="", flush=True)
ended = server.follow(job, show, lambda text: print("TOLD", text, flush=True))
print(json.dumps([job, ended.status, ended.exit_code]))
print(server.follow("nobody-1", show, print).status)
job_server._LOST_CONTACT_S = 1
server.submit("left", "sleep 600", {}, {})
print("LEFT", flush=True)
try:
    server.follow("left-1", show, print)
except LostContactError as error:
    print(error)
"""


def follow_through_proxy(cluster: JobCluster) -> str:
    """Follows a job through a connection that breaks; returns the printed lines."""
    with cluster.head.open_proxy() as proxy:
        command = [sys.executable, "-c", FOLLOWER, proxy.url]
        with subprocess.Popen(command, env=cluster.head.environment, stdout=subprocess.PIPE, text=True) as following:
            lines: list[str] = []
            assert following.stdout is not None
            for line in following.stdout:
                lines.append(line)
                if line == "line 2\n":
                    proxy.cut()
                if line == "LEFT\n":
                    proxy.close()
    return "".join(lines)


def test_following_survives_a_broken_connection_and_reports_the_exit_code(flows: dict[str, Future[Any]]) -> None:
    lines = flows["tail"].result(_JOB_S).splitlines()
    assert [line for line in lines if line.startswith("line ")] == [f"line {i}" for i in range(1, 7)]
    assert any(line.startswith("TOLD The connection to") for line in lines)
    end = lines.index('["odd-1", "FAILED", 3]')
    assert "UNKNOWN" in lines[end:]
    assert "has not answered for 1 s" in lines[-1]


def test_a_study_is_a_job(cluster: JobCluster) -> None:
    tune = {"space": {"train.grad_clip_norm": {"choice": [1.0, 2.0]}}, "sampler": "grid", "slots": 2}
    fields = {"tune": tune, "train": {"epochs": 1}, "checkpoint": {"every_epochs": 1}}
    task_options = [option for option in cluster.options("study") if option.startswith("--task")]
    cluster.go_on("study")
    command = ["tune", "--config", "conf/slow.yaml", "--config", json.dumps(fields), *task_options]
    done = subprocess.run(
        [sys.executable, "-m", "ray_app", "submit", *command, f"--submit.address={cluster.head.url}"],
        cwd=cluster.project,
        env=cluster.head.environment,
        capture_output=True,
        text=True,
        timeout=_JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(StudyPaths(cluster.folder / "runs" / "study"))
    assert record is not None
    assert record.end is not None
    assert f"winner     trial {record.end['winner']}: grad_clip_norm" in done.stdout
    assert cluster.head.job("study-1")["metadata"]["ray_app_study"] == "study"


def dry_run(cluster: JobCluster) -> dict[str, Any]:
    """Submits a dry run; returns its output and the jobs that exist after it."""
    with cluster.submit(
        "dry", "--submit.dry_run=true", f"--run.storage_path={cluster.folder / 'new' / 'runs'}"
    ) as submitted:
        output = submitted.communicate(timeout=_JOB_S)[0]
    jobs = [job["submission_id"] for job in cluster.head.ask("/api/jobs/")]
    return {
        "output": output,
        "code": submitted.returncode,
        "jobs": [job for job in jobs if job and job.startswith("dry")],
    }


def test_a_dry_run_shows_the_command_and_submits_nothing(cluster: JobCluster, flows: dict[str, Future[Any]]) -> None:
    outcome = flows["dry"].result(_JOB_S)
    assert (outcome["code"], outcome["jobs"]) == (0, []), outcome["output"]
    assert f"The job of run dry in {cluster.folder / 'new' / 'runs' / 'dry'} would be:" in outcome["output"]
    assert " -m ray_app train --config " in outcome["output"]
    assert not (cluster.folder / "new").exists()


def test_a_run_that_the_driver_refuses_is_not_submitted_again(cluster: JobCluster) -> None:
    stranger = cluster.head.environment | {"RAY_AUTH_TOKEN_PATH": str(cluster.folder / "other-token")}
    (cluster.folder / "other-token").write_text("0" * 64)
    other = JobCluster(Head(cluster.head.url, stranger, "", cluster.head.log), cluster.project, cluster.folder)
    submissions = [
        cluster.submit("refused", "--data.path=/missing/data"),
        cluster.submit("unreachable", "--submit.address=http://127.0.0.1:1"),
        other.submit("stranger"),
    ]
    outputs = [process.communicate(timeout=_JOB_S)[0] for process in submissions]
    assert [process.returncode for process in submissions] == [2, 2, 2], outputs
    refused, unreachable, unknown = outputs
    assert "'/missing/data' does not exist" in refused
    assert "the run was refused" in refused
    assert "no job server answers at http://127.0.0.1:1" in unreachable
    assert "RAY_AUTH_TOKEN" in unknown
    assert "0" * 64 not in unknown
    jobs = [job["submission_id"] for job in cluster.head.ask("/api/jobs/")]
    assert [job for job in jobs if job.startswith(("refused", "stranger", "unreachable"))] == ["refused-1"]
