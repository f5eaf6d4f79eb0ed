"""The job of `ray-app submit` that checks a run from the cluster, without reserving resources.

`python -m ray_app.submit.on_cluster` prints one line of JSON after a mark, which `ray_app.submit.preflight` reads. It
checks that every node reads the data and shares the storage, and computes the steps, workers and bytes of the run.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.cluster.resources import (
    ClusterCapacity,
    check_object_stores,
    cluster,
    cluster_capacity,
    megabytes,
    resolve_scaling,
    shared_bytes,
    workers_that_fit,
)
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.sections import ScalingSection
from ray_app.data.dataset import open_dataset
from ray_app.devices import HOST
from ray_app.driver.finalize import newest_commit
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import Prepared, prepare
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import stored_config
from ray_app.storage.data_files import find_file, is_folder
from ray_app.storage.files import Location, put_atomic, to_location
from ray_app.track.tracker import check_available
from ray_app.train.state.state import TrainingState
from ray_app.version import __version__
from ray_app.watch.terminal import Finding, run_check

logger = logging.getLogger(__name__)

_ANSWER_S = 90.0
_COPY_MARKS = ("_ray_pkg_", "runtime_resources")
_SHARED = "Give a folder that is mounted on every node under the same path, or a prefix in a bucket."


def check_shared_storage(path: str, data: list[str]) -> Finding:
    """Checks that the storage can be written, and that every other node sees the written file and the data.

    Args:
        path: `run.storage_path`.
        data: Folders or files of the training and the evaluation data, absolute or in object stores.

    Raises:
        ConfigError: The storage cannot be used.
    """
    storage = to_location(path)
    if isinstance(storage, Path) and any(mark in str(storage) for mark in _COPY_MARKS):
        raise ConfigError(
            f"run.storage_path is {path!r}, which is {storage} in the job: Ray removes that copy of the working"
            f" directory when the job has ended, and other nodes do not see it. {_SHARED}"
        )
    new_folders = _missing_parents(storage)
    probe = storage / f".preflight-{uuid.uuid4().hex}"
    try:
        put_atomic(probe, probe.name.encode())
    except OSError as error:
        raise ConfigError(
            f"run.storage_path {path} cannot be written from the head node: {error}. {_SHARED}"
        ) from error
    try:
        return _check_other_nodes(path, probe, data)
    finally:
        _remove(probe, new_folders)


def _check_other_nodes(path: str, probe: Location, data: list[str]) -> Finding:
    """Checks in a task on each other node that it sees a file in the storage and the data; raises `ConfigError`."""
    here = ray.get_runtime_context().get_node_id()
    others = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here
    }
    check_node = ray.remote(num_cpus=0, max_retries=0)(_find_problem)
    pending: dict[Any, str] = {
        check_node.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            str(probe), data
        ): name
        for node, name in others.items()
    }
    answered, silent = ray.wait(list(pending), num_returns=len(pending), timeout=_ANSWER_S) if pending else ([], [])
    problems = [f"{pending[answer]}: {problem}" for answer in answered if (problem := _get_answer(answer))]
    if problems:
        raise ConfigError("other nodes cannot work with it: " + "; ".join(problems) + f". {_SHARED}")
    if silent:
        names = ", ".join(pending[answer] for answer in silent)
        text = f"{path} can be written, but {names} did not say within {_ANSWER_S:g} s whether it is seen there."
        return Finding("warning", "storage", text)
    visibility = f"is seen on the {len(others)} other nodes" if others else "the cluster has one node"
    return Finding("ok", "storage", f"{path} can be written; {visibility}.")


def _get_answer(answer: Any) -> str | None:
    """Returns the problem that a node reports, or the reason why it could not be checked, or None."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        return f"could not be asked ({type(error).__name__})"


def _find_problem(probe: str, data: list[str]) -> str | None:
    """Returns the problem of this node with the storage or the data, or None."""
    file = to_location(probe)
    try:
        if file.read_bytes() != file.name.encode():
            return f"{file} holds something else here"
    except OSError as error:
        return f"a file that the head node wrote is not there ({error})"
    new_file = to_location(f"{probe}-{uuid.uuid4().hex}")
    try:
        put_atomic(new_file, b"")
        new_file.unlink(missing_ok=True)
    except OSError as error:
        return f"the storage cannot be written ({error})"
    try:
        missing = [path for path in data if not (find_file(to_location(path)) or is_folder(to_location(path)))]
    except DataError as error:
        return f"{error}"
    return f"data is not there: {', '.join(missing)}" if missing else None


def _missing_parents(storage: Location) -> list[Path]:
    """Returns the folders that writing will create, the innermost first."""
    if not isinstance(storage, Path):
        return []
    return [folder for folder in (storage, *storage.parents) if not folder.exists()]


def _remove(probe: Location, new_folders: list[Path]) -> None:
    """Removes the file and the folders of the check."""
    try:
        probe.unlink(missing_ok=True)
        for folder in new_folders:
            folder.rmdir()
    except OSError as error:
        # Another process may use the folder by now.
        logger.info("Left behind by the preflight: %s", error)


_STATES = 4
"""Assumed size of the training state in multiples of the parameters: parameters, gradients, two of the optimizer."""


@dataclass(frozen=True)
class Figures:
    """The numbers of a run as it would start now.

    Args:
        workers: Number of workers for which the cluster has the capacity (W).
        max_workers: Configured largest number of workers.
        logical_workers: Number of logical workers (L).
        rows: Rows of the training data.
        step_rows: Rows of one optimizer step.
        from_step: Finished steps after which the run continues.
        state_bytes: Parameters, buffers, gradients and optimizer state of one worker, with two values of the optimizer
            per parameter.
        shared_bytes: Decoded data in the object store of each node.
        snapshot_bytes: Two snapshots in the memory of the driver's node and one other node, or 0.
        tracking: MLflow tracking URI; None without tracking.
    """

    workers: int
    max_workers: int
    logical_workers: int
    rows: int
    step_rows: int
    steps_per_epoch: int
    total_steps: int
    from_step: int
    state_bytes: int
    shared_bytes: int
    snapshot_bytes: int
    run_directory: str
    report: str
    tracking: str | None

    def lines(self) -> list[tuple[str, str]]:
        """Returns the lines of a table for the user, each a name and a text."""
        capped = f" of {self.max_workers} asked for" if self.workers < self.max_workers else ""
        done = f", {self.from_step:,} of them done" if self.from_step else ""
        memory = f"{megabytes(self.state_bytes)} of state per worker"
        if self.shared_bytes:
            memory += f", {megabytes(self.shared_bytes)} of decoded data in each node's object store"
        if self.snapshot_bytes:
            memory += f", {megabytes(self.snapshot_bytes)} of snapshots on the driver's node and one other"
        return [
            ("workers (W)", f"{self.workers}{capped}, arithmetic of {self.logical_workers} (L)"),
            ("steps", f"{self.total_steps:,}{done}; {self.steps_per_epoch:,} per epoch of {self.rows:,} rows"),
            ("rows per step", f"{self.step_rows:,}"),
            ("memory", memory),
            ("run directory", self.run_directory),
            ("report", self.report),
            ("MLflow", self.tracking or "none (tracking.enabled is false)"),
        ]


def figures(prepared: Prepared, workers: int) -> Figures:
    """Returns the figures of a prepared run on this number of workers."""
    job, config = prepared.job, prepared.job.config
    with torch.random.fork_rng(devices=[]):
        model = TrainingState(config, job.task, HOST, job.total_steps).model
    parameters = sum(value.numel() * value.element_size() for value in model.parameters())
    buffers = sum(value.numel() * value.element_size() for value in model.buffers())
    newest = newest_commit(job) if prepared.resumes else None
    return Figures(
        workers=workers,
        max_workers=config.scaling.worker_limit,
        logical_workers=job.plan.logical_workers,
        rows=job.plan.manifest.num_rows,
        step_rows=job.plan.global_batch_size,
        steps_per_epoch=job.plan.steps_per_epoch,
        total_steps=job.total_steps,
        from_step=newest.step if newest else 0,
        state_bytes=_STATES * parameters + buffers,
        shared_bytes=shared_bytes(job),
        snapshot_bytes=2 * (3 * parameters + buffers) if config.checkpoint.snapshot_every_steps else 0,
        run_directory=str(job.paths.root),
        report=str(job.paths.report),
        tracking=redact(default_tracking_uri(config)) if config.tracking.enabled else None,
    )


MARK = "RAY_APP_PREFLIGHT "
LIBRARIES = ("ray", "torch", "torchvision", "pyarrow", "numpy", "mlflow", "torchmetrics", "safetensors", "jsonargparse")
_MLFLOW_S = 10.0


@dataclass(frozen=True)
class Report:
    """The result of the checks on the cluster.

    Args:
        findings: One finding per line of output.
        versions: Versions of Python and of the libraries on the head node.
        figures: The figures of the run, unless a finding prevents them.
    """

    findings: list[Finding]
    versions: dict[str, str]
    figures: Figures | None

    def to_json(self) -> str:
        """Returns the report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_output(cls, output: str) -> Report | None:
        """Returns the report in the output of the job, or None if there is none."""
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        if not lines:
            return None
        values = json.loads(lines[-1].removeprefix(MARK))
        run_figures = Figures(**values["figures"]) if values["figures"] else None
        return cls([Finding(**finding) for finding in values["findings"]], values["versions"], run_figures)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are installed on this machine."""
    installed = {"python": platform.python_version(), "ray_app": __version__}
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def inspect(config: Config) -> Report:
    """Checks on the connected cluster everything that a run of this configuration needs, and returns the report."""
    run = config.run
    try:
        stored = stored_config(RunPaths(to_location(run.storage_path) / run.name)) if run.name else None
        config = resolve_scaling(config, stored)
    except ConfigError as error:
        return Report([Finding("refused", "resources", str(error))], versions(), None)

    def describe_data(path: str) -> str:
        manifest = open_dataset(path).manifest
        return f"{path}: {manifest.num_rows:,} rows in {len(manifest.rows):,} row groups."

    data = [path for path in (config.data.path, config.data.eval_path) if path]
    topics = [("training data", config.data.path), ("evaluation data", config.data.eval_path)]
    findings = [run_check(topic, partial(describe_data, path)) for topic, path in topics if path]
    readable = all(finding.level == "ok" for finding in findings)
    shared = [str(to_location(path)) for path in data] if readable else []
    findings.append(run_check("storage", partial(check_shared_storage, config.run.storage_path, shared)))
    findings.append(run_check("resources", partial(_check_resources, config)))
    findings.append(run_check("MLflow", partial(_check_mlflow, config)))
    if not readable:
        return Report(findings, versions(), None)
    run_figures: list[Figures] = []
    findings.append(run_check("run", partial(_check_run, config, run_figures)))
    if run_figures and run_figures[0].shared_bytes:
        check = partial(check_object_stores, run_figures[0].shared_bytes, ray.nodes())
        findings.append(run_check("object store", check))
    return Report(findings, versions(), run_figures[0] if run_figures else None)


def _check_resources(config: Config) -> str | Finding:
    """Returns how many workers fit into the cluster, as a sentence or a warning.

    Raises:
        ConfigError: The cluster never has the capacity for `scaling.min_workers`.
    """
    capacity = cluster_capacity()
    workers = workers_that_fit(config, capacity)
    if capacity.max_resources is None:
        _check_node_sizes(config.scaling)
    try:
        workers_that_fit(config, ClusterCapacity(ray.available_resources(), capacity.nodes))
    except ConfigError:
        return Finding(
            "warning",
            "resources",
            f"The cluster is {'' if capacity.max_resources is None else 'or grows '}big enough, but has no capacity"
            " now; the run waits for it.",
        )
    if workers < config.scaling.worker_limit:
        text = (
            f"{workers} of {config.scaling.max_workers} workers fit; the result is the same, and more join when there"
            f" is capacity."
        )
        return Finding("warning", "resources", text)
    return f"{workers} workers, the evaluator and reading fit."


def _check_node_sizes(scaling: ScalingSection) -> None:
    """Raises `ConfigError` if no single node has the resources of one worker."""
    for name, field, amount in (
        ("CPU", "cpus_per_worker", scaling.cpus_per_worker),
        ("GPU", "gpus_per_worker", scaling.worker_gpus),
        ("TPU", "tpus_per_worker", scaling.tpus_per_worker),
    ):
        largest = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
        if amount > largest:
            raise ConfigError(
                f"scaling.{field} is {amount:g}, but no node has more than {largest:g} {name}; lower it, or add a"
                " bigger node."
            )


def _check_mlflow(config: Config) -> str | Finding:
    """Returns whether MLflow answers; the run works without it, and its record can be sent later."""
    if not config.tracking.enabled:
        return "not used (tracking.enabled is false)."
    check_available(config)
    uri = default_tracking_uri(config)
    if urlsplit(uri).scheme not in ("http", "https"):
        return "the record goes to a database, opened when the run starts."
    problem = _find_server_problem(f"{uri.rstrip('/')}/health")
    if problem is None:
        return f"{redact(uri)} answers."
    text = f"{redact(uri)} {problem}. The run works without; ray-app track --replay sends its record later."
    return Finding("warning", "MLflow", text)


def _find_server_problem(url: str) -> str | None:
    """Returns why a server cannot be used, as the end of a sentence, or None if it can."""
    try:
        urllib.request.urlopen(url, timeout=_MLFLOW_S).close()
    except urllib.error.HTTPError as error:
        # The server answers; only refused credentials are a problem of the run.
        advice = "check MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return f"answers with {error.code}; {advice}" if error.code in (401, 403) else None
    except (OSError, ValueError) as error:
        return f"does not answer from the head node ({error}); check tracking.uri and the server"
    return None


def _check_run(config: Config, run_figures: list[Figures]) -> str:
    """Prepares the run, appends its figures to `run_figures`, and returns a sentence."""
    prepared = prepare(config)
    workers = workers_that_fit(config.replace(scaling__min_workers=0), cluster_capacity())
    run_figures.append(figures(prepared, workers))
    verb = "continues" if prepared.resumes else "starts"
    return f"{prepared.job.paths.name} loads on the cluster and {verb}; one row went through the model and the loss."


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and prints the report; returns 0, also if a check fails: the report has the findings."""
    start_s = time.monotonic()
    try:
        config = parse(arguments, prog="on_cluster", exit_on_error=False)
    except ConfigError as error:
        finding = Finding("refused", "configuration", f"does not load on the cluster: {error}")
        report = Report([finding], versions(), None)
    else:
        with cluster(config):
            report = inspect(config)
    print(f"Looked at the cluster for {time.monotonic() - start_s:.1f} s.")
    print(MARK + redact(report.to_json()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
