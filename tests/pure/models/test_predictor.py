"""An export takes photos, rows and texts as people have them, and answers with names of classes or numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from ray_app.data.dataset import open_dataset
from ray_app.errors import DataError, StorageError
from ray_app.ingest.ingest import ingest_files
from ray_app.models.export import load_model, write_export
from ray_app.models.inputs import read_decoded
from ray_app.models.predictor import ModelPredictor
from ray_app.storage.files import to_location
from ray_app.task.base import Task
from ray_app.task.image import ImageClassification
from ray_app.task.module import ModuleTask
from ray_app.task.schema import prepare_task
from ray_app.task.tabular import TabularRegression

SOURCE = {"run": "run", "step": 1, "params_digest": ""}


def export(task: Task, data: Path, out: Path) -> ModelPredictor:
    torch.manual_seed(1)
    prepared = prepare_task(task, open_dataset(str(data)).facts)
    rows: Any = read_decoded(prepared, str(data))
    write_export(
        prepared, prepared.build_model().eval(), {name: values[:2] for name, values in rows.items()}, out, SOURCE
    )
    return load_model(out)


def save_photos(folder: Path) -> list[Path]:
    """Saves a photo in each form that an ingest takes, with the classes `cat` and `dog`."""
    pixels = np.random.default_rng(0).integers(0, 255, (12, 9, 3), np.uint8)
    photo, exif = Image.fromarray(pixels), Image.Exif()
    exif[0x0112] = 6
    forms = {
        "turned.jpg": (photo, {"exif": exif}),
        "cmyk.jpg": (photo.convert("CMYK"), {}),
        "palette.png": (photo.quantize(16), {}),
        "alpha.png": (photo.convert("RGBA"), {}),
        "gray.png": (photo.convert("L"), {}),
        "deep.tiff": (Image.fromarray(pixels[..., 0].astype(np.uint16) * 256), {}),
    }
    for number, (name, (image, options)) in enumerate(forms.items()):
        file = folder / ("cat", "dog")[number % 2] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file, **options)
    return sorted(file for file in folder.rglob("*.*"))


def test_a_photo_is_decoded_as_the_ingest_and_the_evaluation_do(tmp_path: Path) -> None:
    files = save_photos(tmp_path / "photos")
    ingest_files(str(tmp_path / "data"), "images", str(tmp_path / "photos"))
    model = export(ImageClassification(size=8), tmp_path / "data", tmp_path / "out")
    stored = pq.read_table(next((tmp_path / "data").glob("*.parquet"))).to_pydict()
    names = [row_id.rpartition("/")[2] for row_id in stored["row_id"]]
    by_name = {file.name: file for file in files}
    expected = model.predict(str(tmp_path / "data"), scores=True)
    assert np.array_equal(model.predict([by_name[name] for name in names], scores=True), expected)
    for file in files:
        [scores] = model.predict(file, scores=True)
        with Image.open(file) as opened:
            for form in (str(file), file.read_bytes(), opened, {"image": file}, pd.DataFrame({"image": [str(file)]})):
                assert np.array_equal(model.predict(form, scores=True)[0], scores), type(form)
    answers = model.predict(tmp_path / "photos")
    assert answers == model.predict(files)
    answer = model.predict(np.asarray(Image.open(files[0]).convert("RGB")))
    assert answer.keys() == {"label", "probability", "probabilities"}
    assert answer["probabilities"].keys() == {"cat", "dog"}
    assert answer["probability"] == max(answer["probabilities"].values()) == answer["probabilities"][answer["label"]]
    for bad, reason in ((tmp_path / "no.jpg", "No such file"), (b"text", "not an image"), (np.ones((2, 2)), "float64")):
        with pytest.raises(DataError, match=f"(no.jpg|image 1, counted from 0) cannot be used: .*{reason}"):
            model.predict([files[0], bad])


def module_task(target: str, loss: str, outputs: int) -> ModuleTask:
    model = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": outputs}}
    return ModuleTask(model, ["x"], target, {"class_path": f"torch.nn.{loss}"})


@pytest.mark.parametrize(
    ("target", "loss", "outputs", "expected"),
    [
        ("label", "CrossEntropyLoss", 2, {"label", "probability", "probabilities"}),
        ("label", "BCEWithLogitsLoss", 1, {"label", "probability", "probabilities"}),
        ("many", "BCEWithLogitsLoss", 3, {"labels", "probabilities"}),
        ("number", "MSELoss", 1, None),
    ],
)
def test_the_answer_of_a_configured_task_follows_its_loss(
    tmp_path: Path, target: str, loss: str, outputs: int, expected: set[str] | None
) -> None:
    lists = {"x": np.eye(2, dtype=np.float32), "many": np.eye(2, 3, dtype=np.float32)}
    columns = {name: pa.FixedSizeListArray.from_arrays(pa.array(v.ravel()), v.shape[1]) for name, v in lists.items()}
    pq.write_table(pa.table(columns | {"label": [0, 1], "number": [0.5, 1.5]}), tmp_path / "rows.parquet")
    model = export(module_task(target, loss, outputs), tmp_path / "rows.parquet", tmp_path / "out")
    scores = torch.from_numpy(model.predict(lists["x"], scores=True))
    answers = model.predict(lists["x"])
    assert answers == model.predict({"x": lists["x"]}) == model.predict([{"x": row} for row in lists["x"]])
    if expected is None:
        assert answers == scores[:, 0].tolist()
        return
    assert all(answer.keys() == expected for answer in answers)
    likely = scores.softmax(1) if loss == "CrossEntropyLoss" else scores.sigmoid()
    assert list(answers[0]["probabilities"].values())[-1] == pytest.approx(float(likely[0, -1]))
    if target == "many":
        assert answers[1]["labels"] == [str(i) for i in range(3) if likely[1, i] > 0.5]


def test_a_row_of_a_table_is_answered_by_its_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0.0, 1.0], "b": [5.0, 3.0], "label": [1.0, 2.0]}), tmp_path / "rows.parquet")
    model = export(TabularRegression("label", hidden=[4]), tmp_path / "rows.parquet", tmp_path / "out")
    table = pd.DataFrame({"a": [0.0, 1.0], "b": [5.0, 3.0]})
    answers = model.predict(table)
    assert answers == model.predict(table, scores=True)[:, 0].tolist() == model.predict(pa.table(table))
    assert model.predict({"a": 0.0, "b": 5.0}) == model.predict(table.iloc[0]) == answers[0]


def rewrite_description(folder: Path, change: Any) -> None:
    """Changes `package.json` of an export, as an attacker would, without the digests of the files."""
    file = folder / "data" / "model" / "package.json"
    described = json.loads(file.read_text())
    change(described["task"])
    file.write_text(json.dumps(described))
    (folder / "export.json").unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda task: task.update(class_path="os.system"), "has the task os.system, but loading a package runs"),
        (lambda task: task.update(settings=None), "lacks the settings of its task"),
        (
            lambda task: task["settings"].update(
                evaluate_transforms=[
                    {
                        "class_path": "torchvision.transforms.v2.Compose",
                        "init_args": {
                            "transforms": [
                                {"class_path": "subprocess.call", "init_args": {"args": ["touch", "hacked"]}}
                            ]
                        },
                    }
                ]
            ),
            "evaluate_transforms name subprocess.call",
        ),
    ],
    ids=["class", "settings", "transforms"],
)
def test_an_export_runs_nothing_that_it_names(tmp_path: Path, change: Any, reason: str) -> None:
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4, np.float32)), 2), "label": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    export(module_task("label", "CrossEntropyLoss", 2), tmp_path / "rows.parquet", tmp_path / "out")
    rewrite_description(tmp_path / "out", change)
    model = load_model(tmp_path / "out")
    assert model.predict(np.zeros((1, 2), np.float32)).shape == (1, 2)
    with pytest.raises(DataError, match=f"{reason}.* Pass an array"):
        model.predict("cat.jpg")


def test_an_export_makes_no_loss_that_it_names(tmp_path: Path) -> None:
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4, np.float32)), 2), "label": [0, 1]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    export(module_task("label", "CrossEntropyLoss", 2), tmp_path / "rows.parquet", tmp_path / "out")
    spec = {"class_path": "os.mkdir", "init_args": {"path": str(tmp_path / "hacked")}}
    rewrite_description(tmp_path / "out", lambda task: task["settings"].update(loss_spec=spec, activation=None))
    assert load_model(tmp_path / "out").predict(np.zeros((1, 2), np.float32))[0]["label"] in ("0", "1")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.rest
def test_a_relative_path_after_the_current_folder_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents of two nodes of Ray on one machine unpack a job's package into one folder, one after the other."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    folder.rmdir()
    folder.mkdir()
    assert to_location("data") == folder / "data"
    folder.rmdir()
    with pytest.raises(StorageError, match=f"folder of this process was removed; start .*: '{folder}'"):
        to_location("data")
