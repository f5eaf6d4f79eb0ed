"""Fixtures: one Ray cluster and one small data set for all tests that need real Ray."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_app import load_config, run_training
from ray_app.config.config import Config
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.process import set_variables
from ray_app.runlog.journal import read_records
from ray_app.runlog.paths import RunPaths
from tests.support.mlflow_server import make_database
from tests.support.paths import ROOT
from tests.support.s3_server import CREDENTIALS

CANARY = {"CANARY_API_KEY": "canary-of-the/environment'+1"}
"""A secret in the environment of every worker."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    with set_variables(PYTHONPATH=str(ROOT), **CREDENTIALS, **CANARY):
        for last in (False, False, True):
            try:
                ray.init(
                    address="local",
                    num_cpus=8,
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=500 << 20,
                )
                break
            # Ray's limit of 30 s for the start of a node is too short on a busy machine, and cannot be configured.
            except Exception as error:
                if last or "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "data"
    ingest(IngestOptions(source="digits", out=str(out)))
    return out


@pytest.fixture
def make_short_config(digits: Path, tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations of a run of 30 steps over one and a third epochs, with batch-norm, dropout and
    augmentation.
    """

    def make(**fields: Any) -> Config:
        defaults = {
            "data__path": str(digits / "train"),
            "data__shuffle_window_rows": 100,
            "train__epochs": 2,
            "train__max_steps": 30,
            "checkpoint__every_steps": 8,
            "checkpoint__every_epochs": None,
            "checkpoint__keep_last": 10,
            "run__storage_path": str(tmp_path / "runs"),
            "run__name": "run",
            "tracking__enabled": False,
        }
        config = load_config(ROOT / "conf" / "digits.yaml")
        short_config = config.replace(data__eval_path=None).replace(**(defaults | fields))
        database_path = Path(short_config.run.storage_path) / "mlflow.db"
        if short_config.tracking.enabled and short_config.tracking.uri is None and not database_path.exists():
            make_database(database_path)
        return short_config

    return make


@pytest.fixture(scope="session")
def reference_summary() -> dict[str, Any]:
    """The summary of the first undisturbed short run, with which all other runs are compared."""
    return {}


@pytest.fixture
def reference_run(make_short_config: Callable[..., Config], reference_summary: dict[str, Any]) -> dict[str, Any]:
    """The summary and the record of the short run in one process, without Ray."""
    if not reference_summary:
        result = run_training(
            make_short_config(run__name="reference", train__strategy="single", scaling__max_workers=1)
        )
        reference_summary.update(result.summary, record=record_of(Path(result.path)))
    return reference_summary


def record_of(run: Path) -> list[tuple[int, float, list[int], list[int]]]:
    records, _ = read_records(RunPaths(run))
    return [(step, r.loss, r.rows, r.row_hash) for step, r in sorted(records.items())]
