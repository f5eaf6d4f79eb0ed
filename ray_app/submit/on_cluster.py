"""The driver of the preflight's job, `python -m ray_app.submit.on_cluster`: looks at the run from the cluster and takes no slot.

It prints one line of JSON behind a mark, which `preflight` reads.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from urllib.parse import urlsplit

import ray

from ray_app.cluster.autoscaler import most_resources
from ray_app.config.config import Config, default_tracking_uri
from ray_app.config.sections import ScalingSection
from ray_app.data.dataset.dataset import open_dataset
from ray_app.data.dataset.files import place_of
from ray_app.errors import ConfigError
from ray_app.record.files import location
from ray_app.record.paths import RunPaths
from ray_app.record.redact import redact
from ray_app.record.stored_config import stored_config
from ray_app.runs.capacity import fits_object_stores
from ray_app.runs.cluster import cluster, counted, workers_that_fit
from ray_app.runs.given.configuration import parse
from ray_app.runs.preparing.prepare import prepare
from ray_app.submit.figures import Figures, figures
from ray_app.submit.nodes import storage
from ray_app.track.board import check_board
from ray_app.track.runs import check_available
from ray_app.version import __version__
from ray_app.watch.findings import Finding, look

MARK = "RAY_APP_PREFLIGHT "
LIBRARIES = ("ray", "torch", "torchvision", "pyarrow", "numpy", "mlflow", "torchmetrics", "safetensors", "jsonargparse", "scikit-learn")
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
        return json.dumps({"findings": [asdict(one) for one in self.findings], "versions": self.versions, "figures": numbers})

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
        config = counted(config, stored_config(RunPaths(location(config.run.storage_path) / config.run.name)) if config.run.name else None)
    except ConfigError as error:
        return Report([Finding("refused", "resources", str(error))], versions(), None)
    data = [path for path in (config.data.path, config.data.eval_path) if path]
    topics = [("training data", config.data.path), ("evaluation data", config.data.eval_path)]
    found = [look(topic, partial(_data, path)) for topic, path in topics if path]
    readable = all(one.level == "ok" for one in found)
    shared = [str(place_of(path)) for path in data] if readable else []
    found.append(look("storage", partial(storage, config.run.storage_path, shared)))
    found.append(look("resources", partial(_resources, config)))
    found.append(look("MLflow", partial(_mlflow, config)))
    if config.tracking.tensorboard:
        found.append(look("TensorBoard", partial(_board, config)))
    if not readable:
        return Report(found, versions(), None)
    made: list[Figures] = []
    found.append(look("run", partial(_figures, config, made)))
    if made and made[0].shared_bytes:
        found.append(look("object store", partial(fits_object_stores, made[0].shared_bytes, ray.nodes())))
    return Report(found, versions(), made[0] if made else None)


def _data(path: str) -> str:
    manifest = open_dataset(path).manifest
    return f"{path}: {manifest.num_rows:,} rows in {len(manifest.rows):,} row groups."


def _resources(config: Config) -> str | Finding:
    most = most_resources()
    workers = workers_that_fit(config, ray.cluster_resources(), ray.nodes(), most)
    if most is None:
        _refuse_small_nodes(config.scaling)
    try:
        workers_that_fit(config, ray.available_resources(), ray.nodes())
    except ConfigError:
        return Finding(
            "warning",
            "resources",
            f"The cluster is {'' if most is None else 'or grows '}big enough, but has no room now; the run waits for it.",
        )
    if workers < config.scaling.most_workers:
        text = f"{workers} of {config.scaling.max_workers} workers fit; the result is the same, and more join when there is room."
        return Finding("warning", "resources", text)
    return f"{workers} workers, the evaluator and reading fit."


def _refuse_small_nodes(scaling: ScalingSection) -> None:
    """Refuses workers that the cluster has room for only if they were spread over several nodes each."""
    for name, field, each in (("CPU", "cpus_per_worker", scaling.cpus_per_worker), ("GPU", "gpus_per_worker", scaling.gpus_per_worker)):
        most = max(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"])
        if each > most:
            raise ConfigError(f"scaling.{field} is {each:g}, but no node has more than {most:g} {name}; lower it, or add a bigger node.")


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
    there = ray.cluster_resources(), ray.nodes(), most_resources()
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
        report = Report([Finding("refused", "configuration", f"does not load on the cluster: {error}")], versions(), None)
    else:
        with cluster(config):
            report = inspect(config)
    print(f"Looked at the cluster for {time.monotonic() - began_s:.1f} s.")
    print(MARK + redact(report.to_json()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
