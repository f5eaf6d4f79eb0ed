"""A table's raw rows get the same answer from the run's task, a batch prediction, an export and an MLflow model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_app import load_config, load_model
from ray_app.checkpoint.format import params_digest
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import RowSource, fetch_in_process, load_all
from ray_app.devices import HOST
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.models.export import write_export
from ray_app.models.inputs import read_decoded
from ray_app.models.package import make_package
from ray_app.predict.predict import PredictSection, prepare_prediction
from ray_app.task.ragged import to_batch
from ray_app.task.schema import prepare_task
from ray_app.task.tabular import TabularClassification

TRAIN = """age,sex,cabin,fare,label
22,male,,7.25,no
38,female,C85,71.28,yes
,female,,7.92,yes
35,female,C85,53.1,yes
35,male,,8.05,no
54,male,E46,51.86,no
"""
RAW = """age,sex,cabin,fare
,female,,7.25
61,unknown,E46,
"""
ARGUMENTS = {
    "missing": {"age": "indicator", "fare": "median", "cabin": "category"},
    "categories": ["sex", "cabin"],
    "standardize": ["age", "fare"],
    "hidden": [8],
}


@pytest.mark.rest
def test_a_row_of_a_csv_file_gets_the_same_scores_everywhere(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    import mlflow.pyfunc
    import pandas as pd

    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "raw.csv").write_text(RAW)
    ingest(IngestOptions("csv", str(tmp_path / "train"), str(tmp_path / "train.csv"), label="label"))
    ingest(IngestOptions("csv", str(tmp_path / "raw"), str(tmp_path / "raw.csv")))
    torch.manual_seed(1)
    task = prepare_task(TabularClassification(**ARGUMENTS), open_dataset(str(tmp_path / "train")).facts)
    model = task.build_model().eval()
    example = read_decoded(task, str(tmp_path / "train"))
    source = {"run": "run", "step": 1, "params_digest": params_digest(model.state_dict())}
    write_export(task, model, example, tmp_path / "export", source)
    make_package(task, model, example, tmp_path / "version")
    assert not [warning for warning in recwarn if "input example" in str(warning.message)]

    raw = pd.read_csv(tmp_path / "raw.csv")
    exported = load_model(tmp_path / "export").predict(raw, scores=True)
    assert np.array_equal(exported, mlflow.pyfunc.load_model(str(tmp_path / "version")).predict(raw))

    config = load_config(
        None,
        task__class_path="ray_app.task.tabular.TabularClassification",
        task__init_args=ARGUMENTS,
        data__path=str(tmp_path / "train"),
    )
    section = PredictSection(str(tmp_path / "raw"), str(tmp_path / "out"), str(tmp_path / "export"))
    prediction = prepare_prediction(config, section)
    assert any("'sex' that the training data lacks ('unknown')" in line for line in prediction.columns)
    source = RowSource(prediction.reader, open_dataset(str(tmp_path / "raw")).manifest, 100)
    batch = to_batch(load_all(fetch_in_process, source).arrays)
    with torch.inference_mode():
        predicted = prediction.job.model.load(HOST)(batch)
        trained = task.forward(model, batch)
    # The rows of the data set are in the order of a hash.
    assert sorted(predicted.tolist()) == sorted(exported.tolist())
    assert torch.equal(predicted, trained)
