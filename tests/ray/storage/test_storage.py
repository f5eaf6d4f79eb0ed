"""Whole runs on S3, and two drivers of one run."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import run_training
from ray_app.checkpoint.format import params_digest
from ray_app.config.config import Config
from ray_app.driver.run import Faults
from ray_app.errors import LeaseLostError, NonFiniteError, RunHeldError
from ray_app.runlog.journal import read_events
from ray_app.runlog.lease import LeaseHolder, LeaseRecord
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_files, list_tree, put_atomic, put_json, read_json
from ray_app.storage.object_stores import ObjectPath
from ray_app.train.job import Hooks, Job
from tests.support.injector import RaiseNonFinite
from tests.support.mlflow_server import make_database
from tests.support.paths import ROOT
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("ray_cluster")
ShortRun = Callable[..., Config]


@pytest.mark.rest
def test_a_run_on_s3_is_bit_identical_after_failures(
    make_short_config: ShortRun,
    reference_run: dict[str, Any],
    digits: Path,
    s3_folder: ObjectPath,
    s3_server: S3Server,
    tmp_path: Path,
) -> None:
    """The data is on S3; the run fails, its newest checkpoint is damaged, it continues on other workers with an
    evaluator, and requests to the server fail.
    """
    for name, file in list_tree(digits).items():
        put_atomic(s3_folder / "digits" / name, file.read_bytes())
    config = make_short_config(
        run__storage_path=str(s3_folder),
        data__path=str(s3_folder / "digits" / "train"),
        data__eval_path=str(s3_folder / "digits" / "eval"),
        tracking__enabled=True,
        tracking__uri=make_database(tmp_path / "mlflow.db"),
        scaling__min_workers=2,
        scaling__max_workers=2,
    )
    stop = RaiseNonFinite(str(tmp_path / "stopped"), step=20)
    with pytest.raises(NonFiniteError, match="injected"):
        run_training(config, faults=Faults(train=Hooks(after_step=stop)))
    paths = RunPaths(s3_folder / "run")
    assert stop.num_fired == 2
    assert read_json(paths.summary)["status"] == "failed"
    model_file = paths.checkpoint(16, 1) / "model.safetensors"
    data = bytearray(model_file.read_bytes())
    data[-1] ^= 1
    model_file.put(bytes(data), if_absent=False)
    s3_server.fail("(PUT|POST|GET) .*/checkpoints/", times=2)
    result = run_training(config.replace(scaling__min_workers=1, scaling__max_workers=3))
    summary = result.summary
    assert summary == read_json(paths.summary)
    assert summary["status"] == "finished"
    assert summary["params_digest"] == reference_run["params_digest"]
    assert summary["checkpoints"]["fallbacks"] == 1
    [fallback] = read_events(paths, "fallback")
    assert fallback.details["checkpoint"] == "step-00000016-0001"
    assert "differs" in fallback.details["reason"]
    assert summary["restarts"]["driver"] == 1
    assert [e.details["step"] for e in read_events(paths, "resumed")] == [8]
    assert Counter(e.step for e in result.evaluations()) == Counter([8, 16, 24, 30])
    assert params_digest(dict(result.load_model("newest").state_dict())) == reference_run["params_digest"]
    assert len(result.metrics()) == 30
    assert summary["mlflow_run_id"] == read_json(paths.tracking)["run_id"]
    assert sorted(list_files(paths.root)) == [
        "code.json",
        "config.yaml",
        "data.json",
        "example.parquet",
        "manifest.json",
        "report.html",
        "schema.json",
        "summary.json",
        "task.json",
        "tracking.json",
    ]


@pytest.mark.rest
def test_a_second_driver_of_a_run_is_refused(make_short_config: ShortRun, tmp_path: Path) -> None:
    """The second driver ends with exit code 2 before it writes, and the first continues."""
    config = make_short_config(train__max_steps=2)
    refusals: list[subprocess.CompletedProcess[str]] = []
    has_started = threading.Event()

    def start_another(job: Job) -> None:
        if not has_started.is_set():
            has_started.set()
            (tmp_path / "config.yaml").write_text(config.to_yaml())
            command = [sys.executable, str(ROOT / "jobs" / "train.py"), "--config", str(tmp_path / "config.yaml")]
            environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
            refusals.append(
                subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
            )
            with pytest.raises(RunHeldError):
                run_training(config)

    assert run_training(config, observe=start_another).status == "finished"
    [refused] = refusals
    assert refused.returncode == 2, refused.stderr
    assert "RunHeldError: The run 'run' is being written by process" in refused.stderr
    assert list_files(tmp_path / "runs" / "run" / "fences") == ["0001.json"]
    assert run_training(config).status == "finished", "a released run can be started again"


def test_a_driver_that_lost_its_lease_ends_and_writes_nothing(make_short_config: ShortRun, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "run")

    def take_over(job: Job) -> None:
        if read_events(paths, "checkpointed") and not paths.fence(2).exists():
            put_json(paths.fence(2), asdict(LeaseRecord(LeaseHolder("node-7", "another", 1, 1), 0.0, 0.0, 30.0)))

    config = make_short_config(train__epochs=40, train__max_steps=None, checkpoint__every_steps=8)
    with pytest.raises(LeaseLostError, match=r"taken over by its start number 2 .* on node-7"):
        run_training(config, observe=take_over)
    assert not paths.summary.exists()
    kinds: list[Any] = [e.kind for e in read_events(paths)]
    assert "run_failed" not in kinds
    assert "finished" not in kinds
