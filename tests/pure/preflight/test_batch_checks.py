"""An evaluation of a row that depends on the rows of its batch is named with its remedy, and gets fixed batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ray_app import load_config
from ray_app.cli.evaluate import EvaluateOptions, evaluate_run
from ray_app.config.config import Config
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.journal import put_event
from ray_app.task.losses import Losses
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import to_batch
from tests.support.batch_models import DEPENDENT_TASKS, ROWS, configured, contrastive, write_data

LOSS = "The loss of a row depends on the other rows"
PADDING = "The model reads the padding of shorter rows"
MODEL = "The predictions of a row depend on the other rows"
BATCH_NORM = MODEL + r".*1 \(BatchNorm1d, track_running_stats\) normalizes by the statistics"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("batches") / "data")


def config_of(data: str, folder: Path, task: dict[str, Any], **fields: Any) -> Config:
    paths = {"data__path": data, "data__eval_path": data, "run__storage_path": str(folder)}
    settings = {
        "data__global_batch_size": 8,
        "evaluate__batch_size": 20,
        "tracking__enabled": False,
        "run__name": "run",
    }
    return load_config(task=task, **{**paths, **settings, **fields})


@pytest.mark.parametrize(
    ("task", "warning"),
    [
        (contrastive(), LOSS + ".*the 8 rows of a logical worker"),
        (contrastive(total=False), LOSS),
        (configured("Recurrent", ["tokens"]), PADDING),
        (configured("Recurrent", ["tokens"], pad_to=4), PADDING),
        (configured("pooled", ["tokens"]), PADDING),
        (configured("normalized", ["x"], model_args={"norm": "batch"}), BATCH_NORM),
        (configured("normalized", ["x"], model_args={"norm": "pixels"}), MODEL),
        (configured("BySize", ["x"]), MODEL),
        (configured("Recurrent", ["tokens", "tokens.mask"]), None),
        (configured("Recurrent", ["tokens"], pad_to=20), None),
        (configured("Recurrent", ["even"]), None),
        (configured("normalized", ["x"], model_args={"norm": "running"}), None),
        (configured("normalized", ["x"], model_args={"norm": "instance"}), None),
    ],
)
def test_what_depends_on_the_rows_of_a_batch_is_named(
    task: dict[str, Any], warning: str | None, data: str, tmp_path: Path
) -> None:
    prepared = prepare(config_of(data, tmp_path, task))
    assert bool(prepared.job.config.evaluate.fixed_batches) == (warning is not None)
    if warning is None:
        assert prepared.warnings == ()
        return
    [text] = prepared.warnings
    assert re.search(warning, text), text
    accepted = prepare(config_of(data, tmp_path, task, evaluate__fixed_batches=True))
    assert (accepted.warnings, accepted.job.config_digest) == ((), prepared.job.config_digest)


def test_a_value_that_sums_the_rows_of_a_batch_is_still_refused(data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a mean over rows.*set evaluate.fixed_batches: true"):
        prepare(config_of(data, tmp_path, contrastive(total=True)))
    assert prepare(config_of(data, tmp_path, contrastive(total=True), evaluate__fixed_batches=True)).warnings == ()


def test_a_metric_that_takes_only_some_scores_for_logits_is_refused_with_the_activation(
    data: str, tmp_path: Path
) -> None:
    auroc = {"class_path": "torchmetrics.classification.MulticlassAUROC", "init_args": {"num_classes": 3}}
    arguments: dict[str, Any] = {"model_args": {"norm": "running"}, "metrics": {"auroc": auroc}}
    with pytest.raises(ConfigError, match=r"'auroc' .* combined from .*task\.init_args\.activation"):
        prepare(config_of(data, tmp_path, configured("normalized", ["x"], activation="none", **arguments)))
    assert prepare(config_of(data, tmp_path, configured("normalized", ["x"], **arguments))).warnings == ()


def test_a_last_batch_of_one_row_that_the_model_does_not_take_is_refused(data: str, tmp_path: Path) -> None:
    task = configured("normalized", ["x"], model_args={"norm": "batch"})
    with pytest.raises(ConfigError, match=r"the data has 53 rows, evaluate.batch_size is 26"):
        prepare(config_of(data, tmp_path, task, evaluate__batch_size=26))


@pytest.mark.parametrize("name", DEPENDENT_TASKS)
def test_every_way_to_evaluate_has_the_batches_of_a_plain_loop(name: str, data: str, tmp_path: Path) -> None:
    prepared = prepare(config_of(data, tmp_path, DEPENDENT_TASKS[name]))
    job, section = prepared.job, prepared.job.config.evaluate
    model = job.task.build_model().eval()
    assert job.eval_source is not None
    arrays = load_all(fetch_in_process, job.eval_source).arrays
    losses = []
    with torch.no_grad():
        for low in range(0, ROWS, 20):
            batch = to_batch(arrays, slice(low, low + 20))
            losses += Losses.of(job.task.loss(job.task.forward(model, batch), batch)).values.tolist()
    values = {
        repr(
            combine(
                job.task,
                [
                    chunk
                    for part in range(parts)
                    for chunk in score(
                        job.task, model, arrays, 20, HOST, part, parts, chunk_rows=rows, fixed=section.fixed_batches
                    )
                ],
            ).values
        )
        # As workers and actors divide the rows, and as the gate of a retraining divides them into blocks.
        for parts, rows in ((1, None), (2, None), (3, None), (1, 7), (1, 40))
    }
    assert len(values) == 1
    assert combine(job.task, score(job.task, model, arrays, 20, HOST, fixed=True)).values["loss"] == pytest.approx(
        sum(losses) / ROWS, rel=1e-6
    )


def test_a_run_keeps_the_size_of_its_batches(data: str, tmp_path: Path) -> None:
    config = config_of(data, tmp_path, DEPENDENT_TASKS["padding"])
    job = claim(prepare(config), 1).job
    put_event(job.paths, "started", 1)
    assert claim(prepare(config), 2).resumes
    with pytest.raises(ConfigError, match=r"of 20 rows, so .*Set it to 20"):
        prepare(config.replace(evaluate__batch_size=10))
    with pytest.raises(ConfigError, match=r"of 20 rows, so .*Set it to 20"):
        evaluate_run(EvaluateOptions(run=str(job.paths.root), batch_size=10), None, Console(quiet=True))
