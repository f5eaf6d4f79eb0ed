"""The examples in deploy/ fit the code: commands, versions, resources, KubeRay's fields, exit codes."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ray_app import __version__, load_config
from ray_app.cli.main import main
from ray_app.cluster.resources import ClusterCapacity, reserved_cpus, workers_that_fit
from ray_app.config.config import Config
from tests.support.paths import ROOT, SUPPORT

DEPLOY = ROOT / "deploy"
MANIFESTS = [DEPLOY / "kuberay" / name for name in ("rayjob.yaml", "raycronjob.yaml")]
SCHEMA = json.loads((SUPPORT / "kuberay" / "schema.json").read_text())
HARDENED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
SCRATCH = {"name": "scratch", "mountPath": "/tmp"}
IN_IMAGE, INSTALLED = "/app/", "/opt/ray_app"

manifests = pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.stem)


def job_of(manifest: Path) -> dict[str, Any]:
    """Returns the specification of a RayJob, or of the RayJobs of a RayCronJob."""
    spec = yaml.safe_load(manifest.read_text())["spec"]
    return spec.get("jobTemplate", spec)


def templates_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the templates of the three kinds of pods."""
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {
        "head": cluster["headGroupSpec"]["template"],
        "worker": workers["template"],
        "submitter": job["submitterPodTemplate"],
    }


def pods_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the specifications of the three kinds of pods."""
    return {name: template["spec"] for name, template in templates_of(job).items()}


def instructions() -> list[tuple[str, str]]:
    """Returns the Containerfile's instructions, each with its arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def dag_constants() -> dict[str, Any]:
    """Returns the constants of the DAG's module."""
    body = ast.parse((DEPLOY / "airflow" / "retrain_dag.py").read_text()).body
    return {node.targets[0].id: ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]


def cron_command() -> str:
    (line,) = (line for line in (DEPLOY / "cron" / "crontab").read_text().splitlines() if re.match(r"[\d*]", line))
    return line.split(maxsplit=5)[5]


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yields every command in deploy/: its file, the job that it starts, and the arguments."""
    texts = {manifest.name: job_of(manifest)["entrypoint"] for manifest in MANIFESTS}
    texts |= {
        "crontab": cron_command(),
        "retrain_dag.py": dag_constants()["COMMAND"],
        "README.md": (DEPLOY / "README.md").read_text(),
    }
    for where, text in texts.items():
        matches = re.findall(r"python -m ray_app (\w+) ([^>;|\n]*)", text)
        assert matches, where
        yield from ((where, script, shlex.split(arguments.replace(IN_IMAGE, ""))) for script, arguments in matches)


def parse_command(
    script: str, arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Config:
    """Returns the configuration that a job reads from its command line, from the output of `--print_config`."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main([script, *arguments, "--print_config"])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    values = yaml.safe_load(printed.out)
    (folder / "printed.yaml").write_text(
        yaml.safe_dump({k: v for k, v in values.items() if k not in ("retrain", "submit")})
    )
    return load_config(folder / "printed.yaml")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("where", "script", "arguments"), list(commands()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_documented_command_parses_into_a_configuration(
    where: str,
    script: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = parse_command(script, arguments, tmp_path, monkeypatch, capsys)
    for path in (config.data.path, config.data.eval_path):
        assert path is None or (ROOT / path).exists(), path
    if where in ("rayjob.yaml", "raycronjob.yaml"):
        assert config.run.storage_path.startswith("/shared/")


@manifests
def test_a_manifest_has_fields_that_kuberay_knows(manifest: Path) -> None:
    document = yaml.safe_load(manifest.read_text())
    assert document["apiVersion"] == "ray.io/v1"
    schema = {"$ref": f"#/$defs/{document['kind']}", "$defs": SCHEMA["$defs"]}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document["spec"])
    assert [f"{error.json_path}: {error.message}" for error in errors] == []
    # KubeRay appends to the name: MaxRayCronJobNameLength.
    assert len(document["metadata"]["name"]) <= 36


@manifests
def test_a_manifest_offers_the_resources_that_the_run_reserves(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(manifest)
    (script, arguments) = next((script, arguments) for where, script, arguments in commands() if where == manifest.name)
    config = parse_command(script, arguments, tmp_path, monkeypatch, capsys)
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    pods = pods_of(job)
    head = int(job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"])
    worker_cpus = int(pods["worker"]["containers"][0]["resources"]["limits"]["cpu"])
    scaling = config.scaling
    assert (workers["minReplicas"], workers["maxReplicas"]) == (scaling.min_workers, scaling.max_workers)
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert [
        workers_that_fit(config, ClusterCapacity({"CPU": head + worker_cpus * pods}))
        for pods in (scaling.min_workers, scaling.max_workers)
    ] == [
        scaling.min_workers,
        scaling.max_workers,
    ]
    assert worker_cpus == scaling.cpus_per_worker == scaling.threads_per_worker
    # With as many CPUs as a worker needs, the autoscaler would place workers on the head.
    assert head == reserved_cpus(config) < scaling.cpus_per_worker
    # The driver and Ray itself need CPUs beyond those offered to Ray.
    assert int(pods["head"]["containers"][0]["resources"]["limits"]["cpu"]) > head


@manifests
def test_a_manifest_has_the_documented_security_and_timeouts(manifest: Path) -> None:
    job = job_of(manifest)
    cluster, pods = job["rayClusterSpec"], pods_of(job)
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["autoscalerOptions"]["securityContext"] == HARDENED
    assert (
        cluster["autoscalerOptions"]["volumeMounts"] == pods["submitter"]["containers"][0]["volumeMounts"] == [SCRATCH]
    )
    for name, pod in pods.items():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == HARDENED
        # The head's account is what the autoscaler starts pods with.
        assert pod.get("automountServiceAccountToken", True) is (name == "head")
        assert container["resources"]["limits"] == container["resources"]["requests"]
        if name != "submitter":
            assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}, SCRATCH]
            assert container["envFrom"] == [{"secretRef": {"name": "ray-app", "optional": True}}]
    named = {variable["name"] for pod in pods.values() for variable in pod["containers"][0].get("env", [])}
    assert not [name for name in named if re.search("token|secret|password|key", name, re.IGNORECASE)], (
        "the manifest has variables for secrets, which belong into the Secret"
    )
    claim = yaml.safe_load((DEPLOY / "kuberay" / "storage.yaml").read_text())
    assert pods["head"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    wait_s = float(yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert wait_s >= 60
    assert all(pods[name]["terminationGracePeriodSeconds"] > wait_s for name in ("head", "worker"))
    documented = dict(re.findall(r"(RAY_health_check\w+)=(\d+)", (ROOT / "docs" / "failures.md").read_text()))
    assert {variable["name"]: variable["value"] for variable in pods["head"]["containers"][0]["env"]} == documented
    assert (job["backoffLimit"] > 0, job["shutdownAfterJobFinishes"], cluster["enableInTreeAutoscaling"]) == (
        True,
        True,
        True,
    )


@manifests
def test_a_policy_closes_every_pod_to_all_but_the_operator_and_prometheus(manifest: Path) -> None:
    """No test can show that the network plugin of a cluster enforces it."""
    policy = yaml.safe_load((DEPLOY / "kuberay" / "network.yaml").read_text())["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    label = policy["podSelector"]["matchLabels"].items()
    assert all(label <= template["metadata"]["labels"].items() for template in templates_of(job_of(manifest)).values())
    inside, *outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": policy["podSelector"]}]}
    ports = {rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: rule["ports"] for rule in outside}
    assert ports == {"kuberay-operator": [{"port": 8265}], "prometheus": [{"port": 8080}]}
    assert all(len(rule["from"]) == 1 for rule in outside)


def test_both_manifests_request_the_same_cluster() -> None:
    first, second = (job_of(manifest) for manifest in MANIFESTS)
    for part in ("rayClusterSpec", "submitterPodTemplate", "runtimeEnvYAML"):
        without_comments = [
            yaml.safe_load(job[part]) if isinstance(job[part], str) else job[part] for job in (first, second)
        ]
        assert without_comments[0] == without_comments[1], part


def test_the_image_has_the_versions_of_the_requirements() -> None:
    ray = re.search(r"^ray\[.*\]==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    project = (ROOT / "pyproject.toml").read_text()
    lowest = re.search(r'requires-python = ">=3\.(\d+)', project)[1]
    base = next(rest for word, rest in instructions() if word == "ARG" and rest.startswith("BASE="))
    minor = int(re.search(r"python:3\.(\d+)-", base)[1])
    assert int(lowest) <= minor
    image = f"registry.example.com/ray_app:{__version__}-ray{ray}-py3{minor}"
    assert {
        c["image"] for manifest in MANIFESTS for pod in pods_of(job_of(manifest)).values() for c in pod["containers"]
    } == {image}
    for file in ("Containerfile", "README.md"):
        assert set(re.findall(r"registry\S+", (DEPLOY / file).read_text())) == {image}
    assert {job_of(manifest)["rayClusterSpec"]["rayVersion"] for manifest in MANIFESTS} == {ray}


@pytest.mark.rest
def test_the_image_has_all_files_and_runs_as_an_unprivileged_user(tmp_path: Path) -> None:
    """The files that the Containerfile copies suffice for the commands; they run in a folder with just these files."""
    image, words = tmp_path / "app", instructions()
    image.mkdir()
    allowed = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for word, rest in words:
        if word == "COPY":
            source, target = rest.split()
            assert f"!{source}" in allowed, source
            copied = image / target.removeprefix(IN_IMAGE)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, copied)
    environment = dict(rest.split("=") for word, rest in words if word == "ENV")
    assert environment["PYTHONPATH"] == str(Path(IN_IMAGE))
    assert ("USER", "1000:1000") in words
    assert words[-1][0] == "CMD"
    called = [part.replace(IN_IMAGE, f"{image}/") for part in ast.literal_eval(words[-1][1])]
    done = subprocess.run(
        [sys.executable, *called[1:]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(image), "PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "--scaling.max_workers" in done.stdout) == (0, True), done.stderr
    for manifest in MANIFESTS:
        for path in re.findall(rf"{IN_IMAGE}(\S+)", job_of(manifest)["entrypoint"]):
            assert (image / path).exists(), path


@pytest.mark.parametrize(("code", "mails"), [(0, False), (75, False), (1, True), (2, True)])
def test_the_crontab_mails_failures_only(code: int, mails: bool, tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\necho said $* $FROM_FILE\nexit {code}\n")
    python.chmod(0o700)
    (tmp_path / "environment").write_text("export FROM_FILE=read\n")
    command = cron_command().replace(INSTALLED, str(tmp_path)).replace("/var/log/ray_app", str(tmp_path))
    settings = {"BASH_ENV": str(tmp_path / "environment"), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-c", command], env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    assert bool(done.stdout + done.stderr) == mails
    assert (tmp_path / "retrain.log").read_text().startswith("said -m ray_app retrain --config")
    assert (tmp_path / "retrain.log").read_text().endswith("read\n")


def test_the_crontab_has_valid_syntax() -> None:
    lines = [line for line in (DEPLOY / "cron" / "crontab").read_text().splitlines() if not line.startswith("#")]
    *settings, entry = lines
    assert all(re.fullmatch(r"[A-Z_]+=\S+", setting) for setting in settings)
    # Only bash reads BASH_ENV.
    assert "SHELL=/bin/bash" in settings
    assert all(re.fullmatch(r"[\d*/,-]+", field) for field in entry.split()[:5])
    # cron reads a percent sign as the end of the line.
    assert "%" not in entry


def test_the_dag_retries_only_after_exit_code_75() -> None:
    """Airflow is too big for the tests' environment, so the test reads the syntax tree; the DAG was run by hand."""
    tree = ast.parse((DEPLOY / "airflow" / "retrain_dag.py").read_text())
    calls = {
        node.func.id: node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    options = {name: {k.arg: k.value for k in calls[name].keywords} for name in ("DAG", "Retrain")}
    assert ast.literal_eval(options["DAG"]["catchup"]) is False
    assert ast.literal_eval(options["DAG"]["max_active_runs"]) == 1
    assert ast.literal_eval(options["Retrain"]["retries"]) > 0
    assert (dag_constants()["AGAIN"], dag_constants()["FOLDER"]) == (75, INSTALLED)
    branches: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    raised = {ast.unparse(branch.test): branch.body[0].exc.func.id for branch in branches}
    assert raised == {"result.exit_code == AGAIN": "AirflowException", "result.exit_code != 0": "AirflowFailException"}
