"""The stored configuration and run log: those of the newest start, and those that another version wrote."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ray_app import compare_runs
from ray_app.config.config import Config
from ray_app.driver.finalize import stored_job
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import claim, prepare
from ray_app.report.facts import read_facts
from ray_app.runlog.journal import read_events
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import put_json
from ray_app.train.job import Job
from tests.support.jobs import digits_config


@pytest.fixture
def job(digits: Path, tmp_path: Path) -> Job:
    """Returns a run that one start has claimed."""
    config = digits_config(digits, tmp_path / "runs", run__name="run", data__eval_path=None)
    return claim(prepare(config), 1).job


def test_the_metric_of_the_newest_start_decides_the_best_checkpoint(job: Job) -> None:
    config = job.config.replace(evaluate__metric="loss", evaluate__mode="min", checkpoint__keep_last=7)
    # The third start changes nothing.
    for fence in (2, 3):
        newest_job = claim(prepare(config), fence).job
    assert read_config(job.paths) == newest_job.config
    assert (newest_job.best_metric, stored_job(job.paths).best_metric, read_facts(job.paths).metric) == (
        "loss",
        "loss",
        "loss",
    )
    [event] = read_events(job.paths, "reconfigured")
    fields = {
        "evaluate.metric": [None, "loss"],
        "evaluate.mode": [None, "min"],
        "checkpoint.keep_last": [job.config.checkpoint.keep_last, 7],
    }
    assert (event.fence, event.details["fields"]) == (2, fields)


@pytest.mark.rest
def test_stored_alternating_optimizers_are_complete_and_stable_over_starts(job: Job) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    turns = {
        "rest": {"class_path": "torch.optim.Adam", "parameters": ["*.weight"], "schedule": schedule},
        "biases": {"class_path": "torch.optim.SGD", "parameters": ["*.bias"], "init_args": {"lr": 0.1}, "steps": 2},
    }
    config = job.config.replace(
        run__name="turns", optimizer=asdict(Config().optimizer), optimizers=turns, schedule=None
    )
    first = claim(prepare(config), 1).job
    text = first.paths.config.read_text()
    assert ("betas" in text, "gamma" in text) == (True, True), "the stored configuration lacks default arguments"
    for fence in (2, 3):
        claim(prepare(config), fence)
    assert first.paths.config.read_text() == text
    assert read_events(first.paths, "reconfigured") == []
    claim(prepare(config.replace(checkpoint__keep_last=7)), 4)
    [event] = read_events(first.paths, "reconfigured")
    assert event.details["fields"] == {"checkpoint.keep_last": [config.checkpoint.keep_last, 7]}
    assert first.paths.config.read_text() == text.replace(f"keep_last: {config.checkpoint.keep_last}", "keep_last: 7")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("data:\n", "data:\n  shufle: true\n", "data.shufle is not a field"),
        ("data:\n", "data:\n  cach_dir: x\n", "data.cach_dir is not a field; the nearest is data.cache_dir"),
        ("seed: ", "sede: ", "sede is not a field; the nearest is seed"),
        ("data:\n", "gone:\n  a: 1\ndata:\n", "gone is not a field"),
    ],
)
def test_the_error_about_a_configuration_of_another_version_names_its_unknown_field(
    job: Job, before: str, after: str, message: str
) -> None:
    text = job.paths.config.read_text().replace(before, after, 1)
    job.paths.config.write_text(text)
    for read in (
        lambda: read_facts(job.paths),
        lambda: compare_runs([str(job.paths.root)]),
        lambda: prepare(job.config),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read()
        assert str(job.paths.config) in str(caught.value)
        assert "Use the version that wrote the run" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("events/00000000000000000001-told-1.json", {"what": "told"}),
        ("metrics/0000000001-0001-1.json", {"steps": [[1, 2]], "step": [1]}),
    ],
)
@pytest.mark.parametrize("version", [1, 9])
def test_the_error_about_a_file_of_another_version_names_it(
    job: Job, name: str, values: dict[str, Any], version: int
) -> None:
    put_json(job.paths.root / name, values | {"schema_version": version})
    with pytest.raises(
        ConfigError, match=f"{name} has schema version {version}; .* reads 2. Use the version that wrote it"
    ):
        read_facts(job.paths)
    put_json(job.paths.root / name, {"step": 3})
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        read_facts(job.paths)
