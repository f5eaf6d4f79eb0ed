"""Batch prediction refuses invalid input before it starts a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from rich.console import Console

from ray_app.cli import predict as command
from ray_app.cli.predict import main
from ray_app.cluster.resources import ClusterCapacity
from ray_app.config.config import Config
from ray_app.data.dataset import open_dataset
from ray_app.data.ray_tasks import ActorPool
from ray_app.errors import ConfigError, DataError
from ray_app.predict import predict
from ray_app.predict.actor import Model
from ray_app.predict.predict import MADE_FROM, PredictSection, prepare_prediction
from ray_app.storage.files import put_json, read_json
from ray_app.task.tabular import TabularRegression
from tests.support.finished_run import CHAMPION, FinishedRun, make_champion_run, predict_command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> FinishedRun:
    return make_champion_run(tmp_path_factory.mktemp("storage"), digits)


@pytest.mark.rest
def test_invalid_predictions_are_refused_before_a_cluster_starts(
    run: FinishedRun, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = digits / "eval"
    table = pq.read_table(data / "part-00000.parquet")
    for name, content in {
        "blind": table.drop_columns(["image"]),
        "other": pa.table({"image": [b"no array"], "row_id": ["0"]}),
    }.items():
        (tmp_path / name).mkdir()
        pq.write_table(content, tmp_path / name / "part-00000.parquet")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    earlier_out = tmp_path / "made"
    earlier_out.mkdir()
    (earlier_out / "_made_from.json").write_text(
        json.dumps({"model": {"name": "digits", "version": "7"}, "batch_size": 256})
    )
    out, old = tmp_path / "out", str(run.job.paths.root)
    pixels = ("--task.init_args.pixel_max", "255")
    tabular = ["--task.class_path", "ray_app.task.tabular.TabularClassification", "--task.init_args", "{}"]
    for arguments, expected in (
        (
            predict_command(run, data, out, "--predict.model", "models:/digits@nobody"),
            "MLflow has no models:/digits@nobody",
        ),
        (predict_command(run, data, out, "--predict.model", "digits"), "it must be models:/NAME@ALIAS"),
        (predict_command(run, data, out, "--predict.run", str(tmp_path)), "no summary.json"),
        (predict_command(run, data, out), "No model is named"),
        (predict_command(run, data, out, *CHAMPION, "--predict.run", old), "both set"),
        (predict_command(run, data, out, *CHAMPION, "--predict.batch_size", "0"), "predict.batch_size is 0"),
        (
            predict_command(run, data, out, *CHAMPION, "--predict.columns", "row_id,colour"),
            "'colour', which is not in the data",
        ),
        (predict_command(run, data, out, *CHAMPION, *tabular), "has the task ray_app.task.image.ImageClassification"),
        (
            predict_command(run, data, out, *CHAMPION, *pixels),
            "pixel_max is 255.0, but digits version 1 was trained with",
        ),
        (predict_command(run, data, out, "--predict.run", old, *pixels), "was trained with"),
        (predict_command(run, tmp_path / "blind", out, *CHAMPION), "has no column 'image'"),
        (
            predict_command(run, tmp_path / "other", out, *CHAMPION),
            "holds bytes; in the training data of the model it holds array |u1",
        ),
        (predict_command(run, data, tmp_path / "full", *CHAMPION), "it does not hold predictions"),
        (
            predict_command(run, data, earlier_out, *CHAMPION),
            "model: {'name': 'digits', 'version': '7'}, now {'name': 'digits', 'version': '1'}",
        ),
    ):
        assert main(arguments) == 2, expected
        assert expected in capsys.readouterr().err
    assert not out.exists()
    assert [path.name for path in earlier_out.iterdir()] == ["_made_from.json"]


def test_data_with_equal_footers_and_other_values_is_refused(run: FinishedRun, digits: Path, tmp_path: Path) -> None:
    table, data = pq.read_table(digits / "eval" / "part-00000.parquet"), tmp_path / "data"
    order = list(range(table.num_rows))
    order[100], order[200] = order[200], order[100]
    footers = []
    for rows in (
        table,
        table.set_column(
            table.column_names.index("image"), table.schema.field("image"), table.column("image").take(order)
        ),
    ):
        data.mkdir(exist_ok=True)
        pq.write_table(rows, data / "part.parquet", compression="none", use_dictionary=False, write_statistics=False)
        footers.append(pq.read_metadata(data / "part.parquet"))
        section = PredictSection(data=str(data), out=str(tmp_path / "out"), run=str(run.job.paths.root))
        if len(footers) == 1:
            put_json(tmp_path / "out" / MADE_FROM, prepare_prediction(run.config, section).made_from)
    assert footers[0].equals(footers[1])
    with pytest.raises(ConfigError, match="content_digest"):
        prepare_prediction(run.config, section)


def test_a_model_with_other_parameters_than_registered_is_refused(run: FinishedRun) -> None:
    model = Model(run.job.task, safetensors.torch.save(dict(run.job.task.build_model().state_dict())), None, "0" * 64)
    with pytest.raises(Exception, match="its parameters have the digest"):
        model.load(torch.device("cpu"))


class ReachedError(Exception):
    """Raised where the pool of actors would be started."""


@pytest.mark.parametrize(("max_resources", "expected"), [({"CPU": 3.0}, 2), ({"CPU": 16.0}, 3)])
def test_actors_are_planned_for_a_cluster_that_scales_from_zero(
    run: FinishedRun,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_resources: dict[str, float],
    expected: int,
) -> None:
    max_actors: list[int] = []

    def map_in_actors(pool: ActorPool, *_: object) -> None:
        max_actors.append(pool.max_actors)
        raise ReachedError

    fake_ray = SimpleNamespace(put=lambda value: value)
    for name, fake in {
        "ray": fake_ray,
        "cluster": nullcontext,
        "cluster_capacity": lambda: ClusterCapacity({"CPU": 0.0}, max_resources=max_resources),
        "map_in_actors": map_in_actors,
    }.items():
        monkeypatch.setattr(command, name, fake)
    section = PredictSection(
        data=str(digits / "eval"), out=str(tmp_path / "out"), run=str(run.job.paths.root), workers=3
    )
    with pytest.raises(ReachedError):
        command.predict(prepare_prediction(run.config, section), run.config, section, Console(quiet=True))
    assert max_actors == [expected]


def test_an_output_folder_of_other_code_is_refused(
    run: FinishedRun, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PredictSection(data=str(digits / "eval"), out=str(tmp_path / "out"), run=str(run.job.paths.root))
    code = tmp_path / "task.py"
    monkeypatch.setattr(predict, "source_files", lambda path: {"task": code})
    code.write_text("scale = 1")
    put_json(tmp_path / "out" / MADE_FROM, prepare_prediction(run.config, section).made_from)
    prepare_prediction(run.config, section)
    code.write_text("scale = 2")
    with pytest.raises(ConfigError, match="was made from another model or data; name another folder:\n  - code: "):
        prepare_prediction(run.config, section)


def test_one_of_two_concurrent_predictions_into_one_folder_is_refused(
    run: FinishedRun, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [
        PredictSection(
            data=str(digits / "eval"), out=str(tmp_path / "out"), run=str(run.job.paths.root), batch_size=size
        )
        for size in (8, 16)
    ]
    first, second = (prepare_prediction(run.config, section) for section in sections)

    @contextmanager
    def first_writes_meanwhile(config: Config) -> Iterator[None]:
        del config
        put_json(first.out / MADE_FROM, first.made_from)
        yield

    fake_ray = SimpleNamespace(put=lambda value: value)
    capacity = ClusterCapacity({"CPU": 4.0})
    for name, fake in {
        "ray": fake_ray,
        "cluster": first_writes_meanwhile,
        "cluster_capacity": lambda: capacity,
    }.items():
        monkeypatch.setattr(command, name, fake)
    with pytest.raises(ConfigError, match="batch_size: 8, now 16"):
        command.predict(second, run.config, sections[1], Console(quiet=True))
    assert read_json(first.out / MADE_FROM) == first.made_from


def test_several_gpus_for_an_actor_are_refused(tmp_path: Path) -> None:
    section = PredictSection(data=str(tmp_path), out=str(tmp_path / "out"), num_gpus=2)
    with pytest.raises(ConfigError, match=r"predict.num_gpus is 2, but an actor computes on one GPU"):
        prepare_prediction(Config(), section)


def test_a_default_partition_is_a_missing_value_of_an_input(tmp_path: Path) -> None:
    for folder in ("k=1", "k=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0.0, 1.0]}), tmp_path / folder / "a.parquet")
    dataset = open_dataset(str(tmp_path))
    task = TabularRegression("y", ["x", "k"])
    with pytest.raises(DataError, match=r"k=__HIVE.*a.parquet, row 0: column 'k' of predict.data .* has no value"):
        predict.make_reader(dataset, task)
