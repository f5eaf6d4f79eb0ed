"""The shipped configurations pass the start checks for GPUs that do not need the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_app.cluster.resources import ClusterCapacity, workers_that_fit
from ray_app.driver.parsing import parse_with_sections
from ray_app.preflight.prepare import prepare
from ray_app.retrain.options import RetrainSection
from tests.support.paths import ROOT
from tests.support.shipped_data import write_shipped_data

FILES = sorted((ROOT / "conf").glob("*.yaml"))
VARIANTS: dict[str, dict[str, Any]] = {
    "an evaluator with a GPU": {"evaluate__num_gpus": 1},
    "workers evaluate": {"evaluate__where": "workers", "evaluate__num_gpus": 0},
    "single": {"train__strategy": "single", "scaling__min_workers": 1, "evaluate__num_gpus": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shipped")


# The start checks of each of these configurations take ten seconds.
LARGE = ("resnet50_imagenet", "detection", "segmentation")
# Those of these take seconds and are quickest in one process.
MEDIUM = ("language_model", "retrain_digits", "text")
CASES = [
    pytest.param(
        file,
        fields,
        id=f"{variant}-{file.stem}",
        marks=pytest.mark.rest if file.stem in LARGE or (file.stem in MEDIUM and variant != "single") else (),
    )
    for variant, fields in VARIANTS.items()
    for file in FILES
]


@pytest.mark.rest
@pytest.mark.parametrize(("file", "fields"), CASES)
def test_a_shipped_configuration_starts_on_gpus(
    file: Path, fields: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    data = folder / file.stem
    path = str(data if data.exists() else write_shipped_data(file.stem, data))
    config, _ = parse_with_sections(
        ["--config", str(file)], {"retrain": RetrainSection}, "any job", exit_on_error=False
    )
    config = config.replace(
        data__path=path, data__eval_path=path, run__storage_path=str(tmp_path), tracking__enabled=False
    )
    prepared = prepare(config.replace(scaling__gpus_per_worker=1, tracking__registered_model=None, **fields))
    job = prepared.job
    assert job.config.scaling.gpus_per_worker == 1
    assert job.workers_evaluate == (fields.get("evaluate__where") == "workers")
    assert (prepared.evaluation_job is None) == job.workers_evaluate
    max_workers = 1 if fields.get("train__strategy") == "single" else config.scaling.worker_limit
    assert workers_that_fit(job.config, ClusterCapacity({"CPU": 128.0, "GPU": max_workers + 1.0})) == max_workers
