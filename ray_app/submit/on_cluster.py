"""The driver of the preflight's job, `python -m ray_app.submit.on_cluster`: looks at the run from the cluster and takes
no slot.

It prints one line of JSON behind a mark, which `preflight` reads.

Whether every node of the cluster reads the data and shares the storage, by a task without a slot on each.

What a run will do and need, in figures: steps, workers, bytes.
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

from ray_app.cluster.ray_private import max_resources
from ray_app.cluster.resources import (
    check_object_stores,
    cluster,
    megabytes,
    resolve_max_workers,
    shared_bytes,
    workers_that_fit,
)
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.sections import ScalingSection
from ray_app.data.dataset import open_dataset
from ray_app.driver.finalize import newest_commit
from ray_app.driver.parsing import parse
from ray_app.errors import ConfigError, DataError
from ray_app.preflight.prepare import Prepared, prepare
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.runlog.stored_config import stored_config
from ray_app.storage.data_files import find_file, is_folder, locate_data
from ray_app.storage.files import Location, put_atomic, to_location
from ray_app.track.tensorboard import check_board
from ray_app.track.tracker import check_available
from ray_app.train.state.state import TrainingState
from ray_app.version import __version__
from ray_app.watch.terminal import Finding, run_check

logger = logging.getLogger(__name__)

_ANSWER_S = 90.0
_COPY_MARKS = ("_ray_pkg_", "runtime_resources")
_SHARED = "Give a folder that is mounted on every node under the same path, or s3://bucket/prefix."


def storage(path: str, data: list[str]) -> Finding:
    """Whether the storage can be written, and every other node sees what is written there and reads the data.

    Args:
        path: `run.storage_path`.
        data: Folders or files of the training and the evaluation data, absolute or on S3.

    Raises:
        ConfigError: The storage cannot be used.
    """
    place = to_location(path)
    if isinstance(place, Path) and any(mark in str(place) for mark in _COPY_MARKS):
        raise ConfigError(
            f"run.storage_path is {path!r}, which is {place} in the job: Ray removes that copy of the working directory"
            f" when the job has"
            f" ended, and other nodes do not see it. {_SHARED}"
        )
    made = _missing_parents(place)
    probe = place / f".preflight-{uuid.uuid4().hex}"
    try:
        put_atomic(probe, probe.name.encode())
    except OSError as error:
        raise ConfigError(
            f"run.storage_path {path} cannot be written from the head node: {error}. {_SHARED}"
        ) from error
    try:
        return _seen_elsewhere(path, probe, data)
    finally:
        _remove(probe, made)


def _seen_elsewhere(path: str, probe: Location, data: list[str]) -> Finding:
    here = ray.get_runtime_context().get_node_id()
    others = {
        node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here
    }
    look = ray.remote(num_cpus=0, max_retries=0)(_trouble)
    asked: dict[Any, str] = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            str(probe), data
        ): name
        for node, name in others.items()
    }
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    troubles = [f"{asked[answer]}: {found}" for answer in answered if (found := _answer(answer))]
    if troubles:
        raise ConfigError("other nodes cannot work with it: " + "; ".join(troubles) + f". {_SHARED}")
    if silent:
        names = ", ".join(asked[answer] for answer in silent)
        text = f"{path} can be written, but {names} did not say within {_ANSWER_S:g} s whether it is seen there."
        return Finding("warning", "storage", text)
    seen = f"is seen on the {len(others)} other nodes" if others else "the cluster has one node"
    return Finding("ok", "storage", f"{path} can be written; {seen}.")


def _answer(answer: Any) -> str | None:
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        return f"could not be asked ({type(error).__name__})"


def _trouble(probe: str, data: list[str]) -> str | None:
    """What is wrong on the node that this runs on; None: nothing."""
    place = to_location(probe)
    try:
        if place.read_bytes() != place.name.encode():
            return f"{place} holds something else here"
    except OSError as error:
        return f"a file that the head node wrote is not there ({error})"
    own = to_location(f"{probe}-{uuid.uuid4().hex}")
    try:
        put_atomic(own, b"")
        own.unlink(missing_ok=True)
    except OSError as error:
        return f"the storage cannot be written ({error})"
    try:
        missing = [path for path in data if not (find_file(locate_data(path)) or is_folder(locate_data(path)))]
    except DataError as error:
        return f"{error}"
    return f"data is not there: {', '.join(missing)}" if missing else None


def _missing_parents(place: Location) -> list[Path]:
    """The folders that writing will make, the innermost first."""
    return [folder for folder in (place, *place.parents) if not folder.exists()] if isinstance(place, Path) else []


def _remove(probe: Location, made: list[Path]) -> None:
    try:
        probe.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()
    except OSError as error:  # somebody uses the folder by now
        logger.info("Left behind by the preflight: %s", error)


_STATES = 4  # parameters, gradients, and two values per parameter of the optimizer


@dataclass(frozen=True)
class Figures:
    """A run as it would start now.

    Args:
        workers: W, those that the cluster has room for.
        max_workers: Most that were asked for.
        logical_workers: L.
        rows: Rows of the training data.
        step_rows: Rows of one optimizer step.
        steps_per_epoch: Steps of one epoch.
        total_steps: Steps of the run.
        from_step: Finished steps that it continues from.
        state_bytes: Parameters, buffers, gradients and optimizer of one worker, with two values of the optimizer per
            parameter.
        shared_bytes: Decoded data in the object store of each node.
        snapshot_bytes: Two snapshots in the memory of the driver's node and one other; 0 without
            `checkpoint.snapshot_every_steps`.
        run_directory: Where the run is recorded.
        report: Its page.
        tracking: Where MLflow's record is; None without tracking.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; `Figures(**values)` is the same."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """For people: what, and how much."""
        capped = f" of {self.max_workers} asked for" if self.workers < self.max_workers else ""
        done = f", {self.from_step:,} of them done" if self.from_step else ""
        memory = f"{megabytes(self.state_bytes)} of state per worker"
        memory += (
            f", {megabytes(self.shared_bytes)} of decoded data in each node's object store" if self.shared_bytes else ""
        )
        memory += (
            f", {megabytes(self.snapshot_bytes)} of snapshots on the driver's node and one other"
            if self.snapshot_bytes
            else ""
        )
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
    """The figures of a run that may start on so many workers."""
    job, config = prepared.job, prepared.job.config
    with torch.random.fork_rng(devices=[]):
        model = TrainingState(config, job.task, torch.device("cpu"), job.total_steps).model
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
LIBRARIES = (
    "ray",
    "torch",
    "torchvision",
    "pyarrow",
    "numpy",
    "mlflow",
    "torchmetrics",
    "safetensors",
    "jsonargparse",
    "scikit-learn",
)
_MLFLOW_S = 10.0


@dataclass(frozen=True)
class Report:
    """What was found on the cluster.

    Args:
        findings: Line by line.
        versions: Of Python and of the libraries, on the head node.
        figures: What would run, if that can be said.
    """

    findings: list[Finding]
    versions: dict[str, str]
    figures: Figures | None

    def to_json(self) -> str:
        """One line."""
        numbers = self.figures.to_dict() if self.figures else None
        return json.dumps(
            {"findings": [asdict(one) for one in self.findings], "versions": self.versions, "figures": numbers}
        )

    @classmethod
    def from_output(cls, output: str) -> Report | None:
        """Finds it in what the job printed; None if it is not there."""
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        if not lines:
            return None
        values = json.loads(lines[-1].removeprefix(MARK))
        made = Figures(**values["figures"]) if values["figures"] else None
        return cls([Finding(**one) for one in values["findings"]], values["versions"], made)


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that are installed here."""
    found = {"python": platform.python_version(), "ray_app": __version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def inspect(config: Config) -> Report:
    """Looks at everything that a run of this configuration needs, on the connected cluster."""
    try:
        config = resolve_max_workers(
            config,
            stored_config(RunPaths(to_location(config.run.storage_path) / config.run.name))
            if config.run.name
            else None,
        )
    except ConfigError as error:
        return Report([Finding("refused", "resources", str(error))], versions(), None)
    data = [path for path in (config.data.path, config.data.eval_path) if path]
    topics = [("training data", config.data.path), ("evaluation data", config.data.eval_path)]
    found = [run_check(topic, partial(_data, path)) for topic, path in topics if path]
    readable = all(one.level == "ok" for one in found)
    shared = [str(locate_data(path)) for path in data] if readable else []
    found.append(run_check("storage", partial(storage, config.run.storage_path, shared)))
    found.append(run_check("resources", partial(_resources, config)))
    found.append(run_check("MLflow", partial(_mlflow, config)))
    if config.tracking.tensorboard:
        found.append(run_check("TensorBoard", partial(_board, config)))
    if not readable:
        return Report(found, versions(), None)
    made: list[Figures] = []
    found.append(run_check("run", partial(_figures, config, made)))
    if made and made[0].shared_bytes:
        found.append(run_check("object store", partial(check_object_stores, made[0].shared_bytes, ray.nodes())))
    return Report(found, versions(), made[0] if made else None)


def _data(path: str) -> str:
    manifest = open_dataset(path).manifest
    return f"{path}: {manifest.num_rows:,} rows in {len(manifest.rows):,} row groups."


def _resources(config: Config) -> str | Finding:
    most = max_resources()
    workers = workers_that_fit(config, ray.cluster_resources(), ray.nodes(), most)
    if most is None:
        _refuse_small_nodes(config.scaling)
    try:
        workers_that_fit(config, ray.available_resources(), ray.nodes())
    except ConfigError:
        return Finding(
            "warning",
            "resources",
            f"The cluster is {'' if most is None else 'or grows '}big enough, but has no room now; the run waits for"
            f" it.",
        )
    if workers < config.scaling.worker_limit:
        text = (
            f"{workers} of {config.scaling.max_workers} workers fit; the result is the same, and more join when there"
            f" is room."
        )
        return Finding("warning", "resources", text)
    return f"{workers} workers, the evaluator and reading fit."


def _refuse_small_nodes(scaling: ScalingSection) -> None:
    """Refuses workers that the cluster has room for only if they were spread over several nodes each."""
    for name, field, each in (
        ("CPU", "cpus_per_worker", scaling.cpus_per_worker),
        ("GPU", "gpus_per_worker", scaling.gpus_per_worker),
    ):
        most = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
        if each > most:
            raise ConfigError(
                f"scaling.{field} is {each:g}, but no node has more than {most:g} {name}; lower it, or add a bigger"
                f" node."
            )


def _board(config: Config) -> str:
    check_board(config)
    return "event files are written."


def _mlflow(config: Config) -> str | Finding:
    """Whether MLflow is there; the run works without, and sends later what it could not send."""
    if not config.tracking.enabled:
        return "not used (tracking.enabled is false)."
    check_available(config)
    uri = default_tracking_uri(config)
    if urlsplit(uri).scheme not in ("http", "https"):
        return "the record goes to a database, opened when the run starts."
    problem = _trouble_at(f"{uri.rstrip('/')}/health")
    if problem is None:
        return f"{redact(uri)} answers."
    text = f"{redact(uri)} {problem}. The run works without; ray-app track --replay sends its record later."
    return Finding("warning", "MLflow", text)


def _trouble_at(url: str) -> str | None:
    try:
        urllib.request.urlopen(url, timeout=_MLFLOW_S).close()
    except urllib.error.HTTPError as error:  # somebody answers; only what concerns us is trouble
        advice = "check MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return f"answers with {error.code}; {advice}" if error.code in (401, 403) else None
    except (OSError, ValueError) as error:
        return f"does not answer from the head node ({error}); check tracking.uri and the server"
    return None


def _figures(config: Config, made: list[Figures]) -> str:
    prepared = prepare(config)
    there = ray.cluster_resources(), ray.nodes(), max_resources()
    made.append(figures(prepared, workers_that_fit(config.replace(scaling__min_workers=0), *there)))
    verb = "continues" if prepared.resumes else "starts"
    return f"{prepared.job.paths.name} loads on the cluster and {verb}; one row went through the model and the loss."


def main(arguments: list[str] | None = None) -> int:
    """Prints what was found.

    Returns:
        0, whatever was found.
    """
    began_s = time.monotonic()
    try:
        config = parse(arguments, prog="on_cluster", exit_on_error=False)
    except ConfigError as error:
        report = Report(
            [Finding("refused", "configuration", f"does not load on the cluster: {error}")], versions(), None
        )
    else:
        with cluster(config):
            report = inspect(config)
    print(f"Looked at the cluster for {time.monotonic() - began_s:.1f} s.")
    print(MARK + redact(report.to_json()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
